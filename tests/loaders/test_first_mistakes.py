"""Names of other loaders and one broken sample: the error says what to write instead."""

from __future__ import annotations

import io
import pickle
import re
import tarfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import ShardError
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import GROUPS, Layout, Run, flattened, grouped
from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset
from support.loader_data import make_dataset

MOST_CHARACTERS = 300


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("drop_last", '`tail`: "drop"'),
        *((name, "StreamingDataLoader") for name in ("num_workers", "prefetch_factor", "persistent_workers")),
        *((name, "StreamingDataLoader") for name in ("worker_init_fn", "generator")),
        *((name, "CudaPrefetcher") for name in ("pin_memory", "pin_memory_device")),
        *((name, "its own order") for name in ("sampler", "batch_sampler")),
        ("weights", "Stream(path, weight=…)"),
        ("proportion", "Stream(path, weight=…)"),
        *((name, f"Stream(path, {name}=…)") for name in ("weight", "repeat", "choose", "exclude")),
        ("remote", "the path or URL"),
        ("local", "`cache_dir`"),
        ("shuffle_seed", "`seed`"),
        ("shuffle_algo", "`shuffle`"),
        *((name, "`order=Order(window=…)`") for name in ("shuffle_block_size", "item_shuffle_window")),
        ("num_canonical_nodes", "`order=Order(lanes=…)`"),
        ("predownload", "not needed"),
        *((name, "`cache_bytes`") for name in ("cache_limit", "max_cache_size", "cache_size")),
        ("batching_method", "batches mix the streams"),
        ("epoch_size", "`order=Order(epoch_samples=…)`"),
        ("input_dir", "shardkit convert"),
        ("subsample", "`exclude`"),
        *((name, "rank and world size") for name in ("nodesplitter", "workersplitter")),
        ("resampled", "`endless=True`"),
        ("handler", "exclude=[row]"),
        ("num_replicas", "`world_size`"),
        ("zzz", "LoaderConfig"),
        ("lane", "did you mean order=Order(lanes=…)?"),
        ("shufle", "did you mean shuffle?"),
        ("bacth_size", "did you mean batch_size?"),
        ("sead", "did you mean seed?"),
    ],
)
def test_a_name_of_another_loader_is_answered_in_one_line(tmp_path: Path, name: str, says: str) -> None:
    data = make_dataset(tmp_path / "data", "mds")
    makers: tuple[Callable[..., object], ...] = (StreamingLoader, StreamingDataset)
    for make in makers:
        with pytest.raises(TypeError) as caught:
            make(data, batch_size=2, **{name: 1})
        message = str(caught.value)
        assert repr(name) in message
        assert says in message
        assert len(message) < MOST_CHARACTERS
        assert "\n" not in message


@pytest.mark.parametrize("name", [field.name for kind in GROUPS.values() for field in fields(kind)])  # type: ignore[arg-type]
def test_an_option_of_a_group_is_answered_with_its_group(tmp_path: Path, name: str) -> None:
    make: Any = StreamingLoader
    with pytest.raises(TypeError, match=rf"^{name} belongs to a group .*=(Layout|Order|Run)\({name}=…\)$"):
        make(tmp_path, batch_size=2, **{name: 1})


def test_a_group_is_checked_when_it_is_made_and_keeps_what_was_given() -> None:
    layout: Any = Layout
    with pytest.raises(TypeError, match="cu_seqlen'; did you mean cu_seqlens"):
        layout(cu_seqlen=True)
    with pytest.raises(TypeError, match=r"layout must be a .*Layout"):
        flattened({"layout": True})
    with pytest.raises(TypeError, match=r"pass order=Order\(lanes=…\)"):
        flattened({"lanes": 4})  # by way of what wraps a loader
    given = {"labels": True, "layout": Layout(flat=False, cu_seqlens=9), "run": {"prefetch_batches": 3}}
    flat = {"labels": True, "flat": False, "cu_seqlens": 9, "prefetch_batches": 3}
    assert flattened(given) == flat
    assert grouped(flat) == given | {"run": Run(prefetch_batches=3)}
    assert flattened(grouped(flat)) == flat
    copied = pickle.loads(pickle.dumps(given["layout"]))
    assert repr(copied) == repr(given["layout"]) == "Layout(cu_seqlens=9, flat=False)"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": None}, "ranks and resumed runs need the same seed"),
        ({"shuffle": True}, 'give shuffle="window"'),
        ({"shuffle": False}, 'give shuffle="none"'),
        ({"batch_size": None}, "the loader makes the batches"),
        ({"batch_size": 8.0}, "the loader makes the batches"),
    ],
)
def test_a_value_of_another_loader_is_answered_too(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    data = make_dataset(tmp_path / "data", "mds")
    with pytest.raises(ValueError, match=re.escape(says)):
        StreamingLoader(data, **grouped({"batch_size": 2, **options}))


def test_a_batch_size_by_position_is_answered_with_its_name(tmp_path: Path) -> None:
    make: Any = StreamingLoader
    with pytest.raises(TypeError, match=r"^StreamingLoader\(\) takes dataset by position; .* batch_size=…$"):
        make(make_dataset(tmp_path / "data", "mds"), 8)


def test_a_list_of_exclusions_that_does_not_exist_is_named_with_the_option(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "data", "mds")
    with pytest.raises(
        FileNotFoundError, match=r"^exclude: .*rows.txt: there is no such file; .* holds data$"
    ):
        StreamingLoader([Stream(data, exclude=tmp_path / "rows.txt")], batch_size=2)


@pytest.mark.parametrize(("name", "says"), [("shuffle", "`shuffle`"), ("drop_last", "`tail`")])
def test_names_of_a_data_loader_that_the_dataset_decides_are_answered(
    tmp_path: Path, name: str, says: str
) -> None:
    dataset: Any = StreamingDataset(make_dataset(tmp_path / "data", "mds"), batch_size=2)
    make: Any = StreamingDataLoader
    with pytest.raises(TypeError, match=says):
        make(dataset, **{name: True})


@pytest.mark.parametrize("wrong", ["data", None])
def test_a_data_loader_over_something_else_names_the_dataset_it_takes(wrong: Any) -> None:
    with pytest.raises(TypeError, match=rf"takes a StreamingDataset\(path, batch_size=…\), not {wrong!r}$"):
        StreamingDataLoader(wrong, num_workers=1)


def make_tars(folder: Path) -> Path:
    """Two tars of ten samples, of which the second's number 3 holds no JSON."""
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as file:
            for number in range(10):
                data = b"{bad" if (shard, number) == (1, 3) else b'{"a": 1}'
                member = tarfile.TarInfo(f"{shard}{number:03d}.json")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
    return folder


@pytest.mark.parametrize("mixed", [False, True])
def test_a_broken_sample_is_named_with_the_option_that_leaves_it_out(tmp_path: Path, mixed: bool) -> None:
    """The value to paste is the row's number in its dataset, also in a mixture."""
    data = make_tars(tmp_path / "data")
    streams = [Stream(make_tars(tmp_path / "other"), exclude=[13], name="other")] if mixed else []
    options: dict[str, Any] = {"batch_size": 2, "shuffle": "none", "columns": ["json"]}
    with (
        StreamingLoader([*streams, Stream(data)], **grouped(options)) as loader,
        pytest.raises(ShardError, match=r"1\.tar: .*; Stream\(path, exclude=\[13\]\) leaves this row out"),
    ):
        list(loader)
    with StreamingLoader([*streams, Stream(data, exclude=[13])], **grouped(options)) as loader:
        assert sum(len(batch["json"]) for batch in loader) >= (38 if mixed else 19)
