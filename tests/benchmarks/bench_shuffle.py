"""How random data comes out that nobody shuffled: datasets sorted by source, in the default order of loaders.

    python tests/benchmarks/bench_shuffle.py batches|training [--seeds 3] [--json] [--save PREFIX]

The first half of the shards is of one source, the second of another, as after a conversion. Orders: a true
shuffle (`random`); ours with all defaults; streaming's py1e with one canonical node, with a block of 2^18
samples, and with one that holds as many samples as our windows (`same rows`), by the library itself;
webdataset's shuffle of 1,000 samples in 8 processes, each with an eighth of the shuffled shards.

batches    global batches of 256 of one epoch, against random ones (1 = random, 0 = too even):
             source ratio   variance of a source's share in a batch
             drift          the same of the mean of 20 batches in a row
             lag 1          correlation of the share with that of the next batch
             shards         distinct shards in a batch
             in use         the most shards that are needed both before and after a point of the epoch: what a
                            cache must hold so that none is fetched twice
training   a bigram model on 38,400 rows of an easy and a hard source, batches of 64: the loss after step 100,
             standard deviation of steps and of means of 20 steps against random ones, range of these means

Figures are medians over the seeds.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import Heads, benchmark_parser, give
from shardkit.order.arrangement import Arrangement, StreamSizes, first_settings
from support.peers import import_streaming

Samples = npt.NDArray[np.int64]
"""The samples of one epoch in their order, numbered as they are in the dataset."""

BATCH, MEAN_OF, WORKERS, BUFFER, BLOCK = 256, 20, 8, 1000, 1 << 18
CASES = ((8, 8192), (100, 2048), (2000, 256))
BATCH_HEADS: Heads = {
    "data": ("shards x rows", ""),
    "order": ("order", ""),
    "source_ratio": ("source ratio", ".2f"),
    "drift": ("drift", ".2f"),
    "lag_1": ("lag 1", ".2f"),
    "shards": ("shards", ".0f"),
    "in_use": ("in use", ".0f"),
}
TRAINING_HEADS: Heads = {
    "data": ("shards x rows", ""),
    "order": ("order", ""),
    "sd": ("sd of loss, x random", ".2f"),
    "sd_of_means": ("sd of means, x random", ".2f"),
    "lowest": ("lowest mean", ".2f"),
    "highest": ("highest mean", ".2f"),
}
TRAINED, TRAINED_BATCH, VOCABULARY, LENGTH, WARM_UP = 38_400, 64, 64, 32, 100


def orders(shards: int, rows: int, seed: int) -> Iterator[tuple[str, Samples]]:
    """Yield the name and the first epoch of every order."""
    samples = shards * rows
    yield "random", np.random.default_rng(seed).permutation(samples).astype(np.int64)
    sizes = StreamSizes("data", "", np.full(shards, rows), samples << 14, False, is_shuffled=False)
    settings = first_settings([sizes], seed=seed)
    found = Arrangement(settings, [sizes]).order.locate((0, samples))
    yield "shardkit", found.sample_id.astype(np.int64)
    held = settings.order.lanes * settings.order.window
    import_streaming()
    from streaming.base.shuffle.py1e import get_shuffle_py1e

    for name, block in (("py1e, 2^18", BLOCK), ("py1e, same rows", min(held, samples))):
        ids = get_shuffle_py1e(np.full(shards, rows), 1, seed, 0, block)
        yield name, np.asarray(ids, np.int64)
    yield "webdataset, 8 x 1,000", webdataset_order(shards, rows, seed)


def webdataset_order(shards: int, rows: int, seed: int) -> Samples:
    """Return an epoch of processes with shards of their own, each of which gives an eighth of every batch."""
    import webdataset

    chosen = random.Random(seed)
    order = chosen.sample(range(shards), shards)
    each = []
    for worker in range(WORKERS):
        own = (shard * rows + row for shard in order[worker::WORKERS] for row in range(rows))
        shuffle = webdataset.filters.shuffle(BUFFER, rng=random.Random(chosen.random()))
        each.append(np.fromiter(shuffle(own), np.int64))
    part = BATCH // WORKERS
    steps = min(map(len, each)) // part
    return np.stack([one[: steps * part].reshape(steps, part) for one in each], axis=1).ravel()


def batch_figures(samples: Samples, shards: int, rows: int) -> dict[str, float]:
    """Return the figures of one epoch of batches."""
    batches = samples[: len(samples) // BATCH * BATCH].reshape(-1, BATCH)
    share = (batches < shards * rows // 2).mean(1)
    expected = 0.25 / BATCH * (1 - BATCH / (shards * rows))  # of draws without replacement
    means = share[: len(share) // MEAN_OF * MEAN_OF].reshape(-1, MEAN_OF).mean(1)
    shard = samples // rows
    _, first = np.unique(shard, return_index=True)
    last = len(shard) - 1 - np.unique(shard[::-1], return_index=True)[1]
    change = np.zeros(len(shard) + 1, np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, last + 1, -1)
    return {
        "source_ratio": share.var() / expected,
        "drift": means.var() / expected * MEAN_OF,
        "lag_1": float(np.corrcoef(share[:-1], share[1:])[0, 1]) if share.std() else 0.0,
        "shards": float(np.mean([len(np.unique(batch)) for batch in batches // rows])),
        "in_use": int(change.cumsum().max()),
    }


def training_rows(seed: int) -> torch.Tensor:
    """Return int64[TRAINED, LENGTH]: walks in two graphs, with 4 and with 24 followers of a token."""
    generator = np.random.default_rng(seed)
    rows = np.empty((TRAINED, LENGTH), np.int64)
    half = TRAINED // 2
    for source, followers in enumerate((4, 24)):
        table = np.stack([generator.permutation(VOCABULARY)[:followers] for _ in range(VOCABULARY)])
        part = rows[source * half : (source + 1) * half]
        part[:, 0] = generator.integers(0, VOCABULARY, half)
        for place in range(1, LENGTH):
            part[:, place] = table[part[:, place - 1], generator.integers(0, followers, half)]
    return torch.from_numpy(rows)


def losses(rows: torch.Tensor, samples: Samples) -> npt.NDArray[np.float64]:
    """Return the loss of every step of an epoch in this order."""
    torch.manual_seed(0)
    model = torch.nn.Embedding(VOCABULARY, VOCABULARY)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    found = []
    for start in range(0, len(samples), TRAINED_BATCH):
        tokens = rows[torch.from_numpy(samples[start : start + TRAINED_BATCH])]
        logits = model(tokens[:, :-1]).reshape(-1, VOCABULARY)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(loss.item())
    return np.array(found[WARM_UP:])


def training_figures(samples: Samples, rows: torch.Tensor) -> dict[str, float]:
    """Return the swings of the loss in this order."""
    loss = losses(rows, samples)
    means = loss[: len(loss) // MEAN_OF * MEAN_OF].reshape(-1, MEAN_OF).mean(1)
    return {
        "sd": loss.std(),
        "sd_of_means": means.std(),
        "lowest": means.min(),
        "highest": means.max(),
    }


def table(
    cases: tuple[tuple[int, int], ...],
    seeds: int,
    measure: Callable[[Samples, int, int, int], dict[str, float]],
) -> list[dict[str, Any]]:
    """Return a row for every order of every case, with medians over the seeds."""
    rows = []
    for shards, size in cases:
        found: dict[str, list[dict[str, float]]] = {}
        for seed in range(1, seeds + 1):
            for name, samples in orders(shards, size, seed):
                found.setdefault(name, []).append(measure(samples, shards, size, seed))
        for name, runs in found.items():
            medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            rows.append({"data": f"{shards:,} x {size:,}", "order": name, **medians, "runs": runs})
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("part", choices=["batches", "training"])
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.part == "batches":
        rows = table(
            CASES, arguments.seeds, lambda found, shards, size, _: batch_figures(found, shards, size)
        )
        give(arguments, rows, BATCH_HEADS)
        return
    torch.set_num_threads(1)
    data = {seed: training_rows(seed) for seed in range(1, arguments.seeds + 1)}
    cases = ((100, TRAINED // 100), (1000, TRAINED // 1000 + 1))
    rows = table(
        cases,
        arguments.seeds,
        lambda found, _, __, seed: training_figures(found[found < TRAINED], data[seed]),
    )
    for row in rows:
        if row["order"] == "random":
            base = row["sd"], row["sd_of_means"]
        row["sd"], row["sd_of_means"] = row["sd"] / base[0], row["sd_of_means"] / base[1]
    give(arguments, rows, TRAINING_HEADS)


if __name__ == "__main__":
    main()
