"""fastText classification models (.bin, .ftz) as arrays, read straight from the file.

The file is what fastText 0.9 writes (version 11 or 12): arguments, dictionary, input matrix, output matrix.
Quantized matrices are expanded to float32; large plain ones are memory-mapped, so that all processes of a
machine share them. `fasttext.py` computes predictions from these arrays.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from shardkit.errors import RecipeError
from shardkit.files import LACKING
from shardkit.kernels.utf8 import join_runs

LABEL_PREFIX = "__label__"
_MAGIC, _VERSIONS = 793712314, (11, 12)

_ARGUMENTS = (
    "dim", "ws", "epoch", "min_count", "neg", "word_ngrams", "loss", "model", "bucket", "minn", "maxn",
)  # fmt: skip

_LOSSES = {1: "hs", 2: "ns", 3: "softmax", 4: "ova"}
_SUPERVISED = 3
_CENTROIDS = 256  # number of centroids of a product quantizer, because a code is one byte
_MAX_DIMENSIONS, _MAX_LABELS, _MAX_NGRAM = 4096, 1 << 20, 256  # sanity limits, far above any model in use
_MAX_ROWS = 1 << 31
_LINE_BYTES = 64  # size of a cache line
_COPIED_BYTES = 16 << 20  # larger matrices are not copied but mapped: processes share them, maybe unaligned


@dataclass(frozen=True)
class FastTextModel:
    """A supervised model with d dimensions, w words and L labels.

    Row i < w of `inputs` float32[rows, d] belongs to word i; the rows after these belong to the buckets into
    which n-grams are hashed, in order. If `pruned` uint64[m, 2] is not empty, only some buckets exist: bucket
    b exists if bit b % 64 of pruned[b // 64, 0] is set, and pruned[b // 64, 1] is the number of existing
    buckets below b // 64 * 64. This form is compact, because it is read at random positions. The UTF-8 of
    word i is words[word_offsets[i]:word_offsets[i + 1]]. For a hierarchical softmax, row i of `tree`
    int32[L - 1, 2] has the two children of inner node L + i, whose numbers are less than L + i; for other
    losses, `tree` is empty.
    """

    labels: tuple[str, ...]
    loss: str  # name of the loss function: hs, ns, softmax or ova
    word_ngrams: int
    buckets: int
    min_ngram: int
    max_ngram: int
    words: npt.NDArray[np.uint8]
    word_offsets: npt.NDArray[np.int64]
    pruned: npt.NDArray[np.uint64]
    inputs: npt.NDArray[np.float32]
    outputs: npt.NDArray[np.float32]
    tree: npt.NDArray[np.int32]

    @property
    def dimensions(self) -> int:
        """The length of the vector of a word or text."""
        return int(self.inputs.shape[1])


def aligned(shape: tuple[int, ...], kind: Any) -> npt.NDArray[Any]:
    """Return an array of zeros, aligned so that a row of 64 bytes is in one cache line."""
    count = math.prod(shape) * np.dtype(kind).itemsize
    room = np.zeros(count + _LINE_BYTES, np.uint8)
    first = -room.ctypes.data % _LINE_BYTES
    lined: npt.NDArray[Any] = room[first : first + count].view(kind).reshape(shape)
    return lined


def load_fasttext(path: Path) -> FastTextModel:
    """Read a model file. Raises RecipeError if it cannot be read or is not a supervised fastText model."""
    try:
        file = _File(path)
        return _parse(file)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror or error}; give a fastText model file") from None
    except (ValueError, struct.error, OverflowError) as error:
        raise RecipeError(f"{path}: not a fastText model, or a damaged one: {error}") from None


class _File:
    """A model file, read from start to end. Reading past its end raises ValueError."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            try:
                self._map: mmap.mmap | bytes = mmap.mmap(
                    file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ
                )
            except OSError as error:
                if error.errno not in LACKING:
                    raise
                self._map = file.read()
        self._data = np.frombuffer(self._map, np.uint8)
        self._at = 0

    def values(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack("<" + layout, self.array(np.uint8, struct.calcsize("<" + layout)).tobytes())

    def array(self, kind: Any, count: int) -> npt.NDArray[Any]:
        size = count * np.dtype(kind).itemsize
        if count < 0 or size > len(self._data) - self._at:
            raise ValueError(
                f"it ends at byte {len(self._data):,}, but {size:,} bytes from {self._at:,} on are needed"
            )
        self._at += size
        return self._data[self._at - size : self._at].view(kind)

    def entries(self, count: int) -> list[tuple[bytes, int, int]]:
        """Read `count` dictionary entries: (word or label, occurrences, 0 for a word or 1 for a label)."""
        found, tail = [], struct.Struct("<qb")
        for _ in range(count):
            end = self._map.find(b"\0", self._at)
            if end < 0:
                _refuse("its dictionary does not end")
            found.append((self._map[self._at : end], *tail.unpack_from(self._map, end + 1)))
            self._at = end + 1 + tail.size
        return found

    def matrix(self, rows: int, columns: int) -> npt.NDArray[np.float32]:
        """Read a plain matrix; return a copy if it is small, else a view of the file, maybe unaligned."""
        found = self.array(np.float32, rows * columns).reshape(rows, columns)
        if found.nbytes > _COPIED_BYTES:
            return found
        copied: npt.NDArray[np.float32] = aligned(found.shape, np.float32)
        copied[:] = found
        return copied

    def quantised(self) -> npt.NDArray[np.float32]:
        """Read a quantized matrix and expand it to float32."""
        with_norms, rows, columns, size = self.values("?qqi")
        _limit("columns", columns, 1, _MAX_DIMENSIONS)
        _limit("rows", rows, 1, _MAX_ROWS)
        codes = self.array(np.uint8, size)
        parts, centroids = self._quantiser(columns)
        if size != rows * parts:
            _refuse(f"it has {size:,} codes for {rows:,} rows of {parts} codes each")
        width = -(-columns // parts)
        values = np.empty((rows, columns), np.float32)
        for part in range(parts):
            begin, end = part * width, min(columns, (part + 1) * width)
            table = centroids[begin * _CENTROIDS : end * _CENTROIDS].reshape(_CENTROIDS, end - begin)
            values[:, begin:end] = table[codes.reshape(rows, parts)[:, part]]
        if with_norms:
            norms = self.array(np.uint8, rows)
            _, centroids = self._quantiser(1)
            values *= centroids[norms][:, None]
        return values

    def _quantiser(self, columns: int) -> tuple[int, npt.NDArray[np.float32]]:
        """Read a quantizer; return (number of parts of a row, the centroids of all parts, part by part)."""
        dimensions, parts, width, last = self.values("4i")
        if dimensions != columns or not 1 <= parts <= columns or width < 1:
            _refuse(f"a quantizer has {dimensions} dimensions in {parts} parts of {width}, not {columns}")
        if (parts - 1) * width + last != columns or not 1 <= last <= width:
            _refuse(f"a quantizer has {parts} parts of {width}, the last of {last}, for {columns} columns")
        return parts, self.array(np.float32, columns * _CENTROIDS)


def _refuse(problem: str) -> NoReturn:
    raise ValueError(problem)


def _limit(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        _refuse(f"{name} is {value:,}; it must be from {least:,} to {most:,}")


def _parse(file: _File) -> FastTextModel:
    magic, version = file.values("ii")
    if magic != _MAGIC or version not in _VERSIONS:
        _refuse(f"it begins with {magic}, {version} instead of {_MAGIC}, 12")
    arguments = dict(zip(_ARGUMENTS, file.values("12id"), strict=False))
    if arguments["model"] != _SUPERVISED:
        _refuse("it has word vectors only; train a classifier with shardkit.writers.train_classifier")
    if version == 11:
        arguments["maxn"] = 0  # supervised models of version 11 do not use character n-grams
    _check(arguments)
    size, word_count, label_count, _, pruned_count = file.values("iiiqq")
    _limit("labels", label_count, 1, _MAX_LABELS)
    if word_count < 0 or size != word_count + label_count:
        _refuse(f"its dictionary has {size:,} entries, but {word_count:,} words and {label_count:,} labels")
    entries = file.entries(size)
    words, labels = entries[:word_count], entries[word_count:]
    if any(kind for _, _, kind in words) or not all(kind for _, _, kind in labels):
        _refuse("its dictionary does not have all words first, then all labels")
    pairs = _pruned(file, arguments["bucket"], pruned_count) if pruned_count >= 0 else None
    dim, [is_quantised] = arguments["dim"], file.values("?")
    inputs = file.quantised() if is_quantised else _dense(file, dim)
    [quantised_output] = file.values("?")
    outputs = file.quantised() if is_quantised and quantised_output else _dense(file, dim)
    inputs = _in_order(inputs, word_count, pairs, arguments)
    loss = _LOSSES[arguments["loss"]]
    if outputs.shape != (label_count, dim):
        _refuse(f"its output matrix is {outputs.shape} for {label_count:,} labels of {dim} dimensions")
    inputs.flags.writeable = outputs.flags.writeable = False  # like mapped arrays, so kernels compile once
    joined, offsets = join_runs([word for word, _, _ in words])
    return FastTextModel(
        labels=tuple(label.decode().removeprefix(LABEL_PREFIX) for label, _, _ in labels),
        loss=loss,
        word_ngrams=arguments["word_ngrams"],
        buckets=arguments["bucket"],
        min_ngram=arguments["minn"],
        max_ngram=arguments["maxn"],
        words=joined,
        word_offsets=offsets,
        pruned=np.zeros((0, 2), np.uint64) if pairs is None else _ranks(pairs[:, 0], arguments["bucket"]),
        inputs=inputs,
        outputs=outputs,
        tree=_tree([count for _, count, _ in labels]) if loss == "hs" else np.zeros((0, 2), np.int32),
    )


def _check(arguments: Mapping[str, int]) -> None:
    _limit("dim", arguments["dim"], 1, _MAX_DIMENSIONS)
    _limit("bucket", arguments["bucket"], 0, _MAX_ROWS)
    _limit("wordNgrams", arguments["word_ngrams"], 0, _MAX_NGRAM)
    _limit("maxn", arguments["maxn"], 0, _MAX_NGRAM)
    if arguments["loss"] not in _LOSSES:
        _refuse(f"its loss {arguments['loss']} is not one of {_LOSSES}")
    if not arguments["bucket"] and (arguments["maxn"] or arguments["word_ngrams"] > 1):
        _refuse("it has n-grams, but no bucket for them")


def _dense(file: _File, columns: int) -> npt.NDArray[np.float32]:
    rows, found = file.values("qq")
    if found != columns:
        _refuse(f"a matrix has {found:,} columns, but the model has {columns:,} dimensions")
    _limit("rows", rows, 1, _MAX_ROWS)
    return file.matrix(rows, columns)


def _pruned(file: _File, buckets: int, count: int) -> npt.NDArray[np.int32]:
    """Read the buckets that exist; return int32[m, 2], pairs (bucket, its row) sorted by bucket.

    Row 0 is the first row after the rows of the words.
    """
    pairs = file.array(np.int32, 2 * count).reshape(count, 2)
    if count and not (pairs.min() >= 0 and pairs[:, 0].max() < buckets):
        _refuse("a pruned bucket is out of range")
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    if (np.diff(pairs[:, 0]) == 0).any():
        _refuse("a pruned bucket has two rows")
    return pairs


def _in_order(
    inputs: npt.NDArray[np.float32],
    words: int,
    pairs: npt.NDArray[np.int32] | None,
    arguments: Mapping[str, int],
) -> npt.NDArray[np.float32]:
    """Return the input matrix with the rows of the buckets sorted by bucket number."""
    used = arguments["bucket"] * (arguments["maxn"] > 0 or arguments["word_ngrams"] > 1)
    if pairs is not None:
        used = int(pairs[:, 1].max()) + 1 if len(pairs) else 0
    if inputs.shape[1] != arguments["dim"] or len(inputs) < words + used:
        _refuse(f"its input matrix is {inputs.shape} for {words:,} words and {used:,} buckets")
    if pairs is None:
        return inputs
    ordered: npt.NDArray[np.float32] = aligned((words + len(pairs), inputs.shape[1]), np.float32)
    ordered[:words], ordered[words:] = inputs[:words], inputs[words + pairs[:, 1]]
    return ordered


def _ranks(buckets: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.uint64]:
    """Return the array `FastTextModel.pruned` of a model with `count` buckets.

    `buckets` are the buckets that exist: distinct and ascending.
    """
    ranks = np.zeros((count // 64 + 1, 2), np.uint64)
    np.bitwise_or.at(ranks[:, 0], buckets >> 6, np.uint64(1) << (buckets & 63).astype(np.uint64))
    ranks[:, 1] = np.searchsorted(buckets, np.arange(len(ranks)) << 6)
    return ranks


def _tree(counts: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the children of each inner node of fastText's Huffman tree over labels with these `counts`."""
    total = len(counts)
    weights = [*counts, *([10**15] * (total - 1))]
    children = np.zeros((total - 1, 2), np.int32)
    leaf, node = total - 1, total
    for made in range(total - 1):
        for side in range(2):
            if leaf >= 0 and weights[leaf] < weights[node]:
                children[made, side], leaf = leaf, leaf - 1
            else:
                children[made, side], node = node, node + 1
        weights[total + made] = weights[children[made, 0]] + weights[children[made, 1]]
    return children
