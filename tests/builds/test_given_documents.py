"""Documents given in Python: the same dataset from every source, finished tasks reused, clear refusals."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pds
import pytest

import shardkit as sk
from shardkit.cli.main import main
from shardkit.errors import BuildError, RecipeError
from shardkit.writers.execution.work import Work
from shardkit.writers.explain import clean_work, explain_build
from shardkit.writers.inputs.given_documents import json_lines
from shardkit.writers.recipe.inputs import InputConfig
from shardkit.writers.recipe.recipe import recipe_from_mapping
from shardkit.writers.report.result import BuildResult
from shardkit.writers.stages.given import write_given
from support.other_process import OtherProcess
from support.s3_moto import s3_server
from support.small_build import EOS, text_of, train_bpe, tree

pytestmark = pytest.mark.usefixtures("inline_builds")

Rows = list[dict[str, Any]]
METADATA = ["stars", "tags", "about.language", "when"]


def rows_of(count: int) -> Rows:
    return [
        {
            "text": text_of(n),
            "id": f"n{n}",
            "stars": n if n % 4 else None,
            "tags": [str(n), "é"],
            "about": {"language": "de" if n % 2 else "en", "score": n / 7},
            "when": datetime(2024, 1, 1 + n % 28, 12),
            "vector": [0.5] * 4,
        }
        for n in range(count)
    ]


ROWS = rows_of(300)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(str(train_bpe([text_of(n) for n in range(50)], vocabulary=400).to_str()))
    return path


@pytest.fixture
def settings(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A recipe without inputs, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return {
        "inputs": {"metadata": METADATA, "source": "mine"},
        "filters": [{"length": {"min_words": 3}}],
        "dedup": {"exact": {}},
        "tokenizer": {"path": str(tokenizer), "eos": EOS},
        "pack": {"sequence_length": 64},
        "output": {"path": "out", "shard_bytes": "8KiB"},
    }


def build(settings: dict[str, Any], documents: object, **more: Any) -> BuildResult:
    return sk.build(settings, documents=documents, progress=False, **more)


def table() -> pa.Table:
    made = pa.Table.from_pylist(ROWS)
    text = made["text"].cast(pa.large_string()).dictionary_encode()
    return made.set_column(0, "text", text)


SOURCES: dict[str, Callable[[], object]] = {
    "generator": lambda: (row for row in ROWS),
    "data frame": lambda: pd.DataFrame(ROWS).astype({"stars": "Int64"}),
    "records": lambda: pd.DataFrame(ROWS).astype({"stars": "Int64"}).to_dict("records"),
    "table": table,
    "reader": lambda: table().to_reader(17),
    "batch": lambda: pa.RecordBatch.from_pylist(ROWS),
    "dataset": lambda: pds.dataset(table()),
    "capsule": lambda: Capsule(table()),
}


class Capsule:
    """Any table with Arrow's PyCapsule interface, such as a DataFrame of polars."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def test_every_source_makes_the_same_bytes(settings: dict[str, Any], tmp_path: Path) -> None:
    first = build(settings, ROWS)
    assert first.funnel.read.documents == len(ROWS)
    expected = tree(first.output)
    for number, (name, source) in enumerate(SOURCES.items()):
        made = build(settings, source(), output=tmp_path / f"other-{number}")
        found = tree(made.output)
        assert [file for file in expected if found.get(file) != expected[file]] == [], name
        assert found.keys() == expected.keys()
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".work")]


def test_datasets_of_hugging_face_and_polars_make_the_same_bytes(settings: dict[str, Any]) -> None:
    lines = list(json_lines(ROWS, InputConfig(path="documents", metadata=tuple(METADATA))))
    config = InputConfig(path="documents", metadata=tuple(METADATA))
    datasets, polars = pytest.importorskip("datasets"), pytest.importorskip("polars")
    mapped = datasets.Dataset.from_list(ROWS)
    for source in (mapped, mapped.with_format("torch"), mapped.to_iterable_dataset(), polars.DataFrame(ROWS)):
        assert list(json_lines(source, config)) == lines


