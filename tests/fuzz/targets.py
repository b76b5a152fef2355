"""Every reader of files or data that others may have written, as targets of `fuzzing`."""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fuzz.engine import Target
from fuzz.inputs import INPUT_FILES, INPUTS, changed_footer
from fuzz.repairs import repaired_record, repaired_table, repaired_tar, repaired_tar_index
from fuzz.sources import SOURCES
from fuzz.tokenizer_files import TOKENIZER_FILES, TOKENIZERS
from shardkit.cache.indexes import TarIndexes
from shardkit.datasets.dataset import open_dataset
from shardkit.datasets.provenance.answers import Tracer
from shardkit.datasets.provenance.search import Selection
from shardkit.datasets.provenance.table import pieces_of
from shardkit.errors import ShardError
from shardkit.formats import mds, tar
from shardkit.formats.mds import index as mds_index
from shardkit.formats.tar.members import Scanned
from shardkit.formats.tar.shard_list import describe_tar
from shardkit.loaders import StreamingLoader
from shardkit.order.exclusions import Exclusions
from shardkit.publish.contents import find_contents
from shardkit.storage import StorageOptions
from shardkit.storage.hub import HubStore
from shardkit.storage.hub_client import HubAnswer, HubClient
from shardkit.storage.local import LocalStore
from shardkit.storage.memory import MemoryStore
from shardkit.tools.fates import find_dropped, find_fates
from shardkit.writers import build
from shardkit.writers.execution.commit import Commit, Output, facts_of, parse_record, record_of
from shardkit.writers.filters.perplexity import PerplexityConfig
from shardkit.writers.recipe.recipe import load_recipe
from support.audit_runs import log_report, logged_run
from support.filter_runs import judge, text_batch
from support.foreign_tars import tar_bytes
from support.mds_values import EXAMPLES
from support.small_build import RECIPE, make_corpus

__all__ = ["APART", "NAMES", "target"]

_ROWS = np.arange(6 * 8, dtype=np.uint16).reshape(6, 8)
_FEW = 64  # rows of a hostile file that are decoded


def _rows(number: int) -> npt.NDArray[np.uint16]:
    return (_ROWS + number).astype(np.uint16)


def target(name: str) -> Target:
    """The target of that name, one of `NAMES`."""
    kind, _, rest = name.partition("=")
    made = _MAKERS[kind](rest) if rest else _MAKERS[kind]()
    assert made.name == name
    return made


def _read_all(folder: Path) -> None:
    """Open a dataset and decode some rows of each shard: a damaged one must not hide the others."""
    with open_dataset(folder) as dataset:
        assert len(dataset) >= 0
        for number in range(min(5, len(dataset.manifest.shards))):
            try:
                shard = dataset.shard(number)
                views = [shard.fixed_rows(column.name) for column in shard.columns]
            except ShardError:
                continue
            assert {len(view) for view in views if view is not None} <= {len(shard)}
            for row in range(min(len(shard), _FEW)):
                with contextlib.suppress(ShardError):
                    assert isinstance(shard.sample(row), dict)


