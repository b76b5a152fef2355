"""A semantic duplicate is removed only if its vector is verified against that of a kept document."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import yaml

from shardkit.errors import BuildError, MissingExtraError, RecipeError
from shardkit.writers import build, build_dedup_index, executors
from shardkit.writers.dedup.semantic import default_clusters, find_neighbors, vector_table
from shardkit.writers.dedup.verify import EDGES
from shardkit.writers.exchange.exchange import RunWriter, Slice
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.engine import LocalEngine
from shardkit.writers.execution.work import Work
from shardkit.writers.inputs import scan
from shardkit.writers.recipe.recipe import recipe_from_mapping
from shardkit.writers.stages.embed import StaticModel, read_token_vectors
from support.small_build import tree
from support.static_model import make_static_model, word_piece, write_safetensors

WORDS = [f"word{number}" for number in range(300)]
FIELDS = {"field": "cluster", "distance": "far"}
STATIC = {"model": "vectors.safetensors", "tokenizer": "words.json"}
CODE = """
import hashlib
import numpy as np

def embed(texts, scale=1.0):
    made = np.zeros((len(texts), 16), np.float32)
    for row, text in enumerate(texts):
        for word in text.split():
            made[row] += np.frombuffer(hashlib.sha256(word.encode()).digest()[:16], np.int8) * scale
    return made

class Embed:
    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, texts):
        return embed(texts, self.scale)
"""


@pytest.fixture(autouse=True)
def _many_splits(monkeypatch: pytest.MonkeyPatch, inline_builds: None) -> None:
    monkeypatch.setattr(scan, "scan_inputs", partial(scan.scan_inputs, split_bytes=9000))


def families(count: int, seed: int = 0) -> list[str]:
    """Texts of 60 words; of each second one, three with some words replaced: the cosines are 0.8 to 1."""
    rng, texts = random.Random(seed), list[str]()
    for number in range(count):
        words = rng.choices(WORDS, k=60)
        texts.append(" ".join(words))
        for replaced in (1, 3, 12) if number % 2 else ():
            other = list(words)
            for place in rng.sample(range(60), replaced):
                other[place] = rng.choice(WORDS)
            texts.append(" ".join(other[: 60 - number % 5]))
    rng.shuffle(texts)
    return texts


def make(folder: Path, semantic: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    make_static_model(folder, WORDS)
    (folder / "my_vectors.py").write_text(CODE)
    texts = families(70)
    half = len(texts) // 2
    for name, some in (("first", texts[:half]), ("second", texts[half:])):
        rows = [json.dumps({"text": text, "id": f"{name}{row}"}) for row, text in enumerate(some)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    recipe = {
        "inputs": [{"path": f"{name}.jsonl", "source": name, "id": "id"} for name in ("first", "second")],
        "dedup": {"semantic": {"embed": STATIC} | dict(semantic)},
        "output": {"path": "out", "format": "jsonl"},
        "work": "work",
        "check_disk": False,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | dict(changes or {})))
    return folder / "recipe.yaml"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts_of(folder: Path) -> dict[str, str]:
    """{id: text} of the inputs."""
    return {row["id"]: row["text"] for name in ("first", "second") for row in read(folder / f"{name}.jsonl")}


def duplicates(out: Path) -> list[dict[str, Any]]:
    files = sorted((out / "duplicates").glob("*.parquet"))
    rows: list[dict[str, Any]] = pa.concat_tables(pq.read_table(file) for file in files).to_pylist()
    return rows


def static_units(folder: Path, texts: Sequence[str]) -> npt.NDArray[np.float16]:
    """The vectors by `tokenizers` and NumPy alone."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "words.json"))
    matrix = read_token_vectors(folder / "vectors.safetensors")
    unknown = tokenizer.token_to_id("[UNK]")
    found = []
    for text in texts:
        ids = [one for one in tokenizer.encode(text, add_special_tokens=False).ids if one != unknown][:512]
        mean = matrix[ids].astype(np.float64).mean(axis=0)
        found.append(mean / np.linalg.norm(mean))
    return np.array(found).astype(np.float16)


