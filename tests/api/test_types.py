"""A user's script passes strict type checkers, and its mistakes do not; the script runs, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from api import user_script
from support.small_build import make_corpus

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("user_script.py")
MISTAKES = """\
import shardkit as sk

sk.StreamingLoader("out", batch_size=2, lables=True)
sk.StreamingLoader("out", batch_size=2, labels="shiftd")
sk.StreamingLoader("out", batch_size=2, endless="yes")
sk.StreamingLoader("out", batch_size=2, layout=sk.Order())
sk.StreamingLoader("out", batch_size=2, restart=3)
sk.StreamingLoader("out")
sk.Layout(cu_seqlen=True)
sk.Run(threads="two")
sk.open("out")["tokens"]
sk.open("out").map(len)
sk.open("out").head("2")
sk.open("out").to_arrow("tokens", 5)
sk.MdsWriter("out", columns={"text": "str"}, size_limit=5)
sk.merge(["out"])
sk.build({}, sequence_length="long")
sk.load_recipe(5)
sk.build(5, output="out")
"""
WRONG_LINES = {number for number, line in enumerate(MISTAKES.splitlines(), 1) if line.startswith("sk.")}


def lines_that_mypy_refuses(script: Path) -> dict[int, str]:
    """Errors of `mypy --strict` in a script, by line."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent"]
    done = subprocess.run(
        [*command, f"--cache-dir={ROOT / '.mypy_cache' / 'users'}", "--output=json", script],
        env=os.environ | {"MYPYPATH": str(ROOT)},
        cwd=script.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr  # 2: mypy itself failed
    found = [json.loads(line) for line in done.stdout.splitlines() if line]
    return {problem["line"]: problem["message"] for problem in found if problem["severity"] == "error"}


def lines_that_pyright_refuses(script: Path) -> dict[int, str]:
    """Errors of pyright in a script, by line; skips the test where its JavaScript cannot be fetched."""
    pytest.importorskip("pyright")
    untyped = {"reportUnknownMemberType": False, "reportUnknownVariableType": False}  # pyarrow, tokenizers
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "include": [script.name], **untyped}
    (script.parent / "pyrightconfig.json").write_text(
        json.dumps(settings | {"reportMissingTypeStubs": False})
    )
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        pytest.skip(f"pyright cannot start: {done.stderr[-300:]}")
    problems = json.loads(done.stdout)["generalDiagnostics"]
    wrong = [problem for problem in problems if problem["severity"] == "error"]
    return {problem["range"]["start"]["line"] + 1: problem["message"] for problem in wrong}


CHECKERS = {"mypy": lines_that_mypy_refuses, "pyright": lines_that_pyright_refuses}


@pytest.mark.extended
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_users_script_is_typed_and_mistakes_are_seen_by_the_checker(tmp_path: Path, checker: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.read_text())
    assert CHECKERS[checker](tmp_path / "script.py") == {}
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    assert CHECKERS[checker](tmp_path / "mistakes.py").keys() == WRONG_LINES


def test_the_script_runs(tmp_path: Path, inline_builds: None) -> None:
    folder = make_corpus(tmp_path / "corpus", 40).parent
    result = user_script.prepare(folder)
    assert result.samples > 0
    assert user_script.look(folder)[0] == "tokens"
    assert user_script.train(folder)["position"] == 8
    assert user_script.write(folder) == 2
