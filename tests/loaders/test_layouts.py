"""Every layout of a batch against a plain reading of its rows, and through all loaders, kills and names."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from shardkit.cli.main import main
from shardkit.formats import mds
from shardkit.formats.usage_log import scan
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.batch import BatchMaker, TokenColumn, repetitive_rows
from shardkit.loaders.block_mask import block_mask_of
from shardkit.loaders.config import Layout, LoaderConfig, grouped
from shardkit.loaders.cuda import CudaPrefetcher
from shardkit.loaders.pytorch import MapDataset, StreamingDataLoader, StreamingDataset
from shardkit.order.token_mask import TokenMask
from support.loader_data import EOS, make_dataset, token_rows, write_card

SAMPLES = 53
BOS = 1
PAD = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_dataset(tmp_path_factory.mktemp("layouts") / "mds", "mds", samples=SAMPLES)
    write_card(folder)
    return folder


# The plain reading.


def documents_of(
    row: list[int], eos_id: int | None, bos_id: int | None, pad_id: int | None = None
) -> list[tuple[int, int, bool]]:
    """(first token, end, whether it is padding) of each document of a row."""
    cuts, end = [0], len(row)
    padding = None
    for i in range(1, end):
        if bos_id is not None:
            if row[i] == bos_id:
                cuts.append(i)
        elif eos_id is not None and row[i] == eos_id == row[i - 1]:
            if padding is None or padding[1] != i:
                cuts.append(i)
                padding = [i, i]
            padding[1] = i + 1
        elif eos_id is not None and row[i - 1] == eos_id:
            cuts.append(i)
    if pad_id is not None:
        edges = [i for i in range(1, end) if (row[i] == pad_id) != (row[i - 1] == pad_id)]
        cuts = sorted({*cuts, *edges})
    is_padding = [
        row[i] == pad_id
        or (eos_id is not None and bos_id is None and i > 0 and row[i] == eos_id == row[i - 1])
        for i in cuts
    ]
    return [(*bounds, pad) for bounds, pad in zip(itertools.pairwise([*cuts, end]), is_padding, strict=True)]


def plain_batch(
    rows: list[list[int]],
    padded: list[bool],
    config: LoaderConfig,
    eos_id: int | None,
    masks: Sequence[Container[int]] = (),
) -> dict[str, Any]:
    """The batch of these rows as nested lists, token by token; `masks`: those of each that are no targets."""
    every: dict[str, Any] = {}
    bounds = [0]
    for row, is_padding_row, extra in zip(rows, padded, masks or [()] * len(rows), strict=True):
        whole = documents_of(row, eos_id, config.bos_id, config.pad_id)
        if is_padding_row:
            whole = [(0, len(row), True)]
        starts = {first for first, _, _ in whole}
        paddings = {i for first, end, pad in whole if pad for i in range(first, end)}
        masked = set(paddings)
        if config.masks_document_starts:
            masked |= starts
        if config.flat and config.labels is True:
            masked.add(0)
        targets = [-100 if i in masked or i in extra else token for i, token in enumerate(row)]
        length = len(row)
        if config.labels == "shifted":
            targets = targets[1:] + ([-100] if config.keep_length else [])
            length = len(targets)
        mine = [(first, min(end, length)) for first, end, _ in whole if first < length]
        every.setdefault("tokens", []).append(row[:length])
        if config.labels:
            every.setdefault("labels", []).append(targets)
        every.setdefault("position_ids", []).append(
            [i - first for first, end in mine for i in range(first, end)]
        )
        every.setdefault("document_ids", []).append(
            [number for number, (first, end) in enumerate(mine) for _ in range(first, end)]
        )
        every.setdefault("seq_lengths", []).append([end - first for first, end in mine])
        for first, end in mine:
            bounds.append(bounds[-1] + end - first)
    if config.flat:
        for name in {"tokens", "labels", "position_ids", "document_ids"} & every.keys():
            every[name] = list(itertools.chain.from_iterable(every[name]))
    lengths: list[list[int]] = every["seq_lengths"]
    most = max(map(len, lengths))
    every["doc_lens"] = [row + [0] * (most - len(row)) for row in lengths]
    every["max_doc_lens"] = [max(row) for row in lengths]
    every["cu_seqlens"], every["max_seqlen"] = bounds, max(max(row) for row in lengths)
    if config.cu_seqlens is not True:
        every["cu_seqlens"] = bounds + [bounds[-1]] * (config.cu_seqlens - len(bounds))
        every["max_seqlen"] = bounds[-1] // len(rows)
    return every


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


FLAGS = ("position_ids", "document_ids", "doc_lens", "seq_lengths", "flat")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[LoaderConfig, int | None]:
    labels: Any = draw(st.sampled_from([False, True, "shifted", "shifted"]))
    options: dict[str, Any] = {name: draw(st.booleans()) for name in FLAGS}
    options["cu_seqlens"] = draw(st.sampled_from([False, True, 64]))
    ids = draw(st.sampled_from(["eos", "eos", "bos", "none"]))
    if labels:
        options["mask_document_starts"] = draw(st.sampled_from([None, None, True, False]))
        options["keep_length"] = labels == "shifted" and draw(st.booleans())
    if ids == "bos":
        options["bos_id"] = BOS
    if draw(st.booleans()):
        options["pad_id"] = PAD
    if draw(st.booleans()):
        options["tensors"] = "numpy"
    return LoaderConfig(labels=labels, **options), EOS if ids == "eos" else None


def masked_in(mask: TokenMask, row: int) -> list[int]:
    return [token for at, first, end in mask.to_list() if at == row for token in range(first, end)]


@given(st.data(), layouts(), st.integers(1, 3), st.integers(1, 3), st.integers(2, 9), st.booleans())
def test_every_layout_is_that_of_a_plain_reading(
    data: st.DataObject,
    layout: tuple[LoaderConfig, int | None],
    size: int,
    count: int,
    length: int,
    pads: bool,
) -> None:
    config, eos_id = layout
    row = st.lists(st.sampled_from([0, 0, 1, 2, 3]), min_size=length, max_size=length)
    rows = data.draw(st.lists(row, min_size=size * count, max_size=size * count))
    padded = [pads and data.draw(st.integers(0, 3)) == 0 for _ in rows]
    dtype = data.draw(st.sampled_from(["int64", "int64", "uint16"]))
    ids = np.array([-1 if padding else i for i, padding in enumerate(padded)])
    for number in np.flatnonzero(ids < 0).tolist():
        rows[number] = [EOS if eos_id is not None else 0] * length
    real = np.array([row for row, padding in zip(rows, padded, strict=True) if not padding], dtype)
    spans = st.tuples(st.integers(0, len(rows) + 2), st.integers(0, length - 1), st.integers(1, length))
    drawn = data.draw(st.lists(spans, max_size=4)) if config.labels else []
    mask = TokenMask((row, first, min(length, first + many)) for row, first, many in drawn)
    masks = [[] if padding else masked_in(mask, row) for row, padding in enumerate(padded)]
    column = TokenColumn("tokens", eos_id, mask=mask if drawn else None)
    maker = BatchMaker(size, config, ["tokens"], column, mark_padding=pads)
    batches, _ = maker.make({"tokens": real.reshape(-1, length)}, ids)
    assert len(batches) == count
    for number, batch in enumerate(batches):
        part = slice(number * size, (number + 1) * size)
        expected = plain_batch(rows[part], padded[part], config, eos_id, masks[part])
        expected["is_padding"] = padded[part]
        assert {name: plain(value) for name, value in batch.items()} == {
            name: expected[name] for name in batch
        }
        kinds = (np.ndarray,) if config.tensors == "numpy" else (torch.Tensor,)
        assert all(isinstance(value, (*kinds, int, list)) for value in batch.values())


# What a training framework relies on.


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("eos_id", [None, EOS])
def test_shifted_labels_are_what_a_loop_cuts_of_rows_of_one_token_more(
    tmp_path: Path, flat: bool, eos_id: int | None
) -> None:
    folder = make_dataset(tmp_path, "mds", samples=SAMPLES)
    options: dict[str, Any] = {"batch_size": 4, "rank": 0, "world_size": 1}
    with StreamingLoader(folder, **grouped(options)) as whole:
        rows = [batch["tokens"] for batch in whole]
    with StreamingLoader(
        folder, labels="shifted", eos_id=eos_id, **grouped({"flat": flat, **options})
    ) as loader:
        for row, batch in zip(rows, loader, strict=True):
            inputs, targets = row[:, :-1], row[:, 1:].clone()
            if eos_id is not None:
                targets[(row[:, 1:] == EOS) & (row[:, :-1] == EOS)] = -100
            if flat:
                inputs, targets = inputs.flatten(), targets.flatten()
                assert batch["tokens"].is_contiguous()
                assert batch["labels"].is_contiguous()
            assert torch.equal(batch["tokens"], inputs)
            assert torch.equal(batch["labels"], targets)


def test_padded_bounds_have_one_shape_in_every_batch_and_a_clear_end(tmp_path: Path) -> None:
    rows = np.random.default_rng(3).integers(0, 3, (40, 8)).astype(np.uint16)
    mds.write_index(tmp_path, [mds.write_rows_shard(tmp_path, "shard.00000.mds", rows)])
    options: dict[str, Any] = {
        "batch_size": 4,
        "labels": "shifted",
        "rank": 0,
        "world_size": 1,
        "eos_id": EOS,
    }
    with StreamingLoader(tmp_path, **grouped({"cu_seqlens": True, **options})) as loader:
        free = [(batch["cu_seqlens"].tolist(), batch["max_seqlen"]) for batch in loader]
    assert len({len(bounds) for bounds, _ in free}) > 1
    with StreamingLoader(tmp_path, **grouped({"cu_seqlens": 24, **options})) as loader:
        for (bounds, _), batch in zip(free, loader, strict=True):
            assert batch["tokens"].shape == (4, 7)
            assert batch["cu_seqlens"].shape == (24,)
            assert batch["cu_seqlens"].dtype == torch.int32
            assert batch["cu_seqlens"].tolist() == bounds + [28] * (24 - len(bounds))
            assert batch["max_seqlen"] == 7
    most = max(len(bounds) for bounds, _ in free) - 1
    with (
        StreamingLoader(tmp_path, **grouped({"cu_seqlens": most, **options})) as loader,
        pytest.raises(
            ValueError, match=f"cu_seqlens={most} has room for {most - 1} documents, and a batch has {most} "
        ),
    ):
        list(loader)


LAYOUTS: dict[str, dict[str, Any]] = {
    "rows": {},
    "labels": {"labels": True},
    "shifted": {"labels": "shifted"},
    "keep_length": {"labels": "shifted", "keep_length": True},
    "flat": {"flat": True, "position_ids": True},
    "shifted flat": {"labels": "shifted", "flat": True, "document_ids": True},
    "renamed": {"labels": True, "rename": {"tokens": "input_ids", "sample_id": "index"}},
    "cu_seqlens": {"labels": "shifted", "cu_seqlens": 64},
    "doc_lens": {"doc_lens": True, "seq_lengths": True},
    "numpy": {"labels": "shifted", "tensors": "numpy"},
    "block_mask": {"block_mask": 4, "flat": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_neither_order_nor_state_and_resumes_in_the_middle(data: Path, layout: str) -> None:
    def make(**options: Any) -> StreamingLoader:
        return StreamingLoader(data, batch_size=4, return_ids=True, rank=0, world_size=1, **grouped(options))

    with make() as plain_rows, make(**LAYOUTS[layout]) as loader:
        name = LAYOUTS[layout].get("rename", {}).get("sample_id", "sample_id")
        batches, states = [], []
        for expected, batch in zip(plain_rows, loader, strict=True):
            assert batch[name].tolist() == expected["sample_id"].tolist()
            assert loader.state_dict() == plain_rows.state_dict()
            batches.append(batch)
            states.append(loader.state_dict())
        with make(**LAYOUTS[layout]) as resumed:
            resumed.load_state_dict(states[6])
            assert_equal(list(resumed), batches[7:])


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert [{name: plain(value) for name, value in batch.items()} for batch in found] == [
        {name: plain(value) for name, value in batch.items()} for batch in expected
    ]


# Names.


@pytest.mark.parametrize(
    ("rename", "options", "message"),
    [
        ({"token": "x"}, {}, "rename has 'token', but the fields of a batch are tokens"),
        ({"labels": "targets"}, {}, "rename has 'labels', but the fields of a batch are tokens"),
        ({"tokens": "labels"}, {"labels": True}, "the same name"),
        ({"tokens": "x", "labels": "x"}, {"labels": "shifted"}, "the same name"),
    ],
)
def test_names_that_are_unknown_or_come_twice_are_refused_when_a_loader_is_made(
    data: Path, rename: dict[str, str], options: dict[str, Any], message: str
) -> None:
    for make in (StreamingLoader, StreamingDataset):
        with pytest.raises(ValueError, match=message):
            make(data, batch_size=4, rank=0, world_size=1, layout=Layout(rename=rename), **options)
    with pytest.raises(ValueError, match=message):
        MapDataset(data, **grouped({"rename": rename, **options}))


def test_names_may_be_swapped(data: Path) -> None:
    options: dict[str, Any] = {"batch_size": 4, "rank": 0, "world_size": 1, "labels": "shifted"}
    with StreamingLoader(data, **grouped(options)) as loader:
        batches = list(loader)
    with StreamingLoader(
        data, **grouped({"rename": {"tokens": "labels", "labels": "tokens"}, **options})
    ) as loader:
        for batch, swapped in zip(batches, loader, strict=True):
            assert torch.equal(batch["tokens"], swapped["labels"])
            assert torch.equal(batch["labels"], swapped["tokens"])


def test_all_loaders_give_one_layout(data: Path) -> None:
    options: dict[str, Any] = {
        "batch_size": 4, "rank": 0, "world_size": 1, "labels": "shifted", "position_ids": True,
        "rename": {"tokens": "input_ids", "labels": "targets"}, "shuffle": "none",
    }  # fmt: skip
    with StreamingLoader(data, **grouped(options)) as loader:
        expected = list(loader)
    for workers in (0, 1):
        assert_equal(
            list(StreamingDataLoader(StreamingDataset(data, **grouped(options)), num_workers=workers)),
            expected,
        )
    assert_equal(list(CudaPrefetcher(StreamingLoader(data, **grouped(options)), "cpu")), expected)
    samples = MapDataset(
        data,
        labels="shifted",
        layout=Layout(position_ids=True, rename={"tokens": "input_ids", "labels": "targets"}),
    )
    for name in ("input_ids", "targets", "position_ids"):
        assert torch.equal(torch.stack([samples[i][name] for i in range(4)]), expected[0][name])


def test_the_usage_log_of_workers_has_the_samples_under_any_name(data: Path, tmp_path: Path) -> None:
    streams = [Stream(data, name="a"), Stream(data, name="b")]

    def logged(folder: str, **options: Any) -> list[int]:
        dataset = StreamingDataset(
            streams, batch_size=4, rank=0, world_size=1, usage_log=tmp_path / folder, **grouped(options)
        )
        loader = StreamingDataLoader(dataset, num_workers=1)
        assert all(("index" in batch) == ("rename" in options) for batch in loader)
        loader.close()
        (file,) = (tmp_path / folder).iterdir()
        (section,) = scan(file).sections
        ids: list[int] = section.read(0, section.count)[1].ravel().tolist()
        return ids

    rename = {"sample_id": "index", "stream_id": "source", "tokens": "input_ids"}
    expected = logged("plain")
    assert len(set(expected)) > SAMPLES  # of both streams
    assert logged("renamed", return_ids=True, rename=rename) == expected


# Without torch.

BLOCK = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Missing())
import json
import re
from shardkit.loaders import Layout, StreamingLoader
"""


