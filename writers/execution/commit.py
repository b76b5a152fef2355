"""A commit: the record of a finished task, with the digests of all of its outputs.

A record contains the task's digest, which covers everything that its outputs depend on; the arguments in this
digest; the version of the code; the typed result of the task; and the hashes of its files.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from pydantic import TypeAdapter

from shardkit.errors import BuildError, ShardError
from shardkit.files import load_json
from shardkit.hashing import digest_of
from shardkit.manifest import checked_basename
from shardkit.writers.execution.artifacts import Artifact, BinaryFile, RemoteFiles
from shardkit.writers.execution.code_version import code_version
from shardkit.writers.rows.ledger import Ledger

CONTENT_HASH = "xxh3_128"
BLOCK_BYTES = 1 << 18  # files in stores are read and checked in such blocks; each adds 12 bytes to a record
_BLOCK_HASH_BYTES = 8
_FORMAT = 4
_SEAL = b',\n "seal": "%s"\n}\n'
_SEAL_BYTES = len(_SEAL % (b"0" * 32))
_DIGEST = re.compile("[0-9a-f]{32}")
_LEDGER = TypeAdapter(Ledger)
_DIGEST_CHARACTERS = 16  # part of the digest in a folder's name; few tasks share the rest of the name


@dataclass(frozen=True, slots=True)
class Output:
    """One file that a task wrote: its size and the xxh3-128 of its bytes.

    `blocks` has the xxh3-64 of each block in base64, if the file has more than one block. Ranges read from a
    store are compared with these hashes. It is set only in records, not in `Commit.outputs`.
    """

    bytes: int
    xxh3_128: str
    blocks: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Commit:
    """A finished task: the place of its files, their hashes, and its result.

    A driver keeps one commit per task in memory. To keep it small, `facts` is JSON that `result` and
    `outputs` parse on each access. If the work folder is in a store, `remote` is that folder, and files are
    in the local `folder` only after they were fetched; open them through `files`.
    """

    stage: str
    name: str
    folder: Path
    digest: str
    facts: bytes = field(repr=False)
    reused: bool = False
    remote: RemoteFiles | None = field(default=None, compare=False, repr=False)
    absent: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Runs that were not there when a build found this task: they had been read by all of their readers."""
    cpu_seconds: float = field(default=0.0, compare=False, repr=False)
    """CPU time of the task if this build ran it; it is not in the record."""

    @property
    def key(self) -> str:
        """The key of the task, which is also the name of its folder in the work folder."""
        return task_key(self.stage, self.name, self.digest)

    @property
    def result(self) -> Any:
        """The task's result as plain data; `Stage.result` parses it."""
        return json.loads(self.facts)["result"]

    @property
    def outputs(self) -> dict[str, Output]:
        """The files that the task wrote, by name, without the hashes of their blocks."""
        return {name: Output(*output) for name, output in json.loads(self.facts)["outputs"].items()}

    @property
    def files(self) -> Artifact:
        """The handle of the folder with all outputs, as an argument of later tasks."""
        return Artifact(self.folder, self.remote, self.content)

    def file(self, name: str) -> Artifact:
        """Return the handle of one output, as an argument of later tasks."""
        return Artifact(self.folder / name, self.remote, self.outputs[name].xxh3_128)

    @property
    def content(self) -> str:
        """The digest of all outputs, which is a part of the digests of later tasks that read them."""
        return digest_of({name: output.xxh3_128 for name, output in self.outputs.items()})

    @property
    def bytes(self) -> int:
        """Total size of all outputs that the task wrote, in bytes."""
        return sum(output.bytes for output in self.outputs.values())

    @property
    def held_bytes(self) -> int:
        """Total size of the outputs that are there, in bytes."""
        return sum(output.bytes for name, output in self.outputs.items() if name not in self.absent)

    @property
    def has_ledger(self) -> bool:
        """Whether the task's result has a ledger: counts of documents read, kept, dropped and quarantined."""
        return isinstance(result := self.result, dict) and "ledger" in result

    def ledger(self) -> Ledger:
        """Return the ledger in the task's result; raises KeyError if it has none."""
        return _LEDGER.validate_python(self.result["ledger"])


@dataclass(frozen=True)
class Record:
    """The record of a finished task: its commit, the arguments and code version in its digest, its files."""

    commit: Commit
    args: Mapping[str, Any]
    code: str
    outputs: Mapping[str, Output]


def task_key(stage: str, name: str, digest: str) -> str:
    """Return `stage/name.digest`, the name of a task's folder in a work folder."""
    return f"{stage}/{name}.{digest[:_DIGEST_CHARACTERS]}"


