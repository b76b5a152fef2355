"""`convert --shuffle`: every row once, in an order of the seed alone, in bounded memory; the card says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit import open_dataset
from shardkit.cli.main import main
from shardkit.formats import mds
from shardkit.loaders import StreamingLoader
from shardkit.tools.convert import CutOptions, OutputOptions, convert
from shardkit.tools.convert import shuffle as shuffling


def rows_of(folder: Path) -> list[Any]:
    return [np.asarray(sample["tokens"]).tolist() for sample in open_dataset(folder)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    matrix = np.arange(4000 * 8, dtype=np.uint16).reshape(4000, 8)
    columns = {"tokens": "ndarray:uint16:8"}
    with mds.MdsWriter(tmp_path / "rows", columns=columns, shard_bytes=4000) as writer:
        writer.write_rows(matrix)
    return tmp_path / "rows"


def samples_at(folder: Path, count: int) -> Path:
    columns = {"__key__": "str", "tokens": "ndarray:uint32", "text": "str"}
    with mds.MdsWriter(folder, columns=columns, shard_bytes=3000) as writer:
        for n in range(count):
            writer.write(
                {"__key__": f"k{n:05d}", "tokens": np.full(n % 5 + 1, n, np.uint32), "text": f"ü{n}"}
            )
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


@pytest.mark.parametrize("format", ["mds", pytest.param("wds", marks=pytest.mark.extended)])
def test_rows_are_shuffled_as_a_whole_and_the_same_for_a_seed(
    rows: Path, tmp_path: Path, format: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = OutputOptions(format=format, shard_bytes=9000, shuffle=5)
    convert(rows, tmp_path / "a", output=output, progress=False)
    found = [int(np.asarray(sample["tokens"])[0]) // 8 for sample in open_dataset(tmp_path / "a")]
    assert sorted(found) == list(range(4000))
    order = np.array(found)
    assert abs(np.corrcoef(order, np.arange(4000))[0, 1]) < 0.07
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.07
    # Neither the files of the spool nor the shards decide the order.
    monkeypatch.setattr(shuffling, "_FILE_BYTES", 500)
    convert(rows, tmp_path / "b", output=output, progress=False)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    other = OutputOptions(format=format, shard_bytes=70_000, shuffle=6)
    convert(rows, tmp_path / "c", output=other, progress=False)
    assert found != [int(np.asarray(sample["tokens"])[0]) // 8 for sample in open_dataset(tmp_path / "c")]
    assert not (tmp_path / "a" / ".shardkit-converting").exists()


@pytest.mark.parametrize("format", ["mds", "wds"])
def test_samples_keep_their_keys_and_values(
    tmp_path: Path, format: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = samples_at(tmp_path / "samples", 700)
    monkeypatch.setattr(shuffling, "_FILE_BYTES", 3000)
    convert(source, tmp_path / "out", output=OutputOptions(format=format, shuffle=0), progress=False)
    convert(tmp_path / "out", tmp_path / "back", progress=False)
    before = {sample["__key__"]: sample for sample in open_dataset(source)}
    after = list(open_dataset(tmp_path / "back"))
    assert [sample["__key__"] for sample in after] != list(before)
    assert len(after) == len(before)
    for sample in after:
        expected = before[sample["__key__"]]
        assert sample["text"] == expected["text"]
        assert np.array_equal(sample["tokens"], expected["tokens"])  # type: ignore[arg-type]


@pytest.mark.parametrize("cut", [CutOptions(sequence_length=16, eos=0), CutOptions(keep_lengths=True)])
def test_documents_are_cut_first_and_shuffled_then(tmp_path: Path, cut: CutOptions) -> None:
    source = samples_at(tmp_path / "samples", 300)
    output = OutputOptions(shuffle=3)
    convert(source, tmp_path / "in_order", cut=cut, columns=["tokens"], progress=False)
    convert(source, tmp_path / "shuffled", cut=cut, columns=["tokens"], output=output, progress=False)
    ordered, shuffled = rows_of(tmp_path / "in_order"), rows_of(tmp_path / "shuffled")
    assert ordered != shuffled
    assert sorted(ordered) == sorted(shuffled)


def test_the_card_says_it_and_the_loader_takes_small_windows(rows: Path, tmp_path: Path) -> None:
    assert main(["convert", str(rows), str(tmp_path / "out"), "--shuffle", "--quiet"]) == 0
    assert main(["convert", str(rows), str(tmp_path / "same"), "--shuffle", "17", "--quiet"]) == 0
    assert content(tmp_path / "out") == content(tmp_path / "same")
    card = json.loads((tmp_path / "out" / "dataset.json").read_bytes())
    assert (card["shuffled"], card["converted_from"]["options"]) == (True, {"shuffle": 17})
    convert(tmp_path / "out", tmp_path / "again", output=OutputOptions(format="wds"), progress=False)
    assert open_dataset(tmp_path / "again").card.is_shuffled  # type: ignore[union-attr]
    small = OutputOptions(shard_bytes=600, shuffle=1)
    convert(rows, tmp_path / "many", output=small, progress=False)
    windows: dict[str, Any] = {}
    for name in ("rows", "many"):
        with StreamingLoader(tmp_path / name, batch_size=1, rank=0, world_size=1) as loader:
            windows[name] = loader.state_dict()["window"]
    assert windows["rows"] == 4000
    assert windows["many"] < 4000


def test_a_seed_out_of_range_is_refused(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["convert", str(rows), str(tmp_path / "out"), "--shuffle", "-1"])
    assert "seed of shuffle" in capsys.readouterr().err