def _files(write: Callable[[Path], object]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
        return {
            path.relative_to(name).as_posix(): path.read_bytes()
            for path in sorted(Path(name).rglob("*"))
            if path.is_file()
        }


def _tars_only(data: bytes) -> bytes:
    return repaired_tar(data) if data[257:262] == b"ustar" else data


@cache
def _mds_rows(compression: str = "") -> Target:
    def write(folder: Path) -> None:
        shards = [
            mds.write_rows_shard(
                folder,
                f"shard.{n:05d}.mds",
                _rows(n),
                hashes=["xxh64"] if n else [],
                compression=compression,
            )
            for n in range(2)
        ]
        mds.write_index(folder, shards)

    return Target(f"mds-rows={compression}" if compression else "mds-rows", _files(write), _read_all)


def _mds_any_columns() -> Target:
    kinds = [
        *("str", "bytes", "int", "float16", "str_int", "str_float", "str_decimal", "json", "ndarray"),
        *("ndarray:float16", "ndarray:uint16:7", "pil", "png", "list[png]"),
    ]
    values = {**EXAMPLES, "ndarray": EXAMPLES["ndarray:float16"]}

    def write(folder: Path) -> None:
        columns = {kind: kind for kind in kinds}
        with mds.MdsWriter(folder, columns=columns, hashes=["xxh64"], shard_bytes=4096) as writer:
            for number in range(5):
                writer.write({kind: values[kind][number % 2] for kind in kinds})

    return Target("mds-any-columns", _files(write), _read_all)


def _index_table() -> Target:
    def write(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mds_index, "TABLE_SHARDS", 1)
            shards = [mds.write_rows_shard(folder, f"shard.{n:05d}.mds", _rows(n)) for n in range(3)]
            mds.write_index(folder, shards)

    def read(folder: Path) -> None:
        """What is damaged is left alone: index.json says the same."""
        with open_dataset(folder) as dataset:
            assert len(dataset) == 3 * len(_ROWS)
            assert [len(dataset.shard(n)) for n in range(3)] == [len(_ROWS)] * 3

    files = _files(write)
    return Target("index-table", files, read, (mds_index.TABLE_NAME,), refuses=False, repair=repaired_table)


def _tar_rows() -> Target:
    def write(folder: Path) -> None:
        shards = [
            tar.write_rows_shard(folder, f"shard-{n:05d}.tar", _rows(n), key_start=6 * n, hashes=["xxh64"])
            for n in range(2)
        ]
        tar.write_shard_list(folder, shards)

    return Target(
        "tar-rows", _files(write), _read_all, tokens=(b"ustar\x0000", b"\x93NUMPY"), repair=_tars_only
    )


def _tar_foreign() -> Target:
    files = {"part-000.tar": tar_bytes(0, 3), "part-001.tar": tar_bytes(3, 5)}
    tokens = (
        b"30 path=../../x\n",
        b"x" * 100,
        b"ustar  \0",
        b"7777777",
        b"\x80\0\0\0\0\0\0\0\xff\xff\xff\xff",
    )
    return Target("tar-foreign", files, _read_all, tokens=tokens, repair=repaired_tar)


def _card() -> Target:
    files = dict(_mds_rows().files)
    card = {
        "fingerprint": "0" * 32,
        "samples": 12,
        "column": "tokens",
        "files": {"report.html": {"bytes": 1}},
    }
    files["dataset.json"] = json.dumps(card).encode()

    def read(folder: Path) -> None:
        find_contents(LocalStore(folder), strict=False)
        from shardkit.datasets.verify import verify

        verify(folder)

    return Target("card", files, read, ("dataset.json", "index.json"))


def _recipe() -> Target:
    tokens = (b"<<: *x", b"!!python/object/apply:os.system [x]", b"${HOME}", b"\t", b"- " * 300, b"&a [*a]")
    return Target(
        "recipe",
        {"recipe.yaml": RECIPE.encode()},
        lambda folder: load_recipe(folder / "recipe.yaml"),
        tokens=tokens,
    )


@cache
def _dataset() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="shardkit-fuzz-"))
    for name, data in _mds_rows().files.items():
        (folder / name).write_bytes(data)
    return folder


def _state() -> Target:
    with StreamingLoader(_dataset(), batch_size=2, rank=0, world_size=1) as loader:
        next(iter(loader))
        state = json.dumps(loader.state_dict()).encode()

    def read(folder: Path) -> None:
        try:
            loaded = json.loads((folder / "state.json").read_bytes())
        except (ValueError, RecursionError):
            return  # not ours to read: a checkpoint holds the dict
        with StreamingLoader(_dataset(), batch_size=2, rank=0, world_size=1) as loader:
            loader.load_state_dict(loaded)
            assert len(next(_batches(loader))["tokens"]) >= 0

    return Target("state", {"state.json": state}, read, tokens=(b"true", b"{}", b'"carry"'))


def _batches(loader: StreamingLoader) -> Iterator[dict[str, Any]]:
    yield from loader
    yield {"tokens": []}


def _usage_log() -> Target:
    def write(folder: Path) -> None:
        logged_run(_dataset(), folder / "logs", world_size=2, batch_size=2, steps=5)

    logs = _files(write)

    def read(folder: Path) -> None:
        with open_dataset(_dataset()) as dataset:
            report = log_report(folder / "logs", dataset)
        if not report.ok:
            raise ShardError(folder, "the audit says what is wrong")

    return Target("usage-log", logs, read)


def _exclusions() -> Target:
    text = b"# fingerprint: " + b"0" * 32 + b"\n3\n5:9\n\n100:1000000 # gone\n"

    def read(folder: Path) -> None:
        try:
            Exclusions.read(folder / "rows.txt")
        except ValueError as error:  # its contract
            raise ShardError(folder / "rows.txt", str(error)) from error

    return Target("exclusions", {"rows.txt": text}, read, tokens=(b"5:3\n", b"\xc2\xb2"))


