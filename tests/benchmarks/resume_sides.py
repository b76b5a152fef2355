"""One rank of a run of `bench_resume.py`, in a process of its own: `resume_sides.py LIBRARY REQUEST`.

REQUEST is JSON (see `Request`). Every batch is a line {"ids", "wrong"} on stdout when the loop has it, and
the state after `steps` batches a line {"state"}; "wrong" counts rows whose bytes are not those written.
Imports nothing but what its library needs, so that a peer may live in an environment without shardkit. Each
library is used as its documentation says for resuming, with its shuffle on.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LENGTH = 64  # tokens of a row; the first is its id
SPLITS = 8  # of lancedb: a global batch holds a row of each
SEED = 7


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a rank does: `folders` hold one dataset each, in every library's format."""

    folders: list[str]
    schedule: list[tuple[int, list[int]]]
    """Weights of the folders, from these positions (in rows over all ranks) on."""
    rank: int
    world_size: int
    workers: int
    batch: int
    states: list[Any]
    """Of the ranks of the run before, as its library gave them; empty at first."""
    cache: str | None
    """The folder of a cache, whose source is the dataset's folder."""
    excluded: list[int]
    """Rows to leave out since the state was saved, where a library does that itself."""

    @property
    def weights(self) -> list[int]:
        """Those that hold now."""
        return self.schedule[-1][1]

    @property
    def folder(self) -> Path:
        return Path(self.folders[0])

    @property
    def state(self) -> Any:
        """The rank's own state, or of another rank if there was none; None at first."""
        return self.states[self.rank % len(self.states)] if self.states else None


class UnsupportedError(Exception):
    """The library has nothing for this case; says what."""


Run = tuple[Callable[[int], Iterable[Any]], Callable[[], Any]]
"""(what gives the batches of the state's epoch, 0, or of the next one, 1; what gives the state)"""


