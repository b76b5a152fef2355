"""Reads the log of a run's losses, and finds the steps at which the loss jumped.

A log is JSON lines, or CSV with a header, as trainers, Lightning's CSVLogger, W&B and TensorBoard write them;
of each line only the step and the loss are kept, 16 bytes. A step that is logged again, after a restart,
counts as it was logged last, and steps may be in any order. Lines that cannot be read are skipped and
counted. Arrow parses blocks of lines; a block that it refuses is parsed line by line.

A loss is suspicious if it is not finite, or if its robust z-score exceeds `threshold`:

    deviation = loss - median of the window / 4 finite losses before it
    z = deviation / max(1.4826 * MAD, 0.001 * |median|)

with MAD the median of the absolute deviations of the `window` finite losses before it. This is a one-sided
Hampel identifier (Davies and Gather, "The identification of multiple outliers", JASA 88, 1993); 1.4826 makes
the MAD of normal noise its standard deviation. The median is of fewer losses than the MAD, so that it follows
a loss that still falls, whose fall would widen the MAD of the losses themselves. Only losses before the step
count: a loss that jumps and stays high is found where it jumped, and a window around it has both levels.

Suspicious losses that follow each other are one spike, found at its first step, unless one of them exceeds
the loss before it by as much as is suspicious: that is a new spike.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
from numpy.lib.stride_tricks import sliding_window_view

from shardkit.arrays import Ints
from shardkit.errors import ShardkitError

Floats = npt.NDArray[np.float64]
Pairs = tuple[Floats, Floats, int]
"""Steps and losses (NaN steps are none), and the number of lines that could not be read."""

STEP_NAMES = ("step", "global_step", "trainer/global_step", "train/global_step", "_step", "iteration", "iter")
LOSS_NAMES = (
    *("loss", "train_loss", "train/loss", "train_loss_step", "train/loss_step", "training_loss"),
    *("loss/train", "lm loss", "value"),  # the last one is TensorBoard's
)
LEAST_DEVIATIONS = 16  # a step with fewer deviations before it is not judged
MOST_BETWEEN = 64  # steps between a suspicious loss and the logged one before it that are candidates
MAX_LOSSES = 1 << 28  # they take 4 GiB; no run has as many steps
MAX_SPIKES = 10_000  # of a log with more, none tells much
_BLOCK_BYTES = 8 << 20
_MAX_LINE_BYTES = 64 << 20
_STEP_LIMIT = float(1 << 53)  # steps are read as float64
_HEAD_LINES = 1000  # lines of JSON in which the names of step and loss are looked for
_WINDOWS_AT_ONCE = 1 << 13
_SIGMAS_PER_MAD = 1.4826
_LEAST_SCALE = 0.001  # of the median


@dataclass(frozen=True, slots=True)
class SpikeOptions:
    """How spikes are found in a log. Raises ValueError for values that make no sense."""

    window: int = 64
    """Number of losses before a step whose noise its loss is compared with."""
    threshold: float = 5.0
    """Robust z-score above which a loss is suspicious."""
    before: int = 2
    """Number of steps before a suspicious step whose documents are candidates, too."""
    loss: str | None = None
    """Key or column of the loss (default: loss, train_loss and the like)."""
    first_step: int | None = None
    """Number that the log gives the first step (default: 0 if the log has a step 0, else 1)."""

    def __post_init__(self) -> None:
        if not LEAST_DEVIATIONS <= self.window <= 1 << 16:
            raise ValueError(f"window must be from {LEAST_DEVIATIONS} to 65,536 losses, not {self.window:,}")
        if not 0 < self.threshold < math.inf:
            raise ValueError(f"threshold must be above 0, not {self.threshold}")
        if not 0 <= self.before <= MOST_BETWEEN:
            raise ValueError(f"before must be at most {MOST_BETWEEN} steps, not {self.before:,}")
        if self.first_step not in (None, 0, 1):
            raise ValueError(f"first_step must be 0 or 1, not {self.first_step:,}")

    @property
    def least_before(self) -> int:
        """The number of losses before a step without which a finite one is not judged."""
        return self.window // 4 + LEAST_DEVIATIONS


@dataclass(frozen=True, slots=True)
class LossLog:
    """The losses of a log by ascending steps. Steps are counted from 1; the log counts from `first_step`."""

    name: str
    column: str
    """The key or column of the losses."""
    steps: Ints
    losses: Floats
    first_step: int
    skipped: int
    """Number of lines that could not be read."""
    repeated: int
    """Number of losses that a later line of the same step replaced."""


@dataclass(frozen=True, slots=True)
class Spike:
    """A jump of the loss at step `step`, counted from 1, whose robust z-score is `score` (may be infinite).

    `steps` are this step and the next ones at its height: suspicious, with at least half of its deviation.
    `logged_before` is the last logged step before it, 0 if there is none. `recovered` says that a later loss
    is no longer suspicious beside `median`, which is NaN if too few losses precede the step.
    """

    step: int
    loss: float
    median: float
    score: float
    steps: tuple[int, ...]
    logged_before: int
    recovered: bool


def read_losses(file: BinaryIO, name: str, options: SpikeOptions) -> LossLog:
    """Read a log. Raises ShardkitError if it has no steps with losses, or does not say which they are."""
    blocks = _blocks(file, name)
    head = next(blocks, b"").removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.startswith(b"[") or head.partition(b"\n")[0].strip() == b"{":
        lines = "write its list as lines, as `jq -c '.log_history[]'` does with trainer_state.json"
        raise ShardkitError(f"{name}: is one JSON document, not a line for each step: {lines}")
    parser = _json_parser if head.startswith(b"{") else _csv_parser
    column, parse, head = parser(head, name, options.loss)
    found, count = [parse(head)], 0
    for block in blocks:
        found.append(parse(block))
        count += len(found[-1][0])
        if count > MAX_LOSSES:
            raise ShardkitError(f"{name}: has more than {MAX_LOSSES:,} losses")
    steps = np.concatenate([some for some, _, _ in found])
    losses = np.concatenate([some for _, some, _ in found])
    skipped = sum(bad for _, _, bad in found)
    is_step = (steps >= 0) & (steps < _STEP_LIMIT) & (steps == np.floor(steps))
    if not is_step.all():
        skipped += int((~is_step).sum())
        steps, losses = steps[is_step], losses[is_step]
    if not len(steps):
        bad = f"; lines that could not be read: {skipped:,}" if skipped else ""
        raise ShardkitError(f"{name}: has no steps with a loss{bad}")
    ordered, losses = _ordered(steps.astype(np.int64), losses)
    first = options.first_step if options.first_step is not None else min(1, int(ordered[0]))
    if ordered[0] < first:
        raise ShardkitError(f"{name}: has a step 0: leave out first_step=1")
    repeated = len(steps) - len(ordered)
    return LossLog(name, column, ordered + (1 - first), losses, first, skipped, repeated)


def find_spikes(log: LossLog, options: SpikeOptions) -> list[Spike]:
    """Return the spikes of a log by ascending steps. Raises ShardkitError if there are too many."""
    finite = np.isfinite(log.losses)
    losses = np.where(finite, log.losses, np.nan)
    medians, scales = _moving(losses[finite], options.window)
    before = np.concatenate([[0], np.cumsum(finite)[:-1]])  # finite losses before each step
    is_high = ~finite
    with np.errstate(invalid="ignore"):
        is_high[finite] = losses[finite] > medians[:-1] + options.threshold * scales[:-1]
        jumps = np.diff(losses, prepend=np.nan) > options.threshold * scales[before]
    starts = np.flatnonzero(is_high & (jumps | ~np.append(False, is_high[:-1]))).tolist()
    if len(starts) > MAX_SPIKES:
        problem = f"{len(starts):,} of {len(losses):,} losses begin a spike"
        raise ShardkitError(f"{log.name}: {problem}: raise the threshold, as in --spikes threshold=20")
    lowest = np.minimum.accumulate(np.where(finite, losses, np.inf)[::-1])[::-1]
    spikes = []
    for at, end in pairwise([*starts, len(finite)]):
        median, scale = float(medians[before[at]]), float(scales[before[at]])
        loss = float(log.losses[at])
        height = median + (loss - median) / 2 if math.isfinite(loss) else math.inf
        last = at + 1
        while last < min(end, at + 1 + options.before) and is_high[last] and not losses[last] < height:
            last += 1
        spikes.append(
            Spike(
                step=int(log.steps[at]),
                loss=loss,
                median=median,
                score=(loss - median) / scale if math.isfinite(loss) else math.inf,
                steps=tuple(log.steps[at:last].tolist()),
                logged_before=int(log.steps[at - 1]) if at else 0,
                recovered=at + 1 < len(lowest)
                and not lowest[at + 1] > median + options.threshold * scale
                and bool(np.isfinite(lowest[at + 1])),
            )
        )
    return spikes


def _moving(losses: Floats, window: int) -> tuple[Floats, Floats]:
    """Return the median and the scale for each loss, and for one behind the end, from the losses before it.

    They are NaN where there are too few losses before.
    """
    near = window // 4
    medians, scales = np.full((2, len(losses) + 1), np.nan)
    if len(losses) >= near:
        medians[near:] = _medians(losses, near)
    deviations = np.abs(losses[near:] - medians[near:-1])
    for end in range(LEAST_DEVIATIONS, min(window, len(deviations) + 1)):
        scales[near + end] = _medians(deviations[:end], end)[0]
    if len(deviations) >= window:
        scales[near + window :] = _medians(deviations, window)
    return medians, np.maximum(_SIGMAS_PER_MAD * scales, _LEAST_SCALE * np.abs(medians))


def _medians(values: Floats, window: int) -> Floats:
    """Return the (upper) median of each `window` consecutive values, float64[len(values) - window + 1]."""
    windows, middle = sliding_window_view(values, window), window // 2
    medians = np.empty(len(windows))
    for first in range(0, len(windows), _WINDOWS_AT_ONCE):
        some = windows[first : first + _WINDOWS_AT_ONCE]
        medians[first : first + len(some)] = np.partition(some, middle, axis=1)[:, middle]
    return medians


def _ordered(steps: Ints, losses: Floats) -> tuple[Ints, Floats]:
    """Return the losses by ascending steps, the last one of each step."""
    if (np.diff(steps) > 0).all():
        return steps, losses
    order = np.argsort(steps, kind="stable")
    steps, losses = steps[order], losses[order]
    is_last = np.append(steps[1:] != steps[:-1], True)
    return steps[is_last], losses[is_last]


def _blocks(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield the file in blocks of whole lines. Raises ShardkitError for a line that no log has."""
    rest = b""
    while data := file.read(_BLOCK_BYTES):
        data = rest + data
        cut = data.rfind(b"\n") + 1
        if cut:
            yield data[:cut]
        elif len(data) > _MAX_LINE_BYTES:
            raise ShardkitError(f"{name}: is no log: a line has more than {_MAX_LINE_BYTES:,} bytes")
        rest = data[cut:]
    if rest:
        yield rest