def without_torch(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_numpy_batches_come_without_torch_and_are_the_same(data: Path) -> None:
    code = """
layout = Layout(tensors="numpy", position_ids=True)
loader = StreamingLoader(sys.argv[1], batch_size=4, labels="shifted", layout=layout)
batches = [{name: value.tolist() for name, value in batch.items()} for batch in loader]
assert type(batch := next(iter(loader))["tokens"]).__module__ == "numpy", type(batch)
assert "torch" not in sys.modules
print(json.dumps(batches))
"""
    done = without_torch(code, data)
    assert done.returncode == 0, done.stderr
    with StreamingLoader(data, batch_size=4, labels="shifted", layout=Layout(position_ids=True)) as loader:
        expected = [{name: value.tolist() for name, value in batch.items()} for batch in loader]
    assert json.loads(done.stdout) == expected


def test_torch_batches_without_torch_name_both_ways_out(data: Path) -> None:
    done = without_torch("StreamingLoader(sys.argv[1], batch_size=4)", data)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("shardkit.errors.MissingExtraError: ")
    assert 'tensors="numpy"' in last
    assert last.endswith("pip install 'shardkit[torch]'")


# Ids.


def test_data_whose_documents_begin_with_an_id_is_cut_before_it(tmp_path: Path) -> None:
    rows = np.array([[9, 2, 3, 9, 4, 5], [6, 9, 7, 9, 9, 8]], np.uint16)
    mds.write_index(tmp_path, [mds.write_rows_shard(tmp_path, "shard.00000.mds", rows)])
    options: dict[str, Any] = {"batch_size": 2, "shuffle": "none", "rank": 0, "world_size": 1}
    with StreamingLoader(
        tmp_path, bos_id=9, labels="shifted", **grouped({"document_ids": True, **options})
    ) as loader:
        (batch,) = loader
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 2, 3]]
    assert batch["labels"].tolist() == [[2, 3, -100, 4, 5], [-100, 7, -100, -100, 8]]
    with pytest.raises(ValueError, match="eos_id or by bos_id: give one"):
        LoaderConfig(eos_id=0, bos_id=9)
    with pytest.raises(ValueError, match="bos_id=… if an id"):
        StreamingLoader(tmp_path, labels=True, **grouped(options))


