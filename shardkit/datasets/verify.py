"""Check a dataset against its index and card: size, hashes and structure of every shard, and all counts.

`verify` reads any MDS or tar dataset, made by shardkit or not, and reports all problems instead of stopping
at the first. Shards are checked in threads; memory is one shard per thread if shards are compressed or
remote. Remote shards are read from the store, without any cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.arrays import Bytes
from shardkit.cache.download import check_hashes, unpack
from shardkit.card import CARD_NAME, FILES_NAME, DatasetCard, block_checksums
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.datasets.opened import ShardReader
from shardkit.display import Described, Facts, counted
from shardkit.errors import ShardError
from shardkit.formats import mds, tar
from shardkit.formats.block_checksums import BlockFile, shard_part
from shardkit.formats.mds.index import INDEX_NAME, TABLE_NAME
from shardkit.formats.stored import load_raw
from shardkit.formats.text import TEXT_FORMATS, TextShard
from shardkit.formats.tokens import TokenStream
from shardkit.formats.trainers import TRAINER_FORMATS
from shardkit.hashing import HASH_NAMES
from shardkit.hints import answers_keywords
from shardkit.manifest import BLOCKS_NAME, UNKNOWN, ShardInfo, ShardTable
from shardkit.storage.store import StorageOptions, StoreError, hash_object, read_object
from shardkit.synonyms import TRANSFER
from shardkit.units import format_bytes

MAX_THREADS = 32
_SHOWN = 8  # maximum number of problems that a report prints
MAX_LISTED = 1000  # maximum number of problems that a report holds; all are counted


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that a check found in one file."""

    file: str
    problem: str


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Described):
    """The scope and the result of a check; `hashed` is the number of shards whose hashes were compared."""

    path: str
    quick: bool
    format: str | None
    shards: int
    hashed: int
    samples: int
    bytes: int
    fingerprint: str | None
    problems: tuple[Problem, ...]
    problem_count: int

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problem_count

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data for JSON."""
        return asdict(self) | {"ok": self.ok}

    def describe(self) -> tuple[str, Facts]:
        """Return a title, and the verdict, the first problems and the scope as facts."""
        problems = [("", f"{found.file}: {found.problem}") for found in self.problems[:_SHOWN]]
        compared = "" if self.quick else f"hashes of {counted(self.hashed, 'shard')}, "
        return f"Dataset {self.path}", [
            ("verdict", "intact" if self.ok else counted(self.problem_count, "problem")),
            *problems,
            ("checked", f"{compared}sizes and structure of {format_bytes(self.bytes)}"),
            ("rows", f"{self.samples:,}, in {counted(self.shards, 'shard')}"),
            ("fingerprint", str(self.fingerprint)),
        ]


@answers_keywords(TRANSFER)
def verify(
    path: str | Path,
    *,
    quick: bool = False,
    threads: int | None = None,
    storage: StorageOptions | None = None,
) -> VerifyReport:
    """Check the dataset at `path`: sizes and structure of all shards, their hashes, the index and the card.

    `quick` skips hashes and loss masks, so that no sample is read; for remote shards it checks only the
    sizes. For a shard without any hash, all samples are decoded instead. Damage is reported, not raised;
    ShardError is raised only if there is no dataset.
    """
    # allow_pickle lets such shards be opened, but nothing is unpickled: see _check_samples.
    dataset = open_dataset(path, allow_pickle=True, decode=False, storage=storage)
    shards = dataset.manifest.shards
    count = min(threads or os.cpu_count() or 1, MAX_THREADS)
    problems: list[Problem] = []
    trained = 0
    blocks = None if quick else _Blocks(dataset)
    with ThreadPoolExecutor(count) as pool:
        for found in pool.map(lambda number: _check_shard(dataset, number, blocks), range(len(shards))):
            problems += [found] if isinstance(found, Problem) else []
            trained += 0 if isinstance(found, Problem) else found
    problems += _check_names(dataset)
    problems += _check_table(dataset)
    if dataset.card is not None:
        # Loss masks of other trainers' formats are files of their own, which `_check_files` checks.
        if not quick and not problems and dataset.manifest.format not in TRAINER_FORMATS:
            problems += _check_trained(dataset.card, trained)
        problems += _check_card(dataset, dataset.card)
        problems += _check_files(dataset, dataset.card, quick=quick)
    hashed = 0 if quick else sum(1 for info in shards if _hashes(info))
    return VerifyReport(
        str(path),
        quick,
        dataset.manifest.format,
        shards=len(shards),
        hashed=hashed,
        samples=len(dataset),
        bytes=sum(max(info.stored.bytes, 0) for info in shards),
        fingerprint=dataset.fingerprint,
        problems=tuple(problems[:MAX_LISTED]),
        problem_count=len(problems),
    )


def _hashes(info: ShardInfo) -> bool:
    return bool(info.stored.hashes or info.raw.hashes)


def _check_shard(dataset: Dataset, number: int, blocks: _Blocks | None) -> Problem | int:
    """Return the problem with a shard, or the number of tokens that its loss masks select if it is intact.

    If `blocks` is None, the check is quick: no sample is read, and the number is 0.
    """
    info, quick = dataset.manifest.shards[number], blocks is None
    name = info.stored.basename
    try:
        if (unknown := {*info.stored.hashes, *info.raw.hashes} - HASH_NAMES) and not quick:
            return Problem(
                name, f"the index states hashes that cannot be checked: {', '.join(sorted(unknown))}"
            )
        if dataset.shards is not None and quick:
            return _check_size(dataset, info) or 0
        if dataset.manifest.format in ("row_files", "image_files"):
            shard = dataset.shard(number)
            if not quick:
                _check_samples(shard)
            return 0
        raw = _read(dataset, info, verify=not quick)
        shard = _open(dataset, info, raw)
        if blocks is not None:
            blocks.check(number, info, raw)
        if not quick and not _hashes(info):
            _check_samples(shard)
        states_masks = dataset.card is not None and "trained_tokens" in dataset.card.data
        trained = _count_trained(dataset, shard) if states_masks and not quick else 0
        shard.close()
    except ShardError as error:
        return Problem(
            name, error.problem if error.offset is None else f"byte {error.offset:,}: {error.problem}"
        )
    except StoreError as error:
        return Problem(name, str(error))
    except MemoryError:
        return Problem(name, f"does not fit in memory ({info.raw.bytes:,} bytes raw); use fewer threads")
    return trained


def _check_size(dataset: Dataset, info: ShardInfo) -> Problem | None:
    size = dataset.store.head(info.stored.basename).bytes
    if info.stored.bytes in (size, UNKNOWN):
        return None
    return Problem(info.stored.basename, f"has {size:,} bytes, the index states {info.stored.bytes:,}")


def _read(dataset: Dataset, info: ShardInfo, *, verify: bool) -> Bytes:
    """Return a shard's raw bytes after checking its size, and its hashes if `verify` or if it is remote."""
    if dataset.shards is None:
        is_raw_there = dataset.manifest.format == "mds" and (dataset.path / info.raw.basename).is_file()
        found = replace(info, zip=None, compression=None) if is_raw_there else info
        return load_raw(dataset.manifest.format, dataset.path, found, verify=verify)
    where = f"{dataset.location}/{info.stored.basename}"
    stored = read_object(dataset.store, info.stored.basename, info.stored.bytes)
    check_hashes(where, info.stored, stored)
    return unpack(dataset.manifest.format, info, stored, where) if info.compression else stored


