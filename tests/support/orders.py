"""Orders that hypothesis draws, and what is compared of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from hypothesis import strategies as st

from shardkit.order.order import Located, OrderSpec, Shuffle

__all__ = ["FIELDS", "SIZES", "lane_key", "order_specs", "same"]

FIELDS = tuple(field.name for field in fields(Located))

SIZES = st.lists(st.integers(0, 25), min_size=1, max_size=12).filter(any)
"""Samples of the shards of a dataset that has some."""

_SHUFFLES: st.SearchStrategy[Shuffle] = st.sampled_from(["window", "window", "window", "global", "none"])


_LANES = st.integers(1, 70)
_WINDOWS = st.integers(1, 60) | st.integers(1, 2**40)


def order_specs(
    lanes: st.SearchStrategy[int] = _LANES, window: st.SearchStrategy[int] = _WINDOWS
) -> st.SearchStrategy[OrderSpec]:
    """Any spec; most shuffle windows."""
    return st.builds(
        OrderSpec,
        seed=st.integers(0, 2**64 - 1),
        lanes=lanes,
        window=window,
        shuffle=_SHUFFLES,
        version=st.sampled_from([1, 2, 3, 3]),
    )


def lane_key(lane: int, spec: OrderSpec) -> int:
    """Return the key by which global batches are sorted, in plain Python."""
    return (lane << 16) // spec.lanes if spec.version == 1 else int(f"{lane:016b}"[::-1], 2)


def same(one: Located, other: Located, names: Sequence[str] = FIELDS) -> bool:
    """Whether the samples are at the same places."""
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
