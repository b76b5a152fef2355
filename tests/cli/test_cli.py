"""The command: results on stdout, one line for an error, an honest exit status, immediate help."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import shardkit
from shardkit.cli.main import VERBS, main, make_parser
from shardkit.formats.mds import MdsWriter
from support.small_build import make_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("cli"), 80)


@pytest.fixture(scope="module")
def built(corpus: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardkit", "build", str(corpus), "--workers", "1", "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_build_prints_one_json_document_on_stdout(
    built: subprocess.CompletedProcess[str], corpus: Path
) -> None:
    assert built.returncode == 0, built.stderr
    result = json.loads(built.stdout)
    assert result["output"] == str(corpus.parent / "out")
    assert result["samples"] > 0
    assert result["funnel"]["read"]["documents"] == 115
    assert result["up_to_date"] is False


@pytest.mark.usefixtures("built")
def test_building_again_says_that_nothing_is_to_be_done(
    corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(corpus)]) == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"{corpus.parent / 'out'}: already built: nothing to do\n")
    assert "add --replace" in err
    assert "shardkit view " in err
    assert "exact_duplicate" not in err, "the result is that of an earlier run"


def test_a_log_file_keeps_what_a_quiet_build_does_not_print(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "build.log"
    words = ["build", str(corpus), "--output", str(tmp_path / "out"), "--workers", "1"]
    assert main(["--quiet", *words, "--log-file", str(log)]) == 0
    assert main([*words, "--set", "seed=3", f"--log-file={log}", "--quiet"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1, "errors are printed"
    lines = log.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    text = re.sub(r"^.{20}", "", log.read_text(), flags=re.MULTILINE)
    assert text.startswith(f"shardkit {shardkit.__version__}: --quiet build {corpus}")
    for said in ("clean: 4 of 4 tasks", "  kept             72 documents", "exit status 0", "exit status 1"):
        assert said in text
    assert err.removeprefix("shardkit: ") in text
    assert main([*words, "--quiet"]) == 0
    assert log.read_text().splitlines() == lines, "a verb without the option logs nothing"


def test_a_log_file_that_cannot_be_written_is_misuse(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["info", "x", "--log-file", str(tmp_path / "none" / "l")])
    assert caught.value.code == 2
    assert "l: No such file or directory" in capfd.readouterr().err


@pytest.mark.usefixtures("built")
def test_info_tells_what_the_card_says(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(corpus.parent / "out"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["sequence_length"] == 64
    assert facts["columns"] == {"tokens": "ndarray:uint16:64"}
    assert facts["card"]["fingerprint"] == facts["fingerprint"]
    assert main(["info", str(corpus.parent / "out")]) == 0
    text = capsys.readouterr().out
    for word in ("fingerprint", "64 tokens of uint16", "plain", "exact_duplicate", "kept"):
        assert word in text


@pytest.mark.usefixtures("built")
def test_verify_names_the_damage_and_fails(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = tmp_path / "d"
    subprocess.run(["cp", "-r", str(corpus.parent / "out"), str(dataset)], check=True)
    assert main(["verify", str(dataset)]) == 0
    assert "intact" in capfd.readouterr().out
    with MdsWriter(tmp_path / "one", columns={"text": "str"}) as writer:
        writer.write({"text": "a"})
    assert main(["verify", str(tmp_path / "one")]) == 0
    assert "intact: 1 shard, 1 sample, " in capfd.readouterr().out
    shard = dataset / "shard.00001.mds"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    (dataset / "report.html").write_text("")
    assert main(["verify", str(dataset)]) == 1
    out, err = capfd.readouterr()
    assert "2 problems" in out
    assert [line.split(":")[0] for line in err.splitlines()] == ["shard.00001.mds", "report.html"]
    assert main(["verify", str(dataset), "--quick", "--json"]) == 1
    report = json.loads(capfd.readouterr().out)
    assert [problem["file"] for problem in report["problems"]] == ["report.html"]


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        (["build", "nowhere.yaml"], 2, "nowhere.yaml: there is no such file; `shardkit init"),
        (["build", "{recipe}", "--set", "pack.length=3"], 2, "pack.length: unknown key"),
        (["build", "{recipe}", "--set", "seed=9"], 1, "already holds a dataset, made by another recipe"),
        (["info", "nowhere"], 1, "nowhere: there is no such file or folder"),
        (["verify", "nowhere"], 1, "nowhere: there is no such file or folder"),
    ],
)
@pytest.mark.usefixtures("built")
def test_errors_are_one_message_without_a_traceback(
    corpus: Path, command: list[str], status: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [word.format(recipe=corpus) for word in command]
    assert main(command) == status
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("shardkit: error: ")
    assert message in err
    assert "Traceback" not in err
    assert main([*command, "--debug"]) == status
    assert "Traceback" in capfd.readouterr().err


PLAN_TRAIN = ["plan", "train", "--tokens", "14.8e12", "--days", "54"]
USAGE = [
    ["nothing"], ["build"], ["build", "r", "--workers", "0"], ["build", "r", "--workers", "two"],
    ["upload", "a"], ["upload", "a", "b", "--threads", "257"], ["download", "a", "b", "--threads", "0"],
    ["build", "r", "--engine", "spark"], ["build", "r", "--work"], ["verify"], ["info", "a", "b"],
    ["dedup-index"], ["dedup-index", "r"], ["dedup-index", "r", "i", "--show", "i"],
    ["dedup-index", "r", "--show", "i"], ["dedup-index", "r", "i", "--sketch", "63"],
    ["dedup-index", "r", "i", "--sketch", "-1"], ["dedup-index", "r", "i", "--sketch", "2000000"],
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((arguments, "; see `shardkit") for arguments in USAGE),
        ([], "usage: shardkit"),
        (["biuld", "r"], "shardkit: error: unknown verb 'biuld'; did you mean build?; see"),
        (["zzz"], "shardkit: error: unknown verb 'zzz'; see `shardkit --help`"),
        (["rewind", "out"], "unknown verb 'rewind'; in shardkit: `trace PATH --losses FILE`; see"),
        (["build", "r", "--outptu", "x"], "shardkit build: error: unknown option --outptu; did you mean"),
        (["build", "r", "--worker=2"], "unknown option --worker; did you mean --workers?"),
        (
            ["plan", "train", "--gpu", "8", *PLAN_TRAIN[2:], "--gpus", "8"],
            "unknown option --gpu; did you mean --gpus",
        ),
        (["build", "r", "--zzz"], "unknown option --zzz; see `shardkit build --help`"),
        (
            ["info", "a", "b"],
            "shardkit info: error: unexpected argument 'b'; see `shardkit info --help`",
        ),
        (["plan"], "KIND"),
        (["plan", "train", "--tokens", "1", "--days", "1"], "--gpus"),
        ([*PLAN_TRAIN, "--gpus", "2047"], "2,047 GPUs do not fill nodes of 8"),
        ([*PLAN_TRAIN, "--gpus", "2048", "--latency", "soon"], "'soon' is not a time"),
        (["plan", "build"], "give --tokens, --raw, --from DATASET, or a RECIPE to measure"),
        (["plan", "build", "--tokens", "1", "--raw", "1"], "each is computed from the other"),
        (["plan", "build", "--tokens", "1", "--retention", "a"], "must be NAME=SHARE"),
        (["plan", "build", "--tokens", "1", "--retention", "a=0"], "above 0 and at most 1"),
        (["plan", "build", "--tokens", "1", "--sample", "0.1"], "need a RECIPE"),
        (["plan", "build", "r.yaml", "--from", "out"], "not both"),
    ],
)
def test_misuse_exits_with_two_and_says_why(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err


def test_an_unexpected_error_is_called_a_bug(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stumble(path: str, storage: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("shardkit.cli.info.describe", stumble)
    assert main(["info", "x"]) == 1
    assert "error: ZeroDivisionError: oops; this is a bug in shardkit" in capfd.readouterr().err


def test_an_interruption_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(path: str, storage: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardkit.cli.info.describe", interrupt)
    assert main(["info", "x"]) == 130
    assert capfd.readouterr().err == "shardkit: interrupted\n"


TERMINATED = """
import os, signal, sys
import shardkit.writers
from shardkit.cli.main import main