def _open(dataset: Dataset, info: ShardInfo, raw: Bytes) -> ShardReader:
    """Open a shard from its raw bytes. Opening it checks the offsets and sizes of all samples."""
    where, kind = f"{dataset.location}/{info.stored.basename}", dataset.manifest.format
    if kind == "mds":
        return mds.shard_from_raw(where, info, raw, allow_pickle=True)
    if kind in TEXT_FORMATS:
        return TextShard(info, raw, kind, file=where)
    if kind in TRAINER_FORMATS:
        return TokenStream(where, info, raw, kind)
    return tar.shard_from_raw(where, info, raw, decode=False)


class _Blocks:
    """Compares the block checksums in a dataset's blocks.bin with the content of its shards."""

    def __init__(self, dataset: Dataset) -> None:
        """Locate the checksums of each shard. Raises ShardError if blocks.bin has a wrong size."""
        self._store = dataset.store
        stated = block_checksums(dataset.manifest, dataset.card)
        where = f"{dataset.location}/{BLOCKS_NAME}"
        self._file = None if stated is None else BlockFile(where, dataset.manifest, stated)

    def check(self, number: int, info: ShardInfo, raw: Bytes) -> None:
        """Raise ShardError unless blocks.bin has the right checksums for shard `number`."""
        if self._file is not None and self._store.get(BLOCKS_NAME, *self._file.range(number)) != shard_part(
            info.stored, raw
        ):
            raise ShardError(info.stored.basename, f"{BLOCKS_NAME} has other checksums for it")


def _check_samples(shard: ShardReader) -> None:
    if not any(column.encoding == "pkl" for column in shard.columns):  # unpickling could run any code
        for row in range(len(shard)):
            shard.sample(row)


