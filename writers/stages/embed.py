"""Stage `semantic_embed`: a vector per document, from a static model, from code of the user, or from files.

One task per split writes documents.npy (population.DOCUMENT) and vectors.npy, float16[n, dimensions], of the
documents that are left, in their order. Vectors have the length 1. A document without a vector (no known
token, no row in the files, or a vector of zeros) is left out: it is like no other. Files are sorted by ids
before (stages/vectors.py).

A static model has one vector per token; the vector of a document is the mean of those of its first tokens, as
in model2vec. Its file holds the tensor `embeddings`, float[vectors, dimensions], and in newer versions
`mapping`, the row of each token in it, and `weights`, by which each token's vector is multiplied. Tokens that
the tokenizer does not know are left out.

If the tokenizer treats each word by itself, as BERT's do, distinct words are tokenized once per process
(kernels/token_means.py); for others, `tokenizers` encodes each text. Both give the same vectors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.errors import BuildError, RecipeError
from shardkit.files import FileVersion
from shardkit.formats.tokenizer_file import tokenizer_config
from shardkit.kernels.numba_support import Float32s, Int64s
from shardkit.kernels.text_arrays import text_bytes, text_offsets
from shardkit.tokens.engines import HuggingFace
from shardkit.writers.dedup.config import EmbedConfig
from shardkit.writers.dedup.outcomes import SplitRemovals
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE
from shardkit.writers.dedup.semantic import TITLE, VECTORS_FILE
from shardkit.writers.dedup.tables import RowsWriter
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.digests import DecidesNoByte, RecipeKey
from shardkit.writers.execution.stage import Stage
from shardkit.writers.filters.base import version_of
from shardkit.writers.filters.user_code import UserCode
from shardkit.writers.kernels.token_means import Words, add_rows, add_tokens, byte_classes, insert_words
from shardkit.writers.rows.documents import DOCUMENT_SCHEMA, content_ranks, text_digests
from shardkit.writers.stages.id_tables import id_text
from shardkit.writers.stages.vectors import KEY, MOST_DIMENSIONS, JoinedVectors, unit_vectors

_MOST_WORDS, _WORD_BYTES = 1 << 21, 64 << 20  # a table of words that exceeds one of these is made anew
_NOTED = 1 << 14  # unknown words that a call of the kernel notes
_MATRICES = ("embeddings", "embedding.weight")  # names in files of model2vec and of sentence-transformers
_KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I8": "i1", "U8": "u1", "I32": "<i4", "I64": "<i8"}

Embedder = Callable[[pa.LargeStringArray], npt.NDArray[np.float32]]
"""Returns the vectors of n texts, float32[n, dimensions], of any length."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """The documents of a split that have a vector, and how many have none (`without`).

    `dimensions` is 0 if the split has no documents. `lacking` is the id of the first that files lack.
    """

    documents: int
    without: int
    dimensions: int
    lacking: str | None = None


def embed_split(
    folder: Path,
    documents: Artifact,
    removed: SplitRemovals,
    embed: Annotated[EmbedConfig, RecipeKey(KEY)],
    files: Mapping[str, str],
    file_folder: Annotated[Artifact, DecidesNoByte("where the files are; `files` has their digests")],
    joined: JoinedVectors | None = None,
) -> Embedded:
    """Write the rows and vectors of a split's documents that are not in `removed` into `folder`.

    `joined` has the vectors, if they come from files.
    """
    for name in files:
        if not Path(name).is_absolute():
            (file_folder / name).local()
    gone = removed.load()
    vectors_of: Joined | Computed
    vectors_of = Computed(embed, file_folder.path) if joined is None else Joined(embed, joined)
    start = without = dimensions = 0
    lacking: str | None = None
    with ExitStack() as stack:
        source = stack.enter_context(documents.open_arrow())
        table = stack.enter_context(RowsWriter(folder / DOCUMENTS_FILE, DOCUMENT))
        written: RowsWriter | None = None
        names = *DOCUMENT_SCHEMA.names[:5], *vectors_of.columns
        fields = sorted({DOCUMENT_SCHEMA.get_field_index(name) for name in names})
        reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=fields))
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            here = gone.within(start, batch.num_rows)
            rows = np.flatnonzero(here.left(batch.num_rows))
            copies = here.copies_of(batch.num_rows)
            left = batch.take(pa.array(rows)) if len(rows) < batch.num_rows else batch
            if len(rows):
                unit = vectors_of(left)
                has = unit.any(axis=1)
                some = np.flatnonzero(has)
                if written is None:
                    dimensions = unit.shape[1]
                    written = stack.enter_context(RowsWriter(folder / VECTORS_FILE, "<f2", width=dimensions))
                elif unit.shape[1] != dimensions:
                    raise _wrong(
                        embed, left, 0, f"has {unit.shape[1]:,} dimensions, others have {dimensions:,}"
                    )
                described = _describe(left, rows + start, copies[rows])
                written.write(unit[some])
                table.write(described[some])
                without += len(rows) - len(some)
                if joined is not None and lacking is None and len(some) < len(rows):
                    lacking = id_text(left.column(embed.document)[int(has.argmin())].as_py())
            start += batch.num_rows
        if written is None:
            stack.enter_context(RowsWriter(folder / VECTORS_FILE, "<f2", width=0))
    return Embedded(table.rows, without, dimensions, lacking)


EMBED = Stage("semantic_embed", TITLE, embed_split, cost=100)


def _describe(
    left: pa.RecordBatch, rows: npt.NDArray[np.int64], copies: npt.NDArray[np.int32]
) -> npt.NDArray[np.void]:
    texts = left.column("text")
    described = np.empty(left.num_rows, DOCUMENT)
    described["id"] = content_ranks(text_digests(texts), left.column("document_id"))
    described["row"], described["copies"] = rows, copies
    described["bytes"] = np.diff(text_offsets(texts))
    described["source"] = left.column("source").to_numpy()
    return described


class Computed:
    """Makes vectors from the texts of documents, by a model or the user's code."""

    columns: Sequence[str] = ()

    def __init__(self, embed: EmbedConfig, folder: Path) -> None:
        self._embed, self._embedder = embed, open_embedder(embed, folder)

    def __call__(self, documents: pa.RecordBatch) -> npt.NDArray[np.float16]:
        """Return the vectors of documents, float16[n, dimensions], of length 1 or zeros.

        Raises BuildError for a vector with a value that is not a finite number.
        """
        vectors = self._embedder(documents.column("text"))
        bad = ~np.isfinite(vectors).all(axis=1)
        if bad.any():
            row = int(bad.argmax())
            wrong = vectors[row][~np.isfinite(vectors[row])][0]
            problem = f"has the value {wrong}; vectors must be finite numbers"
            raise _wrong(self._embed, documents, row, problem)
        return unit_vectors(vectors)


