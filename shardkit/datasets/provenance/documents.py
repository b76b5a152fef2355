"""The Python API for provenance: the text and the documents of a row, and searches for documents.

    text_of, documents_of    implement `Dataset.text` and `Dataset.documents`
    trace_of                 implements `shardkit.trace` and `Dataset.trace`

Documents have their whole text if a tokenizer is known. The tokenizer of an open dataset is read once. The
provenance tables are opened in each call, and only the parts needed for the answer are read.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, TypedDict
from weakref import WeakKeyDictionary

import numpy as np

from shardkit.datasets.opened import OpenDataset
from shardkit.datasets.provenance.text import Decoder, Row, find_tokenizer, read_rows, token_column
from shardkit.display import Described, Facts, counted, printable
from shardkit.errors import ShardError, ShardkitError, naming_extras
from shardkit.files import local_path
from shardkit.hints import refuse_unknown
from shardkit.order.balance import Balance, DocumentIds
from shardkit.order.exclusions import Exclusions
from shardkit.order.state import LoaderState
from shardkit.synonyms import TRACE

if TYPE_CHECKING:
    import tokenizers

with naming_extras("reading text and provenance"):
    from shardkit.datasets.provenance.answers import (
        Tracer,
        source_numbers,
        trace_rows,
        trace_search,
        trace_step,
    )
    from shardkit.datasets.provenance.run import Run, read_state
    from shardkit.datasets.provenance.search import Selection, UrlPatterns, parse_document_id

__all__ = ["Document", "Question", "Trace", "documents_of", "text_of", "trace_of"]

_EXCERPT = 60  # maximum number of characters of a text in a repr
_SHOWN = 10  # maximum number of documents in a repr
_TEXT_COLUMNS = ("text", "txt")  # names of text columns in datasets without tokens; txt is for tars

_KINDS = {  # kind of question by keyword argument
    "row": "row",
    "step": "step",
    "url": "search",
    "id": "search",
    "document": "search",
    "source": "search",
    "file": "search",
}

_Words = str | Sequence[str]
_Path = str | os.PathLike[str]

# Decoders of open datasets, cached for later calls.
_decoders: WeakKeyDictionary[OpenDataset, Decoder] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, repr=False)
class Document:
    """A document in a row, or a piece of one: tokens `start` to `end` (exclusive) of row `row`.

    `text` is the text of these tokens, None without a tokenizer. `source` is the recipe's label of the input,
    `record` the index of the record in `file`, from 0; `metadata` is JSON. `document_start` is the number of
    the document's tokens before this piece, `copies` is 1 + the number of its removed duplicates. `steps` are
    the steps of the given run that deliver the row; None without a run or a batch size.
    """

    row: int
    start: int
    end: int
    text: str | None
    source: str
    file: str
    record: int
    id: str | None
    url: str | None
    metadata: str | None
    document_id: str
    document_start: int
    copies: int
    steps: tuple[int, ...] | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of the document in this row."""
        return self.end - self.start

    @classmethod
    def of(cls, row: int, facts: Mapping[str, Any], steps: tuple[int, ...] | None = None) -> Self:
        """Make a document from `facts`, a piece as described by `shardkit.datasets.provenance.answers`."""
        names = ("text", "source", "file", "record", "id", "url", "metadata", "document_id", "copies")
        start, end = facts["tokens"]
        stated = {name: facts[name] for name in names}
        return cls(row, start, end, **stated, document_start=facts["document_tokens"][0], steps=steps)

    def line(self) -> str:
        """Return one line with the document's origin and the beginning of its text."""
        place = f"{self.file} record {self.record:,}" if self.url is None else self.url
        parts = [counted(self.tokens, "token"), self.source, place]
        if self.steps:
            steps = ", ".join(f"{step:,}" for step in self.steps[:_SHOWN])
            parts.append(f"step {steps}")
        if self.text is not None:
            text = " ".join(self.text[: 4 * _EXCERPT].split())
            parts.append(f"{text[:_EXCERPT]}…" if len(self.text) > _EXCERPT else text)
        return printable(", ".join(parts))

    def __repr__(self) -> str:
        return f"<Document in row {self.row:,}: {self.line()}>"


class Question(TypedDict, total=False):
    """The keyword arguments of `shardkit.trace`."""

    row: SupportsIndex
    step: int
    url: _Words
    id: _Words
    document: _Words
    source: _Words
    file: _Words
    limit: int
    exclude: _Path | None
    export: _Path | None
    state: Mapping[str, object] | _Path | None
    batch_size: int | None
    world_size: int
    accumulate: int
    balance: Balance
    eos_id: int | None
    streams: Sequence[OpenDataset]
    without: Sequence[Exclusions]
    tokenizer: _Path | None


