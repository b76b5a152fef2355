"""A small corpus with a tokenizer and a recipe, and what tests ask of the datasets built from it."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

__all__ = ["EOS", "make_corpus", "text_of", "train_bpe", "tree"]

EOS = "<|endoftext|>"
RECIPE = """\
inputs:
  - {path: "plain-*.jsonl", source: plain, metadata: [number]}
  - {path: "tables/*.parquet", source: tables}
  - {path: "lines.jsonl.gz", source: zipped}
filters: [{length: {min_words: 3}}]
dedup: {exact: {}}
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 64}
output: {path: out, shard_bytes: 8KiB}
"""


def text_of(number: int) -> str:
    """A text that no other number has; each tenth is short enough to be dropped."""
    if number % 10 == 9:
        return f"short {number}"
    word = hashlib.sha256(str(number).encode()).hexdigest()
    return f"document {number} says {word} " + "and more words " * (number * 7 % 19)


def train_bpe(
    texts: Iterable[str], *, vocabulary: int = 300, special: Sequence[str] = (EOS,)
) -> tokenizers.Tokenizer:
    """A small byte-level BPE."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


@lru_cache(maxsize=1)
def _tokenizer() -> str:
    return str(train_bpe([text_of(n) for n in range(50)], vocabulary=400).to_str())


def make_corpus(folder: Path, documents: int = 400, recipe: str = RECIPE) -> Path:
    """Write the inputs, tokenizer.json and recipe.yaml; returns the recipe. Some texts occur twice."""
    (folder / "tables").mkdir(parents=True)
    lines = [json.dumps({"text": text_of(n), "number": n, "id": f"n{n}"}) for n in range(documents)]
    quarter = documents // 4
    (folder / "plain-0.jsonl").write_text("\n".join(lines[:quarter]) + "\n")
    (folder / "plain-1.jsonl").write_text("\n".join(lines[quarter : 2 * quarter]))
    rows = {"text": [text_of(n) for n in range(2 * quarter - 20, 3 * quarter)]}
    pq.write_table(pa.table(rows), folder / "tables" / "some.parquet", row_group_size=50)
    repeated = lines[:15] + lines[3 * quarter :]
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress("\n".join(repeated).encode(), mtime=0))
    (folder / "tokenizer.json").write_text(_tokenizer())
    (folder / "recipe.yaml").write_text(recipe)
    return folder / "recipe.yaml"


def tree(folder: Path) -> dict[str, str]:
    """{name: SHA-256} of every file below a folder, hidden ones too."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