def cosines(units: npt.NDArray[np.float16]) -> npt.NDArray[np.float64]:
    found = units.astype(np.float64)
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    product: npt.NDArray[np.float64] = found @ found.T
    return product


def reference(texts: Sequence[tuple[int, str]], alike: npt.NDArray[np.bool_]) -> set[int]:
    """Documents that go, of (source, text) that all differ: greedily, in the order of priority."""
    import xxhash

    def priority(number: int) -> tuple[int, int, bytes]:
        source, text = texts[number]
        return source, -len(text.encode()), xxhash.xxh3_128_digest(text.encode())[:8]

    kept: list[int] = []
    for number in sorted(range(len(texts)), key=priority):
        if not alike[number, kept].any():
            kept.append(number)
    return set(range(len(texts))) - set(kept)


def check_removals(folder: Path, similarity: float) -> tuple[set[str], npt.NDArray[np.bool_], list[str]]:
    """Every removed pair is verified by NumPy; returns (removed ids, which pairs are alike, ids)."""
    texts = texts_of(folder)
    ids = list(texts)
    cosine = cosines(static_units(folder, list(texts.values())))
    at = {one: number for number, one in enumerate(ids)}
    kept = {row["id"] for row in read_output(folder)}
    rows = duplicates(folder / "out")
    for row in rows:
        assert row["reason"] == "semantic_duplicate"
        exact = cosine[at[row["id"]], at[row["kept_id"]]]
        assert row["similarity"] == pytest.approx(exact, abs=2e-4)
        assert exact > similarity - 2e-4
        assert row["kept_id"] in kept
        ours, theirs = (name.startswith("second") for name in (row["kept_id"], row["id"]))
        longer = len(texts[row["kept_id"]]) >= len(texts[row["id"]])
        assert ours < theirs or (ours == theirs and longer)
    removed = {row["id"] for row in rows}
    assert removed.isdisjoint(kept)
    assert removed | kept == set(ids)
    return removed, cosine >= similarity, ids


def read_output(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted((folder / "out").glob("*.jsonl")) for row in read(path)]


def test_all_pairs_that_verify_decide_who_stays_and_each_removal_is_verified(tmp_path: Path) -> None:
    folder = tmp_path / "user"
    result = build(make(folder, {"similarity": 0.93, "clusters": 1}), progress=False)
    removed, alike, ids = check_removals(folder, 0.93)
    texts = texts_of(folder)
    numbered = [(int(one.startswith("second")), texts[one]) for one in ids]
    assert {ids[number] for number in reference(numbered, alike)} == removed
    assert 40 < len(removed) < 110
    facts = json.loads((folder / "out" / "dataset.json").read_text())["dedup"]
    assert facts["semantic"]["counts"]["clusters"] == 1
    assert {one["stage"]: one["documents"] for one in facts["stages"]} == {"semantic_duplicate": len(removed)}
    assert "Semantic duplicates" in (folder / "out" / "report.html").read_text()
    assert result is not None


def clusters_of(folder: Path) -> dict[int, set[int]]:
    """{cluster: documents in it}, with documents numbered in the order of the inputs."""
    files = [Artifact(path) for path in sorted((folder / "work").rglob("vectors.run"))]
    rows, _ = Slice.whole(vector_table(32), files).read()
    found: dict[int, set[int]] = {}
    for cluster, number in zip((rows["key"] >> np.uint64(40)).tolist(), rows["number"].tolist(), strict=True):
        found.setdefault(cluster, set()).add(number)
    return found


@pytest.mark.parametrize("probes", [1, 4])
def test_of_two_alike_documents_in_one_cluster_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probes: int
) -> None:
    monkeypatch.setattr(Work, "remove_files", lambda work, files: None)  # `clusters_of` reads runs, too
    folder = tmp_path / "user"
    build(make(folder, {"similarity": 0.93, "clusters": 12, "probes": probes}), progress=False)
    removed, alike, ids = check_removals(folder, 0.93)
    clusters, stays = clusters_of(folder), {number for number, one in enumerate(ids) if one not in removed}
    assert sum(map(len, clusters.values())) == probes * len(ids)
    for members in clusters.values():
        some = sorted(members & stays)
        assert not np.triu(alike[np.ix_(some, some)], 1).any()
    together = {pair for members in clusters.values() for pair in combinations(sorted(members), 2)}
    pairs = {(int(a), int(b)) for a, b in np.argwhere(np.triu(alike, 1))}
    assert len(pairs & together) >= (0.99 if probes == 4 else 0.5) * len(pairs)