@dataclass(frozen=True, slots=True, repr=False)
class Trace(Described):
    """An answer of `shardkit.trace`: the first documents that were found, and totals over all of them.

    `facts` is the whole answer as plain data, as printed by `shardkit trace --json`.
    """

    question: str
    documents: list[Document]
    facts: Mapping[str, Any]

    def describe(self) -> tuple[str, Facts]:
        """Return the question as a title, and totals and the first documents as facts."""
        lines = []
        if "pieces" in self.facts:  # a search has totals, which include unlisted pieces
            totals = ("documents", "rows", "tokens", "duplicates")
            lines += [(name, f"{self.facts[name]:,}") for name in totals if self.facts[name]]
        if (excluded := self.facts.get("exclusions")) is not None:
            lines.append(("exclusion list", excluded["file"]))
        lines += [(f"row {each.row:,}", each.line()) for each in self.documents[:_SHOWN]]
        if rest := self.documents[_SHOWN:]:
            lines.append(("", f"and {len(rest):,} more"))
        return self.question, lines


def text_of(dataset: OpenDataset, row: SupportsIndex, *, tokenizer: _Path | None = None) -> str:
    """Implement `Dataset.text`. Raises ShardkitError without a tokenizer, ShardError if rows have no text."""
    number = _row(dataset, row)
    if token_column(dataset) is None:
        sample = dataset.row(number, [*_TEXT_COLUMNS, *(column.name for column in dataset.columns)])
        for name in _TEXT_COLUMNS:
            if isinstance(text := sample.get(name), str):
                return text
        problem = f"has neither tokens nor a text column ({' or '.join(_TEXT_COLUMNS)})"
        raise ShardError(dataset.location, f"{problem}; its columns: {', '.join(sample)}")
    decoder = _decoder(dataset, tokenizer)
    if decoder is None:
        raise ShardkitError(_no_tokenizer(dataset))
    [(_, tokens)] = read_rows(dataset, [number])
    if decoder.eos_id is not None:
        is_text = np.flatnonzero(tokens != decoder.eos_id)
        tokens = tokens[: is_text[-1] + 1] if len(is_text) else tokens[:0]
    return decoder.text(tokens)


def tokenizer_of(dataset: OpenDataset) -> tokenizers.Tokenizer:
    """Implement `Dataset.tokenizer`. Raises ShardkitError if the card's tokenizer is not found."""
    decoder = _decoder(dataset, None)
    if decoder is None:
        advice = 'copy it there, or load it by tokenizers.Tokenizer.from_file("tokenizer.json")'
        raise ShardkitError(f"{dataset.location}: {_made_with(dataset)}: {advice}")
    return decoder.tokenizer


def documents_of(
    dataset: OpenDataset, row: SupportsIndex, *, tokenizer: _Path | None = None
) -> list[Document]:
    """Implement `Dataset.documents`."""
    tracer = _tracer(dataset, tokenizer)
    tracer.check_rows()
    [answer] = tracer.rows([_row(dataset, row)])
    return [Document.of(answer["row"], facts) for facts in answer["documents"]]


def trace_of(dataset: OpenDataset, question: Question) -> Trace:
    """Answer the question that the arguments of `shardkit.trace` ask about a dataset."""
    kind, limit = _kind(question), question.get("limit", 20)
    tracer, run = _tracer(dataset, question.get("tokenizer")), _run(dataset, question)
    if kind == "search":
        answer = _search(tracer, run, question, limit)
    elif kind == "row":
        tracer.check_rows()
        answer = trace_rows(tracer, [_row(dataset, question["row"])], run)
    elif run is None:
        raise TypeError("a step depends on the run: give state=loader.state_dict() and batch_size")
    else:
        answer = trace_step(tracer, run, question["step"], limit=limit)
    asked = [f"{name}={value!r}" for name, value in question.items() if name in _KINDS]
    return Trace(f"{dataset.location}: {', '.join(asked)}", list(_documents(answer)), answer)


