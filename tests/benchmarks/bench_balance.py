"""How uneven the work of ranks is, by the order's own parts and balanced, on real document lengths.

    python tests/benchmarks/bench_balance.py [--corpus FOLDER] [--tokenizer FILE] [--megabytes 16] [--json]

Documents of a corpus are tokenized, and their lengths are drawn again and again into a stream that is cut
into rows of 8k, 32k and 128k tokens. A row costs the sum of its documents' squared lengths. For some thousand
rows in an order of lanes and windows, as a loader has it, and for so many rows a rank:

    order      the dearest rank's cost over the mean of all, summed over batches: what the order's parts give,
               which are random as far as work is concerned
    balanced   the same with `balance="attention"`; of the same global batches, which is asserted
    floor      what no placement can be below: the dearest row over the mean of a rank's rows, at least 1
    step       both, of steps of 16 batches: what gradient accumulation without communication waits for
    moved      of the rows, those that another node of 8 ranks takes: each is fetched from a bucket by itself
    ms         to plan a batch on one rank, with everything that a loader without balance plans, too

"worth" is order over balanced: the speedup of a step that is nothing but attention inside documents.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from figures import Heads, benchmark_parser, give
from shardkit.datasets.row_costs import table_of
from shardkit.order.balance import CostModel, RowCosts, WorkBalance
from shardkit.order.batches import BatchPlan, StepSizes
from shardkit.order.order import Order, OrderSpec, default_lanes, default_window
from texts import read_sources

Ints = npt.NDArray[np.int64]
SHARD_BYTES, TOKEN_BYTES = 64 << 20, 2
NODE = 8
ACCUMULATED = 16  # batches of a step
CASES = [(8, 1), (8, 4), (8, 16), (64, 1), (64, 4), (64, 16), (1024, 4)]
HEADS: Heads = {
    "length": ("tokens a row", ","),
    "ranks": ("ranks", ","),
    "rows": ("rows a rank", ","),
    "order": ("order", ".3f"),
    "balanced": ("balanced", ".3f"),
    "floor": ("floor", ".3f"),
    "worth": ("worth", ".2f"),
    "step_order": ("step: order", ".3f"),
    "step_balanced": ("balanced", ".3f"),
    "moved": ("moved", ".0%"),
    "ms": ("ms", ".2f"),
}


def document_lengths(corpus: Path | None, tokenizer: Path, megabytes: float) -> Ints:
    """Tokens of documents with the id behind each, of about so many MB of text drawn from a corpus."""
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(tokenizer))
    texts = read_sources(corpus)
    left, chosen = megabytes * 1e6, []
    for number in np.random.default_rng(1).permutation(len(texts)).tolist():
        if left <= 0:
            break
        chosen.append(texts[number])
        left -= len(texts[number].encode())
    lengths: list[int] = []
    for first in range(0, len(chosen), 64):
        lengths += [len(each.ids) + 1 for each in encode.encode_batch(chosen[first : first + 64])]
    return np.array(lengths)


def row_costs(lengths: Ints, length: int, rows: int) -> RowCosts:
    """The table of rows that a stream of documents of these lengths, drawn in a random order, is cut into."""
    random, drawn, total = np.random.default_rng(length), [], 0
    while total < rows * length:
        drawn.append(random.permutation(lengths))
        total += int(drawn[-1].sum())
    ends = np.cumsum(np.concatenate(drawn))
    cuts = np.unique(np.concatenate([[0], ends[ends < rows * length], np.arange(rows + 1) * length]))
    pieces = np.diff(cuts)
    squares = np.zeros(rows, dtype=np.uint64)
    np.add.at(squares, cuts[:-1] // length, (pieces * pieces).astype(np.uint64))
    return table_of(squares, length)


def measure(costs: RowCosts, length: int, ranks: int, rows: int) -> dict[str, object]:
    """The figures of about 32,768 rows, at least two steps of them, on so many ranks."""
    total = len(costs.squares)
    of_shard = max(1, SHARD_BYTES // (length * TOKEN_BYTES))
    sizes = np.diff([*range(0, total, of_shard), total])
    lanes = default_lanes(len(sizes))
    order = Order(sizes, OrderSpec(17, lanes, default_window(total, len(sizes), lanes)))
    plans = [BatchPlan(total, rows, rank, ranks, "carry") for rank in range(ranks)]
    count = max(2, min(256, 32_768 // (ranks * rows)) // ACCUMULATED) * ACCUMULATED
    balance = WorkBalance([costs], CostModel())
    assert_same_batches(plans, order, balance)
    times = []
    for first in range(0, min(count, 64), 8):  # as a loader plans: several batches at a time
        start = time.perf_counter()
        balance.steps(plans[0], order, first * ranks * rows, 8)
        times.append((time.perf_counter() - start) / 8)
    work = balance.steps(plans[0], order, 0, count).work
    steps = balance.with_step_sizes(StepSizes.of(ACCUMULATED * ranks * rows))
    work_of_steps = steps.steps(plans[0], order, 0, count).work
    assert work is not None
    assert work_of_steps is not None
    summed, dearest, plain = work[:, :3].sum(axis=0)
    step_summed, step_dearest, step_plain = work_of_steps[:, 3:].sum(axis=0)
    located = order.global_batches(0, ranks * rows, count)
    floors = np.maximum(costs.squares[located.sample_id].max(axis=1) * ranks / work[:, 0], 1.0)
    moved = [
        np.mean(balance.places(plans[0], order, batch * ranks * rows) // (NODE * rows) != home(ranks, rows))
        for batch in range(0, count, 8)
    ]
    return {
        "length": length,
        "ranks": ranks,
        "rows": rows,
        "order": plain * ranks / summed,
        "balanced": dearest * ranks / summed,
        "floor": float((floors * work[:, 0]).sum() / summed),
        "worth": plain / dearest,
        "step_order": step_plain * ranks / step_summed,
        "step_balanced": step_dearest * ranks / step_summed,
        "moved": float(np.mean(moved)),
        "ms": 1000 * statistics.median(times),
    }


def home(ranks: int, rows: int) -> Ints:
    """The node of each place of a global batch."""
    return np.arange(ranks * rows) // (NODE * rows)


def assert_same_batches(plans: list[BatchPlan], order: Order, balance: WorkBalance) -> None:
    """The first global batches of some ranks together hold the rows that they hold without balance."""
    if len(plans) > 64:
        places = balance.places(plans[0], order, 0)
        assert sorted(places.tolist()) == list(range(plans[0].global_batch))
        return
    placed, plain = (
        np.stack([ids.sample_id.reshape(4, -1) for ids in of_ranks], axis=1).reshape(4, -1)
        for of_ranks in (
            [balance.steps(plan, order, 0, 4) for plan in plans],
            [plan.steps(order, 0, 4) for plan in plans],
        )
    )
    assert (np.sort(placed, axis=1) == np.sort(plain, axis=1)).all()


def main() -> None:
    parser: argparse.ArgumentParser = benchmark_parser(__doc__)
    parser.add_argument("--corpus", type=Path, help="folder of JSONL and Parquet (default: of the test data)")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: gpt2 of the test data)")
    parser.add_argument("--megabytes", type=float, default=16, help="of text to tokenize (default: 16)")
    arguments = parser.parse_args()
    data = os.environ.get("SHARDKIT_TEST_DATA")
    tokenizer = arguments.tokenizer or (Path(data) / "tokenizers/gpt2/tokenizer.json" if data else None)
    if tokenizer is None:
        parser.error("name a --tokenizer, or set SHARDKIT_TEST_DATA")
    lengths = document_lengths(arguments.corpus, tokenizer, arguments.megabytes)
    table = []
    for length in (1 << 13, 1 << 15, 1 << 17):
        costs = row_costs(lengths, length, 1 << 17)
        table += [measure(costs, length, ranks, rows) for ranks, rows in CASES]
    give(arguments, table, HEADS, title="Cost of the dearest rank over the mean", unit="", runs="balanced")


if __name__ == "__main__":
    main()
