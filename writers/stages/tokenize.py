"""Stage `tokenize`: encodes the remaining documents of a split, in the order of training.

Two small tasks belong to it. `tokenizer` runs with stage `clean`: it loads the tokenizer, so that a wrong
file or eos token fails at once, and chooses the engine to start with. `parity` runs with `tokenize` and
compares that engine with the reference on a sample of the documents; its result decides which engine is used.

A document's position in the training order, and the partition that packs it, depend only on hash(seed,
document id), or on the hash of its group (tokens/groups.py), and not on the task that reads it. A split
writes one run of the exchange: a row for each document (TOKENS), keyed by that hash, whose payload is its
token ids, ended by the eos id, and its strings. A partition is a range of hashes. `document_rows` and
`documents_of` convert between documents and rows. Removed duplicates, and the documents kept for them, go
into a separate run (dedup/duplicates.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import TypeAdapter

from shardkit.card import Histogram
from shardkit.errors import BuildError, RecipeError
from shardkit.formats.tokenizer_file import Engine
from shardkit.formats.trainers import trainer_dtype
from shardkit.hashing import digest_of, keyed_hashes
from shardkit.kernels.text_arrays import text_offsets
from shardkit.tokens.parity import Parity, check_parity, fast_engine, sample_bytes, sample_texts
from shardkit.tokens.tokenizer import (
    Encoder,
    EncodingError,
    Ranges,
    Tokens,
    tokenizer_digest,
    with_marks,
)
from shardkit.writers.dedup.duplicates import TwinsFile
from shardkit.writers.dedup.outcomes import Removed, SplitRemovals
from shardkit.writers.dedup.population import LanguageLabels
from shardkit.writers.exchange.exchange import RunWriter, Table
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS, Limits
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.code_version import code_version
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digest_cache import remembered
from shardkit.writers.execution.digests import MemoryBytes, RecipeKey, plain
from shardkit.writers.execution.progress import PULSE
from shardkit.writers.execution.stage import Stage, Task
from shardkit.writers.recipe.inputs import FimConfig, GroupConfig
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.rows.documents import DOCUMENTS_FILE, pack_strings, unpack_strings
from shardkit.writers.rows.ledger import Count, Ledger
from shardkit.writers.stages.flow import Documents
from shardkit.writers.stages.inputs import TokenizerFile
from shardkit.writers.stages.labels import Labels, marked_batches
from shardkit.writers.stages.languages import LanguageCounts
from shardkit.writers.stages.selection import Selection, remaining
from shardkit.writers.tokens.fim import encode_fim
from shardkit.writers.tokens.groups import encode_grouped, order_hashes
from shardkit.writers.tokens.source_order import FileUnits, Units, source_keys

_Masks = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]
"""The loss masks of all tokens of texts, and of the eos of each document."""
_Encode = Callable[[pa.RecordBatch], tuple[Tokens, npt.NDArray[np.int64]]]


_FIRST = 1 << 60  # a task weight above all others, so that the task is scheduled first

MAX_PARTITIONS = 1_000_000

PARITY_SPLITS = 256  # maximum number of splits whose documents are sampled

DOCUMENT_OVERHEAD_BYTES = 400  # memory of the packer per document, in addition to its tokens

_STRINGS = ("file", "id", "url", "metadata")

TOKENS = Table(
    "tokens.run",
    np.dtype(
        [
            ("key", "<u8"),  # hash(seed, document id)
            ("size", "<i8"),
            ("document_id", "u1", (16,)),
            ("tokens", "<i8"),  # number of tokens with eos; the payload begins with them
            ("record", "<i8"),
            ("copies", "<i4"),  # documents it represents, itself included
            ("source", "<i4"),
            *((name, "<i4") for name in _STRINGS),  # length of each in the payload, in bytes; -1: null
        ]
    ),
    payload=True,
    in_place=True,
)

SPILL_SCHEMA = pa.schema(
    [
        pa.field("hash", pa.uint64(), nullable=False),
        pa.field("document_id", pa.binary(16), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("copies", pa.int32(), nullable=False),
        pa.field("source", pa.int32(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("record", pa.int64(), nullable=False),
        pa.field("id", pa.string()),
        pa.field("url", pa.string()),
        pa.field("metadata", pa.string()),
    ]
)


@dataclass(slots=True)
class Tokenized:
    """The result of a split: its ledger, and its number of tokens, eos included.

    `lengths` is a histogram of tokens per document, eos included; `languages` are LanguageCounts as plain
    data. `trained` counts the tokens that the loss masks include in training, if the build has masks.
    `repeated` are the copies of documents beyond the first, and `repeated_tokens` their tokens: these are
    also in all counts of tokens, but not in the ledger.
    """

    ledger: Ledger
    tokens: int
    lengths: Histogram = field(default_factory=Histogram)
    languages: dict[str, dict[str, int]] | None = None
    trained: int = 0
    repeated: Count = field(default_factory=Count)
    repeated_tokens: int = 0


def choose_partitions(
    text_bytes: int, documents: int, memory_bytes: int, *, token_bytes: int = 4, shard_bytes: int = 0
) -> int:
    """Return the least number of partitions such that packing one fits `memory_bytes`, a worker's memory.

    Assumes half a token per byte of text (twice the rate of English), two shards (one is filled while another
    is written), and a reserve of a quarter. Depends only on input and recipe, so that the shards do, too.
    """
    needed = text_bytes * token_bytes // 2 + documents * DOCUMENT_OVERHEAD_BYTES
    for_partition = max(1, memory_bytes // 8, memory_bytes * 3 // 4 - 2 * shard_bytes)
    partitions = max(1, -(-needed // for_partition))
    if partitions > MAX_PARTITIONS:
        enough = -(-memory_bytes * partitions // MAX_PARTITIONS)
        raise RecipeError(
            f"memory: packing {text_bytes:,} bytes of text with {memory_bytes:,} bytes of memory takes "
            f"{partitions:,} tasks; at most {MAX_PARTITIONS:,} are possible: set `memory` to {enough:,} or "
            f"more"
        )
    return partitions


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """The result of task `tokenizer`: token ids, the engine to start with, and characters that it must not
    encode (`unlike`), since its tokens may differ there from those of the reference.
    """

    eos_id: int
    bos_id: int | None
    vocab_size: int
    dtype: str
    engine: Engine
    unlike: Ranges = ()
    separator_id: int | None = None


_FACTS = TypeAdapter(TokenizerFacts)


def tokenizer_task(recipe: Recipe, tokenizer: TokenizerFile) -> Task:
    """Return the task that loads the tokenizer early, so that a wrong file or token fails at once."""
    fims = [(f"inputs[{number}].fim", one.fim) for number, one in enumerate(recipe.inputs)]
    specials = [(key, token) for key, fim in fims if fim is not None for token in fim.tokens]
    group = recipe.group
    if group is not None:
        specials += [("group", token) for token in (group.begin, group.separator) if token is not None]
    separator = None if group is None else group.separator
    formats = sorted({one.output.format for one in recipe.datasets() if one.output.is_for_trainer})
    return TOKENIZER.task("tokenizer", _FIRST, tokenizer, tuple(specials), separator, tuple(formats))


def check_tokenizer(
    folder: Path,
    tokenizer: Annotated[TokenizerFile, RecipeKey()],
    specials: Sequence[tuple[str, str]] = (),
    separator: str | None = None,
    formats: Sequence[str] = (),
) -> TokenizerFacts:
    """Load the tokenizer with its own engine, and with the fast engine if that supports the file.

    `specials` are (recipe key, token) pairs of tokens that must be special tokens of the tokenizer. `formats`
    are formats of other trainers that must be able to store its ids.
    """
    digest = tokenizer_digest(tokenizer.file.local())  # of the current bytes: the cached facts depend on them
    key = digest_of([digest, plain([tokenizer, specials, separator]), code_version()])
    examined = partial(_examine, tokenizer, specials, separator)
    facts = _FACTS.validate_python(remembered(key, lambda: dict(_FACTS.dump_python(examined(), mode="json"))))
    for name in formats:
        try:
            trainer_dtype(name, facts.vocab_size)
        except ValueError as error:
            raise RecipeError(f"output.format: {error}") from error
    return facts


TOKENIZER = Stage("tokenizer", "read and filter", check_tokenizer)


def _examine(
    tokenizer: TokenizerFile, specials: Sequence[tuple[str, str]], separator: str | None
) -> TokenizerFacts:
    path, eos, bos, encoding = tokenizer.file.path, tokenizer.eos, tokenizer.bos, tokenizer.encoding
    encoder = Encoder(path, eos, bos=bos, encoding=encoding, engine=None)
    ids = {token: encoder.special_id(token, key) for key, token in specials}
    separator_id = None if separator is None else ids[separator]
    facts = encoder.eos_id, encoder.bos_id, encoder.vocab_size, encoder.dtype.name
    engine, unlike = fast_engine(encoder)  # to start with; the parity check decides
    return TokenizerFacts(*facts, engine, unlike, separator_id)


def parity_task(documents: Sequence[Commit], tokenizer: TokenizerFile, unlike: Ranges) -> Task:
    """Return the task that compares the fast engine with the reference, on up to `PARITY_SPLITS` splits."""
    size = sample_bytes(sum(commit.ledger().kept.bytes for commit in documents))
    count = min(len(documents), PARITY_SPLITS)
    documents = [documents[number * len(documents) // count] for number in range(count)]
    files = [commit.file(DOCUMENTS_FILE) for commit in documents]
    return PARITY.task("parity", _FIRST, files, replace(tokenizer, unlike=unlike), size)


def compare_engines(
    folder: Path,
    documents: Sequence[Artifact],
    tokenizer: Annotated[TokenizerFile, RecipeKey()],
    sample_bytes: int,
) -> Parity:
    """Run `check_parity` without its warning. The build issues it, even if this task was finished before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return check_parity(
            sample_texts([_texts_of(file) for file in documents], sample_bytes),
            tokenizer.file.local(),
            tokenizer.eos,
            tokenizer.unlike,
            bos=tokenizer.bos,
            encoding=tokenizer.encoding,
        )