def static_texts() -> list[str]:
    rng = random.Random(3)
    some = [" ".join(rng.choices(WORDS, k=rng.randrange(900))) for _ in range(40)]
    odd = [
        "",
        " \n\t ",
        "word1,word2;(word3)--word4...",
        "Word5 WORD6 wörd7 naïve",
        "字word8字 word9",
        "[UNK] [PAD]",
    ]
    odd += [
        "word1\u00a0word2\u3000word3",
        "a\x00b\x1fc word4",
        "x" * 300,
        "word1" * 60,
        "é" * 90,
        "\u0338<\u0338 word2",
    ]
    odd += ["".join(rng.choices("ab,. \nwordé字Ω1", k=400)) for _ in range(60)]
    return some + odd


@pytest.mark.parametrize("is_by_word", [True, False])
def test_a_static_vector_is_the_mean_of_the_tokens_vectors(tmp_path: Path, is_by_word: bool) -> None:
    make_static_model(tmp_path, WORDS)
    path = tmp_path / "words.json"
    if not is_by_word:
        config = json.loads(path.read_text())
        config["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "BertPreTokenizer"}]}
        path.write_text(json.dumps(config))
    texts, matrix = static_texts(), read_token_vectors(tmp_path / "vectors.safetensors")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    for most in (1, 7, 512):
        found = StaticModel(tmp_path / "vectors.safetensors", path, most)(pa.array(texts, pa.large_string()))
        for text, vector in zip(texts, found, strict=True):
            ids = [one for one in tokenizer.encode(text, add_special_tokens=False).ids if one != 1][:most]
            expected = matrix[ids].astype(np.float64).sum(axis=0)
            np.testing.assert_allclose(vector, expected, rtol=1e-4, atol=1e-4)
    again = StaticModel(tmp_path / "vectors.safetensors", path, 512)
    one_by_one = [again(pa.array([text], pa.large_string()))[0] for text in reversed(texts)]
    assert np.array_equal(np.array(one_by_one)[::-1], found)


def test_mapping_and_weights_of_newer_models_are_applied(tmp_path: Path) -> None:
    rows = np.arange(12, dtype="<f4").reshape(4, 3)
    tensors = {
        "embeddings": rows.astype("<f2"),
        "mapping": np.array([3, 0, 0, 2], "<i8"),
        "weights": np.array([1, 2, 0.5, 0], "<f8"),
    }
    write_safetensors(tmp_path / "m", tensors)
    assert np.array_equal(read_token_vectors(tmp_path / "m"), rows[[3, 0, 0, 2]] * [[1], [2], [0.5], [0]])
    write_safetensors(tmp_path / "m", {"embeddings": np.array([[-128, 127]], "i1")})
    assert np.array_equal(read_token_vectors(tmp_path / "m"), [[-128, 127]])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"other": np.zeros((2, 2), "<f4")}, "no tensor `embeddings`"),
        ({"embeddings": np.zeros(4, "<f4")}, "no tensor `embeddings`"),
        ({"embeddings": np.array([[np.nan]], "<f4")}, "not finite"),
        ({"embeddings": np.ones((2, 2), "<f4"), "mapping": np.array([2], "<i4")}, "`mapping` names rows"),
        ({"embeddings": np.ones((2, 2), "<f4"), "weights": np.ones(3, "<f4")}, "3 `weights` for 2 tokens"),
    ],
)
def test_a_model_file_that_makes_no_sense_is_refused(
    tmp_path: Path, tensors: dict[str, npt.NDArray[Any]], message: str
) -> None:
    write_safetensors(tmp_path / "m", tensors)
    with pytest.raises(RecipeError, match=message):
        read_token_vectors(tmp_path / "m")


