"""Folders of images read in place: torchvision's rows and labels, the loader's guarantees, clear errors."""

from __future__ import annotations

import csv
import io
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardkit.cli.main import main
from shardkit.datasets import image_files
from shardkit.datasets.dataset import Dataset, open_dataset
from shardkit.datasets.image_files import find_image_files
from shardkit.errors import ShardError, ShardNotFoundError
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.storage import open_store
from shardkit.storage.store import StoreError
from support.remote_harness import QUICK, fresh_url, put_folder
from support.resume import assert_exact_resume, batches

# Classes whose names sort differently with and without the slash behind them, and folders below them.
FILES = [
    *(f"cat/{number:03d}.jpg" for number in range(40)),
    *(f"a/z{number}.PNG" for number in range(3)),
    *(f"a/deep/er/{number}.jpeg" for number in range(4)),
    *(f"a-b/{number}.jpg" for number in range(9)),
    "Dog/größe & 1@2.jpg",
]


def picture(number: int, name: str) -> bytes:
    stream = io.BytesIO()
    kind = "PNG" if name.lower().endswith("png") else "JPEG"
    Image.new("RGB", (5 + number % 3, 4), (number, 2, 3)).save(stream, kind)
    return stream.getvalue()


def write(folder: Path, names: list[str]) -> Path:
    for number, name in enumerate(names):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture(number, name))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = write(tmp_path_factory.mktemp("images") / "photos", FILES)
    (found / "cat" / "notes.txt").write_text("no image")
    (found / ".hidden").mkdir()
    (found / ".hidden" / "1.jpg").write_bytes(b"")
    return found


@pytest.fixture(scope="module")
def places(folder: Path) -> dict[str, str]:
    url = fresh_url()
    put_folder(folder, open_store(url))
    return {"local": str(folder), "remote": url}


def as_torchvision_does(folder: Path) -> list[tuple[str, int]]:
    """What `torchvision.datasets.folder.make_dataset` returns, written down from its documentation."""
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
    found = []
    for label, name in enumerate(classes):
        for root, _, files in sorted(os.walk(folder / name, followlinks=True)):
            for file in sorted(files):
                if file.lower().endswith((".jpg", ".jpeg", ".png")):
                    found.append(((Path(root) / file).relative_to(folder).as_posix(), label))
    return found


@pytest.mark.parametrize("place", ["local", "remote"])
def test_rows_are_those_of_an_image_folder(places: dict[str, str], folder: Path, place: str) -> None:
    dataset = open_dataset(places[place], decode="basic")
    rows = list(dataset)
    assert [(row["path"], row["label"]) for row in rows] == as_torchvision_does(folder)
    assert all(row["image"] == (folder / str(row["path"])).read_bytes() for row in rows)
    assert [column.name for column in dataset.columns] == ["image", "label", "path"]
    assert len(dataset.manifest.shards) > 1
    assert dataset.fingerprint == open_dataset(places["local"]).fingerprint


@pytest.mark.parametrize("place", ["local", "remote"])
def test_loaders_read_them_and_resume_exactly(places: dict[str, str], folder: Path, place: str) -> None:
    def make() -> StreamingLoader:
        return StreamingLoader(places[place], **grouped(dict(QUICK) | {"batch_size": 5, "decode": "rgb8"}))

    assert_exact_resume(make, steps=12)
    expected = as_torchvision_does(folder)
    with make() as loader:
        seen = []
        for batch in loader:
            for row, path, label in zip(
                batch["sample_id"].tolist(), batch["path"], batch["label"], strict=True
            ):
                assert (path, label) == expected[row]
                seen.append(row)
            for image, path in zip(batch["image"], batch["path"], strict=True):
                with Image.open(folder / path) as file:
                    np.testing.assert_array_equal(image, np.asarray(file))
        assert set(seen) == set(range(len(FILES)))


def test_a_folder_without_classes_has_no_labels(tmp_path: Path) -> None:
    dataset = open_dataset(write(tmp_path, [f"{number}.jpg" for number in range(5)]), decode="rgb8")
    assert [row["path"] for row in dataset] == [f"{number}.jpg" for number in range(5)]
    assert dataset[0].keys() == {"image", "path"}


