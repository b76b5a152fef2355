"""Read rows of tokens and decode them with the dataset's tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.card import DatasetCard, TokenizerFacts
from shardkit.datasets.opened import OpenDataset
from shardkit.errors import MissingExtraError, ShardError, ShardkitError, warn_user
from shardkit.formats.tokenizer_file import Encoding, reason_of, tokenizer_config

Row = npt.NDArray[np.generic]

_TOKENS_A_CHARACTER = 4  # maximum number of tokens per character, reached by byte-level tokenizers

_ANY_LENGTH = tuple(f"ndarray:{dtype}" for dtype in ("uint8", "uint16", "uint32", "int32"))

MAX_ROWS_AT_ONCE = 256  # number of rows that are read from a remote dataset at a time


class Decoder:
    """Decodes token ids with a tokenizer file, using Hugging Face's `tokenizers`.

    Raises ShardkitError if the file cannot be read and MissingExtraError without that package. Warns if the
    file's digest is not the digest in the dataset's card: ids may then decode to other text.
    """

    def __init__(self, path: Path, card: DatasetCard | None = None) -> None:
        try:
            import tokenizers
        except ModuleNotFoundError as error:
            raise MissingExtraError("tokenizers", "write", "decoding text") from error
        self.path = path
        stated = TokenizerFacts() if card is None else card.tokenizer
        try:
            data = path.read_bytes()
            # A file of byte pairs and ranks needs the encoding from the recipe.
            recipe = {} if card is None else card.data.get("recipe", {})
            encoding = Encoding.of(recipe.get("tokenizer", {}).get("encoding"))
            config = tokenizer_config(path, data, encoding)
            self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(config))
            if self.tokenizer.decoder is None and b'"ByteLevel"' in data:
                self.tokenizer.decoder = tokenizers.decoders.ByteLevel()  # else bytes appear as letters
        except BaseException as error:  # a panic of `tokenizers` is not an Exception
            raise ShardkitError(f"{path}: cannot be read as a tokenizer: {reason_of(error)}") from error
        self.eos_id, self.bos_id = stated.eos_id, stated.bos_id
        if stated.digest not in (None, _digest(data)):
            warn_user(
                f"{path} is not the tokenizer of this dataset ({stated.file}, digest {stated.digest}): "
                "the text may be wrong"
            )

    def text(self, tokens: Row) -> str:
        """Decode tokens to text, leaving out an eos at their end and a bos at their beginning.

        A truncated character becomes U+FFFD.
        """
        ids = tokens.tolist()
        if ids and ids[-1] == self.eos_id:
            ids = ids[:-1]
        if ids and ids[0] == self.bos_id:
            ids = ids[1:]
        return self._decoded(ids)

    def piece(self, before: int | None, ids: list[int]) -> str:
        """Return the text of `ids` after the token `before`, on which it may depend; None: a row's start."""
        if before is None:
            return self._decoded(ids)
        return self._decoded([before, *ids])[len(self._decoded([before])) :]

    def encode(self, text: str) -> list[int]:
        """Encode a text to tokens. Raises ShardkitError if the tokenizer cannot encode it."""
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            raise ShardkitError(f"{self.path}: cannot encode this text: {reason_of(error)}") from error
        return ids

    def _decoded(self, ids: list[int]) -> str:
        try:
            return str(self.tokenizer.decode(ids, skip_special_tokens=False))
        except BaseException as error:
            raise ShardkitError(f"{self.path}: cannot decode these tokens: {reason_of(error)}") from error

    def excerpt(self, tokens: Row, characters: int) -> str:
        """Return the beginning of the tokens' text as one line of at most `characters` characters."""
        most = characters * _TOKENS_A_CHARACTER
        text = " ".join(self.text(tokens[:most]).strip("\ufffd").split())  # without truncated characters
        cut = len(text) > characters or len(tokens) > most
        return text[: max(0, characters - 1)].rstrip() + "…" if cut else text


def find_tokenizer(dataset: OpenDataset) -> Path | None:
    """Find the tokenizer file that the card names, and whose digest is that in the card.

    Searches its path, also relative to the dataset's folder and the two folders above it. Returns None if
    there is no such file.
    """
    stated = TokenizerFacts() if dataset.card is None else dataset.card.tokenizer
    if (named := stated.path) is None or stated.digest is None:
        return None
    places = [Path(named)]
    if dataset.shards is None:
        folder = dataset.path.absolute()
        places += [parent / named for parent in (folder, *folder.parents[:2])]
    for path in places:
        try:
            if path.is_file() and _digest(path.read_bytes()) == stated.digest:
                return path
        except OSError:
            continue
    return None


def token_column(dataset: OpenDataset) -> str | None:
    """Return the name of the column that holds tokens, of rows or of whole documents; None if none does."""
    if any(c.name == "tokens" and c.encoding in _ANY_LENGTH for c in dataset.columns):
        return "tokens"
    return dataset.token_column


def read_rows(dataset: OpenDataset, sample_ids: Iterable[int]) -> Iterator[tuple[int, Row]]:
    """Yield (row number, tokens) of rows, given by number, in ascending order.

    Remote rows are read by range if possible. In a token store, each document is a row. Raises ShardError if
    the dataset has no column of tokens.
    """
    column = token_column(dataset)
    if column is None:
        raise ShardError(dataset.location, "has no column of tokens")
    rows = sorted(set(sample_ids))
    starts = dataset.manifest.shard_starts
    for first in range(0, len(rows), MAX_ROWS_AT_ONCE):
        some = np.array(rows[first : first + MAX_ROWS_AT_ONCE], np.int64)
        shards = np.searchsorted(starts, some, side="right") - 1
        for shard in np.unique(shards).tolist():
            within = some[shards == shard] - starts[shard]
            for row, tokens in zip(within.tolist(), _rows(dataset, shard, within, column), strict=True):
                yield int(starts[shard]) + row, tokens


def _rows(dataset: OpenDataset, shard: int, rows: npt.NDArray[np.int64], column: str) -> Iterable[Row]:
    remote = dataset.shards
    if remote is not None and not remote.is_there(shard) and remote.rows.can_read(shard):
        assert dataset.token_dtype is not None
        return remote.rows.read({shard: rows})[shard].data.view(dataset.token_dtype)
    opened = dataset.shard(shard)
    fixed = opened.fixed_rows(column)
    if fixed is not None:
        return (fixed[row] for row in rows)
    return (np.asarray(opened.sample(row)[column]) for row in rows.tolist())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