class Joined:
    """Looks up the vectors of documents by their ids; `columns` has the column with the ids."""

    def __init__(self, embed: EmbedConfig, joined: JoinedVectors) -> None:
        self.columns: Sequence[str] = (embed.document,)
        self._lookup = joined.open()

    def __call__(self, documents: pa.RecordBatch) -> npt.NDArray[np.float16]:
        """Return the vectors of documents, float16[n, dimensions], of length 1 or zeros."""
        found = self._lookup(documents.column(self.columns[0]).to_pylist())
        return np.nan_to_num(found, copy=False, nan=0.0)


def _wrong(embed: EmbedConfig, left: pa.RecordBatch, row: int, problem: str) -> BuildError:
    file, record = left.column("file")[row].as_py(), left.column("record")[row].as_py()
    return BuildError(f"{KEY}: {embed.origin}: {file}, record {record}: its vector {problem}")


def open_embedder(embed: EmbedConfig, folder: Path) -> Embedder:
    """Load the model or the user's code, which the process caches; `folder` is the base of relative paths.

    Raises RecipeError if it cannot be loaded.
    """
    if (code := embed.code) is not None:
        return UserEmbedder(code, folder)
    assert embed.model is not None
    assert embed.tokenizer is not None
    model, tokenizer = folder / embed.model, folder / embed.tokenizer
    versions = version_of(model, f"{KEY}.model"), version_of(tokenizer, f"{KEY}.tokenizer")
    return _static_model(model, tokenizer, embed.max_tokens, versions)


