"""The training run that `shardkit trace` asks about, from a checkpoint's state or from a loader's options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.cli.common import add_order_arguments, count, storage_options
from shardkit.errors import MissingExtraError, ShardkitError, StateError
from shardkit.files import load_json

if TYPE_CHECKING:
    from shardkit.datasets.dataset import Dataset
    from shardkit.loaders.state import LoaderState
    from shardkit.order.exclusions import Exclusions
    from shardkit.order.order import Shuffle
    from shardkit.order.run_settings import RunSettings, Tail
    from shardkit.tools.trace.run import Run

__all__ = ["TracedRun", "add_run_arguments", "find_run", "read_state"]

_STATE_KEYS = {"position", "order_version", "streams", "tail"}

_MAX_STATE_BYTES = 64 << 20

_TORCH_ENDINGS = (".pt", ".pth", ".ckpt", ".bin")


@dataclass(frozen=True, slots=True)
class TracedRun:
    """A run, its streams' datasets, and the numbers of the streams that deliver the traced dataset."""

    run: Run
    datasets: list[Dataset]
    streams: list[int]


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that define the run."""
    group = parser.add_argument_group("the training run, to see when a row is delivered")
    group.add_argument(
        "--state",
        metavar="FILE",
        help="state of a loader as JSON, or a checkpoint of torch that contains one; defines everything "
        "except batch and world size (default: the options below)",
    )
    group.add_argument(
        "--stream",
        action="append",
        default=[],
        metavar="PATH",
        help="another dataset of the mixture in --state; may be repeated (default: none)",
    )
    group.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="FILE",
        help="exclusion list of the run; may be repeated for several streams (default: none)",
    )
    group.add_argument(
        "--batch-size", type=count, metavar="N", help="sequences per rank and step (default: no steps shown)"
    )
    group.add_argument("--world-size", type=count, default=1, metavar="N", help="ranks (default: 1)")
    group.add_argument(
        "--nodes", type=count, default=1, metavar="N", help="machines, for the default of lanes (default: 1)"
    )
    add_order_arguments(group)
    group.add_argument(
        "--epochs",
        type=count,
        metavar="N",
        help="number of epochs to search, from the first (default: those that the state has begun, or 1)",
    )


def find_run(arguments: argparse.Namespace, dataset: Dataset, opened: ExitStack) -> TracedRun | None:
    """The run that the options mean; None if they mean none. Other streams are closed with `opened`."""
    named = ("seed", "batch_size", "lanes", "window", "shuffle", "tail")
    given = [name for name in named if getattr(arguments, name) is not None]
    if arguments.state is None:
        if arguments.stream:
            arguments.misuse("--stream needs --state: the weights and the order of a mixture are in it")
        wanted = given or arguments.step is not None or arguments.position is not None
        return _from_options(arguments, dataset) if wanted else None
    if clashing := [name for name in given if name != "batch_size"]:
        arguments.misuse(f"--{clashing[0]} is in the state: leave it out")
    state = read_state(Path(arguments.state))
    datasets = [dataset, *_open_others(arguments, opened)]
    return _from_state(arguments, state, datasets)


def read_state(path: Path) -> LoaderState:
    """The loader's state in a JSON file or a checkpoint of torch, wherever in it; StateError."""
    from shardkit.loaders.state import LoaderState

    try:
        if path.suffix in _TORCH_ENDINGS:
            data = _load_torch(path)
        else:
            if path.stat().st_size > _MAX_STATE_BYTES:
                raise StateError(f"{path}: is larger than {_MAX_STATE_BYTES:,} bytes, so no state")
            data = load_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: cannot be read as JSON: {error}") from error
    states = {json.dumps(dict(each), sort_keys=True, default=str): each for each in _states_in(data)}
    if len(states) != 1:
        found = "no loader's state" if not states else f"{len(states)} different states of loaders"
        raise StateError(f"{path}: holds {found}: give the dict of StreamingLoader.state_dict() as JSON")
    return LoaderState.from_dict(next(iter(states.values())))


def _load_torch(path: Path) -> object:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtraError("torch", "torch", f"reading {path.name}") from error
    try:
        return torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # of pickle and torch, of many kinds
        raise StateError(
            f"{path}: no checkpoint that can be read: {error}; give the state as JSON"
        ) from error


