"""What the sides of comparisons share: one tool, one process, requests on stdin.

`python daft_side.py [--core N]`: each line on stdin is a request {"task", "file", "documents", …} and each
line on stdout its figures, as JSON. A task is a function of (prepared documents, request); preparing is not
timed, CPU seconds are of the process and of the children it has waited for. Imports nothing but pyarrow, so
that a peer may live in an environment without shardkit.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

Request = dict[str, Any]
Task = Callable[[Any, Request], Any]

NGRAM = 5
BANDS, ROWS = 14, 8
FILTERS = ("repetition", "gopher", "fineweb")  # tasks
WHOSE = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def read_texts(file: str, documents: int | None) -> pa.Table:
    """row (int64) and text (large_string) of the first documents of an Arrow file, in memory."""
    with pa.OSFile(file) as source:
        table = pa.ipc.open_file(source).read_all()
    table = table.select(["text"]).slice(0, documents)
    return table.add_column(0, "row", pa.array(range(len(table)), pa.int64()))


def word_ngrams(text: str) -> list[str]:
    """The cheapest that is usual: lower case, words between white space, joined by spaces."""
    words = text.lower().split()
    count = max(1, len(words) - NGRAM + 1)
    return [" ".join(words[at : at + NGRAM]) for at in range(count)]


def texts_of(table: pa.Table) -> list[str]:
    return table.column("text").to_pylist()  # type: ignore[no-any-return]


def write_jsonl(table: pa.Table) -> Path:
    """The texts as JSON Lines, eight files in a temporary folder that ends with this process."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    part = -(-len(table) // 8)
    for number in range(8):
        with (Path(folder) / f"text-{number}.jsonl").open("w") as file:
            for text in table.column("text").slice(number * part, part).to_pylist():
                file.write(json.dumps({"text": text}) + "\n")
    return Path(folder)


def components(groups: Iterable[list[int]]) -> list[int]:
    """Union-find: all members of each component but its lowest."""
    parents: dict[int, int] = {}

    def root(member: int) -> int:
        parent = parents.setdefault(member, member)
        while parent != member:
            parents[member] = parents[parent]
            member, parent = parent, parents[parent]
        return member

    for group in groups:
        first = root(group[0])
        for member in group[1:]:
            other = root(member)
            first, low = max(first, other), min(first, other)
            parents[first] = low
            first = low
    return [member for member in parents if root(member) != member]


def cpu_seconds(*of: int) -> float:
    """Of this process and of all that it has waited for, or of one of these two."""
    usages = map(resource.getrusage, of or WHOSE)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak_rss_bytes() -> int:
    """Of this program: what getrusage tells begins with the parent's."""
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def tree() -> dict[int, tuple[float, int]]:
    """{pid: (CPU seconds, proportional bytes)} of this process and all below it."""
    parents, found = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(fields[1])
                rollup = (folder / "smaps_rollup").read_text()
                pss = next(
                    (int(line.split()[1]) << 10 for line in rollup.splitlines() if line[:4] == "Pss:"), 0
                )
                found[int(folder.name)] = (sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK"), pss)
            except (OSError, ValueError):
                continue
    ours, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in ours} - ours
        ours |= more
        grown = bool(more)
    return {pid: found[pid] for pid in ours if pid in found}


@contextmanager
def measured(every_seconds: float = 0.2) -> Iterator[dict[str, float]]:
    """Seconds, CPU seconds of this process and of all that ran below it, and the most memory held at once.

    Processes that nobody waited for, such as daemons, are known by what was seen of them last.
    """
    seen: dict[int, float] = {}
    result = {"seconds": 0.0, "cpu_seconds": 0.0, "peak_MB": 0.0}
    ended, began = threading.Event(), time.perf_counter()

    def watch() -> None:
        while True:
            now = tree()
            seen.update({pid: cpu for pid, (cpu, _) in now.items() if pid != os.getpid()})
            result["peak_MB"] = max(result["peak_MB"], sum(size for _, size in now.values()) / 1e6)
            if ended.wait(every_seconds):
                return

    thread, before = threading.Thread(target=watch), [cpu_seconds(who) for who in WHOSE]
    thread.start()
    try:
        yield result
    finally:
        result["seconds"] = time.perf_counter() - began
        ended.set()
        thread.join()
        own, waited = (cpu_seconds(who) - earlier for who, earlier in zip(WHOSE, before, strict=True))
        result["cpu_seconds"] = own + max(waited, sum(seen.values()))


def answer(request: Request, table: pa.Table, prepared: Any, task: Task) -> dict[str, Any]:
    start, cpu = time.perf_counter(), cpu_seconds()
    result = task(prepared, request)
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    return {
        "documents": len(table),
        "bytes": pc.sum(pc.binary_length(table.column("text"))).as_py(),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_rss_MB": peak_rss_bytes() / 1e6,
        "result": result,
    }


def serve(tasks: Mapping[str, Task], prepare: Callable[[pa.Table], Any] = texts_of) -> None:
    """Answer requests until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--core", type=int, help="run on this core alone, with as many threads")
    core = parser.parse_args().core
    if core is not None:
        os.sched_setaffinity(0, {core})  # before the tool is imported: thread pools look at it
    answers, loaded = sys.stdout, ""
    table = prepared = None
    with contextlib.redirect_stdout(sys.stderr):  # tools print
        for line in sys.stdin:
            request = json.loads(line)
            wanted = json.dumps([request["file"], request.get("documents")])
            if wanted != loaded:
                table = prepared = None
                table = read_texts(request["file"], request.get("documents"))
                prepared, loaded = prepare(table), wanted
            figures = answer(request, table, prepared, tasks[request["task"]])
            print(json.dumps(figures), file=answers, flush=True)