def row(number: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The row with this id."""
    tokens = np.random.default_rng(number).integers(0, 50_000, LENGTH, dtype=np.int32)
    tokens[0] = number
    return tokens


def only_one(request: Request) -> None:
    if len(request.folders) > 1:
        raise UnsupportedError("no mixtures")


def no_cache(request: Request) -> None:
    if request.cache is not None:
        raise UnsupportedError("no cache")


def shardkit(request: Request) -> Run:
    """Rows removed during a run are masked, and weights that change are a schedule: the order stays."""
    from shardkit.loaders import Stream, StreamingLoader
    from shardkit.loaders.config import grouped
    from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset

    prefix = "" if request.cache is None else "local://"  # a URL is remote, a path is read in place
    mask = [(number, 0, LENGTH) for number in request.excluded] or None
    names = [Path(folder).name for folder in request.folders]
    streams = [
        Stream(f"{prefix}{folder}/mds", name=name, mask=mask)
        for folder, name in zip(request.folders, names, strict=True)
    ]
    options: Any = {"batch_size": request.batch, "rank": request.rank, "world_size": request.world_size}
    options |= {"seed": SEED, "cache_dir": request.cache, "tensors": "numpy"}
    options |= {"labels": True, "eos_id": 1 << 20}  # no row has it
    if len(streams) > 1:
        options["schedule"] = [
            (at, dict(zip(names, weights, strict=True))) for at, weights in request.schedule
        ]
    loader: Any
    if request.workers:
        loader = StreamingDataLoader(
            StreamingDataset(streams, **grouped(options)), num_workers=request.workers
        )
    else:
        loader = StreamingLoader(streams, **grouped(options))
    if request.state is not None:
        loader.load_state_dict(request.state)

    def batches(_: int) -> Iterator[Any]:
        for batch in loader:
            yield batch["tokens"][(batch["labels"] != -100).any(1)]

    return batches, loader.state_dict


def streaming(request: Request) -> Run:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from support.peers import import_streaming

    mosaicml = import_streaming()
    streams = []
    for folder, weight in zip(request.folders, request.weights, strict=True):
        local = f"{folder}/mds" if request.cache is None else f"{request.cache}/{Path(folder).name}"
        remote = None if request.cache is None else f"{folder}/mds"
        share = {"proportion": weight / sum(request.weights)} if len(request.folders) > 1 else {}
        streams.append(mosaicml.Stream(local=local, remote=remote, validate_hash="xxh64", **share))
    dataset = mosaicml.StreamingDataset(
        streams=streams, shuffle=True, shuffle_seed=SEED, batch_size=request.batch
    )
    loader = mosaicml.StreamingDataLoader(dataset, batch_size=request.batch, num_workers=request.workers)
    if request.state is not None:
        loader.load_state_dict(request.state)
    return lambda _: (batch["tokens"].numpy() for batch in loader), loader.state_dict


def litdata(request: Request) -> Run:
    import torch
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

    torch.distributed.init_process_group("gloo")  # where it finds rank and world size
    options: dict[str, Any] = {"shuffle": True, "seed": SEED}
    places = [f"{folder}/litdata" for folder in request.folders]
    if request.cache is not None:
        places = [f"local:{place}" for place in places]
        options["cache_dir"] = request.cache
    dataset: Any = [StreamingDataset(place, **options) for place in places]
    if len(dataset) == 1:
        [dataset] = dataset
    else:
        shares = [weight / sum(request.weights) for weight in request.weights]
        dataset = CombinedStreamingDataset(dataset, seed=SEED, weights=shares, iterate_over_all=False)
    loader = StreamingDataLoader(dataset, batch_size=request.batch, num_workers=request.workers)
    if request.state is not None:
        loader.load_state_dict(request.state)
    return lambda _: (batch.numpy() for batch in loader), loader.state_dict


def torchdata(request: Request) -> Run:
    """Rows by number, as most hand-written datasets have them."""
    only_one(request)
    no_cache(request)
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    class Rows(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self._rows = np.load(request.folder / "rows.npy", mmap_mode="r")

        def __len__(self) -> int:
            return len(self._rows)

        def __getitem__(self, number: int) -> Any:
            return torch.from_numpy(self._rows[number].copy())

    rows, place = Rows(), {"num_replicas": request.world_size, "rank": request.rank}
    sampler = StatefulDistributedSampler(rows, shuffle=True, seed=SEED, **place)
    loader = StatefulDataLoader(rows, request.batch, sampler=sampler, num_workers=request.workers)
    if request.state is not None:
        loader.load_state_dict(request.state)
    return lambda _: (batch.numpy() for batch in loader), loader.state_dict


def webdataset(request: Request) -> Run:
    """It has no state; torchdata's StatefulDataLoader counts, and replays as many samples."""
    no_cache(request)
    import webdataset as wds
    from torchdata.stateful_dataloader import StatefulDataLoader

    def pipeline(folder: str) -> Any:
        shards = sorted(str(file) for file in Path(folder, "tar").glob("*.tar"))
        options = {"nodesplitter": wds.split_by_node, "detshuffle": True, "seed": SEED, "empty_check": False}
        samples = wds.WebDataset(shards, shardshuffle=len(shards), **options).shuffle(100, seed=SEED).decode()
        return samples.to_tuple("tokens.npy").map(lambda sample: sample[0])

    mixed = [pipeline(folder) for folder in request.folders]
    dataset = mixed[0] if len(mixed) == 1 else wds.RandomMix(mixed, request.weights)
    loader = StatefulDataLoader(dataset, request.batch, num_workers=request.workers)
    if request.state is not None:
        loader.load_state_dict(request.state)
    return lambda _: (batch.numpy() for batch in loader), loader.state_dict


def datasets(request: Request) -> Run:
    """An iterable dataset in a StatefulDataLoader, as Hugging Face's documentation has it."""
    no_cache(request)
    from datasets import interleave_datasets, load_from_disk
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader

    parts = []
    for folder in request.folders:
        rows = load_from_disk(f"{folder}/datasets")
        parts.append(rows.to_iterable_dataset(num_shards=16).shuffle(seed=SEED, buffer_size=100))
    shares = [weight / sum(request.weights) for weight in request.weights]
    whole = parts[0] if len(parts) == 1 else interleave_datasets(parts, probabilities=shares, seed=SEED)
    dataset = split_dataset_by_node(
        whole.with_format("torch"), rank=request.rank, world_size=request.world_size
    )
    loader = StatefulDataLoader(dataset, request.batch, num_workers=request.workers)
    if request.state is not None:
        loader.load_state_dict(request.state)
    return lambda _: (batch["tokens"].numpy() for batch in loader), loader.state_dict


def grain(request: Request) -> Run:
    no_cache(request)
    import grain

    parts = [np.load(Path(folder) / "rows.npy") for folder in request.folders]
    iterators = []

    def batches(later: int) -> Iterator[Any]:
        whole = [grain.MapDataset.source(part).shuffle(seed=SEED + later) for part in parts]
        mixed = whole[0] if len(whole) == 1 else grain.MapDataset.mix(whole, weights=request.weights)
        own = mixed[request.rank :: request.world_size].batch(request.batch).to_iter_dataset()
        if request.workers:
            own = own.mp_prefetch(grain.MultiprocessingOptions(num_workers=request.workers))
        iterators.append(iter(own))
        if request.state is not None and not later:
            iterators[-1].set_state(request.state)
        return iterators[-1]  # type: ignore[no-any-return]

    return batches, lambda: iterators[-1].get_state()


def tokens_of(part: Any) -> Any:
    return np.stack(part.column("tokens").to_numpy(zero_copy_only=False))


def lancedb(request: Request) -> Run:
    """The states of all ranks are merged, and `num_splits` stays, as its documentation says."""
    only_one(request)
    no_cache(request)
    import lancedb
    from lancedb.streaming import StreamingDataLoader, StreamingDataset

    table = lancedb.connect(f"{request.folder}/lance").open_table("rows")
    state = StreamingDataset.merge_state_dicts(request.states) if request.states else None
    made = []

    def batches(later: int) -> Iterator[Any]:
        dataset = StreamingDataset(
            table,
            num_splits=SPLITS,
            shuffle_seed=SEED,
            rank=request.rank,
            world_size=request.world_size,
            filter=f"number not in ({', '.join(map(str, request.excluded))})" if request.excluded else None,
            transform=tokens_of,
            epoch=later + (0 if state is None else state["epoch"]),
        )
        if state is not None and not later:
            dataset.load_state_dict(state)
        made.append(dataset)
        options = {"batch_size": request.batch, "num_workers": request.workers}
        context = "spawn" if request.workers else None
        for batch in StreamingDataLoader(dataset, multiprocessing_context=context, **options):
            yield batch.numpy()

    return batches, lambda: made[-1].state_dict()


LIBRARIES: dict[str, Callable[[Request], Run]] = {
    "shardkit": shardkit,
    "streaming": streaming,
    "litdata": litdata,
    "torchdata": torchdata,
    "webdataset": webdataset,
    "datasets": datasets,
    "grain": grain,
    "lancedb": lancedb,
}


def write_peer(library: str, folder: str) -> None:
    """The rows of `folder`/rows.npy in the format of a library that writes it itself."""
    rows = np.load(f"{folder}/rows.npy")
    place = f"{folder}/{library}"
    if library == "litdata":
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(place, chunk_size=32)
        for number, tokens in enumerate(rows):
            writer[number] = tokens
        writer.done()
        writer.merge(1)
    elif library == "datasets":
        from datasets import Dataset

        Dataset.from_dict({"tokens": list(rows)}).save_to_disk(place, num_shards=16)
    elif library == "lancedb":
        import lancedb
        import pyarrow as pa

        tokens = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), LENGTH)
        table = pa.table({"number": range(len(rows)), "tokens": tokens})
        lancedb.connect(f"{folder}/lance").create_table("rows", table)


