"""Folders that are datasets as inputs: MDS, save_to_disk, tars with a list; which of their files are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard

from shardkit.errors import RecipeError
from shardkit.formats.mds import MdsWriter
from shardkit.formats.tar import write_shard_list
from shardkit.formats.tar.shard_list import describe_tar
from shardkit.storage import open_store
from shardkit.writers.inputs.scan import scan_inputs
from support.foreign_tars import make_tar
from support.read_inputs import read, recipe


def put_mds(folder: Path, rows: int = 9, **settings: Any) -> None:
    """A dataset of several shards."""
    with MdsWriter(folder, columns={"text": "str"}, shard_bytes=400, **settings) as writer:
        for number in range(rows):
            writer.write({"text": f"{folder.name} {number} " * 20})
    (folder / "notes.md").write_text("no document")


def put_saved(folder: Path, files: int = 2) -> None:
    """What `Dataset.save_to_disk` writes, and a cache of `map` that it never removes."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for name in [*names, "cache-0123456789abcdef.arrow"]:
        table = pa.table({"text": [f"{name} {row}" for row in range(5)]})
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x", "_split": None}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}, indent=2))


def put_tars(folder: Path) -> None:
    """Tars with a list, and one that it does not name."""
    folder.mkdir(parents=True)
    infos = []
    for number in range(3):
        data = make_tar([(f"{number}-{row}.txt", b"text") for row in range(3)])
        (folder / f"part-{number}.tar").write_bytes(data)
        infos.append(
            describe_tar(f"part-{number}.tar", stored_bytes=len(data), raw_bytes=-1, samples=3, hashes={})
        )
    write_shard_list(folder, infos[:2])
    (folder / "report.html").write_text("no document")


def names(folder: Path, **config: Any) -> list[str]:
    return [split.file for split in scan_inputs(recipe(folder, config))]


def test_of_a_dataset_folder_the_files_that_its_list_names_are_read(tmp_path: Path) -> None:
    put_mds(tmp_path / "mds")
    put_saved(tmp_path / "saved")
    put_tars(tmp_path / "tars")
    shards = sorted(path.name for path in (tmp_path / "mds").glob("*.mds"))
    assert len(shards) == 9
    shutil.copy(tmp_path / "mds" / shards[0], tmp_path / "mds/stale.mds")
    for format in (None, "mds"):
        assert names(tmp_path, path="mds", format=format) == [f"mds/{name}" for name in shards]
    saved = [f"saved/data-0000{n}-of-00002.arrow" for n in range(2)]
    for format in (None, "arrow"):
        assert names(tmp_path, path="saved", format=format) == saved
    for format in (None, "wds"):
        assert names(tmp_path, path="tars", format=format) == ["tars/part-0.tar", "tars/part-1.tar"]
    everything = names(tmp_path, path=".")
    assert everything == sorted(
        [f"mds/{name}" for name in shards] + saved + ["tars/part-0.tar", "tars/part-1.tar"]
    )
    assert names(tmp_path, path="mds/*.mds")[-1] == "mds/stale.mds"
    table, bad, _ = read(tmp_path, "saved")
    assert table["text"].to_pylist() == [f"{name[6:]} {row}" for name in saved for row in range(5)]
    assert (read(tmp_path, "mds")[0].num_rows, bad) == (9, [])


def test_compressed_shards_are_read_where_the_raw_ones_are_not_there(tmp_path: Path) -> None:
    put_mds(tmp_path / "mds", compression="zstd")
    assert all(name.endswith(".mds.zstd") for name in names(tmp_path, path="mds"))
    texts = read(tmp_path, "mds")[0]["text"].to_pylist()
    packed = tmp_path / "mds/shard.00000.mds.zstd"
    packed.with_suffix("").write_bytes(
        zstandard.ZstdDecompressor().decompressobj().decompress(packed.read_bytes())
    )
    assert names(tmp_path, path="mds")[:2] == ["mds/shard.00000.mds", "mds/shard.00001.mds.zstd"]
    assert read(tmp_path, "mds")[0]["text"].to_pylist() == texts


def test_a_file_that_is_listed_and_not_there_is_an_error_unless_the_recipe_leaves_it_out(
    tmp_path: Path,
) -> None:
    put_mds(tmp_path / "mds")
    put_saved(tmp_path / "saved")
    (tmp_path / "mds/shard.00003.mds").unlink()
    (tmp_path / "saved/data-00001-of-00002.arrow").unlink()
    with pytest.raises(
        RecipeError, match=r"inputs\[0\].path: mds/index.json lists shard.00003.mds, which does not exist"
    ):
        names(tmp_path, path="mds")
    with pytest.raises(
        RecipeError, match=r"saved/state.json lists data-00001-of-00002.arrow, which does not exist"
    ):
        names(tmp_path, path="saved")
    assert len(names(tmp_path, path="mds", exclude=["mds/shard.0000[3-5].mds"])) == 6
    put_tars(tmp_path / "tars")
    tar = tmp_path / "tars/part-1.tar"
    tar.write_bytes(tar.read_bytes()[:1024])  # a whole sample: nothing in it tells of the others
    problem = r"tars/shards.json lists part-1.tar with 10,240 bytes, but the file has 1,024; download"
    with pytest.raises(RecipeError, match=problem):
        names(tmp_path, path="tars")
    assert names(tmp_path, path="tars", exclude="part-1.tar") == ["tars/part-0.tar"]
    assert names(tmp_path, path="saved", exclude="data-00001*") == ["saved/data-00000-of-00002.arrow"]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("mds/index.json", b"{", "not JSON"),
        ("mds/index.json", b'{"version": 2, "shards": [{}]}', "shard"),
        ("saved/state.json", b"[" * 100_000, "not JSON"),
        ("saved/state.json", b'{"_data_files": []}', "names no data files"),
        ("saved/state.json", b'{"_data_files": [{"filename": "../x.arrow"}]}', "leaves the dataset's folder"),
        ("saved/state.json", b'{"_data_files": [{"filename": 1}], "_indices_files": [1]}', "flatten_indices"),
        ("tars/shards.json", b"{}", "is not a list of tar shards"),
    ],
)
def test_a_list_that_is_damaged_or_hostile_is_refused(
    tmp_path: Path, name: str, data: bytes, words: str
) -> None:
    put_mds(tmp_path / "mds")
    put_saved(tmp_path / "saved")
    put_tars(tmp_path / "tars")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(RecipeError, match=rf"inputs\[0\].path: {name}: .*{words}|{words}"):
        names(tmp_path, path=name.split("/")[0])


