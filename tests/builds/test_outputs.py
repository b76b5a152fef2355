"""Several datasets of one build, text as an output, and token stores that are packed again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import zstandard

import shardkit
from shardkit.cli.main import main
from shardkit.errors import BuildError, RecipeError
from shardkit.writers import build
from shardkit.writers.token_store import pack_store
from shardkit.yaml_file import load_yaml
from support.small_build import EOS, make_corpus, text_of, train_bpe, tree

SHARD = {"shard_bytes": "8KiB"}
OUTPUTS: dict[str, dict[str, Any]] = {
    "short": {"format": "mds", "pack": {"sequence_length": 64}, **SHARD},
    "tars": {"format": "wds", "pack": {"sequence_length": 32, "strategy": "concat"}, **SHARD},
    "cropped": {"format": "mds", "pack": {"sequence_length": 48, "strategy": "best_fit_crop"}, **SHARD},
    "text": {"format": "parquet", **SHARD},
    "lines": {"format": "jsonl", "compression": "zstd", **SHARD},
    "store": {"format": "tokens", **SHARD},
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A corpus of 200 documents, and paths that do not depend on the current folder."""
    folder = tmp_path_factory.mktemp("outputs")
    data = load_yaml(make_corpus(folder, 200)) | {"memory": "256MiB", "annotate": True}
    data["inputs"] = [
        entry | {"path": str(folder / entry["path"]), "base": str(folder)} for entry in data["inputs"]
    ]
    data["tokenizer"] |= {"path": str(folder / "tokenizer.json")}
    del data["output"]
    return data


def outputs_in(folder: Path) -> list[dict[str, Any]]:
    return [{"path": str(folder / name)} | output for name, output in OUTPUTS.items()]


@pytest.fixture(scope="module")
def together(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    build(recipe | {"outputs": outputs_in(folder)}, workers=1, progress=False)
    return folder


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [pytest.param("short", marks=pytest.mark.extended), "tars", "text", "store"])
def test_each_of_several_outputs_has_the_bytes_that_it_has_alone(
    recipe: dict[str, Any], together: Path, tmp_path: Path, name: str, inline_builds: None
) -> None:
    output = {key: value for key, value in OUTPUTS[name].items() if key != "pack"}
    alone = recipe | {"output": {"path": str(tmp_path / "alone")} | output}
    build(alone | {"pack": OUTPUTS[name].get("pack", {})}, workers=1, progress=False)
    assert tree(together / name) == tree(tmp_path / "alone")


@pytest.mark.extended
def test_stages_before_an_output_run_once_for_all(
    recipe: dict[str, Any], tmp_path: Path, inline_builds: None
) -> None:
    many = build(recipe | {"outputs": outputs_in(tmp_path / "many")}, workers=1, progress=False)
    [tokenize] = [stage for stage in many.stages if stage.stage == "tokenize"]
    one = build(recipe | {"output": str(tmp_path / "one")}, workers=1, progress=False)
    assert tokenize.tasks == next(stage.tasks for stage in one.stages if stage.stage == "tokenize")
    again = build(recipe | {"outputs": outputs_in(tmp_path / "many")}, workers=1, progress=False)
    assert again.up_to_date
    assert [other.fingerprint for other in again.others] == [other.fingerprint for other in many.others]


def test_text_outputs_have_every_document_that_stays_once_and_as_it_is(together: Path) -> None:
    table = pq.read_table(sorted((together / "text").glob("text-*.parquet")))
    rows = table.to_pylist()
    lines = [
        json.loads(line)
        for file in sorted((together / "lines").glob("text-*.jsonl.zst"))
        for line in zstandard.ZstdDecompressor().decompress(file.read_bytes()).splitlines()
    ]
    # Texts of three words or more, each once: those of the inputs repeat.
    wanted = {text for n in range(200) if len((text := text_of(n)).split()) >= 3}
    assert sorted(row["text"] for row in rows) == sorted(wanted)
    parsed = [row | {"metadata": row["metadata"] and json.loads(row["metadata"])} for row in rows]
    assert lines == parsed
    assert {row["source"] for row in rows} == {"plain", "tables", "zipped"}
    copies = sum(row["copies"] for row in rows)
    facts = json.loads((together / "text" / "dataset.json").read_text())
    assert copies == facts["funnel"]["read"]["documents"] - sum(
        count["documents"]
        for reason, count in facts["funnel"]["dropped"].items()
        if reason.startswith("length/")
    )
    assert all(row["filters"]["length/too_few_words"] >= 3 for row in rows)


