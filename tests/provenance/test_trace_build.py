"""Every token has a past: rows of real builds lead back to the raw text, and documents to all their rows."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from collections import defaultdict
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from shardkit.card import DatasetCard
from shardkit.cli.main import main
from shardkit.datasets.dataset import open_dataset
from shardkit.datasets.provenance.text import Decoder
from shardkit.loaders import Stream, StreamingLoader
from shardkit.order.exclusions import Exclusions
from shardkit.publish import upload
from shardkit.writers import build
from support.small_build import EOS, RECIPE, make_corpus

BUILDS = {
    "best_fit-mds": "pack: {sequence_length: 24}\noutput: {path: out, shard_bytes: 4KiB}",
    "concat-wds": "pack: {sequence_length: 24, strategy: concat}\n"
    "output: {path: out, format: wds, shard_bytes: 8KiB}",
    "best_fit-wds": "pack: {sequence_length: 17}\noutput: {path: out, format: wds, shard_bytes: 8KiB}",
    "concat-mds": "pack: {sequence_length: 33, strategy: concat}\n"
    "output: {path: out, shard_bytes: 4KiB, compression: zstd}",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Any:
    """A function from the name of a build to its folder; documents have URLs of seven hosts."""

    @cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        recipe = make_corpus(folder, 160, recipe=RECIPE.partition("pack:")[0] + BUILDS[name] + "\n")
        for path in folder.glob("plain-*.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                line["url"] = f"https://site{line['number'] % 7}.example.org/page/{line['number']}"
            path.write_text("\n".join(map(json.dumps, lines)))
        build(recipe, workers=1)
        return folder

    return make


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["trace", *map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@cache
def raw_text(file: Path, record: int) -> str:
    """The text of a record, read from the raw file by what the table says alone."""
    if file.suffix == ".parquet":
        return str(pq.read_table(file).column("text")[record].as_py())
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return str(json.loads(data.splitlines()[record])["text"])


def all_rows(path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    with open_dataset(path) as dataset:
        rows = [word for row in range(len(dataset)) for word in ("--row", row)]
    found: list[dict[str, Any]] = answer(capsys, path, *rows, "--excerpt", 100_000)["rows"]
    return found


@pytest.mark.parametrize(
    "name",
    ["best_fit-mds", "concat-wds", *(pytest.param(n, marks=pytest.mark.extended) for n in list(BUILDS)[2:])],
)
def test_every_token_of_every_row_leads_to_the_raw_text(
    made: Any, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import tokenizers

    folder = made(name)
    rows = all_rows(folder / "out", capsys)
    decoder = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    decoder.decoder = tokenizers.decoders.ByteLevel()
    eos_id = decoder.token_to_id(EOS)
    pieces: defaultdict[str, list[tuple[int, list[int]]]] = defaultdict(list)
    origin, copies = {}, {}
    with open_dataset(folder / "out") as dataset:
        column = dataset.token_column
        assert column is not None
        assert [row["row"] for row in rows] == list(range(len(dataset)))
        for row in rows:
            tokens: Any = dataset[row["row"]][column]
            end = 0
            for document in row["documents"]:
                start, stop = document["tokens"]
                assert start == end, "no token of a row is without a document"
                end = stop
                first, last = document["document_tokens"]
                assert last - first == stop - start
                pieces[document["document_id"]].append((first, tokens[start:stop].tolist()))
                origin[document["document_id"]] = (document["file"], document["record"])
                copies[document["document_id"]] = document["copies"]
            assert row["padding"] == len(tokens) - end
            assert (tokens[end:] == eos_id).all(), "behind the last document there is padding"
    spread = 0
    for identity, parts in pieces.items():
        whole: list[int] = []
        for first, ids in sorted(parts):
            assert first == len(whole), "pieces join without a gap"
            whole += ids
        file, record = origin[identity]
        assert whole[-1] == eos_id
        assert eos_id not in whole[:-1]
        assert decoder.decode(whole[:-1], skip_special_tokens=False) == raw_text(folder / file, record)
        spread += len(parts) > 2
    assert spread > 20, "documents are cut over several rows"
    funnel = json.loads((folder / "out" / "dataset.json").read_bytes())["funnel"]
    assert len(pieces) == funnel["kept"]["documents"]
    duplicates = funnel["dropped"]["exact_duplicate"]["documents"]
    assert duplicates > 10
    assert sum(copies.values()) == len(pieces) + duplicates


def test_the_excerpts_of_a_row_are_its_text(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made("best_fit-mds")
    for row in all_rows(folder / "out", capsys)[:40]:
        for document in row["documents"]:
            text = raw_text(folder / document["file"], document["record"])
            assert document["text"] in " ".join(text.split())
    [row] = answer(capsys, folder / "out", "--row", 7, "--excerpt", 10)["rows"]
    assert all(len(document["text"]) <= 10 for document in row["documents"])
    assert main(["trace", str(folder / "out"), "--row", "shard.00001.mds:3"]) == 0
    assert "= shard.00001.mds row 3" in capsys.readouterr().out


def test_a_document_leads_to_all_its_rows_and_a_url_to_its_documents(
    made: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made("best_fit-mds") / "out"
    rows = all_rows(path, capsys)
    by_id: defaultdict[str, list[tuple[int, list[int]]]] = defaultdict(list)
    by_url: defaultdict[str, set[int]] = defaultdict(set)
    for row in rows:
        for document in row["documents"]:
            by_id[document["document_id"]].append((row["row"], document["tokens"]))
            by_url[document["url"]].add(row["row"])
    for identity in list(by_id)[::40]:
        found = answer(capsys, path, "--document", identity, "--limit", 0)
        assert [(each["row"], each["tokens"]) for each in found["shown"]] == by_id[identity]
    for url, expected in list(by_url.items())[::20]:
        if url is not None:
            assert {each["row"] for each in answer(capsys, path, "--url", url)["shown"]} == expected
    whole = answer(capsys, path, "--url", "site3.example.org/*")
    expected = {row for url, there in by_url.items() if url and "//site3." in url for row in there}
    assert whole["rows"] == len(expected)
    labels = {"plain": {"plain-0.jsonl", "plain-1.jsonl"}, "tables": {"tables/some.parquet"}}
    for label, files in labels.items():
        there = [d for row in rows for d in row["documents"] if d["source"] == label]
        assert {d["file"] for d in there} == files
        found = answer(capsys, path, "--source", label)
        assert (found["pieces"], found["documents"]) == (len(there), len({d["document_id"] for d in there}))
    for name, pieces in (("some.parquet", True), ("plain-?.jsonl", True), ("lain-0.jsonl", False)):
        status = main(["trace", str(path), "--file", name, "--json"])
        capsys.readouterr()
        assert (status == 0) == pieces


def test_rows_of_removed_documents_never_come_and_all_others_do_once(
    made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made("best_fit-mds") / "out"
    (tmp_path / "urls.txt").write_text(
        "# asked to go\nhttps://site2.example.org/page/2\nhttps://site4.example.org/page/1*\n*.nowhere.org\n"
    )
    words = ["--url-list", tmp_path / "urls.txt", "--exclude", tmp_path / "gone.txt"]
    found = answer(capsys, path, *words, "--export", tmp_path / "gone.jsonl")
    rows = {row["row"]: row["documents"] for row in all_rows(path, capsys)}
    urls = {2: "https://site2.example.org/page/2"}

    def is_removed(document: dict[str, Any]) -> bool:
        url = document["url"] or ""
        return url == urls[2] or url.startswith("https://site4.example.org/page/1")

    expected = {row for row, documents in rows.items() if any(map(is_removed, documents))}
    gone = {
        row for begin, end in Exclusions.read(tmp_path / "gone.txt").to_list() for row in range(begin, end)
    }
    assert gone == expected
    assert found["unmatched"] == ["*.nowhere.org"]
    exported = [json.loads(line) for line in (tmp_path / "gone.jsonl").read_text().splitlines()]
    assert {line["sample_id"] for line in exported} == expected
    assert all(is_removed(line) for line in exported)
    report = found["exclusions"]
    documents = [(d, is_removed(d)) for row in expected for d in rows[row]]
    for name, removed in (("removed", True), ("other", False)):
        mine = [d for d, flag in documents if flag == removed]
        assert report[f"{name}_tokens"] == sum(d["tokens"][1] - d["tokens"][0] for d in mine)
        assert report[f"{name}_documents"] == len({d["document_id"] for d in mine})
    assert report["rows"] == len(expected)
    assert report["tokens"] == 24 * len(expected)
    assert report["padding"] == report["tokens"] - report["removed_tokens"] - report["other_tokens"]
    delivered: list[int] = []
    for rank in range(2):
        with StreamingLoader(
            [Stream(path, exclude=tmp_path / "gone.txt")],
            batch_size=3, rank=rank, world_size=2, return_ids=True, tail="pad",
        ) as loader:  # fmt: skip
            delivered += [row for batch in loader for row in batch["sample_id"].tolist() if row >= 0]
    assert sorted(delivered) == sorted(rows.keys() - expected)


def test_exports_hold_the_same_in_every_format_and_text_is_whole(
    made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made("best_fit-mds")
    words = [folder / "out", "--url", "*.example.org", "--file", "plain-1.jsonl"]
    for name in ("a.parquet", "a.jsonl", "a.csv"):
        answer(capsys, *words, "--export", tmp_path / name, "--text")
    table = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == table
    with (tmp_path / "a.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert lines == [{k: "" if v is None else str(v) for k, v in line.items()} for line in table]
    texts: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for line in table:
        texts[line["document_id"]].append((line["document_start"], line["text"]))
    for line in table:
        whole = "".join(text for _, text in sorted(texts[line["document_id"]]))
        assert whole == raw_text(folder / line["file"], line["record"])
    assert not list(tmp_path.glob(".*"))


def test_a_step_shows_the_documents_that_its_batch_holds(
    made: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made("best_fit-mds") / "out"
    with StreamingLoader(path, batch_size=5, rank=1, world_size=2, return_ids=True, seed=3) as loader:
        batch = next(islice(loader, 4, None))
    sizes = ["--seed", 3, "--batch-size", 5, "--world-size", 2, "--step", 5]
    found = answer(capsys, path, *sizes, "--rank", 1)
    assert [row["row"] for row in found["rows"]] == batch["sample_id"].tolist()
    whole = answer(capsys, path, *sizes)
    assert [row for row in whole["rows"] if row["rank"] == 1] == found["rows"]
    tokens = [
        (document["source"], document["tokens"][1] - document["tokens"][0])
        for row in whole["rows"]
        for document in row["documents"]
    ]
    assert {each["source"]: each["tokens"] for each in whole["sources"]} == {
        source: sum(count for name, count in tokens if name == source) for source, _ in tokens
    }
    few = answer(capsys, path, *sizes, "--limit", 2)
    assert (len(few["rows"]), few["row_count"], few["sources"]) == (2, 10, whole["sources"])
    assert main(["trace", str(path), *map(str, sizes), "--limit", "2"]) == 0
    out, err = capsys.readouterr()
    assert "step 5 (counted from 1): positions 40 to 49, 10 rows" in out
    state = loader.state_dict()
    assert f"seed 3, shuffle window ({state['lanes']:,} lanes, window {state['window']:,})" in out
    assert "and 8 more rows" in err


def test_a_remote_dataset_answers_as_the_local_one(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made("best_fit-mds")
    url = f"memory://traced-{folder.name}/data"
    upload(folder / "out", url)
    tokenizer = ["--tokenizer", folder / "tokenizer.json"]
    for words in (
        ["--row", 3, "--row", 40, "--row", 1],
        ["--url", "https://site1.example.org/*"],
        ["--step", 3, "--batch-size", 4, "--loader", "lanes=2", "--loader", "window=6"],
        ["--step", 2, "--batch-size", 2],
    ):
        local = json.dumps(answer(capsys, folder / "out", *words, *tokenizer))
        local = local.replace(f'"{folder / "out"}"', f'"{url}"')
        assert answer(capsys, url, *words, *tokenizer) == json.loads(local)


def test_text_needs_the_tokenizer_of_the_dataset(
    made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made("best_fit-mds") / "out"
    tokenizer = json.loads((path.parent / "tokenizer.json").read_bytes())
    (tmp_path / "other.json").write_text(json.dumps(tokenizer, indent=1))
    assert main(["trace", str(path), "--row", "1", "--tokenizer", str(tmp_path / "other.json")]) == 0
    assert "is not the tokenizer of this dataset" in capsys.readouterr().err
    (tmp_path / "none.json").write_text("{}")
    with pytest.warns(RuntimeWarning, match="is not the tokenizer of this dataset") as caught:
        Decoder(tmp_path / "other.json", DatasetCard.read(path / "dataset.json"))
    assert caught[0].filename == __file__
    assert main(["trace", str(path), "--row", "1", "--tokenizer", str(tmp_path / "none.json")]) == 1
    assert "cannot be read as a tokenizer" in capsys.readouterr().err
    card = json.loads((path / "dataset.json").read_bytes())
    elsewhere = shutil.copytree(path, tmp_path / "away" / "deep" / "copy")
    assert main(["trace", str(elsewhere), "--row", "1"]) == 0
    out, err = capsys.readouterr()
    assert "“" not in out
    assert (
        "give --tokenizer with the tokenizer.json of the dataset, "
        f"tokenizer.json (digest {card['tokenizer']['digest']})" in err
    )


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--row", "100000"], 1, "no row 100,000; it has"),
        (["--row", "99:0"], 1, "has no shard 99"),
        (["--row", "shard.00000.mds:90000"], 1, "rows, numbered from 0"),
        (["--row", "x"], 1, "'x' is not a row"),
        (["--document", "12"], 1, "is not a document id"),
        (["--document", "0" * 32], 1, "none of the documents is in this dataset"),
        (["--source", "nothing"], 1, "has no source 'nothing'; there are plain, tables, zipped"),
        (["--url", "https://a*b"], 1, "is not a URL pattern"),
        (["--url-list", "nowhere.txt"], 1, "nowhere.txt: cannot be read"),
        (
            ["--url", "*.example.org", "--export", "x.xlsx"],
            1,
            "name a file with one of the extensions .parquet, .jsonl, .csv",
        ),
        (
            ["--source", "plain", "--source", "tables", "--source", "zipped", "--exclude", "x"],
            1,
            "every row of",
        ),
        ([], 2, "there is no question: give --row"),
        (["--row", "1", "--step", "2"], 2, "row and step are different questions"),
        (["--row", "1", "--without", "gone.txt"], 2, "--without applies to a run"),
        (["--row", "1", "--exclude", "x"], 2, "--exclude needs a search"),
        (["--step", "1"], 2, "give --batch-size"),
        (["--step", "0", "--batch-size", "2"], 2, "--step"),
        (["--step", "1", "--batch-size", "2", "--rank", "1"], 2, "--rank 1 must be below --world-size 1"),
        (["--row", "1", "--stream", "x"], 2, "--stream needs --state"),
    ],
)
def test_what_cannot_be_answered_is_said_in_one_line(
    made: Any, words: list[str], status: int, message: str, capfd: pytest.CaptureFixture[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    try:
        found = main(["trace", str(made("best_fit-mds") / "out"), *words])
    except SystemExit as error:
        found = int(str(error.code))
    out, err = capfd.readouterr()
    assert (found, out) == (status, "")
    assert message in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())