def test_a_damaged_model_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_safetensors(path, {"embeddings": np.ones((2, 2), "<f4")})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(RecipeError, match=r"safetensors|no tensor"):
            read_token_vectors(path)
    for data in (b"", b"\xff" * 64, whole.replace(b"F32", b"X32"), whole.replace(b"[2, 2]", b"[2, 9]")):
        path.write_bytes(data)
        with pytest.raises(RecipeError, match=r"safetensors|no tensor"):
            read_token_vectors(path)
    with pytest.raises(RecipeError, match=r"dedup.semantic.embed.model: .*No such file"):
        read_token_vectors(tmp_path / "absent")


@pytest.mark.parametrize("name", ["my_vectors:embed", "my_vectors:Embed", "embed"])
def test_the_users_function_or_class_makes_vectors(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "user"
    embed = {"function": name, "file": "my_vectors.py", "parameters": {"scale": 2.0}}
    build(make(folder, {"embed": embed, "similarity": 0.9, "clusters": 1}), progress=False)
    made: dict[str, Any] = {}
    exec(CODE, made)
    texts = texts_of(folder)
    vectors = made["embed"](list(texts.values())).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    numbered = [(int(one.startswith("second")), text) for one, text in texts.items()]
    alike = vectors @ vectors.T >= 0.9
    removed = {row["id"] for row in duplicates(folder / "out")}
    assert {list(texts)[number] for number in reference(numbered, alike)} == removed
    assert removed


@pytest.mark.parametrize("name", ["embed", "Embed"])
def test_the_users_code_gets_its_files_and_a_changed_one_is_read_again(tmp_path: Path, name: str) -> None:
    embed = {"function": name, "file": "own.py", "data": {"numbers": "numbers.txt"}}
    path = make(tmp_path / "user", {"embed": embed, "similarity": 0.9})
    (path.parent / "own.py").write_text(
        "import numpy as np\n"
        "def embed(texts, numbers):\n"
        "    return np.tile(np.loadtxt(numbers), (len(texts), 1))\n"
        "class Embed:\n"
        "    def __init__(self, numbers): self.numbers = numbers\n"
        "    def setup(self): self.row = np.loadtxt(self.numbers)\n"
        "    def __call__(self, texts): return np.tile(self.row, (len(texts), 1))\n"
    )
    for row, dimensions in (("1 0", 2), ("3 4 5", 3)):
        (path.parent / "numbers.txt").write_text(row)
        build(path, replace=True, progress=False)
        card = json.loads((path.parent / "out" / "dataset.json").read_text())
        assert card["dedup"]["semantic"]["dimensions"] == dimensions
        assert len(duplicates(path.parent / "out")) == len(texts_of(path.parent)) - 1


WRONG = {
    "return [[float('nan')] * 3] * len(texts)": r"\.jsonl, record \d+: its vector has the value nan",
    "return [[1e300, 0]] * len(texts)": r"record \d+: its vector has the value inf",
    "return np.ones((len(texts) - 1, 3))": r"shape \(\d+, 3\) for \d+ texts",
    "return np.ones(len(texts))": r"one vector for each",
    "return np.ones((len(texts), 0))": r"one vector for each",
    "return ['a'] * len(texts)": r"did not return vectors",
    "return None": r"one vector for each|did not return vectors",
    "raise KeyError('key')": r"my_vectors:embed: KeyError: 'key'",
    "return np.ones((len(texts), len(texts)))": r"some splits have vectors of \d+ dimensions, others of \d+",
    "return np.zeros((len(texts), 3))": r"none of \d+ documents has a vector",
}


@pytest.mark.parametrize("body", WRONG)
def test_wrong_vectors_are_refused(tmp_path: Path, body: str) -> None:
    path = make(tmp_path / "user", {"embed": {"function": "embed", "file": "my_vectors.py"}})
    (tmp_path / "user" / "my_vectors.py").write_text(f"import numpy as np\ndef embed(texts):\n    {body}\n")
    with pytest.raises(BuildError, match=WRONG[body]):
        build(path, progress=False)


def test_documents_without_a_vector_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "user"
    path = make(folder, {"similarity": 0.93})
    with (folder / "second.jsonl").open("a") as file:
        file.writelines(json.dumps({"text": "字" * n, "id": f"second-{n}"}) + "\n" for n in range(1, 9))
    with pytest.warns(RuntimeWarning, match="8 of 183 documents have no vector"):
        build(path, progress=False)
    assert {row["id"] for row in read_output(folder)} >= {f"second-{n}" for n in range(1, 9)}
    facts = json.loads((folder / "out" / "dataset.json").read_text())["dedup"]["semantic"]
    assert facts["counts"]["without_vector"] == 8


def test_without_faiss_the_build_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtraError, match=r"dedup.semantic needs .*shardkit\[semantic\]"):
        build(make(tmp_path / "user", {}), progress=False)