def test_a_text_dataset_opens_verifies_and_reports_like_any_other(
    together: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("text", "lines"):
        dataset = shardkit.open_dataset(together / name)
        assert dataset.manifest.format in ("parquet", "jsonl")
        assert dataset[len(dataset) - 1]["text"]
        assert dataset.text(0) == dataset[0]["text"]
        assert shardkit.verify(together / name).ok
        assert main(["info", str(together / name)]) == 0
    assert "documents" in capsys.readouterr().out
    file = next((together / "text").glob("text-*.parquet"))
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    copy = together.parent / "damaged"
    copy.mkdir()
    for path in (together / "text").rglob("*"):
        if path.is_file():
            (copy / path.relative_to(together / "text")).parent.mkdir(parents=True, exist_ok=True)
            (copy / path.relative_to(together / "text")).write_bytes(path.read_bytes())
    (copy / file.name).write_bytes(bytes(damaged))
    found = shardkit.verify(copy)
    assert [problem.file for problem in found.problems] == [file.name]


@pytest.mark.parametrize("pattern", ["text/text-*.parquet", "lines/text-*.jsonl.zst"])
def test_a_build_from_a_text_output_makes_the_same_rows(
    recipe: dict[str, Any], together: Path, tmp_path: Path, pattern: str, inline_builds: None
) -> None:
    again = {key: recipe[key] for key in ("tokenizer", "memory")} | {
        "inputs": [{"path": str(together / pattern), "document_id": "document_id"}],
        "output": {"path": str(tmp_path / "again"), **SHARD},
        "pack": {"sequence_length": 64},
    }
    made = build(again, workers=1, progress=False)
    shards = {name: digest for name, digest in tree(together / "short").items() if name.endswith(".mds")}
    assert {k: v for k, v in tree(tmp_path / "again").items() if k.endswith(".mds")} == shards
    assert made.fingerprint == shardkit.open_dataset(together / "short").fingerprint


def test_a_document_id_that_is_none_is_refused_with_its_place(
    recipe: dict[str, Any], tmp_path: Path, inline_builds: None
) -> None:
    text = "some words here, and more of them"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text, "document_id": "xyz"}) + "\n")
    wrong = {
        "inputs": [{"path": str(tmp_path / "a.jsonl"), "document_id": "document_id"}],
        "output": {"path": str(tmp_path / "out"), "format": "jsonl"},
    }
    with pytest.raises(
        BuildError, match=r"record 0 \(byte 0\): bad_document_id: field 'document_id' is not 32 hexadecimal"
    ):
        build(wrong, workers=1, progress=False)


def test_text_needs_no_tokenizer_and_rows_do(
    recipe: dict[str, Any], together: Path, tmp_path: Path, inline_builds: None
) -> None:
    without = {key: value for key, value in recipe.items() if key != "tokenizer"}
    build(without | {"output": {"path": str(tmp_path / "a"), **OUTPUTS["text"]}}, workers=1, progress=False)
    with_one, alone = tree(together / "text"), tree(tmp_path / "a")
    own = {"dataset.json", "report.html"}  # which state the recipe
    assert {k: v for k, v in with_one.items() if k not in own} == {
        k: v for k, v in alone.items() if k not in own
    }
    with pytest.raises(RecipeError, match="tokenizer: is missing; only outputs of format parquet or jsonl"):
        build(without | {"output": str(tmp_path / "b")}, workers=1, progress=False)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"output": "a", "outputs": ["b"]}, "give `output`, or a list of `outputs`"),
        ({}, "give `output`, or a list of `outputs`"),
        ({"outputs": ["a", "a/b"]}, r"outputs\[1\].path: a/b is the same as, inside of or around another"),
        ({"output": {"path": "a", "format": "jsonl", "pack": {}}}, "pack is for rows of tokens"),
        ({"output": {"path": "a", "format": "parquet", "compression": "zstd"}}, "always use zstd internally"),
        ({"output": {"path": "a", "format": "jsonl", "compression": "br"}}, "must be zstd or gz"),
    ],
)
def test_outputs_that_cannot_be_meant_are_refused(
    recipe: dict[str, Any], changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RecipeError, match=problem):
        build(recipe | changes, workers=1, progress=False)