def _states_in(data: object) -> Iterator[Mapping[str, Any]]:
    """The states of loaders anywhere in a checkpoint."""
    if isinstance(data, Mapping):
        if data.keys() >= _STATE_KEYS:
            yield data
            return
        for value in data.values():
            yield from _states_in(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from _states_in(value)


def _open_others(arguments: argparse.Namespace, opened: ExitStack) -> list[Dataset]:
    from shardkit.datasets.dataset import open_dataset

    storage = storage_options(arguments)
    return [opened.enter_context(open_dataset(path, storage=storage)) for path in arguments.stream]


def _exclusions(arguments: argparse.Namespace) -> dict[str, Exclusions]:
    """The lists that the run was given, by their digests."""
    from shardkit.order.exclusions import Exclusions

    try:
        found = [Exclusions.read(path) for path in arguments.without]
    except (OSError, ValueError) as error:
        raise ShardkitError(str(error)) from error
    return {each.digest: each for each in found}


def _from_state(arguments: argparse.Namespace, state: LoaderState, datasets: list[Dataset]) -> TracedRun:
    settings = state.settings
    by_fingerprint = {dataset.fingerprint: dataset for dataset in reversed(datasets)}
    lists = _exclusions(arguments)
    found, exclusions = [], []
    for number, stream in enumerate(settings.streams):
        called = f"stream {stream.name or number!r} of the state" if settings.mixture else "the state"
        if stream.fingerprint not in by_fingerprint:
            hint = "give its path with --stream" if settings.mixture else "give that dataset's path"
            raise StateError(
                f"{called} is of the dataset with fingerprint {stream.fingerprint}, and "
                f"{datasets[0].location} is {datasets[0].fingerprint}: {hint}"
            )
        if stream.excluded and stream.excluded not in lists:
            raise StateError(
                f"{called} leaves out the rows of an exclusion list with digest {stream.excluded}: give that "
                "list with --without"
            )
        found.append(by_fingerprint[stream.fingerprint])
        exclusions.append(lists[stream.excluded] if stream.excluded else None)
    traced = [n for n, each in enumerate(settings.streams) if each.fingerprint == datasets[0].fingerprint]
    if not traced:
        raise StateError(f"{datasets[0].location} is no stream of the state")
    run = _run(arguments, settings, found, exclusions, delivered=state.position)
    return TracedRun(run, found, traced)


def _from_options(arguments: argparse.Namespace, dataset: Dataset) -> TracedRun:
    from shardkit.order.order import OrderSpec
    from shardkit.order.run_settings import RunSettings, StreamSettings

    lists = list(_exclusions(arguments).values())
    if len(lists) > 1:
        raise ShardkitError("one dataset has one exclusion list: give --without once")
    excluded = lists[0] if lists else None
    shuffle: Shuffle = arguments.shuffle or "window"
    tail: Tail = arguments.tail or "carry"
    sizes = dataset.manifest.shard_samples
    try:
        kept = int((sizes if excluded is None else excluded.kept_of_shards(sizes)).sum())
        lanes, window = _shuffle_sizes(arguments, dataset, kept, shuffle, tail)
        spec = OrderSpec(17 if arguments.seed is None else arguments.seed, lanes, window, shuffle)
    except ValueError as error:
        raise ShardkitError(str(error)) from error
    stream = StreamSettings(dataset.fingerprint, kept, excluded="" if excluded is None else excluded.digest)
    settings = RunSettings(spec, tail, (stream,))
    return TracedRun(_run(arguments, settings, [dataset], [excluded]), [dataset], [0])


def _run(
    arguments: argparse.Namespace,
    settings: RunSettings,
    datasets: list[Dataset],
    exclusions: list[Exclusions | None],
    delivered: int | None = None,
) -> Run:
    """The run with these settings, whose batches are known if the options say their size."""
    from shardkit.loaders.plan import Arrangement, BatchPlan
    from shardkit.loaders.readers.streams import Streams
    from shardkit.tools.trace.run import Run

    names = [each.name or data.location for each, data in zip(settings.streams, datasets, strict=True)]
    order = Arrangement(Streams(datasets, names), settings, exclusions, [None] * len(datasets)).order
    plan = None
    if (batch_size := arguments.batch_size) is not None:
        try:
            plan = BatchPlan(settings.epoch_samples, batch_size, 0, arguments.world_size, settings.tail)
        except ValueError as error:
            raise ShardkitError(str(error)) from error
    return Run(settings, order, names, plan=plan, delivered=delivered)


def _shuffle_sizes(
    arguments: argparse.Namespace, dataset: Dataset, samples: int, shuffle: str, tail: str
) -> tuple[int, int]:
    """(lanes, window): as given, else those that a loader would take."""
    if shuffle != "window":
        return 1, 1
    if arguments.lanes is not None and arguments.window is not None:
        return arguments.lanes, arguments.window
    if arguments.batch_size is None:
        arguments.misuse("lanes and window follow from the batch size: give --batch-size, or both of them")
    if dataset.shards is not None and arguments.window is None:
        arguments.misuse(
            "the default window of a remote dataset depends on the loader's cache: give --window, as in its "
            "state or repr, or --state"
        )
    from shardkit.loaders.config import LoaderConfig
    from shardkit.loaders.defaults import stream_sizes
    from shardkit.loaders.plan import BatchPlan
    from shardkit.loaders.readers.sources import open_source
    from shardkit.loaders.readers.streams import Streams

    plan = BatchPlan(
        samples, arguments.batch_size, 0, arguments.world_size, "pad" if tail == "pad" else "carry"
    )
    streams = Streams([dataset], [dataset.location])
    config = LoaderConfig(lanes=arguments.lanes, window=arguments.window)
    row_bytes = open_source(streams, None, None).stored_bytes
    return stream_sizes(streams, plan, config, arguments.nodes, row_bytes)