def _count_trained(dataset: Dataset, shard: ShardReader) -> int:
    """Count the tokens that a shard's loss masks select; 0 if it has none that are stored as arrays."""
    column = next((column for column in shard.columns if column.name == dataset.loss_mask_column), None)
    if column is None or not column.encoding.startswith("ndarray"):
        return 0
    if (rows := shard.fixed_rows(column.name)) is not None:
        return int(np.count_nonzero(rows))
    if dataset.manifest.format != "mds":  # tar members are not decoded here
        return 0
    samples = (shard.sample(row, {column.name}) for row in range(len(shard)))
    return sum(int(np.count_nonzero(np.asarray(sample[column.name]))) for sample in samples)


def _check_trained(card: DatasetCard, trained: int) -> Iterator[Problem]:
    if (stated := card.data.get("trained_tokens", trained)) != trained:
        yield Problem(CARD_NAME, f"trained_tokens is {stated!r}, but the loss masks select {trained:,}")


def _check_names(dataset: Dataset) -> Iterator[Problem]:
    seen: set[str] = set()
    for info in dataset.manifest.shards:
        if info.stored.basename in seen:
            yield Problem(
                info.stored.basename, "is in the index twice: its samples would be used twice per epoch"
            )
        seen.add(info.stored.basename)


def _check_table(dataset: Dataset) -> Iterator[Problem]:
    """Check that index.bin, if the dataset was opened with it, agrees with index.json."""
    manifest = dataset.manifest
    if manifest.format != "mds" or not isinstance(manifest.shards, ShardTable):
        return
    where = f"{dataset.location}/{INDEX_NAME}"
    stated = mds.parse_index(where, dataset.store.get(INDEX_NAME))
    if manifest.fingerprint != stated.fingerprint:
        problem = f"fingerprint is {manifest.fingerprint}, but the shards have {stated.fingerprint}"
        yield Problem(TABLE_NAME, problem)
    elif list(manifest.shards) != list(stated.shards):
        yield Problem(TABLE_NAME, f"describes shards differently than {INDEX_NAME}; remove it")


def _check_card(dataset: Dataset, card: DatasetCard) -> Iterator[Problem]:
    """Check that the facts in the card agree with the index."""
    manifest = dataset.manifest
    length, dtype = dataset.sequence_length, dataset.token_dtype
    facts: dict[str, Any] = {
        "fingerprint": manifest.fingerprint,
        "format": manifest.format,
        "shards": len(manifest.shards),
        "samples": manifest.samples,
        "bytes": sum(info.raw.bytes for info in manifest.shards),
        "stored_bytes": sum(info.stored.bytes for info in manifest.shards),
        "sequence_length": length,
        "dtype": None if dtype is None else dtype.name,
    }
    if length is None and card.data.get("sequence_length") is None:
        del facts["dtype"]  # the card of a token store has it, but its samples have no common length
    for name, fact in facts.items():
        if (stated := card.data.get(name, fact)) != fact:
            yield Problem(CARD_NAME, f"{name} is {stated!r}, but the shards have {fact!r}")
    tokens, padding = card.data.get("tokens"), card.data.get("padding")
    if isinstance(tokens, int) and isinstance(padding, int) and length is not None:
        cells, packing = manifest.samples * length, card.data.get("packing")
        bos = packing.get("repeated_bos", 0) if isinstance(packing, dict) else 0
        if tokens + padding + bos != cells:
            repeated = f" and {bos:,} of repeated bos" if bos else ""
            stated = f"{tokens:,} tokens and {padding:,} of padding{repeated}"
            yield Problem(CARD_NAME, f"states {stated}, but the rows hold {cells:,}")


def _check_files(dataset: Dataset, card: DatasetCard, *, quick: bool) -> Iterator[Problem]:
    """Check the files that the card lists in addition to the shards: provenance, report, quarantine."""
    where = CARD_NAME
    try:
        if card.files_table is not None:
            where = FILES_NAME
            card = card.with_files(dataset.store.get(FILES_NAME))
        names = card.file_names
    except (ShardError, StoreError) as error:
        yield Problem(where, error.problem)
        return
    for name in names:
        try:
            stated = card.file(name)
            size = dataset.store.head(name).bytes
            if size != stated.bytes:
                yield Problem(name, f"has {size:,} bytes, the card states {stated.bytes:,}")
                continue
            found = {} if quick else hash_object(dataset.store, name, stated.hashes)
            for kind, digest in found.items():
                if digest != stated.hashes[kind]:
                    yield Problem(name, f"{kind} is {digest}, the card states {stated.hashes[kind]}")
        except StoreError as error:
            yield Problem(name, f"cannot be read: {error.problem}")
        except (ShardError, ValueError) as error:
            yield Problem(name, f"has a malformed entry in the card: {error}")
