"""Computes what a build needs (input, cores, disk, requests, cost) from its tokens, or tokens from input.

    kept text  = tokens * text_bytes_per_token
    raw text   = kept text / retention of all stages
    cores      = raw text / (bytes per second and core * seconds), rounded up
    output     = tokens * token_bytes / (1 - padding)
    work       = the most that the stages' files take at a time (stages/needs.py): runs go when they were read
    requests   = range reads of the raw input + requests of stages to a remote work folder (stages/needs.py)
    driver     = tasks * seconds per task, tasks * bytes per task

Bytes mean UTF-8 text unless they are called stored. Speed is raw text per second and core, averaged over
the whole build; late stages read little of the input. Retention is the share of text bytes that a stage
keeps; the retention of several stages is the product of their shares.

The card of a finished build contains retention by stage, bytes per token and padding (`measured_from_card`).
It does not contain speed, because a card is the same on any machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, prod
from pathlib import Path
from typing import Any

from shardkit.card import DatasetCard
from shardkit.errors import RecipeError, ShardError, ShardkitError
from shardkit.storage.object_file import MOST_RANGE_BYTES
from shardkit.tools.plan.quantities import Prices
from shardkit.writers.card import content_of
from shardkit.writers.dedup.config import DedupConfig
from shardkit.writers.inputs.small_files import group_size
from shardkit.writers.recipe.outputs import TEXT_FORMATS
from shardkit.writers.recipe.recipe import recipe_from_mapping
from shardkit.writers.recipe.steps import SAMPLE
from shardkit.writers.stages.graph import stage_needs
from shardkit.writers.stages.needs import Corpus, Shape, StageNeeds, compared_lines, most_held, together

# The driver's time and memory per task. Memory was measured with the real queue and real commits of results
# (tests/benchmarks/bench_driver.py). Time is for Ray, which starts a few hundred tasks per second.
DRIVER_TASK_SECONDS = Fraction("0.0025")
DRIVER_TASK_BYTES = 2_000
DRIVER_BYTES = 200_000_000
MANY_TASKS = 10_000_000  # a plan with more tasks warns: a driver was measured up to a million per stage
_ELSEWHERE = ("split", "output")  # funnel steps that move documents to another part or output of the build
DEDUP_PARTS = (*DedupConfig.schemes(), "spans")


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a build and the share of text that it keeps."""

    name: str
    retention: Fraction

    def __post_init__(self) -> None:
        if not 0 < self.retention <= 1:
            raise ValueError(
                f"stage {self.name!r} has a retention of {float(self.retention):g}; it must be above 0 and at"
                " most 1"
            )