def test_a_document_is_found_by_its_row(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(write_given.__kwdefaults__ or {}, "text_bytes", 5000)
    build(settings, ROWS)
    for number in (0, 123, 298):
        found, *_ = sk.open("out").trace(id=f"n{number}").documents
        assert found.record == number
        assert re.fullmatch(r"documents/\d{12}-[0-9a-f]{16}\.jsonl\.zst", found.file)
        assert found.source == "mine"
        wanted = {"stars": ROWS[number]["stars"], "tags": [str(number), "é"]}
        assert json.loads(found.metadata or "").items() >= wanted.items()


def test_a_second_build_reuses_its_tasks_and_longer_documents_those_of_whole_files(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(write_given.__kwdefaults__ or {}, "text_bytes", 5000)
    kept = settings | {"work": "work"}
    first = build(kept, iter(ROWS))
    files = tree(Path("work"))
    again = build(kept, pa.Table.from_pylist(ROWS), output="again")
    assert (again.tasks_reused, again.tasks) == (first.tasks, first.tasks)
    assert tree(again.output) == tree(first.output)
    assert build(kept, ROWS).up_to_date
    more = build(kept, rows_of(310), output="more")
    assert 0 < more.tasks_reused < more.tasks
    others = build(kept, [{**row, "text": f"{row['text']} indeed"} for row in ROWS], output="others")
    assert others.fingerprint != first.fingerprint
    stay = [name for name in files if name.startswith("documents/")]
    assert len(stay) > 8
    assert all(tree(Path("work"))[name] == files[name] for name in stay)


def test_another_key_of_the_recipe_keeps_ids_and_one_of_metadata_keeps_the_order(
    settings: dict[str, Any],
) -> None:
    build(settings, ROWS)
    build(settings | {"inputs": {"metadata": ["about.score"], "source": "mine"}}, ROWS, output="other")
    ids = [
        [one.document_id for one in sk.open(name).trace(source="mine").documents] for name in ("out", "other")
    ]
    assert ids[0] == ids[1]


def test_a_damaged_file_of_documents_is_written_again(settings: dict[str, Any]) -> None:
    kept = settings | {"work": "work"}
    first = build(kept, ROWS)
    [file] = Path("work").glob("documents/*/documents.jsonl.zst")
    before = file.read_bytes()
    file.write_bytes(before[:-9] + bytes(9))
    again = build(kept, ROWS, output="again")
    assert file.read_bytes() == before
    assert tree(again.output) == tree(first.output)


def test_a_work_folder_is_explained_and_cleaned_without_the_documents(
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(write_given.__kwdefaults__ or {}, "text_bytes", 5000)
    kept = settings | {"work": "work"}
    Path("recipe.yaml").write_text(json.dumps(kept))
    with pytest.raises(RecipeError, match=r"names no files, and .*work has no documents of build"):
        explain_build(kept)
    build(kept, [{**row, "text": f"{row['text']} indeed"} for row in ROWS[:150]], output="before")
    build(kept, ROWS)
    files = tree(Path("work"))
    explained = explain_build("recipe.yaml")
    assert tree(Path("work")) == files
    assert all(plan.finished == plan.tasks for plan in explained.stages)
    assert explained.later == ()
    assert {task.key.split("/")[0] for task in explained.stale} >= {"documents", "clean", "pack"}
    changed = explain_build(kept, overrides=["filters=[{length: {min_words: 4}}]"])
    [clean] = [plan for plan in changed.stages if plan.stage == "clean"]
    assert [reason.tasks for reason in clean.reasons] == [clean.tasks], changed
    assert main(["build", "recipe.yaml", "--explain"]) == 0
    assert "every task is finished" in capsys.readouterr().out

    assert main(["clean", "recipe.yaml"]) == 0
    assert not explain_build("recipe.yaml").stale
    assert len([*Path("work").glob("documents/*/commit.json")]) < len(
        [name for name in files if name.startswith("documents/") and name.endswith("commit.json")]
    )
    again = build(kept, ROWS, output="again")
    assert again.tasks_reused == again.tasks
    [first, *_] = sorted(Path("work").glob("documents/*"))
    shutil.rmtree(first)
    with pytest.raises(BuildError, match="documents that were given are missing; build again"):
        clean_work("recipe.yaml")
    Path("work/notes/documents.json").write_text('[["documents/1-2", 5], "x"]')
    with pytest.raises(BuildError, match=r"notes/documents\.json is damaged; build again"):
        clean_work("recipe.yaml")
    assert main(["clean", "recipe.yaml", "--all"]) == 0
    assert not Path("work").exists()
    files_named = kept | {"inputs": {"path": "documents"}}
    with pytest.raises(RecipeError, match="matches no file"):
        explain_build(files_named)


def test_the_work_folder_may_be_in_a_store(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(write_given.__kwdefaults__ or {}, "text_bytes", 9000)
    local = tree(build(settings | {"work": "work"}, ROWS).output)
    with s3_server() as server:
        remote = settings | {"work": f"s3://{server.new_bucket()}/work", "scratch": str(tmp_path / "scratch")}
        first = build(remote, iter(ROWS), output="remote")
        again = build(remote, ROWS, output="again")
        assert again.tasks_reused == again.tasks == first.tasks
        assert all(plan.finished == plan.tasks for plan in explain_build(remote).stages)
        assert not clean_work(remote).removed
    for made in (first, again):
        assert tree(made.output) == local


SPOOLS = """
import os, sys
import shardkit as sk
from shardkit.writers.stages.given import write_given

write_given.__kwdefaults__["text_bytes"] = 5000
sys.path.insert(0, sys.argv[1])
from builds.test_given_documents import ROWS

def rows():
    for number, row in enumerate(ROWS):
        if number == 200:
            print("there", flush=True)
            sys.stdin.readline()
        yield row

sk.build(sys.argv[2], documents=rows(), progress=False)
"""


def test_a_build_killed_while_it_writes_documents_leaves_whole_files_only(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(write_given.__kwdefaults__ or {}, "text_bytes", 5000)
    expected = tree(build(settings, ROWS, output="expected").output)
    (tmp_path / "recipe.yaml").write_text(json.dumps(settings | {"work": "work"}))
    with OtherProcess(SPOOLS, Path(__file__).parent.parent, tmp_path / "recipe.yaml") as other:
        assert other.line() == "there"
        other.kill()
    written = list(Path("work").glob("documents/*/commit.json"))
    assert len(written) == 8
    times = {file: file.stat().st_mtime_ns for file in written}
    made = sk.build("recipe.yaml", documents=iter(ROWS), progress=False)
    assert tree(made.output) == expected
    assert {file: file.stat().st_mtime_ns for file in written} == times
    assert not list(Path("work/unfinished").iterdir())


class SourceError(Exception):
    """Raised by a test's own generator."""


def failing(error: Exception) -> Iterator[dict[str, Any]]:
    yield from ROWS[:200]
    raise error


@pytest.mark.parametrize("error", [SourceError("page 7"), OSError(5, "of the source"), MemoryError("of it")])
def test_an_error_of_the_source_passes_and_no_part_is_used(
    settings: dict[str, Any], error: Exception
) -> None:
    kept = settings | {"work": "work"}
    with pytest.raises(type(error)) as caught:
        build(kept, failing(error))
    assert caught.value is error
    assert "failing" in [entry.name for entry in caught.traceback]
    assert not list(Path("work").glob("documents/*"))
    assert not list(Path("work/unfinished").iterdir())
    assert build(kept, ROWS).funnel.read.documents == len(ROWS)


class Foreign:
    """A value that no format can hold."""


@pytest.mark.parametrize(
    ("changes", "documents", "error", "problem"),
    [
        ({"inputs": "data/*.jsonl"}, ROWS, RecipeError, r"\[0\]\.path: .* either files \(data/\*\.jsonl\)"),
        ({"inputs": [{"path": "a"}]}, ROWS, RecipeError, r"inputs\[0\]\.path: .*leave out `path`"),
        ({"inputs": [{}, {"text": "b"}]}, ROWS, RecipeError, "has one input; the recipe has 2"),
        ({"inputs": {"format": "parquet"}}, ROWS, RecipeError, r"inputs\[0\]\.format: is about files"),
        ({"inputs": {"texts": "x"}}, ROWS, RecipeError, "did you mean 'text'"),
        ({"inputs": {"text": "body"}}, ROWS, RecipeError, "text: no document has a field 'body'; .*about"),
        ({"inputs": {"text": "body"}}, pa.table({"a": [1]}), RecipeError, r"'body'; their fields: a;"),
        ({"inputs": {"metadata": "star"}}, ROWS, RecipeError, r"metadata\[0\]: no document has a .* 'star'"),
        ({"inputs": {"messages": "chat"}}, ROWS, RecipeError, "messages: no document has a field 'chat'"),
        ({}, [], BuildError, "documents: there are none"),
        ({}, iter(()), BuildError, "an iterator that was read before"),
        ({}, pa.table({"text": pa.array([], pa.string())}), BuildError, "there are none"),
        ({}, ["a", "b"], BuildError, "documents: row 0 is a str; give dicts"),
        ({"inputs": {}}, [ROWS[0], None], BuildError, "row 1 is a NoneType"),
        ({}, "data.jsonl", RecipeError, r"'data.jsonl' is a path; files are named by inputs"),
        ({}, Path("x"), RecipeError, "is a path"),
        ({}, {"train": ROWS}, RecipeError, "type dict is not a list of documents.*: train"),
        ({}, 5, RecipeError, "type int cannot be iterated"),
        ({"inputs": {}}, [{"text": Foreign()}], BuildError, "row 0: field 'text' holds a .*Foreign, not"),
        ({"inputs": {}}, [{"text": None}], BuildError, "record 0.*field 'text' holds null, not text"),
        ({"inputs": {}}, [*ROWS[:5], {"text": 5}], BuildError, "record 5.*'text' holds number, not text"),
        ({"inputs": {}}, [*ROWS[:5], {"body": 5}], BuildError, "record 5.*no field 'text'; its fields: body"),
        ({"inputs": {}}, [{"text": b"\xff"}], BuildError, "record 0.*bad_json"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused(
    settings: dict[str, Any], changes: dict[str, Any], documents: object, error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=re.compile(problem, re.DOTALL)):
        build(settings | changes, documents)
    assert not Path("out").exists()


def test_two_columns_of_one_name_are_refused(settings: dict[str, Any]) -> None:
    frame = pd.DataFrame([["a", "b"]], columns=["text", "text"])
    double = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    for documents in (frame, double):
        with pytest.raises(RecipeError, match="more than one column is called 'text'"):
            build(settings | {"inputs": {}}, documents)


def test_a_generator_inside_the_recipe_is_told_where_to_go(settings: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=r"of type generator is no setting; give documents as build\("):
        sk.build(settings | {"inputs": (row for row in ROWS)}, progress=False)
    recipe = recipe_from_mapping(settings | {"inputs": "x.jsonl"}, folder=Path.cwd())
    with pytest.raises(RecipeError, match="either files"):
        build(recipe, ROWS)  # type: ignore[arg-type]


def test_bad_rows_go_into_quarantine_by_their_number(settings: dict[str, Any]) -> None:
    documents = [*ROWS[:50], {"text": None}, *ROWS[50:99], {"text": "a \ud800 b"}, *ROWS[99:]]
    plain = settings | {"inputs": {}, "max_bad_fraction": 0.1}
    made = build(plain, documents)
    assert made.funnel.quarantined.keys() == {"no_text", "bad_json"}
    bad = [json.loads(line) for line in (made.output / "quarantine.jsonl").read_text().splitlines()]
    assert [one["record"] for one in bad] == [50, 100]
    replaced = build(plain | {"inputs": {"on_bad_text": "replace"}}, documents, output="replaced")
    assert replaced.funnel.quarantined.keys() == {"no_text"}


def test_values_of_any_type_are_kept_as_files_keep_them() -> None:
    config = InputConfig(path="documents", metadata=("a",))
    values = [
        1 << 70,
        float("nan"),
        {"b": [None, {"c": 1.5}]},
        b"\xff\x00",
        b"text",
        pd.NaT,
        pd.NA,
        "x",
        [Path("y")],
    ]
    lines = list(json_lines([{"text": "t", "a": value} for value in values], config))
    found = [json.loads(line.json)["a"] for line in lines]
    assert found == [1 << 70, None, {"b": [None, {"c": 1.5}]}, "ff00", "text", None, None, "x", ["y"]]
    assert [line.key for line in lines] == [b'{"text":"t"}'] * len(values)


def test_conversations_are_the_same_from_dicts_and_tables() -> None:
    calls = [{"name": "f", "arguments": "{}"}]
    chat: Rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "tool_calls": calls}]},
    ]
    config = InputConfig(path="documents", messages="messages")
    lines = list(json_lines(chat, config))
    assert [json.loads(line.json) for line in lines] == chat
    made = pa.Table.from_pylist(chat)
    assert list(json_lines(made, config)) == lines
    assert list(json_lines(made.to_pandas(), config)) == lines


def test_a_trial_reads_no_more_than_its_limit(settings: dict[str, Any]) -> None:
    def endless() -> Iterator[dict[str, Any]]:
        number = 0
        while True:
            yield {"text": text_of(number)}
            number += 1

    assert build(settings | {"inputs": {}, "limit": 30}, endless()).funnel.read.documents == 30


def test_memory_does_not_grow_with_the_number_of_documents(settings: dict[str, Any], tmp_path: Path) -> None:
    alive = 0

    class Row(dict[str, Any]):
        def __init__(self, number: int) -> None:
            nonlocal alive
            super().__init__(text=f"{number} " * 200)
            alive += 1

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    most = 0

    def rows() -> Iterator[Row]:
        nonlocal most
        for number in range(5000):
            yield Row(number)
            most = max(most, alive)

    recipe = recipe_from_mapping(settings | {"inputs": {"path": "documents"}}, folder=tmp_path)
    work = Work.at(tmp_path / "work")
    files = write_given(rows(), recipe, work, lease_seconds=60, progress=False, text_bytes=1 << 20)
    assert len(files) > 2
    assert most <= 3
    assert [file.first_record for file in files] == sorted(file.first_record for file in files)
    assert sum(Path(file.path).stat().st_size for file in files) < 1 << 20  # compressed


def test_progress_counts_documents(settings: dict[str, Any]) -> None:
    seen: list[Any] = []
    sk.build(settings, documents=ROWS, progress=seen.append)
    own = [one for one in seen if one.stage == "documents"]
    assert own[-1].finished
    assert own[-1].documents == len(ROWS)
