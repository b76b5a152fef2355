"""Small models: of fastText, made of random numbers in the format that it writes, and of KenLM."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import numpy as np

WORDS = [b"</s>", b"the", b"of", "größe".encode(), b"a", b"__label__", "中".encode()]
LABELS = [b"__label__good", b"__label__bad", "__label__übel".encode()]
LOSSES = {"hs": 1, "ns": 2, "softmax": 3, "ova": 4}
DIMENSIONS = 5


def quantised(rows: int, columns: int, rng: np.random.Generator, width: int, norms: bool) -> bytes:
    parts = -(-columns // width)
    codes = rng.integers(0, 256, rows * parts, np.uint8).tobytes()
    last = columns - (parts - 1) * width
    data = struct.pack("<?qqi", norms, rows, columns, rows * parts) + codes
    data += struct.pack("<4i", columns, parts, width, last)
    data += rng.normal(size=columns * 256).astype(np.float32).tobytes()
    if norms:
        data += rng.integers(0, 256, rows, np.uint8).tobytes() + struct.pack("<4i", 1, 1, 1, 1)
        data += rng.normal(size=256).astype(np.float32).tobytes()
    return data


def model_bytes(
    loss: str = "softmax",
    *,
    ngrams: tuple[int, int, int] = (1, 2, 4),
    pruned: bool = False,
    labels: Sequence[bytes] = LABELS,
    dimensions: int = DIMENSIONS,
    seed: int = 1,
) -> bytes:
    """A model as fastText writes it: random numbers, of 97 buckets all or 40 (then quantised)."""
    rng, buckets = np.random.default_rng(seed), 97
    word_ngrams, least, most = ngrams
    numbers = (dimensions, 5, 5, 1, 5, word_ngrams, LOSSES[loss], 3, buckets, least, most, 100, 1e-4)
    kept = rng.permutation(buckets)[:40] if pruned else None
    data = struct.pack("<2i12id", 793712314, 12, *numbers)
    data += struct.pack("<3iqq", len(WORDS) + len(labels), len(WORDS), len(labels), 99, 40 if pruned else -1)
    for kind, names in enumerate((WORDS, labels)):
        for count, name in enumerate(names):
            data += name + b"\0" + struct.pack("<qb", 50 - 7 * count % 50, kind)
    if kept is not None:
        data += bytes(np.stack([kept, rng.permutation(40)], axis=1).astype(np.int32).data)
        data += b"\1" + quantised(len(WORDS) + 40, dimensions, rng, 2, norms=True)
        return data + b"\1" + quantised(len(labels), dimensions, rng, 3, norms=False)
    for rows in (len(WORDS) + buckets, len(labels)):
        values = rng.normal(size=rows * dimensions).astype(np.float32).tobytes()
        data += b"\0" + struct.pack("<qq", rows, dimensions) + values
    return data


ARPA = """\\data\\
ngram 1=5
ngram 2=2

\\1-grams:
-2.0\t<unk>
0\t<s>\t-0.5
-1.0\t</s>
-0.5\tthe\t-0.25
-1.5\tcat

\\2-grams:
-0.125\t<s> the
-0.75\tthe cat

\\end\\
"""


def random_arpa(order: int, seed: int) -> str:
    """A model of random numbers, of which each n-gram's beginning is one, but not each one's end."""
    rng = random.Random(seed)
    words = ["<unk>", "</s>", "<s>", *(f"w{number}" for number in range(6)), "größe", "étude", "中文"]
    sections: list[list[tuple[str, ...]]] = [[(word,) for word in words]]
    for _ in range(order - 1):
        longer = {(*rng.choice(sections[-1]), rng.choice(words)) for _ in range(60)}
        sections.append(
            sorted(ngram for ngram in longer if "<s>" not in ngram[1:] and "</s>" not in ngram[:-1])
        )
    lines = ["\\data\\", *(f"ngram {size}={len(section)}" for size, section in enumerate(sections, 1)), ""]
    for size, section in enumerate(sections, 1):
        lines.append(f"\\{size}-grams:")
        for ngram in section:
            backoff = f"\t{-rng.expovariate(1):.5f}" if size < order and rng.random() < 0.7 else ""
            lines.append(f"{-rng.expovariate(1):.6f}\t{' '.join(ngram)}{backoff}")
        lines.append("")
    return "\n".join([*lines, "\\end\\", ""])