PARITY = Stage("parity", "tokenize", compare_engines, cost=3)


def _texts_of(file: Artifact) -> Iterator[str]:
    with file.open_arrow() as source:
        column = pa.ipc.open_file(source).schema.get_field_index("text")
        reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=[column]))
        for batch in range(reader.num_record_batches):
            for text in reader.get_batch(batch).column(0):
                yield text.as_py()


def tasks(
    recipe: Recipe,
    documents: Documents,
    tokenizer: TokenizerFile,
    engine: Engine,
    unlike: Ranges,
    limits: Limits = DEFAULT_LIMITS,
    units: Units | None = None,
) -> list[Task]:
    """Return one task per split, which tokenizes its remaining documents for the dataset of `recipe`.

    Documents stay in the order of the inputs if their `units` are given.
    """
    tokenizer = replace(tokenizer, engine=engine, unlike=unlike)
    selection, made = Selection.of(recipe), []
    for number, split in enumerate(documents.splits):
        source = None if selection is None else recipe.sources[split.source]
        settings = TokenSettings(
            recipe.seed,
            recipe.inputs[split.source].fim,
            recipe.group,
            selection,
            source,
            recipe.repeat_of(split.source),
            None if units is None else (units.of_splits[number], units.count),
        )
        made.append(
            TOKENIZE.task(
                split.task_name,
                documents.files[number].ledger().kept.bytes,
                documents.file(number),
                documents.removals[number],
                tokenizer,
                settings,
                recipe.memory // 2,
                limits,
                documents.languages(number),
                documents.labels_of(number),
            )
        )
    return made


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """Settings of tokenizing a split, except the tokenizer; `source` is its input's label for `selection`.

    `repeat` is how often each document is written; of a fraction, some are written once more. `units` are
    those of the split's files, and their number in all, if documents stay in the order of the inputs.
    """

    seed: int
    fim: FimConfig | None = None
    group: GroupConfig | None = None
    selection: Annotated[Selection | None, RecipeKey("output")] = None
    source: str | None = None
    repeat: float = 1.0
    units: tuple[Mapping[str, FileUnits], int] | None = None