def test_padding_with_an_id_of_its_own_is_no_target_and_no_document_text(tmp_path: Path) -> None:
    rows = np.array([[5, 6, 0, 4, 9, 9], [9, 9, 5, 0, 0, 9]], np.uint16)
    mds.write_index(tmp_path, [mds.write_rows_shard(tmp_path, "shard.00000.mds", rows)])
    options: dict[str, Any] = {"batch_size": 2, "shuffle": "none", "rank": 0, "world_size": 1, "pad_id": 9}
    with StreamingLoader(tmp_path, labels=True, **grouped(options)) as loader:  # needs no id of ends
        (batch,) = loader
    assert batch["labels"].tolist() == [[5, 6, 0, 4, -100, -100], [-100, -100, 5, 0, 0, -100]]
    with StreamingLoader(
        tmp_path, labels="shifted", eos_id=0, **grouped({"document_ids": True, **options})
    ) as loader:
        (batch,) = loader
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 2], [0, 0, 1, 1, 2]]
    assert batch["labels"].tolist() == [[6, 0, -100, -100, -100], [-100, -100, 0, -100, -100]]
    with pytest.raises(ValueError, match="neither ends nor begins documents"):
        LoaderConfig(eos_id=9, pad_id=9)
    write_card(tmp_path)
    with pytest.raises(ValueError, match="pad_id is the id that ends documents"):
        StreamingLoader(tmp_path, labels=True, **grouped(options | {"pad_id": EOS}))


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 4), max_size=12),
    st.lists(st.integers(0, 3), min_size=1, max_size=16),
    st.integers(0, 9),
    st.lists(st.integers(1, 4), max_size=40),
    st.integers(1, 6),
)
def test_rows_that_repeat_themselves_are_those_of_a_plain_reading(
    before: list[int], unit: list[int], times: int, after: list[int], most: int
) -> None:
    row = [*before, *unit * times, *after] or [7]

    def repeats(period: int, start: int) -> int:
        times = 1
        while (
            row[start : start + period] == row[start + times * period :][:period]
            and EOS not in row[start + (times - 1) * period : start + (times + 1) * period]
        ):
            times += 1
        return times

    expected = any(
        start + period <= len(row) and repeats(period, start) > most
        for period in range(1, 14)
        for start in range(len(row))
    )
    rows = np.array([row, [5] + [EOS] * (len(row) - 1)], np.uint16)
    assert repetitive_rows(rows, most, eos_id=EOS).tolist() == [expected, False]