@pytest.mark.parametrize(
    ("embed", "message"),
    [
        ({}, "give one of them"),
        (STATIC | {"function": "a:b"}, "give one of them"),
        ({"model": "m"}, "needs its tokenizer"),
        ({"function": "a:b", "tokenizer": "t"}, "tokenizer has no effect with function"),
        ({"function": "a:b", "max_tokens": 5}, "max_tokens has no effect with function"),
        (STATIC | {"file": "a.py"}, "file has no effect with model"),
        ({"function": "a b"}, "write module:function"),
        ({"vectors": []}, "give one of them"),
        (STATIC | {"vectors": "v.parquet"}, "give one of them"),
        (STATIC | {"key": "doc"}, "key has no effect with model"),
        ({"function": "a:b", "document": "url"}, "document has no effect with function"),
        ({"vectors": "v.parquet", "tokenizer": "t"}, "tokenizer has no effect with vectors"),
        ({"vectors": "v.parquet", "file": "a.py"}, "file has no effect with vectors"),
        ({"vectors": "v.parquet", "key": "a", "column": "a"}, "'a' is the id column"),
        ({"vectors": "v.parquet", "document": "text"}, "document: .*'document_id', 'id' or 'url'"),
        (STATIC | {"max_token": 5}, "did you mean 'max_tokens'"),
    ],
)
def test_settings_of_vectors_that_make_no_sense_are_refused(embed: dict[str, Any], message: str) -> None:
    data = {"inputs": ["a.jsonl"], "dedup": {"semantic": {"embed": embed}}}
    with pytest.raises(RecipeError, match=message):
        recipe_from_mapping(data | {"output": {"path": "o", "format": "jsonl"}}, folder=Path())


def test_files_that_are_missing_or_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "user"
    path = make(folder, {"embed": STATIC | {"model": "absent"}})
    with pytest.raises(RecipeError, match=r"dedup.semantic.embed: .*absent: cannot be read: No such file"):
        build(path, progress=False)
    path = make(folder, {})
    word_piece([*WORDS, "another"]).save(str(folder / "words.json"))
    with pytest.raises(RecipeError, match="give the tokenizer that belongs to the model"):
        build(path, progress=False)


def test_a_recipe_without_the_scheme_keeps_its_content() -> None:
    data = {"inputs": ["a.jsonl"], "dedup": {"near": 0.8}, "output": {"path": "o", "format": "jsonl"}}
    assert "semantic" not in recipe_from_mapping(data, folder=Path()).content()["dedup"]


def test_a_recipe_of_a_model_keeps_its_content() -> None:
    data = {"inputs": ["a.jsonl"], "dedup": {"semantic": {"embed": STATIC}}}
    recipe = recipe_from_mapping(data | {"output": {"path": "o", "format": "jsonl"}}, folder=Path())
    known = {"model", "tokenizer", "max_tokens", "function", "file", "parameters", "data"}
    assert recipe.content()["dedup"]["semantic"]["embed"].keys() == known
    assert "distance" not in recipe.content()["dedup"]["semantic"]


def test_the_number_of_clusters_follows_the_root_of_the_documents() -> None:
    assert [default_clusters(n) for n in (0, 1, 4, 1000, 10**6, 10**9)] == [1, 1, 2, 32, 1024, 32768]


STEPS: list[list[Any]] = [
    ["exact", {"semantic": {"embed": STATIC}}, {"length": {"min_words": 56}}, "exact"],
    [{"near": 0.8}, {"semantic": {"embed": STATIC}}],
    [{"semantic": {"embed": STATIC, "similarity": 0.93}}, "lines", {"near": 0.7}],
    ["url", {"semantic": {"embed": STATIC}}],
]