def test_one_place_for_several_outputs_is_refused(recipe: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is one place, but the recipe has 2 outputs"):
        build(recipe | {"outputs": ["a", "b"]}, output=tmp_path, workers=1, progress=False)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("short", ["pack.sequence_length=64"]),
        ("cropped", ["pack.sequence_length=48", "pack.strategy=best_fit_crop"]),
        pytest.param(
            "tars",
            ["pack.sequence_length=32", "pack.strategy=concat", "output.format=wds"],
            marks=pytest.mark.extended,
        ),
    ],
)
def test_packing_a_token_store_gives_the_bytes_of_a_build_of_that_length(
    together: Path, tmp_path: Path, name: str, settings: list[str], inline_builds: None
) -> None:
    made = pack_store(
        together / "store",
        tmp_path / "packed",
        overrides=[*settings, "output.shard_bytes=8KiB"],
        workers=1,
        progress=False,
    )
    assert tree(tmp_path / "packed") == tree(together / name)
    assert made.fingerprint == shardkit.open_dataset(together / name).fingerprint
    assert not (tmp_path / "packed.work").exists()


@pytest.mark.parametrize("strategy", ["best_fit", pytest.param("concat", marks=pytest.mark.extended)])
def test_rows_within_documents_begin_with_the_bos_again_from_a_store_too(
    recipe: dict[str, Any], tmp_path: Path, strategy: str, inline_builds: None
) -> None:
    made = train_bpe([text_of(n) for n in range(50)], special=(EOS, "<s>"))
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = {"path": str(tmp_path / "tokenizer.json"), "eos": EOS, "bos": "<s>"}
    pack = {"sequence_length": 32, "strategy": strategy, "row_bos": True}
    outputs = [
        {"path": str(tmp_path / "rows"), "pack": pack, **SHARD},
        {"path": str(tmp_path / "store"), "format": "tokens", **SHARD},
    ]
    built = build(recipe | {"tokenizer": tokenizer, "outputs": outputs}, workers=1, progress=False)
    data = built.open()
    rows = np.stack([np.asarray(sample["tokens"]) for sample in data])
    bos = int(rows[0, 0])
    assert (rows[:, 0] == bos).all()
    card = data.card
    assert card is not None
    documents = card.packing["documents"]
    assert (rows == bos).sum() == documents + card.packing["repeated_bos"] > documents
    assert card.tokens + card.padding + card.packing["repeated_bos"] == rows.size
    assert shardkit.verify(tmp_path / "rows").ok
    assert "begin with the bos again" in (tmp_path / "rows" / "report.html").read_text()
    overrides = [f"pack.{key}={json.dumps(value)}" for key, value in pack.items()]
    overrides.append("output.shard_bytes=8KiB")
    pack_store(tmp_path / "store", tmp_path / "again", overrides=overrides, workers=1, progress=False)
    assert tree(tmp_path / "again") == tree(tmp_path / "rows")
    with pytest.raises(RecipeError, match=r"pack.row_bos: tokenizer.bos is missing"):
        build(recipe | {"output": str(tmp_path / "none"), "pack": pack}, workers=1, progress=False)


def test_what_cropping_leaves_out_is_booked_and_every_row_begins_with_a_document(together: Path) -> None:
    data = shardkit.open(together / "cropped")
    card, whole = data.card, shardkit.open(together / "store").card
    assert card is not None
    assert whole is not None
    assert card.packing["documents"] == whole.packing["documents"]
    assert card.tokens + card.packing["cropped"] == whole.tokens
    assert card.packing["cropped_documents"] > 0
    assert card.padding < 48 * card.packing["partitions"]
    assert "Tokens left out" in (together / "cropped" / "report.html").read_text()
    tables = [pq.read_table(file) for file in sorted((together / "cropped" / "provenance").iterdir())]
    assert all(start == 0 for table in tables for start in table.column("document_start").to_pylist())
    assert shardkit.verify(together / "cropped").ok