def test_rows_that_repeat_themselves_have_no_labels(tmp_path: Path) -> None:
    rows = np.arange(3 * 64, dtype=np.uint16).reshape(3, 64) + 1
    rows[1, 7:61] = np.tile(rows[1, 7:9], 27)
    rows[2, 20:] = EOS
    mds.write_index(tmp_path, [mds.write_rows_shard(tmp_path, "shard.00000.mds", rows)])
    options: dict[str, Any] = {"batch_size": 3, "shuffle": "none", "rank": 0, "world_size": 1, "eos_id": EOS}
    with StreamingLoader(tmp_path, labels=True, **grouped(options)) as loader:
        (plain,) = loader
    for most, is_masked in ((26, True), (27, False)):
        with StreamingLoader(
            tmp_path, labels=True, **grouped({"max_repetitions": most, **options})
        ) as loader:
            (batch,) = loader
        expected = plain["labels"].clone()
        expected[1] = -100 if is_masked else expected[1]
        assert torch.equal(batch["labels"], expected)
    with pytest.raises(ValueError, match="max_repetitions must be at least 1 and needs labels"):
        LoaderConfig(max_repetitions=31)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "shift"}, "labels must be"),
        ({"labels": True, "keep_length": True}, 'option of labels="shifted"'),
        ({"cu_seqlens": 1}, "a length of at least 2, not 1"),
        ({"cu_seqlens": -4}, "a length of at least 2"),
        ({"block_mask": 1}, "block_mask must be True, False or a number of tokens of at least 2"),
        ({"tensors": "jax"}, '"torch" or "numpy", not'),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoaderConfig(**options)