Parser = tuple[str, Callable[[bytes], Pairs], bytes]
"""The name of the losses, what parses blocks, and the first block without a header."""


def _json_parser(head: bytes, name: str, loss: str | None) -> Parser:
    numbers: dict[str, None] = {}
    for line in head.split(b"\n", _HEAD_LINES)[:_HEAD_LINES]:
        numbers |= dict.fromkeys(key for key, value in _record(line).items() if _number(value) is not None)
    step, column = _named(list(numbers), name, loss, "keys with numbers")
    names = {"step": step, "loss": column}
    schema = pa.schema([(each, pa.float64()) for each in names.values()])
    options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")

    def parse(block: bytes) -> Pairs:
        try:
            table = pa.json.read_json(BytesIO(block), pa.json.ReadOptions(block_size=len(block) + 1), options)
        except pa.ArrowInvalid:
            return _line_by_line(
                ((record.get(step), record.get(column)) if (record := _record(line)) else None)
                for line in block.splitlines()
                if line.strip()
            )
        return _columns(table, step, column)

    return column, parse, head


def _csv_parser(head: bytes, name: str, loss: str | None) -> Parser:
    line, _, head = head.partition(b"\n")
    text = line.decode(errors="replace").strip()
    delimiter = max(",;\t", key=text.count)
    header = [cell.strip() for cell in next(csv.reader([text], delimiter=delimiter), [])]
    if not any(header):
        raise ShardkitError(f"{name}: is empty: there are no losses in it")
    step, column = _named(header, name, loss, "columns")
    at, at_loss = header.index(step), header.index(column)
    positions = [str(number) for number in range(len(header))]
    read = pa.csv.ReadOptions(column_names=positions)
    convert = pa.csv.ConvertOptions(
        include_columns=[positions[at], positions[at_loss]],
        column_types=dict.fromkeys((positions[at], positions[at_loss]), pa.float64()),
        null_values=[""],
    )

    def parse(block: bytes) -> Pairs:
        if not block.strip():
            return np.empty(0), np.empty(0), 0
        try:
            options = pa.csv.ParseOptions(delimiter=delimiter)
            table = pa.csv.read_csv(BytesIO(block), read, options, convert)
        except pa.ArrowInvalid:
            lines = block.decode(errors="replace").splitlines()  # each by itself: a quote may be open
            rows = (next(csv.reader([line], delimiter=delimiter)) for line in lines if line.strip())
            return _line_by_line(
                (row[at], row[at_loss]) if len(row) > max(at, at_loss) else None for row in rows
            )
        return _columns(table, positions[at], positions[at_loss])

    return column, parse, head