def test_columns_select_what_a_row_has_and_images_are_not_read_without_need(tmp_path: Path) -> None:
    folder = write(tmp_path, ["a/1.jpg", "b/2.jpg"])
    dataset = open_dataset(folder, columns=["label"])
    (folder / "a" / "1.jpg").unlink()
    assert list(dataset) == [{"label": 0}, {"label": 1}]


def test_they_convert_to_shards(folder: Path, tmp_path: Path) -> None:
    assert main(["convert", str(folder), str(tmp_path / "mds")]) == 0
    for found, row in zip(
        open_dataset(tmp_path / "mds", decode="basic"), open_dataset(folder, decode="basic"), strict=True
    ):
        assert found == row
    assert main(["convert", str(folder), str(tmp_path / "wds"), "--format", "wds"]) == 0
    assert len(open_dataset(tmp_path / "wds")) == len(FILES)
    for verb in ("verify", "info"):
        assert main([verb, str(folder)]) == 0


def test_copies_have_one_fingerprint_and_other_files_another(folder: Path, tmp_path: Path) -> None:
    first = open_dataset(folder).fingerprint
    assert open_dataset(write(tmp_path / "copy", FILES)).fingerprint == first
    renamed = [name.replace("cat/", "cow/") for name in FILES]
    assert open_dataset(write(tmp_path / "renamed", renamed)).fingerprint != first
    assert open_dataset(write(tmp_path / "fewer", FILES[1:])).fingerprint != first


def test_a_damaged_or_replaced_image_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, ["a/1.jpg", "a/2.jpg", "b/3.jpg"])
    (folder / "a" / "2.jpg").write_bytes(b"\xff\xd8\xff no image")
    with StreamingLoader(folder, batch_size=1, shuffle="none") as loader:
        assert next(iter(loader))["path"] == ["a/1.jpg"]
        iterator = iter(loader)
        with pytest.raises(ShardError, match=r"a/2\.jpg: image cannot be read.*exclude=\[1\]"):
            list(iterator)
    dataset = open_dataset(folder)
    (folder / "b" / "3.jpg").write_bytes(b"shorter")
    with pytest.raises(ShardError, match="was replaced"):
        dataset[2]


def test_files_beside_classes_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"images in folders \(a/1\.jpg\), which are classes.*\(top\.jpg\)"):
        open_dataset(write(tmp_path / "both", ["a/1.jpg", "top.jpg"]))
    (tmp_path / "empty" / "a").mkdir(parents=True)
    with pytest.raises(ShardNotFoundError, match="and for images"):
        open_dataset(tmp_path / "empty")


def test_too_many_files_are_refused_and_many_in_a_store_are_warned_of(
    places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_files, "SLOW_FILES", 50)
    with pytest.warns(RuntimeWarning, match=r"57 image files.*shardkit convert"):
        find_image_files(places["remote"])
    monkeypatch.setattr(image_files, "MAX_FILES", 50)
    for url in places.values():
        with pytest.raises(ShardError, match="more than 50 image files"):
            find_image_files(url)


def test_a_remote_file_that_is_replaced_while_the_dataset_is_open_is_an_error(
    places: dict[str, Any], folder: Path
) -> None:
    url = fresh_url()
    put_folder(folder, open_store(url))
    dataset: Dataset = open_dataset(url)
    open_store(url).put("cat/000.jpg", (folder / "cat" / "001.jpg").read_bytes() + b"more")
    with pytest.raises(StoreError, match=r"cat/000\.jpg: has version"):
        list(dataset)
    with StreamingLoader(url, **grouped(dict(QUICK) | {"batch_size": 5})) as loader:
        assert len(list(islice(batches(loader), 11))) == 11


# Lists of images.

LISTED = [
    ("cat/000.jpg", 3, 0.5, 'größe, "x"'),
    ("a/z1.PNG", -1, 2.0, "two\nlines"),
    ("cat/000.jpg", 0, 1e3, ""),
]