@pytest.mark.parametrize(("padding", "shares"), [(0, True), (3, False)])
def test_labels_share_memory_with_tokens_only_where_nothing_can_be_masked(
    tmp_path: Path, padding: int, shares: bool
) -> None:
    folder = make_dataset(tmp_path, "mds", samples=SAMPLES)
    (folder / "dataset.json").write_text(json.dumps({"tokenizer": {"eos_id": EOS}, "padding": padding}))
    with StreamingLoader(folder, batch_size=4, labels="shifted", rank=0, world_size=1) as loader:
        for batch in loader:
            tokens, labels = batch["tokens"].numpy(), batch["labels"].numpy()
            assert np.shares_memory(tokens, labels) == shares
            assert tokens.flags.c_contiguous == labels.flags.c_contiguous == (not shares)


# FlexAttention.


@st.composite
def masked_batches(draw: st.DrawFn) -> tuple[dict[str, Any], LoaderConfig, list[list[int]], list[bool]]:
    """(batch, options, rows of tokens, which rows are padding)"""
    length, size = draw(st.integers(2, 30)), draw(st.integers(1, 3))
    row = st.lists(st.sampled_from([0, 0, 1, 2, 3, 4, 5, 6, 7]), min_size=length, max_size=length)
    rows = draw(st.lists(row, min_size=size, max_size=size))
    padded = [draw(st.integers(0, 4)) == 0 for _ in rows]
    ids = np.array([-1 if padding else i for i, padding in enumerate(padded)])
    rows = [[EOS] * length if padding else row for row, padding in zip(rows, padded, strict=True)]
    real = np.array([row for row, padding in zip(rows, padded, strict=True) if not padding], np.int64)
    config = LoaderConfig(
        block_mask=draw(st.integers(2, 9)),
        flat=draw(st.booleans()),
        labels=draw(st.sampled_from([False, True])) and "shifted",
        document_ids=True,
    )
    maker = BatchMaker(size, config, ["tokens"], TokenColumn("tokens", EOS), mark_padding=True)
    ((batch,), _) = maker.make({"tokens": real.reshape(-1, length)}, ids)
    return batch, config, rows, padded


