"""What the filter `ask` costs this side of the endpoint: CPU for each request, and for each kept answer.

    python tests/benchmarks/bench_ask.py [--documents 20000] [--bytes 4000] [--concurrency 32] [--runs 5]

A server in a process of its own answers every chat completion at once. `asked`: all documents are sent, and
their answers kept; user and system time of this process, everything included: the prompt, its digest, the
claim, HTTP, parsing, and writing the answer to the disk. `kept`: the same documents again, whose answers
are found in the folder. `new process`: as `kept`, with the folder opened anew. Figures are medians.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import Heads, benchmark_parser, give
from shardkit.writers.filters import answers
from shardkit.writers.filters.ask import AskConfig, AskFilter
from shardkit.writers.filters.batch import TextBatch
from support.filter_runs import documents
from support.model_server import ModelServer

BATCH_DOCUMENTS = 4096
HEADS: Heads = {
    "side": ("answers", ""),
    "cpu_us": ("CPU us a document", ",.0f"),
    "requests": ("requests", ","),
    "x": ("x", ".2f"),
}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def judge_all(step: AskFilter, batches: list[TextBatch]) -> tuple[float, int]:
    """CPU microseconds of a document, and the number of requests that were sent."""
    start = cpu_seconds()
    for batch in batches:
        step.judge(batch)
    count = sum(map(len, batches))
    return 1e6 * (cpu_seconds() - start) / count, int(step.take_spent().get("requests", 0))


def main() -> None:
    parser = benchmark_parser(__doc__, runs=5)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--bytes", type=int, default=4000, help="of a document")
    parser.add_argument("--concurrency", type=int, default=32)
    arguments = parser.parse_args()
    text = "some words " * (arguments.bytes // 11)
    texts = [f"{number} {text}" for number in range(arguments.documents)]
    starts = range(0, len(texts), BATCH_DOCUMENTS)
    batches = [TextBatch(documents(texts[start : start + BATCH_DOCUMENTS])) for start in starts]
    found: dict[str, list[float]] = {"asked": [], "kept": [], "new process": []}
    requests: dict[str, int] = {}
    with ModelServer(plain=True) as server, tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.runs + 1):  # the first one imports and warms
            given = {
                "url": server.url,
                "model": "m",
                "prompt": "Judge: {text}",
                "answers": f"answers-{number}",
            }
            config = AskConfig.model_validate(
                {**given, "score": {"pattern": r"score: (\d)"}, "concurrency": arguments.concurrency}
            )
            step = config.build(Path(folder))
            assert isinstance(step, AskFilter)
            for side, runs in found.items():
                if side == "new process":
                    answers._OPENED.clear()
                cpu, requests[side] = judge_all(step, batches)
                runs += [cpu] if number else []
    first = statistics.median(found["asked"])
    rows = [
        {
            "side": side,
            "cpu_us": (median := statistics.median(runs)),
            "requests": requests[side],
            "x": median / first,
            "runs": [round(one, 1) for one in runs],
        }
        for side, runs in found.items()
    ]
    give(arguments, rows, HEADS, title="CPU of the filter ask", unit="us a document")


if __name__ == "__main__":
    main()
