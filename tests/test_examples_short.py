"""The examples that need no arguments do what they say, and print it.

Those that build datasets or import other libraries run as the programs that they are in the extended suite;
the others are forked from a process that has torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.peers import STAND_INS
from support.script_server import ScriptServer
from support.train_harness import ENVIRONMENT, EXAMPLES, script_server

# What each prints, in order; it asserts by itself what it prints.
SAYS = {
    "dali_from_loader.py": [
        "10 batches of (8, 64, 64, 3) from DALI",
        "resumed after 5: batches 6 to 10 have the same pixels",
    ],
    "build_and_train.py": [
        "documents, 1.0 MB",
        "rows of 256 tokens",
        "step 30: loss",
        "resumed: step 31 gets rows",
    ],
    "mixture_reweighted.py": [
        "steps 1 to 20: each batch of 8 had 6 of web and 2 of code",
        "steps 21 to 40: each batch of 8 had 2 of web and 6 of code",
        "stopped after step 15 and resumed; delivered in all: {'web': 160, 'code': 160}",
    ],
    "read_existing_data.py": [
        "MDS: 50 numbers, captions and images",
        "WebDataset: 50 numbers, captions and images",
    ],
    "resume_after_crash.py": [
        "killed by SIGKILL after step 33; the last checkpoint is that of step 30",
        "resumed on 2 ranks from step 31 to 40",
        "all 40 steps trained on the rows of a run that was never killed",
    ],
    "s3_upload_and_stream.py": [
        "uploaded 15 files",
        "uploaded again: 0 bytes sent",
        "each of 400 rows came once",
    ],
    "trace_a_loss_spike.py": ["loss", "crawl: crawl.jsonl record 777", "a new run has"],
}
NEEDS = {"dali_from_loader.py": "nvidia.dali"}  # modules that the tests' environment need not have
QUICK = ["mixture_reweighted.py", "resume_after_crash.py", "s3_upload_and_stream.py"]
RUN_SECONDS = 200


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptServer]:
    with script_server("torch", "shardkit.loaders.loader", "shardkit.formats.mds") as running:
        yield running


def forked(server: ScriptServer, folder: Path, name: str, *arguments: str) -> str:
    """What an example prints; it must end well."""
    output = folder / "output.txt"
    code = server.start([str(EXAMPLES / name), *arguments], cwd=folder, output=output).wait(RUN_SECONDS)
    printed = output.read_text()
    assert code == 0, printed
    return printed


def assert_in_order(wanted: list[str], printed: str) -> None:
    place = 0
    for words in wanted:
        place = printed.find(words, place)
        assert place >= 0, f"{words!r} is not in, or not in its place in:\n{printed}"


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_an_example_does_what_it_says(server: ScriptServer, name: str, tmp_path: Path) -> None:
    assert_in_order(SAYS[name], forked(server, tmp_path, name))


@pytest.mark.slow
def test_a_crash_before_any_checkpoint_is_survived_too(server: ScriptServer, tmp_path: Path) -> None:
    printed = forked(server, tmp_path, "resume_after_crash.py", "--kill-after", "3")
    assert_in_order(["the last checkpoint is that of step 0", "from step 1 to 40", "all 40 steps"], printed)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_an_example_tells_how_it_is_run(server: ScriptServer, name: str, tmp_path: Path) -> None:
    assert f"python examples/{name}" in forked(server, tmp_path, name, "--help")


@pytest.mark.extended
@pytest.mark.parametrize("name", SAYS)
def test_an_example_is_a_program_that_needs_no_arguments(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    command, environment = [sys.executable, str(EXAMPLES / name)], os.environ | ENVIRONMENT
    if name == "read_existing_data.py" and find_spec("torchvision") is None:  # mosaicml-streaming imports it
        environment["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(STAND_INS)])
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS
    )
    assert run.returncode == 0, run.stderr
    assert_in_order(SAYS[name], run.stdout)
    assert "Warning" not in run.stderr
    assert not any(tmp_path.iterdir()), "it left something behind"


def test_every_example_has_its_line_in_the_readme() -> None:
    readme = (EXAMPLES / "README.md").read_text()
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert {name for name in names if f"`{name}` |" not in readme} == set()
    programs = {name for name in names if "__main__" in (EXAMPLES / name).read_text()}
    assert {name for name in programs if not name.startswith("train_")} == set(SAYS)
