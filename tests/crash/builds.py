"""Build with a fault injected, run the same command again, and compare with an undisturbed build.

    with Crashes(folder) as crashes:
        outcome = crashes.run(Cell(fault="kill worker", engine="local", stage="clean", moment="before"))
        assert outcome.problems == []

After every fault: the error of the faulty run was clear, nothing hung, the same command produced exactly the
files of an undisturbed build, the default work folder is gone, and a process that polled the output never saw
an index without its files.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq

from crash.points import Action, Moment, Point
from crash.victims import Ended, Victims
from shardkit.files import publish_bytes
from support.ray_cluster import RayCluster
from support.small_build import make_corpus, tree
from support.static_model import make_static_model

__all__ = ["POINT_NAME", "STAGES", "Cell", "Crashes", "Outcome"]

# In the order of the build; tests/execution/test_crash_matrix.py checks that these are all.
STAGES = (
    *(
        "tokenizer",
        "clean",
        "url",
        "filter_left",
        "url_left",
        "exact",
        "line_keys",
        "line_losers",
        "lines",
        "filter_left-2",
        "url_left-2",
        "exact-2",
        "signatures",
        "parts",
    ),
    *("equal", "bands", "candidates", "shingles", "verify", "near"),
    *("semantic_embed", "semantic_clusters", "semantic_assign", "semantic_neighbors", "semantic_decide"),
    *("parity", "amounts_count", "amounts_sums", "amounts_lasts", "amounts", "tokenize", "pack"),
    *("provenance", "join_annotations", "duplicates", "side_files"),
)
RECIPE = """\
inputs:
  - {path: "first-*.jsonl", source: first}
