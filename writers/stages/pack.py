"""Stage `pack`: turns one partition of tokens into finished shards, their checksums and their provenance.

There is one task per partition; a new sequence length repeats this stage and no earlier one. The documents of
a partition are a range of the exchanged runs of all splits; sorted by (hash, document id) they are the same
list for any order or names of the splits. They are packed into rows, and the rows are shuffled by a second
key and divided evenly into shards of about `shard_bytes`: the same bytes on any machine.

Memory: the partition's tokens once, with the strings of its documents between them, its table of documents,
and one shard of rows. Shards are named `part-PPPPP.KKKKK` from 0 within the partition; publication
renames them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.card import Histogram
from shardkit.errors import BuildError, ConservationError
from shardkit.formats import mds, tar
from shardkit.formats.block_checksums import write_blocks
from shardkit.formats.tar.writer import KEY_DIGITS
from shardkit.formats.tokens import write_token_files
from shardkit.formats.trainers import MAX_FILE_TOKENS, stream_info, trainer_dtype
from shardkit.hashing import hash_file
from shardkit.manifest import LOSS_MASK, FileInfo, ShardInfo
from shardkit.order.permutation import Permutation
from shardkit.tokens.packing import (
    Placement,
    fill_rows,
    pack_best_fit,
    pack_best_fit_crop,
    pack_best_fit_truncate,
    pack_concat,
)
from shardkit.tokens.tokenizer import Tokens
from shardkit.writers.exchange.addresses import Addressed, Pieces, range_start
from shardkit.writers.exchange.exchange import Exchanged, Slice
from shardkit.writers.execution.digests import RecipeKey
from shardkit.writers.execution.stage import Stage, Task, partition_name
from shardkit.writers.kernels.repetitions import mask_repetitions
from shardkit.writers.recipe.outputs import OutputConfig, PackConfig
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.stages.provenance import PROVENANCE_NAME, write_provenance
from shardkit.writers.stages.tokenize import TokenizerFacts, documents_of
from shardkit.writers.tokens.groups import Groups, Joined, join_groups

TAR_KEY_STEP = 10**8  # a partition's keys begin at partition * TAR_KEY_STEP: unique in the dataset
_WIDE_KEY_DIGITS = 14  # digits of keys in datasets with too many partitions for KEY_DIGITS
_MAX_UNIT_BYTES = 2 << 30  # of the rows of a unit; MDS shards have less than 4 GiB
_TOKENS = "tokens"
_SUMS = ("documents", "rows", "tokens", "padding", "cut_documents", "needless_cuts", "pieces")
_OF_POLICIES = ("cropped", "cropped_documents", "repeated_bos", "repeated", "repeated_documents", "joined")
_Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Packed:
    """The result of one partition. `tokens` counts document tokens in rows, eos included, in `pieces` pieces;
    `cut_documents` are in more than one piece, and `needless_cuts` of them would have fitted into one row.
    `row_padding` and `row_pieces` are histograms of the padding tokens and the pieces per row. `trained`
    counts the tokens that the loss mask includes in training.

    With strategies that crop, `cropped` tokens of `cropped_documents` were left out; the loss mask includes
    `cropped_trained` of them. `repeated_bos` counts bos tokens added at row starts inside documents.
    `repeated` counts tokens of `repeated_documents`, cropped ones too, that are masked only because they
    repeat. `joined` counts header and eos tokens left out between documents of a group. A count is None if
    the settings do not use it.
    """

    shards: list[ShardInfo] = field(default_factory=list)
    documents: int = 0
    rows: int = 0
    tokens: int = 0
    padding: int = 0
    cut_documents: int = 0
    needless_cuts: int = 0
    pieces: int = 0
    row_padding: Histogram = field(default_factory=Histogram)
    row_pieces: Histogram = field(default_factory=Histogram)
    trained: int = 0
    cropped: int | None = None
    cropped_documents: int | None = None
    repeated_bos: int | None = None
    repeated: int | None = None
    repeated_documents: int | None = None
    joined: int | None = None
    cropped_trained: int = 0


def sums_of(parts: Sequence[Packed]) -> dict[str, int]:
    """Return the counts for the dataset card, summed over all partitions (at least one)."""
    names = (*_SUMS, *(name for name in _OF_POLICIES if getattr(parts[0], name) is not None))
    shards = sum(len(part.shards) for part in parts)
    return {"shards": shards} | {name: sum(getattr(part, name) for part in parts) for name in names}


@dataclass(frozen=True, slots=True)
class PackSettings:
    """Settings that turn the documents of a dataset into shards.

    `dtype` is that of the tokens as they were encoded. `key_digits` is the number of digits of tar keys. If
    `masked`, documents and rows have loss masks. Formats of other trainers use the dtype `file_dtype` and
    `tokenizer`, the name of the tokenizer in the recipe. If it `repeats` documents, their copies have hashes
    that do not follow from their ids alone.
    """

    pack: PackConfig
    output: OutputConfig
    seed: int
    eos_id: int
    dtype: str
    key_digits: int = KEY_DIGITS
    masked: bool = False
    bos_id: int | None = None
    file_dtype: str | None = None
    tokenizer: str | None = None
    repeats: bool = False

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        partitions: int,
        *,
        eos_id: int,
        dtype: str,
        vocab_size: int,
        bos_id: int | None = None,
    ) -> PackSettings:
        """Return the settings for the recipe of one dataset."""
        digits = tar_key_digits(partitions)
        settings = cls(
            *(recipe.pack, recipe.output, recipe.seed, eos_id, dtype, digits, recipe.is_masked, bos_id),
            repeats=recipe.repeats,
        )
        if not recipe.output.is_for_trainer:
            return settings
        assert recipe.tokenizer is not None
        kept = trainer_dtype(recipe.output.format, vocab_size).name
        return replace(settings, file_dtype=kept, tokenizer=recipe.tokenizer.path)


def tasks(
    recipe: Recipe,
    facts: TokenizerFacts,
    tokens: Exchanged | Addressed,
    partitions: int,
    *,
    consumed: bool = True,
) -> list[Task]:
    """Return one task per partition of the exchanged runs of stage `tokenize`, which may be `consumed`."""
    settings = PackSettings.of(
        recipe,
        partitions,
        eos_id=facts.eos_id,
        dtype=facts.dtype,
        vocab_size=facts.vocab_size,
        bos_id=facts.bos_id,
    )
    groups = None
    if recipe.group is not None:
        groups = Groups(recipe.group, facts.separator_id, facts.bos_id is not None)
    made = []
    for number in range(partitions):
        bounds = range_start(number, partitions), range_start(number + 1, partitions)
        mine = tokens.slice(*bounds, consumed=consumed)
        made.append(PACK.task(partition_name(number, partitions), 0, mine, number, settings, groups))
    return made


def tar_key_digits(partitions: int) -> int:
    """Return the number of digits of tar keys, which are unique in the dataset."""
    return KEY_DIGITS if partitions * TAR_KEY_STEP <= 10**KEY_DIGITS else _WIDE_KEY_DIGITS


def pack_partition(
    folder: Path,
    documents: Slice | Pieces,
    partition: int,
    settings: Annotated[PackSettings, RecipeKey()],
    groups: Groups | None = None,
) -> Packed:
    """Pack the documents of `partition`; write its shards and provenance into `folder`."""
    part = _read_partition(documents, np.dtype(settings.dtype), masked=settings.masked)
    if groups is not None:
        joined = join_groups(part.table, part.tokens, part.starts, part.lengths, groups)
        table = part.table.take(pa.array(joined.order))
        part = replace(part, starts=joined.starts, lengths=joined.lengths, table=table, joined=joined)
    return pack_documents(folder, part, partition, settings)


PACK = Stage("pack", "shuffle and pack", pack_partition, cost=14)


@dataclass(frozen=True, slots=True)
class Partition:
    """The documents of a partition, sorted by (hash, document id).

    Document i is `lengths[i]` tokens from `starts[i]` on in `tokens`, and row i of `table`. `masks` has one
    byte per token, for document i from `mask_starts[i]` on; None in builds without loss masks. `joined` are
    the texts joined from documents, if the recipe has groups.
    """

    tokens: Tokens
    starts: _Ints
    lengths: _Ints
    table: pa.Table
    masks: npt.NDArray[np.uint8] | None = None
    mask_starts: _Ints | None = None
    joined: Joined | None = None


def pack_documents(folder: Path, part: Partition, partition: int, settings: PackSettings) -> Packed:
    """Write the shards of a partition and their provenance, in the format of the output.

    Rows are packed and shuffled, and have block checksums. With `pack.row_bos`, those that start inside a
    document begin with `settings.bos_id`.
    """
    pack, output, seed = settings.pack, settings.output, settings.seed
    if output.format == "tokens":
        return store_documents(folder, part, partition, output, seed)
    if output.is_for_trainer:
        return write_streams(folder, part, partition, settings)
    repeated = None
    if pack.max_repetitions is not None:
        part, repeated = _without_repetitions(part, pack.max_repetitions)
    texts = part.lengths if part.joined is None else np.add.reduceat(part.lengths, part.joined.firsts)
    placement = _place(texts, pack)
    rows = np.arange(placement.rows)
    if pack.order == "shuffled":
        rows = Permutation(placement.rows, f"{seed}\0rows\0{partition}".encode())(rows)
    placement = placement.moved(rows)
    if part.joined is None:
        result = _count(placement, part.lengths, pack, repeated)
    else:
        needless = _count(placement, texts, pack, None).needless_cuts
        placement = placement.divided(part.lengths, part.joined.firsts)
        counted = _count(placement, part.lengths, pack, repeated)
        result = replace(counted, needless_cuts=needless, joined=part.joined.left_out)
    booked = result.tokens + (result.cropped or 0)
    if booked != int(part.lengths.sum()) or result.documents != part.table.num_rows:
        raise ConservationError(
            f"{folder}: partition {partition} has {int(part.lengths.sum()):,} tokens, but {booked:,} were "
            f"packed or cropped; this is a bug in shardkit, please report it"
        )
    row_bytes = _row_bytes(pack.sequence_length, part.tokens.dtype, output, part)
    starts = _shard_starts(placement.rows, row_bytes, output, pack.order)
    for number in range(len(starts) - 1):
        first, stop = int(starts[number]), int(starts[number + 1])
        columns = _columns_of_rows(part, placement, range(first, stop), settings.eos_id, settings.bos_id)
        if (masks := columns.get(LOSS_MASK)) is not None:
            result.trained += int(masks.sum())
        name = f"part-{partition:05d}.{number:05d}"
        keys = partition * TAR_KEY_STEP + first, settings.key_digits
        result.shards.append(_write_shard(folder, name, columns, output, keys))
    if output.compression is None:
        write_blocks(folder, result.shards)
    if part.masks is not None and pack.crops:
        result.cropped_trained = _trained_of(part) - result.trained
    has_hashes = part.joined is None and not settings.repeats and pack.order == "shuffled"
    hashed_with = seed if has_hashes else None
    write_provenance(folder / PROVENANCE_NAME, placement, starts, part.table, seed=hashed_with)
    return result


def _without_repetitions(part: Partition, most: int) -> tuple[Partition, _Ints]:
    """Set the loss masks of repeated tokens to 0; return the partition and the masked tokens per document."""
    if part.masks is None:
        masks = np.ones(int(part.lengths.sum()), np.uint8)
        part = replace(part, masks=masks, mask_starts=np.cumsum(part.lengths) - part.lengths)
    assert part.masks is not None
    assert part.mask_starts is not None
    tokens = part.tokens.view(_stored_type(part.tokens.dtype))
    found = mask_repetitions(tokens, part.starts, part.lengths, part.masks, part.mask_starts, most)
    return part, found


def _columns_of_rows(
    part: Partition, placement: Placement, rows: range, eos_id: int, bos_id: int | None
) -> dict[str, npt.NDArray[Any]]:
    """Return the columns (tokens, loss masks) of these rows, in the unsigned dtypes that shards store."""
    here = slice(*np.searchsorted(placement.row, (rows.start, rows.stop)).tolist())
    in_shard, column = placement.row[here] - rows.start, placement.column[here]
    length, start, document = placement.length[here], placement.start[here], placement.document[here]
    tokens = np.empty((len(rows), placement.sequence_length), part.tokens.dtype)
    fill_rows(part.tokens, part.starts[document] + start, length, in_shard, column, tokens, eos_id)
    if placement.row_bos:
        assert bos_id is not None
        further = start > 0
        tokens[in_shard[further], column[further] - 1] = bos_id
    columns: dict[str, npt.NDArray[Any]] = {_TOKENS: tokens.view(_stored_type(tokens.dtype))}
    if part.masks is not None:
        assert part.mask_starts is not None
        masks = columns[LOSS_MASK] = np.empty(tokens.shape, np.uint8)
        fill_rows(part.masks, part.mask_starts[document] + start, length, in_shard, column, masks, 0)
    return columns


def _stored_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.uint16 if dtype.itemsize == 2 else np.uint32)


def _place(lengths: _Ints, pack: PackConfig) -> Placement:
    """Place documents in rows by the recipe's strategy."""
    if pack.strategy == "concat":
        return pack_concat(lengths, pack.sequence_length, row_bos=pack.row_bos)
    if pack.strategy == "best_fit":
        return pack_best_fit(lengths, pack.sequence_length, row_bos=pack.row_bos)
    crop = pack_best_fit_crop if pack.strategy == "best_fit_crop" else pack_best_fit_truncate
    return crop(lengths, pack.sequence_length)