def _commit() -> Target:
    outputs = {"tokens.run": Output(7, "0" * 32)}
    commit = Commit("pack", "a", Path(), "0", facts_of(None, outputs))
    record = record_of(commit, {}, outputs)

    def read(folder: Path) -> None:
        if parse_record((folder / "commit.json").read_bytes(), folder) is None:
            raise ShardError(folder, "is no commit: the task runs again")

    return Target("commit", {"commit.json": record}, read, repair=repaired_record)


def _tar_index() -> Target:
    raw = np.frombuffer(tar_bytes(0, 7), dtype=np.uint8)
    origin = ("s3://bucket/a.tar", "1")
    info = describe_tar("a.tar")

    def write(folder: Path) -> None:
        shard = tar.shard_from_raw("a.tar", info, raw)
        indexes = TarIndexes.in_cache(folder, [origin])
        indexes.keep(0, Scanned(len(shard), len(raw), shard.columns), shard.index)

    def read(folder: Path) -> None:
        """What is damaged is made anew; what is believed gives samples."""
        indexes = TarIndexes.in_cache(folder, [origin])
        scanned, index = indexes.scanned(0), indexes.index(0)
        assert scanned is None or len(scanned.columns) >= 0
        shard = tar.shard_from_raw("a.tar", info, raw, index=index)
        for row in range(min(len(shard), _FEW)):
            with contextlib.suppress(ShardError):
                assert isinstance(shard.sample(row), dict)
        assert all(shard.fixed_rows(column.name) is None or len(shard) for column in shard.columns)

    return Target("tar-index", _files(write), read, refuses=False, repair=repaired_tar_index)


@cache
def _built() -> dict[str, bytes]:
    """A small dataset with tables of provenance and of what was removed, in two text formats too."""
    with tempfile.TemporaryDirectory() as name:
        recipe = make_corpus(Path(name), 60)
        outputs = "outputs: [{path: out, shard_bytes: 4KiB}, {path: parquet, format: parquet}, "
        outputs += "{path: lines, format: jsonl, compression: zstd}]\n"
        head = recipe.read_text().partition("output:")[0]
        recipe.write_text(head + outputs)
        build(recipe, workers=1, progress=False)
        return {
            path.relative_to(name).as_posix(): path.read_bytes()
            for folder in ("out", "parquet", "lines")
            for path in sorted((Path(name) / folder).rglob("*"))
            if path.is_file() and path.suffix not in (".html", ".log")
        }


def _part(folder: str) -> dict[str, bytes]:
    return {
        name.removeprefix(f"{folder}/"): data
        for name, data in _built().items()
        if name.startswith(f"{folder}/")
    }


def _text(kind: str) -> Target:
    is_parquet = kind == "parquet"
    return Target(
        f"text={kind}",
        _part(kind),
        _read_all,
        tuple(name for name in _part(kind) if name.startswith(("text-", "documents"))),
        change=changed_footer if is_parquet else None,
    )


def _tables() -> Target:
    """Tables of provenance and of removed documents, as `shardkit trace` reads them."""
    files = _part("out")
    hostile = tuple(name for name in files if name.endswith(".parquet"))

    def read(folder: Path) -> None:
        with open_dataset(folder) as dataset:
            tracer = Tracer(dataset)
            table = tracer.table
            assert table is not None
            rows = pieces_of(table.of_rows([0, 1, len(tracer.dataset) - 1]))
            for _ in table.search(Selection(documents=[piece.document_id for piece in rows])):
                pass
            find_fates(tracer, Selection(files=["*.jsonl"]), limit=5)
            find_dropped(tracer)

    return Target("tables", files, read, hostile, change=changed_footer)


def _blocks() -> Target:
    """Block checksums and what states them, as a remote reader of single rows meets them."""

    def write(folder: Path) -> None:
        columns = {"tokens": "ndarray:uint16:8"}
        with mds.MdsWriter(folder, columns=columns, hashes=["xxh64"], shard_bytes=300) as writer:
            writer.write_rows(np.concatenate([_rows(n) for n in range(5)]))

    files, urls = _files(write), itertools.count()
    right = np.concatenate([_rows(n) for n in range(5)])

    def read(folder: Path) -> None:
        store = MemoryStore(f"memory://fuzz-blocks-{next(urls)}")
        for path in folder.iterdir():
            store.put(path.name, path.read_bytes())
        with open_dataset(store.url, storage=StorageOptions(retry_seconds=1.0)) as dataset:
            assert dataset.shards is not None
            rows = np.array([0, len(right) - 1])
            for row in rows.tolist():
                shard = int(np.searchsorted(dataset.manifest.shard_starts, row, side="right")) - 1
                if not dataset.shards.rows.can_read(shard):
                    raise ShardError(folder, "its rows are not read singly")
                within = row - int(dataset.manifest.shard_starts[shard])
                found = dataset.shards.rows.read({shard: np.array([within])}, 5.0)[shard].data
                assert found.tobytes() == right[row].tobytes(), "a wrong row was delivered"

    return Target("blocks", files, read, ("blocks.bin",), refuses=True)


