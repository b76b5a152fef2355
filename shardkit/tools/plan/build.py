"""From the tokens that a run wants to raw input, cores, disk, requests and cost of the build, and back.

    kept text  = tokens * text_bytes_per_token
    raw text   = kept text / retention of all stages
    cores      = raw text / (bytes that a core reads in a second * seconds), rounded up
    output     = tokens * token_bytes / (1 - padding)
    work       = kept text * work_bytes_per_text_byte     (documents, keys, signatures, tokens, on disk)
    requests   = raw input in ranges + what the stages ask of a work folder in a store (stages/needs.py)
    driver     = tasks * (seconds, bytes) that one costs it

Bytes are of UTF-8 text unless they are called stored. Speed is raw text per second and core, averaged over
the whole build; late stages read little of the input. Retention is the share of the bytes of text that a
stage keeps; shares multiply.

The card of a finished build gives retention by stage, bytes per token and padding (`measured_from_card`).
Speed and the size of the work folder are not in a card, which is the same on any machine.
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
from shardkit.writers.recipe.recipe import TEXT_FORMATS, recipe_from_mapping
from shardkit.writers.stages.graph import stage_needs
from shardkit.writers.stages.needs import Corpus, Shape, StageNeeds, compared_lines, together

# Bytes: of the real queue and commits (tests/benchmarks/bench_driver.py). Seconds: of Ray, which hands over
# some hundred tasks a second.
DRIVER_TASK_SECONDS = Fraction("0.0025")
DRIVER_TASK_BYTES = 2_000
DRIVER_BYTES = 200_000_000
MANY_TASKS = 10_000_000  # the driver was measured with a million in a stage
_ELSEWHERE = ("split", "output")  # steps of a funnel: documents of another part, or of another output
DEDUP_PARTS = (*DedupConfig.schemes(), "spans")


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a build and the share of text that it keeps."""

    name: str
    retention: Fraction

    def __post_init__(self) -> None:
        if not 0 < self.retention <= 1:
            raise ValueError(
                f"stage {self.name!r} keeps {float(self.retention):g} of its input: a retention is above 0 "
                "(nothing could be planned from 0) and at most 1"
            )


@dataclass(frozen=True, slots=True)
class Funnel:
    """Stages in the order in which they run."""

    stages: tuple[Stage, ...]

    @property
    def retention(self) -> Fraction:
        """The retention of all stages together."""
        return prod((stage.retention for stage in self.stages), start=Fraction(1))

    def before(self, kept: Fraction) -> Fraction:
        """The input that leaves `kept`."""
        return kept / self.retention

    def after(self, read: Fraction) -> Fraction:
        """The output of `read`."""
        return read * self.retention

    def amounts(self, read: Fraction) -> Sequence[tuple[Stage, Fraction, Fraction]]:
        """(stage, what enters, what leaves) of each."""
        found = []
        for stage in self.stages:
            left = read * stage.retention
            found.append((stage, read, left))
            read = left
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildNeeds:
    """A build. Defaults are assumptions."""

    tokens: int
    """Tokens of the finished dataset, without padding."""
    funnel: Funnel
    text_bytes_per_token: Fraction = Fraction(4)
    """Bytes of kept text that make a token: 4 to 4.8 for English, less for code and other languages."""
    core_bytes_per_second: Fraction = Fraction(10_000_000)
    """Raw text that one core takes through the whole build in a second."""
    seconds: Fraction = Fraction(14 * 86400)
    """How long the build may take."""
    stored_bytes_per_text_byte: Fraction = Fraction(1)
    """Stored bytes per byte of raw text: 0.3 to 0.4 if it is compressed."""
    work_bytes_per_text_byte: Fraction = Fraction(2)
    """Peak bytes in the work folder per byte of kept text, without the packed shards."""
    token_bytes: Fraction = Fraction(4)
    """Bytes of a stored token: 2 for vocabularies up to 65,536, else 4; of all outputs together."""
    text_output: Fraction = Fraction(0)
    """Stored bytes of text outputs per byte of kept text."""
    padding: Fraction = Fraction(0)
    """Part of the output that is padding."""
    shard_bytes: int = 1 << 26
    memory: int = 2_000_000_000
    """Bytes that a task may use: `memory` of the recipe."""
    document_bytes: Fraction = Fraction(2600)
    """Kept text of a document; that of 15T tokens of the public web is in 23 billion documents."""
    split_bytes: Fraction = Fraction(10**9)
    """Raw text of a split: a compressed file, or a part of a plain one (64 MiB)."""
    dedup: frozenset[str] = frozenset({"exact", "near"})
    """Parts of duplicate removal, of `DEDUP_PARTS`."""
    shape: Shape = field(default_factory=Shape)
    """Datasets that are written, and other stages; of a recipe or a card."""
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        for name in ("tokens", "text_bytes_per_token", "core_bytes_per_second", "seconds", "token_bytes",
                     "memory", "document_bytes", "split_bytes"):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {float(getattr(self, name)):g}")
        if unknown := self.dedup - {*DEDUP_PARTS}:
            raise ValueError(f"duplicate removal has no part {min(unknown)!r}: {', '.join(DEDUP_PARTS)}")
        if self.shard_bytes < 1 or not 0 <= self.padding < 1 or self.stored_bytes_per_text_byte <= 0:
            raise ValueError("shard_bytes and stored_bytes_per_text_byte must be above 0, padding below 1")

    @classmethod
    def of_raw(cls, raw_bytes: Fraction, needs: BuildNeeds) -> BuildNeeds:
        """`needs` with the tokens that `raw_bytes` of raw text give, rounded down; at least 1."""
        kept = needs.funnel.after(Fraction(raw_bytes))
        return replace(needs, tokens=max(1, int(kept / needs.text_bytes_per_token)))


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildPlan:
    """What a build needs."""

    kept_bytes: Fraction
    raw_bytes: Fraction
    raw_stored_bytes: Fraction
    core_seconds: Fraction
    cores: int
    """Enough to finish in time."""
    work_bytes: Fraction
    """Disk for the work folder, packed shards included."""
    output_bytes: Fraction
    shards: int
    gets: int
    """Reads of the raw input, in ranges, and of the work folder."""
    puts: int
    """Writes to the work folder, and of the shards: one in parts also begins and ends an upload."""
    stages: Sequence[StageNeeds]
    """What each stage asks of a work folder in a store, and stage `upload` of the output."""
    tasks: int
    driver_seconds: Fraction
    """CPU time of the driver."""
    driver_bytes: int
    """Memory of the driver."""
    costs: Mapping[str, Fraction]
    """Dollars while the build runs."""
    output_month_cost: Fraction
    """Dollars for storing the output 30 days."""

    def seconds_with(self, cores: int) -> Fraction:
        """How long the build takes with `cores`."""
        return self.core_seconds / cores


