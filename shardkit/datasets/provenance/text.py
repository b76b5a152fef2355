"""What the tokens of rows say, by the tokenizer that the dataset was made with."""

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

_TOKENS_A_CHARACTER = 4  # at most, of byte-level tokenizers

_ANY_LENGTH = ("ndarray:uint16", "ndarray:uint32")

MAX_ROWS_AT_ONCE = 256  # of a remote dataset, read singly


class Decoder:
    """Decodes token ids by a tokenizer file, with Hugging Face's `tokenizers`.

    ShardkitError if it cannot be read; MissingExtraError without that package. Warns if it is another file
    than the one that the dataset's card names by its digest: ids may then mean other text.
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
            # What the recipe says of a file of byte pairs and ranks.
            recipe = {} if card is None else card.data.get("recipe", {})
            encoding = Encoding.of(recipe.get("tokenizer", {}).get("encoding"))
            config = tokenizer_config(path, data, encoding)
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(config))
            if self._tokenizer.decoder is None and b'"ByteLevel"' in data:
                self._tokenizer.decoder = tokenizers.decoders.ByteLevel()  # else it shows bytes as letters
        except BaseException as error:  # of `tokenizers`, which raises plain ones
            raise ShardkitError(f"{path}: is no tokenizer that can be read: {reason_of(error)}") from error
        self.eos_id, self.bos_id = stated.eos_id, stated.bos_id
        if stated.digest not in (None, _digest(data)):
            warn_user(
                f"{path} is not the tokenizer of this dataset ({stated.file}, digest {stated.digest}): "
                "the text may be wrong"
            )

    def text(self, tokens: Row) -> str:
        """The text of tokens without the eos at their end and the bos at their beginning, if they have any.

        A cut character becomes U+FFFD.
        """
        ids = tokens.tolist()
        if ids and ids[-1] == self.eos_id:
            ids = ids[:-1]
        if ids and ids[0] == self.bos_id:
            ids = ids[1:]
        return self._decoded(ids)

    def piece(self, before: int | None, ids: list[int]) -> str:
        """The text of tokens where they stand, after the token `before` (None: at the start of a row)."""
        if before is None:
            return self._decoded(ids)
        return self._decoded([before, *ids])[len(self._decoded([before])) :]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; ShardkitError if the tokenizer cannot encode it."""
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            raise ShardkitError(f"{self.path}: cannot encode this text: {reason_of(error)}") from error
        return ids

    def _decoded(self, ids: list[int]) -> str:
        try:
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))
        except BaseException as error:
            raise ShardkitError(f"{self.path}: cannot decode these tokens: {reason_of(error)}") from error

    def excerpt(self, tokens: Row, characters: int) -> str:
        """The beginning of the text of tokens in one line, at most so many characters long."""
        most = characters * _TOKENS_A_CHARACTER
        text = " ".join(self.text(tokens[:most]).strip("\ufffd").split())  # without what cuts leave
        cut = len(text) > characters or len(tokens) > most
        return text[: max(0, characters - 1)].rstrip() + "…" if cut else text


def find_tokenizer(dataset: OpenDataset) -> Path | None:
    """The file that the card names, if it is still there and the same: as named, or beside the dataset."""
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
    """The column of tokens, of rows or of whole documents; None if there is none."""
    if any(c.name == "tokens" and c.encoding in _ANY_LENGTH for c in dataset.columns):
        return "tokens"
    return dataset.token_column


def read_rows(dataset: OpenDataset, sample_ids: Iterable[int]) -> Iterator[tuple[int, Row]]:
    """(row, its tokens) of rows by their numbers in dataset order; of remote datasets by ranges if possible.

    Rows of a token store are documents. ShardError if the dataset has no column of tokens.
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