def encoded(state: Any) -> str:
    return base64.b64encode(pickle.dumps(state)).decode()


def _epochs(batches: Callable[[int], Iterable[Any]]) -> Iterator[Iterable[Any]]:
    """What is left of an epoch; of the next one, if nothing is."""
    first = iter(batches(0))
    for batch in first:
        yield [batch]
        yield first
        return
    yield batches(1)


def run(library: str, asked: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    """One epoch, or `steps` batches and then `further` ones, which a killed run has not in its state."""
    steps, further = asked.pop("steps"), asked.pop("further")
    states = [pickle.loads(base64.b64decode(text)) for text in asked.pop("states")]
    request = Request(**asked, states=states)
    os.environ |= {"RANK": str(request.rank), "WORLD_SIZE": str(request.world_size)}
    os.environ |= {"LOCAL_RANK": str(request.rank), "LOCAL_WORLD_SIZE": str(request.world_size)}
    batches, state = LIBRARIES[library](request)
    found = 0
    # An epoch whose state was saved at its end may have nothing left: the loop goes to the next one.
    for found, batch in enumerate(itertools.chain.from_iterable(_epochs(batches)), 1):
        ids = [int(tokens[0]) for tokens in batch]
        wrong = sum(
            not np.array_equal(tokens, row(number)) for tokens, number in zip(batch, ids, strict=True)
        )
        answer({"ids": ids, "wrong": wrong})
        if steps == found:
            answer({"state": encoded(state())})
        if steps is not None and found == steps + further:
            break
    if steps is None:
        answer({"state": encoded(state())})
    answer({"end": found})


def main() -> None:
    library, text = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, and so may their workers

    def answer(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=answers, flush=True)

    try:
        if text.startswith("/"):
            write_peer(library, text)
        else:
            run(library, json.loads(text), answer)
    except UnsupportedError as error:
        answer({"unsupported": str(error)})
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
    with contextlib.suppress(OSError):
        answers.close()
    os._exit(0)  # peers' threads may keep the process


def rows_of(numbers: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.stack([row(number) for number in numbers])


if __name__ == "__main__":
    main()
