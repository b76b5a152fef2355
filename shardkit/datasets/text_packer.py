"""Make rows of tokens from the stored bytes of a shard of texts.

    texts or conversations -> token ids, each document with its eos -> places in rows -> rows of tokens

`TextPacker` says which rows a shard has. They depend on the bytes of the shard, the tokenizer and how
documents are packed, and on no other shard. Plain data: other processes load the tokenizer themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from os import PathLike, fspath
from pathlib import Path
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Bytes, Ints
from shardkit.datasets.row_files import FileRows
from shardkit.errors import ShardError
from shardkit.formats.tokenizer_file import Encoding, Engine, end_token, find_tokenizer
from shardkit.formats.tokens import pieces_of
from shardkit.limits import usable_cores
from shardkit.manifest import LOSS_MASK, TOKENS, Column
from shardkit.storage.threads import remake_after_fork

if TYPE_CHECKING:
    from shardkit.formats.rows import RowShard
    from shardkit.tokens.chat import ChatFormat
    from shardkit.tokens.packing import Placement
    from shardkit.tokens.tokenizer import Encoder, Tokens

NULL, EMPTY = 0, 1  # a row of the file without text, and with one of no tokens: neither is a document
Pack = Literal["best_fit", "concat"]
TokenizerChoice = str | PathLike[str] | Mapping[str, Any]

TOKENIZER_KEYS = ("path", "eos", "bos", "encoding", "chat_template", "chat_template_kwargs", "train_on")


class _Encoders:
    """Loaded tokenizers of this process, lent to one thread at a time: gigatoken's cannot be shared.

    Each takes memory, and a core while it encodes, so there are as many at a time as there are cores.
    """

    def __init__(self) -> None:
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        """Reset in a forked child: threads of its parent may have borrowed tokenizers."""
        self._free: dict[tuple[object, ...], list[Encoder]] = {}
        self._lent = BoundedSemaphore(usable_cores())

    @contextmanager
    def borrow(self, key: tuple[object, ...], load: Callable[[], Encoder]) -> Iterator[Encoder]:
        """Context manager that lends a tokenizer, loaded by `load` unless one of this key is free."""
        with self._lent:
            free = self._free.setdefault(key, [])
            try:
                encoder = free.pop()
            except IndexError:
                encoder = load()
            try:
                yield encoder
            finally:
                free.append(encoder)


_encoders = cache(_Encoders)


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer with the marks around each document, and the facts that `TextIndex` keeps of it."""

    path: Path
    digest: str
    eos: str
    bos: str | None = None
    encoding: Encoding | None = None
    chat: ChatFormat | None = None
    train_on: str = "assistant"
    engine: Engine | None = None
    unlike: tuple[tuple[int, int], ...] = ()
    eos_id: int = 0
    bos_id: int | None = None
    vocab_size: int = 0

    @classmethod
    def of(cls, choice: TokenizerChoice, *, has_chat: bool) -> TextTokenizer:
        """Return the tokenizer that a user chose. Raises RecipeError or ValueError if it cannot be used."""
        from shardkit.tokens.chat import ChatFormat
        from shardkit.tokens.tokenizer import tokenizer_digest

        given: dict[str, Any] = dict(choice) if isinstance(choice, Mapping) else {"path": fspath(choice)}
        if "path" not in given:
            raise ValueError(
                "tokenizer has no path: give the file tokenizer.json, its folder or a model's name"
            )
        path = find_tokenizer(Path(), fspath(given["path"])).absolute()
        digest = tokenizer_digest(path)
        if (eos := given.get("eos") or end_token(path)) is None:
            raise ValueError(
                f"{path} does not say which token ends documents: give tokenizer={{'path': …, 'eos': …}}"
            )
        chat = None
        if has_chat:
            template = given.get("chat_template")
            chat = ChatFormat.of(
                path,
                eos,
                bos=given.get("bos"),
                template=None if template is None else Path(template),
                variables=given.get("chat_template_kwargs"),
            )
        encoding = Encoding.of(given.get("encoding")) or Encoding.named_by(path)
        train_on = given.get("train_on", "assistant")
        return cls(path, digest, eos, given.get("bos"), encoding, chat, train_on)

    @property
    def key(self) -> dict[str, object]:
        """Everything that decides the ids of a text, as plain data."""
        encoding = None if self.encoding is None else self.encoding.content
        chat = None if self.chat is None else [self.chat.content, self.train_on]
        return {
            "tokenizer": self.digest,
            "eos": self.eos,
            "bos": self.bos,
            "encoding": encoding,
            "chat": chat,
        }

    @property
    def dtype(self) -> np.dtype[Any]:
        """The stored type of ids, as in a build."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def encoder(self) -> AbstractContextManager[Encoder]:
        """Return a context manager that lends the loaded tokenizer to this thread."""
        key = self.path, self.digest, self.eos, self.bos, self.encoding, self.engine, self.unlike
        return _encoders().borrow(key, self._load)

    def _load(self) -> Encoder:
        from shardkit.tokens.tokenizer import Encoder

        assert self.engine is not None
        given, engine = (self.path, self.eos), self.engine
        encoder = Encoder(*given, bos=self.bos, encoding=self.encoding, engine=engine, unlike=self.unlike)
        if encoder.digest != self.digest:
            problem = "the tokenizer changed since the dataset was opened; open it again"
            raise ShardError(self.path, problem)
        return encoder

    def chosen(self, sample: Iterable[str]) -> TextTokenizer:
        """Return a copy with the engine to use, which is compared with the reference on a sample of texts."""
        from shardkit.tokens.parity import check_parity, fast_engine
        from shardkit.tokens.tokenizer import Encoder

        own = Encoder(self.path, self.eos, bos=self.bos, encoding=self.encoding, engine=None)
        engine, unlike = fast_engine(own)
        if engine == "gigatoken":
            parity = check_parity(sample, self.path, self.eos, unlike, bos=self.bos, encoding=self.encoding)
            engine = parity.engine
        ids = own.eos_id, own.bos_id, own.vocab_size
        return replace(self, engine=engine, unlike=unlike, eos_id=ids[0], bos_id=ids[1], vocab_size=ids[2])


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a shard: their ids with marks, one after the other.

    `masks` has one byte per token if the documents are conversations: 1 if it is trained on. `measured` has
    what the index keeps of each row of the file, uint32[n]: the tokens of its document, or `NULL`, `EMPTY`.
    """

    tokens: Tokens
    lengths: Ints
    masks: Bytes | None
    measured: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class TextPacker:
    """Makes rows of tokens from the stored bytes of shards."""

    rows: FileRows
    column: str
    tokenizer: TextTokenizer
    sequence_length: int
    pack: Pack

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the rows, in the order of their bytes."""
        length, dtype = self.sequence_length, self.tokenizer.dtype
        found = [Column(TOKENS, f"ndarray:{dtype.name}:{length}", length * dtype.itemsize)]
        if self.tokenizer.chat is not None:
            found.append(Column(LOSS_MASK, f"ndarray:uint8:{length}", length))
        return tuple(found)

    def unpack(self, number: int, stored: Bytes, where: str) -> Bytes:
        """Return the rows of shard `number`, uint8[rows * bytes of a row]. Raises ShardError."""
        from shardkit.tokens.packing import fill_rows

        documents = self.documents(number, stored, where)
        placement = self.place(documents.lengths)
        widths = [column.size or 0 for column in self.columns]
        out = np.empty((placement.rows, sum(widths)), np.uint8)
        starts = np.cumsum(documents.lengths) - documents.lengths
        sources = starts[placement.document] + placement.start
        filled: list[tuple[Any, int]] = [(documents.tokens, self.tokenizer.eos_id)]
        if documents.masks is not None:
            filled.append((documents.masks, 0))
        for (values, padding), (first, stop) in zip(filled, pairwise(np.cumsum([0, *widths])), strict=True):
            made = np.empty((placement.rows, self.sequence_length), values.dtype)
            fill_rows(values, sources, placement.length, placement.row, placement.column, made, padding)
            out[:, first:stop] = made.view(np.uint8).reshape(placement.rows, -1)
        return out.reshape(-1)

    def place(self, lengths: Ints) -> Placement:
        """Return the places of documents in rows, in the order of rows."""
        from shardkit.tokens.packing import pack_best_fit, pack_concat

        if self.pack == "concat":
            return pack_concat(lengths, self.sequence_length)
        return pack_best_fit(lengths, self.sequence_length)

    def count(self, measured: npt.NDArray[np.uint32]) -> int:
        """Return the number of rows of the documents of a shard."""
        return self.place(measured[measured > EMPTY].astype(np.int64)).rows

    def documents(self, number: int, stored: Bytes, where: str) -> Documents:
        """Tokenize the texts of a shard. Raises ShardError if one cannot be tokenized."""
        from shardkit.tokens.tokenizer import EncodingError, with_marks

        values = self.shard(number, stored, where).arrow(self.column)
        is_valid = values.is_valid()
        rows = np.flatnonzero(is_valid.to_numpy(zero_copy_only=False))
        texts = values.filter(is_valid) if values.null_count else values
        mask = last = None
        try:
            _check_utf8(values)
            if self.tokenizer.chat is not None:
                texts, marks = self._rendered(texts, rows)
            with self.tokenizer.encoder() as encoder:
                if self.tokenizer.chat is None:
                    ids, lengths = encoder.encode(texts)
                else:
                    ids, lengths, mask, last = encoder.encode_marked(texts, marks)
        except EncodingError as error:
            raise self._error(number, rows[error.row], where, str(error)) from error
        except _RecordError as error:
            raise self._error(number, error.row, where, error.problem) from error
        is_there = lengths > 0
        lengths, bos_id = lengths[is_there], self.tokenizer.bos_id
        if mask is not None and last is not None:
            end = last[is_there].astype(np.uint8)
            mask = with_marks(mask, lengths, None if bos_id is None else 0, end)
        ids = with_marks(ids, lengths, bos_id, self.tokenizer.eos_id)
        lengths += 1 if bos_id is None else 2
        measured = np.full(len(values), NULL, np.uint32)
        measured[rows] = EMPTY
        measured[rows[is_there]] = lengths
        return Documents(ids, lengths, mask, measured)

    def shard(self, number: int, stored: Bytes, where: str) -> RowShard:
        """Open the stored bytes of a shard of texts."""
        from shardkit.formats.rows import RowShard, split_pieces

        info, part = self.rows.manifest.shards[number], self.rows.parts[number]
        pieces = split_pieces(pieces_of(info.raw.basename), stored)
        return RowShard(where, info, part, pieces, decode=False)

    def _rendered(self, values: Any, rows: Ints) -> tuple[Any, Any]:
        """Return the texts of conversations and their marks, as Arrow arrays."""
        import pyarrow as pa

        from shardkit.tokens.chat import ChatError, render_chat, without_nulls

        assert self.tokenizer.chat is not None
        found = []
        for row, messages in zip(rows.tolist(), values.to_pylist(), strict=True):
            try:
                rendered = render_chat(
                    self.tokenizer.chat, without_nulls(messages), train_on=self.tokenizer.train_on
                )
            except ChatError as error:
                raise _RecordError(row, str(error)) from error
            found.append(rendered)
        texts = pa.array([one.text for one in found], pa.large_string())
        return texts, pa.array([one.marks for one in found], pa.binary())

    def _error(self, number: int, row: int, where: str, problem: str) -> ShardError:
        first = self.rows.parts[number].first_row
        return ShardError(where, f"row {first + int(row):,}: {problem}")


def _check_utf8(values: Any) -> None:
    """Raise _RecordError if a text is not UTF-8: readers of Parquet do not check, and encoders rely on it."""
    try:
        values.validate(full=True)
    except ValueError:
        for row, value in enumerate(values):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                found = f"byte {error.start:,} of the text is {error.object[error.start]:#04x}"
                raise _RecordError(
                    row, f"the text is not UTF-8: {found}; write it with another tool"
                ) from error
        raise


class _RecordError(Exception):
    """A text or conversation cannot be read or rendered."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(problem)
        self.row, self.problem = row, problem