@lru_cache(maxsize=2)
def _static_model(
    model: Path, tokenizer: Path, max_tokens: int, versions: tuple[FileVersion, FileVersion]
) -> StaticModel:
    return StaticModel(model, tokenizer, max_tokens)


class UserEmbedder:
    """Calls the user's function with lists of texts."""

    def __init__(self, code: UserCode, folder: Path) -> None:
        self._name, self._function = f"{KEY}: {code.function}", code.make(KEY, folder)

    def __call__(self, texts: pa.LargeStringArray) -> npt.NDArray[np.float32]:
        """Return the vectors of the texts. Raises BuildError if the code fails or returns anything else."""
        try:
            answer: Any = self._function(texts.to_pylist())
        except Exception as error:  # the user's code may raise anything
            raise BuildError(f"{self._name}: {type(error).__name__}: {error}") from error
        try:
            with np.errstate(over="ignore"):  # `_units` refuses what became infinite
                vectors = np.ascontiguousarray(answer, np.float32)
        except (TypeError, ValueError) as error:
            raise BuildError(f"{self._name}: the function did not return vectors: {error}") from None
        if vectors.ndim != 2 or len(vectors) != len(texts) or not 0 < vectors.shape[1] <= MOST_DIMENSIONS:
            raise BuildError(
                f"{self._name}: the function returned an array of shape {vectors.shape} for {len(texts)} "
                f"texts; it must return one vector for each, of at most {MOST_DIMENSIONS:,} dimensions"
            )
        return vectors


class StaticModel:
    """The mean of token vectors. Raises RecipeError if the files are damaged or do not fit together."""

    def __init__(self, model: Path, tokenizer: Path, max_tokens: int) -> None:
        config = tokenizer_config(tokenizer, _read(tokenizer, f"{KEY}.tokenizer"))
        self._most = max_tokens
        self._engine = HuggingFace(tokenizer, config, frozenset())
        self._matrix = read_token_vectors(model)
        ids = self._engine.vocabulary()
        self._unknown = ids.get(str(_unknown_token(config["model"])), -1)
        if max(ids.values(), default=0) >= len(self._matrix):
            raise RecipeError(
                f"{KEY}: {model} has vectors for {len(self._matrix):,} tokens, but {tokenizer} has the id "
                f"{max(ids.values()):,}; give the tokenizer that belongs to the model"
            )
        self._words = WordTable() if _is_by_word(config) else None

    def __call__(self, texts: pa.LargeStringArray) -> npt.NDArray[np.float32]:
        """Return the sums of the vectors of each text's first tokens."""
        sums = np.zeros((len(texts), self._matrix.shape[1]), np.float32)
        if self._words is not None:
            self._words.add(texts, self._encode, self._matrix, self._most, sums)
            return sums
        ids, lengths = self._engine(texts)
        offsets = np.append(0, np.cumsum(lengths))
        known = ids != self._unknown
        kept = np.append(0, np.cumsum(known))[offsets]
        add_rows(ids[known].astype(np.int32), kept, self._matrix, self._most, sums)
        return sums

    def _encode(self, words: Sequence[bytes]) -> tuple[npt.NDArray[np.int32], Int64s]:
        """Return the known tokens of each word, and the number of each word's, by one call for all words."""
        texts = [word.decode() for word in words]
        encoded = self._engine.tokenizer.encode(" ".join(texts), add_special_tokens=False)
        ids = np.array(encoded.ids, np.int32)
        starts = np.array(encoded.offsets, np.int64).reshape(-1, 2)[:, 0]
        ends = np.cumsum([len(text) + 1 for text in texts])
        known = ids != self._unknown
        owners = np.searchsorted(ends, starts[known], side="right")
        return ids[known], np.bincount(owners, minlength=len(words))


