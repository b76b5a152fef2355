"""Named lists of filters, written as a recipe writes them.

Cheap rules come first where order does not decide what is kept: filters that only judge may trade places, an
editor such as `c4_quality` may not. So FineWeb's order (language, repetition, quality) is not kept, and the
documents that stay are FineWeb's all the same; only the reason that is booked may be another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PROFILES"]

PROFILES: Mapping[str, tuple[Mapping[str, Mapping[str, Any]], ...]] = {
    # At least ten words.
    "minimal": ({"length": {"min_words": 10}},),
    # Rae et al. 2021, as datatrove has it.
    "gopher": ({"gopher_quality": {}}, {"gopher_repetition": {}}),
    # Soldaini et al. 2024: the rules of Dolma v1.5's web pages, without its classifiers and deduplication.
    "dolma": ({"dolma_quality": {}}, {"dolma_repetition": {}}),
}
