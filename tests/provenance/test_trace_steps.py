"""A step of `shardkit trace` is the step that the training loop printed."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path

import pytest

import shardkit
from shardkit.cli.main import main
from shardkit.errors import ShardkitError
from shardkit.loaders import StreamingLoader
from shardkit.writers import build
from support.small_build import make_corpus

QUICKSTART = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"

pytestmark = pytest.mark.usefixtures("inline_builds")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    return Path(build(make_corpus(folder / "corpus"), progress=False).location)


def traced(capsys: pytest.CaptureFixture[str], *words: object) -> list[int]:
    """The rows that the command lists, in its order."""
    capsys.readouterr()
    assert main(["trace", *map(str, words), "--limit", "0", "--json"]) == 0
    return [row["row"] for row in json.loads(capsys.readouterr().out)["rows"]]


def test_the_ids_that_the_quickstart_s_loop_prints_at_a_step_are_those_that_trace_prints_for_it(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").symlink_to(out)
    [loop] = re.findall(r"```python\n(from pathlib.*?train\.pt.*?)```", QUICKSTART.read_text(), re.DOTALL)
    loop = loop.replace(", 0, 60", ", 0, 5")
    loop = loop.replace("endless=True)", "endless=True, return_ids=True)")
    loop = loop.replace(': loss {loss.item():.4f}")', ": {batch['sample_id'].tolist()}\")")
    exec(compile(loop, "train.py", "exec"), {})
    printed = dict(re.findall(r"step (\d+): \[(.*?)\]", capsys.readouterr().out))
    assert [*map(int, printed)] == [*range(1, 6)]
    for step, ids in printed.items():
        found = traced(capsys, "out", "--step", step, "--batch-size", 4, "--seed", 17)
        assert found == [*map(int, ids.split(", "))]


def test_a_step_of_the_optimizer_has_the_rows_of_all_batches_that_it_accumulates(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StreamingLoader(out, batch_size=2, seed=17, endless=True, return_ids=True) as loader:
        batches = [batch["sample_id"].tolist() for batch in islice(loader, 12)]
        state = loader.state_dict()
    dataset = shardkit.open(out)
    for step in range(1, 5):
        ids = [row for batch in batches[3 * (step - 1) : 3 * step] for row in batch]
        run = "--batch-size", 2, "--accumulate", 3
        assert traced(capsys, out, "--step", step, *run) == ids
        assert traced(capsys, out, "--position", 6 * (step - 1), *run) == ids
        answer = dataset.trace(step=step, state=state, batch_size=2, accumulate=3, limit=0)
        assert [row["row"] for row in answer.facts["rows"]] == ids
        assert [row["batch"] for row in answer.facts["rows"]] == [1, 1, 2, 2, 3, 3]
        [seen] = dataset.trace(row=ids[3], state=state, batch_size=2, accumulate=3).facts["rows"][0]["runs"]
        assert [(each["step"], each["batch"]) for each in seen["seen"]][:1] == [(step, 2)]
    assert main(["trace", str(out), "--step", "2", "--batch-size", "2", "--accumulate", "3"]) == 0
    shown = capsys.readouterr().out
    assert "step 2 (counted from 1): positions 6 to 11, 6 rows" in shown
    assert "batch 3, rank 0, sample 1" in shown


@pytest.mark.parametrize("wrong", [{"step": 0}, {"step": -1}, {"step": 1, "accumulate": 0}])
def test_there_is_no_step_before_the_first(out: Path, wrong: dict[str, int]) -> None:
    with StreamingLoader(out, batch_size=2) as loader:
        state = loader.state_dict()
    with pytest.raises(ShardkitError, match=r"there is no step .*counted from 1|at least one batch"):
        shardkit.open(out).trace(state=state, batch_size=2, **wrong)  # type: ignore[arg-type]