def _is_by_word(config: Mapping[str, Any]) -> bool:
    """Whether the tokens of a text are those of its words: those of BERT's tokenizers are."""
    normalizer = config.get("normalizer") or {"type": "Lowercase"}
    return (
        (config.get("pre_tokenizer") or {}).get("type") == "BertPreTokenizer"
        and normalizer.get("type") in ("BertNormalizer", "Lowercase")
        and all(token.get("special") for token in config.get("added_tokens") or ())
    )


def _unknown_token(model: Mapping[str, Any]) -> object:
    """Return the text of the token for unknown words in the `model` of a tokenizer.json; None without one."""
    if model.get("unk_token") is not None:
        return model["unk_token"]
    number, pieces = model.get("unk_id"), model.get("vocab")
    return pieces[number][0] if isinstance(number, int) and isinstance(pieces, list) else None


class WordTable:
    """The words that were met, with their tokens; `Words` describes it."""

    def __init__(self) -> None:
        self._classes = byte_classes()
        self._clear()

    def _clear(self) -> None:
        self._count = self._data_bytes = self._tokens = 0
        room = 1 << 14
        self._table = Words(
            slots=np.full(4 * room, -1, np.int64),
            hashes=np.zeros(room, np.uint64),
            starts=np.zeros(room, np.int64),
            stops=np.zeros(room, np.int64),
            token_starts=np.zeros(room, np.int64),
            token_stops=np.zeros(room, np.int64),
            data=np.zeros(16 * room, np.uint8),
            tokens=np.zeros(4 * room, np.int32),
        )

    def add(
        self,
        texts: pa.LargeStringArray,
        encode: Callable[[Sequence[bytes]], tuple[npt.NDArray[np.int32], Int64s]],
        matrix: Float32s,
        most: int,
        sums: Float32s,
    ) -> None:
        """Set `sums`, which are 0, to the sums of the vectors of the first `most` tokens of each text."""
        if self._count > _MOST_WORDS or self._data_bytes > _WORD_BYTES:
            self._clear()
        data, edges, rows = text_bytes(texts), text_offsets(texts), np.arange(len(texts))
        done, unknown = np.zeros((len(texts), 2), np.int64), np.zeros((_NOTED, 2), np.int64)
        done[:, 0], found = edges[:-1], np.zeros(most, np.int32)
        while len(rows):
            noted, taken = add_tokens(
                data, edges, rows, self._classes, self._table, matrix, most, sums, done, unknown, found
            )
            starts, stops = unknown[:noted, 0].tolist(), unknown[:noted, 1].tolist()
            words = list(dict.fromkeys(data[a:b].tobytes() for a, b in zip(starts, stops, strict=True)))
            if words:
                self._insert(words, *encode(words))
            left = rows[:taken]
            left = left[(done[left, 0] < edges[left + 1]) & (done[left, 1] < most)]
            rows = np.concatenate([left, rows[taken:]])

    def _insert(self, words: Sequence[bytes], tokens: npt.NDArray[np.int32], lengths: Int64s) -> None:
        joined = np.frombuffer(b"".join(words), np.uint8)
        first, stop = self._count, self._count + len(words)
        self._grow(stop, self._data_bytes + len(joined), self._tokens + len(tokens))
        table = self._table
        ends = self._data_bytes + np.cumsum([len(word) for word in words])
        table.stops[first:stop] = ends
        table.starts[first:stop] = np.append(self._data_bytes, ends[:-1])
        token_ends = self._tokens + np.cumsum(lengths)
        table.token_stops[first:stop] = token_ends
        table.token_starts[first:stop] = np.append(self._tokens, token_ends[:-1])
        table.data[self._data_bytes : self._data_bytes + len(joined)] = joined
        table.tokens[self._tokens : self._tokens + len(tokens)] = tokens
        insert_words(table, first, stop)
        self._count, self._data_bytes = stop, self._data_bytes + len(joined)
        self._tokens += len(tokens)

    def _grow(self, words: int, data_bytes: int, tokens: int) -> None:
        """Make room for these totals; each array at least doubles if it grows."""
        table, slots = self._table, self._table.slots
        if 2 * words > len(slots):
            slots = np.full(1 << (4 * words - 1).bit_length(), -1, np.int64)
        self._table = Words(
            slots=slots,
            hashes=_roomy(table.hashes, words),
            starts=_roomy(table.starts, words),
            stops=_roomy(table.stops, words),
            token_starts=_roomy(table.token_starts, words),
            token_stops=_roomy(table.token_stops, words),
            data=_roomy(table.data, data_bytes),
            tokens=_roomy(table.tokens, tokens),
        )
        if slots is not table.slots:
            insert_words(self._table, 0, self._count)


