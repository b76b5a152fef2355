"""Many small files are read in groups, and nothing but the number of tasks and of side files tells it."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardkit.errors import BuildError
from shardkit.writers import BuildResult, build
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.explain import explain_build
from shardkit.writers.inputs import small_files
from shardkit.writers.inputs.files import InputFile
from shardkit.writers.inputs.scan import Split, parts_of, scan_inputs
from shardkit.writers.inputs.small_files import group_small_files
from shardkit.writers.recipe.recipe import load_recipe
from shardkit.writers.stages import inputs as build_inputs
from support import small_build
from support.small_build import EOS, text_of, tree

FILES = 60
RECIPE = f"""\
inputs: [{{path: "texts/*", source: small, metadata: [number]}}]
filters: [{{length: {{min_words: 3}}}}]
dedup: {{exact: {{}}, near: {{}}}}
tokenizer: {{path: tokenizer.json, eos: "{EOS}"}}
pack: {{sequence_length: 64}}
output: {{path: out, shard_bytes: 8KiB}}
"""
pytestmark = pytest.mark.usefixtures("inline_builds")

REPLACED = ["dataset.json", "report.html", "files.json"]  # hold digests of side files, or samples of them


@pytest.fixture
def corpus(tmp_path: Path, small_tokenizer: str) -> Path:
    return make_corpus(tmp_path / "corpus", small_tokenizer)


@pytest.fixture(scope="module")
def small_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    recipe = small_build.make_corpus(tmp_path_factory.mktemp("tokenizer") / "corpus", 40)
    return (recipe.parent / "tokenizer.json").read_text()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group the small corpus as a large one is."""
    monkeypatch.setattr(build_inputs, "group_small_files", partial(group_small_files, group_bytes=1 << 17))


def make_corpus(folder: Path, tokenizer: str) -> Path:
    """Files of one to four documents, plain, compressed and as a table; some texts occur in several."""
    (folder / "texts").mkdir(parents=True)
    for number in range(FILES):
        numbers = [number * 3 + n for n in range(number % 4 + 1)] + ([number % 7] if number % 5 == 0 else [])
        write(folder / "texts" / f"{number:03d}", number, [text_of(n) for n in numbers])
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder / "recipe.yaml"


def write(stem: Path, number: int, texts: Sequence[str]) -> None:
    if number % 11 == 10:
        pq.write_table(pa.table({"text": texts, "number": [number] * len(texts)}), f"{stem}.parquet")
        return
    data = "".join(json.dumps({"text": text, "number": number}) + "\n" for text in texts).encode()
    is_gzip = number % 11 == 5
    Path(f"{stem}.jsonl{'.gz' if is_gzip else ''}").write_bytes(
        gzip.compress(data, mtime=0) if is_gzip else data
    )


def make(recipe: Path, *overrides: str, output: str = "out") -> BuildResult:
    overrides = ("work=work", *overrides)
    place = recipe.parent / output
    return build(recipe, output=place, overrides=overrides, progress=False)


def splits_of(sizes: Sequence[int], **about: str) -> list[Split]:
    files = [
        InputFile(f"{about.get('folder', 'f')}/{n:05d}.txt", "", size, "0") for n, size in enumerate(sizes)
    ]
    return [Split(n, 0, file, "text", None, 0, file.bytes, 0, file.bytes) for n, file in enumerate(files)]


def names(groups: Sequence[Split]) -> set[tuple[str, ...]]:
    return {tuple(part.file for part in group.parts) for group in groups}


def test_groups_keep_every_split_in_its_order_and_have_about_the_same_size() -> None:
    rng = random.Random(3)
    splits = splits_of([rng.randrange(100, 60_000) for _ in range(20_000)])
    groups = group_small_files(splits)
    assert [(p.file, p.bytes) for p in parts_of(groups)] == [(s.file, s.bytes) for s in splits]
    assert [group.index for group in groups] == list(range(len(groups)))
    sizes = [group.bytes for group in groups]
    assert sizes == [sum(part.bytes for part in group.parts) for group in groups]
    assert max(sizes) <= (2 << 24) + 60_000
    assert (1 << 22) < sum(sizes) / len(sizes) < (2 << 24)


