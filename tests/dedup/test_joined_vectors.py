"""Vectors that were made elsewhere, joined by id, remove what a function with the same ones removes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from shardkit.errors import BuildError, RecipeError
from shardkit.progress import make_listener
from shardkit.writers import build
from shardkit.writers.estimate import rehearse
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.work import Work
from shardkit.writers.executors import Execution, open_runner
from shardkit.writers.inputs import scan
from shardkit.writers.recipe.recipe import recipe_from_mapping
from shardkit.writers.stages.inputs import BuildInputs
from shardkit.writers.stages.vectors import sort_vectors, unit_vectors
from support.s3_moto import s3_server
from support.small_build import tree

COUNT, DIMENSIONS, SIMILARITY = 240, 24, 0.93
CODE = """
import numpy as np

def embed(texts, vectors):
    return np.load(vectors)[[int(text.split()[1]) for text in texts]]
"""
OF_PLACES = {"dataset.json", "report.html"}  # which name the origin of vectors


@pytest.fixture(autouse=True)
def _many_splits(monkeypatch: pytest.MonkeyPatch, inline_builds: None) -> None:
    monkeypatch.setattr(scan, "scan_inputs", partial(scan.scan_inputs, split_bytes=3000))


def text_of(number: int) -> str:
    return f"document {number} has" + " words" * (number % 7)


def made_vectors() -> npt.NDArray[np.float32]:
    """Vectors of any length around 60 topics, which float16 can hold; every 40th is of zeros."""
    rng = np.random.default_rng(4)
    topics = rng.standard_normal((60, DIMENSIONS))
    noise = rng.standard_normal((COUNT, DIMENSIONS)) * rng.uniform(0.05, 0.7, (COUNT, 1))
    found = (topics[rng.integers(0, 60, COUNT)] + noise) * rng.uniform(0.2, 9, (COUNT, 1))
    found[::40] = 0
    return found.astype(np.float16).astype(np.float32)


VECTORS = made_vectors()


def list_column(vectors: Sequence[Sequence[float] | None], kind: pa.DataType) -> pa.Array:
    if kind.value_type == pa.float16():
        vectors = [None if one is None else [*np.array(one, np.float16)] for one in vectors]
    return pa.array(vectors, kind)


def write_vectors(
    folder: Path, kind: pa.DataType | None = None, vectors: npt.NDArray[Any] = VECTORS, **columns: Any
) -> None:
    """Write files in another order than that of the documents, in small row groups."""
    (folder / "vectors").mkdir(exist_ok=True)
    kind = pa.list_(pa.float32()) if kind is None else kind
    order = np.random.default_rng(1).permutation(len(vectors))
    for number, some in enumerate(np.array_split(order, 3)):
        column = list_column(vectors[some].tolist(), kind)
        table = pa.table({"other": ["x"] * len(some), "embedding": column, "doc": some, **columns})
        pq.write_table(table, folder / "vectors" / f"{number}.parquet", row_group_size=17)


def recipe_in(folder: Path, embed: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    for name, numbers in (("first", range(100)), ("second", range(100, COUNT))):
        rows = [{"text": text_of(n), "id": n, "url": f"https://a.org/{n}"} for n in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"vectors": str(folder / "vectors" / "*.parquet"), "key": "doc", "document": "id"}
    semantic = {"embed": files if embed is None else embed, "similarity": SIMILARITY, "clusters": 1}
    return {
        "inputs": [
            {"path": str(folder / f"{name}.jsonl"), "base": str(folder)} for name in ("first", "second")
        ],
        "dedup": {"semantic": semantic},
        "output": {"path": str(folder / "out"), "format": "jsonl"},
        "check_disk": False,
    } | changes


def by_function(folder: Path, vectors: npt.NDArray[np.float32] = VECTORS) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(CODE)
    np.save(folder / "vectors.npy", vectors)
    own, data = str(folder / "own.py"), {"vectors": str(folder / "vectors.npy")}
    return recipe_in(folder, {"function": "embed", "file": own, "data": data})


def kept_in(folder: Path) -> set[int]:
    lines = [line for path in sorted((folder / "out").glob("*.jsonl")) for line in path.open()]
    return {int(json.loads(line)["id"]) for line in lines}


def reference(vectors: npt.NDArray[np.float32]) -> set[int]:
    """The documents that stay: greedily, in the order of priority; cosines by NumPy alone."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    some = lengths > 0
    units = (vectors / np.where(some, lengths, 1)[:, None]).astype(np.float16).astype(np.float64)
    units /= np.where(some, np.linalg.norm(units, axis=1), 1)[:, None]
    alike = units @ units.T >= SIMILARITY

    def priority(number: int) -> tuple[bool, int, bytes]:
        text = text_of(number).encode()
        return number >= 100, -len(text), xxhash.xxh3_128_digest(text)[:8]

    kept: list[int] = []
    for number in sorted(range(len(vectors)), key=priority):
        if not alike[number, kept].any():
            kept.append(number)
    return set(kept)


