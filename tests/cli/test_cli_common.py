"""What verbs share: output that cannot control a terminal, whatever it quotes, and options of stores."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest
from rich.table import Table

from shardkit.cli.common import (
    add_storage_arguments,
    escaped,
    print_columns,
    print_json,
    stderr_console,
    stdout_console,
    storage_options,
)
from shardkit.cli.main import main, make_parser
from shardkit.errors import warn_user
from shardkit.storage.store import StorageOptions
from shardkit.writers import build
from support.small_build import EOS, make_corpus

CONTROLS = "".join(map(chr, [*range(9), *range(11, 32), *range(127, 160)]))
CONTROL = re.compile(f"[{re.escape(CONTROLS)}]")
HOSTILE = "\x1b]0;PWNED\x07\x1b[31mred\x9b2J\x7f"
RECIPE = f"""\
inputs:
  - {{path: "a.jsonl", source: {json.dumps("so" + HOSTILE)}, id: id, url: url}}
tokenizer: {{path: tokenizer.json, eos: "{EOS}"}}
pack: {{sequence_length: 256}}
output: {{path: out}}
"""


def test_controls_are_spelled_out_and_everything_else_stays() -> None:
    assert escaped("\x1b[2Jx\x07\r\x7f\x9b") == "\\x1b[2Jx\\x07\\r\\x7f\\x9b"
    assert escaped("\udc80") == "\\udc80", "half of a pair, as in the name of a file, cannot be printed"
    plain = "tab\tline\nA é ש 語 🤗 \\x1b [bold]"
    assert escaped(plain) == plain
    assert escaped(escaped(HOSTILE)) == escaped(HOSTILE)
    assert not CONTROL.search(escaped(CONTROLS))


def test_consoles_and_tables_print_no_controls_and_keep_their_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = Table("name", "head \x1b[2J", box=None, pad_edge=False)
    table.add_row("\x1b[2J\x07", "#")
    table.add_row("plain", "#")
    stdout_console().print(f"line {HOSTILE}", style="bold")
    stdout_console().print(table)
    stderr_console().print(HOSTILE, highlight=False)
    print_columns(HOSTILE, ["a", HOSTILE], [[HOSTILE, "1"], ["", ""], ["b", "22"]])
    out, err = capsys.readouterr()
    assert not CONTROL.search(out + err)
    assert out.splitlines()[0] == f"line {escaped(HOSTILE)}"
    assert out.splitlines()[2].index("#") == out.splitlines()[3].index("#"), "widths are of what is shown"
    assert err == escaped(HOSTILE) + "\n"


def test_json_has_no_control_and_reads_back_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    plain = {"text": HOSTILE + CONTROLS + "é\u2028", CONTROLS: ["\ud800"]}
    print_json(plain)
    out = capsys.readouterr().out
    assert not CONTROL.search(out)
    assert "é" in out
    assert json.loads(out) == plain


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    recipe = make_corpus(folder, 8, recipe=RECIPE)
    names = {"id": HOSTILE, "url": "http://x/\x1b[2Jx"}
    records = [{"text": f"{HOSTILE} text {n}", **names} for n in range(4)]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    build(recipe, workers=1, progress=False)
    return folder / "out"


@pytest.mark.parametrize(
    "words",
    [
        *("trace {} --row 0", "trace {} --row 0 --json", "trace {} --step 1 --batch-size 1 --window 9"),
        *("trace {} --url http://x/\x1b[2Jx", "trace {} --url http://none\x1b[2J"),
        *("info {}", "info {} --json", "verify {}"),
        *("info {}/\x1b[31mnone", "info {}/\x1b[31mnone --debug"),
    ],
)
def test_a_hostile_document_controls_no_terminal(
    hostile: Path, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    main([word.format(hostile) for word in words.split()])
    out, err = capfd.readouterr()
    assert not CONTROL.search(out + err)
    if "--row 0" in words:
        assert "PWNED" in out
        assert "\\u001b[2J" in out if "--json" in words else "\\x1b[2J" in out


def test_a_damaged_file_of_a_hostile_name_and_a_warning_control_no_terminal(
    hostile: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy\x1b[2J"
    shutil.copytree(hostile, copy)
    shard = next(copy.glob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"#")
    assert main(["verify", str(copy)]) == 1
    assert main(["info", str(copy / "none")]) == 1
    monkeypatch.setattr("shardkit.cli.info.describe", lambda *_: warn_user(HOSTILE))
    main(["info", str(copy)])
    out, err = capfd.readouterr()
    assert not CONTROL.search(out + err)
    assert "\\x1b[2J" in err
    assert f"warning: {escaped(HOSTILE)}" in err


def options_of(*words: str) -> StorageOptions:
    parser = argparse.ArgumentParser()
    add_storage_arguments(parser)
    return storage_options(parser.parse_args(words), is_job=True)


def test_what_is_left_out_is_left_to_the_environment() -> None:
    assert options_of() == StorageOptions()


def test_every_option_arrives() -> None:
    words = "--endpoint-url http://x:9 --region r --profile p --virtual-style --checksums when_supported"
    assert options_of(*words.split()) == StorageOptions(
        endpoint_url="http://x:9", region="r", profile="p", path_style=False, checksums="when_supported"
    )
    assert options_of("--path-style").path_style is True


@pytest.mark.parametrize("words", ["--path-style --virtual-style", "--checksums always", "--region"])
def test_nonsense_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options_of(*words.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    ["build r.yaml", "info s3://b/x", "verify s3://b/x", "upload out s3://b/x", "download s3://b/x out"],
)
def test_every_verb_that_takes_urls_has_them(command: str) -> None:
    arguments = make_parser().parse_args([*command.split(), "--endpoint-url", "http://x:9"])
    assert storage_options(arguments, is_job=True) == StorageOptions(endpoint_url="http://x:9")