def block_hashes(output: Output) -> list[bytes]:
    """Return the xxh3-64 of each block (`BLOCK_BYTES`) of a file; [] if the file has only one block."""
    data = base64.b64decode(output.blocks)
    return [data[at : at + _BLOCK_HASH_BYTES] for at in range(0, len(data), _BLOCK_HASH_BYTES)]


def hash_output(path: Path) -> Output:
    """Return the size and hashes of a file. There are no block hashes if the file has only one block."""
    with path.open("rb", buffering=0) as file:
        return hash_file(file)


def hash_file(file: BinaryFile) -> Output:
    """Return the size and hashes of an open file, read from its current position; see `hash_output`."""
    whole, blocks, size = xxhash.xxh3_128(), bytearray(), 0
    while data := _read_block(file):
        whole.update(data)
        size += len(data)
        blocks += xxhash.xxh3_64_digest(data)
    text = base64.b64encode(blocks).decode() if size > BLOCK_BYTES else ""
    return Output(size, whole.hexdigest(), text)


def _read_block(file: BinaryFile) -> bytes:
    pieces = []
    left = BLOCK_BYTES
    while left and (piece := file.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def facts_of(result: object, outputs: Mapping[str, Output]) -> bytes:
    """Return `Commit.facts`: the result and the outputs of a task as JSON."""
    listed = {name: (output.bytes, output.xxh3_128) for name, output in outputs.items()}
    facts = {"result": result, "outputs": listed}
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()


def contents(commits: Iterable[Commit]) -> str:
    """Return a digest of all outputs of several tasks, in order, for the digests of later tasks."""
    return digest_of([commit.content for commit in commits])


def check_same(ours: Commit, theirs: Commit) -> None:
    """Raise BuildError if two runs of one task wrote different bytes."""
    one, two = ours.outputs, theirs.outputs
    if one == two:
        return
    names = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    raise BuildError(
        f"task {ours.stage}/{ours.name}: two runs of it wrote different bytes ({', '.join(names)}); are "
        f"shardkit, its libraries and the input files the same on all machines?"
    )


def record_of(commit: Commit, args: Mapping[str, Any], outputs: Mapping[str, Output]) -> bytes:
    """Return a task's record as JSON that ends with its own hash; `args` are the arguments in its digest."""
    listed = {
        name: {"bytes": output.bytes, CONTENT_HASH: output.xxh3_128}
        | ({"blocks": output.blocks} if output.blocks else {})
        for name, output in outputs.items()
    }
    record = {
        "format": _FORMAT,
        "stage": commit.stage,
        "name": commit.name,
        "digest": commit.digest,
        "code": code_version(),
        "args": args,
        "result": commit.result,
        "outputs": listed,
    }
    return _sealed(json.dumps(record, indent=1, sort_keys=True).encode())


def parse_record(data: bytes, folder: Path, remote: RemoteFiles | None = None) -> Record | None:
    """Parse a record of a task whose files are in `folder`; return None if it is damaged or not a record."""
    if _sealed(data[:-_SEAL_BYTES] + b"\n}") != data:
        return None
    try:
        record = load_json(data)
        outputs = {
            checked_basename(name, folder): _output(output) for name, output in record["outputs"].items()
        }
        if not all(isinstance(record[key], str) for key in ("stage", "name", "digest", "code")):
            return None
        if not isinstance(record["args"], dict):
            return None
        commit = Commit(
            record["stage"],
            record["name"],
            folder,
            record["digest"],
            facts_of(record["result"], outputs),
            reused=True,
            remote=remote,
        )
        return Record(commit, record["args"], record["code"], outputs)
    except (ShardError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _output(stated: Mapping[str, Any]) -> Output:
    """Parse an entry of a record's `outputs`; raises ValueError, KeyError or TypeError if it is invalid."""
    size, digest, blocks = stated["bytes"], stated[CONTENT_HASH], stated.get("blocks", "")
    if type(size) is not int or size < 0 or type(blocks) is not str or _DIGEST.fullmatch(digest) is None:
        raise ValueError("size, hash or block hashes of a file have a wrong type or form")
    if blocks and len(base64.b64decode(blocks, validate=True)) != _BLOCK_HASH_BYTES * -(-size // BLOCK_BYTES):
        raise ValueError("the number of block hashes does not match the size of the file")
    return Output(size, digest, blocks)


def _sealed(body: bytes) -> bytes:
    """Add the hash of a JSON object's text as its last key, so that a changed byte on disk is detected."""
    return body[:-2] + _SEAL % xxhash.xxh3_128_hexdigest(body).encode()
