"""WebDataset tars between webdataset and us: whatever one side writes, the other reads equal.

The real TarWriter, ShardWriter and WebDataset (and wids, where it is installed), over every encoder they have
and names of every kind. Where webdataset loses samples in silence we raise; the tests' names say so.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import tarfile
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import webdataset as wds
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from webdataset.writer import default_handlers

from shardkit.datasets.dataset import open_dataset
from shardkit.errors import ShardError
from shardkit.formats import tar
from shardkit.writers import build
from support import peers
from support.small_build import make_corpus

Sample = dict[str, Any]


def pixels(mode: str = "RGB", size: tuple[int, int] = (7, 5)) -> Image.Image:
    shape = (size[1], size[0], 3)
    values = np.random.default_rng(len(mode)).integers(0, 255, shape).astype(np.uint8)
    return Image.fromarray(values).convert(mode)


def image_file(name: str, mode: str) -> bytes:
    stream = io.BytesIO()
    pixels(mode).save(stream, format=name)
    return stream.getvalue()


NESTED = {"a": [1, None, "é", 1.5], "": {}}
ENCODED: list[tuple[str, list[Any]]] = [
    ("txt text transcript html htm", ["", "größe \u2028\0"]),
    ("cls cls2 class count index inx id", [0, -7, 10**20]),
    ("json jsn", [[], NESTED]),
    ("mp msg msgpack cbor", [b"\0", NESTED]),
    ("pyd pickle", [0, {"a": {1, 2}}]),
    ("pkl", [pickle.dumps({"a": {1, 2}})]),  # decoded, but without an encoder of its own
    ("pth", [torch.arange(5), {"w": torch.ones(2, 3)}]),
    ("npy", [np.zeros(0), np.arange(300, dtype=np.uint16).reshape(20, 15), np.array(["a", "é"])]),
    ("npz", [{}, {"a": np.arange(3), "b": np.ones(())}]),
    ("ten tenbin tb", [[np.arange(4, dtype="f4"), np.ones((2, 3), "i8")]]),
    ("jpg jpeg img image ppm tif tiff", [pixels(), pixels("L")]),
    ("png", [pixels(), pixels("L"), np.asarray(pixels())]),
    ("pbm", [image_file("PPM", "1")]),  # the encoders of these two fail: Pillow writes no such format
    ("pgm", [image_file("PPM", "L")]),
    ("bin mp4 flac", [b"", b"\0\xff" * 300]),
]
VALUES = {extension: values for extensions, values in ENCODED for extension in extensions.split()}
"""{extension: what its encoder takes}"""


def comparable(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return ("tensor", peers.comparable(value.numpy()))
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return peers.comparable(value)


def read_there(path: Path | list[str], word: str | None = None) -> list[Any]:
    """All samples as webdataset decodes them."""
    urls = path if isinstance(path, list) else str(path)
    words = () if word is None else (word,)
    found = wds.WebDataset(urls, shardshuffle=False, empty_check=False).decode(*words)
    return [
        comparable({k: v for k, v in sample.items() if k not in ("__url__", "__local_path__")})
        for sample in found
    ]


def read_here(path: Path | str, word: str = "basic") -> list[Any]:
    with open_dataset(path, decode=word, allow_pickle=True) as dataset:
        return [comparable(sample) for sample in dataset]


def by_column(sample: Sample) -> Sample:
    """A packed row as webdataset has it, its member `tokens.npy` named as our column."""
    return {name.replace("tokens.npy", "tokens"): value for name, value in sample.items()}


def write_there(path: Path, samples: list[Sample], **options: Any) -> Path:
    with wds.TarWriter(str(path), **options) as writer:
        for sample in samples:
            writer.write(sample)
    return path


def all_extensions(suffix: str) -> list[Sample]:
    """One sample for each value of each extension, in folders, and one of everything there is."""
    samples = [
        {"__key__": f"{extension}/é {number}", f"{extension}{suffix}": value, f"left.{extension}": value}
        for extension, values in VALUES.items()
        for number, value in enumerate(values)
    ]
    everything = {f"{extension}{suffix}": values[-1] for extension, values in VALUES.items()}
    return [*samples, {"__key__": "all", **everything}]


def test_the_values_are_of_every_encoder_that_webdataset_has() -> None:
    assert default_handlers.keys() <= VALUES.keys()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mtime": 0, "user": "", "group": ""},
        {"mtime": 1_700_000_000.123456, "user": "a user" * 4, "mode": 0o600, "keep_meta": True},
        {"encoder": False},
    ],
    ids=["default", "constant", "own headers", "bytes"],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    "name",
    [
        "a.tar",
        *(pytest.param(name, marks=pytest.mark.extended) for name in ("a.tar.gz", "a.tgz", "a.tar.bz2")),
    ],
)
def test_every_encoder_is_read_equal(tmp_path: Path, name: str, suffix: str, options: dict[str, Any]) -> None:
    samples = all_extensions(suffix)
    if options.get("encoder") is False:  # which writes bytes only
        encoded = wds.writer.make_encoder(True)
        samples = [encoded(sample) for sample in samples]
    if options.get("keep_meta"):
        samples = [{**sample, "_made_by": "someone"} for sample in samples]
    if name == "a.tgz":
        options = {**options, "compress": True}
    path = write_there(tmp_path / name, samples, **options)
    found = read_here(path)
    assert len(found) == len(samples)
    assert found == read_there(path)


@pytest.mark.parametrize("word", ["pil", "pill", "rgb8", "l", "rgba", "torchrgb8", "torchrgb"])
def test_images_are_decoded_equal_by_every_word(tmp_path: Path, word: str) -> None:
    images = ("jpg", "png", "ppm", "tif", "pgm")
    samples = [
        {"__key__": f"{extension}{number}", extension: value, "cls": number}
        for extension in images
        for number, value in enumerate(VALUES[extension])
    ]
    files = {
        "webp": image_file("WEBP", "RGB"),
        "seg.png": image_file("PNG", "P"),
        "png.gz": image_file("PNG", "RGB"),
        "tif": image_file("TIFF", "RGBA"),
    }
    samples += [
        {"__key__": f"file {number}", name: data} for number, (name, data) in enumerate(files.items())
    ]
    path = write_there(tmp_path / "a.tar", samples)
    assert read_here(path, word) == read_there(path, word)


# Names: keys with dots, folders, spaces and underscores, extensions of any case, samples of unequal members.

# Without the "._" of macOS, whose files are left out here and are samples there.
NAMES = st.text("ab_./ é", min_size=1, max_size=8).filter(
    lambda name: name[0] != "/" and not name.endswith("/") and not name.rpartition("/")[2].startswith("._")
)
MEMBERS = st.sampled_from(
    ["txt", "TXT", "a.txt", "cls", "json", "_meta.txt", "__meta.json", "npy", "b.c.bin"]
)
SAMPLES = st.lists(
    st.tuples(NAMES, st.lists(MEMBERS, min_size=1, max_size=4, unique=True)), min_size=1, max_size=12
)


def a_key_returns(file: Path) -> bool:
    """Return whether a sample's members do not follow each other in a tar, by webdataset's rule for keys."""
    with tarfile.open(file) as tar:
        keys = [wds.tariterators.base_plus_ext(name)[0] for name in tar.getnames()]
    runs = [key for key, _ in groupby(key for key in keys if key is not None)]
    return len(set(runs)) < len(runs)


def check_names(folder: Path, named: list[tuple[str, list[str]]]) -> None:
    values = {"txt": "text", "cls": 3, "json": NESTED, "npy": np.arange(4), "bin": b"\0"}
    samples = [
        {
            "__key__": key,
            **{
                extension: "{}" if extension.startswith("_") else values[extension.lower().split(".")[-1]]
                for extension in extensions
            },
        }
        for key, extensions in named
    ]
    with wds.ShardWriter(f"{folder}/part-%03d.tar", maxcount=5, verbose=0, keep_meta=True) as writer:
        for sample in samples:
            writer.write(sample)
    if any(map(a_key_returns, folder.glob("*.tar"))):  # webdataset makes two samples of the one
        with pytest.raises(ShardError, match=r"has occurred before|already has"):
            read_here(folder)
        return
    try:
        expected = read_there([str(file) for file in sorted(folder.glob("*.tar"))])
    except ValueError as error:
        assert "duplicate file name" in str(error)  # noqa: PT017  # both refuse the same tars
        with pytest.raises(ShardError, match="already has"):
            read_here(folder)
        return
    assert read_here(folder) == expected


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(named=SAMPLES)
def test_any_names_are_grouped_into_the_same_samples(
    tmp_path_factory: pytest.TempPathFactory, named: list[tuple[str, list[str]]]
) -> None:
    in_new_folder(tmp_path_factory, lambda folder: check_names(folder, named))


@pytest.mark.extended
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(named=SAMPLES)
def test_many_names_are_grouped_into_the_same_samples(
    tmp_path_factory: pytest.TempPathFactory, named: list[tuple[str, list[str]]]
) -> None:
    in_new_folder(tmp_path_factory, lambda folder: check_names(folder, named))


def in_new_folder(factory: pytest.TempPathFactory, check: Callable[[Path], None]) -> None:
    folder = factory.mktemp("generated")
    try:
        check(folder)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("length", [90, 100, 101, 155, 180, 254, 300])
def test_long_names_are_read_whole_whatever_header_they_need(tmp_path: Path, length: int) -> None:
    samples = [
        {"__key__": f"{'f' * (length // 2)}/{'ü' * (length // 4)}{number}", "cls": number, "txt": "x"}
        for number in range(4)
    ]
    path = write_there(tmp_path / "a.tar", samples)
    assert read_here(path) == read_there(path)
    assert [sample["cls"][1] for sample in read_here(path)] == [0, 1, 2, 3]


# Ours, read by them.


def write_rows(folder: Path, dtype: str) -> npt.NDArray[Any]:
    """47 rows, which three listed tars hold."""
    rows = np.random.default_rng(2).integers(0, 60_000, (47, 33)).astype(dtype)
    infos = [
        tar.write_rows_shard(folder, f"s-{at:03d}.tar", rows[at : at + 20], key_start=at)
        for at in range(0, len(rows), 20)
    ]
    tar.write_shard_list(folder, infos)
    return rows


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_shards_of_ours_are_read_equal_by_webdataset_in_the_order_of_their_list(
    tmp_path: Path, dtype: str
) -> None:
    rows = write_rows(tmp_path, dtype)
    listed = json.loads((tmp_path / "shards.json").read_text())
    assert [part["nsamples"] for part in listed["shardlist"]] == [20, 20, 7]
    found = read_there([str(tmp_path / part["url"]) for part in listed["shardlist"]])
    assert [by_column(sample) for sample in found] == read_here(tmp_path)
    assert [sample["tokens.npy"] for sample in found] == [peers.comparable(row) for row in rows]


def test_wids_reads_our_list_by_sample_number(tmp_path: Path) -> None:
    wids = pytest.importorskip("wids", reason="wids is part of webdataset before 1.0")
    rows = write_rows(tmp_path, "uint16")
    dataset = wids.ShardListDataset(
        str(tmp_path / "shards.json"), cache_dir=str(tmp_path / "cache"), keep=True
    )
    assert len(dataset) == 47
    for number in (0, 19, 20, 46):
        np.testing.assert_array_equal(dataset[number][".tokens.npy"], rows[number])


def test_a_whole_build_is_read_equal_by_webdataset(tmp_path: Path, inline_builds: None) -> None:
    recipe = make_corpus(tmp_path / "build", documents=120)
    recipe.write_text(recipe.read_text().replace("8KiB}", "32KiB, format: wds}"))
    output = build(recipe).output
    shards = [str(file) for file in sorted(output.glob("*.tar"))]
    assert len(shards) > 1
    found = read_there(shards)
    assert len(found) > 50
    assert [by_column(sample) for sample in found] == read_here(output)


# Where webdataset goes on in silence and we do not.


def five_samples(folder: Path) -> tuple[Path, list[int]]:
    """A tar of five samples, one member each, and where their headers begin."""
    path = write_there(
        folder / "a.tar", [{"__key__": str(number), "txt": "x" * 600} for number in range(5)], mtime=0
    )
    return path, [number * 1536 for number in range(5)]


def test_a_damaged_header_is_an_error_where_webdataset_ends_the_shard_in_silence(tmp_path: Path) -> None:
    path, headers = five_samples(tmp_path)
    data = bytearray(path.read_bytes())
    data[headers[2] + 5] ^= 1
    path.write_bytes(data)
    assert len(read_there(path)) == 2
    with pytest.raises(ShardError, match=rf"a\.tar.*{headers[2]:,}"):
        read_here(path)


def test_a_tar_cut_between_members_is_refused_by_its_list_where_webdataset_loses_the_rest_in_silence(
    tmp_path: Path,
) -> None:
    rows = np.arange(50, dtype=np.uint16).reshape(5, 10)
    tar.write_shard_list(tmp_path, [tar.write_rows_shard(tmp_path, "a.tar", rows, key_start=0)])
    path = tmp_path / "a.tar"
    path.write_bytes(path.read_bytes()[: 3 * 1024])
    assert len(read_there(path)) == 3
    with pytest.raises(ShardError, match=r"a\.tar"):
        read_here(tmp_path)


def test_a_null_is_none_where_webdataset_takes_it_for_undecoded(tmp_path: Path) -> None:
    path = write_there(tmp_path / "a.tar", [{"__key__": "a", "json": None}])
    assert read_there(path)[0]["json"] == ("bytes", b"null")
    assert read_here(path)[0]["json"] == ("NoneType", None)


def test_pickles_are_refused_where_webdataset_runs_them_unless_allowed(tmp_path: Path) -> None:
    path = write_there(tmp_path / "a.tar", [{"__key__": "a", "pyd": {"b": 1}}])
    assert read_here(path) == read_there(path) == [{"__key__": ("str", "a"), "pyd": {"b": ("int", 1)}}]
    with open_dataset(path) as dataset, pytest.raises(ShardError, match="allow_pickle=True"):
        dataset[0]
