"""Every table of docs/benchmarks.md in one go: runs the benchmarks, with their peers, one after another.

    python tests/benchmarks/all.py [OUT] [--only NAME …] [--again] [--list] [--corpus FOLDER]
            [--tokenizer FOLDER] [--venvs DIR] [--megatron CHECKOUT --megatron-python PYTHON]
    python tests/benchmarks/all.py [OUT] --docs      # put OUT's tables into docs/benchmarks.md

For each table OUT (build/benchmarks) has NAME.json (rows with every run, command, commit, machine, what was
left out and why), NAME.md and, where runs are compared, NAME.png; OUT/benchmarks.md has all of them. A table
that is there already, of the same commit, is not made again: an interrupted run goes on. What is missing on
this machine is named with the reason, and nothing stands in for it. A benchmark that takes three times its
usual time is stopped. All of them take about two and a half hours on two idle cores; `--only` names some.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peer_processes import VENVS

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
STORED = ROOT / "docs" / "figures" / "benchmarks.json"
LIBRARIES = ("numpy", "torch", "pyarrow", "numba", "tokenizers", "gigatoken", "boto3", "mosaicml-streaming")
# A block of the page names a table and may choose rows: <!-- table: NAME COLUMN=REGEX; COLUMN=REGEX -->
BLOCK = re.compile(r"(<!-- table: (\S+)(?: ([^\n]*))? -->\n).*?(<!-- end -->)", re.DOTALL)
REASON_CHARACTERS = 400  # of an error


@dataclass(frozen=True)
class Benchmark:
    """A table: its name, the command and what this needs; `minutes` on two idle cores."""

    name: str
    command: str
    minutes: float
    needs: tuple[str, ...] = ()


BENCHMARKS = (
    Benchmark("gather", "bench_gather.py --megabytes 64 --runs 5", 4),
    Benchmark("loaders", "bench_loaders.py", 10),
    Benchmark("rows", "bench_rows.py", 12),
    Benchmark("text", "bench_text.py", 4, ("corpus",)),
    Benchmark("layouts", "bench_layouts.py", 3),
    Benchmark("balance", "bench_balance.py", 3, ("corpus", "tokenizer")),
    Benchmark("block_masks", "bench_layouts.py --masks", 3),
    Benchmark("order", "bench_order.py", 1),
    Benchmark("shuffle_batches", "bench_shuffle.py batches", 2),
    Benchmark("shuffle_training", "bench_shuffle.py training", 2),
    Benchmark("open", "bench_open.py", 2),
    Benchmark("mixture", "bench_mixture.py", 1),
    Benchmark("streams", "bench_streams.py", 1),
    Benchmark("start", "bench_start.py", 1),
    Benchmark("cache", "bench_cache.py", 1),
    Benchmark("first_batch", "bench_remote.py first-batch", 3, ("rgw",)),
    Benchmark("cold_mixture", "bench_remote.py mixture", 4, ("rgw",)),
    Benchmark("utilization", "bench_utilization.py", 5, ("rgw",)),
    Benchmark("images", "bench_images.py", 15),
    Benchmark("cold_epoch", "bench_remote.py cold-epoch", 3, ("rgw",)),
    Benchmark("belady", "bench_remote.py belady", 3, ("rgw",)),
    Benchmark("resume", "bench_resume.py", 25),
    Benchmark("mistakes", "bench_mistakes.py", 8),
    Benchmark("lines", "bench_mistakes.py --lines", 4),
    Benchmark("upload", "bench_upload.py speed", 3, ("rgw",)),
    Benchmark("upload_resume", "bench_upload.py resume", 3, ("rgw",)),
    Benchmark("simulate_nodes", "bench_virtual_run.py nodes", 1),
    Benchmark("simulate_shuffle", "bench_virtual_run.py shuffle", 1),
    Benchmark("minhash", "bench_minhash.py", 10, ("corpus",)),
    Benchmark("near", "bench_near.py", 10, ("corpus",)),
    Benchmark("semantic", "bench_semantic.py", 15, ("corpus",)),
    Benchmark("filters", "bench_filters.py", 10, ("corpus", "tokenizer")),
    Benchmark("preprocess", "bench_preprocess.py", 6, ("corpus", "tokenizer", "megatron")),
    Benchmark("build", "bench_build.py --megabytes 80 --runs 5", 8, ("corpus", "tokenizer")),
    Benchmark("ray_data", "bench_frameworks.py exact --megabytes 80 --runs 3", 6, ("corpus", "tokenizer")),
    Benchmark("datatrove", "bench_frameworks.py fineweb --runs 3", 12, ("corpus", "tokenizer")),
    Benchmark("steps", "bench_steps.py", 7),
    Benchmark("ask", "bench_ask.py", 2),
    Benchmark("growth", "bench_growth.py --megabytes 100", 5, ("corpus", "tokenizer")),
    Benchmark("extract", "bench_extract.py", 5, ("gold",)),
    Benchmark("scaling", "bench_scaling.py --megabytes 320", 10, ("corpus", "tokenizer")),
    Benchmark("store", "bench_store.py", 10, ("corpus", "tokenizer", "rgw")),
    Benchmark("requests", "bench_requests.py --splits 31,61,122", 10, ("corpus", "tokenizer")),
    Benchmark("driver", "bench_driver.py", 6),
    Benchmark("pack", "bench_pack.py", 2),
    Benchmark("trace", "bench_trace.py", 5),
    Benchmark("rewind", "bench_rewind.py", 4),
    Benchmark("audit", "bench_audit.py", 2),
    Benchmark("explore", "bench_explore.py", 6),
    Benchmark("convert", "bench_convert.py", 3),
    Benchmark("dataset", "bench_dataset.py", 1),
    Benchmark("gpu", "bench_gpu.py", 6, ("gpu",)),
)


GIVEN = ("corpus", "venvs", "megatron", "megatron_python", "gold")  # options that benchmarks take of ours


def missing(need: str, arguments: argparse.Namespace) -> str | None:
    """Why this machine does not have what a benchmark needs; None if it has it."""
    if need == "rgw":
        found = shutil.which("radosgw") and shutil.which("ceph-mon")
        return None if found else "Ceph's S3 server is not installed (bash tests/servers/install_rgw.sh)"
    if need == "corpus":
        found = arguments.corpus or os.environ.get("SHARDKIT_TEST_DATA")
        return None if found else "no texts (--corpus, or $SHARDKIT_TEST_DATA)"
    if need == "gpu":
        import torch

        return None if torch.cuda.is_available() else "no CUDA device"
    reasons = {
        "tokenizer": "no tokenizer (--tokenizer)",
        "megatron": "no Megatron-LM (--megatron)",
        "gold": "no pages with a gold text (--gold)",
    }
    return None if getattr(arguments, need) else reasons[need]


def command_of(benchmark: Benchmark, arguments: argparse.Namespace) -> list[str]:
    """The command with the options that it takes of ours."""
    script, *options = benchmark.command.split()
    command = [sys.executable, str(FOLDER / script), *options]
    shown = subprocess.run([*command[:2], "--help"], capture_output=True, text=True)
    accepted = shown.stdout  # nothing if it cannot start: running it says why
    given = {name: getattr(arguments, name) for name in GIVEN}
    if arguments.tokenizer is not None:
        takes_folder = "--tokenizer FOLDER" in accepted
        given["tokenizer"] = arguments.tokenizer if takes_folder else arguments.tokenizer / "tokenizer.json"
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if value is not None and option in accepted:
            command += [option, str(value)]
    return command


def machine() -> dict[str, Any]:
    """Processor, memory, versions: what figures depend on."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal: *(\d+)", Path("/proc/meminfo").read_text())
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": cpu[1] if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_GiB": round(int(memory[1]) / 2**20) if memory else None,
        "python": platform.python_version(),
        "versions": versions,
    }


