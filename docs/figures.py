"""Draw the figures of README and docs as SVG, for light and for dark pages.

    python docs/figures.py                     # rewrite docs/figures/*.svg
    python docs/figures.py --train DATASET     # first train, kill and resume: rewrite resume.json

Bars come from the tables in benchmarks.json and the loss curve from resume.json, which `--train` records:
`examples/train_plain.py` once without interruption, and once killed by SIGKILL and started again. The curve
of the tutorial is what docs/tutorial.py records. A test compares the committed files with what this draws.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS / "figures"

STEPS, CHECKPOINT_EVERY, KILLED_AFTER = 160, 25, (62, 118)


@dataclass(frozen=True)
class Palette:
    text: str
    muted: str
    line: str
    box: str
    accent: str
    second: str
    shards: tuple[str, ...]


PALETTES = {
    "light": Palette(
        "#1f2328", "#59636e", "#9aa4af", "#f6f8fa", "#3f51b5", "#c2410c",
        ("#3f51b5", "#c2410c", "#1a7f37", "#9a6700", "#8250df", "#0969da", "#bf3989", "#57606a"),
    ),
    "dark": Palette(
        "#e6edf3", "#a5aeb8", "#6e7681", "#1c2330", "#94a3ff", "#f0883e",
        ("#94a3ff", "#f0883e", "#3fb950", "#d29922", "#bc8cff", "#58a6ff", "#f778ba", "#adb5bd"),
    ),
}  # fmt: skip


@dataclass
class Drawing:
    """An SVG in the making; coordinates are pixels from the top left corner."""

    width: int
    height: int
    title: str
    palette: Palette
    parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, words: str, *, size: int = 14, color: str = "", anchor: str = "middle",
        bold: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{color or self.palette.text}"{weight}>{escape(words)}</text>'
        )

    def rect(
        self, x: float, y: float, width: float, height: float, *, fill: str = "none", stroke: str = "",
        dashed: bool = False, radius: float = 6,
    ) -> None:  # fmt: skip
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        line = f' stroke="{stroke}"{dash}' if stroke else ""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
        self.parts.append(f'<rect {place} fill="{fill}"{line}/>')

    def line(self, points: Sequence[tuple[float, float]], *, color: str = "", width: float = 1.5,
             dashed: bool = False, arrow: bool = False) -> None:  # fmt: skip
        color = color or self.palette.line
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        joined = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
        self.parts.append(
            f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="{width:g}"{dash}/>'
        )
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
            dx, dy = 7 * (x - x0) / length, 7 * (y - y0) / length
            corners = [(x, y), (x - dx - dy * 0.6, y - dy + dx * 0.6), (x - dx + dy * 0.6, y - dy - dx * 0.6)]
            self.parts.append(
                f'<polygon points="{" ".join(f"{a:.4g},{b:.4g}" for a, b in corners)}" fill="{color}"/>'
            )

    def box(self, x: float, y: float, width: float, height: float, label: str, *notes: str) -> None:
        """A box with a label and smaller lines below it."""
        self.rect(x, y, width, height, fill=self.palette.box, stroke=self.palette.line)
        first = y + height / 2 + 5 - 9 * len(notes)
        self.text(x + width / 2, first, label, bold=True)
        for number, note in enumerate(notes, 1):
            self.text(x + width / 2, first + 18 * number, note, size=12, color=self.palette.muted)

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(self.title)}" font-family="system-ui, -apple-system, Segoe UI, sans-serif">'
        )
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *self.parts, "</svg>", ""])


def pipeline(palette: Palette) -> Drawing:
    drawing = Drawing(920, 330, "Raw files become shards, and shards become batches", palette)
    drawing.rect(160, 14, 492, 130, stroke=palette.accent, dashed=True)
    drawing.text(172, 35, "shardkit build", size=13, color=palette.accent, anchor="start", bold=True)
    stages = [
        (10, 128, "Raw files", ("JSONL, Parquet,", "CSV, text, WARC")),
        (174, 104, "Filter", ("quality,", "language, PII")),
        (296, 104, "Deduplicate", ("exact, lines,", "near")),
        (418, 104, "Tokenize", ("any Hugging", "Face tokenizer")),
        (540, 98, "Pack", ("rows of", "L tokens")),
        (760, 150, "Dataset", ("MDS or tar shards,", "provenance, report")),
    ]
    for x, width, label, notes in stages:
        drawing.box(x, 50, width, 80, label, *notes)
    for (x, width, *_), (following, *_rest) in pairwise(stages):
        drawing.line([(x + width + 2, 90), (following - 3, 90)], arrow=True)
    drawing.rect(160, 190, 492, 104, stroke=palette.accent, dashed=True)
    drawing.text(172, 211, "StreamingLoader", size=13, color=palette.accent, anchor="start", bold=True)
    drawing.box(760, 222, 150, 60, "Disk or S3", "any number of jobs")
    drawing.box(474, 222, 164, 60, "Cache", "one per machine")
    drawing.box(296, 222, 160, 60, "Order", "a function of position")
    drawing.box(174, 222, 104, 60, "Batches", "exact resume")
    drawing.box(10, 222, 128, 60, "Ranks", "any number")
    drawing.line([(835, 132), (835, 219)], arrow=True)
    for start, end in ((758, 641), (472, 459), (294, 281), (172, 141)):
        drawing.line([(start, 252), (end, 252)], arrow=True)
    drawing.line([(74, 219), (74, 134)], color=palette.second, dashed=True, arrow=True)
    drawing.text(
        84, 172, "shardkit trace: step → document, URL → steps", size=13, color=palette.second, anchor="start"
    )
    return drawing


def order(palette: Palette) -> Drawing:
    """Eight shards, four lanes of two, and a window that holds both."""
    drawing = Drawing(920, 350, "Shards are permuted, dealt to lanes and shuffled within a window", palette)
    numbers = list(range(8))
    permuted = [5, 2, 7, 0, 3, 6, 1, 4]
    rng = random.Random(4)
    for y, label, shown in ((24, "shards", numbers), (84, "1. permute", permuted)):
        drawing.text(130, y + 22, label, anchor="end", bold=True)
        for place, number in enumerate(shown):
            shard(drawing, 140 + place * 62, y, number)
    drawing.text(130, 166, "2. deal to lanes", anchor="end", bold=True)
    drawing.text(680, 166, "3. shuffle within a window: two shards of a lane", bold=True)
    for lane in range(4):
        y = 180 + lane * 40
        drawing.text(130, y + 22, f"lane {lane}", anchor="end", color=palette.muted)
        pair = [permuted[lane], permuted[lane + 4]]
        for place, number in enumerate(pair):
            shard(drawing, 140 + place * 130, y, number, width=120)
        drawing.line([(400, y + 16), (440, y + 16)], arrow=True)
        cells = [number for number in pair for _ in range(12)]
        rng.shuffle(cells)
        for place, number in enumerate(cells):
            drawing.rect(456 + place * 18, y + 4, 15, 24, fill=palette.shards[number], radius=2)
        drawing.rect(450, y, 441, 32, stroke=palette.line, dashed=True, radius=4)
    return drawing


def shard(drawing: Drawing, x: float, y: float, number: int, *, width: float = 54) -> None:
    drawing.rect(x, y, width, 32, fill=drawing.palette.shards[number], radius=4)
    contrast = "#ffffff" if drawing.palette is PALETTES["light"] else "#0d1117"
    drawing.text(x + width / 2, y + 21, f"{number}", color=contrast, bold=True)


def batches(palette: Palette) -> Drawing:
    drawing = Drawing(
        920, 290, "A global batch is a range of positions; ranks take equal parts of it", palette
    )
    drawing.text(110, 62, "positions", anchor="end", bold=True)
    for cell in range(36):
        color = palette.accent if 12 <= cell < 24 else palette.line
        drawing.rect(125 + cell * 21, 44, 17, 26, fill=color, radius=2)
    middle = 125 + 18 * 21 - 2
    drawing.text(middle, 28, "global batch: [p, p + G)", color=palette.accent, bold=True)
    drawing.line([(125 + 24 * 21 - 2, 96), (125 + 24 * 21 - 2, 74)], color=palette.second, arrow=True)
    drawing.text(125 + 24 * 21 + 8, 98, "state after this step: p + G", color=palette.second, anchor="start")
    for y, ranks in ((130, 4), (180, 3), (230, 2)):
        drawing.text(350, y + 24, f"{ranks} ranks", anchor="end", bold=True)
        width = 12 * 21
        for rank in range(ranks):
            part = width / ranks
            x = 125 + 12 * 21 - 2 + rank * part
            drawing.rect(x + 1, y, part - 3, 36, fill=palette.box, stroke=palette.accent)
            drawing.text(x + part / 2, y + 23, f"rank {rank}" if ranks < 4 else f"{rank}", size=13)
        drawing.text(
            650, y + 23, "the same samples in the step", size=13, color=palette.muted, anchor="start"
        )
    return drawing


def cache(palette: Palette) -> Drawing:
    drawing = Drawing(920, 300, "Ranks of a machine share a cache that knows the future", palette)
    drawing.rect(10, 40, 190, 180, fill=palette.box, stroke=palette.line)
    drawing.text(105, 64, "Bucket", bold=True)
    for place, number in enumerate([0, 1, 2, 3, 4, 5, 6, 7]):
        shard(drawing, 24 + place % 3 * 58, 78 + place // 3 * 44, number, width=48)
    drawing.rect(310, 10, 590, 220, stroke=palette.line, dashed=True)
    drawing.text(322, 32, "machine", color=palette.muted, anchor="start")
    drawing.rect(330, 44, 250, 176, fill=palette.box, stroke=palette.line)
    drawing.text(455, 66, "Cache folder", bold=True)
    for place, number in enumerate([5, 2, 7, 0]):
        shard(drawing, 346 + place * 56, 80, number, width=48)
    drawing.rect(346, 124, 48, 32, stroke=palette.accent, dashed=True, radius=4)
    drawing.text(370, 145, "3", color=palette.accent, bold=True)
    drawing.text(404, 145, "being fetched, verified", size=12, anchor="start", color=palette.accent)
    drawing.text(346, 190, "evicted: the shard whose next use", size=12, anchor="start", color=palette.muted)
    drawing.text(346, 206, "is farthest in the future", size=12, anchor="start", color=palette.muted)
    drawing.line([(203, 130), (327, 130)], arrow=True)
    drawing.text(256, 96, "by deadline;", size=12, color=palette.muted)
    drawing.text(256, 112, "first rows by range", size=12, color=palette.muted)
    for rank in range(4):
        y = 48 + rank * 44
        drawing.box(740, y, 140, 34, f"rank {rank}")
        drawing.line([(583, 130), (737, y + 17)], arrow=True)
    drawing.text(330, 262, "needed next, from the order:", anchor="start", bold=True)
    for place, number in enumerate([5, 2, 7, 0, 3, 6, 1, 4]):
        shard(drawing, 580 + place * 40, 242, number, width=34)
    return drawing


def loaders(palette: Palette) -> Drawing:
    """Samples a second, from the table of the benchmarks page."""
    rows = json.loads((FOLDER / "benchmarks.json").read_text())["loaders"]["rows"]
    measured = {row["side"]: round(row["samples_per_s"]) for row in rows}
    names = {
        "shardkit": "shardkit", "litdata": "litdata", "grain_unthreaded": "grain, no threads",
        "datasets": "Hugging Face datasets", "mosaicml_tuned": "mosaicml-streaming, predownload raised",
        "webdataset": "webdataset",
    }  # fmt: skip
    rates = sorted(((name, measured[side]) for side, name in names.items()), key=lambda rate: -rate[1])
    drawing = Drawing(920, 40 + 36 * len(rates) + 44, "Samples per second from one process", palette)
    drawing.text(20, 24, "samples per second, one process, higher is better", anchor="start", bold=True)
    most = max(rate for _, rate in rates)
    for place, (name, rate) in enumerate(rates):
        y = 40 + place * 36
        drawing.text(315, y + 20, name, anchor="end", bold=place == 0)
        color = palette.accent if place == 0 else palette.line
        drawing.rect(325, y + 3, max(2.0, 500 * rate / most), 24, fill=color, radius=3)
        drawing.text(333 + max(2.0, 500 * rate / most), y + 20, f"{rate:,}", anchor="start", size=13)
    note = (
        "rows of 4,096 tokens (16 KiB), shuffled, batches of 8, two cores, no GPU, local disk: "
        "tests/benchmarks/bench_loaders.py"
    )
    drawing.text(20, drawing.height - 14, note, size=12, anchor="start", color=palette.muted)
    return drawing


def resume(palette: Palette) -> Drawing:
    """Loss of a killed run over that of an uninterrupted one."""
    facts = json.loads((FOLDER / "resume.json").read_text())
    whole, parts = facts["uninterrupted"], facts["killed"]
    drawing = Drawing(
        920, 380, "A run that was killed twice computes the losses of an uninterrupted run", palette
    )
    low, high = min(whole), max(whole)
    left, top, width, height = 60, 44, 830, 280

    def point(step: int, loss: float) -> tuple[float, float]:
        return left + width * step / len(whole), top + height * (high - loss) / (high - low)

    for loss in range(int(low) + 1, int(high) + 1):
        drawing.line([point(0, loss), point(len(whole), loss)], width=0.5)
        drawing.text(left - 8, point(0, loss)[1] + 4, f"{loss}", size=12, anchor="end", color=palette.muted)
    for step in range(0, len(whole) + 1, 20):
        drawing.text(point(step, low)[0], top + height + 20, f"{step}", size=12, color=palette.muted)
    drawing.line([point(step, loss) for step, loss in enumerate(whole, 1)], width=7, color=palette.line)
    for number, part in enumerate(parts):
        points = [point(step, loss) for step, loss in enumerate(part["losses"], part["first"])]
        drawing.line(points, width=2, color=palette.shards[(0, 1, 2)[number]])
    for number, part in enumerate(parts[:-1]):
        last = part["first"] + len(part["losses"]) - 1
        x, _ = point(last, part["losses"][-1])
        drawing.line([(x, top + 4), (x, top + height)], dashed=True, color=palette.second, width=1)
        drawing.text(
            x + 6, top + 16, f"SIGKILL after step {last},", size=12, anchor="start", color=palette.second
        )
        resumed = parts[number + 1]["first"]
        drawing.text(
            x + 6, top + 32, f"resumed at step {resumed}", size=12, anchor="start", color=palette.second
        )
    drawing.text(left, 24, "training loss", anchor="start", bold=True)
    drawing.line([(200, 20), (240, 20)], width=7)
    drawing.text(248, 25, "uninterrupted", anchor="start", size=13)
    drawing.line([(370, 20), (410, 20)], width=2, color=palette.accent)
    drawing.text(418, 25, "killed and resumed: equal bit by bit at all steps", anchor="start", size=13)
    drawing.text(left + width / 2, top + height + 44, "step", size=13, color=palette.muted)
    return drawing


def tutorial(palette: Palette) -> Drawing:
    """The loss of each step of the tutorial's run, and its mean over twenty steps."""
    losses = json.loads((FOLDER / "tutorial.json").read_text())["losses"]
    drawing = Drawing(640, 330, f"Training loss over {len(losses)} steps", palette)
    low, high, around = int(min(losses)), int(max(losses)) + 1, 10
    left, top, width, height = 40, 44, 580, 232

    def point(step: float, loss: float) -> tuple[float, float]:
        return left + width * step / len(losses), top + height * (high - loss) / (high - low)

    for loss in range(low, high + 1):
        drawing.line([point(0, loss), point(len(losses), loss)], width=0.5)
        drawing.text(left - 8, point(0, loss)[1] + 5, f"{loss}", anchor="end", color=palette.muted)
    for step in range(0, len(losses) + 1, 200):
        drawing.text(point(step, low)[0], top + height + 22, f"{step}", color=palette.muted)
    drawing.line([point(step, loss) for step, loss in enumerate(losses, 1)], width=1)
    means = []
    for step in range(around, len(losses) - around + 1):
        part = losses[step - around : step + around]
        means.append(point(step + 0.5, sum(part) / len(part)))
    drawing.line(means, width=2.5, color=palette.accent)
    drawing.text(left, 24, "training loss", size=15, anchor="start", bold=True)
    drawing.line([(190, 19), (220, 19)], width=1)
    drawing.text(228, 24, "each step", anchor="start")
    drawing.line([(320, 19), (350, 19)], width=2.5, color=palette.accent)
    drawing.text(358, 24, "mean of 20 steps", anchor="start")
    drawing.text(left + width / 2, top + height + 44, "step", color=palette.muted)
    return drawing


