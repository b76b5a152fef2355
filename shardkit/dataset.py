"""Any MDS dataset or folder of WebDataset tars, as one sequence of samples.

`open_dataset` finds out what a path holds and reads the index only; shards open when a sample of theirs is
asked for. The most recently used shards stay open, bounded in number (a map holds a file descriptor) and in
bytes decompressed into memory. Shards that fall out are forgotten, not closed: a thread that still reads one,
or a view that still shows it, keeps it alive. A `Dataset` may be shared by threads and pickled for processes.
"""

from __future__ import annotations

import json
import operator
import resource
from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Protocol, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from shardkit.errors import ShardError
from shardkit.index import Column, Manifest, ShardInfo

__all__ = ["Dataset", "ShardReader", "open_dataset"]

MAX_OPEN_SHARDS = 1024
MAX_RESIDENT_BYTES = 2 << 30  # of decompressed shards held in memory; the newest stays whatever its size
MAX_CARD_BYTES = 16 << 20
CARD_NAME = "dataset.json"
_MAGIC = frozenset("*?[")


class ShardReader(Protocol):
    """What open shards of both formats can do."""

    info: ShardInfo

    def __len__(self) -> int: ...
    def sample(self, row: int) -> dict[str, object]: ...
    def fixed_rows(self, column: str) -> npt.NDArray[np.generic] | None: ...
    @property
    def columns(self) -> tuple[Column, ...]: ...
    def close(self) -> None: ...


class Dataset:
    """The samples of a dataset, by number, in the order of its manifest."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        *,
        card: dict[str, object] | None = None,
        allow_pickle: bool = False,
        verify: bool = False,
        decode: bool = True,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.card = card
        self._allow_pickle = allow_pickle
        self._verify = verify
        self._decode = decode
        self._lock = Lock()
        self._open: OrderedDict[int, ShardReader] = OrderedDict()

    @property
    def fingerprint(self) -> str:
        """Identifies the shards and their order; see `Manifest.fingerprint`."""
        return self.manifest.fingerprint

    def __len__(self) -> int:
        return self.manifest.samples

    def __getitem__(self, index: SupportsIndex) -> dict[str, object]:
        """Sample `index` as {column: value}; negative numbers count from the end."""
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.path}: sample {number} of {len(self)}")
        number %= len(self)
        starts = self.manifest.shard_starts
        shard = int(np.searchsorted(starts, number, side="right")) - 1
        return self.shard(shard).sample(number - int(starts[shard]))

    def __iter__(self) -> Iterator[dict[str, object]]:
        for number in range(len(self.manifest.shards)):
            shard = self.shard(number)
            for row in range(len(shard)):
                yield shard.sample(row)

    def shard(self, number: int) -> ShardReader:
        """Shard `number` of the manifest, open. Thread-safe."""
        with self._lock:
            shard = self._open.get(number)
            if shard is not None:
                self._open.move_to_end(number)
                return shard
        # Outside the lock, so that threads open different shards at once; at worst two open the same one.
        opened = self._open_shard(self.manifest.shards[number])
        with self._lock:
            shard = self._open.setdefault(number, opened)
            self._open.move_to_end(number)
            self._forget_oldest()
        return shard

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the first shard that has samples, or ().

        Shards are taken to be alike; `token_column` is the one property checked on all of them.
        """
        filled = np.flatnonzero(self.manifest.shard_samples)
        return self._columns_of(int(filled[0])) if len(filled) else ()

    @cached_property
    def token_column(self) -> str | None:
        """The column that holds one row of integers of constant length in every sample, or None.

        "tokens" (in tars: "tokens.npy") if it is one; otherwise the only such column. Tars whose list
        does not state columns are opened for this, each once.
        """
        candidates = {c.name: c for c in self.columns if _token_layout(c) is not None}
        preferred = [c for n, c in candidates.items() if n in ("tokens", "tokens.npy")]
        column = next(iter(preferred or candidates.values()), None)
        if column is None or (not preferred and len(candidates) > 1):
            return None
        known: set[tuple[Column, ...]] = set()
        for number in np.flatnonzero(self.manifest.shard_samples):
            columns = self._columns_of(int(number))
            if columns not in known and column not in columns:
                return None
            known.add(columns)
        return column.name

    @property
    def sequence_length(self) -> int | None:
        """Tokens of a row of `token_column`."""
        layout = self._token_layout
        return None if layout is None else layout[1]

    @property
    def token_dtype(self) -> np.dtype[np.generic] | None:
        """Type of `token_column` as stored."""
        layout = self._token_layout
        return None if layout is None else layout[0]

    def close(self) -> None:
        """Forget the open shards; the dataset stays usable and opens them again when asked."""
        with self._lock:
            self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_open")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lock, self._open = Lock(), OrderedDict()

    @cached_property
    def _token_layout(self) -> tuple[np.dtype[np.generic], int] | None:
        column = next((c for c in self.columns if c.name == self.token_column), None)
        return None if column is None else _token_layout(column)

    def _columns_of(self, number: int) -> tuple[Column, ...]:
        return self.manifest.shards[number].columns or self.shard(number).columns

    def _open_shard(self, info: ShardInfo) -> ShardReader:
        if self.manifest.format == "mds":
            from shardkit import mds

            return mds.open_shard(self.path, info, allow_pickle=self._allow_pickle, verify=self._verify)
        from shardkit import tar

        return tar.open_shard(
            self.path, info, allow_pickle=self._allow_pickle, verify=self._verify, decode=self._decode
        )

    def _forget_oldest(self) -> None:
        """Hold the bounds; the lock is held by the caller."""
        limit = _open_shards_limit()
        while len(self._open) > 1:
            resident = sum(s.info.raw.bytes for s in self._open.values() if s.info.compression)
            if len(self._open) <= limit and resident <= MAX_RESIDENT_BYTES:
                return
            self._open.popitem(last=False)


