"""A commit: the record of a finished task, with the digests of all of its outputs.

A record holds the digest of everything that decided the task's outputs, the arguments that this digest was
taken from, the version of the code, the typed result of the task and the hashes of its files.
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
BLOCK_BYTES = 1 << 18  # unit in which files in stores are read and checked; 12 bytes of a commit each
_BLOCK_HASH_BYTES = 8
_FORMAT = 4
_SEAL = b',\n "seal": "%s"\n}\n'
_SEAL_BYTES = len(_SEAL % (b"0" * 32))
_DIGEST = re.compile("[0-9a-f]{32}")
_LEDGER = TypeAdapter(Ledger)
_DIGEST_CHARACTERS = 16  # of a folder's name: tasks of one name are few


@dataclass(frozen=True, slots=True)
class Output:
    """One file that a task wrote: its size and the xxh3-128 of its bytes.

    `blocks` has the xxh3-64 of each block of a larger file: ranges that come from a store are compared with
    them. Only records have it.
    """

    bytes: int
    xxh3_128: str
    blocks: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Commit:
    """A finished task: where its files are, their hashes, and what it counted.

    A driver holds one for each task, so it is small: `facts` is JSON, which `result` and `outputs` parse each
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
        """The key of its task, which is also the name of its folder in the work folder."""
        return task_key(self.stage, self.name, self.digest)

    @property
    def result(self) -> Any:
        """The task's result as plain data; `Stage.result` parses it."""
        return json.loads(self.facts)["result"]

    @property
    def outputs(self) -> dict[str, Output]:
        """The files that it wrote, without the hashes of their blocks."""
        return {name: Output(*output) for name, output in json.loads(self.facts)["outputs"].items()}

    @property
    def files(self) -> Artifact:
        """The handle of its folder with all outputs, as an argument of later tasks."""
        return Artifact(self.folder, self.remote, self.content)

    def file(self, name: str) -> Artifact:
        """The handle of one output, as an argument of later tasks."""
        return Artifact(self.folder / name, self.remote, self.outputs[name].xxh3_128)

    @property
    def content(self) -> str:
        """Digest of all outputs: what later tasks name as their input."""
        return digest_of({name: output.xxh3_128 for name, output in self.outputs.items()})

    @property
    def bytes(self) -> int:
        """Size of all outputs."""
        return sum(output.bytes for output in self.outputs.values())

    @property
    def has_ledger(self) -> bool:
        """Whether the stage's result says what became of documents."""
        return isinstance(result := self.result, dict) and "ledger" in result

    def ledger(self) -> Ledger:
        """Return the ledger of what became of the documents; KeyError if the stage's result has none."""
        return _LEDGER.validate_python(self.result["ledger"])


@dataclass(frozen=True)
class Record:
    """All that the record of a finished task says: also what its digest is of, and hashes of blocks."""

    commit: Commit
    args: Mapping[str, Any]
    code: str
    outputs: Mapping[str, Output]


def task_key(stage: str, name: str, digest: str) -> str:
    """`stage/name.digest`: what a task is called in a work folder."""
    return f"{stage}/{name}.{digest[:_DIGEST_CHARACTERS]}"


def block_hashes(output: Output) -> list[bytes]:
    """The xxh3-64 of each block of `BLOCK_BYTES`."""
    data = base64.b64decode(output.blocks)
    return [data[at : at + _BLOCK_HASH_BYTES] for at in range(0, len(data), _BLOCK_HASH_BYTES)]


def hash_output(path: Path) -> Output:
    """Return size and hashes of a file; a file of one block has no block hashes."""
    with path.open("rb", buffering=0) as file:
        return hash_file(file)


def hash_file(file: BinaryFile) -> Output:
    """Return the same of an open file."""
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
    """`Commit.facts`."""
    listed = {name: (output.bytes, output.xxh3_128) for name, output in outputs.items()}
    facts = {"result": result, "outputs": listed}
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()


def contents(commits: Iterable[Commit]) -> str:
    """Digest of all outputs of these tasks, in this order: what later tasks name as their input."""
    return digest_of([commit.content for commit in commits])


def check_same(ours: Commit, theirs: Commit) -> None:
    """BuildError if two runs of one task gave different bytes."""
    one, two = ours.outputs, theirs.outputs
    if one == two:
        return
    names = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    raise BuildError(
        f"task {ours.stage}/{ours.name}: two runs of it gave different bytes ({', '.join(names)}); are "
        f"shardkit, its libraries and the input files the same on all machines?"
    )


def record_of(commit: Commit, args: Mapping[str, Any], outputs: Mapping[str, Output]) -> bytes:
    """The commit of a task as JSON, with a seal; `args` are what its digest is of."""
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