def test_groups_grow_with_a_corpus_so_that_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_files, "_MOST_TASKS", 1000)
    splits = splits_of([3_000_000] * 4000)  # 12 GB of files that are not small: 12 GB / 16 MiB < 1,000
    assert group_small_files(splits) == splits
    splits = splits_of([3_000_000] * 8000)
    groups = group_small_files(splits)
    assert [(p.file, p.bytes) for p in parts_of(groups)] == [(s.file, s.bytes) for s in splits]
    assert 200 < len(groups) < 1000
    assert [small_files.group_size(1000 * (1 << 24) * n) >> 24 for n in (1, 1.01, 4, 4.01)] == [1, 4, 4, 16]


def test_few_files_large_files_and_parts_of_files_stay_apart() -> None:
    assert group_small_files(splits_of([10] * 31)) == splits_of([10] * 31)
    [group] = group_small_files(splits_of([10] * 32))
    assert len(group.parts) == 32
    sizes = [10] * 40 + [3 << 20] + [10] * 40
    assert [len(group.parts) for group in group_small_files(splits_of(sizes))] == [40, 1, 40]
    cut = splits_of([10] * 40)
    cut[20] = cut[19]  # two splits of one file
    assert [len(group.parts) for group in group_small_files(cut, many=2)] == [19, 1, 1, 19]


def test_files_of_two_inputs_are_never_in_one_group() -> None:
    splits = splits_of([10] * 80)
    splits = [replace(split, source=int(split.index >= 37)) for split in splits]
    assert [len(group.parts) for group in group_small_files(splits)] == [37, 43]


def test_a_file_that_comes_goes_or_grows_changes_the_groups_beside_it_only() -> None:
    sizes = [1000 + n * 37 % 3000 for n in range(3000)]
    splits = splits_of(sizes)
    before = names(group_small_files(splits, group_bytes=1 << 19))
    assert len(before) > 30
    changed = []
    for at in range(0, 3000, 100):
        without = splits[:at] + splits[at + 1 :]
        larger = [*splits[:at], splits_of([*sizes[:at], 200_000])[at], *splits[at + 1 :]]
        for other in (without, larger):
            changed.append(len(before - names(group_small_files(other, group_bytes=1 << 19))))
    assert max(changed) <= 6, "up to where a group ends by chance"
    assert sum(changed) / len(changed) < 2.5


def test_a_build_has_the_same_documents_and_shards_with_and_without_groups(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_inputs, "group_small_files", list)
    limits = replace(DEFAULT_LIMITS, gather_splits=1 << 30)  # nor are they joined after cleaning
    monkeypatch.setattr(build_inputs, "DEFAULT_LIMITS", limits)
    apart = make(corpus, "work=null", output="apart")
    monkeypatch.setattr(build_inputs, "group_small_files", partial(group_small_files, group_bytes=1 << 17))
    joined = make(corpus, "work=null", output="joined")
    assert 2 <= joined.tasks < apart.tasks - 100
    one, two = tree(apart.output), tree(joined.output)
    side = {name for name in one.keys() | two.keys() if name.startswith(("dropped/", "duplicates/"))}
    assert {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)} <= side | {*REPLACED}
    for folder in ("dropped", "duplicates"):
        assert rows_of(apart.output / folder) == rows_of(joined.output / folder) != []
    cards = [json.loads((result.output / "dataset.json").read_text()) for result in (apart, joined)]
    for card in cards:
        card.pop("files")
    assert cards[0] == cards[1]
    assert all(
        row["file"].startswith("texts/") for row in pq.read_table(joined.output / "provenance").to_pylist()
    )
    assert make(corpus, "work=null", output="joined").up_to_date


def rows_of(folder: Path) -> list[str]:
    """The rows of all tables, without the examples of texts, of which each task writes some."""
    tables = [pq.read_table(file) for file in sorted(folder.glob("*.parquet"))]
    texts = {"text", "kept_text"}
    return sorted(
        str(row)
        for table in tables
        for row in table.drop_columns([*texts & {*table.column_names}]).to_pylist()
    )


@pytest.mark.usefixtures("groups")
def test_a_changed_file_redoes_its_group_only(corpus: Path) -> None:
    make(corpus)
    stages = {plan.stage: plan for plan in explain_build(corpus, overrides=["work=work"]).stages}
    groups = stages["clean"].tasks
    assert groups > 2
    write(
        corpus.parent / "texts" / "017", 17, ["A text that was not there before, of more than three words."]
    )
    [plan] = [plan for plan in explain_build(corpus, overrides=["work=work"]).stages if plan.stage == "clean"]
    assert (plan.tasks, plan.finished) == (groups, groups - 1)
    assert any(reason.what == "file: read from other bytes" for reason in plan.reasons)
    changed = make(corpus, output="changed")
    shutil.rmtree(corpus.parent / "work")
    assert tree(make(corpus, output="anew").output) == tree(changed.output)