def out_of(folder: Path) -> dict[str, Any]:
    return {name: data for name, data in tree(folder / "out").items() if name not in OF_PLACES}


def run(recipe: dict[str, Any], **settings: Any) -> Any:
    return build(recipe, workers=1, progress=False, **settings)


@pytest.mark.filterwarnings("ignore:.*have no vector")
def test_a_function_with_the_same_vectors_makes_the_same_dataset(tmp_path: Path) -> None:
    folder, other = tmp_path / "joined", tmp_path / "computed"
    folder.mkdir()
    write_vectors(folder)
    run(recipe_in(folder))
    run(by_function(other))
    assert kept_in(folder) == reference(VECTORS)
    assert 80 < len(kept_in(folder)) < 200
    assert out_of(folder) == out_of(other)
    facts = json.loads((folder / "out" / "dataset.json").read_text())["dedup"]["semantic"]
    assert (facts["dimensions"], facts["counts"]["without_vector"]) == (DIMENSIONS, COUNT // 40)
    assert run(recipe_in(folder)).up_to_date


KINDS: dict[str, pa.DataType] = {
    "float16": pa.list_(pa.float16()),
    "float64": pa.list_(pa.float64()),
    "large": pa.large_list(pa.float32()),
    "fixed": pa.list_(pa.float32(), DIMENSIONS),
    "fixed-float16": pa.list_(pa.float16(), DIMENSIONS),
}


@pytest.mark.filterwarnings("ignore:.*have no vector")
@pytest.mark.parametrize("kind", KINDS)
def test_lists_may_have_any_type(tmp_path: Path, kind: str) -> None:
    write_vectors(tmp_path, KINDS[kind])
    run(recipe_in(tmp_path))
    assert kept_in(tmp_path) == reference(VECTORS)


@pytest.mark.filterwarnings("ignore:.*have no vector")
def test_integers_and_tensors_and_lines_are_read_too(tmp_path: Path) -> None:
    whole = np.rint(VECTORS * 20).astype(np.int64)
    write_vectors(tmp_path, pa.list_(pa.int16()), whole)
    run(recipe_in(tmp_path))
    assert kept_in(tmp_path) == reference(whole.astype(np.float32))

    tensor = pa.fixed_shape_tensor(pa.float32(), [DIMENSIONS])
    fixed = pa.array(VECTORS.tolist(), pa.list_(pa.float32(), DIMENSIONS))
    table = pa.table({"doc": range(COUNT), "embedding": pa.ExtensionArray.from_storage(tensor, fixed)})
    pq.write_table(table, tmp_path / "tensors.parquet", row_group_size=50)
    rows = [{"doc": str(n), "embedding": one} for n, one in enumerate(VECTORS.tolist())]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    for name in ("tensors.parquet", "lines.jsonl"):
        embed = {"vectors": [str(tmp_path / name)], "key": "doc", "document": "id"}
        run(recipe_in(tmp_path, embed), replace=True)
        assert kept_in(tmp_path) == reference(VECTORS)


@pytest.mark.filterwarnings("ignore:.*have no vector")
@pytest.mark.parametrize("document", ["url", "document_id"])
def test_any_id_of_a_document_is_joined(tmp_path: Path, document: str) -> None:
    first = recipe_in(tmp_path, dedup={}, output={"path": str(tmp_path / "text"), "format": "parquet"})
    run(first)
    rows = pq.read_table(sorted((tmp_path / "text").glob("text-*.parquet")))
    numbers = [int(one) for one in rows.column("id").to_pylist()]
    table = {document: rows.column(document), "mean": VECTORS[numbers].tolist()}
    pq.write_table(pa.table(table), tmp_path / "v.parquet")
    embed = {"vectors": str(tmp_path / "v.parquet"), "key": document, "document": document, "column": "mean"}
    run(recipe_in(tmp_path, embed))
    assert kept_in(tmp_path) == reference(VECTORS)


def test_documents_that_the_files_lack_are_kept_and_counted(tmp_path: Path) -> None:
    rows = [{"doc": n, "embedding": one} for n, one in enumerate(VECTORS.tolist()) if n % 30 != 7]
    for row in rows[:60:6]:
        row["embedding"] = None
    gone = {*range(7, COUNT, 30), *(row["doc"] for row in rows if row["embedding"] is None)}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "v.parquet")
    missing = VECTORS.copy()
    missing[[*gone]] = 0
    without = int((~missing.any(axis=1)).sum())
    recipe = recipe_in(tmp_path, {"vectors": str(tmp_path / "v.parquet"), "key": "doc", "document": "id"})
    with pytest.warns(RuntimeWarning, match=rf"{without} of 240 documents have no vector .* such as '0'"):
        run(recipe)
    assert kept_in(tmp_path) == reference(missing) >= gone
    card = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert card["dedup"]["semantic"]["counts"]["without_vector"] == without