@settings(deadline=None, max_examples=25)
@given(masked_batches())
def test_block_masks_equal_those_that_torch_finds_pair_by_pair(drawn: Any) -> None:
    batch, config, rows, padded = drawn
    plain = plain_batch(rows, padded, LoaderConfig(labels=config.labels, document_ids=True), EOS)
    documents = torch.tensor(plain["document_ids"])
    if config.flat:  # each row begins a document
        documents = (documents + 100 * torch.arange(len(rows))[:, None]).reshape(1, -1)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (documents[b, q] == documents[b, kv])

    count, length = documents.shape
    expected = create_block_mask(mask, count, None, length, length, "cpu", config.block_mask)
    found = block_mask_of(batch)
    assert (found.shape, found.BLOCK_SIZE) == (expected.shape, expected.BLOCK_SIZE)
    assert found.seq_lengths == expected.seq_lengths
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, indices = (getattr(found, f"{name}_{part}") for part in ("num_blocks", "indices"))
        assert (counts.dtype, indices.dtype) == (torch.int32, torch.int32)
        assert torch.equal(counts, getattr(expected, f"{name}_num_blocks"))
        used = torch.arange(indices.shape[-1]) < counts[..., None]
        assert torch.equal(indices[used], getattr(expected, f"{name}_indices")[used])
        assert ((indices >= 0) & (indices < indices.shape[-1])).all()
    assert torch.equal(found.to_dense(), expected.to_dense())
    dense = create_mask(found.mask_mod, count, None, length, length, "cpu")
    assert torch.equal(dense, create_mask(mask, count, None, length, length, "cpu"))


