"""A small static model: a WordPiece tokenizer and random token vectors, in files as model2vec writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

__all__ = ["make_static_model", "word_piece", "write_safetensors"]

_KINDS = {"<f4": "F32", "<f2": "F16", "<f8": "F64", "|i1": "I8", "<i4": "I32", "<i8": "I64"}


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write tensors as the package safetensors does."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        offsets = [at, at + tensor.nbytes]
        header[name] = {
            "dtype": _KINDS[tensor.dtype.str],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    body = b"".join(tensor.tobytes() for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def word_piece(words: Sequence[str]) -> tokenizers.Tokenizer:
    """A tokenizer as BERT's: the words, their characters as pieces, and [UNK]."""
    letters = sorted(
        {letter for word in words for letter in word} | {*"abcdefghijklmnopqrstuvwxyz0123456789"}
    )
    tokens = ["[PAD]", "[UNK]", *letters, *(f"##{one}" for one in letters), *".,;:!?-()'", *words]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(["[PAD]", "[UNK]"])
    return made


def make_static_model(folder: Path, words: Sequence[str], dimensions: int = 32, seed: int = 5) -> None:
    """Write vectors.safetensors and words.json, its tokenizer, into a folder."""
    tokenizer = word_piece(words)
    tokenizer.save(str(folder / "words.json"))
    shape = tokenizer.get_vocab_size(), dimensions
    vectors = np.random.default_rng(seed).standard_normal(shape).astype("<f4")
    write_safetensors(folder / "vectors.safetensors", {"embeddings": vectors})
