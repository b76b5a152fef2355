"""Stage `documents`: writes the documents that a caller gives in Python into files of the work folder.

    documents/<first row>.<digest>/documents.jsonl.zst

This happens before a build looks at its inputs, in the process of the caller, because an iterator cannot be
sent to tasks. Each file is a finished task of its own: about 64 MiB of text, which one task of `clean` reads.
A file is published whole, under the digest of its bytes. So a build that was killed leaves only whole files,
the next one finds those that it would write again, and documents that are added at the end leave the others.
The files go with the work folder, and a work folder in a store needs the disk of this machine for one file.

A note in the work folder lists the files of the last build, so that the work folder can be explained and
cleaned without the documents (`find_given`).

In ids and reports a file is called documents/<first row>-<digest of its texts>.jsonl.zst, wherever the work
folder is, and the number of a record is the number of its row among all documents.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import xxhash
import zstandard

from shardkit.errors import BuildError, RecipeError
from shardkit.files import load_json
from shardkit.progress import Listener, make_listener
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import DecidesNoByte
from shardkit.writers.execution.progress import StageProgress
from shardkit.writers.execution.runner import Journal
from shardkit.writers.execution.stage import Stage, Task
from shardkit.writers.execution.work import Work, run_task
from shardkit.writers.inputs.files import InputFile, local_version
from shardkit.writers.inputs.given_documents import Line, json_lines
from shardkit.writers.inputs.scan import SPLIT_BYTES
from shardkit.writers.recipe.recipe import Recipe

GIVEN_NOTE = "documents.json"  # name of the note
_FILE = "documents.jsonl.zst"
_BUFFER_BYTES = 1 << 18
_LEVEL = 1  # of zstd: each file is read once
_DIGITS = 12  # of row numbers in names, so that names sort as the documents do


def keep_file(
    folder: Path,
    content: str,
    path: Annotated[Path, DecidesNoByte("`content` is the digest of its documents")],
) -> None:
    """Move a finished file from `path` into `folder`."""
    assert content
    path.rename(folder / _FILE)


GIVEN = Stage("documents", "documents", keep_file)


def write_given(
    documents: object,
    recipe: Recipe,
    work: Work,
    *,
    lease_seconds: float,
    progress: bool | Callable[[StageProgress], None],
    text_bytes: int = SPLIT_BYTES,
) -> list[InputFile]:
    """Write documents (`json_lines`) into the work folder; return the files, in order.

    `text_bytes` is the text after which a file ends. Raises BuildError, RecipeError, and what the source
    raises.
    """
    files: list[InputFile] = []
    noted: list[tuple[str, str]] = []
    lines = json_lines(documents, recipe.inputs[0], recipe.limit)
    with (
        Journal(work, lease_seconds=lease_seconds) as journal,
        make_listener(progress) as listener,
        _Report(listener) as report,
    ):
        row, more = 0, True
        while more:
            with _File(journal.work, row) as file:
                for line in lines:  # errors of the source pass as they are
                    if file.add(line):
                        report.send(row + file.documents, file.bytes)
                    if file.text_bytes >= text_bytes:
                        break
                else:
                    more = False
                if file.documents:
                    files.append(file.publish(journal))
                    noted.append((files[-1].name, file.content))
                    row += file.documents
                    report.end_file(row, file.bytes)
        note = json.dumps(noted, indent=1).encode()
        if journal.work.read_note(GIVEN_NOTE) != note:
            journal.work.write_note(GIVEN_NOTE, note)
    return files


def find_given(work: Work) -> tuple[list[InputFile], list[Commit]]:
    """Find the files that the last `write_given` wrote into the work folder, and the commits of their tasks.

    Raises RecipeError if there are none, and BuildError if one was removed.
    """
    note = work.read_note(GIVEN_NOTE)
    if note is None:
        raise RecipeError(
            f"inputs: the recipe names no files, and {work.place} has no documents of build(…, documents=…); "
            "name files in inputs[].path, or build first"
        )
    try:
        noted = [(str(name), str(content)) for name, content in load_json(note)]
        rows = [int(name.partition("/")[2].partition("-")[0]) for name, _ in noted]
    except (ValueError, TypeError, RecursionError):
        raise BuildError(f"work folder {work.place}: notes/{GIVEN_NOTE} is damaged; build again") from None
    tasks = [_task(row, content, Path(_FILE)) for row, (_, content) in zip(rows, noted, strict=True)]
    commits = [commit for commit in work.find(tasks) if commit is not None]
    if len(commits) < len(tasks):
        raise BuildError(f"work folder {work.place}: documents that were given are missing; build again")
    found = zip(noted, commits, rows, strict=True)
    return [_input_file(name, commit, work, row) for (name, _), commit, row in found], commits


def _task(first: int, content: str, path: Path) -> Task:
    return GIVEN.task(f"{first:0{_DIGITS}d}", 0, content, path)


class _File:
    """A file that is being written, in a temporary folder of the work folder; a context manager."""

    def __init__(self, work: Work, first: int) -> None:
        self._work, self._first = work, first
        self.documents = self.text_bytes = self.bytes = 0
        self._texts, self._all = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._waiting: list[Line] = []
        self._waiting_bytes = 0

    def __enter__(self) -> Self:
        try:
            self._folder = self._work.temporary(GIVEN.name)
            self._stored = (self._folder / _FILE).open("wb")
        except OSError as error:
            raise self._explained(error) from error
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self._stream = compressor.stream_writer(self._stored, closefd=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stored.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def content(self) -> str:
        """The digest of the documents that were written so far."""
        return self._all.hexdigest()

    def add(self, line: Line) -> bool:
        """Add one document; return whether all documents so far were written."""
        self.documents += 1
        self.text_bytes += len(line.key)
        self._waiting.append(line)
        self._waiting_bytes += len(line.json)
        if self._waiting_bytes < _BUFFER_BYTES:
            return False
        self._write()
        return True

    def _write(self) -> None:
        data = b"".join(line.json for line in self._waiting)
        self._all.update(data)
        self._texts.update(b"".join(line.key for line in self._waiting))
        try:
            self._stream.write(data)
        except OSError as error:
            raise self._explained(error) from error
        self.bytes += len(data)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _explained(self, error: OSError) -> BuildError:
        problem = f"work folder {self._work.place}: {error.strerror or error}"
        return BuildError(f"{problem}; build again: whole files of documents are kept")

    def publish(self, journal: Journal) -> InputFile:
        """Publish the file, unless the work folder has it already; return it as an input of the build."""
        self._write()
        try:
            self._stream.close()  # type: ignore[no-untyped-call]  # of zstandard
            self._stored.close()
        except OSError as error:
            raise self._explained(error) from error
        task = _task(self._first, self.content, self._folder / _FILE)
        [commit] = journal.find([task])
        if commit is not None and self._work.local is not None and journal.remove_damaged(commit):
            commit = None
        if commit is None:
            commit = run_task(task, task.digest, self._work)
        name = f"{GIVEN.name}/{task.name}-{self._texts.hexdigest()[:16]}.jsonl.zst"
        return _input_file(name, commit, self._work, self._first)


def _input_file(name: str, commit: Commit, work: Work, first: int) -> InputFile:
    output = commit.outputs[_FILE]
    key = f"{commit.key}/{_FILE}"
    if work.local is not None:
        path = commit.folder / _FILE
        place, version = str(path), local_version(path.stat())
    else:
        place, version = f"{work.place}/{key}", work.store.head(key).version
    return InputFile(name, place, output.bytes, version, work.storage, output.xxh3_128, first)


class _Report:
    """Reports how many documents were written; a context manager."""

    def __init__(self, listener: Listener[StageProgress]) -> None:
        self._listener = listener
        self._documents = self._bytes = 0
        self._begin = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.send(self._documents, 0, done=True)

    def end_file(self, documents: int, bytes: int) -> None:
        """Count a whole file with `bytes` of JSON lines; there are `documents` up to its end."""
        self._documents = documents
        self._bytes += bytes

    def send(self, documents: int, bytes: int, *, done: bool = False) -> None:
        """Report the number of documents so far; `bytes` of JSON lines are of the unfinished file."""
        size, seconds = self._bytes + bytes, time.perf_counter() - self._begin
        progress = StageProgress(GIVEN.name, int(done), 1, 0, documents, size, seconds, step=GIVEN.title)
        self._listener(progress)
