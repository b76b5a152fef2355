"""Plans are exact arithmetic: the worked example of a large run, and turning a plan around."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, log
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.card import DatasetCard
from shardkit.cli import plan as plan_command
from shardkit.errors import RecipeError, ShardkitError
from shardkit.manifest import FileInfo
from shardkit.order.order import default_lanes, default_window
from shardkit.tools.plan.build import (
    BuildNeeds,
    BuildPlan,
    Funnel,
    Stage,
    funnel_of,
    measured_from_card,
    plan_build,
)
from shardkit.tools.plan.quantities import (
    Prices,
    format_count,
    format_seconds,
    parse_count,
    parse_number,
    parse_rate,
    parse_seconds,
    parse_share,
)
from shardkit.tools.plan.train import TrainNeeds, plan_train
from shardkit.writers.dedup.exact import KEYS
from shardkit.writers.exchange.exchange import exchange
from shardkit.writers.execution.artifacts import Artifact, RemoteFiles
from shardkit.writers.execution.commit import Commit, Output, facts_of
from shardkit.writers.execution.stage import Task
from shardkit.writers.stages import publish
from shardkit.writers.stages.exact import EQUAL_TEXTS
from shardkit.writers.stages.graph import stage_needs
from shardkit.writers.stages.needs import Corpus, Needs, most_held, together
from shardkit.writers.stages.provenance import PROVENANCE

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import bench_requests
from texts import documents

TOKENS = 14_800_000_000_000
RETENTION = ["0.50", "0.40", "0.50", "0.50", "0.50", "0.40", "0.95"]
shares = st.fractions(Fraction(1, 1000), 1, max_denominator=1000)
funnels = st.lists(shares, max_size=6).map(
    lambda found: Funnel(tuple(Stage(str(number), share) for number, share in enumerate(found)))
)


def worked_needs(**changes: Any) -> BuildNeeds:
    funnel = Funnel(tuple(Stage(str(number), Fraction(share)) for number, share in enumerate(RETENTION)))
    needs: dict[str, Any] = {"tokens": TOKENS, "funnel": funnel, "memory": 16 * 10**9}
    return BuildNeeds(**(needs | changes))


def worked_example(**changes: Any) -> BuildPlan:
    return plan_build(worked_needs(**changes))


def test_a_run_of_14_8_trillion_tokens_in_54_days_on_2048_gpus() -> None:
    plan = plan_train(TrainNeeds(tokens=TOKENS, seconds=Fraction(54 * 86400), gpus=2048))
    assert round(plan.tokens_per_second) == 3_172_154
    assert round(plan.tokens_per_second_per_gpu) == 1549
    assert round(plan.bytes_per_second) == 12_688_615  # 12.7 MB/s in all: not GB
    assert (plan.nodes, plan.global_batch) == (256, 16384)
    assert plan.steps == ceil(Fraction(TOKENS, 16384 * 4096)) == 220_538
    assert plan.dataset_bytes == 59_200_000_000_000
    assert plan.lanes == 4096
    assert plan.fetch_factor == 1
    assert plan.gets == ceil(Fraction(59_200_000_000_000, 1 << 26))


@pytest.mark.parametrize(("terabytes", "lanes"), [(Fraction(1, 100), None), (1, None), (60, 4096)])
def test_data_that_was_never_shuffled_needs_the_cache_of_its_larger_windows(
    terabytes: Fraction, lanes: int | None
) -> None:
    needs = TrainNeeds(tokens=int(terabytes * 10**12 // 4), seconds=Fraction(86400), gpus=64, lanes=lanes)
    built, converted = plan_train(needs), plan_train(replace(needs, is_shuffled=False))
    samples = ceil(Fraction(needs.tokens, needs.sequence_length))
    expected = default_window(samples, built.shards, built.lanes, is_shuffled=False)
    assert converted.window == expected >= built.window
    assert converted.cache_bytes - built.cache_bytes == max(built.lanes_per_node) * (
        converted.window_bytes - built.window_bytes
    )
    assert (converted.cache_bytes > built.cache_bytes) == (terabytes < 60)  # many lanes span enough shards


def test_a_funnel_that_keeps_0_95_percent_needs_6_2_petabytes_and_516_cores() -> None:
    plan = worked_example()
    assert worked_needs().funnel.retention == Fraction("0.0095")
    assert plan.kept_bytes == 59_200_000_000_000
    assert round(plan.raw_bytes / 10**13) == 623  # 6.23 PB
    assert plan.cores == ceil(plan.raw_bytes / (10_000_000 * 14 * 86400)) == 516
    # Ten times as many, about 5,000, are what 1 MB/s/core takes.
    assert worked_example(core_bytes_per_second=Fraction(1_000_000)).cores == 5152


@given(funnels, st.fractions(1, 10**18))
def test_a_funnel_turned_around_gives_back_what_went_in(funnel: Funnel, read: Fraction) -> None:
    assert funnel.before(funnel.after(read)) == read
    amounts = funnel.amounts(read)
    assert [left for _, _, left in amounts[:-1]] == [entered for _, entered, _ in amounts[1:]]
    assert (amounts[-1][2] if amounts else read) == funnel.after(read)


@given(
    funnels,
    st.integers(1, 10**14),
    st.fractions(Fraction(1, 2), 8, max_denominator=100),
    st.integers(1, 10**9),
    st.integers(1, 10**8),
)
def test_a_build_plan_turned_around_gives_back_tokens_cores_and_time(
    funnel: Funnel, tokens: int, per_token: Fraction, speed: int, seconds: int
) -> None:
    needs = BuildNeeds(
        tokens=tokens,
        funnel=funnel,
        text_bytes_per_token=per_token,
        core_bytes_per_second=Fraction(speed),
        seconds=Fraction(seconds),
        memory=64 * 10**9,
    )
    plan = plan_build(needs)
    assert BuildNeeds.of_raw(plan.raw_bytes, needs) == needs
    assert plan.seconds_with(plan.cores) <= seconds
    if plan.cores > 1:
        assert plan.seconds_with(plan.cores - 1) > seconds


@given(
    st.integers(1, 10**15),
    st.integers(1, 10**8),
    st.integers(1, 64),
    st.integers(1, 16),
    st.integers(1, 64),
    st.sampled_from([512, 2048, 8192]),
)
def test_a_run_s_rates_and_requests_agree_with_its_totals(
    tokens: int, seconds: int, nodes: int, per_node: int, batch: int, length: int
) -> None:
    needs = TrainNeeds(
        tokens=tokens,
        seconds=Fraction(seconds),
        gpus=nodes * per_node,
        gpus_per_node=per_node,
        batch_size=batch,
        sequence_length=length,
    )
    plan = plan_train(needs)
    assert plan.tokens_per_second * seconds == tokens
    assert plan.bytes_per_second_per_node * plan.nodes == plan.bytes_per_second
    assert (plan.steps - 1) * plan.step_seconds < seconds <= plan.steps * plan.step_seconds
    assert 1 <= plan.fetch_factor <= plan.nodes
    assert plan.lanes == default_lanes(plan.shards)
    assert plan.window == default_window(-(-tokens // length), plan.shards, plan.lanes)
    # Every lane is read by somebody, by as many as the factor says.
    assert max(plan.lanes, sum(plan.lanes_per_node)) == plan.fetch_factor * plan.lanes
    assert plan.prefetch_bytes == plan.fetches_in_flight * needs.shard_bytes


@given(st.fractions(1, 10**7), st.integers(1, 64))
def test_a_slow_loader_prolongs_the_run_by_what_it_lacks_and_the_gpus_are_paid_for(
    able: Fraction, nodes: int
) -> None:
    needs = TrainNeeds(
        tokens=10**12, seconds=Fraction(2 * 86400), gpus=8 * nodes, prices=Prices(gpu_hour=Fraction(2)),
        measured_tokens_per_second=able,
    )  # fmt: skip
    plan = plan_train(needs)
    assert plan.run_seconds == max(needs.seconds, needs.tokens / (able * nodes))
    assert plan.costs["GPUs"] == 8 * nodes * plan.run_seconds / 3600 * 2
    assert plan.waiting_dollars == 8 * nodes * (plan.run_seconds - needs.seconds) / 3600 * 2
    plain = plan_train(TrainNeeds(tokens=10**12, seconds=Fraction(2 * 86400), gpus=8 * nodes))
    assert plain.run_seconds == needs.seconds
    assert plain.waiting_dollars == plain.costs["GPUs"] == 0


def test_a_measurement_that_is_no_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="measured_tokens_per_second must be above 0"):
        TrainNeeds(tokens=1, seconds=Fraction(1), gpus=1, measured_tokens_per_second=Fraction(0))


def test_costs_are_prices_times_what_they_are_for() -> None:
    prices = Prices(get_1000=Fraction(1), egress_gb=Fraction(2), gb_month=Fraction(3), put_1000=Fraction(4))
    needs = TrainNeeds(tokens=10**12, seconds=Fraction(30 * 86400), gpus=8, prices=prices)
    plan = plan_train(needs)
    assert plan.costs["reads and traffic"] == Fraction(plan.gets, 1000) + 4000 * 2
    assert plan.costs["dataset stored"] == 4000 * 3
    build = worked_example(prices=prices, seconds=Fraction(15 * 86400))
    assert build.costs["writes"] == Fraction(build.puts * 4, 1000)
    assert build.costs["raw input stored"] == build.raw_bytes / 10**9 * 3 / 2
    assert build.puts == sum(stage.puts for stage in build.stages)


def test_a_plan_has_the_stages_that_the_recipe_asks_for() -> None:
    def stages(*dedup: str) -> set[str]:
        plan = worked_example(dedup=frozenset(dedup))
        names = {stage.stage for stage in plan.stages if "-merge-" not in stage.stage}
        return {name for name in names if not name.endswith("-addresses")}

    rows = {"tokenize", "parity", "pack", "provenance"}
    always = {"clean", "gather", "duplicates", "side_files", "upload"} | rows
    assert stages() == always
    assert stages("exact") == always | {"exact", "exact_removed"}
    assert stages("url") == always | {"url", "url_removed"}
    assert stages("url", "exact") == stages("url") | stages("exact") | {"url_left"}
    cut = always | {"line_keys", "line_losers", "lines_removed", "lines"}
    assert stages("lines") == stages("spans") == cut
    with pytest.raises(
        ValueError, match="no part 'fuzzy'; its parts are url, exact, lines, near, semantic, spans"
    ):
        worked_example(dedup=frozenset({"fuzzy"}))


def test_a_plan_has_the_shards_copied_in_the_tasks_that_publication_makes() -> None:
    plan = plan_build(BuildNeeds(tokens=10**10, funnel=Funnel(())))
    partitions = next(stage.tasks for stage in plan.stages if stage.stage == "provenance")
    upload = next(stage for stage in plan.stages if stage.stage == "upload")
    shards = [FileInfo(f"{number}", 1 << 26, {}) for number in range(plan.shards)]
    others = [FileInfo(f"provenance/{number}", 1 << 20, {}) for number in range(partitions)]
    tasks = sum(1 for _ in publish._groups([*shards, *others]))
    assert tasks / 1.3 < upload.tasks < tasks * 1.3
    files = plan.shards + partitions
    assert 1 <= upload.puts / (files + tasks) < 1.3
    assert 1 <= upload.gets / (2 * files) < 1.3
    assert upload.read_bytes == upload.written_bytes == 0
    pack = next(stage for stage in plan.stages if stage.stage == "pack")
    parts = 6  # of a shard: four, a beginning and an end
    assert 1 <= pack.puts / (parts * plan.shards + 2 * partitions) < 1.3


def test_tokens_are_written_once_and_read_once_if_readers_take_large_pieces() -> None:
    groups = 15_000  # of 4 GB of text
    needs = BuildNeeds(tokens=15 * 10**12, funnel=Funnel(()), memory=8 * 10**9)
    plan = plan_build(replace(needs, split_bytes=Fraction(4 * needs.tokens, groups)))
    stages = {stage.stage: stage for stage in plan.stages}
    assert not [name for name in stages if name.startswith("pack-tokens-merge")]
    tokens = 4 * needs.tokens
    assert stages["tokenize"].written_bytes < 1.1 * tokens
    assert stages["pack"].read_bytes < 1.3 * tokens
    assert stages["pack"].gets < 1.2 * groups * stages["pack"].tasks
    split_bytes, exact = Fraction(4 * needs.tokens, groups), frozenset({"exact"})
    many = plan_build(replace(needs, memory=10**9, split_bytes=split_bytes, dedup=exact))
    pieces = next(stage for stage in many.stages if stage.stage == "pack")
    assert [s.stage for s in many.stages if "tokens-merge" in s.stage]
    assert pieces.read_bytes / pieces.gets > 256 << 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 2047}, "do not fill nodes of 8"),
        ({"seconds": Fraction(0)}, "seconds must be above 0"),
        ({"latency_seconds": Fraction(-1)}, "latency_seconds must not be negative"),
    ],
)
def test_a_run_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    needs: dict[str, Any] = {"tokens": 1, "seconds": Fraction(1), "gpus": 8}
    with pytest.raises(ValueError, match=message):
        TrainNeeds(**(needs | changes))


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (parse_count, "14.8e12", TOKENS), (parse_count, "14.8T", TOKENS), (parse_count, "2,048", 2048),
        (parse_number, ".5", Fraction(1, 2)), (parse_share, "95%", Fraction(19, 20)),
        (parse_rate, "10MB/s/core", 10**7), (parse_rate, "25Gbit/s", 3_125_000_000),
        (parse_rate, "1.5 MiB/s", 3 << 19), (parse_rate, "80MBps", 80_000_000),
        (parse_seconds, "50ms", Fraction(1, 20)), (parse_seconds, "2h", 7200), (parse_seconds, "3", 3),
    ],
)  # fmt: skip
def test_quantities_are_read_exactly(parse: Any, text: str, expected: Any) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_count, "0"), (parse_count, "1.5"), (parse_count, "-3"), (parse_count, "many"),
        (parse_share, "0"), (parse_share, "1.01"), (parse_rate, "0MB/s"), (parse_rate, "fast"),
        (parse_rate, "10MX/s"), (parse_seconds, "5 fortnights"), (parse_number, "1e9999"),
    ],
)  # fmt: skip
def test_what_is_no_quantity_is_refused(parse: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"not a|a share must|a rate must"):
        parse(text)


def test_quantities_are_shown_with_three_digits() -> None:
    assert [format_count(n) for n in (0.25, 7, 1500, 3_172_154, TOKENS, 10**16)] == [
        "0.25", "7", "1.5 K", "3.17 M", "14.8 T", "10,000 T",
    ]  # fmt: skip
    assert [format_seconds(s) for s in (0.05, 21.16, 300, 86400, 14 * 86400)] == [
        "50 ms", "21.2 s", "5 min", "24 h", "14 days",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["train", "build"])
def test_the_command_assumes_what_the_plans_assume(kind: str) -> None:
    needs: Any = TrainNeeds if kind == "train" else BuildNeeds
    prices = Prices()
    for quantity in plan_command.TRAIN if kind == "train" else plan_command.BUILD:
        if quantity.default is not None:
            expected = getattr(prices, quantity.name, None)
            if expected is None:
                expected = needs.__dataclass_fields__[quantity.name].default
            assert quantity.parse(quantity.default) == expected, quantity.flag


def count(documents: int, size: int) -> dict[str, int]:
    return {"documents": documents, "bytes": size}


LEDGER = {
    "read": count(100, 1000),
    "kept": count(60, 300),
    "dropped": {
        "exact_duplicate": count(10, 100),
        "gopher_quality/short": count(5, 50),
        "gopher_quality/long": count(5, 150),
        "length/short": count(9, 100),
        "html/markup": count(0, 200),
        "near_duplicate": count(10, 50),
    },
    "quarantined": {"bad_json": count(1, 50)},
}


def test_a_card_s_rules_become_stages_in_the_order_in_which_they_ran() -> None:
    card = {"funnel": LEDGER, "recipe": {"filters": [{"length": {}}, {"gopher_quality": {}}]}}
    funnel = funnel_of(DatasetCard(card))
    assert [stage.name for stage in funnel.stages] == [
        "unreadable", "html", "length", "gopher_quality", "exact_duplicate", "near_duplicate",
    ]  # fmt: skip
    assert [left for _, _, left in funnel.amounts(Fraction(1000))] == [950, 750, 650, 450, 350, 300]


def test_a_card_tells_bytes_a_token_and_padding() -> None:
    card = {
        "funnel": LEDGER,
        "tokens": 75,
        "padding": 25,
        "stored_bytes": 210,
        "inputs": [{"source": "a", "files": 1, "bytes": 400, "digest": "d", "funnel": LEDGER}],
        "recipe": {
            "inputs": [{"path": "a.jsonl"}],
            "filters": [{"length": {"min_words": 1}}],
            "tokenizer": {"path": "tokenizer.json", "eos": "</s>"},
            "output": {"shard_bytes": 1024, "format": "mds"},
            "dedup": {"exact": {}, "lines": None, "near": {"measure": {"planted": 9}}},
        },
    }
    found = measured_from_card(DatasetCard(card))
    assert (found.text_bytes_per_token, found.padding) == (Fraction(4), Fraction(1, 4))
    assert found.dedup == frozenset({"exact", "near"})
    assert (found.token_bytes, found.stored_bytes_per_text_byte) == (Fraction("2.1"), Fraction("0.4"))
    del card["funnel"]
    with pytest.raises(ShardkitError, match=r"here: lacks measurements for a plan .* 'funnel'"):
        measured_from_card(DatasetCard(card, "here"))


def test_60_tb_fit_the_default_memory() -> None:
    plan = worked_example()
    assert plan.tasks < 2_200_000
    assert plan.driver_bytes < 5 * 10**9
    message = r"1,530,093 tasks of stage candidates; at most 1,048,576 .* set `memory` to 200 MB or more"
    with pytest.raises(RecipeError, match=message):
        worked_example(memory=100_000_000)
    with pytest.raises(RecipeError, match=r"packing .* at most 1,000,000 are possible"):
        worked_example(memory=200_000_000)


def test_requests_grow_with_the_bytes() -> None:
    """A request reads 200 kB at least on average, whatever the size."""

    def bytes_a_get(terabytes: int) -> float:
        needs = BuildNeeds(tokens=terabytes * 25 * 10**10, funnel=Funnel(()), memory=16 * 10**9)
        plan = plan_build(needs)
        return float(plan.kept_bytes) / plan.gets

    assert min(map(bytes_a_get, (1, 4, 16, 64, 256, 1024))) > 200_000


@pytest.mark.parametrize(
    ("runs", "megabytes", "readers"), [(31, 9, 2), (61, 200, 900), (700, 4, 5), (70, 0, 9)]
)
def test_the_plan_merges_what_the_exchange_merges(runs: int, megabytes: int, readers: int) -> None:
    corpus = Corpus(splits=runs, documents=1, text_bytes=1, tokens=1, scale=256)
    sizes = [megabytes * 10**6 // runs + 100] * runs
    merged: dict[str, int] = {}

    def commit(task: Task, size: int) -> Commit:
        facts = facts_of({}, {KEYS.file: Output(size, "")})
        in_a_store = cast(RemoteFiles, object())  # of local files, an exchange merges less
        return Commit(task.stage, task.name, Path("work"), task.digest, facts, remote=in_a_store)

    def run(*groups: Sequence[Task]) -> list[list[Commit]]:
        [group] = groups
        merged[group[0].stage] = len(group)
        return [[commit(task, sum(sizes) // len(group)) for task in group]]

    maps = [
        commit(PROVENANCE.task(str(n), 0, Artifact(Path(), content="table"), n), size)
        for n, size in enumerate(sizes)
    ]
    exchange(run, EQUAL_TEXTS.find, KEYS, maps, readers=readers, limits=corpus.limits)
    needs = Needs(corpus)
    needs.exchange(EQUAL_TEXTS.find, KEYS, runs, sum(sizes) / KEYS.row_bytes, readers)
    assert {stage.stage: stage.tasks for stage in needs.stages} == merged


@pytest.mark.timeout(600)
@pytest.mark.extended
def test_a_plan_counts_what_builds_ask_of_a_store_which_grows_with_their_text(tmp_path: Path) -> None:
    """The families of copies grow with the corpus."""
    options = Namespace(tokenizer=None, split_megabytes=256.0, scale=256, lines=True)
    texts = documents(None, 20.0)
    built = [bench_requests.measure(tmp_path / str(n), texts, n, options) for n in (25, 75)]
    for one in built:
        corpus = Corpus(
            splits=one["splits"],
            documents=one["documents"],
            text_bytes=one["text_bytes"],
            tokens=one["tokens"],
            token_bytes=2,
            scale=options.scale,
            steps=("exact", "lines", "near"),
            lines=one["lines"],
        )
        stages = {stage.stage: stage for stage in stage_needs(corpus)}
        for stage in ("line_keys", "line_losers", "lines"):
            assert stages[stage].tasks == one["stages"][stage]["tasks"]
            counted = one["stages"][stage]["bytes_read"]
            if one is built[-1] or stage != "line_losers":  # of few splits, tasks read small runs whole
                assert counted / 1.3 < stages[stage].read_bytes < counted * 1.3, stage
        planned = together([*stages.values()])
        for planned_count, name in (
            (planned.gets, "gets"),
            (planned.puts, "puts"),
            (planned.read_bytes, "bytes_read"),
            (planned.written_bytes, "bytes_written"),
            (planned.tasks, "tasks"),
        ):
            assert _total(one, name) / 1.3 < planned_count < _total(one, name) * 1.3, name
        most = most_held([*stages.values()])
        assert one["most_bytes"] / 1.3 < most < one["most_bytes"] * 1.3
        assert one["most_bytes"] < _total(one, "bytes_written"), "runs go when they were read"
    small, large = built
    grown = log(large["text_bytes"] / small["text_bytes"])
    for name in ("bytes_read", "bytes_written", "puts", "tasks", "cpu_seconds"):
        assert log(_total(large, name) / _total(small, name)) / grown < 1.05, name
    assert log(large["most_bytes"] / small["most_bytes"]) / grown < 1.05
    # A partition reads a piece of each run until pieces are large (test_requests_grow_with_the_bytes).
    assert log(_total(large, "gets") / _total(small, "gets")) / grown < 1.3


def _total(built: Mapping[str, Any], name: str) -> float:
    return float(sum(stage[name] for stage in built["stages"].values()))
