"""Duplicate removal in a build: who goes, what is counted, and the same bytes whatever happens."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reference.near import reference_shingles
from shardkit.errors import BuildError, RecipeError
from shardkit.writers import build, build_dedup_index, executors, index_build, pipeline
from shardkit.writers.dedup.config import MinHashConfig
from shardkit.writers.execution.engine import InlineEngine, OnNews
from shardkit.writers.execution.task_queue import TaskQueue
from shardkit.writers.execution.work import Work, run_task
from shardkit.writers.inputs import scan
from support.s3_moto import s3_server
from support.small_build import make_corpus, tree

RECIPE = """\
inputs:
  - {path: "first-*.jsonl", source: first}
  - {path: "second-*.jsonl", source: second}
dedup:
  exact: {}
  near: {small_shingles: 0}
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 64}
output: {path: out, shard_bytes: 8KiB}
"""
LINE = "This very line stands at the end of every second document of the first source."


def words_of(number: int, count: int = 80) -> list[str]:
    rng = random.Random(number)
    return [f"w{rng.randrange(10**6)}" for _ in range(count)]


def make_texts() -> dict[str, list[str]]:
    """By file: families of near-duplicates (a word replaced, some cut off), of equal texts and words."""
    texts: dict[str, list[str]] = {}
    for source, start in (("first", 0), ("second", 40)):
        for file in range(2):
            some = []
            for number in range(start + 20 * file, start + 20 * (file + 1)):
                words = words_of(number)
                some.append(" ".join(words) + (f"\n{LINE}" if number % 2 and source == "first" else ""))
                if number % 3 == 0:  # the similarity is 0.88 and 0.91
                    some.append(" ".join([*words[:40], f"x{number}", *words[41:]]))
                    some.append(" ".join(words[:-7]))
                if number % 5 == 0:
                    some += [some[-1], some[-1].upper().replace(" ", ", ")]
                if number == 41:  # of the other source's first document
                    some.append(" ".join(words_of(0)[3:]))
            texts[f"{source}-{file}.jsonl"] = some
    return texts


def make(folder: Path, changes: str = "", texts: dict[str, list[str]] | None = None) -> Path:
    recipe = make_corpus(folder, documents=4, recipe=RECIPE + changes)
    for name, some in (make_texts() if texts is None else texts).items():
        urls = [f"https://a.org/{name}/{row - (row % 6 == 5)}" for row in range(len(some))]
        facts = {"dump": name.partition("-")[0]}
        rows = [{"text": text, "id": f"{name} {row}", "url": urls[row]} for row, text in enumerate(some)]
        lines = [json.dumps(row | facts) for row in rows]
        (folder / name).write_text("\n".join(lines) + "\n")
    return recipe


@pytest.fixture(autouse=True)
def _many_splits(monkeypatch: pytest.MonkeyPatch, inline_builds: None) -> None:
    for module in (pipeline, index_build):
        monkeypatch.setattr(module.scan, "scan_inputs", partial(scan.scan_inputs, split_bytes=9000))


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many partitions and blocks as millions of documents need."""
    monkeypatch.setattr("shardkit.writers.stages.flow.task_memory", lambda memory: 20_000)


def provenance(output: Path) -> dict[str, dict[str, Any]]:
    """{the user's id: a line} of all documents."""
    lines = [line for path in output.glob("provenance/*") for line in pq.read_table(path).to_pylist()]
    return {line["id"]: line for line in lines}


def expected_copies(texts: dict[str, list[str]]) -> dict[str, int]:
    """{id: documents it stands for} of those that stay, by the rule itself, over all pairs."""
    config = MinHashConfig()
    documents = [
        (name.startswith("second"), -len(text.encode()), f"{name} {row}", text)
        for name, some in texts.items()
        for row, text in enumerate(some)
    ]
    kept: dict[str, int] = {}
    sets = {document[2]: reference_shingles(document[3], config) for document in documents}
    # Ids break ties; texts of equal length are equal here, and the first of a file's equal ones has any id.
    for _, _, name, _ in sorted(documents):
        winner = next(
            (k for k in kept if 10 * len(sets[k] & sets[name]) >= 8 * len(sets[k] | sets[name])), name
        )
        kept[winner] = kept.get(winner, 0) + 1
    return kept