steps: STEPS
annotate: true
amounts: {first: {tokens: 1500, repeat: 1.5}}
tokenizer: {path: tokenizer.json, eos: "<|endoftext|>"}
pack: {sequence_length: 64}
output: {path: out, shard_bytes: 2KiB, format: mds}
max_bad_fraction: 0.1
"""
_SHORT, _LONG = {"length": {"max_words": 60}}, {"length": {"min_words": 3}}
_LINES, _NEAR = {"lines": {"min_characters": 20}}, {"near": {"small_shingles": 0}}
_SEMANTIC = {
    "semantic": {"embed": {"model": "vectors.safetensors", "tokenizer": "words.json"}, "similarity": 0.9985}
}
_JOINED = {
    "semantic": {
        "embed": {"vectors": "vectors.parquet", "key": "url", "document": "url"},
        "similarity": 0.8,
    }
}
ORDERS: tuple[list[object], ...] = (  # the first one has all STAGES
    ["url", _SHORT, "exact", _LINES, _LONG, "exact", _NEAR, _SEMANTIC],
    ["exact", _NEAR, {"sample": {"documents": 35}}, _LONG, _LINES, "exact", _SHORT, _NEAR],
    ["url", "exact", _JOINED, {"sample": "90%"}, _SHORT, _NEAR, _LONG, {"sample": "90%"}, "exact", _LINES],
)
# A recipe with this `split` has these stages, too.
SPLIT = {"parts": {"validation": 6}, "by": "shelf"}
SPLIT_STAGES = (
    *("split_draw", "split_fit", "split_families", "split_propose", "split_tables", "split_probe"),
    *("split_choose", "split_rows", "split"),
)
POINT_NAME = "point.json"
LINE = "This very line stands at the end of every document."
_NAMES = re.compile(r"shardkit: (error|warning|interrupted|terminated).*", re.DOTALL)


def make_recipe(folder: Path, format: str = "mds", order: int = 0, *, has_split: bool = False) -> Path:
    """Write a corpus that gives every stage something to do, and its recipe."""
    text = RECIPE.replace("STEPS", json.dumps(ORDERS[order]))  # JSON is YAML
    if format != "mds":  # only rows repeat documents
        text = text.replace("format: mds", f"format: {format}").replace(", repeat: 1.5", "")
    if has_split:
        text = text.replace("source: first}", "source: first, metadata: [shelf]}").replace("1500", "6000")
        text += f"split: {json.dumps(SPLIT)}\n"
    recipe = make_corpus(folder, 4, text)
    make_static_model(folder, ["w", *map(str, range(100))], dimensions=8)
    vectors: dict[str, list[float]] = {}
    for file in range(2):
        texts: list[str] = []
        for number in range(20 * file, 20 * file + 20):
            drawn = random.Random(number)
            words = [f"w{drawn.randrange(10**6)}" for _ in range(40)]
            texts.append(" ".join(words) + "\n" + LINE)
            if number % 3 == 0:
                texts.append(" ".join(words[:-2]))
            if number % 5 == 0:
                texts.append(texts[-1])
        urls = [f"https://example.org/{file}/{number - (number % 11 == 10)}" for number in range(len(texts))]
        for url, text in zip(urls, texts, strict=True):
            vectors.setdefault(url, _vector(text))
        records = [{"text": text, "url": url} for text, url in zip(texts, urls, strict=True)]
        for number, record in enumerate(records if has_split else ()):
            record["shelf"] = str(number // 3)  # in both files
        lines = "".join(json.dumps(record) + "\n" for record in records) + "not JSON\n"
        (folder / f"first-{file}.jsonl").write_text(lines)
    pq.write_table(
        pa.table({"url": [*vectors], "embedding": [*vectors.values()]}), folder / "vectors.parquet"
    )
    return recipe


def _vector(text: str) -> list[float]:
    """A vector for a text, which is near to those of texts with nearly the same words."""
    words = [random.Random(word) for word in text.split()]
    return [sum(word.gauss(0, 1) for word in words) for _ in range(16)]


Engine = Literal["inline", "local", "s3", "s3-local", "ray"]
"""Where tasks run: inline, s3: in the builder; local, s3-local: in a worker."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One fault. `moment` as in crash_points; `replace`: the build replaces an older dataset.

    With moment "step", `area` is the folder whose operations are counted: "out", "out.work", or "." for all.
    """

    fault: str
    engine: Engine = "inline"
    stage: str = "publish"
    moment: Moment = "step"
    action: Action = "kill"
    step: int = 0
    skip: int = 0
    area: str = "out"
    replace: bool = False

    def __str__(self) -> str:
        where = f"step {self.step} in {self.area}" if self.moment == "step" else self.moment
        return f"{self.fault}, {self.engine}, {self.stage}, {where}{', replacing' if self.replace else ''}"


@dataclass
class Outcome:
    """Result of a cell. `struck`: whether the fault happened; `error`: the message of the faulty run."""

    cell: Cell
    struck: bool = False
    runs: int = 0
    error: str = ""
    looks: int = 0
    problems: list[str] = field(default_factory=list)


class Crashes:
    """Runs cells of the matrix, as a context manager; all files lie below `folder`.

    `format` is that of the output. `has_split`: it is in two parts, with documents that stay together. The
    engines "s3" and "s3-local" need an environment that leads to an S3
    server with a `bucket`. "ray" needs a cluster that was started with `points.environment` for the file
    `POINT_NAME` in `folder`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        bucket: str = "",
        ray: RayCluster | None = None,
        format: str = "mds",
        order: int = 0,
        has_split: bool = False,
    ) -> None:
        self._format, self._order, self._has_split = format, order, has_split
        self._folder, self._bucket, self._ray = folder.resolve(), bucket, ray
        self._template = self._folder / "corpus"
        self._count = 0
        self.expected: dict[str, str] = {}

    def __enter__(self) -> Self:
        recipe = make_recipe(self._template, self._format, self._order, has_split=self._has_split)
        self.victims = Victims(self._folder, recipe)
        self.victims.__enter__()
        try:
            self.expected = self._undisturbed("expected")
            self._old = self._undisturbed("old", "--set", "seed=5")
            assert self.expected != self._old
        except BaseException:
            self.victims.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.victims.__exit__(kind, error, trace)

    def run(self, cell: Cell) -> Outcome:
        """Inject the fault, run again, and check everything."""
        outcome = Outcome(cell)
        base = self.fresh(with_old=cell.replace)
        with self.watching(outcome, base):
            self.strike(outcome, base)
            self.finish(outcome, base)
        return outcome

    def point(self, cell: Cell, base: Path) -> Point:
        """The point at which the cell strikes a build in `base`."""
        return Point(
            moment=cell.moment,
            folder=str(base / (cell.area if cell.moment == "step" else "out.work")),
            struck=str(base.with_suffix(".struck")),
            stage=cell.stage,
            action=cell.action,
            step=cell.step,
            skip=cell.skip,
        )

    def strike(self, outcome: Outcome, base: Path) -> None:
        """The faulty run."""
        cell = outcome.cell
        point = self.point(cell, base)
        in_workers = cell.engine == "ray"
        if in_workers:
            if cell.action == "kill_node" and self._ray is not None:
                self._ray.add()
            publish_bytes(self._folder / POINT_NAME, json.dumps(asdict(point)).encode())
        armed = None if in_workers else point
        ended = self.victims.run(self.command(cell, base), cwd=base, engine=cell.engine, point=armed)
        outcome.runs += 1
        outcome.struck = Path(point.struck).exists()
        outcome.error = said(ended)
        endured = cell.engine == "ray" and cell.moment != "step"
        outcome.problems += wrong_end("endure" if endured else cell.action, ended, struck=outcome.struck)

    def finish(self, outcome: Outcome, base: Path) -> None:
        """Run the same command again and check the files."""
        cell = outcome.cell
        ended = self.victims.run(self.command(cell, base), cwd=base, engine=cell.engine)
        outcome.runs += 1
        if ended.status != 0:
            outcome.problems.append(f"run {outcome.runs}: status {ended.status}: {said(ended)}")
        outcome.problems += self.compare(cell, base)

    def command(self, cell: Cell, base: Path) -> list[str]:
        """The command of a cell's build."""
        command = ["build", "recipe.yaml", "--quiet", "--workers", "1", *(["--replace"] * cell.replace)]
        if cell.engine == "ray":
            assert self._ray is not None
            command += ["--engine", "ray", "--ray-address", self._ray.address]
        if cell.engine in ("s3", "s3-local"):
            work = f"s3://{self._bucket}/{base.name}"
            command += ["--set", f"work={work}", "--set", "scratch=out.work"]
        return command

    @contextmanager
    def watching(self, outcome: Outcome, base: Path) -> Iterator[None]:
        """Poll the output as a reader in the meantime; remove `base` at the end if all is right."""
        watch = self.victims.watch(base / "out" / "train" if self._has_split else base / "out")
        yield
        seen = watch.stop()
        outcome.looks = seen.looks
        outcome.problems += [f"a reader saw: {problem}" for problem in seen.problems]
        if not outcome.problems:
            shutil.rmtree(base, ignore_errors=True)  # it may be the root of a file system

    def steps(self, area: str) -> int:
        """Number of file operations in an area that an undisturbed build makes."""
        base = self.fresh()
        point = self.point(Cell(fault="none", step=1 << 30, area=area), base)
        ended = self.victims.run(self.command(Cell(fault="none"), base), cwd=base, point=point)
        assert ended.status == 0, ended
        shutil.rmtree(base)
        return int(Path(f"{point.struck}.steps").read_text())

    def fresh(self, *, with_old: bool = False) -> Path:
        """A new folder with the corpus; `with_old`: and with another dataset as its output."""
        self._count += 1
        base = self._folder / f"cell-{self._count:05d}"
        self.lay_out(base)
        if with_old:
            shutil.copytree(self._folder / "old" / "out", base / "out")
        return base

    def lay_out(self, base: Path) -> None:
        """Copy corpus and recipe into a folder that may exist."""
        shutil.copytree(self._template, base, dirs_exist_ok=True)

    def compare(self, cell: Cell, base: Path) -> list[str]:
        """Differences from the folder of an undisturbed build."""
        problems = differences(tree(base / "out"), self.expected)
        before = {path.name for path in self._template.iterdir()} | {"out"}
        left = {path.name for path in base.iterdir()} - before
        if cell.engine not in ("inline", "local", "ray"):  # that one stays
            left.discard("out.work")
            left |= {path.name for path in base.glob("out.work/**/unfinished/*/*")}
        return problems + [f"{name}: left over" for name in sorted(left)]

    def _undisturbed(self, name: str, *more: str) -> dict[str, str]:
        base = self._folder / name
        shutil.copytree(self._template, base)
        ended = self.victims.run(["build", "recipe.yaml", "--quiet", *more], cwd=base)
        assert ended.status == 0, ended
        assert not (base / "out.work").exists()
        return tree(base / "out")


