"""From the tokens that a run wants to raw input, cores, disk, requests and cost of the build, and back.

    kept text  = tokens * text_bytes_per_token
    raw text   = kept text / retention of all stages
    cores      = raw text / (bytes a core reads in a second * seconds), rounded up
    output     = tokens * token_bytes / (1 - padding)
    work       = kept text * work_bytes_per_text_byte     (documents, keys, signatures, tokens, on disk)

Bytes are of UTF-8 text unless they are called stored. Speed is raw text read, in a second of one core, by the
whole build: late stages, which see little of the input, are in it.

From raw text to tokens: what part each stage keeps, forwards and backwards.

Retention is a share of the bytes of text that enter a stage. The shares multiply: what one stage keeps is
what the next one reads.

What a finished build says of the next one: retention by stage, bytes a token, padding, from its card.

A card books what every rule dropped or cut, in bytes of text; `funnel_of` puts the rules together by stage
and the stages in the order in which they ran. Speed and work folder are no part of a card, which is the same
on any machine: whoever ran the build adds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil, prod
from typing import Any

from shardkit.errors import ShardkitError
from shardkit.tools.plan.quantities import Prices

__all__ = [
    "READ_BYTES",
    "UPLOAD_PART_BYTES",
    "BuildNeeds",
    "BuildPlan",
    "Funnel",
    "Measured",
    "Stage",
    "funnel_of",
    "measured_from_card",
]


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of a build and the share of text that it keeps."""

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
        """Of all stages together."""
        return prod((stage.retention for stage in self.stages), start=Fraction(1))

    def before(self, kept: Fraction) -> Fraction:
        """How much must be read so that `kept` remains."""
        return kept / self.retention

    def after(self, read: Fraction) -> Fraction:
        """What remains of `read`."""
        return read * self.retention

    def amounts(self, read: Fraction) -> Sequence[tuple[Stage, Fraction, Fraction]]:
        """(stage, what enters, what leaves) of each."""
        found = []
        for stage in self.stages:
            left = read * stage.retention
            found.append((stage, read, left))
            read = left
        return found


READ_BYTES = 4 << 20  # of a range that a build reads of a remote input (shardkit.storage.object_file)

UPLOAD_PART_BYTES = 16 << 20  # of an upload in parts (shardkit.storage.s3_upload)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildNeeds:
    """What a build is planned from. Where a field has a default, that is an assumption."""

    tokens: int
    """Tokens of the finished dataset, padding left out."""
    funnel: Funnel
    text_bytes_per_token: Fraction = Fraction(4)
    """Bytes of kept text that make a token: 4 to 4.8 for English, less for code and other languages."""
    core_bytes_per_second: Fraction = Fraction(10_000_000)
    """Raw text that one core takes through the whole build in a second."""
    seconds: Fraction = Fraction(14 * 86400)
    """How long the build may take."""
    stored_bytes_per_text_byte: Fraction = Fraction(1)
    """How many bytes a byte of raw text takes as stored: 0.3 to 0.4 where it is compressed."""
    work_bytes_per_text_byte: Fraction = Fraction(2)
    """Bytes in the work folder at most for each byte of kept text, the packed shards left out."""
    token_bytes: Fraction = Fraction(4)
    """Bytes of a stored token: 2 for vocabularies up to 65,536, else 4."""
    padding: Fraction = Fraction(0)
    """Part of the output that is padding."""
    shard_bytes: int = 1 << 26
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        for name in ("tokens", "text_bytes_per_token", "core_bytes_per_second", "seconds", "token_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {float(getattr(self, name)):g}")
        if self.shard_bytes < 1 or not 0 <= self.padding < 1 or self.stored_bytes_per_text_byte <= 0:
            raise ValueError("shard_bytes and stored_bytes_per_text_byte must be above 0, padding below 1")

    @classmethod
    def of_raw(cls, raw_bytes: Fraction, needs: BuildNeeds) -> BuildNeeds:
        """The same with the tokens that `raw_bytes` of raw text give, rounded down; at least 1."""
        kept = needs.funnel.after(Fraction(raw_bytes))
        return replace(needs, tokens=max(1, int(kept / needs.text_bytes_per_token)))


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What `needs` come to."""

    needs: BuildNeeds

    @property
    def kept_bytes(self) -> Fraction:
        """Text that remains behind the funnel."""
        return self.needs.tokens * self.needs.text_bytes_per_token

    @property
    def raw_bytes(self) -> Fraction:
        """Text that must be read."""
        return self.needs.funnel.before(self.kept_bytes)

    @property
    def raw_stored_bytes(self) -> Fraction:
        """The same as it lies in the store."""
        return self.raw_bytes * self.needs.stored_bytes_per_text_byte

    @property
    def core_seconds(self) -> Fraction:
        return self.raw_bytes / self.needs.core_bytes_per_second

    @property
    def cores(self) -> int:
        """Enough to be done in time."""
        return ceil(self.core_seconds / self.needs.seconds)

    def seconds_with(self, cores: int) -> Fraction:
        """How long so many cores take: the inverse of `cores`, up to its rounding."""
        return self.core_seconds / cores

    @property
    def work_bytes(self) -> Fraction:
        """Disk for the work folder, the packed shards included."""
        return self.kept_bytes * self.needs.work_bytes_per_text_byte + self.output_bytes

    @property
    def output_bytes(self) -> Fraction:
        return self.needs.tokens * self.needs.token_bytes / (1 - self.needs.padding)

    @property
    def shards(self) -> int:
        return ceil(self.output_bytes / self.needs.shard_bytes)

    @property
    def gets(self) -> int:
        """Reads of the raw input, in ranges."""
        return ceil(self.raw_stored_bytes / READ_BYTES)

    @property
    def puts(self) -> int:
        """Writes of the shards; those above a part's size begin and end an upload, too."""
        parts = ceil(Fraction(self.needs.shard_bytes, UPLOAD_PART_BYTES))
        return self.shards * (parts + 2 if parts > 1 else 1)

    @property
    def costs(self) -> Mapping[str, Fraction]:
        """Dollars by what they pay for, while the build runs."""
        prices, seconds = self.needs.prices, self.needs.seconds
        return {
            "cores": self.core_seconds / 3600 * prices.core_hour,
            "raw input stored": prices.storing(self.raw_stored_bytes, seconds),
            "reads": prices.reading(self.gets, self.raw_stored_bytes),
            "writes": prices.writing(self.puts),
        }

    @property
    def output_month_cost(self) -> Fraction:
        """Dollars for keeping the output 30 days."""
        return self.needs.prices.storing(self.output_bytes, Fraction(30 * 86400))


