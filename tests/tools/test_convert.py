"""Conversions between our two formats, and what holds for all: checked, published last, the same bytes."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shardkit import open_dataset
from shardkit.cli.main import main
from shardkit.datasets.verify import verify
from shardkit.errors import ShardError
from shardkit.formats import mds
from shardkit.publish import RefusedError, upload
from shardkit.tools.convert import CutOptions, OutputOptions, convert
from shardkit.tools.convert import run as running
from support.foreign_tars import tar_bytes
from support.peers import comparable, read_with_streaming

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "convert"
WDS = OutputOptions(format="wds")


def content(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def values(folder: Path) -> list[object]:
    return [comparable(sample) for sample in open_dataset(folder)]


def write_mds(folder: Path, columns: dict[str, str], samples: list[dict[str, Any]], **more: Any) -> Path:
    with mds.MdsWriter(folder, columns=columns, **more) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


def token_rows(folder: Path, rows: int = 40, length: int = 6) -> Path:
    matrix = np.arange(rows * length, dtype=np.uint16).reshape(rows, length)
    with mds.MdsWriter(folder, columns={"tokens": f"ndarray:uint16:{length}"}, shard_bytes=400) as writer:
        writer.write_rows(matrix)
    return folder


EVERY = {
    "text": "str",
    "blob": "bytes",
    "n": "int",
    "cls": "int",
    "u8": "uint8",
    "i64": "int64",
    "f16": "float16",
    "f64": "float64",
    "big": "str_int",
    "real": "str_float",
    "exact": "str_decimal",
    "meta.json": "json",
    "any": "ndarray",
    "typed": "ndarray:float32",
    "fixed": "ndarray:int16:2,3",
    "raw": "pil",
    "seg.png": "png",
    "jpg": "jpeg",
    "__key__": "str",
}


def every_sample(n: int) -> dict[str, Any]:
    image = Image.new("RGB", (3 + n, 2), (n, 2 * n, 7))
    return {
        "text": f"größe\n{n}",
        "blob": bytes(range(n)),
        "n": -n,
        "cls": n,
        "u8": np.uint8(n),
        "i64": np.int64(-(1 << 62) + n),
        "f16": np.float16(n / 3),
        "f64": np.float64("nan" if n == 1 else "inf" if n == 2 else n / 7),
        "big": 10**30 + n,
        "real": [1e-300, float("inf"), 0.1, 1.5][n],
        "exact": Decimal("1.10") + n,
        "meta.json": {"n": n, "deep": [None, {"x": "ü"}]},
        "any": np.arange(n + 1, dtype=np.uint64),
        "typed": np.ones((n + 1, 2), np.float32),
        "fixed": np.full((2, 3), n, np.int16),
        "raw": image.convert(["RGB", "L", "RGBA", "1"][n]),
        "seg.png": image,
        "jpg": image,
        "__key__": f"part/{n:03d}",
    }


def test_every_column_that_a_tar_can_hold_comes_back_equal(tmp_path: Path) -> None:
    write_mds(tmp_path / "a", EVERY, [every_sample(n) for n in range(4)], shard_bytes=3000)
    done = convert(tmp_path / "a", tmp_path / "tar", output=WDS, progress=False)
    assert set(done.columns) == {
        "text", "blob.bin", "n.cls", "cls", "u8.npy", "i64.npy", "f16.npy", "f64.npy", "big.cls", "real.json",
        "exact.txt", "meta.json", "any.npy", "typed.npy", "fixed.npy", "raw.png", "seg.png", "jpg",
    }  # fmt: skip
    convert(tmp_path / "tar", tmp_path / "b", progress=False)
    assert values(tmp_path / "b") == values(tmp_path / "a")
    columns = [{c.name: c.encoding for c in open_dataset(tmp_path / name).columns} for name in "ab"]
    assert columns[0] == columns[1] == EVERY
    assert all(verify(tmp_path / name).ok for name in ("tar", "b"))


@pytest.mark.extended
def test_stock_streaming_reads_what_was_converted(tmp_path: Path) -> None:
    write_mds(tmp_path / "a", EVERY, [every_sample(n) for n in range(4)])
    convert(tmp_path / "a", tmp_path / "tar", output=WDS, progress=False)
    convert(tmp_path / "tar", tmp_path / "b", progress=False)
    theirs = read_with_streaming(tmp_path / "b")
    assert [comparable(sample) for sample in theirs] == values(tmp_path / "a")


def test_stock_webdataset_reads_what_was_converted(tmp_path: Path) -> None:
    write_mds(tmp_path / "a", EVERY, [every_sample(n) for n in range(4)])
    convert(tmp_path / "a", tmp_path / "tar", output=WDS, progress=False)
    pattern = str(tmp_path / "tar" / "shard-00000.tar")
    found = list(webdataset.WebDataset(pattern, shardshuffle=False).decode("pil"))
    assert [sample["__key__"] for sample in found] == [f"part/{n:03d}" for n in range(4)]
    for n, sample in enumerate(found):
        expected = every_sample(n)
        for column, extension in (("cls", "cls"), ("meta.json", "meta.json"), ("big", "big.cls")):
            assert sample[extension] == expected[column]
        for column in ("any", "typed", "fixed", "u8", "f16"):
            assert comparable(sample[f"{column}.npy"]) == comparable(np.asarray(expected[column]))
        assert sample["seg.png"].convert("RGB").tobytes() == expected["seg.png"].tobytes()


@pytest.mark.parametrize(
    ("columns", "sample", "message"),
    [
        ({"p": "pkl"}, {"p": 1}, "pkl"),
        ({"l": "list[png]"}, {"l": [Image.new("L", (2, 2))]}, r"list\[png\], which a member of a tar cannot"),
        ({"Upper": "str"}, {"Upper": "x"}, "cannot be an extension; use only lower-case"),
        ({"a/b": "str"}, {"a/b": "x"}, "cannot be an extension"),
        ({"a": "int", "a.cls": "int"}, {"a": 1, "a.cls": 1}, "'a' and 'a.cls' would both be named 'a.cls'"),
        ({"raw": "pil"}, {"raw": Image.new("F", (2, 2))}, "sample 0: 'raw': is an image of mode F"),
        ({"__key__": "int"}, {"__key__": 1}, "keys of a tar must be str"),
        ({"__key__": "str", "x": "int"}, {"__key__": "a.b", "x": 1}, "cannot begin a member's name"),
    ],
)
def test_what_a_tar_cannot_hold_is_refused_with_the_reason(
    columns: dict[str, str], sample: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_mds(tmp_path / "a", columns, [sample])
    with pytest.raises(ShardError, match=message):
        convert(tmp_path / "a", tmp_path / "out", output=WDS, progress=False)
    assert not (tmp_path / "out").exists()


def test_tars_of_others_become_columns_and_their_members_again(tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    for number, part in enumerate([(0, 7), (8, 19)]):
        (tmp_path / "tars" / f"{number}.tar").write_bytes(tar_bytes(*part))
    with pytest.raises(ShardError, match=r"sample 1 \('part/00001'\): has no 'txt'; choose columns"):
        convert(tmp_path / "tars", tmp_path / "no", progress=False)
    names = ["png", "seg.png", "json", "cls"]
    done = convert(tmp_path / "tars", tmp_path / "mds", columns=names, progress=False)
    assert done.columns == {"png": "png", "seg.png": "png", "json": "json", "cls": "int", "__key__": "str"}
    convert(tmp_path / "mds", tmp_path / "back", output=WDS, progress=False)
    before = [{k: s[k] for k in [*names, "__key__"]} for s in open_dataset(tmp_path / "tars", decode=False)]
    assert before == [dict(sample) for sample in open_dataset(tmp_path / "back", decode=False)]


def test_members_that_mean_nothing_to_mds_stay_bytes_and_keep_their_names(tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for n in range(3):
            writer.write({"__key__": f"k{n}", "mp": {"n": n}, "txt.gz": b"\x1f\x8b", "x.flac": b"abc"})
    convert(tmp_path / "a.tar", tmp_path / "mds", progress=False)
    assert {c.encoding for c in open_dataset(tmp_path / "mds").columns} == {"bytes", "str"}
    convert(tmp_path / "mds", tmp_path / "tar", output=WDS, progress=False)
    names = [tmp_path / "a.tar", tmp_path / "tar"]
    before, after = (list(open_dataset(name, decode=False)) for name in names)
    assert before == after


def test_pickles_are_refused_and_can_be_left_out(tmp_path: Path) -> None:
    write_mds(tmp_path / "a", {"p": "pkl", "x": "int"}, [{"p": {"n": 1}, "x": 5}])
    for output in (OutputOptions(), WDS):
        with pytest.raises(ShardError, match="pkl"):
            convert(tmp_path / "a", tmp_path / "out", output=output, progress=False)
    convert(tmp_path / "a", tmp_path / "out", columns=["x"], progress=False)
    assert values(tmp_path / "out") == [{"x": ("int", 5)}]
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "k", "pyd": {"n": 1}, "cls": 1})
    with pytest.raises(ShardError, match=r"\.pyd are pickles, which can run any code"):
        convert(tmp_path / "a.tar", tmp_path / "tar", progress=False)
    convert(tmp_path / "a.tar", tmp_path / "tar", columns=["cls"], progress=False)


@settings(max_examples=5, deadline=None)
@given(
    dtype=st.sampled_from(["uint16", "uint32"]),
    rows=st.integers(1, 30),
    length=st.integers(1, 20),
    limit=st.integers(12_000, 40_000),
    compression=st.sampled_from([None, "zstd", "gz:1"]),
)
def test_token_rows_go_to_tars_and_back(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    rows: int,
    length: int,
    limit: int,
    compression: str | None,
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    matrix = np.random.default_rng(rows).integers(0, 1 << 16, (rows, length)).astype(dtype)
    with mds.MdsWriter(
        folder / "a",
        columns={"tokens": f"ndarray:{dtype}:{length}"},
        compression=compression,
        shard_bytes=500,
    ) as writer:
        writer.write_rows(matrix)
    wds = OutputOptions(format="wds", shard_bytes=limit)
    first = convert(folder / "a", folder / "tar", output=wds, progress=False)
    second = convert(folder / "tar", folder / "b", progress=False)
    assert first.content_digest == second.content_digest
    assert dict(second.columns) == {"tokens": f"ndarray:{dtype}:{length}"}
    found = np.stack([np.asarray(sample["tokens"]) for sample in open_dataset(folder / "b")])
    assert comparable(found) == comparable(matrix)


def test_rows_of_a_dataset_can_be_cut_anew(tmp_path: Path) -> None:
    token_rows(tmp_path / "a")
    cut = CutOptions(sequence_length=7, pad=0, dtype="uint32")
    done = convert(tmp_path / "a", tmp_path / "b", cut=cut, progress=False)
    found = np.concatenate([np.asarray(s["tokens"]) for s in open_dataset(tmp_path / "b")])
    assert found.tolist() == [*range(240), *[0] * 5]
    assert dict(done.columns) == {"tokens": "ndarray:uint32:7"}
    ragged = [{"tokens": np.arange(n, dtype=np.int32), "url": "u"} for n in (3, 1, 4)]
    write_mds(tmp_path / "c", {"tokens": "ndarray:int32", "url": "str"}, ragged)
    done = convert(tmp_path / "c", tmp_path / "d", cut=CutOptions(keep_lengths=True), progress=False)
    assert list(done.left_out) == ["url"]
    assert [len(np.asarray(s["tokens"])) for s in open_dataset(tmp_path / "d")] == [3, 1, 4]
    with pytest.raises(ShardError, match=r"has no single bytes column of tokens among tokens"):
        convert(tmp_path / "a", tmp_path / "e", cut=CutOptions(source_dtype="int64"), progress=False)
    with pytest.raises(ShardError, match="is not a source of tokens: its rows cannot be cut"):
        convert(GOLDEN / "litdata_items", tmp_path / "e", cut=CutOptions(dtype="uint32"), progress=False)


def test_tokens_that_were_stored_as_bytes_become_rows(tmp_path: Path) -> None:
    samples = [{"tokens": np.arange(n, n + 8, dtype=np.int64).tobytes(), "n": n} for n in range(5)]
    write_mds(tmp_path / "a", {"tokens": "bytes", "n": "int"}, samples)
    for form in ("mds", "wds"):
        cut, output = CutOptions(source_dtype="int64", dtype="uint16"), OutputOptions(format=form)
        convert(tmp_path / "a", tmp_path / form, cut=cut, output=output, progress=False)
        found = open_dataset(tmp_path / form)
        assert found.token_dtype == np.dtype(np.uint16)
        assert found.sequence_length == 8
        rows = [np.asarray(sample[found.token_column or ""]).tolist() for sample in found]
        assert rows == [[*range(n, n + 8)] for n in range(5)]
    write_mds(tmp_path / "odd", {"tokens": "bytes"}, [{"tokens": b"123"}])
    with pytest.raises(ShardError, match="sample 0: has 3 bytes, not a whole number of int64 tokens"):
        convert(tmp_path / "odd", tmp_path / "e", cut=CutOptions(source_dtype="int64"), progress=False)


def test_one_of_several_fixed_columns_is_copied_as_it_lies(tmp_path: Path) -> None:
    columns = {"mask": "ndarray:uint8:6", "Tokens": "ndarray:uint16:6", "x": "float32"}
    rows = np.arange(120, dtype=np.uint16).reshape(20, 6)
    samples = [{"mask": np.ones(6, np.uint8), "Tokens": row, "x": 0.5} for row in rows]
    write_mds(tmp_path / "a", columns, samples, shard_bytes=500)
    convert(tmp_path / "a", tmp_path / "b", columns=["Tokens"], progress=False)
    assert [np.asarray(s["Tokens"]).tolist() for s in open_dataset(tmp_path / "b")] == rows.tolist()
    with pytest.raises(ShardError, match="column 'Tokens' cannot be an extension"):
        convert(tmp_path / "a", tmp_path / "c", columns=["Tokens"], output=WDS, progress=False)
    write_mds(tmp_path / "f", {"x": "ndarray:float32:3"}, [{"x": np.ones(3, np.float32)}])
    convert(tmp_path / "f", tmp_path / "g", progress=False)
    assert verify(tmp_path / "g").ok


def test_datasets_behind_a_url_are_read_shard_by_shard(tmp_path: Path) -> None:
    url = f"memory://convert-{uuid.uuid4().hex}"
    upload(token_rows(tmp_path / "a"), url, progress=False)
    convert(url, tmp_path / "b", output=WDS, progress=False)
    convert(tmp_path / "b", tmp_path / "c", progress=False)
    assert values(tmp_path / "c") == values(tmp_path / "a")


def test_the_same_command_gives_the_same_bytes_and_says_what_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    token_rows(tmp_path / "a")
    for name in ("b", "c"):
        convert("a", name, output=WDS, progress=False)
    assert content(tmp_path / "b") == content(tmp_path / "c")
    facts = json.loads((tmp_path / "b" / "dataset.json").read_text())
    assert facts["converted_from"]["path"] == "a"
    assert facts["converted_from"]["fingerprint"] == open_dataset(tmp_path / "a").fingerprint
    assert facts["fingerprint"] == open_dataset(tmp_path / "b").fingerprint
    assert verify(tmp_path / "b").ok


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    source = token_rows(tmp_path / "a")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "mine.txt").write_text("x")
    for replace in (False, True):
        with pytest.raises(RefusedError, match=r"holds files that are not a dataset \(first: mine\.txt\)"):
            convert(source, tmp_path / "files", replace=replace, progress=False)
    convert(source, tmp_path / "out", progress=False)
    with pytest.raises(RefusedError, match="already holds a dataset; use --replace"):
        convert(source, tmp_path / "out", progress=False)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    convert(source, tmp_path / "out", output=WDS, replace=True, progress=False)
    assert sorted(content(tmp_path / "out")) == [
        "blocks.bin",
        "dataset.json",
        "notes.txt",
        "shard-00000.tar",
        "shards.json",
    ]
    with pytest.raises(ShardError, match="is both source and target"):
        convert(source, source, replace=True, progress=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(RefusedError, match="is not a folder"):
        convert(source, tmp_path / "file", progress=False)
    with pytest.raises(ShardError, match="convert into a local folder, then `shardkit upload`"):
        convert(source, "s3://bucket/x", progress=False)


def test_rows_that_the_disk_changed_are_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = token_rows(tmp_path / "a")
    write_card = running.write_card

    def damage(work: Path, *rest: Any) -> None:
        write_card(work, *rest)
        [shard] = work.glob("shard*")
        data = bytearray(shard.read_bytes())
        data[-700 if shard.suffix == ".tar" else -1] ^= 1
        shard.write_bytes(data)

    monkeypatch.setattr(running, "write_card", damage)
    write_mds(tmp_path / "text", {"text": "str"}, [{"text": "x" * 500}])
    for place in (source, tmp_path / "text"):
        with pytest.raises(ShardError, match="when read back, but the source has"):
            convert(place, tmp_path / "out", progress=False)
        assert not (tmp_path / "out").exists()


def test_what_a_killed_conversion_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    source = token_rows(tmp_path / "a", rows=400)
    convert(source, tmp_path / "expected", progress=False)
    code = (
        "import sys, time\n"
        "from shardkit.tools.convert import convert, run\n"
        "from shardkit.publish.publication import Publication\n"
        "move = run.publish_staged\n"
        "def stop(*rest, **more):\n"
        "    print('here', flush=True)\n"
        "    time.sleep(60)\n"
        "if sys.argv[3] == 'before': run.publish_staged = stop\n"
        "else: Publication._put_index = stop\n"
        "convert(sys.argv[1], sys.argv[2], progress=False)"
    )
    for moment in ("before", "amid"):
        out = tmp_path / moment
        job = subprocess.Popen(
            [sys.executable, "-c", code, str(source), str(out), moment], stdout=subprocess.PIPE, text=True
        )
        assert job.stdout is not None
        assert job.stdout.readline() == "here\n"
        with pytest.raises(RefusedError, match="another process is writing a dataset"):
            convert(source, out, progress=False)
        job.send_signal(signal.SIGKILL)
        job.wait(timeout=30)
        job.stdout.close()
        assert not (out / "index.json").exists()
        with pytest.raises(ShardError):
            open_dataset(out)
        convert(source, out, progress=False)
        assert content(out) == content(tmp_path / "expected")


def test_the_command_converts_and_tells(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    token_rows(tmp_path / "a")
    words = ["convert", str(tmp_path / "a"), str(tmp_path / "tar"), "--format", "wds"]
    assert main(words) == 0
    out = capfd.readouterr().out
    assert "40 rows in 1 wds shards" in out
    assert "read back and equal to the source" in out
    assert main([*words, "--replace", "--json", "--hashes", "xxh64,md5", "--no-verify"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["rows"], result["verified"], result["source_format"]) == (40, False, "dataset")
    assert set(open_dataset(tmp_path / "tar").manifest.shards[0].raw.hashes) == {"xxh64", "md5"}
    assert main(words) == 1
    assert "already holds a dataset; use --replace" in capfd.readouterr().err
    for more, message in (
        (["--sequence-length", "4"], "the last tokens may not fill a row"),
        (["--compression", "zstd"], "compression needs format mds"),
        (["--eos", "-1"], "is not a token id"),
        (["--shard-bytes", "5GiB"], "below 4 GiB"),
    ):
        with pytest.raises(SystemExit) as caught:
            main([*words, *more])
        assert caught.value.code == 2
        assert message in capfd.readouterr().err


@pytest.mark.extended
def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from shardkit.tools.convert import CutOptions, OutputOptions, convert\n"
        "import pyarrow\n"
        "small = OutputOptions(shard_bytes='8MiB', format=sys.argv[3])\n"
        "cut = CutOptions(sequence_length=1024, drop_tail=True)\n"
        "convert(sys.argv[1], sys.argv[2], cut=cut, output=small, progress=False)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    piece = np.arange(1 << 22, dtype=np.uint16)
    peaks: dict[str, list[int]] = {"mds": [], "wds": []}
    for pieces in (4, 64):  # 32 MB and 512 MB
        with (tmp_path / "train.bin").open("wb") as file:
            for _ in range(pieces):
                file.write(piece.data)
        for form, found in peaks.items():
            command = [sys.executable, "-c", code, str(tmp_path / "train.bin"), str(tmp_path / "out"), form]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
            subprocess.run(["rm", "-r", str(tmp_path / "out")], check=True)
            found.append(int(done.stdout))
    for form, (small, large) in peaks.items():
        assert large < small + 40_000, (form, peaks)  # KB; the source grew by 480,000


def data_folder() -> Path:
    if "SHARDKIT_TEST_DATA" not in os.environ:
        pytest.skip("SHARDKIT_TEST_DATA is not set")
    return Path(os.environ["SHARDKIT_TEST_DATA"]) / "goldens"


@pytest.mark.data
@pytest.mark.extended
@pytest.mark.parametrize("kind", ["mds", "wds"])
def test_nobody_else_can_write_what_a_conversion_makes_where_umask_is_0(
    tmp_path: Path, kind: Literal["mds", "wds"]
) -> None:
    rows = np.arange(600, dtype=np.uint16).reshape(-1, 6)
    with mds.MdsWriter(tmp_path / "source", columns={"tokens": "ndarray:uint16:6"}) as writer:
        writer.write_rows(rows)
    before = os.umask(0)
    try:
        convert(
            tmp_path / "source", tmp_path / "new" / "out", output=OutputOptions(format=kind), progress=False
        )
        assert os.umask(0) == 0, "it is as it was"
    finally:
        os.umask(before)
    made = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert len(made) > 4
    assert [path for path in made if path.stat().st_mode & stat.S_IWOTH] == []


def test_golden_datasets_go_to_the_other_format_and_back(tmp_path: Path) -> None:
    started, converted = time.monotonic(), 0
    for source in sorted((data_folder() / "mds").iterdir()):
        if not source.is_dir():
            continue
        columns = [c.name for c in open_dataset(source).columns if c.encoding != "pkl"]
        out = tmp_path / source.name
        convert(source, out / "tar", output=WDS, columns=columns, progress=False)
        convert(out / "tar", out / "mds", progress=False)
        with open_dataset(source, allow_pickle=True) as before:
            expected = [comparable({k: v for k, v in s.items() if k in columns}) for s in before]
        assert values(out / "mds") == expected, source.name
        converted += 1
    assert converted > 15, time.monotonic() - started