def dump(palette: Palette) -> Drawing:
    """Draw what the stages keep of a dump, by the command on the page of fifty terabytes."""
    page = (DOCS / "guides" / "fifty_terabytes.md").read_text()
    [left] = map(float, re.findall(r"--raw ([\d.]+)TB", page))
    kept = [(name, float(share)) for name, share in re.findall(r"--retention (\w+)=([\d.]+)", page)]
    names = {
        "extract": "main text of pages", "language": "in English", "quality": "behind the quality rules",
        "duplicates": "without duplicates",
    }  # fmt: skip
    rows = [("compressed WARC", left)]
    for name, share in kept:
        left *= share
        rows.append((names[name], left))
    rows.append(("tokens of 2 bytes", left / 4 * 2))  # of 4 bytes of text each
    drawing = Drawing(640, 20 + 34 * len(rows), "What is left of a dump after each stage", palette)
    most = rows[0][1]
    for place, (name, terabytes) in enumerate(rows):
        y = 10 + 34 * place
        drawing.text(190, y + 19, name, anchor="end")
        last = place == len(rows) - 1
        width = max(2.0, 340 * terabytes / most)
        drawing.rect(200, y + 3, width, 22, fill=palette.second if last else palette.accent, radius=3)
        drawing.text(208 + width, y + 19, f"{terabytes:.3g} TB", anchor="start")
    return drawing


