"""The pages for those who come from other loaders: snippets run, and tables name what there is."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from torch.utils.data import DataLoader

from shardkit.cache import CacheOptions
from shardkit.cli.main import main
from shardkit.datasets.dataset import open_dataset
from shardkit.formats import mds
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import GROUPS, LoaderConfig, Order
from shardkit.storage import open_store
from shardkit.synonyms import LITDATA, STREAM, STREAMING
from support import peers
from support.foreign_tars import PARTS, tars
from support.remote_harness import fresh_url, put_folder

CONVERTED = Path(__file__).resolve().parents[1] / "golden" / "convert"
GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
PAGE = GUIDES / "migrate.md"
SECTIONS = {
    "mosaicml-streaming": (GUIDES / "replace_streaming.md").read_text(),
    **dict(re.findall(r"^## From (\S+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)),
}
# Of litdata 0.2.76, which the tests' environment need not have.
LITDATA_DATASET = """
    input_dir cache_dir item_loader shuffle drop_last seed serializers max_cache_size subsample encryption
    storage_options session_options max_pre_download index_path force_override_state_dict transform
    num_canonical_nodes batch_decode item_shuffle_window window_direct_io
"""
LITDATA_LOADER = """
    batch_size num_workers profile_batches profile_skip_batches profile_dir profile_cprofile prefetch_factor
    shuffle drop_last collate_fn
