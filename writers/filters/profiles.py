"""Named lists of filters, written as a recipe writes them.

Cheap rules come first where order does not decide what is kept: filters that only judge may trade places, an
editor such as `c4_quality` may not. So FineWeb's own order (language, repetition, quality) is not kept; the
same documents stay, and only the reason that is booked may be another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PROFILES"]

_Entry = Mapping[str, Mapping[str, Any]]

_GOPHER: tuple[_Entry, ...] = ({"gopher_quality": {}}, {"gopher_repetition": {}})
_FINEWEB: tuple[_Entry, ...] = ({"c4_quality": {"filter_no_terminal_punct": False}}, {"fineweb_quality": {}})

PROFILES: Mapping[str, tuple[_Entry, ...]] = {
    # At least ten words.
    "minimal": ({"length": {"min_words": 10}},),
    # Rae et al. 2021, as datatrove has it.
    "gopher": _GOPHER,
    # Raffel et al. 2020, without its list of bad words.
    "c4": ({"c4_quality": {}},),
    # Penedo et al. 2024, as datatrove's examples/fineweb.py has it; lists of URLs are the user's.
    "fineweb": (*_GOPHER, {"language": {"languages": ["en"], "threshold": 0.65}}, *_FINEWEB),
    # The same without the language model.
    "fineweb_rules": (*_GOPHER, *_FINEWEB),
    # Soldaini et al. 2024: the rules of Dolma v1.5's web pages, without its classifiers and deduplication.
    "dolma": ({"dolma_quality": {}}, {"dolma_repetition": {}}),
}