def _trained_of(part: Partition) -> int:
    """Count the tokens of all documents that the loss masks include in training."""
    assert part.masks is not None
    assert part.mask_starts is not None
    places = zip(part.mask_starts, part.lengths, strict=True)
    return sum(int(part.masks[start : start + length].sum()) for start, length in places)


def store_documents(folder: Path, part: Partition, partition: int, output: OutputConfig, seed: int) -> Packed:
    """Write whole documents in order, one per sample, to be packed later (writers/token_store.py)."""
    count = len(part.lengths)
    columns = {_TOKENS: (part.tokens.view(_stored_type(part.tokens.dtype)), part.starts)}
    if part.masks is not None:
        assert part.mask_starts is not None
        columns[LOSS_MASK] = part.masks, part.mask_starts
    sizes = mds.array_bytes(part.lengths, *(values.dtype for values, _ in columns.values()))
    starts = _cut_by_bytes(sizes, output.shard_bytes)
    shards = []
    for number in range(len(starts) - 1):
        rows = range(int(starts[number]), int(starts[number + 1]))
        samples = {
            name: [values[begins[row] : begins[row] + part.lengths[row]] for row in rows]
            for name, (values, begins) in columns.items()
        }
        shards.append(
            mds.write_arrays_shard(
                folder, f"part-{partition:05d}.{number:05d}.mds", samples, **_of_mds(output)
            )
        )
    order = np.arange(count, dtype=np.int64)
    zeros = np.zeros(count, np.int64)
    placement = Placement(0, count, order, zeros, part.lengths, order, zeros)
    write_provenance(folder / PROVENANCE_NAME, placement, starts, part.table, seed=seed)
    histograms = Histogram.of(zeros), Histogram.of(zeros + 1)
    tokens = int(part.lengths.sum())
    trained = 0 if part.masks is None else _trained_of(part)
    return Packed(shards, count, count, tokens, 0, 0, 0, count, *histograms, trained=trained)