@pytest.mark.extended
def test_who_stays_is_who_the_rule_lets_stay(tmp_path: Path) -> None:
    texts = make_texts()
    result = build(make(tmp_path, texts=texts), progress=False)
    lines, expected = provenance(result.output), expected_copies(texts)
    assert sorted(line["copies"] for line in lines.values()) == sorted(expected.values())
    assert max(expected.values()) == 5
    first = {
        name: count for name, count in expected.items() if count < 3
    }  # without equal texts, whose ids tie
    assert first.items() <= {name: line["copies"] for name, line in lines.items()}.items()
    assert "second-0.jsonl 41" not in lines
    total = sum(map(len, texts.values()))
    dropped = result.funnel.dropped
    assert result.funnel.kept.documents == len(expected)
    assert dropped["exact_duplicate"].documents + dropped["near_duplicate"].documents == total - len(expected)
    card = json.loads((result.output / "dataset.json").read_text())["dedup"]
    assert card["largest_group"] == 5
    assert sum(group["groups"] for group in card["groups"]) == len(expected)
    assert [stage["stage"] for stage in card["stages"]] == ["exact_duplicate", "near_duplicate"]
    assert "Near-duplicates" in (result.output / "report.html").read_text()


def texts_in_ties() -> list[str]:
    """Families of near-duplicates of one length, some of equal words, most with one of a few shared lines."""
    texts = []
    for number in range(30):
        words = words_of(number, 60)
        versions = [[*words[:at], "x" * len(words[at]), *words[at + 1 :]] for at in (3, 20, 40)]
        texts += [" ".join(version) + f"\n{LINE} {number % 4}" for version in versions]
        texts += [texts[-1].upper(), texts[-1].replace(" ", "\t")]
    return texts


def kept_texts(folder: Path, files: dict[str, list[str]], change: str) -> list[str]:
    """The texts of these files that a build keeps, as duplicate removal leaves them."""
    changes = ["inputs=[{path: input}]", "work=work", change]
    recipe = make(folder, texts={})
    (folder / "input").mkdir()
    for name, texts in files.items():
        urls = [f"https://a.org/?page={sum(text.encode()) % 50}&gclid={name}" for text in texts]
        rows = zip(texts, urls, strict=True)
        lines = [json.dumps({"text": text, "id": text, "url": url}) for text, url in rows]
        (folder / "input" / name).write_text("\n".join(lines) + "\n")
    result = build(recipe, overrides=changes, progress=False)
    left: dict[str, str] = {}
    for path in folder.glob("work/lines/*/documents.arrow"):
        rows = pa.ipc.open_file(path).read_all().select(["id", "text"]).to_pylist()
        left |= {row["id"]: row["text"] for row in rows}
    return sorted(left.get(id, id) for id in provenance(result.output))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "change",
    [
        "dedup={exact: {text: normalized}}",
        "dedup={url: true}",
        "dedup={url: {keep: longest}, exact: true}",
        pytest.param("dedup={near: {small_shingles: 0}}", marks=pytest.mark.extended),
        pytest.param("dedup={lines: {}}", marks=pytest.mark.extended),
        pytest.param("dedup={lines: {unit: span, words: 8}}", marks=pytest.mark.extended),
    ],
    ids=["equal words", "urls", "longest of urls", "near", "lines", "spans"],
)
def test_which_texts_stay_does_not_depend_on_names_and_order_of_files(tmp_path: Path, change: str) -> None:
    texts = texts_in_ties()
    some = kept_texts(tmp_path / "some", {"a.jsonl": texts[:70], "b.jsonl": texts[70:]}, change)
    shuffled = random.Random(1).sample(texts, len(texts))
    others = {f"{number}-other.jsonl": shuffled[number::5] for number in range(5)}
    assert kept_texts(tmp_path / "others", others, change) == some
    assert some != sorted(texts)


@pytest.mark.extended
@pytest.mark.usefixtures("small_memory")
def test_partitions_change_no_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = build(make(tmp_path / "small"), progress=False)
    monkeypatch.setattr("shardkit.writers.stages.flow.task_memory", lambda memory: 1 << 28)
    large = build(make(tmp_path / "large"), progress=False)
    assert small.tasks > large.tasks + 20
    assert small.fingerprint == large.fingerprint
    assert provenance(small.output) == provenance(large.output)


class Stopped(BaseException):
    pass


