"""Sides of a comparison, each in a process of its own, those of other tools in environments of their own.

A side is a script in peer_sides/ that answers requests: JSON lines on stdin and stdout. Tools pin packages
that conflict with ours and with each other's, so pip makes a virtual environment for each, the first time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from figures import benchmark_parser, in_turns

__all__ = [
    "VENVS",
    "Answers",
    "Side",
    "SideError",
    "SideProcess",
    "environment",
    "median_ratio",
    "peer_parser",
    "running",
    "site_folder",
    "take_turns",
]

SCRIPTS = Path(__file__).resolve().parent / "peer_sides"
REQUIREMENTS = {
    "daft": ["daft", "pyarrow"],
    "datasets": ["torch==2.13.0", "torchdata", "datasets", "s3fs"],  # the pin selects a build without CUDA
    "datasketch": ["datasketch", "xxhash", "pyarrow"],
    "grain": ["grain", "tokenizers"],
    "lancedb": ["torch==2.13.0", "lancedb", "pyarrow"],
    "litdata": ["torch==2.13.0", "litdata", "polars", "pyarrow", "s3fs"],
    "rensa": ["rensa", "pyarrow"],
    # pip searches for versions that fit to dolma's s3fs for longer than the benchmark takes.
    "dolma": ["dolma", "pyarrow<20", "boto3==1.28.17", "aiobotocore==2.5.4", "setuptools<81"],
    "ray": ["ray[data]==2.60.0", "pandas", "pyarrow", "xxhash", "tokenizers", "gigatoken"],
    "litdata_zstd": ["torch==2.13.0", "torchvision==0.28.0", "litdata", "zstd", "tokenizers"],
    "streaming": ["torch==2.13.0", "torchvision==0.28.0", "mosaicml-streaming==0.13.0"],
    "datatrove_torch": ["torch==2.13.0", "datatrove[io,processing,s3]"],
    # Its shingles are str, which xxhash 4 refuses to hash; spaCy and regex are its word splitter.
    "datatrove": [
        *("datatrove", "pyarrow", "spacy", "nltk", "tokenizers", "regex", "xxhash<4"),
        *("orjson", "fasteners", "fasttext-numpy2-wheel"),
    ],
}
# Packages beside our own environment, in a folder of their own, without their dependencies.
SITES = {
    "images": [
        *("torchvision==0.28.0", "litdata", "lightning-utilities", "tifffile", "obstore", "filelock"),
        *("scikit-image", "imageio", "lazy-loader", "simplejpeg"),
    ],
}
VENVS = Path("~/.cache/shardkit-peers").expanduser()
MARKER = "requirements.json"  # written last: the environment is whole

Answers = Mapping[str, Sequence[Mapping[str, Any]]]
"""{side: its answers, one a run}"""


@dataclass(frozen=True, slots=True)
class Side:
    """A tool with its settings; `share` of the documents is what it gets, by its speed."""

    tool: str
    share: float = 1.0
    request: dict[str, Any] = field(default_factory=dict)


class SideError(Exception):
    """A side cannot run; says why."""


def peer_parser(doc: str | None, *, runs: int, corpus: bool = True) -> argparse.ArgumentParser:
    """The options of all benchmarks that need the tools of others, and with `corpus` texts."""
    parser = benchmark_parser(doc, runs=runs)
    if corpus:
        parser.add_argument("--corpus", type=Path, help="folder of JSONL (.gz, .zst) and Parquet files")
    parser.add_argument("--venvs", type=Path, default=VENVS, help="default: %(default)s")
    return parser


class SideProcess:
    """A process that answers requests, as a context manager."""

    def __init__(self, command: Sequence[str], version: str = "") -> None:
        self.version = version
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        variables = {**os.environ, "DO_NOT_TRACK": "1", "DAFT_PROGRESS_BAR": "0"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=variables,
        )

    @classmethod
    def of(cls, tool: str, venvs: Path, *, core: int | None = None) -> Self:
        """A tool's script, by its own Python; with `core` on this core only, with one thread."""
        python = sys.executable if tool == "shardkit" else environment(tool, venvs)
        code = f"import importlib.metadata; print(importlib.metadata.version({tool!r}))"
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        command = [python, str(SCRIPTS / f"{tool}_side.py")]
        return cls(command if core is None else [*command, "--core", str(core)], found.stdout.strip())

    def ask(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` says why

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        raise SideError((lines or ["it ended without a word"])[-1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # of a side that has ended with a request unread
                pipe.close()
        self._process.kill()
        self._process.wait()
        self._errors.close()


def environment(tool: str, venvs: Path) -> str:
    """The Python of a tool's environment, which is made if it is not there yet; SideError if it cannot be."""
    home = venvs.expanduser() / tool
    python, marker = str(home / "bin" / "python"), home / MARKER
    if not marker.exists() or json.loads(marker.read_text()) != REQUIREMENTS[tool]:
        install = [python, "-m", "pip", "install", "--quiet", *REQUIREMENTS[tool]]
        for command in ([sys.executable, "-m", "venv", str(home)], install):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["it failed without a word"]
                raise SideError(f"{tool} cannot be installed: {lines[-1]}")
        marker.write_text(json.dumps(REQUIREMENTS[tool]))
    return python


def site_folder(name: str, venvs: Path) -> Path:
    """The folder with the packages of `SITES[name]`, for PYTHONPATH, which is made if it is not there yet."""
    home = venvs.expanduser() / f"{name}-site"
    marker = home / MARKER
    if not marker.exists() or json.loads(marker.read_text()) != SITES[name]:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps"]
        done = subprocess.run([*install, "--target", str(home), *SITES[name]], capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["it failed without a word"]
            raise SideError(f"{name} cannot be installed: {lines[-1]}")
        marker.write_text(json.dumps(SITES[name]))
    return home


@contextmanager
def running(
    sides: Mapping[str, Side], venvs: Path, *, core: int | None = None
) -> Iterator[dict[str, SideProcess]]:
    """A process for each side; those that cannot be installed are left out, with the reason on stderr."""
    found = {}
    with ExitStack() as stack:
        for name, side in sides.items():
            try:
                found[name] = stack.enter_context(SideProcess.of(side.tool, venvs, core=core))
            except SideError as error:
                print(f"left out: {name}: {error}", file=sys.stderr)
        yield found


def take_turns(
    sides: Mapping[str, SideProcess], request: Callable[[str, int], Mapping[str, Any]], runs: int
) -> dict[str, list[dict[str, Any]]]:
    """What every side answers to `request(name, run)`; who cannot warm up, in run -1, is left out."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for run in range(-1, runs):
        for name in in_turns(list(answers), run):
            try:
                sides[name].ask(request(name, run))
                answer = sides[name].answer()
            except SideError as error:
                if run >= 0:
                    raise
                print(f"left out: {name}: {error}", file=sys.stderr)
                del answers[name]
                continue
            if run >= 0:
                answers[name].append(answer)
    return answers


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float | None:
    """Median over the runs, in which both meet the same machine; None without runs of one of them."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True)) if over else None