def write_streams(folder: Path, part: Partition, partition: int, settings: PackSettings) -> Packed:
    """Write whole documents in order as files of another trainer's format (`TRAINER_FORMATS`).

    Each file is one row of the dataset, a stream of documents. Files end with a document and have about equal
    sizes, near `shard_bytes`.
    """
    output, dtype = settings.output, np.dtype(settings.file_dtype)
    ends = np.cumsum(part.lengths)
    total = int(part.lengths.sum())
    most = min(output.shard_bytes // dtype.itemsize, MAX_FILE_TOKENS // 2)  # a file may end a document later
    files = max(1, -(-total // most))
    near = np.array([total * number // files for number in range(1, files)], np.int64)
    edges = np.unique(np.concatenate([[0], np.searchsorted(ends, near) + 1, [len(ends)]]))
    shards = []
    for number in range(len(edges) - 1):
        here = slice(int(edges[number]), int(edges[number + 1]))
        lengths = part.lengths[here]
        ids = _joined(part.tokens.view(_stored_type(part.tokens.dtype)), part.starts[here], lengths)
        masks = None
        if part.masks is not None:
            assert part.mask_starts is not None
            masks = _joined(part.masks, part.mask_starts[here], lengths)
        stem, kind = f"part-{partition:05d}.{number:05d}", output.format
        path = write_token_files(
            folder,
            stem,
            kind,
            ids.astype(dtype, copy=False),
            np.cumsum(lengths),
            masks,
            settings.tokenizer or "",
        )
        file = FileInfo(path.name, path.stat().st_size, hash_file(path, output.hashes))
        shards.append(stream_info(kind, dtype, file))
    count = len(ends)
    order = np.arange(count, dtype=np.int64)
    row = np.searchsorted(edges, order, side="right") - 1
    before = np.concatenate([[0], ends])[edges[row]] if count else order
    column, zeros = ends - part.lengths - before, np.zeros(count, np.int64)
    placement = Placement(0, len(shards), order, zeros, part.lengths, row, column)
    rows = np.arange(len(shards) + 1, dtype=np.int64)
    write_provenance(folder / PROVENANCE_NAME, placement, rows, part.table, seed=settings.seed)
    histograms = Histogram.of(np.zeros(len(shards), np.int64)), Histogram.of(np.diff(edges))
    trained = 0 if part.masks is None else _trained_of(part)
    return Packed(shards, count, len(shards), total, 0, 0, 0, count, *histograms, trained=trained)


def _joined(values: npt.NDArray[Any], starts: _Ints, lengths: _Ints) -> npt.NDArray[Any]:
    """Return `values[starts[i] : starts[i] + lengths[i]]` of all i, concatenated."""
    joined: npt.NDArray[Any] = np.empty((1, int(lengths.sum())), values.dtype)
    zeros = np.zeros(len(lengths), np.int64)
    fill_rows(values, starts, lengths, zeros, np.cumsum(lengths) - lengths, joined, 0)
    return joined.ravel()


def _cut_by_bytes(sizes: _Ints, most: int) -> _Ints:
    """Return the first sample of each shard, int64[shards + 1]; a shard is up to `most` bytes or 1 sample."""
    ends = np.cumsum(sizes)
    starts = [0]
    while starts[-1] < len(sizes):
        before = int(ends[starts[-1] - 1]) if starts[-1] else 0
        starts.append(max(starts[-1] + 1, int(np.searchsorted(ends, before + most, side="right"))))
    return np.array(starts, np.int64)


def _read_partition(documents: Slice | Pieces, dtype: np.dtype[Any], *, masked: bool = False) -> Partition:
    rows, payload = documents.read()
    starts = np.cumsum(rows["size"]) - rows["size"]
    ids = np.ascontiguousarray(rows["document_id"]).view(">u8").astype(np.uint64).reshape(len(rows), 2)
    order = np.lexsort((ids[:, 1], ids[:, 0], rows["key"]))
    rows, starts, ids = rows[order], starts[order], ids[order]
    same_key = rows["key"][1:] == rows["key"][:-1]  # copies of a repeated document have keys of their own
    if (repeated := (ids[1:] == ids[:-1]).all(axis=1) & same_key).any():
        first = ids[int(repeated.argmax())].astype(">u8").tobytes().hex()
        raise BuildError(
            f"document {first} occurs twice; if an input with `document_id` contains it twice, remove "
            f"repeated documents with dedup.exact, else remove the work folder and build again"
        )
    table = documents_of(rows, payload, starts, dtype.itemsize + masked)
    tokens: Tokens = payload.view(dtype.newbyteorder("<"))
    lengths = np.ascontiguousarray(rows["tokens"])
    masks = (payload, starts + lengths * dtype.itemsize) if masked else (None, None)
    return Partition(tokens, starts // dtype.itemsize, lengths, table, *masks)


def _count(placement: Placement, lengths: _Ints, pack: PackConfig, repeated: _Ints | None) -> Packed:
    cropped = lengths - np.bincount(placement.document, placement.length, len(lengths)).astype(np.int64)
    cut = np.bincount(placement.document, minlength=len(lengths)) > 1
    filled = np.zeros(placement.rows, np.int64)
    np.maximum.at(filled, placement.row, placement.column + placement.length)
    return Packed(
        documents=int((np.bincount(placement.document, minlength=len(lengths)) > 0).sum()),
        rows=placement.rows,
        tokens=int(placement.length.sum()),
        padding=placement.padding,
        cut_documents=int(cut.sum()),
        needless_cuts=int((cut & (lengths <= placement.sequence_length)).sum()),
        pieces=len(placement.row),
        row_padding=Histogram.of(placement.sequence_length - filled),
        row_pieces=Histogram.of(np.bincount(placement.row, minlength=placement.rows)),
        cropped=int(cropped.sum()) if pack.crops else None,
        cropped_documents=int((cropped > 0).sum()) if pack.crops else None,
        repeated_bos=placement.repeated_bos if pack.row_bos else None,
        repeated=None if repeated is None else int(repeated.sum()),
        repeated_documents=None if repeated is None else int((repeated > 0).sum()),
    )


def _row_bytes(sequence_length: int, dtype: np.dtype[Any], output: OutputConfig, part: Partition) -> int:
    """Return the size of one row in an uncompressed shard, in bytes."""
    columns = [dtype] if part.masks is None else [dtype, part.masks.dtype]
    if output.format == "mds":
        return sequence_length * sum(column.itemsize for column in columns) + 4  # 4 bytes: the row's offset
    return sum(tar.member_bytes(sequence_length, column) for column in columns)


def _shard_starts(rows: int, row_bytes: int, output: OutputConfig, order: str) -> _Ints:
    """Return the first row of each shard, int64[shards + 1]; sizes differ by at most one row.

    A unit of consecutive documents is one shard, as it is for a loader that makes the rows itself.
    """
    shard_bytes = output.shard_bytes if order == "shuffled" else max(output.shard_bytes, _MAX_UNIT_BYTES)
    shards = min(rows, -(-rows * row_bytes // shard_bytes))
    return np.array([rows * k // max(shards, 1) for k in range(shards + 1)], np.int64)


def _write_shard(
    folder: Path,
    name: str,
    columns: Mapping[str, npt.NDArray[Any]],
    output: OutputConfig,
    keys: tuple[int, int],
) -> ShardInfo:
    """Write one shard; `keys` are the first key of a tar's rows and the number of digits of each key."""
    if output.format == "wds":
        first, digits = keys
        return tar.write_columns_shard(
            folder, f"{name}.tar", columns, key_start=first, key_digits=digits, hashes=output.hashes
        )
    if LOSS_MASK in columns:
        return mds.write_columns_shard(folder, f"{name}.mds", columns, **_of_mds(output))
    return mds.write_rows_shard(folder, f"{name}.mds", columns[_TOKENS], **_of_mds(output))


def _of_mds(output: OutputConfig) -> dict[str, Any]:
    """Return the writer's settings for all shards in MDS format."""
    return {
        "compression": output.compression,
        "hashes": output.hashes,
        "size_limit": output.shard_bytes,
    }
