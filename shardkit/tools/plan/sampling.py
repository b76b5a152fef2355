"""Measures a recipe on a sample of its real input: retention by stage, speed, disk.

Three builds run in a temporary folder. The first reads a quarter of the sample, to compile kernels. The
second reads the same quarter again, and the third the whole sample. The cost per byte follows from the
difference between the last two builds, so that the fixed cost of a build cancels out.

Nothing is published, and the sample's recipe contains no path to which the user's own build would write.

Duplicates are found within the sample only, so duplicate removal keeps less of the whole input.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from shardkit.errors import BuildError, ShardkitError
from shardkit.storage.store import StorageOptions
from shardkit.tools.plan.build import Measured, measured_from_cards
from shardkit.writers.estimate import sample_recipe
from shardkit.writers.input_sample import Piece, choose_pieces, put_pieces
from shardkit.writers.inputs.scan import Split, scan_inputs
from shardkit.writers.pipeline import build_unpublished
from shardkit.writers.recipe.recipe import Recipe, load_recipe
from shardkit.writers.stages.needs import Shape

DEFAULT_SHARE = Fraction(1, 100)
_UNCUT = 1 << 62  # split size in bytes that keeps files whole: finding splits would read the whole file
_PART = 4  # the small builds read 1/_PART of the sample's bytes
# Minimum difference in bytes read between the large and the small build; below it, the time difference is
# noise.
_LEAST_TEXT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of a sample, the estimated bytes of text in the whole input, and notes for the user."""

    measured: Measured
    whole_text_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Built:
    """The measurements of one build of the sample or a part of it."""

    measured: Measured
    core_seconds: float
    stored: dict[int, int]  # {number of an input in the recipe: stored bytes read from it}
    read: dict[int, int]  # {number of an input in the recipe: bytes of text read from it}

    @property
    def stored_bytes(self) -> int:
        return sum(self.stored.values())


def measure_sample(
    recipe: Recipe | str | Path,
    *,
    share: Fraction | None = None,
    sample_bytes: int | None = None,
    overrides: Sequence[str] = (),
    workers: int | None = None,
    progress: bool = True,
    storage: StorageOptions | None = None,
) -> Sample:
    """Build a sample of the recipe's input, a `share` or `sample_bytes` of it, and return the measurements.

    Raises RecipeError for an invalid recipe, BuildError if a build fails, and ShardkitError if the sample is
    empty or no text is left after the build.
    """
    recipe = load_recipe(recipe, overrides)
    splits = scan_inputs(recipe, storage, split_bytes=_UNCUT)
    whole = sum(split.bytes for split in splits)
    wanted = sample_bytes if sample_bytes is not None else int((share or DEFAULT_SHARE) * whole)
    if not wanted:
        raise ShardkitError("the sample has 0 bytes: give a larger --sample or --sample-bytes")
    with tempfile.TemporaryDirectory(prefix="shardkit-sample-") as scratch:
        built: list[_Built] = []
        for number, size in enumerate((wanted // _PART, wanted // _PART, wanted)):
            folder = Path(scratch) / str(number)
            pieces = choose_pieces(splits, max(1, size))
            built.append(_build(recipe, pieces, folder, whole, workers, progress, storage))
            shutil.rmtree(folder)
    _, small, large = built
    measured, notes = large.measured, _notes(recipe, large, whole)
    more = measured.read_bytes - small.measured.read_bytes
    seconds = large.core_seconds - small.core_seconds
    if more < _LEAST_TEXT_BYTES or seconds <= 0:
        more, seconds = measured.read_bytes, large.core_seconds
        notes.append(
            "the sample is too small: most of its time is the fixed cost of a build; use a larger one"
        )
    stored_per_text = Fraction(whole, max(1, _whole_text(splits, large)))
    measured = replace(
        measured,
        stored_bytes=large.stored_bytes,
        stored_bytes_per_text_byte=stored_per_text,
        core_bytes_per_second=Fraction(more) / Fraction(seconds).limit_denominator(1000),
    )
    return Sample(measured, _whole_text(splits, large), tuple(notes))


def _whole_text(splits: Sequence[Split], built: _Built) -> int:
    """Estimate the bytes of text in all inputs: stored bytes times text per stored byte in the sample."""
    stored: dict[int, int] = {}
    for split in splits:
        stored[split.source] = stored.get(split.source, 0) + split.bytes
    return sum(
        size * built.read[s] // max(1, built.stored[s]) for s, size in stored.items() if s in built.read
    )


def _notes(recipe: Recipe, large: _Built, whole: int) -> list[str]:
    part = large.stored_bytes / max(1, whole)
    notes = [f"measured on {100 * part:.3g}% of the input: {large.stored_bytes:,} of {whole:,} stored bytes"]
    if part < 1 and recipe.dedup != type(recipe.dedup)(exact=None):
        notes.append(
            "duplicates were found within the sample only: duplicate removal keeps less of the whole input"
        )
    return notes


def _build(
    recipe: Recipe,
    pieces: Sequence[Piece],
    folder: Path,
    whole: int,
    workers: int | None,
    progress: bool,
    storage: StorageOptions | None,
) -> _Built:
    inputs, stored = put_pieces(recipe, pieces, folder / "inputs")
    derived = sample_recipe(recipe, inputs, folder, sum(stored.values()) / max(1, whole))
    before = _core_seconds()
    try:
        built = build_unpublished(derived, workers=workers, progress=progress, storage=storage)
    except BuildError as error:
        raise BuildError(f"the build of the sample failed: {error}") from error
    seconds = _core_seconds() - before
    cards = [dataset.facts for dataset in built]
    read = [entry.funnel.read.bytes for entry in cards[0].inputs]
    measured = measured_from_cards(cards, Shape.of(recipe))
    return _Built(measured, seconds, stored, dict(zip(stored, read, strict=True)))


def _core_seconds() -> float:
    """Return the CPU seconds of this process and of its child processes that have ended, such as workers."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