FIGURES: dict[str, Callable[[Palette], Drawing]] = {
    "batches": batches,
    "cache": cache,
    "dump": dump,
    "loaders": loaders,
    "order": order,
    "pipeline": pipeline,
    "resume": resume,
    "tutorial": tutorial,
}


def train(data: str) -> None:
    """Record the losses of an uninterrupted and of a killed run."""
    with tempfile.TemporaryDirectory() as folder:
        whole = run(data, Path(folder, "whole"), None)[0]
        assert [step for step, _ in whole] == list(range(1, STEPS + 1))
        parts = []
        for kill in (*KILLED_AFTER, None):
            lines = run(data, Path(folder, "killed"), kill)[-1]
            parts.append({"first": lines[0][0], "losses": [loss for _, loss in lines]})
    facts = {"uninterrupted": [loss for _, loss in whole], "killed": parts}
    (FOLDER / "resume.json").write_text(json.dumps(facts) + "\n")


def run(data: str, folder: Path, kill_after: int | None) -> list[list[tuple[int, float]]]:
    """(step, loss) of each process that has trained in `folder`, the last one killed after `kill_after`."""
    folder.mkdir(exist_ok=True)
    log, checkpoint = folder / "log.jsonl", folder / "checkpoint.pt"
    command: list[str | Path] = [
        sys.executable, DOCS.parent / "examples" / "train_plain.py", "--data", data, "--vocabulary", "8192",
        "--width", "128", "--batch-size", "8", "--steps", str(STEPS), "--checkpoint", checkpoint,
        "--checkpoint-every", str(CHECKPOINT_EVERY), "--log-file", log,
    ]  # fmt: skip
    process = subprocess.Popen(command)
    while process.poll() is None:
        time.sleep(0.05)
        if kill_after is not None and log.exists() and last_step(log) >= kill_after:
            process.kill()
            process.wait()
    assert process.returncode == (0 if kill_after is None else -9)
    processes: list[list[tuple[int, float]]] = []
    for line in log.read_text().splitlines():
        record = json.loads(line)
        if not processes or record["step"] != processes[-1][-1][0] + 1:
            processes.append([])
        processes[-1].append((record["step"], record["loss"]))
    return processes


def last_step(log: Path) -> int:
    lines = log.read_text().rpartition("\n")[0].splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", metavar="DATASET", help="rows of 8,192 token ids (default: draw only)")
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train)
    for name, figure in FIGURES.items():
        for mode, palette in PALETTES.items():
            (FOLDER / f"{name}-{mode}.svg").write_text(figure(palette).svg())


if __name__ == "__main__":
    main()