def plan_build(needs: BuildNeeds) -> BuildPlan:
    """The arithmetic of the module's docstring. RecipeError if the build cannot be made with its memory."""
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
    return BuildPlan(
        kept_bytes=kept_bytes,
        raw_bytes=raw_bytes,
        raw_stored_bytes=raw_stored_bytes,
        core_seconds=core_seconds,
        cores=ceil(core_seconds / needs.seconds),
        work_bytes=kept_bytes * needs.work_bytes_per_text_byte + output_bytes,
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
            "reads": prices.reading(gets, raw_stored_bytes + asked.read_bytes),
            "writes": prices.writing(asked.puts),
        },
        output_month_cost=prices.storing(output_bytes, Fraction(30 * 86400)),
    )


def _corpus(needs: BuildNeeds, kept_bytes: Fraction, raw_bytes: Fraction) -> Corpus:
    """Estimate the corpus that duplicate removal begins with, before the stages that remove duplicates."""
    losses = [stage.retention for stage in needs.funnel.stages if "dup" in stage.name]
    cleaned = kept_bytes / prod(losses, start=Fraction(1))
    cut = needs.dedup & {"lines", "spans"}
    return Corpus(
        splits=ceil(raw_bytes / needs.split_bytes),
        documents=ceil(cleaned / needs.document_bytes),
        text_bytes=ceil(cleaned),
        tokens=needs.tokens,
        token_bytes=ceil(needs.token_bytes),
        memory=needs.memory,
        shard_bytes=needs.shard_bytes,
        dedup=needs.dedup,
        lines=compared_lines(float(cleaned), 50 if "spans" in needs.dedup else None) if cut else 0,
        shape=needs.shape,
        is_sent=True,
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a build; None: not measured."""

    funnel: Funnel
    read_bytes: int
    """Raw text."""
    stored_bytes: int
    """The input files."""
    kept_bytes: int
    tokens: int
    """0 if only text is written."""
    text_bytes_per_token: Fraction | None
    stored_bytes_per_text_byte: Fraction
    token_bytes: Fraction | None
    """Bytes of the stored shards for each token or cell of padding, in all outputs."""
    text_output: Fraction
    """Stored bytes of text outputs per byte of kept text."""
    padding: Fraction
    shard_bytes: int
    shape: Shape
    document_bytes: Fraction | None = None
    memory: int | None = None
    """Of a task, as the recipe says."""
    dedup: frozenset[str] | None = None
    """Parts of duplicate removal, as the recipe says."""
    core_bytes_per_second: Fraction | None = None
    work_bytes_per_text_byte: Fraction | None = None


def measured_from_card(card: DatasetCard) -> Measured:
    """Return what the card of a dataset says. ShardkitError if it is not a card that a build wrote."""
    try:
        content = {**content_of(card), "output": {**card.recipe["output"], "path": "out"}}
        content.pop("part", None)
        shape = Shape.of(recipe_from_mapping(content, folder=Path.cwd()))
    except (ShardError, RecipeError, KeyError, TypeError) as error:
        raise _lacks(card, error) from error
    return measured_from_cards([card], shape)


def measured_from_cards(cards: Sequence[DatasetCard], shape: Shape) -> Measured:
    """Return what the cards of all datasets of one build say together.

    Documents that another part of the split has, or another output, are no loss then.
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
            raise ValueError("it holds no tokens")
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
    problem = f"lacks what a plan needs ({error!r}); only cards of `shardkit build` have it"
    return ShardkitError(f"{card.where}: {problem}")


def _dedup_parts(dedup: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the parts of duplicate removal in a recipe."""
    found = {name for name in DEDUP_PARTS if dedup.get(name) is not None}
    if "lines" in found and dedup["lines"]["unit"] == "span":
        found = found - {"lines"} | {"spans"}
    return frozenset(found)


def funnel_of(card: DatasetCard, kept_steps: Collection[str] = ()) -> Funnel:
    """The stages of a build that lost anything: what could not be read comes first, as one stage.

    What the steps `kept_steps` take out is counted as kept.
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
