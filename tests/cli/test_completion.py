"""Completion in the real shells: verbs, options, choices, keys, and files where only files can follow."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from shardkit.cli.main import VERBS, main

ASK_BASH = """
complete() {{ :; }}
source {script}
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_shardkit
printf '%s\\n' "${{COMPREPLY[@]}}"
"""

# An interactive zsh completes the words at Tab, and prints the line at Ctrl-X.
ASK_ZSH = """
zmodload zsh/zpty
zpty shell 'zsh -fi'
zpty -w shell 'COLUMNS=200; source {script}; show() {{ print -r -- "<$BUFFER>" }}'
zpty -w shell 'zle -N show; bindkey "^I" complete-word "^X" show; print rea""dy'
zpty -r shell shown '*ready*'
zpty -w -n shell $'shardkit {words}\\t\\x18'
zpty -r shell shown '*<*>*'
print -r -- "$shown"
zpty -d shell
"""


@pytest.fixture
def script(tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script for the shell that a test names."""
    with pytest.raises(SystemExit) as caught:
        main(["--completion", request.param])
    assert caught.value.code == 0
    file = tmp_path / f"shardkit.{request.param}"
    file.write_text(capsys.readouterr().out)
    return file


def bash(script: Path, words: str) -> list[str]:
    asked = ASK_BASH.format(script=script, words=words)
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash_completes_verbs_options_choices_and_keys(script: Path) -> None:
    assert bash(script, "shardkit ''") == [*VERBS]
    assert bash(script, "shardkit b") == ["build"]
    assert bash(script, "shardkit --comp") == ["--completion"]
    assert bash(script, "shardkit --completion ''") == ["bash", "zsh", "fish"]
    assert bash(script, "shardkit build r.yaml --re") == ["--retry-failed", "--replace"]
    assert bash(script, "shardkit --quiet build --log") == ["--log-file"]
    assert bash(script, "shardkit build --engine ''") == ["local", "ray"]
    assert bash(script, "shardkit upload out url --storage reg") == ["region="]
    assert bash(script, "shardkit plan ''") == ["train", "build"]
    assert bash(script, "shardkit plan train --gp") == ["--gpus", "--gpus-per-node"]
    assert bash(script, "shardkit build ''") == [], "the shell completes files"
    assert bash(script, "shardkit build --output ''") == []
    assert bash(script, "shardkit info build --jso") == ["--json"], "a folder may be called like a verb"


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh_completes_verbs_options_choices_keys_and_files(script: Path, tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "recipe.yaml").touch()
    expected = {
        "bui": "build ",
        "--comp": "--completion ",
        "build --engine r": "build --engine ray ",
        "build --retry": "build --retry-failed ",
        "plan tr": "plan train ",
        "plan train --gpus-": "plan train --gpus-per-node ",
        "upload out url --storage reg": "upload out url --storage region=",
        "build rec": "build recipe.yaml ",
        "build --output rec": "build --output recipe.yaml ",
    }
    for words, completed in expected.items():
        asked = ASK_ZSH.format(script=script, words=words)
        done = subprocess.run(
            ["zsh", "-fc", asked], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
        )
        assert f"<shardkit {completed}>" in done.stdout, done.stdout


@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish_completes_verbs_options_and_choices(script: Path) -> None:
    lines = script.read_text().splitlines()
    assert all(line.startswith("complete -c shardkit ") for line in lines)
    assert any(
        line.startswith("complete -c shardkit -n '__fish_seen_subcommand_from plan; and ") for line in lines
    )
    assert sum(" -f -a " in line for line in lines) == len(VERBS) + 2  # and the two kinds of `plan`
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    for words, found in (("b", "build"), ("build --engine ", "ray"), ("build --re", "--replace")):
        asked = f"source {script}; complete -C 'shardkit {words}'"
        done = subprocess.run(["fish", "-c", asked], capture_output=True, text=True, timeout=60)
        assert found in [line.split("\t")[0] for line in done.stdout.splitlines()], done.stderr