class StoppingEngine(InlineEngine):
    """Ends the build after so many tasks, the last of which is finished but not heard of."""

    left = 0

    def run(self, queue: TaskQueue, work: Work, on_news: OnNews | None = None) -> None:
        while (task := queue.take()) is not None:
            commit = run_task(task, task.digest, work)
            StoppingEngine.left -= 1
            if StoppingEngine.left <= 0:
                raise Stopped
            queue.done(commit)


@pytest.mark.extended
@pytest.mark.usefixtures("small_memory")
def test_a_build_that_is_stopped_after_any_task_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ["dedup.url=true", "dedup.lines={min_characters: 20}"]
    whole = build(make(tmp_path / "whole"), overrides=changes, progress=False)
    monkeypatch.setattr(executors, "LocalEngine", lambda workers, **options: StoppingEngine())
    recipe = make(tmp_path / "stopped")
    stops = 0
    while True:
        StoppingEngine.left = 4
        try:
            result = build(recipe, overrides=changes, progress=False)
            break
        except Stopped:
            stops += 1
    assert stops > whole.tasks // 4 - 1
    assert tree(result.output) == tree(whole.output)


@pytest.mark.extended
def test_a_scope_of_a_field_is_that_of_sources_where_each_has_a_value_of_its_own(tmp_path: Path) -> None:
    dumps = "first", "second"
    inputs = ", ".join(f"{{path: {one}-*.jsonl, source: {one}, metadata: dump}}" for one in dumps)
    kept = {}
    for name, scope in (("field", "{field: dump}"), ("source", "source"), ("global", "global")):
        inputs = ", ".join(
            f"{{path: {one}-*.jsonl, source: {one}, metadata: dump}}" for one in ("first", "second")
        )
        changes = [f"inputs=[{inputs}]", f"dedup.near.scope={scope}", "dedup.lines={min_characters: 20}"]
        result = build(make(tmp_path / name), overrides=changes, progress=False)
        kept[name] = {id: row["copies"] for id, row in provenance(result.output).items()}
        card = json.loads((result.output / "dataset.json").read_text())["dedup"]
        assert card["near"]["scope"] == {"field": "field dump"}.get(name, name)
    assert kept["field"] == kept["source"] != kept["global"]


@pytest.mark.extended
@pytest.mark.parametrize("lines", ["null", "{min_characters: 20}"])
def test_near_duplicates_are_removed_within_a_language_if_so_wanted(tmp_path: Path, lines: str) -> None:
    english = "This page is about the history of the town and of the people who lived here."
    german = "Diese Seite handelt von der Geschichte der Stadt und von den Menschen dort."
    some = []
    for number in range(12):
        body = " ".join(words_of(number, 150))
        some += [
            LINE,
            f"{english} {body}",
            f"{german} {body}",
            f"{english} {body} end",
            f"{german} {body} Ende",
        ]
    changes = ["filters=[{language: {characters: 70, threshold: 0}}]", f"dedup.lines={lines}"]
    kept = {}
    for scope in ("language", "global"):
        recipe = make(tmp_path / scope, texts={"first-0.jsonl": some[:37], "second-0.jsonl": some[37:]})
        result = build(recipe, overrides=[*changes, f"dedup.near.scope={scope}"], progress=False)
        dropped = result.funnel.dropped
        kept[scope] = dropped["near_duplicate"].documents
        assert dropped["exact_duplicate"].documents == 11
    assert kept == {"language": 24, "global": 36}


def test_repeated_lines_are_cut_and_accounted_for(tmp_path: Path) -> None:
    result = build(make(tmp_path), overrides=["dedup.lines={}"], progress=False)
    lost = result.funnel.dropped["duplicate_lines"]  # `repeated_lines` is a filter
    assert lost.documents == 0  # all have words of their own
    texts = {text for some in make_texts().values() for text in some}
    lines = Counter(line for text in texts for line in text.split("\n"))
    assert lines.most_common(1)[0][0] == LINE
    assert lost.bytes == sum((len(line) + 1) * (count - 1) for line, count in lines.items())
    result.funnel.check("the build")