@pytest.mark.extended
def test_compiled_attention_under_a_block_mask_stays_inside_of_documents(tmp_path: Path) -> None:
    rows = np.random.default_rng(3).integers(1, 60, (2, 300)).astype(np.uint16)
    rows[rows < 2] = EOS
    mds.write_index(tmp_path, [mds.write_rows_shard(tmp_path, "shard.00000.mds", rows)])
    options: dict[str, Any] = {"block_mask": True, "document_ids": True, "eos_id": EOS}
    with StreamingLoader(tmp_path, batch_size=2, rank=0, world_size=1, **grouped(options)) as loader:
        (batch,) = loader
    documents = batch["document_ids"]
    allowed = (documents[:, :, None] == documents[:, None]) & torch.ones(300, 300).tril().bool()
    q, k, v = torch.randn(3, 2, 1, 300, 16)
    found = torch.compile(flex_attention)(q, k, v, block_mask=block_mask_of(batch))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_batch_without_the_tables_says_which_option_makes_them(data: Path) -> None:
    with StreamingLoader(data, batch_size=4, rank=0, world_size=1) as loader:
        batch = next(iter(loader))
    with pytest.raises(KeyError, match=r"give the loader layout=Layout\(block_mask=True\)"):
        block_mask_of(batch)


def test_tokens_that_state_their_length_one_by_one_get_labels_by_the_command_that_the_error_names(
    tmp_path: Path,
) -> None:
    with mds.MdsWriter(tmp_path / "source", columns={"tokens": "ndarray:int32"}) as writer:
        for row in token_rows(20):
            writer.write({"tokens": row.astype(np.int32)})
    options: dict[str, Any] = {"batch_size": 4, "shuffle": "none", "rank": 0, "world_size": 1}
    with pytest.raises(ValueError, match="labels need a column") as refused:
        StreamingLoader(tmp_path / "source", labels="shifted", **grouped(options))
    (command,) = re.findall(r"`shardkit (.*?)`", str(refused.value))
    places = {"SRC": str(tmp_path / "source"), "DST": str(tmp_path / "rows"), "L": "8"}
    assert main([places.get(word, word) for word in command.split()]) == 0
    with StreamingLoader(tmp_path / "rows", labels="shifted", **grouped(options)) as loader:
        assert np.array_equal(next(iter(loader))["labels"], token_rows(4)[:, 1:])


# The page.


def test_the_layouts_that_the_page_draws_are_those_of_the_loader(tmp_path: Path) -> None:
    rows = np.array([[5, 6, 0, 7, 8, 9, 0], [4, 0, 3, 2, 0, 0, 0]], np.uint16)
    mds.write_index(tmp_path, [mds.write_rows_shard(tmp_path, "shard.00000.mds", rows)])
    write_card(tmp_path)
    drawn = (Path(__file__).parents[2] / "docs" / "batches.md").read_text()

    def lines(**options: Any) -> Iterator[str]:
        loader = StreamingLoader(
            tmp_path,
            batch_size=2,
            shuffle="none",
            rank=0,
            world_size=1,
            **grouped({"mask_document_starts": None, **options}),
        )
        with loader:
            (batch,) = loader
        for name, value in batch.items():
            for row in value.reshape(-1, value.shape[-1]).tolist() if hasattr(value, "tolist") else [value]:
                yield f"{name}: {' '.join(map(str, row)) if hasattr(value, 'tolist') else row}"

    field, found = "", set()
    for line in drawn.splitlines():
        match = re.search(r"  (?:([a-z_]+)  +|  )(-?\d[-\d ]*?|\[.*\])(?:  |$)", line)
        if match:
            field = match[1] or field
            found.add(f"{field}: {match[2].strip()}")
    expected = {
        *lines(labels=True), *lines(labels="shifted"), *lines(labels="shifted", keep_length=True),
        *lines(position_ids=True, document_ids=True, cu_seqlens=True, doc_lens=True, seq_lengths=True),
        *lines(cu_seqlens=9), *lines(flat=True),
    }  # fmt: skip
    assert expected == found
