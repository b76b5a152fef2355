"""Jumps of the loss are found in a log, their documents in the dataset, and the run goes on without them."""

from __future__ import annotations

import io
import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit as sk
from shardkit.cli.main import main
from shardkit.errors import ShardkitError
from shardkit.loaders import Order, Stream, StreamingLoader
from shardkit.tools.rewind.losses import LossLog, SpikeOptions, find_spikes, read_losses
from support.loader_data import make_rows
from support.planted_spikes import BATCH, Planted, make_planted, train

pytestmark = pytest.mark.usefixtures("inline_builds")

RNG = np.random.default_rng(5)
NOISE = 3 + 0.05 * RNG.standard_normal(400)


def log_of(losses: Sequence[float], steps: Sequence[int] | None = None) -> LossLog:
    values = np.array(losses, np.float64)
    numbers = np.arange(1, len(values) + 1) if steps is None else np.array(steps)
    return LossLog("log", "loss", numbers, values, 1, 0, 0)


def spiked(*spikes: tuple[int, float]) -> list[float]:
    """Noise with other losses at some steps."""
    losses = list(map(float, NOISE))
    for step, loss in spikes:
        losses[step - 1] = loss
    return losses


def read(data: bytes, **options: Any) -> LossLog:
    return read_losses(io.BytesIO(data), "log", SpikeOptions(**options))


# Spikes of a log.


def test_noise_alone_has_hardly_a_spike_in_a_hundred_thousand_steps() -> None:
    noise = 3 + 0.05 * np.random.default_rng(0).standard_normal(100_000)
    log = log_of(noise.tolist())
    assert len(find_spikes(log, SpikeOptions())) <= 3
    assert find_spikes(log, SpikeOptions(threshold=6)) == []


def test_a_jump_is_found_at_its_step_with_its_robust_score() -> None:
    [spike] = find_spikes(log_of(spiked((200, 4.0))), SpikeOptions())
    median = np.sort(NOISE[199 - 16 : 199])[8]
    deviations = [abs(NOISE[at] - np.sort(NOISE[at - 16 : at])[8]) for at in range(199 - 64, 199)]
    scale = 1.4826 * sorted(deviations)[32]
    assert (spike.step, spike.loss, spike.steps, spike.recovered) == (200, 4.0, (200,), True)
    assert spike.median == pytest.approx(median)
    assert spike.score == pytest.approx((4.0 - median) / scale)


def test_a_fall_is_no_spike() -> None:
    assert find_spikes(log_of(spiked((200, 1.0), (201, -math.pi))), SpikeOptions()) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_a_spike_even_at_the_first_step(bad: float) -> None:
    [first, second] = find_spikes(log_of(spiked((1, bad), (300, bad), (301, bad))), SpikeOptions())
    assert (first.step, first.steps, second.step, second.score) == (1, (1,), 300, math.inf)
    assert math.isnan(first.median)
    assert second.steps == (300, 301)
    assert second.recovered


def test_a_run_that_stays_high_is_one_spike_that_has_not_recovered() -> None:
    losses = NOISE.tolist()
    losses[250:] = [loss + 4 for loss in losses[250:]]
    [spike] = find_spikes(log_of(losses), SpikeOptions())
    assert (spike.step, spike.recovered) == (251, False)
    losses[250:] = [math.nan] * 150
    [spike] = find_spikes(log_of(losses), SpikeOptions())
    assert (spike.step, spike.recovered) == (251, False)


def test_a_loss_that_rises_again_while_it_recovers_is_a_spike_of_its_own() -> None:
    falling = [(200, 6.0), (201, 5.0), (202, 4.5), (203, 7.0), (204, 4.0)]
    assert [one.step for one in find_spikes(log_of(spiked(*falling)), SpikeOptions())] == [200, 203]