def test_the_command_packs_and_says_what_it_made(
    together: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], inline_builds: None
) -> None:
    words = [
        "pack",
        str(together / "store"),
        str(tmp_path / "out"),
        "--sequence-length",
        "128",
        "--workers",
        "1",
    ]
    assert main([*words, "--quiet", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["sequence_length"] == 128
    assert shardkit.verify(tmp_path / "out").ok
    assert main(["pack", str(together / "short"), str(tmp_path / "b"), "--quiet"]) == 1
    assert "is not a token store; build one with `output: {format: tokens" in capsys.readouterr().err
    assert main([*words[:3], "--set", "seed=4", "--quiet"]) == 2
    assert "seed=4: set only keys of `pack` and `output`, except output.path" in capsys.readouterr().err


def test_a_token_store_is_a_dataset_whose_samples_are_documents(together: Path) -> None:
    store = shardkit.open_dataset(together / "store")
    lengths = [len(sample["tokens"]) for sample in store]  # type: ignore[arg-type]
    facts = json.loads((together / "store" / "dataset.json").read_text())
    assert len(store) == facts["funnel"]["kept"]["documents"]
    assert sum(lengths) == facts["tokens"]
    eos = facts["tokenizer"]["eos_id"]
    assert all(list(sample["tokens"]).count(eos) == 1 for sample in store)  # type: ignore[call-overload]
    [document] = store.documents(3)
    assert document.tokens == lengths[3]
    assert document.text in {row["text"] for row in shardkit.open_dataset(together / "text")}
    assert shardkit.verify(together / "store").ok


def test_outputs_that_divide_the_documents_have_each_of_them_once(
    tmp_path: Path, inline_builds: None
) -> None:
    records = [
        {"text": f"text number {n} of several words", "bucket": "high" if n % 3 else "low"} for n in range(60)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    make_corpus(tmp_path / "small", 40)
    outputs = [
        {"path": "high", "format": "jsonl", "where": {"bucket": "high"}},
        {"path": "low", "format": "tokens", "where": {"bucket": ["low", "lower"]}},
        {"path": "none_of", "where": {"source": "texts", "bucket": "low"}, "pack": {"sequence_length": 64}},
    ]
    recipe = {
        "inputs": {"path": str(tmp_path / "a.jsonl"), "metadata": ["bucket"], "source": "texts"},
        "tokenizer": {"path": str(tmp_path / "small" / "tokenizer.json"), "eos": "<|endoftext|>"},
        "outputs": [output | {"path": str(tmp_path / str(output["path"]))} for output in outputs],
    }
    high = build(recipe, workers=1, progress=False)
    low, rows = high.others
    assert (high.samples, low.samples) == (40, 20)
    assert {row["text"] for row in high.open()} == {r["text"] for r in records if r["bucket"] == "high"}
    assert high.funnel.dropped["output/elsewhere"] == low.funnel.kept == rows.funnel.kept
    assert low.funnel.dropped["output/elsewhere"] == high.funnel.kept
    assert rows.tokens == low.tokens


def test_text_is_annotated_only_if_filters_have_values(
    recipe: dict[str, Any], tmp_path: Path, inline_builds: None
) -> None:
    output = {"path": str(tmp_path / "out"), "format": "parquet"}
    made = build(recipe | {"filters": [], "output": output}, workers=1, progress=False)
    assert recipe["annotate"]
    assert "filters" not in pq.read_schema(next(made.output.glob("text-*.parquet"))).names


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ({"source": "wiki"}, r"output.where: there is no source 'wiki'; sources: plain, tables, zipped"),
        ({"language": "de"}, "languages are known only with the `language` filter"),
        ({"bucket": "high"}, "no input keeps a field 'bucket'; add it to"),
    ],
)
def test_a_selection_by_what_documents_lack_is_refused(
    recipe: dict[str, Any], where: dict[str, str], problem: str
) -> None:
    with pytest.raises(RecipeError, match=problem):
        build(recipe | {"output": {"path": "o", "where": where}}, workers=1, progress=False)


@pytest.mark.extended
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_kills_at_any_time_end_in_the_bytes_of_an_undisturbed_build(
    recipe: dict[str, Any], tmp_path: Path, masked: bool
) -> None:
    many = recipe | {"outputs": outputs_in(Path("made")), "split": {"validation": 0.2}, "work": "work"}
    many["dedup"] = {"exact": True, "near": 0.8}
    pack = ["pack", "made/store/train", "packed", "--sequence-length", "64", "--quiet", "--workers", "1"]
    if masked:
        pairs = [{"p": text_of(n), "c": " " + text_of(n + 50) + " again" * (n % 90)} for n in range(120)]
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        prompts = {"path": str(tmp_path / "pairs.jsonl"), "prompt": "p", "completion": "c"}
        many["inputs"] = [*many["inputs"], prompts]
        pack += ["--set", "output.format=wds", "--set", "pack.max_repetitions=20"]
    commands = [["build", "recipe.yaml", "--quiet", "--workers", "1"], pack]

    def start(folder: Path, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "shardkit", *command], cwd=folder)

    trees, kills = [], 0
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "recipe.yaml").write_text(json.dumps(many))
        for command in commands:
            seconds = 0.7
            while name == "killed":
                process = start(folder, command)
                try:
                    assert process.wait(seconds) == 0
                    break
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    kills += 1
                    seconds *= 1.4
            else:
                assert start(folder, command).wait() == 0
        trees.append({**tree(folder / "made"), **tree(folder / "packed")})
        assert sorted(path.name for path in folder.iterdir()) == ["made", "packed", "recipe.yaml", "work"]
    assert trees[0] == trees[1]
    columns = shardkit.open_dataset(tmp_path / "killed" / "packed").loss_mask_column
    assert columns == ("loss_mask" if masked else None)
    assert kills > 3
