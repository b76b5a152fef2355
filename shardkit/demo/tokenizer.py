"""A byte-level BPE tokenizer, trained on a sample of the corpus in seconds and saved as `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from shardkit.demo.corpus import Document
from shardkit.errors import MissingExtraError

__all__ = ["EOS", "train_tokenizer"]

EOS = "<|endoftext|>"


def train_tokenizer(
    file: Path, documents: Sequence[Document], *, vocabulary: int = 8192, sample_bytes: int = 4_000_000
) -> int:
    """Train on every n-th document, about `sample_bytes` in all; writes `file`; the vocabulary's size."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise MissingExtraError("tokenizers", "write", "the demo") from error

    total = sum(len(document.text) for document in documents)
    stride = max(1, -(-total // sample_bytes))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def sample() -> Iterator[str]:
        for document in documents[::stride]:
            yield document.text

    tokenizer.train_from_iterator(sample(), trainer=trainer)
    tokenizer.save(str(file))
    return int(tokenizer.get_vocab_size())
