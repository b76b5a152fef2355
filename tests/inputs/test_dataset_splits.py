"""No test split goes into training without a word: Hub clones, caches of datasets, names of files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pyarrow as pa
import pytest

from shardkit.errors import RecipeError
from shardkit.storage import open_store
from shardkit.writers.inputs.dataset_splits import held_out_names
from shardkit.writers.inputs.scan import scan_inputs
from support.read_inputs import recipe
from support.remote_harness import fresh_url, put_folder

TRAIN, TEST = "data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"
VALIDATION, OTHER = "data/validation.jsonl", "extra/train.jsonl"
BOTH = "data_files: [{split: train, path: data/train-*}, {split: test, path: data/test-*}]"


def clone(folder: Path, *configs: str, names: tuple[str, ...] = (TRAIN, TEST)) -> Path:
    for name in (*names, ".gitattributes"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "x"}\n')
    entries = "".join(f"- {{{config}}}\n" for config in configs)
    (folder / "README.md").write_text(f"---\nlicense: mit\nconfigs:\n{entries}---\n# A dataset\n")
    return folder


def found(folder: Path, path: str = "in", **config: object) -> tuple[list[str], str]:
    """The files that are read, from the folder `in`, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        splits = scan_inputs(recipe(folder, {"path": path} | config))
    return [split.file.removeprefix("in/") for split in splits], "\n".join(str(one.message) for one in caught)


@pytest.mark.parametrize(
    ("configs", "names", "read"),
    [
        ([f"config_name: default, {BOTH}"], (TRAIN, TEST), [TRAIN]),
        (["config_name: x, data_files: data/train-*"], (TRAIN, TEST), [TRAIN]),
        (["config_name: x, data_files: [data/train-*, extra/*]"], (TRAIN, TEST, OTHER), [TRAIN, OTHER]),
        (["config_name: x, data_files: {train: data/train-*, test: data/t*}"], (TRAIN, TEST), [TRAIN]),
        (["config_name: x, data_files: [{split: train, path: ['data/{train,x}-*']}]"], (TRAIN,), [TRAIN]),
        (["config_name: x, data_dir: data"], (TRAIN, TEST, OTHER), [TRAIN]),
        (["config_name: x, data_dir: ./data, data_files: train-*"], (TRAIN, TEST), [TRAIN]),
        (["config_name: x, data_files: [{split: full, path: data/train-*}]"], (TRAIN, TEST), [TRAIN]),
        (["config_name: a, data_files: extra/*", f"config_name: b, default: true, {BOTH}"],
         (TRAIN, TEST, OTHER), [TRAIN]),
        (["config_name: a, data_files: extra/*", f"config_name: default, {BOTH}"],
         (TRAIN, TEST, OTHER), [TRAIN]),
    ],
)  # fmt: skip
def test_of_a_clone_of_a_repository_the_split_to_train_on_is_read(
    configs: list[str], names: tuple[str, ...], read: list[str], tmp_path: Path
) -> None:
    clone(tmp_path / "in", *configs, names=names)
    files, said = found(tmp_path)
    assert files == read
    if TEST in names and "split: test" in configs[-1]:
        assert f"{TEST} " in said
        assert "in the split test" in said
    store = open_store(fresh_url())
    put_folder(tmp_path / "in", store)
    assert found(tmp_path, store.url, base=store.url)[0] == read


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ([f"config_name: a, {BOTH}", f"config_name: b, {BOTH}"], "declares a, b, none as the default"),
        (["config_name: a, data_files: [{split: test, path: data/test-*}]"], "the splits test, and none is"),
        (["config_name: a, data_files: [{split: sft, path: data/tr*}, {split: gen, path: data/te*}]"],
         "the splits gen, sft, and none is train"),
        (["config_name: a, data_files: [{split: train, path: nothing/*}]"], "that configs names exists"),
    ],
)  # fmt: skip
def test_where_a_repository_does_not_decide_the_error_says_what_to_name(
    configs: list[str], words: str, tmp_path: Path
) -> None:
    clone(tmp_path / "in", *configs)
    with pytest.raises(RecipeError, match=rf"in/README.md: .*{words}"):
        found(tmp_path)
    assert found(tmp_path, "in/data/test-*") == ([TEST], "")


@pytest.mark.parametrize(
    "matter", ["configs: [", "configs: 5", "configs: [1, null]", "license: mit", "a: &a [*a]"]
)
def test_a_readme_without_configs_is_no_list_of_files(matter: str, tmp_path: Path) -> None:
    clone(tmp_path / "in")
    (tmp_path / "in/README.md").write_text(f"---\n{matter}\n---\n")
    with pytest.raises(RecipeError, match=r"in/README.md does not tell its format"):
        found(tmp_path)
    files, said = found(tmp_path, exclude="*.md")
    assert files == [TEST, TRAIN]
    assert f"{TEST} is read, but called like a test or validation split" in said


def test_of_a_cache_of_datasets_the_files_of_the_split_to_train_on_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "in/0.0.0/abc"
    folder.mkdir(parents=True)
    names = ["my-set-train-00000-of-00002.arrow", "my-set-train-00001-of-00002.arrow", "my-set-test.arrow"]
    table = pa.table({"text": ["x"]})
    for name in [*names, "cache-0123456789abcdef.arrow"]:
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table)
    (folder / "dataset_info.json").write_text(json.dumps({"splits": {"train": {}, "test": {}}}))
    files, said = found(tmp_path)
    assert files == [f"0.0.0/abc/{name}" for name in names[:2]]
    assert "my-set-test.arrow" in said


@pytest.mark.parametrize(
    ("names", "held_out"),
    [
        (["data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet"], [1]),
        (["train.jsonl", "dev.jsonl", "val.jsonl", "valid_0.jsonl", "evaluation.jsonl"], [1, 2, 3, 4]),
        (["default/train/0000.parquet", "default/validation/0000.parquet"], [1]),
        (["wiki.train.txt", "wiki.test.txt", "wiki.valid.txt"], [1, 2]),
        (["train_0001.jsonl.gz", "eval.jsonl.gz"], [1]),
        (["en-Train.csv", "en-TEST.csv"], [1]),
        (["latest.jsonl", "training.jsonl", "contest.jsonl", "devices.jsonl", "value.jsonl"], []),
        (["test.jsonl", "eval.jsonl"], []),
        (["train.py", "test_model.py", "evaluate.py"], []),
        (["train.txt", "a test of time.txt"], []),
        (["trains.jsonl", "test.jsonl"], []),
    ],
)
def test_files_that_are_called_like_a_test_split_beside_one_to_train_on_are_found(
    names: list[str], held_out: list[int]
) -> None:
    assert held_out_names(names) == sorted(names[at] for at in held_out)
