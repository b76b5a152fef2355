"""Virtual environments of the peers, one each: they pin other packages than we and each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

HERE = Path(__file__).resolve().parent
REQUIREMENTS = {
    "daft": ["daft", "pyarrow"],
    "datasketch": ["datasketch", "xxhash", "pyarrow"],
    "rensa": ["rensa", "pyarrow"],
    # Its shingles are str, which xxhash 4 refuses to hash; spaCy and regex are its word splitter.
    # pip searches for versions that fit to dolma's s3fs for longer than the benchmark takes.
    "dolma": ["dolma", "pyarrow<20", "boto3==1.28.17", "aiobotocore==2.5.4", "setuptools<81"],
    "datatrove": ["datatrove", "pyarrow", "spacy", "nltk", "tokenizers", "regex", "xxhash<4"],
}
MARKER = "requirements.json"  # written last: the environment is whole


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a tool runs; `missing` says why it does not."""

    python: str
    version: str
    missing: str = ""


def environment(tool: str, folder: Path) -> Environment:
    """The tool's own environment, made if it is not there yet; shardkit's is the running one."""
    if tool == "shardkit":
        return Environment(sys.executable, _version(sys.executable, tool))
    home = folder / tool
    python, marker = str(home / "bin" / "python"), home / MARKER
    if not marker.exists() or json.loads(marker.read_text()) != REQUIREMENTS[tool]:
        install = [python, "-m", "pip", "install", "--quiet", *REQUIREMENTS[tool]]
        for command in ([sys.executable, "-m", "venv", str(home)], install):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["it failed without a word"]
                return Environment(python, "", f"{tool} cannot be installed: {lines[-1]}")
        marker.write_text(json.dumps(REQUIREMENTS[tool]))
    return Environment(python, _version(python, tool))


def environments(names: Sequence[str], tools: Mapping[str, str], folder: Path) -> dict[str, Environment]:
    """Where each of the named sides runs (`tools`: their tools); those that cannot are left out, and said."""
    places = {}
    for name in names:
        place = environment(tools[name], folder)
        if place.missing:
            print(f"{name} is left out: {place.missing}", file=sys.stderr)
        else:
            places[name] = place
    return places


def _version(python: str, package: str) -> str:
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


class SideProcess:
    """One running side; requests and answers as `peer_side` has them."""

    def __init__(
        self, tool: str, python: str, *, core: int | None = None, script: Path | None = None
    ) -> None:
        self.tool = tool
        command = [python, str(script or HERE / f"{tool}_side.py")]
        if core is not None:
            command += ["--core", str(core)]
        variables = {**os.environ, "DO_NOT_TRACK": "1", "DAFT_PROGRESS_BAR": "0"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )

    def ask(self, request: dict[str, Any]) -> None:
        stream = _open(self._process.stdin)
        stream.write(json.dumps(request) + "\n")
        stream.flush()

    def answer(self) -> dict[str, Any]:
        line = _open(self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"the side of {self.tool} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _open(self._process.stdin).close()
        _open(self._process.stdout).close()
        self._process.wait()


def _open(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
