from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import RecipeError
from shardkit.hashing import digest_of
from shardkit.writers.dedup.config import DedupConfig, ExactDedupConfig
from shardkit.writers.filters.config import FilterEntry
from shardkit.writers.recipe.recipe import Recipe, load_recipe, recipe_from_mapping, recipe_schema

SMALLEST: dict[str, Any] = {
    "inputs": [{"path": "data/*.jsonl"}],
    "tokenizer": {"path": "tokenizer.json", "eos": "<|endoftext|>"},
    "output": {"path": "out"},
}
TEXT = """
inputs:
  - path: data/*.jsonl.gz
    source: docs
filters: [{profile: minimal}, {length: {min_words: 50}}, {gopher_quality: }]
dedup: {exact: {}}
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 512, strategy: concat}
output: {path: out, format: wds, shard_bytes: 1MiB, hashes: [xxh64, sha256]}
memory: 4GB
max_bad_fraction: 1e-3
"""


PLAIN = TEXT.partition("memory:")[0]


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(**changes: object) -> str:
    with pytest.raises(RecipeError) as caught:
        recipe_from_mapping(SMALLEST | changes, folder=Path())
    return str(caught.value)


def test_a_full_recipe_reads_as_written(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, TEXT))
    assert recipe.output.shard_bytes == 1 << 20
    assert recipe.memory == 4 * 10**9
    assert recipe.max_bad_fraction == 0.001
    assert recipe.dedup.exact is not None
    assert [name for name, _ in recipe.filter_chain()] == ["length", "length", "gopher_quality"]
    assert recipe.sources == ("docs",)
    assert recipe.folder == tmp_path
    assert recipe.resolve("out") == tmp_path / "out"


def test_documented_defaults_hold() -> None:
    recipe = recipe_from_mapping(SMALLEST, folder=Path())
    assert recipe.pack.model_dump() == {
        "sequence_length": 2048,
        "strategy": "best_fit",
        "order": "shuffled",
        "row_bos": False,
        "max_repetitions": None,
    }
    assert recipe.output.model_dump() == {
        "path": "out",
        "format": "mds",
        "shard_bytes": 1 << 26,
        "compression": None,
        "hashes": ("xxh64",),
        "prefixes": None,
        "pack": None,
        "where": None,
    }
    assert (recipe.work, recipe.seed, recipe.memory, recipe.max_bad_fraction) == (None, 17, 2 * 10**9, 0)
    assert recipe.dedup.exact is None
    assert recipe.sources == ("input-0",)


def test_messages_name_what_yaml_has_and_no_class_of_ours() -> None:
    assert "inputs[0]: should be 'data/*.jsonl' or {path: data/*.jsonl, text: text}, got 5" in problems(
        inputs=5
    )
    assert "dedup: should be a mapping, such as {exact: true, near: 0.8}, got 3" in problems(dedup=3)
    assert "dedup.near: should be 0.8 or {similarity: 0.8}, got 'often'" in problems(dedup={"near": "often"})


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"filters": "gopher_quality"}, {"filters": [{"gopher_quality": {}}]}),
        ({"filters": ["gopher", "pii"]}, {"filters": [{"profile": "gopher"}, {"pii": {}}]}),
        ({"filters": {"length": {"min_words": 5}}}, {"filters": [{"length": {"min_words": 5}}]}),
        ({"filters": [{"pii": True}]}, {"filters": [{"pii": {}}]}),
        (
            {"filters": [{"python": {"file": "mine.py", "function": "keep"}}]},
            {"filters": [{"python": {"file": "mine.py", "function": "mine:keep"}}]},
        ),
        ({"filters": {"language": {"languages": "en"}}}, {"filters": [{"language": {"languages": ["en"]}}]}),
        ({"dedup": {"exact": True, "near": 0.7}}, {"dedup": {"exact": {}, "near": {"similarity": 0.7}}}),
        ({"dedup": {"url": True}}, {"dedup": {"url": {"keep": "first"}}}),
        ({"dedup": {"url": {"drop_parameters": "sid"}}}, {"dedup": {"url": {"drop_parameters": ["sid"]}}}),
        ({"dedup": {"near": 1}}, {"dedup": {"near": {"similarity": 1.0}}}),
        (
            {"dedup": {"exact": False, "lines": True, "near": True}},
            {"dedup": {"exact": None, "lines": {}, "near": {}}},
        ),
        ({"inputs": "a.jsonl"}, {"inputs": [{"path": "a.jsonl"}]}),
        ({"inputs": {"path": "a", "metadata": "b"}}, {"inputs": [{"path": "a", "metadata": ["b"]}]}),
        ({"output": "out"}, {"output": {"path": "out"}}),
    ],
)
def test_a_shorthand_makes_the_recipe_of_the_long_form(
    short: dict[str, object], long: dict[str, object]
) -> None:
    brief, full = (recipe_from_mapping(SMALLEST | changes, folder=Path()) for changes in (short, long))
    assert brief == full
    assert digest_of(brief.content()) == digest_of(full.content())


