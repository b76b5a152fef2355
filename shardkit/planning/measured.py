"""What a finished build says of the next one: retention by stage, bytes a token, padding, from its card.

A card books what every rule dropped or cut, in bytes of text; `funnel_of` puts the rules together by stage
and the stages in the order in which they ran. Speed and work folder are no part of a card, which is the same
on any machine: whoever ran the build adds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from shardkit.errors import ShardkitError
from shardkit.planning.funnel import Funnel, Stage

__all__ = ["Measured", "funnel_of", "measured_from_card"]

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
