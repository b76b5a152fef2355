"""A FineWeb-like recipe from raw text to shards: where the CPU seconds go, MB/s of a core, dollars a TB.

    python tests/benchmarks/bench_build.py [--corpus FOLDER] [--tokenizer FILE] [--megabytes 40]
                                           [--files 2000] [--warc GLOB] [--runs 3] [--workers 2]
                                           [--price 0.0425] [--work DIR] [--json] [--save PREFIX]

    jsonl    --megabytes of text in files of 8 MB
    files    --files JSON lines files of one document each, of the same text (0: left out)
    warc     the HTML pages among the texts, again and again up to --megabytes of HTML, in WARC files whose
             records are gzipped one by one, or the files of --warc; extracted by resiliparse. Repeated pages
             have no copies after the clean stage. MB are of extracted text

Recipe: profile fineweb (language, Gopher, C4 and FineWeb rules), exact and near duplicates, rows of 2,048
tokens. Documents are those of --corpus (JSONL and Parquet files with a `text`; without it that of
$SHARDKIT_TEST_DATA, else made-up text). Corpora take turns; each build is a process of its own, after one
that compiles the kernels and is not counted. CPU is user and system time of the process and its workers, by
the stages that had tasks to do; "start and end" are imports, scan, report and publishing. The checks of the
tokenizer are counted in the stages that they run beside. `fixed` are parts of all that, measured alone in new
processes: the imports of the driver, the process that workers are forked of, loading both engines of the
tokenizer, comparing what follows from its file alone (kept for the next build on the machine), and the
kernels of a filter from Numba's cache.

"$/TB" is CPU hours x --price for 10^12 bytes of text. The default price is a vCPU hour of Amazon's c5.2xlarge
on demand ($0.34 for 8 in the documentation of EC2 Auto Scaling, "Spot price per unit hour example"). Other
tools are beside whole builds in bench_frameworks.py, beside stages in bench_filters.py and bench_near.py.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from bench_growth import Clock
from figures import Heads, benchmark_parser, give, in_turns
from texts import EOS, documents, put_tokenizer, read_sources, write_corpus

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.rss_meter import RssMeter

RECIPE = f"""\
inputs: [{{INPUT, source: texts}}]
filters: [{{profile: fineweb}}]
dedup: {{exact: {{}}, near: {{}}, max_removed_fraction: 1}}
tokenizer: {{path: tokenizer.json, eos: "{EOS}"}}
pack: {{sequence_length: 2048}}
output: {{path: OUT}}
max_bad_fraction: 1
"""
HEADS: Heads = {
    "corpus": ("corpus", ""),
    "part": ("part", ""),
    "cpu_seconds": ("CPU s", ".2f"),
    "seconds": ("seconds", ".2f"),
    "MB_per_core_s": ("MB/s a core", ".2f"),
    "dollars_per_TB": ("$/TB", ",.2f"),
}
FIXED = {
    "imports of the driver": "import shardkit.writers.pipeline",
    "process that workers are forked of": "import shardkit.writers.stages.graph, pyarrow.parquet, pandas; "
    "from shardkit.kernels.numba_support import start_numba; start_numba()",
    "load both engines": "TOKENIZER; Encoder(path, eos, engine=None); Encoder(path, eos)",
    "compare characters": "TOKENIZER; own = Encoder(path, eos, engine=None); fast = Encoder(path, eos)\n"
    "TIMED; unlike_characters(fast, own)",
    "kernels of C4's filter": "import pyarrow as pa; from shardkit.writers.filters.chain import FilterChain; "
    "from shardkit.writers.recipe.recipe import recipe_from_mapping; "
    "from support.documents import document_batch; "
    "from pathlib import Path; recipe = recipe_from_mapping({'inputs': [{'path': '-'}], 'filters': "
    "[{'profile': 'c4'}], 'tokenizer': {'path': '-', 'eos': '-'}, 'output': '-'}, folder=Path()); "
    "batch = document_batch(['A sentence of some words. ' * 30])\n"
    "TIMED; FilterChain(recipe.filter_chain(), Path()).apply(batch)",
}
TOKENIZER = "from shardkit.tokens.tokenizer import Encoder, unlike_characters; from pathlib import Path; "
COLORS = (
    "#1f6f8b",
    "#99a8b2",
    "#e1b07e",
    "#8bb174",
    "#c3c9d0",
    "#b56576",
    "#6d597a",
    "#355070",
    "#eaac8b",
)


def run_build(recipe: Path, workers: int) -> dict[str, Any]:
    """Build in this process, which has just started; what it took."""
    from shardkit.writers import build

    with RssMeter() as meter:
        clock = Clock(meter)
        result = build(recipe, workers=workers, progress=clock)
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "text_bytes": result.funnel.read.bytes,
        "documents": result.funnel.read.documents,
        "cpu_seconds": sum(use.ru_utime + use.ru_stime for use in usage),
        "stages": {name: [clock.cpu[name], clock.seconds[name]] for name in clock.cpu},
    }


def measure(recipe: Path, workers: int) -> dict[str, Any]:
    """`run_build` in a new process, with the wall time of all of it."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--one", str(recipe), "--workers", str(workers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return {**json.loads(done.stdout.splitlines()[-1]), "seconds": time.perf_counter() - began}


def fixed_costs(tokenizer: Path, runs: int) -> dict[str, list[float]]:
    """CPU seconds of each of FIXED in each run."""
    from shardkit.kernels.numba_support import kernel_cache
    from shardkit.writers.execution.engine import ONE_THREAD

    tests = str(Path(__file__).resolve().parent.parent)
    environment = os.environ | ONE_THREAD | kernel_cache()
    taken: dict[str, list[float]] = {name: [] for name in FIXED}
    for run in range(-1, runs):
        for name, code in FIXED.items():
            setup, _, timed = code.rpartition("TIMED; ")
            setup = setup.replace(
                "TOKENIZER; ", f"{TOKENIZER} path, eos = Path({str(tokenizer)!r}), {EOS!r}; "
            )
            timed = timed.replace(
                "TOKENIZER; ", f"{TOKENIZER} path, eos = Path({str(tokenizer)!r}), {EOS!r}; "
            )
            script = f"import sys, time; sys.path.append({tests!r})\n{setup}\nbegan = time.process_time()\n"
            script += f"{timed}\nprint(time.process_time() - began)"
            done = subprocess.run(
                [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, check=True, text=True
            )
            if run >= 0:
                taken[name].append(float(done.stdout))
    return taken


def write_warc(folder: Path, texts: Sequence[str], megabytes: float) -> int:
    """The HTML pages among `texts` in files of about 8 MB, up to so many MB; how many there are."""
    pages = [text.encode() for text in texts if "<html" in text[:2000].lower()]
    folder.mkdir()
    if not pages:
        print("left out: warc: the texts have no HTML pages", file=sys.stderr)
        return 0
    numbers = itertools.cycle(range(len(pages)))
    headers = StatusAndHeaders("200 OK", [("Content-Type", "text/html; charset=utf-8")], protocol="HTTP/1.1")
    for number in range(max(1, round(megabytes / 8))):
        with (folder / f"pages-{number:05d}.warc.gz").open("wb") as file:
            writer, size = WARCWriter(file), 0
            while size < 8_000_000:
                at = next(numbers)
                url, page = f"https://example.org/{at}", io.BytesIO(pages[at])
                record = writer.create_warc_record(url, "response", payload=page, http_headers=headers)
                writer.write_record(record)
                size += len(pages[at])
    return len(pages)


def make_corpora(folder: Path, options: argparse.Namespace) -> dict[str, Path]:
    """The recipe of each corpus, by its name."""
    inputs = {"jsonl": 'path: "texts/*.jsonl"'}
    write_corpus(folder / "jsonl" / "texts", documents(options.corpus, options.megabytes), 1)
    if options.files:
        inputs["files"] = 'path: "texts/*.jsonl"'
        (folder / "files" / "texts").mkdir(parents=True)
        short = [text for text in read_sources(options.corpus) if len(text) < 20_000] or read_sources(None)
        for number in range(options.files):
            line = json.dumps({"text": short[number % len(short)][:20_000]})
            (folder / "files" / "texts" / f"{number:07d}.jsonl").write_text(line + "\n")
    if options.warc or write_warc(folder / "warc", read_sources(options.corpus), options.megabytes):
        inputs["warc"] = f"path: {json.dumps(options.warc or '*.warc.gz')}, extract: resiliparse"
    for name, entry in inputs.items():
        (folder / name).mkdir(exist_ok=True)
        put_tokenizer(folder / name, options.tokenizer)
        (folder / name / "recipe.yaml").write_text(RECIPE.replace("INPUT", entry))
    return {name: folder / name / "recipe.yaml" for name in inputs}


def rows_of(corpus: str, runs: Sequence[Mapping[str, Any]], price: float) -> list[dict[str, Any]]:
    """A row for each stage, and one for all of the build."""

    def row(part: str, pairs: Sequence[tuple[float, float]], *, text: float | None = None) -> dict[str, Any]:
        cpu, seconds = (statistics.median(values) for values in zip(*pairs, strict=True))
        return {
            "corpus": corpus,
            "part": part,
            "cpu_seconds": cpu,
            "seconds": seconds,
            "MB_per_core_s": None if text is None else text / 1e6 / cpu,
            "dollars_per_TB": None if text is None else cpu / 3600 * price / (text / 1e12),
            "runs": [pair[0] for pair in pairs],
        }

    names = list(dict.fromkeys(name for run in runs for name in run["stages"]))
    of_stages = {name: [tuple(run["stages"].get(name, (0.0, 0.0))) for run in runs] for name in names}
    rest = [
        tuple(
            run[key] - sum(stage[k] for stage in run["stages"].values())
            for k, key in enumerate(("cpu_seconds", "seconds"))
        )
        for run in runs
    ]
    rows = [row(name, pairs) for name, pairs in of_stages.items()]
    whole = [(run["cpu_seconds"], run["seconds"]) for run in runs]
    return [*rows, row("start and end", rest), row("all", whole, text=runs[0]["text_bytes"])]


def without_small(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows, those of stages that take less than a hundredth of a build as one."""
    shown: list[Mapping[str, Any]] = []
    for corpus in dict.fromkeys(row["corpus"] for row in rows):
        own = [row for row in rows if row["corpus"] == corpus]
        least = max(row["cpu_seconds"] for row in own) / 100
        small = [row for row in own if row["cpu_seconds"] < least]
        large = [row for row in own if row["cpu_seconds"] >= least]
        if small:
            total = {key: sum(row[key] for row in small) for key in ("cpu_seconds", "seconds")}
            runs = [sum(cpu) for cpu in zip(*(row["runs"] for row in small), strict=True)]
            large.insert(-1, {**small[0], "part": "other stages", "runs": runs, **total})
        shown += large
    return shown


def draw(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A stacked bar of CPU seconds for each corpus, by stages."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    corpora = list(dict.fromkeys(row["corpus"] for row in rows if row["corpus"] != "fixed"))
    figure, axes = pyplot.subplots(figsize=(9, 1.4 + 0.7 * len(corpora)), layout="constrained")
    colors: dict[str, str] = {}
    for place, corpus in enumerate(corpora):
        own = {row["part"]: row["cpu_seconds"] for row in rows if row["corpus"] == corpus}
        whole, left = own.pop("all"), 0.0
        for part, cpu in own.items():
            color = colors.setdefault(part, COLORS[len(colors) % len(COLORS)])
            label = part if part not in axes.get_legend_handles_labels()[1] else None
            axes.barh([corpus], [cpu], left=[left], color=color, label=label, height=0.6)
            left += cpu
        axes.annotate(
            f"{whole:.1f} s", (left, place), (4, 0), textcoords="offset points", va="center", size=8
        )
    axes.set_xlabel("CPU seconds of a build, by stage", size=8)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=7, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.25), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = benchmark_parser(__doc__, runs=3)
    parser.add_argument("--corpus", type=Path, help="folder of JSONL (.gz, .zst) and Parquet files")
    parser.add_argument("--tokenizer", type=Path, help="with <|endoftext|> (default: one made here)")
    parser.add_argument("--megabytes", type=float, default=40, help="of text (default: %(default)s)")
    parser.add_argument("--files", type=int, default=2000, help="of one document (default: %(default)s)")
    parser.add_argument("--warc", metavar="GLOB", help="WARC files to read, too")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--price", type=float, default=0.0425, help="of a core hour (default: $%(default)s)")
    parser.add_argument("--work", type=Path, help="a folder for all files (default: a temporary one)")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(run_build(options.one, options.workers)))
        return
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        corpora = make_corpora(Path(name), options)
        taken: dict[str, list[dict[str, Any]]] = {corpus: [] for corpus in corpora}
        for run in range(-1, options.runs):
            for corpus in in_turns(list(corpora), run):
                recipe = corpora[corpus].read_text().replace("path: OUT", f"path: out-{run}")
                corpora[corpus].with_name(f"recipe{run}.yaml").write_text(recipe)
                made = measure(corpora[corpus].with_name(f"recipe{run}.yaml"), options.workers)
                if run >= 0:
                    taken[corpus].append(made)
        fixed = fixed_costs(next(iter(corpora.values())).with_name("tokenizer.json"), options.runs)
    rows = [row for corpus, runs in taken.items() for row in rows_of(corpus, runs, options.price)]
    empty = {"corpus": "fixed", "seconds": None, "MB_per_core_s": None, "dollars_per_TB": None}
    rows += [
        {**empty, "part": part, "cpu_seconds": statistics.median(runs), "runs": runs}
        for part, runs in fixed.items()
    ]
    shown = without_small(rows)
    give(options, shown, HEADS, title="CPU seconds of a build by stage")
    if options.save is not None:
        draw(options.save.with_name(f"{options.save.name}.png"), shown)


if __name__ == "__main__":
    main()