def test_files_left_out_are_part_of_what_the_recipe_says_and_recipes_without_them_are_as_before() -> None:
    plain = recipe_from_mapping(SMALLEST, folder=Path())
    changed = recipe_from_mapping(
        SMALLEST | {"inputs": [{"path": "data/*.jsonl", "exclude": "a*"}]}, folder=Path()
    )
    assert "exclude" not in plain.content()["inputs"][0]
    assert changed.content()["inputs"][0]["exclude"] == ["a*"]


def test_no_duplicate_removal_may_be_written_as_null(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT.replace("dedup: {exact: {}}", "dedup: null"))
    assert load_recipe(path).dedup == DedupConfig()
    assert load_recipe(path, ["dedup.exact={}"]).dedup == DedupConfig(exact=ExactDedupConfig())


def test_plain_data_of_a_recipe_has_a_digest_free_of_places_and_makes_the_same_recipe(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    for folder in (here, there):
        folder.mkdir()
    one, two = load_recipe(written(here, TEXT)), load_recipe(written(there, TEXT))
    data = one.model_dump(mode="json")
    assert digest_of(data) == digest_of(two.model_dump(mode="json"))
    assert recipe_from_mapping(json.loads(json.dumps(data)), folder=here) == one
    assert pickle.loads(pickle.dumps(one)) == one


def test_all_problems_are_told_at_once_with_key_paths_and_the_closest_key(tmp_path: Path) -> None:
    text = TEXT.replace("source: docs", "txt: body").replace("min_words: 50", 'min_words: "50"')
    text = text.replace("{gopher_quality: }", "{gopher_quality: {min_words: 3}}").replace("eos:", "eso:")
    with pytest.raises(RecipeError) as caught:
        load_recipe(written(tmp_path, text))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'recipe.yaml'}: 5 problems\n")
    assert "  inputs[0].txt: unknown key; did you mean 'text'?" in message
    assert (
        "  filters[1].length.min_words: should be a whole number without quotes: write 50, got '50'"
        in message
    )
    assert "  filters[2].gopher_quality.min_words: unknown key; did you mean 'min_doc_words'?" in message
    assert "  tokenizer.eos: required, but missing" in message
    assert "  tokenizer.eso: unknown key; did you mean 'eos'?" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"filters": [{}]}, "filters[0]: each entry of the list is one filter, but this one has none"),
        ({"filters": [{"length": {}, "profile": "minimal"}]}, "this one has length, profile"),
        ({"filters": [{"profile": "finewebb"}]}, "filters[0].profile: should be 'c4', 'dolma'"),
        ({"filters": ["lenght"]}, "filters[0]: there is no filter 'lenght'; did you mean 'length'?"),
        ({"filters": ["zzz"]}, "filters[0]: there is no filter 'zzz'; known: length, ratios, "),
        (
            {"filters": [{"length": {"min_words": 9, "max_words": 8}}]},
            "filters[0].length: min_words 9 is more than max_words 8: no document can pass both",
        ),
        (
            {"filters": [{"perplexity": {"model": "m", "min_perplexity": 2.5, "max_perplexity": 2}}]},
            "min_perplexity 2.5 is more than max_perplexity 2.0",
        ),
        (
            {"filters": [{"python": {"function": "keep"}}]},
            "filters[0].python.function: write module:function, such as my_filters:keep, got 'keep'",
        ),
        (
            {"filters": [{"language": {"threshold": "high"}}]},
            "threshold: should be a number, got 'high'; or should be a mapping of keys to values, got 'high'",
        ),
        ({"max_bad_fraction": "5%"}, "max_bad_fraction: should be a number: write 0.05 for 5%, got '5%'"),
        ({"tokenizer": "tokenizer.json"}, "tokenizer.eos: required, but missing, such as '<|endoftext|>'"),
        ({"inputs": []}, "inputs: "),
        ({"inputs": [{"path": "file://x"}]}, "inputs[0].path: 'file://x' names the host 'x'"),
        ({"inputs": [{"path": "$DATA/x"}]}, "inputs[0].path: '$DATA/x' begins with a variable"),
        ({"inputs": [{"path": "s3://"}]}, "inputs[0].path: 's3://' is not a valid URL"),
        (
            {"inputs": [{"path": "a", "base": "s3://b"}]},
            "inputs[0]: base must be a folder above the path, or a URL",
        ),
        (
            {"inputs": [{"path": "s3://b/a", "base": "b"}]},
            "inputs[0]: base must be a folder above the path, or a URL",
        ),
        ({"output": {"path": "s3://"}}, "output.path: 's3://' is not a valid URL"),
        ({"output": {"path": "$OUT/x"}}, "output.path: '$OUT/x' begins with a variable"),
        ({"work": "~nobody-of-this-name/x"}, "work: '~nobody-of-this-name/x': there is no such user"),
        ({"scratch": "s3://bucket/work"}, "scratch: 's3://bucket/work' is a URL"),
        ({"dedup": {"near": {"similarity": 0}}}, "dedup.near.similarity: should be more than 0"),
        ({"dedup": {"near": {"bands": 7}}}, "dedup.near: only one of bands and rows is set"),
        ({"dedup": {"near": {"bands": 20, "rows": 6}}}, "20 bands x 6 rows need 120 permutations"),
        ({"dedup": {"near": {"scope": "source", "against": ["x"]}}}, "use scope: global"),
        ({"dedup": {"near": {"scope": {"field": "dump"}, "against": ["x"]}}}, "use scope: global"),
        (
            {"dedup": {"near": {"scope": {"field": "dump"}}}},
            "dedup.near.scope: no input keeps a field 'dump'",
        ),
        ({"dedup": {"near": {"scope": "language"}}}, "dedup.near.scope: languages are known only"),
        ({"dedup": {"near": {"scope": "host"}}}, "dedup.near.scope: should be"),
        ({"dedup": {"url": {"drop_parameters": ["*_id"]}}}, "dedup.url.drop_parameters[0]: should"),
        ({"output": {"path": "o", "shard_bytes": "3x"}}, "output.shard_bytes: not a size: '3x'"),
        (
            {"output": {"path": "o", "shard_bytes": "4GiB"}},
            "output.shard_bytes: should be less than 4,294,967,296 (4,096 MiB)",
        ),
        ({"output": {"path": "o", "hashes": ["xxh9"]}}, "output.hashes[0]: unknown hash 'xxh9'"),
        ({"output": {"path": "o", "compression": "rar"}}, "output.compression: "),
        ({"output": {"path": "o", "format": "wds", "compression": "zstd"}}, "tar shards are never"),
        (
            {"output": {"path": "o", "format": "tar"}},
            "output.format: should be 'mds', 'wds', 'parquet', 'jsonl', 'tokens', 'megatron', 'olmo', "
            "'nanogpt', 'llmc' or 'datatrove', got 'tar'",
        ),
        ({"pack": {"sequence_length": 1}}, "pack.sequence_length: "),
        ({"pack": {"sequence_length": True}}, "pack.sequence_length: "),
        ({"max_bad_fraction": 1.5}, "max_bad_fraction: "),
        ({"max_bad_fraction": float("nan")}, "max_bad_fraction: "),
        ({"seed": -1}, "seed: "),
        ({"memory": True}, "memory: not a size"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_at_its_key(changes: dict[str, object], words: str) -> None:
    assert words in problems(**changes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("inputs: [\nseed: 3", "line 2, column 8: expected"),
        ("seed: 1\noutput: {path: a, path: b}", "line 2, column 19: key 'path' appears twice"),
        ("- a\n- b", "a recipe must be a mapping of keys, but this file is a list"),
        ("", "this file is empty"),
        ("seed: !!python/object:os.system x", "line 1"),
    ],
)
def test_bad_yaml_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(written(tmp_path, text))
    assert words in str(caught.value)
    assert str(tmp_path / "recipe.yaml") in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        "9" * 5000,
        "9" * 4000,
        "9" * 41,
        "-" + "9" * 5000,
        "0x" + "f" * 20_000,
        "'" + "9" * 4000 + "'",
        "'" + "9" * 400 + ".5GB'",
        "[" * 400 + "]" * 400,
        "2001-13-45",
        "!!binary a",
    ],
)
@pytest.mark.parametrize("key", ["seed", "memory", "limit", "max_bad_fraction"])
def test_values_beyond_reason_are_refused_in_few_words(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(written(tmp_path, f"{PLAIN}\n{key}: {value}\n"))
    assert len(str(caught.value)) < 400 + len(str(tmp_path))
    with pytest.raises(RecipeError) as caught:
        load_recipe(written(tmp_path, PLAIN), [f"{key}={value}"])
    assert len(str(caught.value)) < 600 + len(str(tmp_path))


def test_bounds_that_are_no_sizes_are_not_said_in_bytes() -> None:
    assert "MiB" not in problems(seed=1 << 70)
    assert "(256 MiB)" in problems(memory=1)
    assert "too long to show" in problems(seed=10**5000)


@pytest.mark.parametrize(
    "override", [f"inputs[{'9' * 5000}]=1", f"inputs.{'9' * 5000}.path=1", "seed=[" * 3000]
)
def test_overrides_beyond_reason_are_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(RecipeError, match=r"override|unknown key"):
        load_recipe(written(tmp_path, PLAIN), [override])


def test_a_missing_or_binary_recipe_is_a_recipe_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no such file; `shardkit init"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"seed: \xff")
    with pytest.raises(RecipeError, match="byte 6 is not UTF-8"):
        load_recipe(tmp_path / "b.yaml")


def test_overrides_reach_every_key_and_are_read_as_yaml(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT)
    recipe = load_recipe(
        path,
        [
            "pack.sequence_length=64",
            "filters[1].length.min_words=7",
            "inputs.0.source=web",
            "dedup={exact: null}",
            "output.hashes=[]",
            "filters[3]={fineweb_quality: }",
            "work=w=1",
        ],
    )
    assert recipe.pack.sequence_length == 64
    assert recipe.pack.strategy == "concat"
    assert recipe.filters[1].length is not None
    assert recipe.filters[1].length.min_words == 7
    assert recipe.sources == ("web",)
    assert recipe.dedup.exact is None
    assert recipe.output.hashes == ()
    assert recipe.filter_chain()[-1][0] == "fineweb_quality"
    assert recipe.work == "w=1"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", "is not of the form key.sub=value"),
        ("=3", "is not of the form key.sub=value"),
        ("filters[9].length.min_words=1", "there is no item 9 in a list of 3"),
        ("memory.deep=1", "cannot be a key of text"),
        ("seed=[", "line 1"),
        ("pack.sequence_lenght=3", "pack.sequence_lenght: unknown key; did you mean 'sequence_length'?"),
    ],
)
def test_an_override_that_fits_nowhere_is_refused(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(written(tmp_path, TEXT), [override])
    assert words in str(caught.value)


def test_every_key_is_described_in_the_schema() -> None:
    schema = recipe_schema()
    models = {"Recipe": schema} | schema["$defs"]
    missing = [
        f"{name}.{key}"
        for name, model in models.items()
        for key, field in model.get("properties", {}).items()
        if not field.get("description")
    ]
    assert not missing
    objects = [model for model in models.values() if "properties" in model]
    assert all(model.get("additionalProperties") is False for model in objects)
    assert set(schema["properties"]) == set(Recipe.model_fields)


def test_a_recipe_with_every_filter_is_read_without_numba_arrow_or_a_model(tmp_path: Path) -> None:
    """So that commands that only read a recipe start at once, and on machines without the optional models."""
    required: dict[str, object] = {
        "url_lists": {"hosts": ["hosts.txt"]},
        "bad_words": {"lists": ["words.txt"]},
        "stop_words": {"languages": {"en": ["the"]}},
        "python": {"function": "module:function", "file": "filter.py"},
        "classifier": {"model": "model.bin", "label": "good"},
        "decontamination": {"evaluations": [{"path": "test.jsonl"}]},
        "perplexity": {"model": "model.arpa"},
        "ask": {"url": "http://localhost/v1", "model": "m", "prompt": "{text}", "score": {}},
        "scores": {"path": "scores.parquet", "columns": {"quality": None}},
        "buckets": {"scores": [{"column": "quality"}]},
        "unigram_log_prob": {"frequencies": "words.csv"},
        "profile": "fineweb",
    }
    names = [name for name in FilterEntry.model_fields if name != "by_language"]
    entries: list[dict[str, object]] = [{name: required.get(name, {})} for name in names]
    entries.append({"gopher_quality": {}, "by_language": {"en": {"min_doc_words": 3}}})
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({**SMALLEST, "filters": entries}))
    heavy = ["numba", "pyarrow", "tokenizers", "torch"]
    code = (
        "import sys; from shardkit.writers.recipe.recipe import load_recipe\n"
        f"recipe = load_recipe({str(path)!r})\n"
        f"print(len(recipe.filter_chain()) > {len(entries)}, [m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "True []", done.stderr


def test_a_tilde_and_a_file_url_are_paths_in_every_place_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    written = {
        "inputs": [{"path": "~/in"}],
        "tokenizer": {"path": "~/t.json", "eos": "<e>"},
        "output": {"path": "file:///out/a%20b"},
        "work": "~/work",
        "scratch": "file:///scratch",
    }
    recipe = recipe_from_mapping(written, folder=tmp_path)
    assert recipe.inputs[0].path == "/home/me/in"
    assert recipe.tokenizer is not None
    assert recipe.tokenizer.path == "/home/me/t.json"
    assert recipe.datasets()[0].output.path == "/out/a b"
    assert (recipe.work, recipe.scratch) == ("/home/me/work", "/scratch")
