"""The dedup index of a corpus, against which later builds remove near-duplicates without having its texts.

    dedup-index.json   settings, counts, sources, and each file's size and xxh3-128; written last
    part-00000/…       for each split a part (population.py) of the documents that stayed:
      documents.npy    INDEXED: priority, sizes, and the place of the sketch
      prints.npy       uint8[n, permutations]: a byte of each value of the signature, for hubs (hubs.py)
      sketches.bin     the n-grams (sketches.py)
    table-00000/…      for each range of keys what leads to the documents of all parts:
      words.run        WORDS: the keys of their words
      bands.run        BANDS_OF_INDEX: the keys of their bands
    …/blocks.json      the xxh3-64 of the blocks of these files, which check ranges when they are read

An index is a folder, or the copy of one in a store; tasks read ranges of it, without a local copy. A build
reads those blocks of 4 KiB of the tables that can have its own keys: first of words, with which documents
that are in the index go before anything else is done for them (known.py); then, of the bands of the others,
candidates; and of these the rows of the parts. So a build costs what its own documents cost, and at most a
pass over the tables: 20 bytes for words and 168 for 14 bands, a document of the index.

Only the `sketch` smallest n-grams of each document are stored, so that the index's size does not grow with
the texts. Of a document with no more distinct n-grams than that, only hashes are shortened: in a hundredth of
the pairs of long web pages, an n-gram is taken for another one (compare.py). For others the
similarity s is an unbiased estimate (compare.py) whose standard deviation is at most sqrt(s (1 - s) /
sketch): 0.0125 for s = 0.8 and sketch = 1,024. By default a document takes 344 bytes, and 9.5 to 18.5 bits
for each distinct n-gram, up to 1.3 KB.

An index may come from an untrusted source. Opening it checks the size of each table, and the number of rows:
in a folder by the table's header, in a store by the table's size. Stages check the numbers they read from it
before compiled code uses them as addresses.

It appears whole or not at all (../index_build.py), and its bytes depend on the documents and settings alone.
Signatures are comparable only if settings, Unicode version and hash functions are the same;
`DedupIndex.check` names the differences. Indexes of formats 1 and 2, of versions up to 0.2, must be made
again.
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
from shardkit.writers.dedup.exact import partition_bounds
from shardkit.writers.dedup.population import DOCUMENTS_FILE, INDEX_PRINTS, INDEXED, Part
from shardkit.writers.dedup.signatures import band_keys, bands_and_rows, sign_batch
from shardkit.writers.dedup.sketches import SKETCHES_FILE
from shardkit.writers.dedup.tables import HEADER_BYTES, RowFile, Rows
from shardkit.writers.exchange.exchange import Exchanged, Segment, Slice, Table
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.checked_ranges import CheckedRanges, get_checked
from shardkit.writers.execution.commit import BLOCK_BYTES, Output, block_hashes
from shardkit.writers.kernels.shingles import shingle_batch
from shardkit.writers.kernels.words import normalization_version

# key: the first half of the hash of a document's words; `low`: the second half; `number` is over all parts
WORDS = Table("words.run", np.dtype([("key", "<u8"), ("low", "<u8"), ("number", "<u4")]))

BANDS_OF_INDEX = Table("bands.run", np.dtype([("key", "<u8"), ("number", "<u4")]))

PART_FILES = (DOCUMENTS_FILE, INDEX_PRINTS, SKETCHES_FILE)

TABLE_FILES = (WORDS.file, BANDS_OF_INDEX.file)

# Small blocks, since a build looks for few keys
TABLE_LIMITS = replace(DEFAULT_LIMITS, block_bytes=4 << 10)

BLOCKS_FILE = "blocks.json"

_COPY_BYTES = 16 << 20

INDEX_FILE = "dedup-index.json"

FORMAT = 4

MOST_DOCUMENTS = 1 << 32  # `number` of the tables has 32 bits

SKETCH = 1024  # default number of hashes stored per document

MIN_SKETCH, MAX_SKETCH = 64, 1 << 20  # 64: standard deviation of 0.05 at s = 0.8; 2^20: 8 MiB per document

_THREADS = 8

_REMEDY = "make the index again"

_PROBE = "Ämter, straße: the 2nd ΟΔΟΣ of 12 — and e\u0301tudes in 漢字."

Count = Annotated[int, Field(ge=0)]


class _File(StrictModel):
    bytes: Count
    xxh3_128: str


class _Table(StrictModel):
    folder: Annotated[str, Field(pattern=r"^(part|table)-[0-9a-f]{5,32}$")]
    files: dict[str, _File]

    @property
    def digest(self) -> str:
        """The digest of the files."""
        return digest_of({name: file.xxh3_128 for name, file in self.files.items()})


class _Part(_Table):
    documents: Count
    bytes: Count


class IndexRecord(StrictModel):
    """The contents of dedup-index.json. The tables have equal ranges of keys, in order."""

    format: Literal[4]
    shardkit_version: str
    settings: dict[str, Any]
    sketch: Count
    documents: Count
    bytes: Count
    made_from: dict[str, Any]
    parts: list[_Part]
    tables: list[_Table]

    @property
    def folders(self) -> Sequence[_Table]:
        """The parts and the tables."""
        return [*self.parts, *self.tables]


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

    @cached_property
    def words(self) -> Exchanged:
        """The WORDS of all documents."""
        return self._table(WORDS)

    @cached_property
    def bands(self) -> Exchanged:
        """The BANDS_OF_INDEX of all documents."""
        return self._table(BANDS_OF_INDEX)

    def _table(self, table: Table) -> Exchanged:
        segments = []
        for number, listed in enumerate(self.record.tables):
            file, edges = listed.files[table.file], partition_bounds(number, len(self.record.tables))
            segments.append(Segment(self._folder(listed) / table.file, file.bytes, file.xxh3_128, *edges))
        return Exchanged(table, [tuple(segments)], TABLE_LIMITS)

    def _folder(self, part: _Table) -> Artifact:
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
        return sum(file.bytes for folder in self.record.folders for file in folder.files.values())

    @cached_property
    def digest(self) -> str:
        """The digest of the settings and of every table, which identifies the index as an input of tasks."""
        record = self.record.model_dump(mode="json")
        folders = [*record["parts"], *record["tables"]]
        for folder in folders:
            del folder["folder"]  # its name is not content
        return digest_of([record["format"], record["settings"], record["sketch"], folders])

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
            (self._folder(folder) / name, file)
            for folder in self.record.folders
            for name, file in sorted(folder.files.items())
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
        record = self.record.model_dump(mode="json", exclude={"parts", "tables"})
        return {
            "location": str(self.location),
            **record,
            "parts": len(self.record.parts),
            "stored_bytes": self.stored_bytes,
            "digest": self.digest,
        }


@dataclass(frozen=True, slots=True)
class IndexedKeys:
    """Rows of WORDS or BANDS_OF_INDEX of one index, whose first document has the number `first`.

    It is plain data, to be an argument of a task.
    """

    keys: Slice
    first: int
    documents: int

    def matching(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
        """Return the rows with these strictly ascending keys, in order, reading few others.

        Raises BuildError if one has the number of no document (damaged index).
        """
        found = self.keys.matching(keys)
        if found["number"].max(initial=0) >= max(1, self.documents):
            raise BuildError(
                f"dedup.near.against: {self.keys.runs[0][0].file}: refers to a document that is not in the "
                "index; make the index again"
            )
        return found


def keys_of(
    indexes: Sequence[DedupIndex], table: Table, first: int, start: int, stop: int
) -> tuple[IndexedKeys, ...]:
    """Return the rows of `table` (WORDS or BANDS_OF_INDEX) with keys in [start, stop) of each index.

    `first` is the number of the first document of the first index.
    """
    found = []
    for index in indexes:
        rows = (index.words if table == WORDS else index.bands).slice(start, stop)
        found.append(IndexedKeys(rows, first, index.documents))
        first += index.documents
    return tuple(found)


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
    for folder in record.folders:
        _check_sizes(path, folder)
    with ThreadPoolExecutor(_THREADS) as pool:  # one by one takes long on a network disk
        list(pool.map(lambda part: _check_rows(path, part, record.settings), record.parts))
    return DedupIndex(path, record)


def _open_stored(url: str, storage: StorageOptions | None) -> DedupIndex:
    where = f"{url}/{INDEX_FILE}"
    try:
        store = connect(url, storage)
        record = _parse(where, store.get(INDEX_FILE))
        present = {info.key: info.bytes for info in store.list()}
    except ObjectNotFoundError:
        raise BuildError(f"{where}: does not exist; {_MAKES}") from None
    except StoreError as error:
        raise BuildError(f"{where}: cannot be read: {error}") from error
    for folder in record.folders:
        for name, file in folder.files.items():
            key = f"{folder.folder}/{name}"
            if present.get(key) != file.bytes:
                found = "is missing" if key not in present else f"is {present[key]:,} bytes long"
                raise BuildError(f"{url}/{key}: {found}, expected {file.bytes:,} bytes; make the index again")
    for part in record.parts:
        _check_row_bytes(url, part, record.settings)
    return DedupIndex(url, record, storage)


_MAKES = "`shardkit dedup-index` makes an index"


def _parse(file: str, text: bytes) -> IndexRecord:
    try:
        data = load_json(text)
    except ValueError as error:
        raise BuildError(f"{file}: is not valid JSON: {error}; make the index again") from None
    version = data.get("format") if isinstance(data, dict) else None
    if version != FORMAT:
        raise BuildError(
            f"{file}: is format {version!r}, this shardkit reads format {FORMAT}; make the index again"
        )
    try:
        record = IndexRecord.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BuildError(f"{file}: {where}: {first['msg']}; make the index again") from None
    if record.documents != sum(part.documents for part in record.parts):
        raise BuildError(f"{file}: `documents` is not the sum over the parts; make the index again")
    if record.documents > MOST_DOCUMENTS:
        raise BuildError(f"{file}: has more than {MOST_DOCUMENTS:,} documents; make the index again")
    for folders, names in ((record.parts, PART_FILES), (record.tables, TABLE_FILES)):
        for folder in folders:
            if set(folder.files) != {*names, BLOCKS_FILE}:
                problem = f"{folder.folder} does not list exactly the files of an index"
                raise BuildError(f"{file}: {problem}; make the index again")
    if not record.tables:
        raise BuildError(f"{file}: lists no tables; make the index again")
    return record


def _check_sizes(path: Path, part: _Table) -> None:
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
    prints = RowFile(folder / INDEX_PRINTS)
    width = settings.get("minhash", {}).get("permutations")
    if prints.dtype != np.dtype("u1") or prints.row_shape != (width,):
        problem = f"has rows of {prints.row_shape} {prints.dtype}, expected ({width},) uint8"
        raise BuildError(f"{folder / INDEX_PRINTS}: {problem}; make the index again")
    found = {DOCUMENTS_FILE: len(Rows(folder / DOCUMENTS_FILE, INDEXED)), INDEX_PRINTS: prints.rows}
    for name, rows in found.items():
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
    sizes = {DOCUMENTS_FILE: INDEXED.itemsize, INDEX_PRINTS: width if isinstance(width, int) else 0}
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
        # Not by blocks.json: runs have hashes of their own blocks, which are smaller.
        def is_whole(data: bytes) -> bool:
            return len(data) == stop - start and is_right(data)

        def damaged() -> None:
            raise self._damaged(path.name)

        return get_checked(_store(self.url, self.storage), path.name, (start, stop), is_whole, damaged)

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