"""
ROWS = np.random.default_rng(3).integers(1, 60_000, (96, 8)).astype(np.uint16)

Run = Callable[[str], dict[str, Any]]


def snippets(section: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a snippet, on small data in place of the page's; "seen" has what it gave to `train`."""
    (tmp_path / "buckets" / "tars").mkdir(parents=True)
    for name, rows in (("mds", ROWS), ("more", ROWS[:32] // 2)):
        with mds.MdsWriter(
            tmp_path / "buckets" / name, columns={"tokens": "ndarray:uint16:8"}, shard_bytes=400
        ) as writer:
            writer.write_rows(rows)
    for name, data in tars([part for part in PARTS if part[0] != part[1]]).items():
        (tmp_path / "buckets" / "tars" / name).write_bytes(data)
    url = fresh_url()
    put_folder(tmp_path / "buckets", open_store(url))
    monkeypatch.chdir(tmp_path)

    def run_snippet(code: str) -> dict[str, Any]:
        ours = "shardkit" in code
        code = code.replace("pipe:aws s3 cp s3://bucket", f"pipe:cat {tmp_path}/buckets").replace(
            ".tar -", ".tar"
        )
        code = code.replace("s3://bucket", url if ours else f"{tmp_path}/buckets")
        code = code.replace("/nvme/cache", f"{tmp_path}/cache").replace("num_workers=4", "num_workers=0")
        seen: list[Any] = []
        space: dict[str, Any] = {"seen": seen, "train": lambda *batch: seen.append(batch)}
        exec(compile(code, str(PAGE), "exec"), space)
        return space

    return run_snippet


def in_order(batches: Sequence[tuple[torch.Tensor, ...]]) -> list[bytes]:
    """The samples of batches as bytes, sorted."""
    return sorted(
        b"".join(part.numpy().tobytes() for part in sample)
        for batch in batches
        for sample in zip(*batch, strict=True)
    )


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # theirs
def test_a_loader_of_mosaicmls_becomes_one_of_ours(run: Run) -> None:
    theirs, ours, their_streams, our_streams, writer = snippets("mosaicml-streaming")
    with peers.streaming_datasets():
        before = [(batch.to(torch.int64),) for (batch,) in run(theirs)["seen"]]
        assert len(run(their_streams)["dataset"].streams) == 2
    after = run(ours)
    assert in_order(after["seen"]) == in_order(before)
    assert len(in_order(before)) == len(ROWS)
    assert after["state"]["position"] == len(ROWS)
    mixed = run(our_streams)["loader"]
    assert {tuple(batch["tokens"].shape) for batch in mixed} == {(8, 8)}
    mixed.close()
    run(writer)
    assert list(open_dataset("written")) == [{"text": "hello", "label": 1}]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # theirs
@pytest.mark.parametrize(
    ("of_a", "of_b", "of_dataset", "weights", "epoch_samples"),
    [
        ({"repeat": 1}, {"choose": 64}, {}, (96, 64), 160),
        ({"proportion": 0.75}, {"proportion": 0.25}, {"epoch_size": 128}, (3, 1), 128),
    ],
    ids=["repeat and choose", "proportions"],
)
def test_weights_and_epoch_samples_give_the_epochs_of_mosaicmls_streams(
    of_a: dict[str, Any],
    of_b: dict[str, Any],
    of_dataset: dict[str, Any],
    weights: tuple[int, int],
    epoch_samples: int,
    tmp_path: Path,
) -> None:
    """What the page's rows `repeat`, `choose`, `proportion` and `epoch_size` say."""
    for name, rows in (("a", ROWS), ("b", ROWS[:32] // 2)):
        with mds.MdsWriter(
            tmp_path / name, columns={"tokens": "ndarray:uint16:8"}, shard_bytes=400
        ) as writer:
            writer.write_rows(rows)
    with peers.streaming_datasets() as streaming:
        streams = [
            streaming.Stream(remote=str(tmp_path / name), local=str(tmp_path / f"local-{name}"), **arguments)
            for name, arguments in (("a", of_a), ("b", of_b))
        ]
        dataset = streaming.StreamingDataset(streams=streams, batch_size=8, shuffle=True, **of_dataset)
        expected = in_order([(batch["tokens"].int(),) for batch in DataLoader(dataset, batch_size=8)])
    mixture = [Stream(tmp_path / name, weight=weight) for name, weight in zip("ab", weights, strict=True)]
    with StreamingLoader(mixture, batch_size=8, order=Order(epoch_samples=epoch_samples)) as loader:
        assert in_order([(batch["tokens"].int(),) for batch in loader]) == expected


def test_mosaicml_repeats_samples_where_ranks_do_not_divide_them() -> None:
    """What the page says of it."""
    peers.import_streaming()
    from streaming.base.partition import get_partitions

    numbers = get_partitions("relaxed", 10, 1, 1, 4, 1, 2).ravel()
    assert sorted(numbers[numbers >= 0].tolist()) == sorted([*range(10), 5, 6])


def test_a_pipeline_of_webdatasets_becomes_a_loader(run: Run) -> None:
    theirs, ours, publish = snippets("webdataset")
    # Images of two sizes cannot be stacked, there or here: one at a time.
    before = run(theirs.replace(".batched(8)", ".batched(1)"))["seen"]
    after = run(ours.replace("batch_size=8", "batch_size=1"))["seen"]
    assert in_order(after) == in_order([(images, torch.as_tensor(labels)) for images, labels in before])
    assert len(after) == 23
    space = run(publish)
    with open_dataset(space["dataset"].location) as listed:
        assert listed.fingerprint == space["dataset"].fingerprint
        assert len(listed) == 23
        assert listed.shards is not None
        assert listed.shards.store.metrics.snapshot().bytes_read < len(tars()["part-000.tar"]), (
            "no tar was read"
        )


def test_what_litdata_wrote_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the page, on what litdata wrote in small."""
    expected = json.loads((CONVERTED / "expected.json").read_text())
    (tmp_path / "images").symlink_to(CONVERTED / "litdata_items")
    (tmp_path / "chunks").symlink_to(CONVERTED / "litdata_tokens")
    monkeypatch.chdir(tmp_path)
    [commands] = re.findall(r"```bash\n(.*?)```", SECTIONS["litdata"], re.DOTALL)
    block_size = expected["litdata_tokens"]["block_size"]
    for command in commands.splitlines():
        words = command.replace("2049", str(block_size)).replace("2048", "8").split()
        assert words[0] == "shardkit"
        assert main(words[1:]) == 0, command
    assert [sample["number"] for sample in open_dataset("mds")] == [
        row["number"] for row in expected["litdata_items"]
    ]
    [_, ours] = snippets("litdata")
    space: dict[str, Any] = {}
    exec(compile(ours.replace("batch_size=8", "batch_size=1"), str(PAGE), "exec"), space)
    with space["loader"] as loader:
        found = sorted(batch["number"].item() for batch in loader)
    assert found == [row["number"] for row in expected["litdata_items"]]
    assert tokens("rows") == expected["litdata_tokens"]["blocks"]
    stream = [t for document in expected["litdata_tokens"]["documents"] for t in [*document, 50256]]
    found = [t for row in tokens("packed") for t in row]
    assert found == stream + [50256] * (-len(stream) % 8)


def tokens(folder: str) -> list[list[int]]:
    dataset = open_dataset(folder)
    name = dataset.token_column
    assert name is not None
    return [np.asarray(sample[name]).tolist() for sample in dataset]


def table(section: str, title: str) -> list[tuple[str, str]]:
    """(left, right) cells of the table under `title`."""
    [text] = re.findall(
        rf"^\| {re.escape(title)} \| shardkit \|\n\|[-|]+\|\n((?:\|.*\n)+)", SECTIONS[section], re.MULTILINE
    )
    return [(row.split(" | ")[0], row.split(" | ")[1]) for row in text.splitlines()]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)(?:=[^`]*)?`", cell))


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "args", "kwargs"}


OURS = (
    parameters(StreamingLoader.__init__)
    | parameters(open_dataset)
    | {field.name for kind in (LoaderConfig, Stream, CacheOptions) for field in fields(kind)}
    | {"open_dataset", "exclude"}
    | GROUPS.keys()
)


@pytest.mark.parametrize("section", SECTIONS)
def test_what_stands_on_the_right_is_ours(section: str) -> None:
    for title in re.findall(r"^\| (.*) \| shardkit \|$", SECTIONS[section], re.MULTILINE):
        for _, right in table(section, title):
            assert names(right) - {"f"} <= OURS


@pytest.mark.parametrize(
    ("section", "title", "rules"),
    [
        ("mosaicml-streaming", "`StreamingDataset` and `StreamingDataLoader`", STREAMING),
        ("mosaicml-streaming", "`Stream`", STREAM),
        ("litdata", "litdata's `StreamingDataset` and `StreamingDataLoader`", LITDATA),
    ],
)
def test_the_tables_of_the_page_are_those_that_errors_quote(
    section: str, title: str, rules: Mapping[str, str]
) -> None:
    stated = {name: right for left, right in table(section, title) for name in names(left)}
    assert stated == {name: f"{text} |" for name, text in rules.items()}


def test_every_argument_of_mosaicml_streaming_has_its_row() -> None:
    streaming = peers.import_streaming()
    dataset, loader = parameters(streaming.StreamingDataset.__init__), parameters(DataLoader.__init__)
    assert STREAMING.keys() == (dataset | loader) - {"dataset"}
    assert STREAM.keys() == parameters(streaming.Stream.__init__)


def test_every_argument_of_litdata_has_its_row() -> None:
    recorded = {*LITDATA_DATASET.split(), *LITDATA_LOADER.split()}
    assert LITDATA.keys() == recorded | parameters(DataLoader.__init__) - {"dataset"}


def test_the_recorded_arguments_are_litdatas() -> None:
    litdata = pytest.importorskip("litdata")
    assert parameters(litdata.StreamingDataset.__init__) == set(LITDATA_DATASET.split())
    assert parameters(litdata.StreamingDataLoader.__init__) - {"dataset"} == set(LITDATA_LOADER.split())


def test_every_argument_of_webdatasets_dataset_has_its_row() -> None:
    rows = table("webdataset", "`WebDataset`")
    assert {name for left, _ in rows for name in names(left)} == parameters(webdataset.WebDataset.__init__)