def tokenize_split(
    folder: Path,
    documents: Artifact,
    removed: SplitRemovals,
    tokenizer: Annotated[TokenizerFile, RecipeKey()],
    settings: Annotated[TokenSettings, RecipeKey()],
    memory_bytes: MemoryBytes,
    limits: Limits = DEFAULT_LIMITS,
    languages: LanguageLabels | None = None,
    labels: Labels = (),
) -> Tokenized:
    """Encode the documents of an Arrow file (DOCUMENT_SCHEMA) except removed ones; write them as a run.

    Documents without any token are dropped, with the reason "empty".
    """
    encoder, lost = tokenizer.encoder(), removed.load()
    found, selection = Tokenized(Ledger(), 0), settings.selection
    marks = 1 if encoder.bos_id is None else 2  # tokens per document in addition to its text: eos, bos
    encode = _encoding(encoder, settings)
    counts = None if languages is None else LanguageCounts(languages)
    with (
        documents.open_arrow() as source,
        RunWriter(folder / TOKENS.file, TOKENS, memory_bytes=memory_bytes, limits=limits) as run,
        TwinsFile(folder, memory_bytes=memory_bytes // 16, limits=limits) as twins,
    ):
        reader = pa.ipc.open_file(source)
        start = 0
        for batch in marked_batches(reader, labels):
            if counts is not None:
                batch = counts.beside(batch, start)
            part = lost.within(start, batch.num_rows)
            start += batch.num_rows
            others = None
            if selection is not None:
                assert settings.source is not None
                spoken = None if counts is None else counts.labels_of(batch)
                others = selection.others(batch, settings.source, spoken, part)
            kept, copies, ids, tokens, masks = _tokenize_batch(
                batch, part, encoder, found.ledger, twins, encode, others
            )
            if kept.num_rows:
                ended = with_marks(ids, tokens, encoder.bos_id, encoder.eos_id)
                mask = None if masks is None else _mask_of_marks(masks, tokens, encoder)
                _write_copies(run, (kept, copies, ended, tokens + marks, mask), settings, found, counts)
            PULSE.tell(found.ledger)
        for rows in lost.rows.values():
            if len(rows) and not 0 <= rows.min() <= rows.max() < start:
                raise BuildError(
                    f"{documents}: duplicate row {rows.max()} does not exist; the file has only {start} rows"
                )
    found.ledger.check(str(folder))
    found.languages = None if counts is None else counts.to_dict()
    return found


TOKENIZE = Stage("tokenize", "tokenize", tokenize_split, cost=25)


def _times(documents: pa.RecordBatch, settings: TokenSettings) -> npt.NDArray[np.int64]:
    """Return int64[n], how often each document is written."""
    whole, part = divmod(settings.repeat, 1)
    hashes = keyed_hashes(documents.column("document_id").to_pylist(), settings.seed, "repeat")
    return int(whole) + (hashes < np.uint64(int(part * (1 << 53)) << 11)).astype(np.int64)


def _encoding(encoder: Encoder, settings: TokenSettings) -> _Encode:
    """Return the function that encodes batches of documents that have no loss masks (column "marks")."""
    seed, fim, group = settings.seed, settings.fim, settings.group

    def plain(documents: pa.RecordBatch, heads: Sequence[str]) -> tuple[Tokens, npt.NDArray[np.int64]]:
        texts = documents.column("text")
        if any(heads):
            texts = pc.binary_join_element_wise(pa.array(heads, texts.type), texts, pa.scalar("", texts.type))
        return encoder.encode(texts)

    encode = plain if fim is None else partial(encode_fim, encoder, fim, seed)
    if group is not None:
        return partial(encode_grouped, encoder, group, seed, encode)
    return lambda documents: encode(documents, [""] * documents.num_rows)


_Encoded = tuple[
    pa.RecordBatch, npt.NDArray[np.int32], Tokens, npt.NDArray[np.int64], npt.NDArray[np.uint8] | None
]
"""Documents, their copy counts, the tokens of all of them, how many each has, and loss masks if there are."""


def _write_copies(
    run: RunWriter,
    encoded: _Encoded,
    settings: TokenSettings,
    found: Tokenized,
    counts: LanguageCounts | None,
) -> None:
    """Write documents as often as `settings.repeat` says, with a key for each copy; add to the counts."""
    documents, copies, tokens, lengths, mask = encoded
    times = _times(documents, settings) if settings.repeat > 1 else np.ones(len(lengths), np.int64)
    sizes = np.diff(text_offsets(documents.column("text")))
    for number in range(int(times.max())):
        purpose = f"shuffle-{number}" if number else "shuffle"
        if number:
            more = times > number
            of_tokens = np.repeat(more, lengths)
            documents, copies, sizes = documents.filter(pa.array(more)), copies[more], sizes[more]
            mask = None if mask is None else mask[of_tokens]
            tokens, lengths, times = tokens[of_tokens], lengths[more], times[more]
            found.repeated += Count(len(lengths), int(sizes.sum()))
            found.repeated_tokens += int(lengths.sum())
        if settings.units is None:
            hashes = order_hashes(documents, settings.group, settings.seed, purpose)
        else:
            hashes = source_keys(documents, *settings.units)
        run.write(*document_rows(documents, hashes, copies, tokens, lengths, mask))
        found.lengths.add(Histogram.of(lengths))
        found.tokens += len(tokens)
        found.trained += 0 if mask is None else int(mask.sum())
        if counts is not None:
            counts.count(documents, lengths, repeated=number > 0)


def count_tokens(batch: pa.RecordBatch, encoder: Encoder, settings: TokenSettings) -> npt.NDArray[np.int64]:
    """Return the number of tokens that `tokenize_split` makes of each document; 0 for one that it drops."""
    if "marks" in batch.schema.names:
        _, lengths, _, _ = encoder.encode_marked(batch.column("text"), batch.column("marks"))
    else:
        _, lengths = _encoding(encoder, settings)(batch)
    return np.where(lengths > 0, lengths + (1 if encoder.bos_id is None else 2), 0)


def _tokenize_batch(
    batch: pa.RecordBatch,
    removed: Removed,
    encoder: Encoder,
    ledger: Ledger,
    twins: TwinsFile,
    encode: _Encode,
    others: npt.NDArray[np.bool_] | None = None,
) -> tuple[pa.RecordBatch, npt.NDArray[np.int32], Tokens, npt.NDArray[np.int64], _Masks | None]:
    """Encode one batch and count its documents in the ledger.

    Returns the encoded documents, their copies, token ids and numbers of tokens, and, in builds with marks,
    their loss masks.
    """
    batch, copies = remaining(batch, removed, ledger, twins, others)
    sizes = np.diff(text_offsets(batch.column("text")))
    masks: _Masks | None = None
    try:
        if "marks" in batch.schema.names:
            texts, marks = batch.column("text"), batch.column("marks")
            ids, lengths, mask, last = encoder.encode_marked(texts, marks)
            masks = mask, last.astype(np.uint8)
        else:
            ids, lengths = encode(batch)
    except EncodingError as error:
        file, record = (batch.column(name)[error.row] for name in ("file", "record"))
        raise BuildError(f"{file}: record {record.as_py():,}: {error}") from error
    if (empty := lengths == 0).any():
        ledger.drop("empty", int(empty.sum()), int(sizes[empty].sum()))
        twins.remove(batch, "empty", np.flatnonzero(empty))
        batch, copies = batch.filter(pa.array(~empty)), copies[~empty]
        sizes, lengths = sizes[~empty], lengths[~empty]
        masks = None if masks is None else (masks[0], masks[1][~empty])
    ledger.kept += Count(batch.num_rows, int(sizes.sum()))
    return batch, copies, ids, lengths, masks


def _mask_of_marks(masks: _Masks, lengths: npt.NDArray[np.int64], encoder: Encoder) -> npt.NDArray[np.uint8]:
    """Return the loss masks of texts with entries inserted for each bos (never trained on) and each eos."""
    return with_marks(masks[0], lengths, None if encoder.bos_id is None else 0, masks[1])


def document_rows(
    documents: pa.RecordBatch,
    hashes: npt.NDArray[np.uint64],
    copies: npt.NDArray[np.int32],
    tokens: Tokens,
    lengths: npt.NDArray[np.int64],
    mask: npt.NDArray[np.uint8] | None = None,
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.uint8]]:
    """Return rows of TOKENS and their payloads; `tokens` has all documents, one after the other.

    In builds with marks, `mask`, one byte per token, follows a document's tokens in the payload.
    """
    width = tokens.itemsize
    rows = np.zeros(len(hashes), TOKENS.dtype)
    rows["key"], rows["copies"], rows["tokens"] = hashes, copies, lengths
    rows["document_id"] = np.frombuffer(
        b"".join(documents.column("document_id").to_pylist()), np.uint8
    ).reshape(-1, 16)
    rows["source"], rows["record"] = (documents.column(name).to_numpy() for name in ("source", "record"))
    first = [(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).view(np.uint8), lengths * width)]
    first += [] if mask is None else [(mask, lengths)]
    return rows, pack_strings(documents, _STRINGS, rows, first=first, align=width)


def documents_of(
    rows: npt.NDArray[np.void], payload: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], width: int
) -> pa.Table:
    """Return the table (SPILL_SCHEMA) of rows of TOKENS with payloads at `starts`.

    A token takes `width` bytes, including its mask if there are masks.
    """
    ids = np.ascontiguousarray(rows["document_id"]).reshape(-1)
    columns = {
        "hash": pa.array(rows["key"]),
        "document_id": pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(16), len(rows), [None, pa.py_buffer(ids)]
        ),
        **{name: pa.array(rows[name]) for name in ("tokens", "copies", "source", "record")},
    }
    columns |= unpack_strings(rows, payload, starts + rows["tokens"] * width, _STRINGS)
    return pa.table(columns, schema=SPILL_SCHEMA)
