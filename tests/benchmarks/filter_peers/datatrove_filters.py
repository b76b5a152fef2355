"""datatrove's own filters on its own documents: words by str.split, or with its default splitter (spaCy)."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dedup_peers"))

from peer_side import Request, serve


def split(text: str, language: str) -> list[str]:
    return text.split()


@cache
def filters(task: str, words: str) -> list[Any]:
    from datatrove.pipeline import filters as made
    from datatrove.pipeline.filters import (
        fineweb_quality_filter,
        gopher_quality_filter,
        gopher_repetition_filter,
    )

    if words == "split":
        for module in (gopher_repetition_filter, gopher_quality_filter, fineweb_quality_filter):
            module.split_into_words = split
    gopher = [made.GopherRepetitionFilter(), made.GopherQualityFilter()]
    return {
        "repetition": gopher[:1],
        "gopher": gopher,
        "fineweb": [
            *gopher,
            made.C4QualityFilter(filter_no_terminal_punct=False),
            made.FineWebQualityFilter(),
        ],
    }[task]


def passing(texts: list[str], request: Request) -> int:
    """Documents that pass."""
    from datatrove.data import Document

    steps = filters(request["task"], request["words"])
    kept = 0
    for text in texts:
        document = Document(text=text, id="x")  # C4's filter writes its edited text into it
        kept += all(step.filter(document) is True for step in steps)
    return kept


if __name__ == "__main__":
    serve(dict.fromkeys(("repetition", "gopher", "fineweb"), passing))
