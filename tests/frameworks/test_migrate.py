"""Arguments of mosaicml-streaming and litdata make a loader of the same samples; each is accounted for."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from torch.utils.data import DataLoader

from shardkit.cli.main import main
from shardkit.formats import mds
from shardkit.loaders import StreamingLoader
from shardkit.loaders.integrations.migrate import (
    LITDATA,
    STREAM,
    STREAMING,
    LitdataArguments,
    StreamingArguments,
    from_litdata,
    from_streaming,
)
from shardkit.storage import open_store
from support import peers
from support.remote_harness import fresh_url, put_folder

CHUNKS = Path(__file__).resolve().parents[1] / "golden" / "convert"
ROWS = {"a": 96, "b": 32}

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


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "args", "kwargs"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MDS datasets "a" and "b"; their rows begin with numbers from 0 and from 1,000."""
    folder = tmp_path_factory.mktemp("mds")
    for first, (name, count) in zip((0, 1000), ROWS.items(), strict=True):
        rows = np.zeros((count, 4), dtype=np.uint16)
        rows[:, 0] = first + np.arange(count)
        columns, size = {"tokens": "ndarray:uint16:4"}, 400
        with mds.MdsWriter(folder / name, columns=columns, shard_bytes=size, hashes=["xxh64"]) as writer:
            writer.write_rows(rows)
    return folder


def ours(loader: StreamingLoader) -> list[int]:
    with loader:
        return [int(row[0]) for batch in loader for row in batch["tokens"]]


def theirs(arguments: dict[str, Any], local: Path) -> list[int]:
    """An epoch of mosaicml-streaming's, on one rank."""
    with peers.streaming_datasets() as streaming:
        made = dict(arguments)
        if "streams" in made:
            made["streams"] = [
                streaming.Stream(local=str(local / str(number)), **stream)
                for number, stream in enumerate(made["streams"])
            ]
        else:
            made["local"] = str(local)
        dataset = streaming.StreamingDataset(**made)
        return [int(row[0]) for batch in DataLoader(dataset, batch_size=8) for row in batch["tokens"].int()]


def test_every_argument_of_mosaicml_streaming_has_a_rule() -> None:
    streaming = peers.import_streaming()
    dataset, loader = parameters(streaming.StreamingDataset.__init__), parameters(DataLoader.__init__)
    assert STREAMING.keys() == (dataset | loader) - {"dataset"}
    assert STREAM.keys() == parameters(streaming.Stream.__init__)
    assert get_type_hints(StreamingArguments).keys() == STREAMING.keys()


def test_every_argument_of_litdata_has_a_rule() -> None:
    recorded = {*LITDATA_DATASET.split(), *LITDATA_LOADER.split()}
    assert LITDATA.keys() == recorded | parameters(DataLoader.__init__) - {"dataset"}
    assert get_type_hints(LitdataArguments).keys() == LITDATA.keys()


def test_the_recorded_arguments_are_litdatas() -> None:
    litdata = pytest.importorskip("litdata")
    assert parameters(litdata.StreamingDataset.__init__) == set(LITDATA_DATASET.split())
    assert parameters(litdata.StreamingDataLoader.__init__) - {"dataset"} == set(LITDATA_LOADER.split())


MIXTURES: dict[str, dict[str, Any]] = {
    "one": {"remote": "a"},
    "as they are": {"streams": [{"remote": "a"}, {"remote": "b"}]},
    "repeat and choose": {"streams": [{"remote": "a", "repeat": 1}, {"remote": "b", "choose": 64}]},
    "proportions": {
        "streams": [{"remote": "a", "proportion": 0.75}, {"remote": "b", "proportion": 0.25}],
        "epoch_size": "128",
    },
    "parts": {"streams": [{"remote": "a", "repeat": 0.5}, {"remote": "b", "choose": 40}]},
    "a larger epoch of one": {"remote": "b", "epoch_size": 96},
    "a smaller epoch": {"streams": [{"remote": "a"}, {"remote": "b"}], "epoch_size": 32},
}