def _columns(table: pa.Table, step: str, loss: str) -> Pairs:
    """Return steps and losses of the lines that have a loss."""
    table = table.filter(table.column(loss).is_valid())
    steps, losses = (table.column(name).to_numpy() for name in (step, loss))
    return steps.astype(np.float64), losses.astype(np.float64), 0


def _line_by_line(lines: Iterator[tuple[object, object] | None]) -> Pairs:
    """Return steps and losses; skip and count lines that are None or have values that are no numbers."""
    steps, losses, skipped = [], [], 0
    for line in lines:
        if line is not None and line[1] in (None, ""):  # of another metric
            continue
        step, loss = (None, None) if line is None else map(_number, line)
        if step is None or loss is None:
            skipped += 1
        else:
            steps.append(step)
            losses.append(loss)
    return np.array(steps, np.float64), np.array(losses, np.float64), skipped


def _record(line: bytes) -> dict[str, object]:
    """Return the object of a line of JSON; {} for anything else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _number(value: object) -> float | None:
    """Return a number, or a text that is one, such as W&B's "NaN"; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _named(names: Sequence[str], log: str, loss: str | None, what: str) -> tuple[str, str]:
    """Return the names of step and loss in a log. Raises ShardkitError if one is missing or ambiguous."""
    found = f"{what}: {', '.join(names)[:120] or 'none'}"
    steps = _first_known(names, STEP_NAMES)
    if not steps:
        raise ShardkitError(
            f"{log}: has no column `step` ({found}); a log is JSON lines, or CSV with a header"
        )
    if loss is not None:
        if loss not in names:
            raise ShardkitError(f"{log}: has no losses named {loss!r} ({found})")
        return steps[0], loss
    losses = _first_known(names, LOSS_NAMES)
    if len(losses) != 1:
        problem = "has no column `loss`" if not losses else f"has losses of several runs: {', '.join(losses)}"
        raise ShardkitError(f"{log}: {problem} ({found}); name it with --spikes loss=NAME")
    return steps[0], losses[0]


def _first_known(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the names that are the first known one that there is; W&B's are "RUN - NAME"."""
    plain = {name: name.rpartition(" - ")[2].lower() for name in names}
    return next((found for one in known if (found := [n for n in names if plain[n] == one])), [])