def csv_of(rows: list[tuple[str, int, float, str]]) -> bytes:
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerows([("file_name", "label", "score", "caption"), *rows])
    return stream.getvalue().encode("utf-8-sig")


def jsonl_of(rows: list[tuple[str, int, float, str]]) -> bytes:
    names = ("file_name", "label", "score", "caption")
    return "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows).encode()


@pytest.mark.parametrize("place", ["local", "remote"])
@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_lists_have_their_own_order_and_columns(folder: Path, tmp_path: Path, place: str, name: str) -> None:
    path = str(write(tmp_path / "photos", FILES))
    if place == "remote":
        path = fresh_url()
        put_folder(folder, open_store(path))
    open_store(path).put(name, csv_of(LISTED) if name.endswith("csv") else jsonl_of(LISTED))
    dataset = open_dataset(f"{path}/{name}", decode="basic")
    assert [tuple(row[c] for c in ("path", "label", "score", "caption")) for row in dataset] == LISTED
    assert {column.name: column.encoding for column in dataset.columns} == {
        "image": "jpeg", "label": "int", "score": "float64", "caption": "str", "path": "str",
    }  # fmt: skip
    assert [row["image"] for row in dataset] == [(folder / row[0]).read_bytes() for row in LISTED]
    with StreamingLoader(f"{path}/{name}", batch_size=3, shuffle="none", decode="rgb8") as loader:
        [batch] = loader
    assert batch["label"].tolist() == [3, -1, 0]
    assert batch["score"].tolist() == [0.5, 2.0, 1000.0]
    assert main(["convert", f"{path}/{name}", str(tmp_path / "mds")]) == 0
    assert list(open_dataset(tmp_path / "mds", decode="basic")) == list(dataset)
    first = dataset.fingerprint
    assert open_dataset(path).fingerprint == first
    changed = [(*LISTED[0][:1], 4, *LISTED[0][2:]), *LISTED[1:]]
    open_store(path).put(name, csv_of(changed) if name.endswith("csv") else jsonl_of(changed))
    assert open_dataset(f"{path}/{name}").fingerprint != first


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "", "lists no images"),
        (
            "a.csv",
            "name,label\n1.jpg,2\n",
            "no file_name or path or file or image, only name, label; for text: shardkit init",
        ),
        ("a.csv", "path\nmissing.jpg\n", "lists 'missing.jpg', but there is no such file"),
        ("a.csv", "path\n../1.jpg\n", "not the name of a file relative"),
        ("a.csv", "path\n/etc/passwd\n", "not the name of a file relative"),
        ("a.csv", "path\nfile://x/1.jpg\n", "not the name of a file relative"),
        ("a.csv", "path,label\n1.jpg\n", "row 1 has fewer values"),
        ("a.csv", "path\n1.jpg,2\n", "row 1 has other columns"),
        ("a.csv", 'path\n"1.jpg', "cannot be read"),
        ("a.csv", "file_name,image\n1.jpg,2\n", "'file_name' and 'image': rename"),
        ("metadata.jsonl", '{"path": 3}', "image 1 is 3, not the name"),
        ("metadata.jsonl", '{"path": "1.jpg"}\n{"file": "1.jpg"}', "row 2 has other columns"),
        ("metadata.jsonl", "[1]", "row 1 has other columns"),
        ("metadata.jsonl", "{", "cannot be read"),
        ("metadata.jsonl", "[" * 100_000, "cannot be read"),
        ("metadata.jsonl", "\udcff", "cannot be read"),
    ],
)
def test_malformed_lists_are_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    write(tmp_path, ["1.jpg"])
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ShardError, match=says):
        open_dataset(tmp_path / name)


def test_an_empty_image_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, ["a/1.jpg"])
    (folder / "a" / "2.jpg").write_bytes(b"")
    for path in (str(folder), fresh_url()):
        if path != str(folder):
            put_folder(folder, open_store(path))
        dataset = open_dataset(path)
        assert dataset[0]["path"] == "a/1.jpg"
        with pytest.raises(ShardError, match=r"a/2\.jpg: image cannot be read"):
            dataset[1]
