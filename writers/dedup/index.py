"""The dedup index of a corpus, against which later builds remove near-duplicates without having its texts.

    dedup-index.json   settings, counts, sources, and each file's size and xxh3-128; written last
    part-00000/…       for each split a part (population.py, signatures.py) of the documents that stayed,
                       `row` being the row in this part, and their n-grams (shingle_store.py), numbered from 0
    part-…/blocks.json the xxh3-64 of the blocks of these files, which check ranges when they are read

An index is a folder, or the copy of one in a store, where tasks read ranges of its parts without a local
copy. An index of format 1 has no blocks.json, so it must be a folder. It also has band keys, which nothing
reads, and its word keys are not stored as a run: a task makes one (`key_runs`).

Only the `sketch` smallest hashes of each set are stored, so that the index's size does not grow with the
texts. A document with no more distinct n-grams than that is compared exactly; for others the similarity s is
an unbiased estimate (compare.py) whose standard deviation is at most sqrt(s (1 - s) / sketch): 0.0125 for
s = 0.8 and sketch = 1,024. By default a document takes 740 bytes, and 8 bytes for each distinct n-gram, up to
8 KiB.

An index may come from an untrusted source. Opening it checks the size of each table, and the number of rows:
in a folder by the table's header, in a store by the table's size. Stages check the numbers they read from it
before compiled code uses them as addresses.

It appears whole or not at all (index_build.py), and its bytes depend on the documents and settings alone.
Signatures are comparable only if settings, Unicode version and hash functions are the same;
`DedupIndex.check` names the differences.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from pydantic import Field, ValidationError

from shardkit.errors import BuildError, RecipeError
from shardkit.files import load_json
from shardkit.hashing import digest_of, hash_bytes
from shardkit.settings import StrictModel
from shardkit.storage.object_file import open_object
from shardkit.storage.resilient import connect
from shardkit.storage.store import ObjectInfo, ObjectNotFoundError, StorageOptions, Store, StoreError
from shardkit.storage.url import is_remote, local_path
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.exact import KEYS
from shardkit.writers.dedup.population import (
    DOCUMENT,
    DOCUMENTS_FILE,
    SIGNATURES_FILE,
    Part,
)
from shardkit.writers.dedup.shingle_store import SET, SETS_FILE, SHINGLES_FILE
from shardkit.writers.dedup.signatures import band_keys, bands_and_rows, sign_batch
from shardkit.writers.dedup.tables import CHUNK_ROWS, HEADER_BYTES, RowFile, Rows
from shardkit.writers.exchange.exchange import RunWriter, Segment
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.checked_ranges import CheckedRanges
from shardkit.writers.execution.commit import BLOCK_BYTES, Commit, Output, block_hashes
from shardkit.writers.execution.digests import MemoryBytes
from shardkit.writers.execution.stage import RunTasks, Stage
from shardkit.writers.kernels.shingles import shingle_batch
from shardkit.writers.kernels.words import normalization_version

INDEX_PART_FILES = (
    DOCUMENTS_FILE,
    SIGNATURES_FILE,
    KEYS.file,
    SETS_FILE,
    SHINGLES_FILE,
)

BLOCKS_FILE = "blocks.json"

_COPY_BYTES = 16 << 20

INDEX_FILE = "dedup-index.json"

FORMAT = 2

_KEYS_OF_FORMAT_1 = "keys.npy"

_FILES_OF_FORMAT_1 = {*INDEX_PART_FILES, _KEYS_OF_FORMAT_1, "bands.bin", "bands.npy"} - {KEYS.file}

_ROWS_OF_FORMAT_1 = 1 << 18  # rows per run of keys; `place` is a row number within its run

_KEY_OF_FORMAT_1 = np.dtype(
    [
        *(("high", "<u8"), ("low", "<u8"), ("id", "u1", (16,))),
        *(("bytes", "<i8"), ("source", "<i4"), ("place", "<u4")),
    ]
)

SKETCH = 1024  # default number of hashes stored per document

MIN_SKETCH, MAX_SKETCH = 64, 1 << 20  # 64: standard deviation of 0.05 at s = 0.8; 2^20: 8 MiB per document

_THREADS = 8

_REMEDY = "make the index again"

_PROBE = "Ämter, straße: the 2nd ΟΔΟΣ of 12 — and e\u0301tudes in 漢字."

Count = Annotated[int, Field(ge=0)]


class _File(StrictModel):
    bytes: Count
    xxh3_128: str


class _Part(StrictModel):
    folder: Annotated[str, Field(pattern=r"^part-[0-9a-f]{5,32}$")]
    documents: Count
    bytes: Count
    files: dict[str, _File]

    @property
    def digest(self) -> str:
        """The digest of the part's tables."""
        return digest_of({name: file.xxh3_128 for name, file in self.files.items()})