def _hub() -> Target:
    """What a server says in the Hub's place: commits, listings and descriptions of files."""
    commit, entry = "a" * 40, {"type": "file", "path": "a/b.json", "size": 3, "oid": "b" * 40}
    answers = {
        "revision.json": {"sha": commit},
        "tree.json": [
            entry,
            entry | {"path": "c", "lfs": {"oid": "c" * 64, "size": 9}},
            {"type": "directory"},
        ],
        "paths.json": [entry],
        "link": '<http://127.0.0.1:9/api/datasets/o/n/tree/main?cursor=2>; rel="next"',
    }
    files = {name: json.dumps(answer).encode() for name, answer in answers.items()}

    class Answering:
        """Of urllib3, what the client uses of an answer."""

        def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
            self.status, self.headers, self._body = 200, headers, body

        def read(self, count: int) -> bytes:
            return self._body[:count]

        def drain_conn(self) -> None: ...
        def release_conn(self) -> None: ...
        def close(self) -> None: ...

    def read(folder: Path) -> None:
        def request(self: HubClient, method: str, path: str, where: str, **options: Any) -> Any:
            kind = next(k for k in ("revision", "tree", "paths") if f"/{k}" in path or k == "paths")
            is_first = kind == "tree" and "cursor" not in path
            link = (folder / "link").read_bytes().decode("latin-1") if is_first else ""
            response = Answering((folder / f"{kind}.json").read_bytes(), {"Link": link})
            return HubAnswer(response, {}, path, from_hub=True)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HubClient, "request", request)
            store = HubStore("hf://datasets/o/n")
            for info in store.list():
                assert info.bytes is not None
            store.head("a/b.json")

    return Target("hub", files, read, tokens=(b"null", b"[]", b"{}", b"1e400", b'"..\\/"'))


def _kenlm(name: str) -> Target:
    """A language model, and texts that are scored with it."""
    texts = text_batch(["the cat sat on the mat", "a dog\nran in the house zebra", "größe " * 40])
    config = PerplexityConfig(model="model")

    def read(folder: Path) -> None:
        judge(config, texts, folder)

    model = (Path(__file__).parent.parent / "golden" / "kenlm" / name).read_bytes()
    return Target(f"kenlm={name}", {"model": model}, read, tokens=(b"-inf", b"\\end\\", b"<s>", b"\t\t"))


_MAKERS: dict[str, Callable[..., Target]] = {
    "kenlm": _kenlm,
    "mds-rows": _mds_rows,
    "mds-any-columns": _mds_any_columns,
    "index-table": _index_table,
    "tar-rows": _tar_rows,
    "tar-foreign": _tar_foreign,
    "card": _card,
    "recipe": _recipe,
    "state": _state,
    "exclusions": _exclusions,
    "commit": _commit,
    "usage-log": _usage_log,
    "tar-index": _tar_index,
    "tables": _tables,
    "text": _text,
    "blocks": _blocks,
    "hub": _hub,
    **SOURCES,
    **INPUTS,
    **TOKENIZERS,
}
NAMES = (
    *("mds-rows=zstd", "mds-rows=gz", "litdata=tokens", "litdata=items", "litdata=zstd"),
    *(f"kenlm={name}" for name in ("pruned.arpa", "3.rest", "6.probing", "6.trie", "3.trie-q", "6.trie-qa")),
    *("text=parquet", "text=lines", *(f"input={name}" for name in INPUT_FILES)),
    *(f"tokenizer={name}" for name in TOKENIZER_FILES),
    *(name for name in _MAKERS if name not in ("kenlm", "litdata", "input", "text", "tokenizer")),
)
APART = tuple(
    name
    for name in NAMES
    if name in ("tables", "text=parquet", "input=pdf") or name.endswith((".parquet", ".arrow", ".arrows"))
)
"""Those that are read in libraries which may end the process."""