def placed(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments with whole paths."""
    made = dict(arguments)
    if "streams" in made:
        made["streams"] = [stream | {"remote": str(folder / stream["remote"])} for stream in made["streams"]]
    else:
        made["remote"] = str(folder / made["remote"])
    return made | {"batch_size": 8}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # theirs
@pytest.mark.parametrize(("name", "shuffle"), [*((name, True) for name in MIXTURES), ("as they are", False)])
def test_an_epoch_has_the_samples_of_mosaicmls(
    name: str, shuffle: bool, folder: Path, tmp_path: Path
) -> None:
    arguments = placed(MIXTURES[name], folder) | {"shuffle": shuffle}
    expected = Counter(theirs(arguments, tmp_path))
    found = Counter(ours(from_streaming(**arguments).loader))
    for first in (0, 1000):  # of each stream as many
        mine, its = (
            {n: c for n, c in counts.items() if first <= n < first + 1000} for counts in (found, expected)
        )
        assert sum(mine.values()) == sum(its.values())
        assert sorted(mine.values()) == sorted(its.values()), "as often, also where a part is drawn"
    if name not in ("parts", "a smaller epoch"):
        assert found == expected


@pytest.mark.parametrize("name", MIXTURES)
def test_a_run_resumes_exactly_on_other_ranks(name: str, folder: Path) -> None:
    arguments = placed(MIXTURES[name], folder) | {"shuffle": True}
    with from_streaming(**arguments).loader as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        rest = [int(row[0]) for batch in batches for row in batch["tokens"]]
    shares = []
    for rank in range(2):
        loader, _ = from_streaming(**arguments | {"batch_size": 4}, rank=rank, world_size=2)
        loader.load_state_dict(state)
        shares.append(ours(loader))
    steps = [sorted(rest[i : i + 8]) for i in range(0, len(rest), 8)]
    assert [sorted(a + b) for a, b in zip(*(chunks(s) for s in shares), strict=True)] == steps


def chunks(numbers: list[int]) -> list[list[int]]:
    return [numbers[i : i + 4] for i in range(0, len(numbers), 4)]


def test_streams_of_theirs_are_read(folder: Path, tmp_path: Path) -> None:
    with peers.streaming_datasets() as streaming:
        streams = [
            streaming.Stream(remote=str(folder / "a"), local=str(tmp_path / "a"), repeat=2),
            streaming.Stream(local=str(folder), split="b"),
        ]
    loader, report = from_streaming(streams=streams, batch_size=8)
    assert Counter(ours(loader)) == Counter([*range(96), *range(96), *range(1000, 1032)])
    assert "streams[0].repeat=2: taken over: `weight`" in str(report)


def test_the_arguments_of_one_stream_may_be_given_apart(folder: Path) -> None:
    config = {"repeat": 2, "choose": None, "split": "b"}
    loader, report = from_streaming(remote=str(folder), stream_config=config, batch_size=8)
    assert Counter(ours(loader)) == Counter([*range(1000, 1032)] * 2)
    assert "stream_config.repeat=2: taken over" in str(report)


def test_the_report_says_what_became_of_each_argument(folder: Path, tmp_path: Path) -> None:
    url = fresh_url()
    put_folder(folder, open_store(url))
    loader, report = from_streaming(
        remote=url,
        local=str(tmp_path),
        split="a",
        batch_size=8,
        shuffle=True,
        shuffle_algo="naive",
        shuffle_seed=5,
        cache_limit="1.5gb",
        num_workers=4,
        drop_last=True,
        batching_method="random",
        collate_fn=None,
    )
    rows = ours(loader)
    assert sorted(rows) == list(range(96))
    call = (
        f"StreamingLoader('{url}/a', batch_size=8, shuffle='global', tail='drop', "
        f"cache_dir={str(tmp_path)!r}, cache_bytes=1610612736, seed=5)"
    )
    assert report.call == call
    assert ours(eval(call, {"StreamingLoader": StreamingLoader})) == rows
    assert {one.argument: one.outcome for one in report.arguments} == {
        "remote": "taken over",
        "local": "taken over",
        "split": "taken over",
        "batch_size": "taken over",
        "shuffle": "taken over",
        "shuffle_algo": "taken over",
        "shuffle_seed": "taken over",
        "cache_limit": "taken over",
        "num_workers": "not needed",
        "drop_last": "taken over",
        "batching_method": "not needed",
        "collate_fn": "not needed",
    }
    assert str(report).endswith(call)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"batching_method": "per_stream"}, "batching_method='per_stream': refused: .* a loader for each"),
        ({"collate_fn": len, "sampler": [1]}, "collate_fn=.* call it in the loop.*; sampler=.*order"),
        ({"stream_name": "mine"}, "stream_name='mine': refused"),
        ({"sampling_method": "fixed", "epoch_size": 40}, "sampling_method='fixed': refused: .*`exclude`"),
        ({"batch_size": None}, r"iterate over open_dataset\(path\)"),
        ({"streams": [{"remote": "a"}]}, "not both"),
        ({"replication": 2}, "does not divide the world size, 1"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(
    folder: Path, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        from_streaming(**{"remote": str(folder / "a"), "batch_size": 8, **arguments})


def test_an_argument_that_is_not_theirs_is_an_error(folder: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'"):
        from_streaming(remote=str(folder / "a"), batchsize=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'streams\[0\]\.weight'"):
        from_streaming(streams=[{"remote": "a", "weight": 8}])


def test_replicas_get_the_same_batches(folder: Path) -> None:
    epochs = [
        ours(
            from_streaming(
                remote=str(folder / "a"), batch_size=8, shuffle=True, replication=2, rank=rank, world_size=4
            ).loader
        )
        for rank in range(4)
    ]
    assert epochs[0] == epochs[1] != epochs[2] == epochs[3]
    assert sorted(epochs[0] + epochs[2]) == list(range(96))


def test_stratified_batches_are_those_of_exact_weights(folder: Path) -> None:
    streams = [{"remote": str(folder / name), "proportion": share} for name, share in (("a", 3), ("b", 1))]
    loader, _ = from_streaming(streams=streams, batch_size=8, batching_method="stratified", shuffle=True)
    with loader:
        assert {int((batch["tokens"][:, 0] < 1000).sum()) for batch in loader} == {6}
    with pytest.raises(ValueError, match="batching_method='stratified': refused"):
        from_streaming(streams=streams, batch_size=6, batching_method="stratified")


def test_pickles_are_read_where_they_were_allowed(tmp_path: Path) -> None:
    with mds.MdsWriter(tmp_path / "p", columns={"x": "pkl"}) as writer:
        writer.write({"x": {"a": 1}})
    loader, report = from_streaming(local=str(tmp_path / "p"), allow_unsafe_types=True)
    with loader:
        assert [batch["x"] for batch in loader] == [[{"a": 1}]]
    assert "allow_pickle=True" in report.call


def test_local_shards_are_verified_where_that_was_asked(folder: Path) -> None:
    loader, report = from_streaming(local=str(folder / "a"), batch_size=8, validate_hash="xxh64")
    assert sorted(ours(loader)) == list(range(96))
    assert "verify=True" in report.call


def test_what_litdata_delivers_is_delivered(tmp_path: Path) -> None:
    """Its chunks, converted, against the blocks that litdata's own loader gave."""
    expected = json.loads((CHUNKS / "expected.json").read_text())["litdata_tokens"]
    size = expected["block_size"]
    cut = ["--sequence-length", str(size), "--per-file", "--drop-tail"]
    assert main(["convert", str(CHUNKS / "litdata_tokens"), str(tmp_path / "rows"), *cut]) == 0
    arguments: Any = {"input_dir": str(CHUNKS / "litdata_tokens"), "max_cache_size": "10GB", "seed": 3}
    loader, report = from_litdata(tmp_path / "rows", **arguments)
    with loader:
        assert [batch["tokens"][0].tolist() for batch in loader] == expected["blocks"]
    assert "input_dir" in str(report)
    settings = "batch_size=1, shuffle='none', cache_bytes=10000000000, seed=3"
    assert report.call == f"StreamingLoader('{tmp_path}/rows', {settings})"
    with pytest.raises(ValueError, match="holds litdata's chunks: run `shardkit convert`"):
        from_litdata(CHUNKS / "litdata_tokens")
    with pytest.raises(ValueError, match=r"subsample=0\.5: refused: `exclude`"):
        from_litdata(tmp_path / "rows", subsample=0.5)
    with pytest.raises(ValueError, match=f"blocks of {size + 1} tokens, .*rows of {size}"):
        from_litdata(tmp_path / "rows", item_loader=_Blocks(size + 1))


class _Blocks:
    """As litdata's TokensLoader keeps its size."""

    def __init__(self, size: int) -> None:
        self._block_size = size