def test_a_passage_that_documents_share_is_cut_out_of_the_middle_of_their_lines(tmp_path: Path) -> None:
    passage = " ".join(words_of(500, 60))
    texts = [
        f"{' '.join(words_of(n))} {passage if n % 2 else ''} {' '.join(words_of(n + 50))}" for n in range(20)
    ]
    recipe = make(tmp_path, texts={"first-0.jsonl": texts[:9], "second-0.jsonl": texts[9:]})
    changes = ["work=work", "dedup={lines: {unit: span, words: 30}}"]
    result = build(recipe, overrides=changes, progress=False)
    left = [
        text
        for path in sorted(tmp_path.glob("work/lines/*/documents.arrow"))
        for text in pa.ipc.open_file(path).read_all().column("text").to_pylist()
    ]
    assert left[::2] == texts[::2]
    assert [text for text in left if passage in text] == [
        text for text in texts if text in left and passage in text
    ]
    assert sum(passage in text for text in left) == 1
    for text, whole in zip(left[1::2], texts[1::2], strict=True):
        assert passage in text or len(whole.split()) - 60 <= len(text.split()) <= len(whole.split()) - 40
        assert text.split()[:80] == whole.split()[:80]
        assert text.split()[-80:] == whole.split()[-80:]
    lost = result.funnel.dropped["duplicate_lines"]
    assert (lost.documents, lost.bytes) == (0, len("".join(texts)) - len("".join(left)))
    result.funnel.check("the build")
    card = json.loads((result.output / "dataset.json").read_text())
    assert card["recipe"]["dedup"]["lines"] == {"keep": 1, "min_characters": 30, "unit": "span", "words": 30}
    assert (
        "words"
        not in json.loads(
            (
                build(recipe, overrides=["dedup={lines: {}}", "output.path=lines"], progress=False).output
                / "dataset.json"
            ).read_text()
        )["recipe"]["dedup"]["lines"]
    )


@pytest.mark.parametrize(
    ("lines", "refusal"),
    [
        (
            "{unit: span, min_characters: 9}",
            "min_characters has no effect with unit: span; set words instead",
        ),
        ("{words: 60}", "words has no effect with unit: line; set min_characters instead"),
        ("{unit: span, words: 7}", "words"),
    ],
)
def test_the_least_length_of_another_unit_is_refused(tmp_path: Path, lines: str, refusal: str) -> None:
    with pytest.raises(RecipeError, match=rf"dedup\.lines.*{refusal}"):
        build(make(tmp_path), overrides=[f"dedup.lines={lines}"], progress=False)