@dataclass(frozen=True, slots=True)
class Funnel:
    """The stages of a build, in the order in which they run."""

    stages: tuple[Stage, ...]

    @property
    def retention(self) -> Fraction:
        """The retention of all stages together."""
        return prod((stage.retention for stage in self.stages), start=Fraction(1))

    def before(self, kept: Fraction) -> Fraction:
        """Return how much input is needed so that the amount `kept` remains after all stages."""
        return kept / self.retention

    def after(self, read: Fraction) -> Fraction:
        """Return how much of the input amount `read` remains after all stages."""
        return read * self.retention

    def amounts(self, read: Fraction) -> Sequence[tuple[Stage, Fraction, Fraction]]:
        """Return (stage, input amount, output amount) for each stage, given the input `read`."""
        found = []
        for stage in self.stages:
            left = read * stage.retention
            found.append((stage, read, left))
            read = left
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildNeeds:
    """The inputs of a build plan. Defaults are assumptions."""

    tokens: int
    """Tokens of the finished dataset, without padding."""
    funnel: Funnel
    text_bytes_per_token: Fraction = Fraction(4)
    """Bytes of kept text per token: 4 to 4.8 for English, less for code and other languages."""
    core_bytes_per_second: Fraction = Fraction(10_000_000)
    """Speed of one core: bytes of raw text per second, averaged over all stages of the build."""
    seconds: Fraction = Fraction(14 * 86400)
    """Maximum duration of the build, in seconds."""
    stored_bytes_per_text_byte: Fraction = Fraction(1)
    """Stored bytes per byte of raw text: 0.3 to 0.4 if the input is compressed."""
    token_bytes: Fraction = Fraction(4)
    """Stored bytes per token, summed over all outputs: 2 for vocabularies up to 65,536, else 4."""
    text_output: Fraction = Fraction(0)
    """Stored bytes of text outputs per byte of kept text."""
    padding: Fraction = Fraction(0)
    """Share of padding among the tokens of the rows."""
    shard_bytes: int = 1 << 26
    memory: int = 2_000_000_000
    """Memory limit of a task, in bytes; key `memory` of the recipe."""
    document_bytes: Fraction = Fraction(2600)
    """Bytes of kept text per document; 15T tokens of the public web are 23 billion documents."""
    split_bytes: Fraction = Fraction(10**9)
    """Bytes of raw text per split: a compressed file, or a part of an uncompressed one (64 MiB)."""
    dedup: frozenset[str] = frozenset({"exact", "near"})
    """Enabled kinds of duplicate removal, each one of `DEDUP_PARTS`."""
    shape: Shape = field(default_factory=Shape)
    """Datasets that the build writes, and its optional stages, from a recipe or a card."""
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        for name in ("tokens", "text_bytes_per_token", "core_bytes_per_second", "seconds", "token_bytes",
                     "memory", "document_bytes", "split_bytes"):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {float(getattr(self, name)):g}")
        if unknown := self.dedup - {*DEDUP_PARTS}:
            raise ValueError(
                f"duplicate removal has no part {min(unknown)!r}; its parts are {', '.join(DEDUP_PARTS)}"
            )
        if self.shard_bytes < 1 or not 0 <= self.padding < 1 or self.stored_bytes_per_text_byte <= 0:
            raise ValueError(
                "shard_bytes and stored_bytes_per_text_byte must be above 0, and padding from 0 to below 1"
            )

    @classmethod
    def of_raw(cls, raw_bytes: Fraction, needs: BuildNeeds) -> BuildNeeds:
        """Return `needs` with as many `tokens` as the build keeps of `raw_bytes` of raw text; at least 1."""
        kept = needs.funnel.after(Fraction(raw_bytes))
        return replace(needs, tokens=max(1, int(kept / needs.text_bytes_per_token)))


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildPlan:
    """The result of planning a build."""

    kept_bytes: Fraction
    raw_bytes: Fraction
    raw_stored_bytes: Fraction
    core_seconds: Fraction
    cores: int
    """Smallest number of cores with which the build finishes within `BuildNeeds.seconds`."""
    work_bytes: Fraction
    """The most bytes in the work folder at a time, including packed shards."""
    output_bytes: Fraction
    shards: int
    gets: int
    """Number of read requests: range reads of the raw input, and reads from a remote work folder."""
    puts: int
    """Number of write requests to the work folder and of shards, including the start and end of multipart
    uploads."""
    stages: Sequence[StageNeeds]
    """Requests by stage: to a remote work folder, and, in the stage `upload`, to the output."""
    tasks: int
    driver_seconds: Fraction
    """CPU time of the driver, in seconds."""
    driver_bytes: int
    """Memory of the driver, in bytes."""
    costs: Mapping[str, Fraction]
    """Costs while the build runs, in dollars."""
    output_month_cost: Fraction
    """Cost of storing the output for 30 days, in dollars."""

    def seconds_with(self, cores: int) -> Fraction:
        """Return the duration of the build with `cores` cores, in seconds."""
        return self.core_seconds / cores