def commit() -> str:
    """Of the checkout; with "+" if files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    return git("rev-parse", "--short=10", "HEAD").strip() + "+" * bool(git("diff", "HEAD", "--name-only"))


def run(benchmark: Benchmark, arguments: argparse.Namespace, facts: Mapping[str, Any]) -> str | None:
    """Make one table; why there is none, or None."""
    for need in benchmark.needs:
        if reason := missing(need, arguments):
            return reason
    prefix = arguments.out / benchmark.name
    command = [*command_of(benchmark, arguments), "--save", str(prefix)]
    load, began = os.getloadavg()[0], time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180 * benchmark.minutes + 120)
    except subprocess.TimeoutExpired as error:
        return f"stopped after {error.timeout / 60:.0f} minutes"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it failed without a word"])[-1][:REASON_CHARACTERS]
    file = arguments.out / f"{benchmark.name}.json"
    table = json.loads(file.read_text())
    table |= {"command": f"python tests/benchmarks/{benchmark.command}", **facts, "load_before": load}
    table["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    table["seconds"] = round(time.monotonic() - began)
    table["left_out"] = re.findall(r"^left out: (.*)", done.stderr, re.MULTILINE)
    file.write_text(json.dumps(table, indent=1) + "\n")
    return None


def say(line: str) -> None:
    """Tell how far it is."""
    print(line, file=sys.stderr, flush=True)


def run_all(arguments: argparse.Namespace, chosen: Sequence[Benchmark]) -> None:
    """Make the tables of `chosen`, and the page of all."""
    facts = {"commit": commit(), "machine": machine()}
    absent = {}
    for number, benchmark in enumerate(chosen, 1):
        place = f"[{number}/{len(chosen)}] {benchmark.name}"
        made = _made(arguments.out, benchmark)
        if made is not None and made["commit"] == facts["commit"] and not arguments.again:
            say(f"{place}: is there")
            continue
        say(f"{place}: about {benchmark.minutes:.0f} min")
        if reason := run(benchmark, arguments, facts):
            absent[benchmark.name] = reason
            say(f"{place}: missing: {reason}")
    lines = [f"# Benchmarks of {facts['commit']}\n"]
    for benchmark in BENCHMARKS:
        if (made := _made(arguments.out, benchmark)) is not None and benchmark.name not in absent:
            lines.append(f"## {made['title'] or benchmark.name}\n\n{block(made)}")
    lines += ["## Missing\n", *(f"- {name}: {reason}" for name, reason in absent.items())]
    (arguments.out / "benchmarks.md").write_text("\n".join(lines) + "\n")
    say(f"{arguments.out / 'benchmarks.md'}; missing: {', '.join(absent) or 'nothing'}")


def _made(out: Path, benchmark: Benchmark) -> dict[str, Any] | None:
    """A table that was made before."""
    file = out / f"{benchmark.name}.json"
    if not file.exists():
        return None
    table: dict[str, Any] = json.loads(file.read_text())
    return table if "commit" in table else None


def block(table: Mapping[str, Any], chosen: str | None = None) -> str:
    """A table with its command, as in the documentation; `chosen` selects rows."""
    left_out = "".join(f" Left out: {reason}." for reason in table["left_out"])
    rows = chosen_rows(table["markdown"], chosen) if chosen else table["markdown"]
    return f"`{table['command']}` ({table['date']}, commit {table['commit']}).{left_out}\n\n{rows}"


def chosen_rows(markdown: str, chosen: str) -> str:
    """Keep the rows of a Markdown table that match "COLUMN=REGEX; COLUMN=REGEX"; ValueError if none does."""
    head, line, *rows = markdown.splitlines(keepends=True)
    columns = [cell.strip() for cell in head.strip().strip("|").split("|")]
    for condition in chosen.split("; "):
        column, _, regex = condition.partition("=")
        place = columns.index(column)
        rows = [row for row in rows if re.fullmatch(regex, row.strip().strip("|").split("|")[place].strip())]
    if not rows:
        raise ValueError(f"no row of the table matches {chosen}")
    return "".join([head, line, *rows])


def with_tables(page: str, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with each block `<!-- table: NAME … -->` filled; KeyError for a table that is nowhere."""
    return BLOCK.sub(lambda found: f"{found[1]}{block(tables[found[2]], found[3])}{found[4]}", page)