@pytest.mark.usefixtures("small_memory")
def test_equal_urls_are_removed_alike_whatever_the_splits_and_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ["dedup.url=true", "dedup.near=null"]
    small = build(make(tmp_path / "small"), overrides=changes, progress=False)
    monkeypatch.setattr("shardkit.writers.stages.flow.task_memory", lambda memory: 1 << 28)
    monkeypatch.setattr(scan, "scan_inputs", partial(scan.scan_inputs, split_bytes=1 << 20))
    large = build(make(tmp_path / "large"), overrides=changes, progress=False)
    assert small.tasks > large.tasks + 5
    assert small.fingerprint == large.fingerprint
    assert provenance(small.output) == provenance(large.output)
    counts = {name: len(some) for name, some in make_texts().items()}
    lost = small.funnel.dropped
    assert lost["url_duplicate"].documents == sum(count // 6 for count in counts.values())
    card = json.loads((small.output / "dataset.json").read_text())
    assert card["recipe"]["dedup"]["url"] == {"drop_parameters": [], "keep": "first"}
    assert [stage["stage"] for stage in card["dedup"]["stages"]] == ["url_duplicate", "exact_duplicate"]
    copies = Counter(line["copies"] for line in provenance(small.output).values())
    groups = {group["copies"]: group["groups"] for group in card["dedup"]["groups"]}
    assert (groups["1"], groups["2"], groups["3-10"]) == (
        copies[1], copies[2], sum(count for number, count in copies.items() if number > 2),
    )  # fmt: skip
    assert card["dedup"]["largest_group"] == max(copies)
    assert "url duplicate" in (small.output / "report.html").read_text()


def test_a_build_that_compares_urls_and_has_none_says_so(tmp_path: Path) -> None:
    recipe = make_corpus(tmp_path, documents=4, recipe=RECIPE)
    (tmp_path / "first-0.jsonl").write_text('{"text": "some words", "url": "N/A"}\n')
    (tmp_path / "second-0.jsonl").write_text('{"text": "some more words"}\n')
    with pytest.raises(RecipeError, match=r"^dedup\.url: no document has a URL; set inputs"):
        build(recipe, overrides=["dedup.url=true"], progress=False)


def test_words_alone_may_decide_about_equal_texts(tmp_path: Path) -> None:
    changes = ["dedup.exact.text=normalized", "dedup.near=null"]
    normalized = build(make(tmp_path / "a"), overrides=changes, progress=False)
    raw = build(make(tmp_path / "b"), overrides=["dedup.near=null"], progress=False)
    twice = [result.funnel.dropped["exact_duplicate"].documents for result in (normalized, raw)]
    assert twice == [32, 16]


def test_a_source_that_loses_too_much_stops_the_build(tmp_path: Path) -> None:
    text = " ".join(words_of(7))
    texts = make_texts() | {"second-0.jsonl": [f"{text} {number % 3}" for number in range(1000)]}
    with pytest.raises(
        BuildError, match=r"input 'second': 1,020 of 1,042 documents \(97.9%\) .*near_duplicate 19"
    ):
        build(make(tmp_path, texts=texts), progress=False)


@pytest.mark.extended
@pytest.mark.usefixtures("small_memory")
def test_a_new_dump_is_compared_with_the_index_of_an_old_one(tmp_path: Path) -> None:
    texts = make_texts()
    recipe = make(tmp_path, texts=texts)
    old = {name: some for name, some in texts.items() if name.startswith("first")}
    old_recipe = make(tmp_path / "old", texts=old | {"second-0.jsonl": [" ".join(words_of(900))]})
    index = build_dedup_index(old_recipe, tmp_path / "index", progress=False)
    assert index.removed["near_duplicate"] > 10
    new = ["inputs=[{path: second-*.jsonl}]", "dedup.near.against=[index]"]
    result = build(recipe, overrides=new, progress=False)
    both = provenance(build(recipe, overrides=["output.path=both"], progress=False).output)
    assert provenance(result.output).keys() == {name for name in both if name.startswith("second")}
    card = json.loads((result.output / "dataset.json").read_text())["dedup"]["near"]
    assert card["counts"]["kept_by_index"] == 1
    assert build(recipe, overrides=new, progress=False).up_to_date
    build_dedup_index(make(tmp_path / "other"), tmp_path / "index", replace=True, progress=False)
    with pytest.raises(BuildError, match="made against other indexes"):
        build(recipe, overrides=new, progress=False)


@pytest.mark.extended  # 25 s: five builds of two processes and a server
def test_an_index_built_into_a_bucket_is_that_of_a_folder_wherever_the_work_was(tmp_path: Path) -> None:
    texts = make_texts()
    old = {name: some for name, some in texts.items() if name.startswith("first")}
    old["second-0.jsonl"] = [" ".join(words_of(900))]
    recipe, old_recipe = make(tmp_path, texts=texts), make(tmp_path / "old", texts=old)
    with s3_server() as server:
        bucket = f"s3://{server.new_bucket()}"
        url, folder = f"{bucket}/indexes/old", tmp_path / "index"
        made = [build_dedup_index(old_recipe, url, progress=False)]
        for index, work in ((url, f"{bucket}/work-1"), (folder, f"{bucket}/work-2")):
            overrides = [f"work={work}", f"scratch={tmp_path}/scratch"]
            made.append(build_dedup_index(old_recipe, index, overrides=overrides, progress=False))
        assert len({(index.digest, index.documents) for index in made}) == 1
        outputs = []
        for number, against in enumerate((url, folder)):
            overrides = ["inputs=[{path: second-*.jsonl}]", f"dedup.near.against=['{against}']"]
            result = build(recipe, overrides=[*overrides, f"output.path=out-{number}"], progress=False)
            files = tree(result.output)
            outputs.append({name: files[name] for name in files.keys() - {"dataset.json", "report.html"}})
        assert outputs[0] == outputs[1]


def test_tasks_name_what_they_depend_on(tmp_path: Path) -> None:
    """A changed key redoes what depends on it, and nothing else."""
    recipe = make(tmp_path)
    build(recipe, overrides=["work=work"], progress=False)
    seen: list[str] = []

    class Noting(InlineEngine):
        def run(self, queue: TaskQueue, work: Work, on_news: OnNews | None = None) -> None:
            while (task := queue.take()) is not None:
                seen.append(task.stage)
                queue.done(run_task(task, task.digest, work))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "LocalEngine", lambda workers, **options: Noting())
        changes = ["work=work", "output.path=other"]
        build(recipe, overrides=[*changes, "dedup.near.similarity=0.82"], progress=False)
    assert "clean" not in seen
    assert {"signatures", "candidates", "verify"} <= set(seen), "their keys went with the last reader"
    assert "tokenize" not in seen, "the same documents were removed"