def stop(recipe, **options):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt as interrupt:
        interrupt.add_note("tasks finished: 7")
        raise

shardkit.writers.build = stop
main(["build", *sys.argv[1:]])
"""


def test_a_build_that_is_terminated_says_how_far_it_came_and_dies_by_the_signal(
    corpus: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", TERMINATED, str(corpus), "--log-file", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    expected = "shardkit: terminated; tasks finished: 7; run the same command again to continue\n"
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, expected)
    assert log.read_text().endswith(expected.removeprefix("shardkit: "))


def test_a_reader_that_stops_reading_is_no_error(corpus: Path, built: object) -> None:
    command = f"{sys.executable} -m shardkit info {corpus.parent / 'out'} --json | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "{"
    assert done.stderr == ""


@pytest.mark.parametrize("command", [["info", "nowhere"], ["build", "nowhere.yaml"], ["info", "{dataset}"]])
def test_the_command_leaves_its_callers_warnings_alone(
    corpus: Path, built: object, command: list[str]
) -> None:
    before = warnings.showwarning
    main([word.format(dataset=corpus.parent / "out") for word in command])
    assert warnings.showwarning is before


@pytest.mark.parametrize("verb", VERBS)
def test_help_states_every_default(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    # Each option's help, joined over its lines.
    text = re.sub(r"\s+", " ", capsys.readouterr().out.split("options:")[1])
    options = re.findall(r"--([a-z-]+)[^-]*?(?= --|$)", text)
    assert "json" in options
    assert text.count("default") >= len(set(options) - {"help", "set"})


def test_help_and_version_import_nothing_heavy() -> None:
    heavy = ["torch", "pyarrow", "numba", "pydantic", "tokenizers", "gigatoken", "rich", "numpy"]
    code = (
        "import sys; from shardkit.cli.main import main\n"
        "try: main(['--help'])\n"
        f"except SystemExit: print('HEAVY', [name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("HEAVY []\n"), done.stdout + done.stderr
    groups = dict(re.findall(r"^(\w+):\n((?:  .*\n)+)", done.stdout, re.MULTILINE))
    assert [*groups][:5] == ["start", "look", "move", "train", "maintain"]
    listed = [verb for text in groups.values() for verb in re.findall(r"^  ([a-z-]+) ", text, re.MULTILINE)]
    assert [verb for verb in listed if not verb.startswith("-")] == [*VERBS]
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--version"])


def test_a_mistake_in_a_recipe_is_found_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("inputs: [a.jsonl]\nfilters: [gofer]\n")
    heavy = ["torch", "pyarrow", "numba", "tokenizers", "gigatoken", "rich", "shardkit.storage"]
    code = (
        "import sys; from shardkit.cli.main import main\n"
        f"status = main(['build', {str(tmp_path / 'recipe.yaml')!r}])\n"
        f"print(status, [name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 []\n", done.stdout + done.stderr
    assert "filters[0]: there is no filter 'gofer'; did you mean 'gopher'?" in done.stderr


def test_the_installed_command_is_the_module() -> None:
    command = Path(sys.executable).with_name("shardkit")
    if not os.access(command, os.X_OK):
        pytest.skip("the command is not installed beside this Python")
    for words in ([str(command)], [sys.executable, "-m", "shardkit"]):
        done = subprocess.run([*words, "--version"], capture_output=True, text=True, timeout=60)
        assert done.stdout == f"shardkit {shardkit.__version__}\n"


def test_a_name_that_the_locale_cannot_spell_is_an_error_of_the_locale(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a b c"}\n')
    (tmp_path / "r.yaml").write_text('inputs: a.jsonl\noutput: {path: "\u00fcber", format: jsonl}\n', "utf-8")
    environment = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    command = [sys.executable, "-m", "shardkit", "build", "r.yaml", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "PYTHONUTF8=1" in done.stderr
    assert "bug" not in done.stderr
