"""Shows rows as a model receives them, and the rows of a training step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from shardkit.datasets.provenance.answers import parse_row, trace_step
from shardkit.datasets.provenance.run import Run
from shardkit.datasets.provenance.text import Decoder, Row, read_rows
from shardkit.datasets.segments import IGNORED_LABEL, find_segments
from shardkit.errors import ShardkitError
from shardkit.order.state import LoaderState
from shardkit.tools.explore.explored import Explored, PageNotFoundError, Params, number_param

_TOKENS_ON_PAGE = 4096
_ROWS_OF_STEP = 50
_MOST_BYTES_OF_CHARACTER = 4
_MOST_BATCH = 1 << 20


@dataclass(frozen=True, slots=True)
class TokenShown:
    """A displayed unit of text: usually one token, or several tokens that share one character.

    `document` is the number of the document in the row, None for padding. `label` is the token that the model
    learns, None if the loss is masked.
    """

    at: int
    ids: list[int]
    text: str
    document: int | None
    position_id: int
    is_eos: bool
    is_start: bool
    label: int | None


@dataclass(frozen=True, slots=True)
class RowPart:
    """Tokens of one document in a row, or padding (`number` is None); `facts` describe the document if known.

    `is_continued` says that the document began on an earlier page of the row.
    """

    number: int | None
    facts: dict[str, Any] | None
    tokens: list[TokenShown]
    is_continued: bool


def show_row(explored: Explored, params: Params) -> dict[str, object]:
    """Return the facts for a row's page: its documents, eos, padding, position ids and labels."""
    dataset = explored.dataset
    if not len(dataset):
        raise PageNotFoundError("this dataset has no rows")
    text = params.get("row", "0").strip().replace(",", "")
    number = random.randrange(len(dataset)) if text == "random" else parse_row(dataset, text)
    page: dict[str, object] = {"row": number, "rows": len(dataset)}
    if dataset.token_column is None:
        sample = {name: _beginning(value) for name, value in dataset[number].items()}
        return page | {"sample": sample, "parts": None}
    [(_, tokens)] = read_rows(dataset, [number])
    [facts] = explored.tracer.rows([number], excerpts=False)
    first = number_param(params, "from", 0, most=len(tokens))
    name = dataset.loss_mask_column
    mask = np.ones(len(tokens), np.uint8) if name is None else np.asarray(dataset[number][name])
    shown = _shown(explored, tokens, facts["documents"], mask, first, first + _TOKENS_ON_PAGE)
    end = first + _TOKENS_ON_PAGE
    return page | {
        "facts": facts,
        "parts": _parts(shown, facts["documents"], first),
        "length": len(tokens),
        "trained": None if name is None else int(np.count_nonzero(mask)),
        "first": first,
        "next": end if end < len(tokens) else None,
        "padding": int(sum(token.document is None for token in shown)) if end >= len(tokens) else None,
    }


def _parts(shown: list[TokenShown], documents: list[dict[str, Any]] | None, first: int) -> list[RowPart]:
    """Group the tokens of a page by document; `first` is the page's first token."""
    found = []
    for number, tokens in groupby(shown, lambda token: token.document):
        of_document = list(tokens)
        facts = None if number is None or documents is None else documents[number]
        is_continued = number is not None and of_document[0].at == first and not of_document[0].is_start
        found.append(RowPart(number, facts, of_document, is_continued and first > 0))
    return found


def _shown(
    explored: Explored,
    tokens: Row,
    documents: list[dict[str, Any]] | None,
    mask: Row,
    first: int,
    end: int,
) -> list[TokenShown]:
    eos = None if explored.card is None else explored.card.tokenizer.eos_id
    segments = find_segments(tokens[None], eos)
    positions = np.empty((1, len(tokens)), np.int64)
    segments.position_ids(positions)
    numbers = segments.document_ids()[0].astype(np.int64)
    labels = tokens[None].astype(np.int64)
    segments.mask(labels, shift=0, mask_starts=False)
    starts = np.zeros(len(tokens), np.bool_)
    starts[segments.starts] = True
    is_padding = labels[0] == IGNORED_LABEL
    if documents is not None:  # provenance records the documents in a row even if no eos separates them
        numbers, is_padding = np.full(len(tokens), -1), np.ones(len(tokens), np.bool_)
        end_before = 0
        for number, document in enumerate(documents):
            low, high = document["tokens"]
            low, end_before = end_before, high  # start at the previous end: a bos may precede the document
            numbers[low:high], is_padding[low:high] = number, False
    cuts = np.flatnonzero(np.diff(numbers)) + 1
    found = []
    for at, ids, text in _texts(explored.decoder, tokens[:end], first, set(cuts.tolist())):
        found.append(
            TokenShown(
                at,
                ids,
                text,
                None if is_padding[at] else int(numbers[at]),
                int(positions[0, at]),
                ids == [eos],
                bool(starts[at]),
                None if is_padding[at] or not mask[at] else ids[0],
            )
        )
    return found


def _texts(
    decoder: Decoder | None, tokens: Row, first: int, cuts: set[int]
) -> Iterator[tuple[int, list[int], str]]:
    """Yield (index of the first token, token ids, text) from token `first` on.

    Tokens that share a character are in one item, unless a document begins between them (`cuts`).
    """
    ids = tokens.tolist()
    at = first
    while at < len(ids):
        if decoder is None:
            yield at, [ids[at]], f"{ids[at]} "
            at += 1
            continue
        end = at + 1
        text = decoder.piece(ids[at - 1] if at else None, ids[at:end])
        while (
            text.endswith("\ufffd")
            and end - at < _MOST_BYTES_OF_CHARACTER
            and end < len(ids)
            and end not in cuts
        ):
            end += 1
            text = decoder.piece(ids[at - 1] if at else None, ids[at:end])
        if text.endswith("\ufffd"):  # the text is U+FFFD itself, or bytes that complete no character
            end = at + 1
            text = decoder.piece(ids[at - 1] if at else None, ids[at:end])
        yield at, ids[at:end], text
        at = end


def show_step(explored: Explored, params: Params, state: LoaderState | None = None) -> dict[str, object]:
    """Return the rows that a step of a training run, counted from 1, delivers over all ranks."""
    step = number_param(params, "step", 1, most=10**15)
    batch_size = number_param(params, "batch_size", 8, most=_MOST_BATCH)
    world_size = number_param(params, "world_size", 1, most=_MOST_BATCH)
    seed = number_param(params, "seed", 17, most=2**63 - 1)
    if batch_size * world_size > _MOST_BATCH:
        raise ShardkitError(f"batch_size times world_size must not exceed {_MOST_BATCH:,}")
    dataset = explored.dataset
    if state is not None:
        run = Run.from_state(state, [dataset], batch_size=batch_size, world_size=world_size)
    else:
        run = Run.from_options(dataset, batch_size=batch_size, world_size=world_size, seed=seed)
    answer = trace_step(explored.tracer, run, step, limit=_ROWS_OF_STEP)
    asked = {"step": step, "batch_size": batch_size, "world_size": world_size, "seed": seed}
    return {"asked": asked, "has_state": state is not None, "answer": answer, "run": run.to_dict()}


def _beginning(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 2000 else text[:2000] + "…"