def differences(made: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Problems of the files `made`, {name: hash}."""
    missing = [f"{name}: missing" for name in sorted(expected.keys() - made.keys())]
    more = [f"{name}: left over" for name in sorted(made.keys() - expected.keys())]
    both = sorted(made.keys() & expected.keys())
    return [*missing, *more, *(f"{name}: other bytes" for name in both if made[name] != expected[name])]


def said(ended: Ended) -> str:
    """The message of a command on stderr, without warnings of other libraries."""
    found = _NAMES.search(ended.errors)
    return found[0].strip() if found else ended.errors.strip()[-500:]


def wrong_end(action: Action | Literal["endure"], ended: Ended, *, struck: bool) -> list[str]:
    """Problems of how a faulty run ended: it must be killed as requested, or explain what happened."""
    if ended.hung:
        return [f"hung: {said(ended)}"]
    if not struck:
        return [] if ended.status == 0 else [f"failed without a fault: {ended.status}: {said(ended)}"]
    killed = {
        "kill_builder": -signal.SIGKILL,
        "terminate_builder": -signal.SIGTERM,
        "interrupt_builder": 130,
    }
    if action in killed:
        wanted: Sequence[int] = [killed[action]]
    elif action == "endure":
        wanted = [0]
    elif action == "fill":
        wanted = [1, 0]
    else:  # the death of a worker is reported; a builder that is its own worker dies itself
        wanted = [-signal.SIGKILL, 1]
    problems = []
    if ended.status not in wanted:
        problems.append(f"ended with {ended.status}, not {wanted}: {said(ended)}")
    if ended.status in (1, 130, -signal.SIGTERM) and "the same command" not in said(ended):
        problems.append(f"does not say what to do: {said(ended)}")
    if "Traceback" in ended.errors:
        problems.append(f"a traceback: {ended.errors[-800:]}")
    return problems
