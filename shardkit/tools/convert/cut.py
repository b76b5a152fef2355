"""Turns documents of tokens into rows.

Documents that all have one length are copied. Other documents are joined and cut to rows of one length, or
each becomes a row. Every token is accounted for: tokens read + eos appended + padding = tokens written +
tokens dropped, which is checked at the end. A token id that does not fit the rows' dtype is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import ConservationError, ShardError
from shardkit.tools.convert.source import CutOptions, TokenBlock, TokenSource
from shardkit.tools.convert.write import RowWriter

Tokens = npt.NDArray[Any]


@dataclass(slots=True)
class TokenCounts:
    """Counts of tokens and documents; every token read is written or counted as dropped."""

    documents: int = 0
    tokens_read: int = 0
    eos_added: int = 0
    padding: int = 0
    tokens_dropped: int = 0
    documents_dropped: int = 0

    def check(self, cells: int) -> None:
        """Raise ConservationError unless the counts match `cells`, the tokens written including padding."""
        if self.tokens_read + self.eos_added + self.padding != cells + self.tokens_dropped:
            raise ConservationError(
                f"{cells:,} tokens were written, which does not match {self}; this is a bug in shardkit"
            )


def choose_dtype(source: TokenSource, cut: CutOptions) -> np.dtype[Any]:
    """Return the dtype of the rows: `cut.dtype`, else uint16 if all ids are known to fit, else uint32."""
    if cut.dtype is not None:
        return np.dtype(cut.dtype)
    largest = source.max_token if source.max_token is not None else np.iinfo(source.dtype).max
    largest = max([largest, *(token for token in (cut.eos, cut.pad) if token is not None)])
    return np.dtype(np.uint16 if largest <= np.iinfo(np.uint16).max else np.uint32)


def cut_rows(blocks: Iterable[TokenBlock], writer: RowWriter, cut: CutOptions, counts: TokenCounts) -> None:
    """Concatenate all documents and cut them into rows of `sequence_length` tokens."""
    last: int | None = None  # last token of the blocks so far; eos may have to follow it
    pending = False
    for block in blocks:
        _check_range(block, writer.dtype)
        tokens = block.tokens
        counts.tokens_read += len(tokens)
        counts.documents += len(block.ends)
        if cut.eos is not None:
            tokens = _with_eos(block, cut.eos, last if pending else None)
            counts.eos_added += len(tokens) - len(block.tokens)
            if len(block.tokens):
                last = int(block.tokens[-1])
                pending = not len(block.ends) or int(block.ends[-1]) < len(block.tokens)
        writer.append(tokens)
        if block.ends_file and cut.per_file:
            _end_stream(writer, cut, counts)
    _end_stream(writer, cut, counts)


def _end_stream(writer: RowWriter, cut: CutOptions, counts: TokenCounts) -> None:
    if cut.drop_tail:
        counts.tokens_dropped += writer.drop()
    else:
        assert cut.fill is not None
        counts.padding += writer.fill(cut.fill)


def _with_eos(block: TokenBlock, eos: int, before: int | None) -> Tokens:
    """Return the block's tokens with `eos` inserted after each nonempty document that does not end with it.

    `before` is the last token of the previous block if its document continues in this block, else None.
    """
    ends = block.ends
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    filled = ends > starts
    if len(ends) and before is not None and ends[0] == 0:
        filled[0] = True  # not an empty document: all its tokens were in the previous block
    lasts = np.full(len(ends), eos, np.int64)
    inside = ends > 0
    lasts[inside] = block.tokens[ends[inside] - 1]
    if len(ends) and ends[0] == 0 and before is not None:
        lasts[0] = before
    places = ends[filled & (lasts != eos)]
    if not len(places):
        return block.tokens
    wide = np.result_type(block.tokens.dtype, np.min_scalar_type(eos))
    return np.insert(block.tokens.astype(wide, copy=False), places, eos)


def equal_rows(
    blocks: Iterable[TokenBlock], dtype: np.dtype[Any], counts: TokenCounts
) -> Iterator[tuple[int, Tokens]]:
    """Yield (row length, tokens of a block); raises ShardError at the first document of another length."""
    length = carried = 0
    for block in blocks:
        _check_range(block, dtype)
        lengths = np.diff(block.ends, prepend=0)
        if len(lengths):
            lengths[0] += carried
            carried = len(block.tokens) - int(block.ends[-1])
            if not length:
                length = int(lengths[0])
                if not length:
                    raise ShardError(
                        block.file, "document 0 is empty: choose --sequence-length or --keep-lengths"
                    )
            if (other := lengths != length).any():
                number = int(other.argmax())
                raise ShardError(
                    block.file,
                    f"document {block.document + number:,} has {lengths[number]:,} tokens, but document 0 "
                    f"has {length:,}: choose --sequence-length to cut them, or --keep-lengths",
                )
        else:
            carried += len(block.tokens)
        if not length:
            raise ShardError(
                block.file,
                "document 0 does not end in the first block, so it is too long for a row: choose "
                "--sequence-length",
            )
        counts.tokens_read += len(block.tokens)
        counts.documents += len(block.ends)
        yield length, block.tokens
    if carried:
        raise ShardError(block.file, f"has {carried:,} tokens after its last document")


def documents(
    blocks: Iterable[TokenBlock],
    dtype: np.dtype[Any],
    cut: CutOptions,
    counts: TokenCounts,
) -> Iterator[tuple[str, Tokens]]:
    """Yield (location for messages, tokens) of each document, as `dtype` and with `cut.eos` appended."""
    held: list[Tokens] = []
    for block in blocks:
        _check_range(block, dtype)
        start = 0
        counts.tokens_read += len(block.tokens)
        for number, end in enumerate(block.ends.tolist()):
            held.append(block.tokens[start:end])
            tokens = held[0] if len(held) == 1 else np.concatenate(held)
            held, start = [], end
            where = f"{block.file}: document {block.document + number:,}"
            counts.documents += 1
            if not len(tokens):
                if not cut.drop_empty:
                    raise ShardError(where, "is empty, but rows must not be: use --drop-empty to drop it")
                counts.documents_dropped += 1
                continue
            tokens = tokens.astype(dtype)
            if cut.eos is not None and tokens[-1] != cut.eos:
                tokens = np.append(tokens, dtype.type(cut.eos))
                counts.eos_added += 1
            yield where, tokens
        if start < len(block.tokens):
            held.append(block.tokens[start:].copy())
    if held:
        raise ShardError(block.file, f"has {sum(map(len, held)):,} tokens after its last document")


def _check_range(block: TokenBlock, dtype: np.dtype[Any]) -> None:
    """Raise ShardError, which names the document and the token, if a token id does not fit `dtype`."""
    tokens, given = block.tokens, block.tokens.dtype
    limits = np.iinfo(dtype)
    if not len(tokens) or (np.iinfo(given).min >= 0 and np.iinfo(given).max <= limits.max):
        return
    if int(tokens.max()) <= limits.max and int(tokens.min()) >= 0:
        return
    at = int(((tokens > limits.max) | (tokens < 0)).argmax())
    document = int(np.searchsorted(block.ends, at, side="right"))
    start = int(block.ends[document - 1]) if document else -block.token
    token = f"document {block.document + document:,}, token {at - start:,}"
    problem = "is not a token id" if tokens[at] < 0 else f"does not fit {dtype.name}"
    advice = "; use --dtype uint32" if 0 <= tokens[at] < 1 << 32 else ""
    raise ShardError(block.file, f"{token}: {tokens[at]:,} {problem}{advice}")
