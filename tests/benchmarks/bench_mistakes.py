"""Twenty mistakes that users of every library make: does an error come, and does it help?

    python tests/benchmarks/bench_mistakes.py [--libraries shardkit,grain] [--mistakes NAME,NAME] [--details]
    python tests/benchmarks/bench_mistakes.py --lines    # lines of code of five common tasks
    python tests/benchmarks/bench_mistakes.py --review   # ask for a verdict on messages that have none

Each mistake is a function in mistakes/LIBRARY_mistakes.py, written as the library's documentation writes it.
It runs in an environment of its own, in a fresh copy of a folder with two datasets, for at most a minute.

An outcome is an error; a warning or log line that names the thing; nothing (silent); a hang; or handled: the
library does what its user wants, which the function has checked. Whether a message names the file, key or
option concerned is decided by a pattern beside the function. Whether it says what to do was decided by hand,
by one rule: a reader who knows nothing but the message can go on, because it states a valid value or name,
the range of values, a command, or the step to take. "X is invalid" and "X does not exist" do not. Verdicts
are in mistakes/reviewed.json beside the messages they were given for (or how they begin, up to "…"); a
message that changed asks again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from figures import Heads, benchmark_parser, give
from peer_processes import VENVS, SideError, environment

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
SIDES = FOLDER / "mistakes"
REVIEWED = SIDES / "reviewed.json"
sys.path[:0] = [str(SIDES), str(FOLDER.parent)]

from mistake_side import Snippet, snippets  # noqa: E402

LIBRARIES = {
    "shardkit": None,
    "litdata": "litdata_zstd",
    "streaming": "streaming",
    "datatrove": "datatrove_torch",
    "grain": "grain",
}
"""{library: its environment in peer_processes.py; None: this one}"""
MISTAKES = {
    "path_missing": "a path that does not exist",
    "folder_empty": "an empty folder",
    "folder_of_another_format": "a folder of another format",
    "shard_truncated": "a truncated shard",
    "index_damaged": "a damaged index",
    "option_misspelled": "a misspelled option",
    "option_of_wrong_type": "an option of a wrong type",
    "batch_size_zero": "batch size 0",
    "seed_negative": "a negative seed",
    "field_missing": "a record without a field",
    "package_missing": "an optional package that is not installed",
    "compression_unknown": "an unknown compression",
    "writing_unfinished": "reading before writing has ended",
    "folder_not_empty": "writing into a folder that has a dataset",
    "object_not_serializable": "an object that cannot be serialized",
    "state_of_other_data": "the state of another dataset",
    "state_of_other_batch_size": "the state of another batch size",
    "transform_not_picklable": "a function that cannot be pickled, in two workers",
    "s3_without_credentials": "S3 without credentials",
    "index_out_of_range": "an index out of range",
}
TASKS = {
    "pack": "texts to packed, tokenized shards",
    "resume": "a shuffled distributed loop with exact resume",
    "stream": "stream from S3 with a cache",
    "mix": "a mixture of two datasets",
    "inspect": "look at a sample",
}
LIMIT_SECONDS = 60
COMPARED = 160  # characters of a message for which a verdict holds

HEADS: Heads = {
    "side": ("library", ""),
    "version": ("version", ""),
    "mistakes": ("mistakes", "d"),
    "errors": ("errors or warnings", "d"),
    "named": ("name the thing", "d"),
    "helpful": ("say what to do", "d"),
    "handled": ("handled", "d"),
    "silent": ("silent", "d"),
    "hang": ("hang", "d"),
}
DETAILS: Heads = {
    "mistake": ("mistake", ""),
    "side": ("library", ""),
    "outcome": ("outcome", ""),
    "seconds": ("s", ".1f"),
    "type": ("type", ""),
    "named": ("names it", ""),
    "helpful": ("says what to do", ""),
    "last": ("last line", ""),
}


def write_inputs(folder: Path) -> None:
    """Write what all libraries read: texts, a tokenizer, and a folder with a table."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    (folder / "texts").mkdir()
    (folder / "tables").mkdir()
    (folder / "tables" / "rows.csv").write_text("id,text\n1,one\n2,two\n")
    texts = [f"Document {n} says what number {n} has to say, again and again. " * 5 for n in range(200)]
    for part in range(2):
        lines = [json.dumps({"id": str(n), "text": texts[n]}) for n in range(part, 200, 2)]
        (folder / "texts" / f"part-{part}.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def variables(home: Path, endpoint: str | None) -> dict[str, str]:
    """The environment of a user without credentials; S3 is a closed port, or `endpoint`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "HF_"))}
    own = {"HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "localhost,127.0.0.1"}
    own |= {"AWS_ENDPOINT_URL": endpoint or "http://127.0.0.1:9", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    own |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    if endpoint:
        own |= {"AWS_ACCESS_KEY_ID": "made", "AWS_SECRET_ACCESS_KEY": "made", "AWS_REGION": "us-east-1"}
        own |= {"AWS_DEFAULT_REGION": "us-east-1"}
    return kept | own


def ran(python: str, library: str, name: str, folder: Path, endpoint: str | None = None) -> dict[str, Any]:
    """Run a function of a library in `folder`: its answer with `stderr`, `seconds` and whether it hung."""
    command = [python, str(SIDES / f"{library}_mistakes.py"), name]
    home = folder.with_name("home")
    home.mkdir(exist_ok=True)
    environ = variables(home, endpoint)
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT)] * (library == "shardkit"))
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        began = time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(LIMIT_SECONDS)
            hung = False
        except subprocess.TimeoutExpired:
            hung = True
        seconds = time.monotonic() - began
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        out.seek(0)
        err.seek(0)
        line, stderr = out.readline(), err.read()
    answer: dict[str, Any] = json.loads(line) if line else {}
    return answer | {"stderr": stderr, "process_seconds": seconds, "hung": hung}


def cleaned(text: str, folder: Path) -> str:
    """A message without what differs from run to run."""
    text = text.replace(str(folder.resolve()), "FOLDER").replace(str(folder), "FOLDER")
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r"0x[0-9a-f]{6,}", "0x…", text)
    text = re.sub(r"/\S*/site-packages/", "", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ ", "", text)
    return re.sub(r"/(?:tmp|var|home|root)/\S*?/", "/…/", text)


def judged(library: str, name: str, snippet: Snippet, answer: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A row of the detailed table; `helpful` is None where nobody has judged this message."""
    message, outcome = answer.get("message", ""), answer.get("outcome")
    stderr = cleaned(answer["stderr"], folder)
    if outcome is None:
        outcome = "hang" if answer["hung"] else "died"
        message = "\n".join(stderr.strip().splitlines()[-20:])
    elif answer["hung"]:
        outcome = "hang"
    elif outcome == "no error":
        warned = [line for line in stderr.splitlines() if re.search("warning|error", line, re.IGNORECASE)]
        lines = [line for line in warned if re.search(snippet.names, line, re.IGNORECASE)]
        outcome, message = ("warning", lines[0]) if lines else ("silent", "")
    message = cleaned(message, folder)
    complains = outcome in ("error", "warning", "died")
    row: dict[str, Any] = {"mistake": name, "side": library, "outcome": outcome, "message": message}
    row["seconds"] = answer["process_seconds"]
    row["type"] = answer.get("type", "")
    row["last"] = cleaned(answer.get("last", message.splitlines()[-1] if message else ""), folder)
    row["named"] = bool(complains and re.search(snippet.names, message, re.IGNORECASE))
    row["helpful"] = verdict(library, name, message) if complains else False
    return row


def compared(message: str) -> str:
    """The part of a message for which a verdict holds."""
    return re.sub(r"\d+", "0", " ".join(message.split()))[:COMPARED]


def verdict(library: str, name: str, message: str) -> bool | None:
    """Whether a message says what to do, as it was decided by hand; None for another message."""
    found = reviews().get(library, {}).get(name)
    if found is None:
        return None
    judged, now = compared(found["message"]), compared(message)
    same = now.startswith(judged[:-1]) if judged.endswith("…") else now == judged
    return bool(found["says_what_to_do"]) if same else None


def reviews() -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(REVIEWED.read_text()) if REVIEWED.exists() else {}


def review(rows: list[dict[str, Any]]) -> None:
    """Keep messages without a verdict, to be judged in the file: false until somebody has."""
    kept = reviews()
    for row in rows:
        if row["helpful"] is None:
            entry = {"message": " ".join(row["message"].split())[:400], "says_what_to_do": False}
            kept.setdefault(row["side"], {})[row["mistake"]] = entry
            print(f"judge {row['side']}: {row['mistake']} in {REVIEWED.name}", file=sys.stderr)
    REVIEWED.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def python_of(library: str, venvs: Path) -> str:
    tool = LIBRARIES[library]
    return sys.executable if tool is None else environment(tool, venvs)


@contextmanager
def prepared(library: str, python: str) -> Iterator[Path]:
    """A folder with the inputs and the library's datasets."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "base"
        folder.mkdir()
        write_inputs(folder)
        answer = ran(python, library, "prepare", folder)
        if "outcome" not in answer and not (folder / "data").exists():
            lines = answer["stderr"].strip().splitlines() or ["it failed without a word"]
            raise SideError(f"{library}: {lines[-1]}")
        yield folder


def side(library: str) -> tuple[dict[str, Snippet], dict[str, Snippet], dict[str, str]]:
    return snippets(importlib.import_module(f"{library}_mistakes"))


def of_mistakes(library: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each mistake of a library."""
    python, rows = python_of(library, arguments.venvs), []
    mistakes, _, absent = side(library)
    assert MISTAKES.keys() <= mistakes.keys() | absent.keys(), library
    with prepared(library, python) as base:
        for name in MISTAKES:
            if name not in mistakes or (arguments.mistakes and name not in arguments.mistakes):
                continue
            folder = base.with_name(name)
            shutil.copytree(base, folder)
            answer = ran(python, library, name, folder)
            rows.append(judged(library, name, mistakes[name], answer, folder))
            shutil.rmtree(folder, ignore_errors=True)
    return rows


def version_of(library: str, python: str) -> str:
    name = {"streaming": "mosaicml-streaming"}.get(library, library)
    code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def summary(library: str, version: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a library; a message without a verdict counts as one that does not help."""

    def count(key: str, *values: object) -> int:
        return sum(row[key] in values for row in rows)

    return {
        "side": library,
        "version": version,
        "mistakes": len(rows),
        "errors": count("outcome", "error", "warning", "died"),
        "named": count("named", True),
        "helpful": count("helpful", True),
        "handled": count("outcome", "handled"),
        "silent": count("outcome", "silent"),
        "hang": count("outcome", "hang"),
        "found": rows,
    }


@contextmanager
def bucket(base: Path) -> Iterator[str]:
    """The address of an S3 server in this process, whose bucket has the folder `data`."""
    from support.s3_moto import s3_server

    with s3_server() as server:
        server.client().create_bucket(Bucket="bucket")
        for file in sorted(base.glob("data/**/*")):
            if file.is_file():
                server.client().upload_file(str(file), "bucket", str(file.relative_to(base)))
        yield server.endpoint_url


def of_tasks(library: str, arguments: argparse.Namespace) -> dict[str, int | None]:
    """Lines of code for each task that a library has, each run once; SideError if one fails."""
    python = python_of(library, arguments.venvs)
    _, tasks, absent = side(library)
    assert TASKS.keys() <= tasks.keys() | absent.keys(), library
    lines: dict[str, int | None] = dict.fromkeys(TASKS)
    with prepared(library, python) as base:
        for name, snippet in tasks.items():
            folder = base.with_name(name)
            shutil.copytree(base, folder)
            with bucket(base) if name == "stream" else nullcontext() as endpoint:
                answer = ran(python, library, name, folder, endpoint)
            if answer.get("outcome") != "no error" or answer["hung"]:
                raise SideError(f"{library}: {name}: {answer.get('message') or answer['stderr'][-500:]}")
            if name == "pack" and not any(folder.glob("packed*")):
                raise SideError(f"{library}: {name} wrote nothing")
            lines[name] = snippet.lines
    return lines


def give_lines(arguments: argparse.Namespace) -> None:
    counted: dict[str, Mapping[str, int | None]] = {}
    for library in arguments.libraries:
        try:
            counted[library] = of_tasks(library, arguments)
        except SideError as error:
            print(f"left out: {error}", file=sys.stderr)
    heads: Heads = {"task": ("lines of code", ""), **{library: (library, "d") for library in counted}}
    rows = [
        {"task": text, **{library: lines[name] for library, lines in counted.items()}}
        for name, text in TASKS.items()
    ]
    give(arguments, rows, heads)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--venvs", type=Path, default=VENVS, help="default: %(default)s")
    listed = {"type": lambda text: text.split(","), "metavar": "NAME,NAME"}
    parser.add_argument("--libraries", default=list(LIBRARIES), help="default: all", **listed)  # type: ignore[arg-type]
    parser.add_argument("--mistakes", default=[], help="default: all", **listed)  # type: ignore[arg-type]
    parser.add_argument("--lines", action="store_true", help="count the lines of common tasks, and run them")
    parser.add_argument("--details", action="store_true", help="a row for each mistake and library")
    parser.add_argument("--review", action="store_true", help=f"put new messages into {REVIEWED.name}")
    arguments = parser.parse_args()
    if arguments.lines:
        give_lines(arguments)
        return
    found: dict[str, list[dict[str, Any]]] = {}
    for library in arguments.libraries:
        try:
            found[library] = of_mistakes(library, arguments)
        except SideError as error:
            print(f"left out: {error}", file=sys.stderr)
    rows = [row for one in found.values() for row in one]
    for row in rows:
        if row["helpful"] is None:
            print(f"no verdict (--review): {row['side']}: {row['mistake']}", file=sys.stderr)
    if arguments.review:
        review(rows)
    if arguments.details:
        order = list(MISTAKES)
        rows.sort(key=lambda row: order.index(row["mistake"]))
        shown = [{**row, "named": row["named"] or None, "helpful": row["helpful"] or None} for row in rows]
        give(arguments, shown, DETAILS)
        return
    versions = {library: version_of(library, python_of(library, arguments.venvs)) for library in found}
    give(arguments, [summary(name, versions[name], of_one) for name, of_one in found.items()], HEADS)


if __name__ == "__main__":
    main()
