"""What fastText predicts, in plain Python: the kernel of `kernels/fasttext.py` is tested equal to it."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import numpy as np

from shardkit.writers.kernels.fasttext_model import LABEL_PREFIX, FastTextModel

BASIS, PRIME, MASK = 2166136261, 16777619, 0xFFFFFFFF  # FNV-1a, 32 bits
NEXT = 116049371  # how fastText chains the hashes of tokens
EPSILON = 1e-5  # that fastText adds to every probability before its logarithm
_END = b"</s>"


_SPACES = re.compile(rb"[ \n\r\t\v\f\0]+")


def reference_rows(model: FastTextModel, text: bytes) -> list[int]:
    """Numbers of the rows of `inputs` that a text is the mean of, in plain Python."""
    edges = model.word_offsets.tolist()
    words = {model.words[a:b].tobytes(): i for i, (a, b) in enumerate(pairwise(edges))}
    rows: list[int] = []
    hashes: list[int] = []
    ngrams: list[int] = []
    for token in [*filter(None, _SPACES.split(text)), _END]:
        word = words.get(token)
        if word is not None:
            rows.append(word)
        elif token.startswith(LABEL_PREFIX.encode()):
            continue
        if token != _END:
            ngrams += _reference_ngrams(model, token)
        value = _reference_hash(token)
        hashes.append(value - (value >> 31 << 32))  # signed, 32 bits
    for at, first in enumerate(hashes):
        chained = first
        for following in hashes[at + 1 : at + model.word_ngrams]:
            chained = chained * NEXT + following
            ngrams.append(chained % (1 << 64))
    buckets = [value % model.buckets for value in ngrams]
    if len(model.pruned):
        set_bits = np.unpackbits(model.pruned[:, 0].copy().view(np.uint8), bitorder="little")
        kept = {bucket: row for row, bucket in enumerate(np.flatnonzero(set_bits).tolist())}
        buckets = [kept[bucket] for bucket in buckets if bucket in kept]
    return rows + [len(words) + bucket for bucket in buckets]


def _reference_ngrams(model: FastTextModel, token: bytes) -> list[int]:
    """Hashes of the n-grams of the characters of <token>; a lone < or > is none."""
    edges = [at for at, byte in enumerate(token) if byte & 0xC0 != 0x80] + [len(token)]
    marked = [b"<", *(token[a:b] for a, b in pairwise(edges)), b">"]
    found = []
    for first in range(len(marked)):
        for size in range(max(1, model.min_ngram), model.max_ngram + 1):
            inside = first + size <= len(marked)
            if inside and not (size == 1 and first in (0, len(marked) - 1)):
                found.append(_reference_hash(b"".join(marked[first : first + size])))
    return found


def _reference_hash(data: bytes) -> int:
    value = BASIS
    for byte in data:
        value = (value ^ (byte | 0xFFFFFF00 if byte >= 128 else byte)) * PRIME & MASK
    return value


def reference_scores(model: FastTextModel, text: bytes) -> list[float]:
    """The probabilities of one text's labels, in plain Python."""
    rows = reference_rows(model, text)
    if not rows:
        return [0.0] * len(model.labels)
    outputs = (model.outputs @ model.inputs[rows].astype(np.float64).mean(axis=0)).tolist()
    if model.loss == "hs":
        scores = [1.0] * (2 * len(model.labels) - 1)
        for inner in range(len(model.tree) - 1, -1, -1):
            right = 1 / (1 + math.exp(-outputs[inner]))
            left_child, right_child = model.tree[inner].tolist()
            scores[left_child] = scores[len(model.labels) + inner] * (1 - right + EPSILON)
            scores[right_child] = scores[len(model.labels) + inner] * (right + EPSILON)
        return scores[: len(model.labels)]
    if model.loss == "softmax":
        powers = np.exp(np.array(outputs) - max(outputs))
        return [float(value) + EPSILON for value in powers / powers.sum()]
    steps = [math.floor((value + 8) * 32) / 32 - 8 for value in outputs]
    sigmoids = [
        (value > 8) if abs(value) > 8 else 1 / (1 + math.exp(-step))
        for value, step in zip(outputs, steps, strict=True)
    ]
    return [float(value) + EPSILON for value in sigmoids]