def _open_shards_limit() -> int:
    """Maps hold a descriptor each: leave three quarters of the process's to others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_SHARDS if soft == resource.RLIM_INFINITY else max(8, min(MAX_OPEN_SHARDS, soft // 4))


def _token_layout(column: Column) -> tuple[np.dtype[np.generic], int] | None:
    """(type, length) of a column of 1-D integer rows of constant size."""
    parts = column.encoding.split(":")
    if column.size is None or len(parts) != 3 or parts[0] != "ndarray" or not parts[2].isdigit():
        return None
    try:
        dtype = np.dtype(parts[1])
    except TypeError:
        return None
    return (dtype, int(parts[2])) if dtype.kind in "ui" and int(parts[2]) > 0 else None


def open_dataset(
    path: str | Path, *, allow_pickle: bool = False, verify: bool = False, decode: bool = True
) -> Dataset:
    """Open a folder with index.json (MDS) or shards.json (tars), the index itself, a tar, or tars by pattern.

    Tars without a list are opened one by one, in the order of their names, to count their samples.
    `verify` checks each shard's hashes when it opens, and the card's fingerprint. `allow_pickle` lets
    pickled columns run their code. `decode=False` gives members of tars as bytes. ShardError says what is
    wrong with a dataset, or what was looked for.
    """
    if "://" in str(path):
        raise ShardError(path, "remote datasets cannot be opened yet; copy the folder to a local path")
    given = Path(path)
    folder, manifest = _find(given)
    whole = given.is_dir() or given.suffix == ".json"  # a card speaks of a whole dataset, not of some tars
    card = _read_card(folder / CARD_NAME) if whole else None
    if verify and card and card.get("fingerprint", manifest.fingerprint) != manifest.fingerprint:
        problem = (
            f"is the card of another dataset: fingerprint {card['fingerprint']}, index {manifest.fingerprint}"
        )
        raise ShardError(folder / CARD_NAME, problem)
    return Dataset(folder, manifest, card=card, allow_pickle=allow_pickle, verify=verify, decode=decode)


def _find(path: Path) -> tuple[Path, Manifest]:
    """The folder that shards' names are relative to, and the manifest."""
    from shardkit import tar
    from shardkit.tar.compressed import is_tar_name

    if path.is_dir():
        return path, _find_in_folder(path)
    if path.is_file():
        if is_tar_name(path.name):
            return path.parent, Manifest("tar", tar.scan_folder(path.parent, [path.name]))
        if path.name == "index.json":
            from shardkit import mds

            return path.parent, mds.read_index(path)
        if path.suffix == ".json":
            return path.parent, tar.read_shard_list(path)
        raise ShardError(path, "is neither a folder, an index (.json) nor a tar")
    if _MAGIC.isdisjoint(str(path)):
        raise ShardError(path, "there is no such file or folder")
    parts = path.parts
    fixed = next(i for i, part in enumerate(parts) if not _MAGIC.isdisjoint(part))
    folder = Path(*parts[:fixed])
    names = sorted(
        p.relative_to(folder).as_posix() for p in folder.glob("/".join(parts[fixed:])) if p.is_file()
    )
    if not names or not all(map(is_tar_name, names)):
        other = next((n for n in names if not is_tar_name(n)), None)
        found = "no file matches" if other is None else f"it matches {other}, which is no tar"
        raise ShardError(path, f"a pattern must name .tar files: {found}")
    return folder, Manifest("tar", tar.scan_folder(folder, names))


def _find_in_folder(folder: Path) -> Manifest:
    from shardkit import tar
    from shardkit.tar.shard_list import LIST_NAME, tar_files

    is_mds, is_list = (folder / "index.json").is_file(), (folder / LIST_NAME).is_file()
    if is_mds and is_list:
        raise ShardError(folder, f"has both index.json and {LIST_NAME}; open the one that is meant")
    if is_mds:
        from shardkit import mds

        return mds.read_index(folder)
    if is_list:
        return tar.read_shard_list(folder)
    if (folder / CARD_NAME).exists() or (folder / "provenance").is_dir():
        problem = (
            f"is an unfinished build: neither index.json nor {LIST_NAME} is there yet; run the build again"
        )
        raise ShardError(folder, problem)
    names = tar_files(folder)
    if not names:
        raise ShardError(
            folder, f"holds no dataset: looked for index.json (MDS), {LIST_NAME} and *.tar files"
        )
    return Manifest("tar", tar.scan_folder(folder, names))


def _read_card(file: Path) -> dict[str, object] | None:
    if not file.is_file():
        return None
    if file.stat().st_size > MAX_CARD_BYTES:
        raise ShardError(file, f"a dataset's card is larger than {MAX_CARD_BYTES:,} bytes")
    try:
        card = json.loads(file.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise ShardError(file, f"cannot be read: {error}") from error
    if not isinstance(card, dict):
        raise ShardError(file, "a dataset's card must be a JSON object")
    return card
