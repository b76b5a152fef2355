"""A build redoes what depends on a change and nothing else, says what is wrong, and its counts add up."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tokenizers

from shardkit import open_dataset
from shardkit.datasets.verify import verify
from shardkit.errors import BuildError, RecipeError
from shardkit.formats.block_checksums import shard_parts
from shardkit.manifest import BLOCKS_NAME
from shardkit.publish import download, upload
from shardkit.writers import BuildResult, build, load_recipe
from shardkit.writers.execution.progress import StageProgress
from shardkit.writers.execution.work import Work
from shardkit.writers.rows.ledger import Count
from shardkit.writers.stages import rows
from support.peers import read_with_streaming
from support.small_build import EOS, make_corpus, text_of, tree
from support.stores import fresh_memory

pytestmark = pytest.mark.usefixtures("inline_builds")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def made(corpus: Path) -> BuildResult:
    return build(corpus, workers=2, progress=False)


def stages_run(reports: list[StageProgress]) -> dict[str, int]:
    """Tasks that were run, not reused, in each stage that ran any."""
    last = {report.stage: report for report in reports}
    assert all(report.finished for report in last.values())
    return {
        stage: r.tasks_done - r.tasks_reused for stage, r in last.items() if r.tasks_done > r.tasks_reused
    }


def test_every_document_is_in_the_rows_as_its_tokens_once(corpus: Path, made: BuildResult) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(corpus.parent / "tokenizer.json"))
    eos = tokenizer.token_to_id(EOS)
    with open_dataset(made.output) as dataset:
        rows = np.stack([np.asarray(sample["tokens"]) for sample in dataset])
    table = pq.read_table(made.output / "provenance").to_pylist()
    starts = dict(enumerate(open_dataset(made.output).manifest.shard_starts.tolist()))
    pieces: dict[bytes, list[tuple[int, list[int]]]] = {}
    for line in table:
        row = rows[starts[line["shard"]] + line["row"]]
        tokens = row[line["token_start"] : line["token_end"]].tolist()
        pieces.setdefault(line["document_id"], []).append((line["document_start"], tokens))
    texts: Counter[str] = Counter()
    for parts in pieces.values():
        tokens = [token for _, part in sorted(parts) for token in part]
        assert tokens[-1] == eos
        assert eos not in tokens[:-1]
        texts["".join(str(tokenizer.id_to_token(token)) for token in tokens[:-1]).replace("Ġ", " ")] += 1
    assert texts == Counter(text_of(n) for n in range(400) if n % 10 != 9)
    assert rows.size == made.tokens + made.padding
    assert sum(len(part) for parts in pieces.values() for _, part in parts) == made.tokens


@pytest.mark.parametrize(("kind", "compression"), [("mds", "null"), ("wds", "null"), ("mds", "zstd")])
def test_uncompressed_shards_have_checksums_of_their_blocks_whatever_partition_made_them(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, compression: str
) -> None:
    monkeypatch.setattr(rows, "PARTITION_TEXT_BYTES", 12_000)
    settings = [f"output.format={kind}", f"output.compression={compression}", "output.shard_bytes=20000"]
    build(
        corpus,
        output=tmp_path / "out",
        overrides=[*settings, f"work={tmp_path / 'work'}"],
        workers=2,
        progress=False,
    )
    dataset, blocks = open_dataset(tmp_path / "out"), tmp_path / "out" / BLOCKS_NAME
    assert dataset.card is not None
    stated = dataset.manifest.blocks
    if compression != "null":
        assert stated is None
        assert not blocks.exists()
        return
    assert stated is not None
    assert len(dataset.manifest.shards) >= dataset.card.packing["partitions"] > 1
    assert blocks.read_bytes() == b"".join(shard_parts(tmp_path / "out", dataset.manifest.shards))
    assert stated.bytes == blocks.stat().st_size
    assert verify(tmp_path / "out").ok


def test_the_funnel_accounts_for_every_record(made: BuildResult) -> None:
    funnel = made.funnel
    assert funnel.read.documents == 400 + 15 + 20
    assert funnel.dropped["length/too_few_words"].documents == 40 + 1 + 2
    assert funnel.dropped["exact_duplicate"].documents == 14 + 18
    assert funnel.kept.documents == 360
    assert funnel.kept.bytes == sum(len(text_of(n).encode()) for n in range(400) if n % 10 != 9)
    assert funnel.quarantined == {}
    assert not made.up_to_date
    assert not (made.output.parent / "out.work").exists()


def test_a_finished_build_is_up_to_date_at_once(made: BuildResult, corpus: Path) -> None:
    before = tree(made.output)
    again = build(corpus, workers=2, progress=False)
    assert again.up_to_date
    assert again.fingerprint == made.fingerprint
    assert again.funnel == made.funnel
    assert (again.samples, again.tokens, again.padding) == (made.samples, made.tokens, made.padding)
    assert tree(made.output) == before


def test_the_recipe_object_builds_what_its_file_builds(made: BuildResult, corpus: Path) -> None:
    assert build(load_recipe(corpus), progress=False).up_to_date
    with pytest.raises(BuildError, match="made by another recipe"):
        build(load_recipe(corpus), overrides=["seed=3"], progress=False)


CHANGES: list[tuple[str, set[str]]] = [
    ("pack.sequence_length=32", {"tokenize", "pack", "provenance"}),  # tokens went when they were packed
    ("output.prefixes=16", set()),
    ("dedup.exact=null", {"tokenize", "pack", "provenance", "duplicates"}),
    ("inputs[0].source=renamed", set()),
    (
        "filters=[{length: {min_words: 2}}]",
        {"clean", "exact", "exact_removed", "parity", "tokenize", "pack", "provenance", "duplicates"},
    ),
]


@pytest.fixture(scope="module")
def kept(corpus: Path) -> BuildResult:
    return build(
        corpus, output=corpus.parent / "kept", overrides=["work=kept-work"], workers=2, progress=False
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("change", "expected"), CHANGES, ids=[change for change, _ in CHANGES])
def test_a_changed_key_redoes_what_depends_on_it(
    kept: BuildResult, corpus: Path, tmp_path: Path, change: str, expected: set[str]
) -> None:
    work = tmp_path / "work"
    subprocess.run(["cp", "-a", str(corpus.parent / "kept-work"), str(work)], check=True)
    reports: list[StageProgress] = []
    result = build(
        corpus,
        output=tmp_path / "out",
        overrides=[f"work={work}", change],
        workers=1,
        progress=reports.append,
    )
    # The work folder was moved, too: commits name no places.
    assert set(stages_run(reports)) == expected
    assert result.tasks_reused == result.tasks - sum(stages_run(reports).values())
    assert verify(result.output).ok


@pytest.mark.extended
@pytest.mark.parametrize("format", ["mds", pytest.param("wds", marks=pytest.mark.extended)])
def test_shards_in_many_folders_are_the_same_dataset_under_other_names(
    corpus: Path, tmp_path: Path, format: str
) -> None:
    plain, dealt = (
        build(
            corpus,
            output=tmp_path / str(prefixes),
            overrides=[f"output.format={format}", f"output.prefixes={prefixes}", "output.shard_bytes=2KiB"],
            workers=1,
            progress=False,
        ).output
        for prefixes in ("null", 17)
    )
    with open_dataset(plain) as one, open_dataset(dealt) as other:
        names = [info.stored.basename for info in one.manifest.shards]
        assert len(names) > 17
        assert [info.stored.basename for info in other.manifest.shards] == [
            f"{number % 17:02x}/{name}" for number, name in enumerate(names)
        ]
        for name, info in zip(names, other.manifest.shards, strict=True):
            assert (dealt / info.stored.basename).read_bytes() == (plain / name).read_bytes()
        column = "tokens" if format == "mds" else "tokens.npy"
        rows = [np.asarray(sample[column]).tolist() for sample in one]
    assert verify(dealt).ok
    memory = fresh_memory()
    upload(dealt, memory, progress=False)
    download(memory, tmp_path / "back", progress=False)
    assert tree(tmp_path / "back") == tree(dealt)
    if format == "mds":
        assert [sample["tokens"].tolist() for sample in read_with_streaming(dealt)] == rows


def test_other_numbers_of_workers_reuse_everything(kept: BuildResult, corpus: Path, tmp_path: Path) -> None:
    reports: list[StageProgress] = []
    result = build(
        corpus, output=tmp_path / "out", overrides=["work=kept-work"], workers=3, progress=reports.append
    )
    assert stages_run(reports) == {}
    assert result.tasks == result.tasks_reused > 0
    assert tree(result.output) == tree(kept.output)


@pytest.mark.extended
def test_one_more_file_costs_its_own_cleaning_and_all_tokenizing(tmp_path: Path) -> None:
    recipe = make_corpus(tmp_path, 80)
    build(recipe, output=tmp_path / "a", overrides=["work=work"], workers=1, progress=False)
    new = [{"text": text_of(n), "number": n} for n in (1000, 1001, 1002)]
    (tmp_path / "plain-00.jsonl").write_text("".join(json.dumps(line) + "\n" for line in new))
    reports: list[StageProgress] = []
    result = build(recipe, output=tmp_path / "b", overrides=["work=work"], workers=1, progress=reports.append)
    run = stages_run(reports)
    stages = ("clean", "exact", "exact_removed", "parity", "pack", "provenance")
    assert run == dict.fromkeys(stages, 1) | {"tokenize": 5}, "the files' tokens went when they were packed"
    fresh = build(recipe, output=tmp_path / "c", workers=1, progress=False)
    assert tree(result.output) == tree(fresh.output)


@pytest.mark.extended
def test_an_edited_file_of_the_same_size_is_noticed(tmp_path: Path) -> None:
    recipe = make_corpus(tmp_path, 80)
    first = build(recipe, overrides=["work=work"], workers=1, progress=False)
    file = tmp_path / "plain-0.jsonl"
    file.write_text(file.read_text().replace("document 1 says", "document 1 SAYS"))
    with pytest.raises(
        BuildError, match=r"already holds a dataset, made from other input files; .*--replace"
    ):
        build(recipe, overrides=["work=work"], workers=1, progress=False)
    second = build(recipe, overrides=["work=work"], workers=1, progress=False, replace=True)
    assert second.fingerprint != first.fingerprint
    assert second.tasks_reused > 0
    assert verify(second.output).ok


def spoil(folder: Path) -> None:
    with (folder / "plain-1.jsonl").open("ab") as file:
        file.write(b'\n{"text": "\xff\xfe"}\n[1, 2]\n')


def test_a_bad_record_stops_the_build_and_is_named(tmp_path: Path) -> None:
    recipe = make_corpus(tmp_path, 80)
    spoil(tmp_path)
    with pytest.raises(BuildError, match=r"plain-1\.jsonl: record 20 .*bad_utf8.*max_bad_fraction"):
        build(recipe, workers=2, progress=False)
    assert not (tmp_path / "out").exists()


def test_allowed_bad_records_are_kept_in_quarantine(tmp_path: Path) -> None:
    recipe = make_corpus(tmp_path, 80)
    spoil(tmp_path)
    result = build(recipe, overrides=["max_bad_fraction=0.1"], workers=2, progress=False)
    entries = [json.loads(line) for line in (result.output / "quarantine.jsonl").read_text().splitlines()]
    assert [(entry["file"], entry["record"], entry["reason"]) for entry in entries] == [
        ("plain-1.jsonl", 20, "bad_utf8"),
        ("plain-1.jsonl", 21, "not_an_object"),
    ]
    assert {reason: count.documents for reason, count in result.funnel.quarantined.items()} == {
        "bad_utf8": 1,
        "not_an_object": 1,
    }
    assert result.funnel.read == result.funnel.kept + sum(
        [*result.funnel.dropped.values(), *result.funnel.quarantined.values()], Count()
    )
    assert verify(result.output).ok


@pytest.mark.parametrize(
    ("files", "overrides", "kind", "message"),
    [
        (
            {},
            ["filters=[{length: {min_words: 10000}}]"],
            BuildError,
            r"no document is left of 115 .* dropped: 115 by length/too_few_words$",
        ),
        (
            {"none.jsonl": b""},
            ["inputs=[{path: none.jsonl}]"],
            BuildError,
            "no document is left of 0 that were read: the files of `inputs` have no records; name others$",
        ),
        (
            {"u.jsonl": b"\xff{}\n{\n}"},
            ["inputs=[{path: u.jsonl}]", "max_bad_fraction=1"],
            BuildError,
            r"left of 3 .*: 2 by bad_json, 1 by bad_utf8 \(first: u\.jsonl: record 0 .*: bad_utf8: ",
        ),
        (
            {},
            ["tokenizer.path=missing.json"],
            RecipeError,
            r"tokenizer\.path: .*missing\.json cannot be read",
        ),
        ({}, ["tokenizer.eos=<eos>"], RecipeError, r"tokenizer\.eos: .* has no token '<eos>'"),
        (
            {"data/a.jsonl": b'{"text": "a b c d"}\n'},
            ["inputs=[{path: data}]", "output.path=data"],
            RecipeError,
            r"inputs\[0\]\.path: data/a\.jsonl is in .*use separate folders",
        ),
        (
            {"home/letter.txt": b""},
            ["work=home"],
            BuildError,
            r"home: contains files that no build wrote \(letter\.txt\)",
        ),
        (
            {"out/letter.txt": b""},
            [],
            BuildError,
            r"out: holds files that are not a dataset \(first: letter\.txt\)",
        ),
    ],
    ids=[
        "nothing left",
        "empty",
        "nothing readable",
        "no tokenizer",
        "no eos",
        "output is input",
        "work",
        "output",
    ],
)
def test_impossible_builds_say_why_and_leave_no_dataset(
    tmp_path: Path, files: dict[str, bytes], overrides: list[str], kind: type[Exception], message: str
) -> None:
    recipe = make_corpus(tmp_path, 80)
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with pytest.raises(kind, match=message):
        build(recipe, overrides=overrides, workers=1, progress=False)
    assert not list(tmp_path.rglob("index.json"))


def test_engines_and_places_that_are_not_known_are_refused(corpus: Path) -> None:
    with pytest.raises(BuildError, match="engine 'spark' is unknown; use one of local, ray"):
        build(corpus, engine="spark")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="is a URL; give a path on this machine"):
        build(corpus, overrides=["tokenizer.path=s3://bucket/x"])


def test_a_damaged_leftover_is_not_published(kept: BuildResult, corpus: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    subprocess.run(["cp", "-a", str(corpus.parent / "kept-work"), str(work)], check=True)
    shard = next((work / "pack").rglob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")

    with pytest.warns(
        RuntimeWarning, match="was damaged after it was written; its task runs again"
    ) as caught:
        made = build(corpus, output=tmp_path / "out", overrides=[f"work={work}"], workers=1, progress=False)
    assert tree(made.output) == tree(kept.output)
    assert caught[0].filename == __file__


@pytest.fixture(scope="module")
def unremoved(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work folder of a build that removed no run."""
    folder = tmp_path_factory.mktemp("unremoved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "remove_files", lambda work, files: None)
        build(corpus, output=folder / "out", overrides=[f"work={folder / 'work'}"], workers=1, progress=False)
    return folder / "work"


@pytest.mark.parametrize("stage", ["clean", "exact", "tokenize"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_damaged_run_is_made_again_by_the_build_that_reads_it(
    kept: BuildResult, unremoved: Path, corpus: Path, tmp_path: Path, stage: str, workers: int
) -> None:
    work = tmp_path / "work"
    subprocess.run(["cp", "-a", str(unremoved), str(work)], check=True)
    run = max((work / stage).rglob("*.run"), key=lambda file: file.stat().st_size)
    data = bytearray(run.read_bytes())
    data[len(data) // 3] ^= 0xFF
    run.write_bytes(data)
    written = {record.parent: record.stat().st_mtime_ns for record in work.rglob("commit.json")}
    own = max(time for folder, time in written.items() if folder.parent.name == stage)
    for folder, time in written.items():
        if time > own:  # what reads the run has not run yet
            shutil.rmtree(folder)
    options: dict[str, Any] = {"overrides": [f"work={work}"], "workers": workers, "progress": False}
    with pytest.warns(RuntimeWarning, match=rf"{stage}/.*\.run was damaged after it was written") as caught:
        made = build(corpus, output=tmp_path / "out", **options)
    assert len(caught) == 1
    assert tree(made.output) == tree(kept.output)


@pytest.mark.extended
def test_a_tokenizer_that_only_the_slow_engine_gets_right_is_used_with_a_warning(
    tmp_path: Path,
) -> None:
    recipe = make_corpus(tmp_path, 80)
    file = tmp_path / "tokenizer.json"
    config = json.loads(file.read_text())
    config["normalizer"] = {"type": "Replace", "pattern": {"String": "says"}, "content": "SAYS"}
    file.write_text(json.dumps(config))
    with pytest.warns(RuntimeWarning, match=r"encoding with tokenizers \(slow\)") as caught:
        result = build(recipe, workers=2, progress=False)
    assert caught[0].filename == __file__
    card = json.loads((result.output / "dataset.json").read_text())
    assert card["tokenizer"]["engine"] == "tokenizers"


def test_a_build_does_not_import_torch(tmp_path: Path) -> None:
    recipe = make_corpus(tmp_path, 40)
    code = (
        "import sys; from shardkit.writers import build, executors\n"
        "from shardkit.writers.execution.engine import InlineEngine\n"
        "executors.LocalEngine = lambda workers, **options: InlineEngine()  # tasks run here, too\n"
        "build(sys.argv[1], progress=False)\n"
        "print([m for m in ('torch', 'webdataset', 'streaming') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(recipe)], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.strip() == "[]"


DECONTAMINATION = """\
inputs: [{path: "plain-*.jsonl"}]
filters: [{decontamination: {evaluations: [{path: evaluation.jsonl}], ngram: 5, min_item_words: 5}}]
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 64}
output: {path: out}
"""


def test_overlaps_with_evaluation_sets_are_published_and_a_changed_set_is_another_build(
    tmp_path: Path,
) -> None:
    recipe = make_corpus(tmp_path, documents=80, recipe=DECONTAMINATION)
    (tmp_path / "evaluation.jsonl").write_text(json.dumps({"text": text_of(7)}) + "\n")
    result = build(recipe, progress=False)
    rows = [json.loads(line) for line in (result.output / "decontamination.jsonl").read_text().splitlines()]
    found = {(row["file"], row["record"]) for row in rows}
    assert len(found) == result.funnel.dropped["decontamination/overlap"].documents > 0
    card = json.loads((result.output / "dataset.json").read_text())
    assert "decontamination.jsonl" in card["files"]
    assert build(recipe, progress=False).up_to_date
    (tmp_path / "evaluation.jsonl").write_text(json.dumps({"text": text_of(8)}) + "\n")
    with pytest.raises(BuildError, match="made with other lists, models or code of its filters"):
        build(recipe, progress=False)
