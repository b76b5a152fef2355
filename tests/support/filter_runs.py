"""Filters on a few texts: decisions, values and edits as plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from shardkit.writers.filters.base import Edit, Editor, Filter, FilterSettings, Rule, first_failing
from shardkit.writers.filters.batch import TextBatch
from shardkit.writers.rows.documents import DOCUMENT_SCHEMA, document_ids


def documents(
    texts: Sequence[str],
    urls: Sequence[str | None] = (),
    *,
    file: str = "f",
    metadata: Sequence[str | None] = (),
) -> pa.RecordBatch:
    """Documents of one file with these texts, URLs and JSON metadata."""
    ids = document_ids(file, range(len(texts)))
    rows = [
        {"document_id": ids[n], "source": 0, "file": file, "record": n, "text": text, "url": url}
        for n, (text, url) in enumerate(zip(texts, urls or [None] * len(texts), strict=True))
    ]
    for row, kept in zip(rows, metadata or [None] * len(rows), strict=True):
        row["metadata"] = kept
    return pa.RecordBatch.from_pylist(rows, schema=DOCUMENT_SCHEMA)


def text_batch(
    texts: Sequence[str],
    urls: Sequence[str | None] = (),
    *,
    wanted: Sequence[bool] | None = None,
    stop_words: tuple[str, ...] = (),
    metadata: Sequence[str | None] = (),
) -> TextBatch:
    """A slice from the middle of larger arrays: filters must not take offsets to begin at 0."""
    urls = [None, *(urls or [None] * len(texts)), None]
    around = documents(
        ["before", *texts, "after"], urls, metadata=[None, *metadata, None] if metadata else ()
    )
    batch = TextBatch(around.slice(1, len(texts)), stop_words=stop_words)
    if wanted is not None:
        batch.wanted = np.array(wanted, np.bool_)
    return batch


def judge(settings: FilterSettings, batch: TextBatch, folder: Path | None = None) -> list[Rule]:
    """The rules of a filter for a batch."""
    step = settings.build(folder or Path())
    assert isinstance(step, Filter)
    return list(step.judge(batch))


def edit(settings: FilterSettings, batch: TextBatch) -> Edit:
    """Edit a batch; assert that every byte is accounted for."""
    step = settings.build(Path())
    assert isinstance(step, Editor)
    made = step.edit(batch)
    after = [len(text.encode()) for text in made.texts.to_pylist()]
    assert (batch.sizes - sum(made.cut.values())).tolist() == after
    return made


def fails(rule: Rule) -> list[bool] | None:
    """Which documents fail; None if the rule is switched off."""
    return None if rule.fails is None else rule.fails.tolist()


def values(rule: Rule) -> list[Any]:
    """Return the value that the rule compared, of each document."""
    assert rule.values is not None
    return list(rule.values.tolist())


def decisions(rules: Sequence[Rule], count: int) -> list[str | None]:
    """The name of the first rule that each document fails."""
    return [rules[code - 1].name if code else None for code in first_failing(rules, count).tolist()]


def decide(
    settings: FilterSettings,
    texts: Sequence[str],
    urls: Sequence[str | None] = (),
    *,
    folder: Path | None = None,
) -> list[str | None]:
    """The reason for which each text is dropped by one filter, or None."""
    return decisions(judge(settings, text_batch(texts, urls), folder), len(texts))