def _roomy(array: npt.NDArray[Any], wanted: int) -> npt.NDArray[Any]:
    if wanted <= len(array):
        return array
    larger = np.zeros(max(wanted, 2 * len(array)), array.dtype)
    larger[: len(array)] = array
    return larger


def read_token_vectors(path: Path) -> Float32s:
    """Return the vector of each token id, float32[ids, dimensions], from a safetensors file.

    Raises RecipeError if it is not one, or has no vectors.
    """
    tensors = _read_safetensors(path)
    name = next((one for one in _MATRICES if one in tensors), None)
    if name is None or tensors[name].ndim != 2 or not 0 < tensors[name].shape[1] <= MOST_DIMENSIONS:
        known = ", ".join(f"{key} {list(value.shape)}" for key, value in tensors.items()) or "none"
        raise RecipeError(
            f"{KEY}.model: {path} has no tensor `embeddings` of shape [tokens, dimensions]; it has {known}"
        )
    matrix = tensors[name].astype(np.float32)
    mapping, weights = tensors.get("mapping"), tensors.get("weights")
    if mapping is not None:
        rows = mapping.reshape(-1).astype(np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(matrix):
            raise RecipeError(f"{KEY}.model: {path}: `mapping` names rows that `{name}` does not have")
        matrix = matrix[rows]
    if weights is not None:
        if weights.size != len(matrix):
            raise RecipeError(
                f"{KEY}.model: {path} has {weights.size:,} `weights` for {len(matrix):,} tokens"
            )
        matrix = matrix * weights.reshape(-1, 1).astype(np.float32)
    if not np.isfinite(matrix).all():
        raise RecipeError(f"{KEY}.model: {path}: some token vectors are not finite numbers")
    return np.ascontiguousarray(matrix)


def _read_safetensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a safetensors file by name: a header in JSON, then their bytes."""
    data = _read(path, f"{KEY}.model")
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
        body = memoryview(data)[8 + size :]
        found = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            (start, stop), shape = entry["data_offsets"], tuple(entry["shape"])
            if entry["dtype"] not in _KINDS:
                raise ValueError(f"{name} has the type {entry['dtype']}; known: {', '.join(_KINDS)}")
            if not 0 <= start <= stop <= len(body):
                raise ValueError(f"{name} is beyond the end of the file")
            found[name] = np.frombuffer(body[start:stop], _KINDS[entry["dtype"]]).reshape(shape)
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{KEY}.model: {path} is not a valid safetensors file: {error}") from None
    return found


def _read(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecipeError(f"{key}: {path}: {error.strerror or error}") from None