def test_constant_losses_have_a_scale() -> None:
    assert find_spikes(log_of([2.0] * 50 + [2.005] + [2.0] * 50), SpikeOptions()) == []
    assert [one.step for one in find_spikes(log_of([2.0] * 50 + [2.1] + [2.0] * 50), SpikeOptions())] == [51]


# Logs.

LINES = [(1, 3.5), (2, 2.5), (3, 2.25)]
JSON_LINES = "".join(
    json.dumps({"step": step, "loss": loss, "sample_ids": [4, 5]}) + "\n" for step, loss in LINES
)
CSV = "epoch,step,train_loss,val_loss\n0,1,3.5,\n0,2,2.5,\n0,2,,1.0\n0,3,2.25,\n"
WANDB = (
    '"Step","run-7 - train/loss","run-7 - train/loss__MIN"\n"1","3.5","1"\n"2","2.5","1"\n"3","2.25","0"\n'
)
TENSORBOARD = "Wall time,Step,Value\n1764000000.1,1,3.5\n1764000001.2,2,2.5\n1764000002.3,3,2.25\n"


@pytest.mark.parametrize(
    "text",
    [
        JSON_LINES,
        JSON_LINES + '{"step": 4, "lo',  # of a killed process
        JSON_LINES.replace("\n", "\r\n"),
        '{"config": {"lr": 0.1}}\n'
        + JSON_LINES
        + '{"step": 3, "eval_loss": 9.0}\n{"step": 4, "loss": null}\n',
        "\ufeff" + CSV,
        CSV.replace(",", ";"),
        CSV.replace(",", "\t"),
        CSV + "epoch,step,train_loss,val_loss\n",  # a restart writes the header again
        CSV + '0,"4,5.0,\n',  # an open quote
        WANDB,
        TENSORBOARD,
    ],
)
def test_logs_of_trainers_are_read(text: str) -> None:
    log = read(text.encode())
    assert (log.steps.tolist(), log.losses.tolist()) == ([1, 2, 3], [3.5, 2.5, 2.25])


def test_the_last_loss_of_a_step_counts_in_any_order_and_a_log_from_0_is_moved() -> None:
    log = read(b"step,loss\n2,9\n0,1\n1,8\n1,7\n2,6\n")
    assert (log.steps.tolist(), log.losses.tolist()) == ([1, 2, 3], [1, 7, 6])
    assert (log.first_step, log.repeated) == (0, 2)
    assert read(b"step,loss\n49,1\n99,1\n", first_step=0).steps.tolist() == [50, 100]


@pytest.mark.parametrize(
    "line",
    [
        *('{"step": 1, "loss": NaN}', '{"step": 1, "loss": "NaN"}', '{"step": 1.0, "loss": Infinity}'),
        *('{"step": "1", "loss": 1e999}', '{"step": 1, "loss": -Infinity}', '{"loss": "nan", "step": 1}'),
    ],
)
def test_losses_that_are_not_finite_are_read(line: str) -> None:
    log = read(f'{{"step": 2, "loss": 1}}\n{line}\n'.encode())
    assert log.steps.tolist() == [1, 2]
    assert not math.isfinite(log.losses[0])
    assert log.skipped == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "log: is empty"),
        (b"\n \n", "log: is empty"),
        (b"step,loss\n", "has no steps with a loss"),
        (b"time,loss\n1,2\n", "has no column `step` .columns: time, loss"),
        (b"step,accuracy\n1,2\n", "has no column `loss` .columns: step, accuracy.; name it with"),
        (b"Step,a - loss,b - loss\n1,2,3\n", "losses of several runs: a - loss, b - loss"),
        (b'{"step": "one", "loss": 2}\n{"step": 1.5, "loss": 2}\n', "has no steps with a loss"),
        (b"step,loss\n-1,2\n1e300,3\nx,4\n", "lines that could not be read: 3"),
        (b'{\n "log_history": [{"step": 1, "loss": 2}]\n}', "is one JSON document"),
        (b'[{"step": 1, "loss": 2}]', "is one JSON document"),
        (b"\x00\xff\x01" * 50, "has no column `step`"),
    ],
)  # fmt: skip
def test_what_is_no_log_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ShardkitError, match=message):
        read(data)