def _kind(question: Question) -> str:
    """Return the kind of question: search, row or step. Raises TypeError unless there is exactly one."""
    refuse_unknown("trace()", question, Question.__annotations__, TRACE, listed_by="shardkit.trace")
    kinds = sorted({_KINDS[name] for name in question if name in _KINDS})
    if len(kinds) != 1:
        which = f"{' and '.join(kinds)} are different questions" if kinds else "no question is given"
        raise TypeError(f"{which}: give one of {', '.join(_KINDS)}")
    return kinds[0]


def _run(dataset: OpenDataset, question: Question) -> Run | None:
    """Return the run that the question describes by `state`, or None."""
    if (state := question.get("state")) is None:
        return None
    return Run.from_state(
        LoaderState.from_dict(state)
        if isinstance(state, Mapping)
        else read_state(local_path(state, "state")),
        [dataset, *question.get("streams", ())],
        question.get("without", ()),
        batch_size=question.get("batch_size"),
        world_size=question.get("world_size", 1),
        accumulate=question.get("accumulate", 1),
        balance=question.get("balance"),
        ids=DocumentIds(question.get("eos_id")),
    )


def _search(tracer: Tracer, run: Run | None, question: Question, limit: int) -> dict[str, Any]:
    urls = _words(question.get("url", ()))
    selection = Selection(
        documents=[parse_document_id(text) for text in _words(question.get("document", ()))],
        urls=UrlPatterns(urls) if urls else None,
        ids=_words(question.get("id", ())),
        sources=source_numbers(tracer.dataset, _words(question.get("source", ()))),
        files=_words(question.get("file", ())),
    )
    export, exclude = question.get("export"), question.get("exclude")
    has_text = export is not None and tracer.decoder is not None
    return trace_search(
        tracer,
        selection,
        run,
        limit=limit,
        export=None if export is None else local_path(export, "export"),
        text=has_text,
        exclude=None if exclude is None else local_path(exclude, "exclude"),
    )


def _documents(answer: Mapping[str, Any]) -> Iterator[Document]:
    """Yield the documents that an answer lists."""
    for facts in answer.get("shown", ()):
        yield Document.of(facts["row"], facts, _steps(facts.get("runs")))
    for row in answer["rows"] if "shown" not in answer else ():
        steps = (answer["step"],) if "step" in answer else _steps(row["runs"])
        for facts in row["documents"] or ():
            yield Document.of(row["row"], facts, steps)


def _steps(runs: Sequence[Mapping[str, Any]] | None) -> tuple[int, ...] | None:
    """Return the steps that deliver a row, from the `runs` in an answer; None if they are not known."""
    seen = [each for stream in runs or () for each in stream["seen"]]
    steps = {each["step"] for each in seen if not each["is_dropped"]}
    return None if runs is None or None in steps else tuple(sorted(steps))


def _words(given: _Words) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _row(dataset: OpenDataset, row: SupportsIndex) -> int:
    """Return a row's number from 0; negative numbers count from the end."""
    number = operator.index(row)
    if not -len(dataset) <= number < len(dataset):
        raise IndexError(f"{dataset.location}: no row {number:,}; the dataset has {len(dataset):,}")
    return number % len(dataset)


class _WholeText(Decoder):
    """A decoder whose excerpts are not shortened: they are the whole texts."""

    def excerpt(self, tokens: Row, characters: int) -> str:
        return self.text(tokens)


def _decoder(dataset: OpenDataset, tokenizer: _Path | None) -> Decoder | None:
    """Return the decoder of a dataset, and cache it; None if the dataset's tokenizer is not found."""
    known = _decoders.get(dataset)
    if known is not None and (tokenizer is None or known.path == local_path(tokenizer, "tokenizer")):
        return known
    path = find_tokenizer(dataset) if tokenizer is None else local_path(tokenizer, "tokenizer")
    if path is not None:
        _decoders[dataset] = _WholeText(path, dataset.card)
    return None if path is None else _decoders[dataset]


def _tracer(dataset: OpenDataset, tokenizer: _Path | None) -> Tracer:
    return Tracer(dataset, None if token_column(dataset) is None else _decoder(dataset, tokenizer))


def _no_tokenizer(dataset: OpenDataset) -> str:
    return f"{dataset.location}: {_made_with(dataset)}: give tokenizer= with the path of its tokenizer.json"


def _made_with(dataset: OpenDataset) -> str:
    """Say why the tokenizer of a dataset is not known."""
    stated = None if dataset.card is None else dataset.card.tokenizer
    if stated is None or stated.file is None:
        return "has no record of its tokenizer"
    return f"its tokenizer {stated.file} (digest {stated.digest}) is not at the path in the recipe"