@pytest.mark.filterwarnings("ignore:.*have no vector")
def test_a_changed_vector_makes_another_build(tmp_path: Path) -> None:
    write_vectors(tmp_path)
    recipe = recipe_in(tmp_path)
    first = run(recipe)
    changed = VECTORS.copy()
    changed[120:] = np.eye(DIMENSIONS, dtype=np.float32)[0]
    write_vectors(tmp_path, vectors=changed)
    with pytest.raises(BuildError, match="made with other lists, models or code"):
        run(recipe)
    assert run(recipe, replace=True).fingerprint != first.fingerprint
    assert kept_in(tmp_path) == reference(changed)


GOOD = [[1.0, 2.0]] * 3
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no id": ({"embedding": GOOD}, r"has no column 'doc'; it has embedding"),
    "no vectors": ({"doc": [1, 2, 3], "vec": GOOD}, r"has no column 'embedding'; it has doc, vec"),
    "text": (
        {"doc": [1, 2, 3], "embedding": ["a", "b", "c"]},
        r"'embedding' is string; vectors must be lists",
    ),
    "lists of text": ({"doc": [1], "embedding": [["a"]]}, r"is list<.*string>; vectors must be lists of num"),
    "null id": ({"doc": [1, None, 3], "embedding": GOOD}, r"'doc' is null in 1 rows"),
    "float id": ({"doc": [1.5, 2, 3], "embedding": GOOD}, r"'doc' is double; ids must be text or integers"),
    "lengths": (
        {"doc": [1, 2, 3], "embedding": [[1.0, 2.0], [1.0, 2.0, 3.0], [1.0, 0.0]]},
        r"the vector of id '2' has 3 dimensions, others have 2",
    ),
    "empty list": (
        {"doc": [1, 2, 3], "embedding": [[1.0, 2.0], [1.0, 0.0], []]},
        r"the vector of id '3' has 0 dimensions, others have 2",
    ),
    "empty lists": ({"doc": [1], "embedding": pa.array([[]], pa.list_(pa.float32()))}, r"lists of 0 values"),
    "nan": (
        {"doc": [1, 2, 3], "embedding": [[1.0, 2.0], [float("nan"), 0.0], [1.0, 0.0]]},
        r"the vector of id '2' has the value nan; vectors must be finite",
    ),
    "infinite": (
        {"doc": [1, 2, 3], "embedding": [[1.0, 2.0], [1.0, 2.0], [0.0, -1e300]]},
        r"the vector of id '3' has the value -inf",
    ),
    "null value": (
        {"doc": [1, 2, 3], "embedding": [[1.0, 2.0], None, [0.0, None]]},
        r"the vector of id '3' has a null value",
    ),
    "twice": (
        {"doc": [1, 2, 1], "embedding": [[1.0, 2.0], [3.0, 4.0], [1.0, 2.5]]},
        r"an id has two rows with different values",
    ),
    "none": ({"doc": [1, 2, 3], "embedding": pa.nulls(3)}, r"no row of .* has a vector in 'embedding'"),
    "zeros": (
        {"doc": range(COUNT), "embedding": [[0.0, 0.0]] * COUNT},
        r"none of 240 documents has a vector",
    ),
    "other ids": (
        {"doc": ["a", "b", "c"], "embedding": GOOD},
        r"none of 240 .*such as '0'; key and document say",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_cannot_be_meant_are_refused(tmp_path: Path, name: str) -> None:
    rows, problem = WRONG[name]
    pq.write_table(pa.table(rows), tmp_path / "v.parquet")
    embed = {"vectors": str(tmp_path / "v.parquet"), "key": "doc", "document": "id"}
    with pytest.raises(BuildError, match=rf"dedup.semantic.embed.*{problem}"):
        run(recipe_in(tmp_path, embed))
    assert not (tmp_path / "out").exists()


def test_two_rows_of_an_id_in_one_direction_are_one(tmp_path: Path) -> None:
    rows = {
        "doc": [*range(COUNT), 5],
        "embedding": [*np.eye(COUNT)[:, :200].tolist(), (np.eye(200)[5] * 3).tolist()],
    }
    pq.write_table(pa.table(rows), tmp_path / "v.parquet")
    with pytest.warns(RuntimeWarning, match="40 of 240"):
        run(recipe_in(tmp_path, {"vectors": str(tmp_path / "v.parquet"), "key": "doc", "document": "id"}))
    assert len(kept_in(tmp_path)) == COUNT


def test_files_of_different_dimensions_are_refused(tmp_path: Path) -> None:
    for name, one in (("a", [1.0, 2.0]), ("b", [1.0, 2.0, 3.0])):
        pq.write_table(pa.table({"doc": [name], "embedding": [one]}), tmp_path / f"{name}.parquet")
    embed = {"vectors": str(tmp_path / "*.parquet"), "key": "doc"}
    with pytest.raises(
        BuildError, match=r"b.parquet: .*the vector of id 'b' has 3 dimensions, others have 2"
    ):
        run(recipe_in(tmp_path, embed))


def test_files_that_are_absent_damaged_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    for path, problem in (
        ("*.parquet", r"dedup.semantic.embed.vectors\[0\]: .* matches no file"),
        ("a.npy", r"dedup.semantic.embed.vectors\[0\]: the name .*a.npy does not tell its format"),
        ("a.csv", r"dedup.semantic.embed.vectors: .*a.csv: is neither Parquet nor JSON lines; convert it"),
        ("cut.parquet", r"cut.parquet: (is damaged|cannot be read)"),
        ("a.jsonl", r"a.jsonl: line 1: is not valid JSON"),
    ):
        if path[0] != "*":
            (tmp_path / path).write_text(
                '{"doc": 1, "embedding": [1, 2]}\n{"doc": 2, "embedding": [1, NaN]}\n'
            )
        with pytest.raises((RecipeError, BuildError), match=problem):
            run(recipe_in(tmp_path, {"vectors": str(tmp_path / path), "key": "doc"}))


def test_tables_of_many_parts_give_what_a_dictionary_gives(tmp_path: Path) -> None:
    """Small limits: several runs are merged, and blocks of few rows cross batches."""
    rng = np.random.default_rng(3)
    vectors = rng.standard_normal((2000, 300)).astype(np.float32)
    names = np.array([f"d{number}" for number in range(2000)])
    for part, some in enumerate(np.array_split(rng.permutation(2000), 5)):
        table = pa.table({"document_id": names[some].tolist(), "embedding": vectors[some].tolist()})
        pq.write_table(table, tmp_path / f"{part}.parquet", row_group_size=150)
    recipe = recipe_from_mapping(
        recipe_in(tmp_path, {"vectors": str(tmp_path / "*.parquet")}), folder=tmp_path
    )
    with (
        make_listener(False) as listener,
        open_runner(recipe, Work.at(tmp_path / "work"), Execution(workers=1), listener) as runner,
    ):
        inputs = replace(BuildInputs.of(recipe, []), limits=DEFAULT_LIMITS.divided(1000))
        given = inputs.vectors
        assert given is not None
        joined = sort_vectors(runner.run, given.splits, given.config, 300, 1 << 20, inputs.limits)
    assert joined.table is not None
    assert len(joined.table.parts) > 3
    found = joined.open()([*names.tolist(), b"\xd1", "none", None])
    assert np.array_equal(found[:-3], unit_vectors(vectors))
    assert np.array_equal(found[-3], found[1]), "bytes are compared in hexadecimal"
    assert np.isnan(found[-2:]).all()


def test_a_rehearsal_reads_no_vectors_and_counts_their_tables(tmp_path: Path) -> None:
    write_vectors(tmp_path)
    recipe = recipe_from_mapping(recipe_in(tmp_path), folder=tmp_path)
    inputs = BuildInputs.of(recipe, scan.scan_inputs(recipe))
    stored = sum(path.stat().st_size for path in (tmp_path / "vectors").iterdir())
    shutil.rmtree(tmp_path / "vectors")
    estimate = rehearse(inputs, workers=1)
    assert estimate.stages["semantic_vectors"] == estimate.stages["semantic_tables"] == int(1.1 * stored)
    assert estimate.stages["semantic_embed"] > COUNT * 2 * DIMENSIONS, "no document is like another"
    assert estimate.documents == COUNT


@pytest.mark.parametrize("size", [0.3, 0.7, 0.99])
def test_a_file_that_is_cut_or_changed_is_refused(tmp_path: Path, size: float) -> None:
    table = pa.table({"doc": range(COUNT), "embedding": VECTORS.tolist()})
    pq.write_table(table, tmp_path / "v.parquet", write_page_checksum=True)
    whole = (tmp_path / "v.parquet").read_bytes()
    at = int(size * len(whole))
    for data in (whole[:at], whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :]):
        (tmp_path / "v.parquet").write_bytes(data)
        with pytest.raises(BuildError, match=r"v.parquet: (is damaged|cannot be read)"):
            run(recipe_in(tmp_path, {"vectors": str(tmp_path / "v.parquet"), "key": "doc", "document": "id"}))


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.*have no vector")
def test_files_and_work_in_a_bucket_give_the_same_dataset(tmp_path: Path) -> None:
    write_vectors(tmp_path)
    run(recipe_in(tmp_path))
    first = out_of(tmp_path)
    with s3_server() as server:
        client, bucket = server.client(), server.new_bucket()
        for file in (tmp_path / "vectors").iterdir():
            client.put_object(Bucket=bucket, Key=f"vectors/{file.name}", Body=file.read_bytes())
        embed = {"vectors": f"s3://{bucket}/vectors/*.parquet", "key": "doc", "document": "id"}
        places = {"work": f"s3://{bucket}/work", "scratch": str(tmp_path / "scratch")}
        run(recipe_in(tmp_path, embed, **places), replace=True)
    assert out_of(tmp_path) == first