def plan_build(needs: BuildNeeds) -> BuildPlan:
    """Plan a build by the module's formulas; raises RecipeError if `needs.memory` is too small."""
    prices = needs.prices
    kept_bytes = needs.tokens * needs.text_bytes_per_token
    raw_bytes = needs.funnel.before(kept_bytes)
    raw_stored_bytes = raw_bytes * needs.stored_bytes_per_text_byte
    core_seconds = raw_bytes / needs.core_bytes_per_second
    rows = needs.tokens * needs.token_bytes / (1 - needs.padding) if needs.shape.packed else Fraction(0)
    output_bytes = rows + kept_bytes * needs.text_output
    shards = ceil(output_bytes / needs.shard_bytes)
    stages = stage_needs(_corpus(needs, kept_bytes, raw_bytes))
    asked = together(stages)
    gets = ceil(raw_stored_bytes / MOST_RANGE_BYTES) + asked.gets
    work_bytes = Fraction(most_held(stages))
    return BuildPlan(
        kept_bytes=kept_bytes,
        raw_bytes=raw_bytes,
        raw_stored_bytes=raw_stored_bytes,
        core_seconds=core_seconds,
        cores=ceil(core_seconds / needs.seconds),
        work_bytes=work_bytes,
        output_bytes=output_bytes,
        shards=shards,
        gets=gets,
        puts=asked.puts,
        stages=stages,
        tasks=asked.tasks,
        driver_seconds=asked.tasks * DRIVER_TASK_SECONDS,
        driver_bytes=DRIVER_BYTES + asked.tasks * DRIVER_TASK_BYTES,
        costs={
            "cores": core_seconds / 3600 * prices.core_hour,
            "raw input stored": prices.storing(raw_stored_bytes, needs.seconds),
            "work folder": prices.storing(work_bytes, needs.seconds),
            "reads": prices.reading(gets, raw_stored_bytes + asked.read_bytes),
            "writes": prices.writing(asked.puts),
        },
        output_month_cost=prices.storing(output_bytes, Fraction(30 * 86400)),
    )


def _corpus(needs: BuildNeeds, kept_bytes: Fraction, raw_bytes: Fraction) -> Corpus:
    """Estimate documents, bytes and tokens of the corpus before duplicate removal."""
    losses = [stage.retention for stage in needs.funnel.stages if "dup" in stage.name]
    cleaned = kept_bytes / prod(losses, start=Fraction(1))
    cut = needs.dedup & {"lines", "spans"}
    grouped = group_size(float(raw_bytes))
    split_bytes = needs.split_bytes if 2 * needs.split_bytes > grouped else Fraction(grouped)
    return Corpus(
        splits=ceil(raw_bytes / split_bytes),
        documents=ceil(cleaned / needs.document_bytes),
        text_bytes=ceil(cleaned),
        tokens=needs.tokens,
        packed_bytes=ceil(kept_bytes),
        token_bytes=ceil(needs.token_bytes),
        memory=needs.memory,
        shard_bytes=needs.shard_bytes,
        steps=_steps(needs),
        lines=compared_lines(float(cleaned), 50 if "spans" in needs.dedup else None) if cut else 0,
        shape=needs.shape,
        is_sent=True,
    )


def _steps(needs: BuildNeeds) -> Sequence[str]:
    """Return the steps over all documents: those of the measured build if they are of the same kinds."""
    kinds = {"lines" if one == "spans" else one for one in needs.dedup}
    measured = needs.shape.steps
    same = {*measured} - {SAMPLE} == kinds
    return measured if same else [name for name in DedupConfig.schemes() if name in kinds]


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a build; None means not measured."""

    funnel: Funnel
    read_bytes: int
    """Raw text, in bytes."""
    stored_bytes: int
    """Size of the input files, in bytes."""
    kept_bytes: int
    tokens: int
    """Number of tokens; 0 if the build writes only text."""
    text_bytes_per_token: Fraction | None
    stored_bytes_per_text_byte: Fraction
    token_bytes: Fraction | None
    """Stored bytes per token of the rows, padding included, summed over all outputs."""
    text_output: Fraction
    """Stored bytes of text outputs per byte of kept text."""
    padding: Fraction
    shard_bytes: int
    shape: Shape
    document_bytes: Fraction | None = None
    memory: int | None = None
    """Memory limit of a task that the recipe sets, in bytes."""
    dedup: frozenset[str] | None = None
    """Kinds of duplicate removal that the recipe enables, each one of `DEDUP_PARTS`."""
    core_bytes_per_second: Fraction | None = None


def measured_from_card(card: DatasetCard) -> Measured:
    """Return the measurements in a dataset's card; raises ShardkitError if it is not the card of a build."""
    try:
        content = {**content_of(card), "output": {**card.recipe["output"], "path": "out"}}
        content.pop("part", None)
        if content.get("group") and content.get("split"):  # earlier versions took groups apart
            content["split"] = {**content["split"], "by": content["group"]["by"]}
        shape = Shape.of(recipe_from_mapping(content, folder=Path.cwd()))
    except (ShardError, RecipeError, KeyError, TypeError) as error:
        raise _lacks(card, error) from error
    return measured_from_cards([card], shape)