def test_a_loss_is_named() -> None:
    assert read(b"step,loss,z\n1,2,3\n", loss="z").losses.tolist() == [3]
    with pytest.raises(ShardkitError, match="has no losses named 'y'"):
        read(b"step,loss,z\n1,2,3\n", loss="y")


def test_a_log_that_is_all_spikes_is_refused() -> None:
    with pytest.raises(ShardkitError, match=r"10,001 of 20,002 losses begin a spike: raise the threshold"):
        find_spikes(log_of([1.0, math.nan] * 10_001), SpikeOptions())


# From the log of a training to its documents, and on without them.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> tuple[Planted, Path]:
    """A run with five planted documents: losses.jsonl, states/ every 50 steps, and usage/."""
    folder = tmp_path_factory.mktemp("rewind")
    planted = make_planted(folder / "corpus", 3000, 5)
    train(planted, folder)
    return planted, folder


def asked(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """The answer of the command, of which everything is listed."""
    capsys.readouterr()
    assert main(["trace", *map(str, words), "--limit", "0", "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(["trace", *map(str, words)]) == 1
    return capsys.readouterr().err


def sizes(planted: Planted) -> list[object]:
    return ["--batch-size", BATCH, "--seed", planted.seed]


def records(documents: Sequence[dict[str, Any]]) -> set[int]:
    return {document["record"] for document in documents}


def test_documents_that_made_the_loss_jump_come_first_and_alone_stand_out(
    trained: tuple[Planted, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    planted, folder = trained
    answer = asked(capsys, planted.out, "--losses", folder / "losses.jsonl", *sizes(planted))
    assert {step for spike in answer["spikes"] for step in spike["steps"]} == {*planted.steps.values()}
    assert records(answer["documents"][: len(planted.steps)]) == {*planted.steps}
    assert records([one for one in answer["documents"] if one["chosen"]]) == {*planted.steps}
    assert answer["document_count"] > 40
    for document in answer["documents"][: len(planted.steps)]:
        assert planted.steps[document["record"]] in range(document["steps"][0], document["steps"][0] + 3)
        assert document["evidence"] > 0.4  # two of them share a spike
        assert document["unusual"] > 1


def test_a_run_goes_on_with_a_mask_and_has_no_spike_there(
    trained: tuple[Planted, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted, folder = trained
    mask = tmp_path / "masked.txt"
    words = ["--losses", folder / "losses.jsonl", "--state", folder / "states", *sizes(planted)[:2]]
    answer = asked(capsys, planted.out, *words, "--mask", mask)
    last = max(planted.steps.values())
    then = answer["continue"]
    assert then["step"] == (last - 3) // 50 * 50, "the last checkpoint before the candidates"
    assert then["checkpoint"] == str(folder / "states" / f"step-{then['step']:05d}.json")
    [written] = answer["lists"]
    assert (written["kind"], written["file"], written["rows"], written["documents"]) == (
        *("mask", str(mask), 5, 5),
    )
    space: dict[str, Any] = {}
    exec("\n".join(then["code"]), space)
    with (
        space["loader"] as loader,
        StreamingLoader(planted.out, batch_size=BATCH, seed=planted.seed, labels="shifted") as plain,
    ):
        plain.load_state_dict(space["state"])
        for step, (batch, before) in enumerate(zip(loader, plain, strict=True), then["step"] + 1):
            assert batch["tokens"].tolist() == before["tokens"].tolist(), "the order of the run"
            is_masked = bool((batch["labels"] != before["labels"]).any())
            assert is_masked == (step in planted.steps.values())
    train(planted, tmp_path, mask=mask)
    assert asked(capsys, planted.out, *words[:1], tmp_path / "losses.jsonl", *sizes(planted))["spikes"] == []


def test_a_run_goes_on_without_rows_in_another_order(
    trained: tuple[Planted, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted, folder = trained
    first, both = tmp_path / "first.txt", tmp_path / "both.txt"
    first.write_text("0\n1\n")
    with StreamingLoader([Stream(planted.out, exclude=first)], batch_size=BATCH, seed=planted.seed) as loader:
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    words = ["--losses", folder / "losses.jsonl", "--without", first, "--state", tmp_path / "state.json"]
    answer = asked(
        capsys, planted.out, *words, *sizes(planted)[:2], "--exclude", both, "--spikes", "before=5"
    )
    assert answer["lists"][0]["rows"] == answer["lists"][0]["new_rows"] + 2, (
        "rows that the run left out stay out"
    )
    space: dict[str, Any] = {}
    exec("\n".join(answer["continue"]["code"]), space)
    assert "on_mismatch='fork'" in answer["continue"]["code"][-1]
    with space["loader"] as loader:
        kept = len(sk.open(planted.out)) - answer["lists"][0]["rows"]
        assert len([*loader]) == -(-kept // BATCH)


def test_usage_logs_say_what_the_run_was_and_that_a_log_is_of_another(
    trained: tuple[Planted, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted, folder = trained
    words = [planted.out, "--state", folder / "usage", "--losses"]
    answer = asked(capsys, *words, folder / "losses.jsonl")
    assert (answer["run"]["seed"], answer["run"]["batch_size"]) == (planted.seed, BATCH)
    assert records([one for one in answer["documents"] if one["chosen"]]) == {*planted.steps}
    longer = tmp_path / "longer.jsonl"
    longer.write_text('{"step": 100000, "loss": NaN}')
    assert "has a loss of step 100,000, but the usage logs end with step" in refused(capsys, *words, longer)
    states = [*words[:2], folder / "states", "--losses", folder / "losses.jsonl", "--batch-size"]
    assert "where no batch of 7 on 1 ranks begins" in refused(capsys, *states, 7)
    short = tmp_path / "short.csv"
    short.write_text("step,loss\n1,2\n")
    notices = asked(capsys, *states[:-2], short, "--batch-size", BATCH)["notices"]
    assert "the log has 1 losses" in notices[0]
    assert "but the log ends with step 1: is it of this run?" in notices[1]


def test_a_spike_that_follows_its_document_or_has_steps_of_several_batches_is_traced_too(
    trained: tuple[Planted, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted, folder = trained
    losses = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    late, pairs = tmp_path / "late.jsonl", tmp_path / "pairs.csv"
    late.write_text(
        "".join(json.dumps({"step": one["step"] + 2, "loss": one["loss"]}) + "\n" for one in losses)
    )
    answer = asked(capsys, planted.out, "--losses", late, *sizes(planted))
    assert records(answer["documents"][:8]) >= {*planted.steps}
    none = asked(capsys, planted.out, "--losses", late, *sizes(planted), "--spikes", "before=0")
    assert not records(none["documents"]) & {*planted.steps}
    lines = [
        f"{number},{(one['loss'] + two['loss']) / 2}\n"
        for number, (one, two) in enumerate(zip(losses[::2], losses[1::2], strict=False))
    ]
    pairs.write_text("step,loss\n" + "".join(lines))
    answer = asked(capsys, planted.out, "--losses", pairs, *sizes(planted), "--accumulate", 2)
    assert answer["log"]["first_step"] == 0
    assert records(answer["documents"][:8]) >= {*planted.steps}


def test_a_log_with_a_loss_every_few_steps_has_all_steps_between_as_candidates(
    trained: tuple[Planted, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted, _ = trained
    record, step = max(planted.steps.items(), key=lambda entry: entry[1])
    logged = -(-step // 5) * 5
    sparse = tmp_path / "sparse.csv"
    lines = [f"{at},{4.0 if at == logged else NOISE[at]}\n" for at in range(5, 305, 5)]
    sparse.write_text("step,loss\n" + "".join(lines))
    answer = asked(capsys, planted.out, "--losses", sparse, *sizes(planted))
    [spike] = answer["spikes"]
    assert (spike["step"], spike["first_candidate"]) == (logged, logged - 4)
    assert records([one for one in answer["documents"] if one["chosen"]]) == {record}


def test_text_and_stdin(
    trained: tuple[Planted, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    planted, folder = trained
    data = (folder / "losses.jsonl").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main(["trace", str(planted.out), "--losses", "-", *map(str, sizes(planted)), "--limit", "2"]) == 0
    shown = capsys.readouterr().out
    assert "stdin: 3" in shown
    assert "suspicious step" in shown
    assert "  1* evidence 1.00, step" in shown
    assert "https://planted.org/" in shown
    assert "continue from a checkpoint of step" in shown
    assert "--mask FILE keeps the order of the run" in shown
    calm = tmp_path / "calm.csv"
    calm.write_text("step,loss\n" + "".join(f"{step},2.5\n" for step in range(1, 90)))
    assert main(["trace", str(planted.out), "--losses", str(calm), *map(str, sizes(planted))]) == 0
    assert "no loss is suspicious" in capsys.readouterr().out


def test_what_a_log_is_asked_without_is_said(
    trained: tuple[Planted, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted, folder = trained
    log = str(folder / "losses.jsonl")
    cases = [
        (["--losses", log], "give --batch-size and --world-size"),
        (["--losses", log, "--state", str(folder / "states")], "give --batch-size and --world-size"),
        (["--losses", log, "--batch-size", "2", "--row", "3"], "row and losses are different questions"),
        (["--losses", log, "--batch-size", "2", "--mask", "a", "--exclude", "b"], "not both"),
        (["--row", "3", "--spikes", "before=3"], "give --losses FILE"),
        (["--losses", log, "--batch-size", "2", "--spikes", "window=3"], "window must be from 16"),
        (["--losses", log, "--batch-size", "2", "--spikes", "threshold=-1"], "threshold must be above 0"),
    ]
    for words, message in cases:
        with pytest.raises(SystemExit) as caught:
            main(["trace", str(planted.out), *words])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
    huge = tmp_path / "huge.csv"
    huge.write_text("step,loss\n9007199254740990,nan\n")
    assert "no run has a step" in refused(capsys, planted.out, "--losses", huge, "--batch-size", 1024)
    assert "cannot be read: No such file" in refused(capsys, planted.out, "--losses", "none", *sizes(planted))


def spike_at(step: int, path: Path, steps: int = 60) -> Path:
    """Write a log with one spike."""
    lines = [f"{at},{9.0 if at == step else NOISE[at]}\n" for at in range(1, steps)]
    path.write_text("step,loss\n" + "".join(lines))
    return path


def test_a_mixture_has_a_list_for_each_dataset(
    trained: tuple[Planted, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted, _ = trained
    make_rows(tmp_path / "web", 300, 128)
    streams = [Stream(planted.out, 1, name="crawl"), Stream(tmp_path / "web", 2)]
    with StreamingLoader(streams, batch_size=6, seed=3, labels="shifted") as loader:
        (tmp_path / "state.json").write_text(json.dumps({"run": [loader.state_dict()]}))
    log = spike_at(40, tmp_path / "log.csv")
    words = ["--losses", log, "--state", tmp_path / "state.json", "--batch-size", 6, "--spikes", "before=0"]
    answer = asked(capsys, planted.out, "--stream", tmp_path / "web", *words, "--mask", tmp_path / "mask.txt")
    assert {one["dataset"] for one in answer["documents"]} == {str(planted.out), str(tmp_path / "web")}
    space: dict[str, Any] = {}
    assert answer["continue"]["code"][3].endswith("['run'][0]")
    first, second = tmp_path / "mask.txt", tmp_path / "mask-1.txt"
    assert {one["file"]: one["documents"] for one in answer["lists"]} == {
        str(file): sum(one["chosen"] and one["dataset"] == str(path) for one in answer["documents"])
        for file, path in ((first, planted.out), (second, tmp_path / "web"))
        if file.exists()
    }
    assert second.exists()
    exec("\n".join(answer["continue"]["code"]), space)
    with space["loader"] as loader, StreamingLoader(streams, batch_size=6, seed=3, labels="shifted") as plain:
        for step, (batch, before) in enumerate(zip(loader, plain, strict=False), 1):
            assert batch["tokens"].tolist() == before["tokens"].tolist()
            if step == 40:
                assert (batch["labels"] != before["labels"]).any()
                break


def test_rows_take_the_place_of_documents_that_are_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_rows(tmp_path / "rows", 200, 65)
    log = spike_at(40, tmp_path / "log.csv", 50)
    sizes = ["--batch-size", "4", "--seed", "2"]
    words = ["--losses", log, *sizes, "--spikes", "before=1"]
    answer = asked(capsys, tmp_path / "rows", *words, "--exclude", tmp_path / "gone.txt")
    assert "has no provenance tables" in answer["problem"]
    assert answer["document_count"] == 8
    assert answer["spikes"][0]["alike"]
    asked_rows = asked(capsys, tmp_path / "rows", "--step", 40, *sizes)["rows"]
    assert {row["row"] for row in asked_rows} <= {one["row"] for one in answer["documents"]}
    with StreamingLoader([Stream(tmp_path / "rows", exclude=tmp_path / "gone.txt")], batch_size=1) as loader:
        assert len([*loader]) == 200 - answer["lists"][0]["rows"]
    assert main(["trace", str(tmp_path / "rows"), *map(str, words)]) == 0
    assert "shard.00000.mds record" in capsys.readouterr().out


def test_files_that_are_read_in_place_are_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lists = pa.table({"input_ids": np.random.default_rng(1).integers(0, 50, (200, 64)).tolist()})
    pq.write_table(lists, tmp_path / "part.parquet")
    words = [tmp_path / "part.parquet", "--losses", spike_at(40, tmp_path / "log.csv", 50)]
    words += ["--batch-size", 4, "--loader", "columns=input_ids", "--loader", "sequence_length=64"]
    answer = asked(capsys, *words, "--mask", tmp_path / "mask.txt")
    assert answer["documents"][0]["file"].endswith("part.parquet")
    assert answer["lists"][0]["tokens"] == 64 * answer["lists"][0]["rows"]


def test_a_state_with_the_size_of_a_step_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_rows(tmp_path / "rows", 400, 65)
    order = Order(global_batch=8)
    with StreamingLoader(tmp_path / "rows", batch_size=2, seed=4, order=order) as loader:
        state = tmp_path / "state.json"
        state.write_text(json.dumps(loader.state_dict()))
    log = spike_at(40, tmp_path / "log.csv", 50)
    answer = asked(capsys, tmp_path / "rows", "--losses", log, "--state", state, "--spikes", "before=0")
    assert answer["document_count"] == 8
    [positions] = [asked(capsys, tmp_path / "rows", "--step", 40, "--state", state)["positions"]]
    assert positions == [312, 320]


def test_a_folder_of_checkpoints_may_hold_other_files_but_no_other_run(
    trained: tuple[Planted, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted, folder = trained
    for file in (folder / "states").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "step-00300.json").write_bytes(b'{"step": 300, "loader": {"posi')
    (tmp_path / "config.json").write_text('{"layers": 4}')
    (tmp_path / "model.bin").write_bytes(b"no zip")
    words = [planted.out, "--losses", folder / "losses.jsonl", "--batch-size", BATCH, "--state"]
    for where in (tmp_path, tmp_path / "*"):
        answer = asked(capsys, *words, where)
        assert answer["continue"]["checkpoint"] == str(tmp_path / "step-00250.json")
        assert [notice.split(": ")[1] for notice in answer["notices"]] == [
            *(str(tmp_path / "model.bin"), str(tmp_path / "step-00300.json"))
        ]
    with StreamingLoader(planted.out, batch_size=BATCH, seed=planted.seed + 1) as loader:
        (tmp_path / "other.json").write_text(json.dumps(loader.state_dict()))
    assert "other.json: is of another run than the furthest state: seed" in refused(capsys, *words, tmp_path)
    (tmp_path / "empty").mkdir()
    assert "has no file (.json, .pt" in refused(capsys, *words, tmp_path / "empty")
    assert "has no file (.json, .pt" in refused(capsys, *words, tmp_path / "none*")
    assert "cannot be read as JSON" in refused(capsys, *words, tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 4}, "the batch over all ranks changed from 2 to 4 at position 4"),
        ({"batch_size": 2, "seed": 9}, "seed changed at position 4: these are two orders"),
    ],
)
def test_usage_logs_of_two_orders_or_batch_sizes_have_no_numbers_of_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], message: str
) -> None:
    make_rows(tmp_path / "rows", 100, 65)
    usage = tmp_path / "usage"
    with StreamingLoader(tmp_path / "rows", batch_size=2, seed=4, usage_log=usage) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        state = loader.state_dict()
        next(batches)
    with StreamingLoader(tmp_path / "rows", usage_log=usage, **{"seed": 4, **options}) as loader:
        loader.load_state_dict(state, on_mismatch="fork")
        next(iter(loader))
    words = ["--losses", spike_at(40, tmp_path / "log.csv"), "--state", usage]
    assert message in refused(capsys, tmp_path / "rows", *words)


def test_a_document_that_several_spikes_share_is_first_though_its_tokens_are_ordinary(
    trained: tuple[Planted, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A document of many rows, all at the steps of a log's spikes, and a document of two rows."""
    planted, _ = trained
    chance = random.Random(3)
    texts = ["word " * chance.randint(5, 30) for _ in range(500)]
    texts[7], texts[8] = " ".join(["word"] * 128 * 6), " ".join(["word"] * 128 * 2)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = {"path": str(planted.out.parent / "tokenizer.json"), "eos": "<|endoftext|>"}
    recipe = {
        "inputs": str(tmp_path / "texts.jsonl"),
        "tokenizer": tokenizer,
        "output": str(tmp_path / "out"),
    }
    sk.build({**recipe, "pack": {"sequence_length": 128}}, progress=False, workers=1)
    found = asked(capsys, tmp_path / "out", "--file", "texts.jsonl", "--record", 7, "--batch-size", 1)
    steps = {piece["runs"][0]["seen"][0]["step"] for piece in found["shown"]}
    high = [step for step in sorted(steps) if step > 40]
    lines = [f"{at},{9.0 if at in high else NOISE[at]}\n" for at in range(1, max(high) + 20)]
    (tmp_path / "log.csv").write_text("step,loss\n" + "".join(lines))
    words = ["--losses", tmp_path / "log.csv", "--batch-size", 1, "--spikes", "before=0"]
    answer = asked(capsys, tmp_path / "out", *words)
    assert len(answer["spikes"]) > 3
    assert records([one for one in answer["documents"] if one["chosen"]]) == {7}
    assert answer["documents"][0]["shared"] == len(answer["spikes"]) - 1
    assert all(not one["shared"] for one in answer["documents"][1:])


@pytest.mark.extended
@pytest.mark.slow
def test_twenty_planted_documents_are_found_and_nothing_else() -> None:
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_rewind.py"
    command = [sys.executable, str(script), "--runs", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    for row in json.loads(done.stdout):
        assert row["found"] == row["planted"] == row["rank"] == 20
        assert row["unplanted_spikes"] == row["unplanted_documents"] == row["clean"] == row["masked"] == 0
        assert row["excluded"] <= 1  # a false alarm of another order, in 1,000 steps