@pytest.mark.parametrize("number", range(len(STEPS) - 1))
def test_semantic_stands_anywhere_among_the_steps(tmp_path: Path, number: int) -> None:
    folder = tmp_path / "user"
    build(make(folder, {}, {"dedup": {}, "steps": STEPS[number]}), progress=False)
    kept = [row["id"] for row in read_output(folder)]
    removed = {row["id"] for row in duplicates(folder / "out")}
    assert removed
    assert len({*kept} | removed) > 100
    assert any(row["reason"] == "semantic_duplicate" for row in duplicates(folder / "out"))


def test_semantic_before_url_is_refused() -> None:
    data = {
        "inputs": ["a.jsonl"],
        "steps": [*STEPS[3][1:], "url"],
        "output": {"path": "o", "format": "jsonl"},
    }
    with pytest.raises(RecipeError, match="url must come before semantic"):
        recipe_from_mapping(data, folder=Path())


@pytest.mark.slow
def test_one_and_two_workers_make_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "LocalEngine", LocalEngine)
    trees = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        path = make(folder, {"similarity": 0.93, "clusters": 12}, {"work": None})
        build(path, workers=workers, progress=False)
        trees.append(tree(folder / "out"))
    assert trees[0] == trees[1]


def ids_in(folder: Path) -> set[str]:
    return {row["id"] for file in sorted(folder.glob("*.jsonl")) for row in read(file)}


def test_the_cluster_is_a_field_that_outputs_select_by(tmp_path: Path) -> None:
    folder = tmp_path / "user"
    rare: dict[str, Any] = {"path": "rare", "where": {"far": {"min": 0.1}}}
    where = [
        rare,
        {"path": "low", "where": {"cluster": {"max": 3}}},
        {"path": "some", "where": {"cluster": ["5"]}},
    ]
    outputs: list[dict[str, Any]] = [{"path": "out"}, *where]
    semantic = {"embed": STATIC, "similarity": 0.93, "clusters": 8} | FIELDS
    changes = {
        "steps": [{"semantic": semantic}, {"length": {"min_words": 57}}, "exact"],
        "outputs": [one | {"format": "jsonl"} for one in outputs],
        "output": None,
        "dedup": {},
    }
    path = make(folder, {}, {key: value for key, value in changes.items() if value is not None})
    data = yaml.safe_load(path.read_text())
    del data["output"]
    path.write_text(yaml.safe_dump(data))
    unknown = {"text": " ".join("字" * 60), "id": "unknown"}
    with (folder / "second.jsonl").open("a") as file:
        file.write(json.dumps(unknown) + "\n")
    build(path, progress=False)
    rows = {row["id"]: row for row in read_output(folder)}
    cluster = {one: (row.get("metadata") or {}).get("cluster") for one, row in rows.items()}
    assert cluster.pop("unknown") is None
    texts = texts_of(folder)
    units = static_units(folder, [texts[one] for one in cluster]).astype(np.float32)
    [means] = [np.load(path) for path in (folder / "work").rglob("centroids.npy")]
    nearest = dict(zip(cluster, (units @ means.T).argmax(axis=1).tolist(), strict=True))
    assert sum(nearest[one] == cluster[one] for one in cluster) >= 0.98 * len(cluster)
    assert len({*cluster.values()}) > 4
    for name, wanted in (("low", {0, 1, 2, 3}), ("some", {5})):
        assert ids_in(folder / name) == {one for one, number in cluster.items() if number in wanted}
    far: dict[str, Any] = {one: (row.get("metadata") or {}).get("far") for one, row in rows.items()}
    assert far.pop("unknown") is None
    wide, numbers = units.astype(np.float64), [cluster[one] for one in far]
    of = means[numbers].astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1) * np.linalg.norm(of, axis=1)
    exact = 1 - (wide * of).sum(axis=1) / lengths
    np.testing.assert_allclose([*far.values()], exact, atol=5.1e-5)
    assert all(value == round(value, 4) for value in far.values())
    assert len({*far.values()}) > 20
    assert ids_in(folder / "rare") == {one for one, value in far.items() if value >= 0.1}
    assert 0 < len(ids_in(folder / "rare")) < len(far)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"field": "dump"}, r"dedup.semantic.field: documents already have a field 'dump'"),
        ({"distance": "dump"}, r"dedup.semantic.distance: documents already have a field 'dump'"),
        ({"field": "x", "distance": "x"}, r"field and distance are both 'x'; rename one"),
    ],
)
def test_a_field_that_documents_have_is_refused(fields: dict[str, str], message: str) -> None:
    semantic = {"embed": STATIC} | fields
    data = {"inputs": [{"path": "a.jsonl", "metadata": ["dump"]}], "dedup": {"semantic": semantic}}
    with pytest.raises(RecipeError, match=message):
        recipe_from_mapping(data | {"output": {"path": "o", "format": "jsonl"}}, folder=Path())