def test_of_a_saved_dataset_with_splits_the_one_to_train_on_is_read_and_the_others_are_named(
    tmp_path: Path,
) -> None:
    for split in ("train", "test"):
        put_saved(tmp_path / "all" / split, 1)
    (tmp_path / "all/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.warns(RuntimeWarning, match=r"all/test/.* and 1 more are not read: in the split test"):
        assert names(tmp_path, path="all") == ["all/train/data-00000-of-00001.arrow"]
    assert names(tmp_path, path="all/test") == ["all/test/data-00000-of-00001.arrow"]
    shutil.rmtree(tmp_path / "all/train")
    with pytest.raises(RecipeError, match=r"all/dataset_dict.json: .* the splits test, and none is train"):
        names(tmp_path, path="all")


def test_files_that_only_have_the_name_of_a_list_are_data(tmp_path: Path) -> None:
    for name in ("index.json", "state.json", "shards.json", "dataset_dict.json", "sub/a.jsonl"):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text('{"text": "a document"}\n')
    assert len(names(tmp_path, path="d")) == 5
    put_mds(tmp_path / "mds")
    assert "mds/index.json" in names(tmp_path, path="mds", format="jsonl")


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_of_text_that_shardkit_wrote_the_listed_files_are_read(tmp_path: Path, ending: str) -> None:
    files = [f"text-0000{n}.{ending}" for n in range(3)]
    for name in (*files, f"provenance/part.{ending}", "report.html"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_bytes(b"x")
    kinds = [{"name": name, "documents": 1, "bytes": 1, "hashes": {}} for name in files[:2]]
    facts = {"version": 1, "format": ending, "columns": {"text": "str"}, "files": kinds}
    (tmp_path / "out/documents.json").write_text(json.dumps(facts))
    for format in (None, ending):
        assert sorted(set(names(tmp_path, path="out", format=format))) == [
            f"out/{name}" for name in files[:2]
        ]
    (tmp_path / "out/documents.json").write_text(json.dumps(facts | {"version": 9}))
    with pytest.raises(RecipeError, match=r"out/documents.json: "):
        names(tmp_path, path="out")
    (tmp_path / "out/documents.json").write_text('{"text": "a document"}')
    assert "out/documents.json" in names(tmp_path, path="out", exclude="*.html")


def test_merged_datasets_are_read_once(tmp_path: Path) -> None:
    for part in ("a", "b"):
        put_mds(tmp_path / "all" / part, 3)
    index: dict[str, Any] = {"version": 2, "shards": []}
    for part in ("a", "b"):
        shards = json.loads((tmp_path / "all" / part / "index.json").read_text())["shards"]
        for shard in shards:
            shard["raw_data"]["basename"] = f"{part}/{shard['raw_data']['basename']}"
        index["shards"] += shards
    (tmp_path / "all/index.json").write_text(json.dumps(index))
    assert read(tmp_path, "all")[0]["text"].to_pylist() == [f"{p} {n} " * 20 for p in "ab" for n in range(3)]


def test_datasets_in_a_store_are_read_by_the_same_rules(tmp_path: Path) -> None:
    put_mds(tmp_path / "d/mds", compression="zstd")
    put_saved(tmp_path / "d/saved")
    put_tars(tmp_path / "d/tars")
    base = f"memory://dataset-folders-{tmp_path.name}"
    store = open_store(base)
    for path in sorted((tmp_path / "d").rglob("*")):
        if path.is_file():
            store.put(path.relative_to(tmp_path).as_posix(), path)
    local = scan_inputs(recipe(tmp_path, "d"))
    remote = scan_inputs(recipe(tmp_path, {"path": f"{base}/d", "base": base}))
    assert [split.file for split in remote] == [split.file for split in local]
    for kind, text in (("mds", "text"), ("saved", "text"), ("tars", "txt")):
        here = read(tmp_path, f"d/{kind}", text=text)[0]
        there = read(tmp_path, f"{base}/d/{kind}", text=text, base=base)[0]
        assert here.num_rows
        assert here.equals(there)
    store.delete("d/mds/shard.00004.mds.zstd")
    with pytest.raises(
        RecipeError, match=r"d/mds/index.json lists shard.00004.mds.zstd, which does not exist"
    ):
        scan_inputs(recipe(tmp_path, {"path": f"{base}/d", "base": base}))
    part = {"path": f"{base}/d/mds", "base": base, "exclude": "*00004*"}
    assert len(scan_inputs(recipe(tmp_path, part))) == 8