@pytest.mark.usefixtures("groups")
def test_a_record_that_cannot_be_read_stops_the_build_by_its_file_and_the_other_groups_are_kept(
    corpus: Path,
) -> None:
    whole = tree(make(corpus, "work=null").output)
    file = corpus.parent / "texts" / "042.jsonl"
    sound = file.read_bytes()
    file.write_bytes(sound + b"{broken\n")
    with pytest.raises(BuildError, match=r"texts/042\.jsonl: record 3 \(byte \d+\): bad_json"):
        make(corpus, output="again")
    file.write_bytes(sound)
    result = make(corpus, output="again")
    assert result.tasks_reused >= 1
    assert tree(result.output) == whole


@pytest.fixture
def damaged(corpus: Path) -> Path:
    """A corpus with a compressed file that is cut short, another with a bad record, and one that is both."""
    texts = corpus.parent / "texts"
    lines = [json.dumps({"text": text_of(5000 + n), "number": n}).encode() + b"\n" for n in range(400)]
    member, rest = (
        gzip.compress(b"".join(lines[:200]), mtime=0),
        gzip.compress(b"".join(lines[200:]), mtime=0),
    )
    (texts / "005.jsonl.gz").write_bytes(member + rest[: len(rest) // 2])
    (texts / "016.jsonl.gz").write_bytes(gzip.compress(b"".join([*lines[:9], b"{bad\n"]), mtime=0)[:-4])
    (texts / "017.jsonl").write_bytes(b"".join([*lines[10:20], b"\xff\n"]))
    return corpus


def test_damaged_files_of_a_group_are_booked_as_if_each_was_alone(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for name, group in (("apart", list), ("joined", partial(group_small_files, group_bytes=1 << 17))):
        monkeypatch.setattr(build_inputs, "group_small_files", group)
        made.append(make(damaged, "work=null", "max_bad_fraction=1", output=name))
    apart, joined = (tree(result.output) for result in made)
    assert apart["quarantine.jsonl"] == joined["quarantine.jsonl"]
    assert {k: v for k, v in apart.items() if k.endswith(".mds")} == {
        k: v for k, v in joined.items() if k.endswith(".mds")
    }
    assert made[0].funnel.quarantined == made[1].funnel.quarantined
    entries = [json.loads(line) for line in (made[1].output / "quarantine.jsonl").read_text().splitlines()]
    assert [(entry["file"], entry["reason"]) for entry in entries] == [
        ("texts/005.jsonl.gz", "damaged_file"),
        ("texts/016.jsonl.gz", "damaged_file"),
        ("texts/017.jsonl", "bad_utf8"),
    ]


@pytest.mark.usefixtures("groups")
def test_the_bad_fraction_is_that_of_a_file_also_in_a_group(damaged: Path) -> None:
    with pytest.raises(BuildError, match=r"texts/005\.jsonl\.gz .*more than max_bad_fraction 0\.1 allows"):
        make(damaged, "max_bad_fraction=0.1")


@pytest.mark.usefixtures("groups")
def test_where_splits_may_fail_each_file_is_its_own(corpus: Path) -> None:
    recipe = load_recipe(corpus, ["max_failed_splits=1"])
    inputs = build_inputs.BuildInputs.of(recipe, scan_inputs(recipe))
    assert len(inputs.splits) == FILES
    assert not any(split.rest for split in inputs.splits)


SCRIPT = """
import sys
from functools import partial
from shardkit.writers import build
from shardkit.writers.inputs.small_files import group_small_files
from shardkit.writers.stages import inputs as build_inputs
build_inputs.group_small_files = partial(group_small_files, group_bytes=1 << 17)
build(sys.argv[1], overrides=["work=work"], workers=2, progress=False)
"""


@pytest.mark.extended
@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("stage", ["clean", "signatures", "tokenize"])
def test_a_build_of_groups_that_is_killed_goes_on_to_the_same_bytes(corpus: Path, stage: str) -> None:
    whole = tree(make(corpus, "work=null", output="whole").output)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(corpus)], start_new_session=True)
    finished = corpus.parent / "work" / stage
    while process.poll() is None and not (finished.is_dir() and any(finished.iterdir())):
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run([sys.executable, "-c", SCRIPT, str(corpus)], check=True)
    assert tree(corpus.parent / "out") == whole
