"""What verbs share: output that cannot control a terminal, whatever it quotes, and options of stores."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
from rich.table import Table

from shardkit.cli.common import (
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
        *(
            "trace {} --row 0",
            "trace {} --row 0 --json",
            "trace {} --step 1 --batch-size 1 --loader window=9",
        ),
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
    return storage_options(make_parser("info").parse_args(["info", "s3://b/x", *words]), is_job=True)


def test_what_is_left_out_is_left_to_the_environment() -> None:
    assert options_of() == StorageOptions()


def test_every_option_arrives() -> None:
    words = "--endpoint-url http://x:9 --profile p --storage region=r --storage path_style=false"
    keys = "--storage checksums=when_supported --storage retry_seconds=1.5 --storage connections=4"
    assert options_of(*words.split(), *keys.split()) == StorageOptions(
        endpoint_url="http://x:9",
        region="r",
        profile="p",
        path_style=False,
        checksums="when_supported",
        retry_seconds=1.5,
        connections=4,
    )
    assert options_of("--storage", "path_style=true").path_style is True


def test_every_field_of_storage_options_is_an_option_with_a_help() -> None:
    [parser] = [a for a in make_parser("info")._actions if isinstance(a, argparse._SubParsersAction)]
    info = parser.choices["info"]
    [keys] = info.key_options()
    plain = [action.dest for action in info._actions]
    fields = {field.name for field in dataclasses.fields(StorageOptions)}
    assert fields == keys.known.keys() | (fields & {*plain})
    assert all(setting.doc for setting in keys.known.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--storage checksums=always", "checksums must be when_supported or when_required, not 'always'"),
        ("--storage path_style=1", "path_style must be true or false, not '1'"),
        ("--storage connections=-1", "connections must be a number, not '-1'"),
        ("--storage connections=0", "connections must be greater than 0"),
        ("--storage retry_seconds=long", "retry_seconds must be a number, not 'long'"),
        ("--storage region", "region needs a value: give --storage region=REGION"),
        ("--storage regoin=r", "unknown key 'regoin'; did you mean region?"),
        ("--storage x=r", "unknown key 'x'; the keys are region, path_style, checksums"),
        ("--storage kms_key_id=k", 'kms_key_id requires encryption="aws:kms"'),
        ("--storage anonymous=true --profile p", "anonymous requests have no profile"),
    ],
)
def test_nonsense_is_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options_of(*words.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "spelled"),
    [
        ("info x --region eu-west-1", "--region; give --storage region=REGION"),
        ("build x --virtual-style", "--virtual-style; give --storage path_style=false"),
        ("upload x y --anonymous", "--anonymous; give --storage anonymous=true|false"),
        ("audit x --lanes 4", "--lanes; give --loader lanes=N"),
        ("trace x --row 0 --eos=3", "--eos; give --loader eos_id=N"),
        ("audit x --per-file", "--per-file; give --loader per_file=true|false"),
        ("plan build --tokens 1 --price-core-hour 1", "--price-core-hour; give --price core_hour=N"),
        ("demo --keep", "--keep; in shardkit: the folder is kept unless --clean is given"),
        ("info x --endpoint", "--endpoint; did you mean --endpoint-url?"),
    ],
)
def test_an_option_that_has_become_a_key_is_named(
    command: str, spelled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command.split())
    assert caught.value.code == 2
    assert f"unknown option {spelled}" in capsys.readouterr().err


def test_options_are_few() -> None:
    """Count those of all verbs together; CONTRIBUTING says how an option is added."""

    def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
        own = [a for a in parser._actions if a.option_strings and not isinstance(a, argparse._HelpAction)]
        inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        return own + [option for each in inner for one in each.choices.values() for option in options(one)]

    assert len(options(make_parser())) <= 250


@pytest.mark.parametrize(
    "command",
    ["build r.yaml", "info s3://b/x", "verify s3://b/x", "upload out s3://b/x", "download s3://b/x out"],
)
def test_every_verb_that_takes_urls_has_them(command: str) -> None:
    arguments = make_parser().parse_args([*command.split(), "--endpoint-url", "http://x:9"])
    assert storage_options(arguments, is_job=True) == StorageOptions(endpoint_url="http://x:9")