class IndexRecord(StrictModel):
    """The contents of dedup-index.json."""

    format: Literal[1, 2]
    shardkit_version: str
    settings: dict[str, Any]
    sketch: Count
    documents: Count
    bytes: Count
    made_from: dict[str, Any]
    parts: list[_Part]


@dataclass(frozen=True)
class DedupIndex:
    """An open index (see `open_index`), in a folder or at a URL of a store."""

    location: Path | str
    record: IndexRecord
    storage: StorageOptions | None = None

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of the index in order."""
        return [Part(self._folder(part), part.documents, "index") for part in self.record.parts]

    def _folder(self, part: _Part) -> Artifact:
        if isinstance(self.location, Path):
            return Artifact(self.location / part.folder, content=part.digest, remedy=_REMEDY)
        sizes = tuple(sorted((name, file.bytes) for name, file in part.files.items()))
        url = f"{self.location}/{part.folder}"
        stored = _StoredPart(url, sizes, part.files[BLOCKS_FILE].xxh3_128, self.storage)
        return Artifact(Path(url), stored, part.digest)

    @property
    def settings(self) -> dict[str, Any]:
        """The `index_settings` of the recipe that made the index."""
        return self.record.settings

    @property
    def documents(self) -> int:
        """The number of documents in the index."""
        return self.record.documents

    @property
    def bytes(self) -> int:
        """The total size of the documents' texts, which the index does not store, in bytes of UTF-8."""
        return self.record.bytes

    @property
    def stored_bytes(self) -> int:
        """The total size of the index's tables on disk, in bytes."""
        return sum(file.bytes for part in self.record.parts for file in part.files.values())

    @cached_property
    def digest(self) -> str:
        """The digest of the settings and of every table, which identifies the index as an input of tasks."""
        record = self.record.model_dump(mode="json")
        if record["format"] > 1:  # the names of the parts' folders are not content
            for part in record["parts"]:
                del part["folder"]
        return digest_of([record["format"], record["settings"], record["sketch"], record["parts"]])

    def check(self, config: NearDedupConfig, key: str = "dedup.near.against") -> None:
        """Raise RecipeError with all differences, after `key`, if a recipe's settings differ."""
        there, here = _flat(self.settings), _flat(index_settings(config))
        names = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
        if not names:
            return
        if names != ["probe"]:  # the other differing settings explain a different probe
            names = [name for name in names if name != "probe"]
        differences = "; ".join(
            f"{name} is {there.get(name, 'not set')} in the index, {here.get(name, 'not set')} here"
            for name in names
        )
        raise RecipeError(
            f"{key}: {self.location} was made with different settings: {differences}; use the same settings, "
            "or make the index again"
        )

    def verify(self) -> None:
        """Check the bytes of all files. Raises BuildError with the first file that differs from its hash."""
        files = [
            (self._folder(part) / name, file)
            for part in self.record.parts
            for name, file in sorted(part.files.items())
        ]
        with ThreadPoolExecutor(_THREADS) as pool:
            hashes = pool.map(lambda entry: _hash_of(entry[0]), files)
            for (path, file), found in zip(files, hashes, strict=True):
                if found != file.xxh3_128:
                    raise BuildError(
                        f"{path}: has xxh3-128 {found}, expected {file.xxh3_128}; make the index again"
                    )

    def to_dict(self) -> dict[str, Any]:
        """Return the index's record as plain data, with the number of parts instead of the parts."""
        record = self.record.model_dump(mode="json", exclude={"parts"})
        return {
            "location": str(self.location),
            **record,
            "parts": len(self.record.parts),
            "stored_bytes": self.stored_bytes,
            "digest": self.digest,
        }


