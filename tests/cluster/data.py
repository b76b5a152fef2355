"""The corpus of the lab: made of a seed, with equal and alike documents."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import numpy as np

from support.small_build import EOS, train_bpe

__all__ = ["corpus", "recipe", "tokenizer"]

_RECIPE = """\
inputs:
  - path: s3://{bucket}/raw/*.jsonl.gz
    base: s3://{bucket}/raw
    source: web
filters: [{{length: {{min_words: 20}}}}]
dedup: {{exact: {{}}, near: {{}}}}
tokenizer: {{path: tokenizer.json, eos: "{eos}"}}
pack: {{sequence_length: 512}}
output: {{path: out, shard_bytes: 256KiB, hashes: [xxh64]}}
memory: 512MB
"""


def recipe(bucket: str) -> str:
    """Return the recipe of the lab's builds, of the corpus in this bucket."""
    return _RECIPE.format(bucket=bucket, eos=EOS)


_WORDS, _VOCABULARY = 200, 20_000  # words of a document, and of the language
_EQUAL, _ALIKE = 0.05, 0.15  # of the documents


def corpus(files: int, file_bytes: int, seed: int = 17) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of gzipped files of JSON lines, about `file_bytes` of text each."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = np.array(["".join(rng.choice(letters, rng.integers(3, 10))) for _ in range(_VOCABULARY)])
    earlier: list[str] = []
    for file in range(files):
        lines: list[str] = []
        size = 0
        while size < file_bytes:
            kind = rng.random()
            if earlier and kind < _EQUAL + _ALIKE:
                text = earlier[rng.integers(len(earlier))]
                if kind >= _EQUAL:
                    text = f"{words[rng.integers(_VOCABULARY)]} {text}"
            else:
                # Words as frequent as in a language, and numbers that no other document has.
                numbers = (rng.random(_WORDS) ** 3 * _VOCABULARY).astype(int)
                text = " ".join(words[numbers])
                earlier.append(text)
            lines.append(json.dumps({"text": text, "id": f"{file}-{len(lines)}"}))
            size += len(text)
        yield f"part-{file:03}.jsonl.gz", gzip.compress("\n".join(lines).encode(), 1, mtime=0)


def tokenizer() -> str:
    """Return tokenizer.json: a byte-level BPE of the corpus's own words."""
    [(_, data)] = corpus(1, 100_000)
    texts = [json.loads(line)["text"] for line in gzip.decompress(data).splitlines()]
    return str(train_bpe(texts, vocabulary=2000).to_str())