def vectors_run(folder: Path, vectors: npt.NDArray[np.float32], clusters: Sequence[int]) -> Slice:
    """A run of these vectors, of which the earlier ones have priority; every third is as long as the next."""
    table = vector_table(vectors.shape[1])
    rows = np.zeros(len(vectors), table.dtype)
    rows["number"] = rows["priority"][:, 1] = np.arange(len(vectors))
    rows["key"] = np.array(clusters, np.uint64) << np.uint64(40) | rows["number"] // np.uint64(3)
    rows["vector"] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    with RunWriter(folder / table.file, table, memory_bytes=1 << 30) as run:
        run.write(rows[np.random.default_rng(0).permutation(len(rows))])
    return Slice.whole(table, [Artifact(folder / table.file)])


def edges_of(folder: Path, vectors: Slice, similarity: float, memory_bytes: int) -> npt.NDArray[np.void]:
    folder.mkdir()
    found = find_neighbors(folder, vectors, similarity, memory_bytes)
    assert {path.name for path in folder.iterdir()} == {"edges.run", "waiting.run"}, "no file is left over"
    rows, _ = Slice.whole(EDGES, [Artifact(folder / "edges.run")]).read()
    assert found.edges == len(rows)
    return rows


def test_neighbors_are_all_pairs_of_a_cluster_however_little_memory_there_is(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    vectors = rng.standard_normal((4000, 4)).astype(np.float32)
    clusters = np.sort(rng.integers(0, 2, 4000)).tolist()
    run = vectors_run(tmp_path, vectors, clusters)
    rows, _ = run.read()
    unit = np.zeros((4000, 4))
    unit[rows["number"].astype(np.int64)] = rows["vector"]
    cosine = cosines(unit.astype(np.float16))
    same = np.equal.outer(clusters, clusters)
    expected = {(int(a), int(b)) for a, b in np.argwhere(np.triu(same & (cosine >= 0.99), 1))}
    for number, memory_bytes in enumerate((1 << 16, 1 << 30)):
        found = edges_of(tmp_path / str(number), run, 0.99, memory_bytes)
        assert {(int(a), int(b)) for a, b in zip(found["key"], found["lo"], strict=True)} == expected
        assert len(found) == len(expected) > 1000
        exact = cosine[found["key"].astype(np.int64), found["lo"].astype(np.int64)]
        np.testing.assert_allclose(found["jaccard"], exact, atol=1e-6)


def test_equal_vectors_have_the_cosine_1_and_few_edges_each(tmp_path: Path) -> None:
    vectors = np.tile(np.random.default_rng(1).standard_normal(7).astype(np.float32), (3000, 1))
    run = vectors_run(tmp_path, vectors, [0] * 3000)
    found = edges_of(tmp_path / "out", run, 1.0, 1 << 20)
    counts = np.bincount(found["lo"].astype(np.int64), minlength=3000)
    assert counts.tolist() == [min(number, 32) for number in range(3000)]
    assert {*found["key"].tolist()} == {*range(32)}, "those of the highest priority"


def test_an_index_of_what_semantic_leaves_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "user", {}, {"dedup": {"near": 0.8, "semantic": {"embed": STATIC}}})
    with pytest.raises(RecipeError, match=r"dedup.semantic: .*leave it out"):
        build_dedup_index(path, tmp_path / "index", progress=False)