_DUPLICATES = ("exact_duplicate", "duplicate_lines", "near_duplicate", "empty")  # behind all filters

_UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Measured:
    """What a build was seen to do. `None`: it was not measured."""

    funnel: Funnel
    read_bytes: int
    """Raw text."""
    stored_bytes: int
    """The input files."""
    kept_bytes: int
    tokens: int
    text_bytes_per_token: Fraction
    stored_bytes_per_text_byte: Fraction
    token_bytes: Fraction
    """Bytes of the stored shards for each token or cell of padding."""
    padding: Fraction
    shard_bytes: int
    core_bytes_per_second: Fraction | None = None
    work_bytes_per_text_byte: Fraction | None = None


def measured_from_card(card: Mapping[str, Any], where: str) -> Measured:
    """From the parsed dataset.json; ShardkitError if it is not a card that a build wrote."""
    try:
        ledger, tokens, padding = card["funnel"], int(card["tokens"]), int(card["padding"])
        read, kept = int(ledger["read"]["bytes"]), int(ledger["kept"]["bytes"])
        stored = sum(int(source["bytes"]) for source in card["inputs"])
        if not (tokens and kept and stored):
            raise ValueError("it holds no tokens")
        return Measured(
            funnel=funnel_of(ledger, [next(iter(entry)) for entry in card["recipe"]["filters"]]),
            read_bytes=read,
            stored_bytes=stored,
            kept_bytes=kept,
            tokens=tokens,
            text_bytes_per_token=Fraction(kept, tokens),
            stored_bytes_per_text_byte=Fraction(stored, read),
            token_bytes=Fraction(int(card["stored_bytes"]), tokens + padding),
            padding=Fraction(padding, tokens + padding),
            shard_bytes=int(card["recipe"]["output"]["shard_bytes"]),
        )
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise ShardkitError(
            f"{where}: its card does not tell what a plan needs ({error!r}); only what `shardkit build` made "
            "has such a card"
        ) from error


def funnel_of(ledger: Mapping[str, Any], filters: list[str]) -> Funnel:
    """The stages of a build's ledger, as a card has it, that lost anything; `filters` in their order.

    What could not be read comes first, then what readers, filters and duplicate removal dropped and cut.
    """
    lost: dict[str, int] = {}
    for kind in ("quarantined", "dropped"):
        for reason, count in ledger[kind].items():
            stage = _UNREADABLE if kind == "quarantined" else reason.partition("/")[0]
            lost[stage] = lost.get(stage, 0) + int(count["bytes"])

    def place(stage: str) -> tuple[int, int]:
        if stage == _UNREADABLE:
            return 0, 0
        # A name that is used twice stands where it is used first.
        for number, names in enumerate((filters, _DUPLICATES), 2):
            if stage in names:
                return number, names.index(stage)
        return 1, 0  # what readers drop: pages that are none, mark-up

    stages = []
    left = int(ledger["read"]["bytes"])
    for stage in sorted(lost, key=lambda name: (place(name), name)):
        if lost[stage]:
            stages.append(Stage(stage, Fraction(left - lost[stage], left)))
            left -= lost[stage]
    return Funnel(tuple(stages))