def measured_from_cards(cards: Sequence[DatasetCard], shape: Shape) -> Measured:
    """Return measurements of one build, combined from the cards of all its datasets.

    With several cards, a document that went to another part or output of the build does not count as lost.
    """
    try:
        first, several = cards[0], len(cards) > 1
        read, funnel = first.funnel.read.bytes, funnel_of(first, _ELSEWHERE if several else ())
        kept = round(funnel.after(Fraction(read)))
        texts = [card for card in cards if card.recipe["output"]["format"] in TEXT_FORMATS]
        rows = [card for card in cards if card not in texts]
        stored = sum(each.bytes for each in first.inputs)
        counted = sum(card.tokens for card in rows)
        if not (kept and stored) or (rows and not counted):
            raise ValueError("it has no tokens or no bytes of input")
        cells = sum(card.tokens + card.padding for card in rows)
        per_token = Fraction(sum(card.funnel.kept.bytes for card in rows), counted) if rows else None
        tokens = 0 if per_token is None else round(kept / per_token)
        padding = Fraction(sum(card.padding for card in rows), max(1, cells))
        written = sum(card.stored_bytes for card in rows)
        documents = sum(card.funnel.kept.documents for card in (rows or texts))
        text_bytes = sum(card.funnel.kept.bytes for card in (rows or texts))
        return Measured(
            funnel=funnel,
            read_bytes=read,
            stored_bytes=stored,
            kept_bytes=kept,
            tokens=tokens,
            text_bytes_per_token=per_token,
            stored_bytes_per_text_byte=Fraction(stored, read),
            token_bytes=Fraction(written) * (1 - padding) / tokens if tokens else None,
            text_output=Fraction(sum(card.stored_bytes for card in texts), kept),
            padding=padding,
            shard_bytes=int(first.recipe["output"]["shard_bytes"]),
            shape=shape,
            document_bytes=Fraction(text_bytes, max(1, documents)),
            memory=first.recipe.get("memory"),
            dedup=_dedup_parts(first.recipe.get("dedup") or {}),
        )
    except (ShardError, KeyError, TypeError, ValueError) as error:
        raise _lacks(cards[0], error) from error


def _lacks(card: DatasetCard, error: Exception) -> ShardkitError:
    problem = f"lacks measurements for a plan ({error!r}); only cards written by `shardkit build` have them"
    return ShardkitError(f"{card.where}: {problem}")


def _dedup_parts(dedup: Mapping[str, Any]) -> frozenset[str]:
    found = {name for name in DEDUP_PARTS if dedup.get(name) is not None}
    if "lines" in found and dedup["lines"]["unit"] == "span":
        found = found - {"lines"} | {"spans"}
    return frozenset(found)


def funnel_of(card: DatasetCard, kept_steps: Collection[str] = ()) -> Funnel:
    """Return the stages of a build that removed text, by its card; the loss of unreadable records is a stage.

    Documents that were removed by the funnel steps named in `kept_steps` count as kept.
    """
    read, *steps = card.funnel_steps()
    lost: dict[str, int] = {}
    for step in steps:
        if step.label in kept_steps:
            continue
        name = "unreadable" if step.kind == "quarantined" else step.label
        lost[name] = lost.get(name, 0) + step.lost_bytes
    stages, left = [], read.bytes
    for name, size in lost.items():
        if size:
            stages.append(Stage(name, Fraction(left - size, left)))
            left -= size
    return Funnel(tuple(stages))