def key_runs(run: RunTasks, indexes: Sequence[DedupIndex], memory_bytes: int) -> list[Commit | Segment]:
    """Return the KEYS run of each part of all indexes, to be read through an exchange."""
    found: list[Commit | Segment] = []
    for index in indexes:
        parts = list(zip(index.parts, index.record.parts, strict=True))
        if index.record.format == 1:
            tasks = []
            for number, (part, listed) in enumerate(parts, len(found)):
                content = listed.files[_KEYS_OF_FORMAT_1].xxh3_128
                keys = replace(part.folder / _KEYS_OF_FORMAT_1, content=content)
                tasks.append(INDEX_KEYS.task(f"{number:05d}", 0, keys, memory_bytes))
            found += run(tasks)[0]
        else:
            for part, listed in parts:
                file = listed.files[KEYS.file]
                found.append(Segment(part.folder / KEYS.file, file.bytes, file.xxh3_128, 0, 1 << 64))
    return found


def _make_key_run(folder: Path, keys: Artifact, memory_bytes: MemoryBytes) -> None:
    """Write the word keys of a part of an index of format 1 as a run."""
    table = Rows(keys, _KEY_OF_FORMAT_1)
    with RunWriter(folder / KEYS.file, KEYS, memory_bytes=memory_bytes // 2) as writer:
        for start in range(0, len(table), CHUNK_ROWS):
            stored = table.read(start, min(start + CHUNK_ROWS, len(table)))
            rows = np.zeros(len(stored), KEYS.dtype)
            rows["key"], rows["low"] = stored["high"], stored["low"]
            rows["id"] = np.ascontiguousarray(stored["id"]).view(">u8")
            rows["row"] = stored["place"] + np.uint32(start // _ROWS_OF_FORMAT_1 * _ROWS_OF_FORMAT_1)
            for name in ("bytes", "source"):
                rows[name] = stored[name]
            writer.write(rows)


INDEX_KEYS = Stage("index_keys", "near-duplicates", _make_key_run)


def check_indexable(config: NearDedupConfig | None, sketch: int) -> NearDedupConfig:
    """Return `config` if an index can be made with it.

    Raises RecipeError if not, and ValueError if `sketch` is out of range.
    """
    if config is None:
        raise RecipeError(
            "dedup.near: is not set, but an index stores its signatures; set it ({} sets the defaults)"
        )
    if config.scope != "global":
        raise RecipeError(
            f"dedup.near.scope: is {config.scope_name}, so nothing could be compared with other corpora; set "
            "it to global to make an index"
        )
    if sketch and not MIN_SKETCH <= sketch <= MAX_SKETCH:
        raise ValueError(
            f"sketch is {sketch:,} hashes; use {MIN_SKETCH} to {MAX_SKETCH:,}, or 0 to store all hashes"
        )
    return config


def index_settings(config: NearDedupConfig) -> dict[str, Any]:
    """Return the settings that must be equal for documents to be comparable.

    The `probe` is a digest of hashes of one fixed text, so it changes when the hashing code changes.
    """
    probe, (bands, rows) = pa.array([_PROBE], pa.large_string()), bands_and_rows(config)
    signed = sign_batch(probe, config.minhash)
    shingles = shingle_batch(probe, config.minhash).hashes
    made: list[npt.NDArray[Any]] = [signed.values, signed.keys, shingles]
    made.append(band_keys(signed.values, bands, rows))
    return {
        # Older indexes record their hash scheme; an index of another scheme must be refused.
        "minhash": config.minhash.model_dump(mode="json") | {"scheme": "shardkit"},
        "bands": bands,
        "rows": rows,
        "by_source": config.scope == "source",
        "normalization": normalization_version(),
        "probe": digest_of([array.tolist() for array in made]),
    }


def open_index(location: Path | str, storage: StorageOptions | None = None) -> DedupIndex:
    """Open the index in a folder or at a URL. Raises BuildError for a missing or damaged one."""
    if is_remote(location):
        return _open_stored(str(location).rstrip("/"), storage)
    path = local_path(location)
    file = path / INDEX_FILE
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BuildError(f"{file}: cannot be read: {error.strerror}; {_MAKES}") from None
    record = _parse(str(file), data)
    for part in record.parts:
        _check_sizes(path, part)
    with ThreadPoolExecutor(_THREADS) as pool:  # one by one takes long on a network disk
        list(pool.map(lambda part: _check_rows(path, part, record.settings), record.parts))
    return DedupIndex(path, record)


def _open_stored(url: str, storage: StorageOptions | None) -> DedupIndex:
    where = f"{url}/{INDEX_FILE}"
    try:
        store = connect(url, storage)
        record = _parse(where, store.get(INDEX_FILE))
        if record.format == 1:
            raise BuildError(
                f"{where}: an index of format 1 can only be read from a local folder; copy it to a disk, or "
                "make the index again"
            )
        present = {info.key: info.bytes for info in store.list("part-")}
    except ObjectNotFoundError:
        raise BuildError(f"{where}: does not exist; {_MAKES}") from None
    except StoreError as error:
        raise BuildError(f"{where}: cannot be read: {error}") from error
    for part in record.parts:
        for name, file in part.files.items():
            key = f"{part.folder}/{name}"
            if present.get(key) != file.bytes:
                found = "is missing" if key not in present else f"is {present[key]:,} bytes long"
                raise BuildError(f"{url}/{key}: {found}, expected {file.bytes:,} bytes; make the index again")
        _check_row_bytes(url, part, record.settings)
    return DedupIndex(url, record, storage)


_MAKES = "`shardkit dedup-index` makes an index"


def _parse(file: str, text: bytes) -> IndexRecord:
    try:
        data = load_json(text)
    except ValueError as error:
        raise BuildError(f"{file}: is not valid JSON: {error}; make the index again") from None
    version = data.get("format") if isinstance(data, dict) else None
    if version not in (1, FORMAT):
        raise BuildError(
            f"{file}: is format {version!r}, this shardkit reads formats 1 and {FORMAT}; make the index again"
        )
    try:
        record = IndexRecord.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BuildError(f"{file}: {where}: {first['msg']}; make the index again") from None
    if record.documents != sum(part.documents for part in record.parts):
        raise BuildError(f"{file}: `documents` is not the sum over the parts; make the index again")
    names = {*INDEX_PART_FILES, BLOCKS_FILE} if record.format > 1 else _FILES_OF_FORMAT_1
    for part in record.parts:
        if set(part.files) != names:
            raise BuildError(
                f"{file}: {part.folder} does not list exactly the files of an index; make the index again"
            )
    return record


def _check_sizes(path: Path, part: _Part) -> None:
    for name, file in part.files.items():
        table = path / part.folder / name
        try:
            found = table.stat().st_size
        except OSError as error:
            raise BuildError(f"{table}: cannot be read: {error.strerror}; make the index again") from None
        if found != file.bytes:
            raise BuildError(f"{table}: is {found:,} bytes, expected {file.bytes:,}; make the index again")


def _check_rows(path: Path, part: _Part, settings: Mapping[str, Any]) -> None:
    """Check that every table has one row per document, since document numbers are used as row indexes."""
    folder = Artifact(path / part.folder, remedy=_REMEDY)
    tables = {DOCUMENTS_FILE: DOCUMENT, SETS_FILE: SET}
    found = {name: len(Rows(folder / name, dtype)) for name, dtype in tables.items()}
    signatures = RowFile(folder / SIGNATURES_FILE)
    width = settings.get("minhash", {}).get("permutations")
    if signatures.dtype != np.dtype("<u4") or signatures.row_shape != (width,):
        problem = f"has rows of {signatures.row_shape} {signatures.dtype}, expected ({width},) uint32"
        raise BuildError(f"{folder / SIGNATURES_FILE}: {problem}; make the index again")
    for name, rows in (found | {SIGNATURES_FILE: signatures.rows}).items():
        if rows != part.documents:
            raise BuildError(
                f"{folder / name}: has {rows:,} rows, expected {part.documents:,}; make the index again"
            )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names, such as {"minhash.ngram": 5}."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _check_row_bytes(url: str, part: _Part, settings: Mapping[str, Any]) -> None:
    """Check that each table in a store has the size of one row per document; `Rows` checks headers later."""
    width = settings.get("minhash", {}).get("permutations")
    sizes = {DOCUMENTS_FILE: DOCUMENT.itemsize, SETS_FILE: SET.itemsize}
    sizes[SIGNATURES_FILE] = 4 * (width if isinstance(width, int) else 0)
    for name, size in sizes.items():
        expected = HEADER_BYTES + part.documents * size
        if part.files[name].bytes != expected:
            raise BuildError(
                f"{url}/{part.folder}/{name}: is {part.files[name].bytes:,} bytes, expected {expected:,} for "
                f"{part.documents:,} documents; make the index again"
            )


def _hash_of(file: Artifact) -> str:
    hasher = xxhash.xxh3_128()
    with file.open() as source:
        while data := source.read(_COPY_BYTES):
            hasher.update(data)
    return hasher.hexdigest()


@dataclass(frozen=True)
class _StoredPart:
    """The remote files of an index part; every range is checked against the hashes in blocks.json."""

    url: str
    sizes: tuple[tuple[str, int], ...]  # (file name, bytes)
    blocks: str  # the xxh3-128 of blocks.json
    storage: StorageOptions | None

    def open(self, path: Path) -> io.BufferedReader:
        ranges, info = self._ranges(path)
        return open_object(ranges, info, first_bytes=1)

    def read_range(self, path: Path, start: int, stop: int, is_right: Callable[[bytes], bool]) -> bytes:
        ranges, info = self._ranges(path)
        data = ranges.get(info.key, start, stop)[: stop - start]
        if len(data) < stop - start or not is_right(data):
            raise self._damaged(info.key)
        return data

    def borrow(self, path: Path) -> Path:
        """Copy a file into a temporary file, which the caller removes."""
        with self.open(path) as source, tempfile.NamedTemporaryFile(delete=False) as target:
            shutil.copyfileobj(source, target, _COPY_BYTES)
        return Path(target.name)

    def fetch(self, path: Path) -> None:
        raise NotImplementedError(f"{path}: an index in a store is only read by ranges")

    def content_of(self, path: Path) -> str:
        return _stored_hashes(self)[path.name].xxh3_128

    def _ranges(self, path: Path) -> tuple[CheckedRanges, ObjectInfo]:
        output = _stored_hashes(self)[path.name]

        def damaged() -> None:
            raise self._damaged(path.name)

        return CheckedRanges(_store(self.url, self.storage), output, damaged), ObjectInfo(
            path.name, output.bytes, ""
        )

    def _damaged(self, name: str) -> BuildError:
        return BuildError(f"{self.url}/{name}: is missing or differs from its hashes; make the index again")


@lru_cache(maxsize=256)
def _stored_hashes(part: _StoredPart) -> dict[str, Output]:
    """Read the sizes and hashes of a part's files from its blocks.json."""
    where, sizes = f"{part.url}/{BLOCKS_FILE}", dict(part.sizes)
    data = _store(part.url, part.storage).get(BLOCKS_FILE)
    if hash_bytes(data, ["xxh3_128"])["xxh3_128"] != part.blocks:
        raise BuildError(f"{where}: differs from its hash; make the index again")
    try:
        files = {
            name: Output(sizes[name], file["xxh3_128"], file["blocks"])
            for name, file in load_json(data).items()
        }
        for output in files.values():
            blocks = -(-output.bytes // BLOCK_BYTES)
            if len(block_hashes(output)) != (blocks if blocks > 1 else 0):
                raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BuildError(f"{where}: does not hold the hashes of the files; make the index again") from None
    return files | {BLOCKS_FILE: Output(sizes[BLOCKS_FILE], part.blocks)}


@lru_cache(maxsize=256)
def _store(url: str, storage: StorageOptions | None) -> Store:
    return connect(url, storage)