def update_docs(out: Path) -> None:
    """Store the tables of `out` beside the documentation, and pictures that its page shows; fill the page."""
    page = PAGE.read_text()
    tables = json.loads(STORED.read_text()) if STORED.exists() else {}
    for benchmark in BENCHMARKS:
        if (made := _made(out, benchmark)) is not None:
            tables[benchmark.name] = made
            picture = STORED.with_name(f"benchmark-{benchmark.name}.png")
            if picture.name in page:
                shutil.copyfile(out / f"{benchmark.name}.png", picture)
    STORED.write_text(json.dumps(tables, indent=1) + "\n")
    PAGE.write_text(with_tables(page, tables))


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    default = ROOT / "build" / "benchmarks"
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT", default=default, help="folder of tables")
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="names as --list shows them")
    parser.add_argument("--again", action="store_true", help="make tables of this commit again")
    parser.add_argument("--list", action="store_true", help="print names, minutes and what is missing")
    parser.add_argument("--docs", action="store_true", help="put OUT's tables into docs/benchmarks.md")
    parser.add_argument("--corpus", type=Path, help="folder of texts (default: $SHARDKIT_TEST_DATA/corpus)")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="with tokenizer.json, of GPT-2")
    parser.add_argument("--venvs", type=Path, default=VENVS, help="of peers (default: %(default)s)")
    parser.add_argument(
        "--gold", type=Path, metavar="FOLDER", help="checkout of article-extraction-benchmark"
    )
    parser.add_argument("--megatron", type=Path, help="checkout of Megatron-LM")
    parser.add_argument("--megatron-python", type=Path, help="Python that runs it")
    arguments = parser.parse_args()
    chosen = [one for one in BENCHMARKS if arguments.only is None or one.name in arguments.only]
    if arguments.docs:
        update_docs(arguments.out)
    elif arguments.list:
        for one in chosen:
            absent = next(filter(None, (missing(need, arguments) for need in one.needs)), "")
            print(f"{one.name:18}{one.minutes:4.0f} min  {one.command}{'  missing: ' * bool(absent)}{absent}")
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        run_all(arguments, chosen)


if __name__ == "__main__":
    main()
