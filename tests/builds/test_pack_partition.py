"""Every setting of stage `pack` on small partitions: rows, masks, counts and provenance tell of one thing.

Documents are given as tokens, so that nothing is tokenized or built and a case takes milliseconds.
"""

from __future__ import annotations

import json
import tarfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from shardkit.card import Histogram
from shardkit.errors import BuildError, ConservationError
from shardkit.formats import mds, tar
from shardkit.formats.block_checksums import shard_parts
from shardkit.formats.provenance import HashRange
from shardkit.manifest import BLOCKS_NAME, LOSS_MASK
from shardkit.writers.exchange.addresses import range_of
from shardkit.writers.exchange.exchange import Exchanged, RunWriter, Segment, Slice
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit, facts_of
from shardkit.writers.recipe.inputs import GroupConfig
from shardkit.writers.recipe.outputs import OutputConfig, PackConfig
from shardkit.writers.recipe.recipe import recipe_from_mapping
from shardkit.writers.stages.pack import (
    PACK,
    TAR_KEY_STEP,
    Packed,
    PackSettings,
    Partition,
    pack_documents,
    pack_partition,
    sums_of,
    tar_key_digits,
    tasks,
)
from shardkit.writers.stages.provenance import PROVENANCE_NAME
from shardkit.writers.stages.tokenize import (
    MAX_PARTITIONS,
    TOKENS,
    TokenizerFacts,
    document_rows,
    documents_of,
)
from shardkit.writers.tokens.groups import Groups, Joined
from support.documents import document_batch

LENGTH = 16
SEED = 4
BOS, EOS, SEPARATOR, AGAIN = 1, 2, 3, 5


@dataclass(frozen=True)
class Document:
    """Tokens, the last of which is EOS; those of `again` are equal, and all others differ."""

    key: int
    identity: bytes
    tokens: list[int]
    mask: list[int]
    again: range = range(0)
    group: str | None = None

    def shown(self, masked: bool, most: int | None) -> list[int]:
        """Its loss mask, without what follows each other more than `most` times."""
        hidden = self.again if most is not None and len(self.again) > most else range(0)
        own = self.mask if masked else [1] * len(self.tokens)
        return [0 if at in hidden else value for at, value in enumerate(own)]


def make_documents(count: int, *, wide: bool = False, seed: int = 1) -> list[Document]:
    """In the order of (key, identity), which pairs and triples of them share in part."""
    rng = np.random.default_rng(seed)
    far, number = (70_000 if wide else 10), 0
    keys = np.sort(rng.integers(0, 1 << 64, count, np.uint64)).tolist()
    made = []
    # In concat, the second is cut after a token; the third is one token longer than a row.
    lengths = [LENGTH - 1, LENGTH, LENGTH + 1, *rng.integers(2, 3 * LENGTH, count).tolist()]
    for at in range(count):
        tokens = [far + number + k for k in range(lengths[at] - 1)]
        number += len(tokens)
        again = range(2, 2 + int(rng.integers(3, 8))) if at % 3 == 0 and len(tokens) > 9 else range(0)
        tokens[again.start : again.stop] = [AGAIN] * len(again)
        mask = rng.integers(0, 2, len(tokens) + 1).tolist()
        # Four documents of a key share halves of their ids, in which first bytes rise and second ones fall.
        halves = [bytes([bit, 2 - bit, at // 4, *[0] * 5]) for bit in divmod(at % 4, 2)]
        made.append(Document(keys[at - at % 4], b"".join(halves), [*tokens, EOS], mask, again))
    return sorted(made, key=lambda one: (one.key, one.identity))


def rows_of(documents: Sequence[Document], *, wide: bool, masked: bool) -> Any:
    """Rows of TOKENS and their payloads."""
    batch = document_batch(
        [""] * len(documents),
        document_id=[one.identity for one in documents],
        record=[int.from_bytes(one.identity) >> 80 for one in documents],
        metadata=[None if one.group is None else json.dumps({"g": one.group}) for one in documents],
    )
    return document_rows(
        batch,
        np.array([one.key for one in documents], np.uint64),
        np.ones(len(documents), np.int32),
        np.array([token for one in documents for token in one.tokens], np.uint32 if wide else np.uint16),
        np.array([len(one.tokens) for one in documents], np.int64),
        np.array([value for one in documents for value in one.mask], np.uint8) if masked else None,
    )


def slice_of(
    path: Path, documents: Sequence[Document], *, wide: bool = False, masked: bool = False, seed: int = 0
) -> Slice:
    """A run that has them, written in another order."""
    some = [documents[at] for at in np.random.default_rng(seed).permutation(len(documents)).tolist()]
    with RunWriter(path, TOKENS, memory_bytes=1 << 20) as run:
        run.write(*rows_of(some, wide=wide, masked=masked))
    return Slice.whole(TOKENS, [Artifact(path)])


def packed_into(
    folder: Path,
    documents: Sequence[Document],
    pack: PackConfig,
    *,
    wide: bool = False,
    masked: bool = False,
    groups: Groups | None = None,
    partition: int = 0,
    **output: Any,
) -> Packed:
    """What a task of the stage makes of them in `folder`."""
    piece = slice_of(folder.with_suffix(".run"), documents, wide=wide, masked=masked)
    folder.mkdir()
    form = OutputConfig(path="out", **({"shard_bytes": 1024} | output))
    dtype = "uint32" if wide else "uint16"
    settings = PackSettings(pack, form, SEED, EOS, dtype, masked=masked, bos_id=BOS)
    return pack_partition(folder, piece, partition, settings, groups)


@dataclass
class Found:
    """What shards and provenance of a partition say; rows are numbered over all of its shards."""

    tokens: list[list[int]]
    masks: list[list[int]]
    sizes: list[int]
    lines: list[dict[str, Any]]

    @classmethod
    def of(cls, folder: Path, packed: Packed, *, has_masks: bool) -> Found:
        found = cls([], [], [info.samples for info in packed.shards], [])
        for info in packed.shards:
            module = tar if info.raw.basename.endswith(".tar") else mds
            shard = module.open_shard(folder, info, verify=True)
            names = {column.name.removesuffix(".npy") for column in info.columns}
            assert names == ({"tokens", LOSS_MASK} if has_masks else {"tokens"})
            for row in range(info.samples):
                values = {key.removesuffix(".npy"): value for key, value in shard.sample(row).items()}
                found.tokens.append(np.asarray(values["tokens"]).tolist())
                found.masks.append(np.asarray(values[LOSS_MASK]).tolist() if has_masks else [])
        firsts = np.cumsum([0, *found.sizes]).tolist()
        for line in pq.read_table(folder / PROVENANCE_NAME).to_pylist():
            found.lines.append(line | {"row": firsts[line["shard"]] + line["row"]})
        return found

    def pieces(self) -> dict[bytes, list[dict[str, Any]]]:
        """Lines of each document, in the order of its tokens."""
        pieces = defaultdict(list)
        for line in sorted(self.lines, key=lambda line: (line["document_id"], line["document_start"])):
            pieces[line["document_id"]].append(line)
        return pieces

    def ends(self) -> list[int]:
        """Where the tokens of each row end."""
        ends = [0] * len(self.tokens)
        for line in self.lines:
            ends[line["row"]] = max(ends[line["row"]], line["token_end"])
        return ends


def histogram(values: Sequence[int]) -> Histogram:
    """By the bits of each."""
    bits = [value.bit_length() for value in values]
    bins = range(max(bits, default=-1) + 1)
    sums = [sum(value for value in values if value.bit_length() == b) for b in bins]
    return Histogram([bits.count(b) for b in bins], sums)


def check(
    found: Found,
    packed: Packed,
    documents: Sequence[Document],
    pack: PackConfig,
    *,
    masked: bool,
    texts: Sequence[Sequence[bytes]] | None = None,
) -> None:
    """Rows are what provenance says of the documents, all of these are in them, and counts are those of rows.

    `texts` are documents that follow each other; None: each is one by itself.
    """
    of = {one.identity: one for one in documents}
    check_rows(found, of, pack, masked=masked)
    check_pieces(found, of, pack)
    texts = [[one] for one in of] if texts is None else texts
    assert replace(packed, shards=[], joined=None) == counted(found, documents, pack, masked, texts)


def check_rows(found: Found, of: Mapping[bytes, Document], pack: PackConfig, *, masked: bool) -> None:
    """Every piece lies where provenance says, and nothing else does, but for a bos before further pieces."""
    has_masks = masked or pack.max_repetitions is not None
    rows = [[EOS] * LENGTH for _ in found.tokens]
    masks = [[0] * LENGTH if has_masks else [] for _ in found.tokens]
    for line in found.lines:
        one, row, first = of[line["document_id"]], line["row"], line["document_start"]
        start, stop = line["token_start"], line["token_end"]
        here = slice(first, first + stop - start)
        assert rows[row][start:stop] == [EOS] * (stop - start), "pieces lie beside each other"
        rows[row][start:stop] = one.tokens[here]
        if pack.row_bos and first:
            rows[row][start - 1] = BOS
        if has_masks:
            masks[row][start:stop] = one.shown(masked, pack.max_repetitions)[here]
    assert found.tokens == rows
    assert found.masks == masks


def check_pieces(found: Found, of: Mapping[bytes, Document], pack: PackConfig) -> None:
    """Documents are whole, or their beginnings are, as much of them as the strategy says."""
    pieces = found.pieces()
    assert pieces.keys() == of.keys()
    for identity, some in pieces.items():
        ends = np.cumsum([piece["token_end"] - piece["token_start"] for piece in some]).tolist()
        assert [piece["document_start"] for piece in some] == [0, *ends[:-1]]
        length = len(of[identity].tokens)
        assert ends[-1] == length or (pack.crops and len(some) == 1)
        if pack.strategy == "best_fit_truncate":
            assert ends[-1] == min(length, LENGTH)
    if pack.strategy == "best_fit_crop":
        assert sum(end < LENGTH for end in found.ends()) <= 1


def counted(
    found: Found,
    documents: Sequence[Document],
    pack: PackConfig,
    masked: bool,
    texts: Sequence[Sequence[bytes]],
) -> Packed:
    """The result, counted in what was found."""
    most, pieces, length_of = pack.max_repetitions, found.pieces(), {}
    left_out = []
    for one in documents:
        length_of[one.identity] = len(one.tokens)
        left_out.append(
            len(one.tokens) - sum(p["token_end"] - p["token_start"] for p in pieces[one.identity])
        )
    needless = 0
    for text in texts:
        rows = {piece["row"] for one in text for piece in pieces[one]}
        needless += sum(length_of[one] for one in text) <= LENGTH and len(rows) > 1
    tokens = sum(length_of.values()) - sum(left_out)
    again = sum(line["document_start"] > 0 for line in found.lines) if pack.row_bos else None
    hidden = [sum(one.shown(masked, None)) - sum(one.shown(masked, most)) for one in documents]
    made = Packed(
        documents=len(pieces),
        rows=len(found.tokens),
        tokens=tokens,
        padding=len(found.tokens) * LENGTH - tokens - (again or 0),
        cut_documents=sum(len(some) > 1 for some in pieces.values()),
        needless_cuts=needless,
        pieces=len(found.lines),
        row_padding=histogram([LENGTH - end for end in found.ends()]),
        row_pieces=histogram([*Counter(line["row"] for line in found.lines).values()]),
        trained=sum(map(sum, found.masks)),
        repeated_bos=again,
    )
    if most is not None:
        made = replace(made, repeated=sum(hidden), repeated_documents=sum(value > 0 for value in hidden))
    if pack.crops:
        made = replace(made, cropped=sum(left_out), cropped_documents=sum(value > 0 for value in left_out))
    if pack.crops and (masked or most is not None):
        made.cropped_trained = sum(sum(one.shown(masked, most)) for one in documents) - made.trained
    return made


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"wide": True, "masked": True}),
    ({"max_repetitions": 3}, {}),
    ({"max_repetitions": 4}, {"masked": True, "format": "wds", "partition": 3}),
    ({"row_bos": True}, {"masked": True, "format": "wds", "wide": True}),
    ({"strategy": "concat"}, {"compression": "zstd", "hashes": ["sha256"], "masked": True}),
    ({"strategy": "concat", "row_bos": True, "max_repetitions": 3}, {"partition": 2}),
    ({"strategy": "best_fit_crop"}, {}),
    ({"strategy": "best_fit_crop", "max_repetitions": 5}, {"wide": True}),
    ({"strategy": "best_fit_truncate"}, {"masked": True, "format": "wds"}),
    ({"strategy": "best_fit_truncate", "max_repetitions": 3}, {"masked": True, "compression": "zstd"}),
]


@pytest.mark.parametrize(("settings", "options"), SETTINGS)
def test_rows_masks_counts_and_provenance_agree_with_the_documents(
    tmp_path: Path, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    documents = make_documents(40, wide=options.get("wide", False))
    pack = PackConfig(sequence_length=LENGTH, **settings)
    packed = packed_into(tmp_path / "out", documents, pack, **options)
    masked = options.get("masked", False)
    found = Found.of(tmp_path / "out", packed, has_masks=masked or pack.max_repetitions is not None)
    check(found, packed, documents, pack, masked=masked)
    assert packed.cut_documents > 5 or pack.crops
    assert packed.needless_cuts > 0 or pack.strategy != "concat"
    if pack.max_repetitions is not None:
        assert packed.repeated
    kind = {"mds": "mds", "wds": "tar"}[options.get("format", "mds")]
    names = [f"part-{options.get('partition', 0):05d}.{k:05d}.{kind}" for k in range(len(found.sizes))]
    assert [info.raw.basename for info in packed.shards] == names
    assert len(names) > 1
    assert all([*info.stored.hashes] == options.get("hashes", ["xxh64"]) for info in packed.shards)
    assert {info.size_limit for info in packed.shards} == ({None} if kind == "tar" else {1024})
    stated = pq.read_schema(tmp_path / "out" / PROVENANCE_NAME).metadata
    assert HashRange.from_metadata(stated) == HashRange(SEED, documents[0].key, documents[-1].key)
    blocks = tmp_path / "out" / BLOCKS_NAME
    if options.get("compression") is None:
        assert blocks.read_bytes() == b"".join(shard_parts(tmp_path / "out", packed.shards))
    else:
        assert {info.compression for info in packed.shards} == {"zstd"}
        assert not blocks.exists()
    commit = Commit("pack", "", tmp_path, "", facts_of(PACK.recorded(packed), {}))
    assert PACK.result(commit) == packed
    named = sums_of([packed])
    assert named.pop("shards") == len(names)
    assert named == {name: getattr(packed, name) for name in named}
    assert ("cropped" in named, "repeated_bos" in named) == (pack.crops, pack.row_bos)


def grouped(documents: Sequence[Document], *, separator: int | None) -> list[Document]:
    """Every four documents of a key are a group, but for the first, which is alone; all have headers."""
    made = []
    for at, one in enumerate(documents):
        group = None if at % 4 == 0 else f"g{at // 4}"
        header = [BOS] if separator is None else [BOS, 9, separator, 8]
        tokens = [*header, *one.tokens] if group else [BOS, *one.tokens]
        again = range(
            one.again.start + len(tokens) - len(one.tokens), one.again.stop + len(tokens) - len(one.tokens)
        )
        made.append(replace(one, tokens=tokens, again=again, group=group))
    return made


@pytest.mark.parametrize("separator", [None, SEPARATOR])
@pytest.mark.parametrize("strategy", ["best_fit", "concat"])
def test_texts_of_groups_are_booked_as_their_documents(
    tmp_path: Path, separator: int | None, strategy: Any
) -> None:
    documents = grouped(make_documents(40), separator=separator)
    groups = Groups(GroupConfig(by="g"), separator, has_bos=True)
    pack = PackConfig(sequence_length=LENGTH, strategy=strategy, max_repetitions=3)
    packed = packed_into(tmp_path / "out", documents, pack, groups=groups)

    texts, left = [], []
    for at in range(0, 40, 4):
        alone, *others = documents[at : at + 4]
        texts += [[alone.identity], [one.identity for one in others]]
        for place, one in enumerate(others):
            cut = 0 if place == 0 else one.tokens.index(separator) if separator else 1
            stop = len(one.tokens) - (place < 2)
            again = range(one.again.start - cut, one.again.stop - cut)
            left.append(replace(one, tokens=one.tokens[cut:stop], again=again))
        left.append(alone)
    assert packed.joined == sum(len(one.tokens) for one in documents) - sum(len(one.tokens) for one in left)
    found = Found.of(tmp_path / "out", packed, has_masks=True)
    check(found, packed, left, pack, masked=False, texts=texts)
    assert (packed.needless_cuts > 0) == (strategy == "concat")
    pieces = found.pieces()
    for text in texts:
        for before, after in pairwise(line for one in text for line in pieces[one]):
            if after["row"] == before["row"]:
                assert after["token_start"] == before["token_end"]
            else:
                assert before["token_end"] == LENGTH
    stated = pq.read_schema(tmp_path / "out" / PROVENANCE_NAME).metadata
    assert stated is None, "hashes are not of document ids"


@pytest.mark.parametrize("masked", [False, True])
def test_a_store_has_whole_documents_by_hash_and_id(tmp_path: Path, masked: bool) -> None:
    documents = make_documents(60)
    pack = PackConfig(sequence_length=LENGTH)
    packed = packed_into(tmp_path / "out", documents, pack, masked=masked, format="tokens", partition=1)
    found = Found.of(tmp_path / "out", packed, has_masks=masked)
    assert found.tokens == [one.tokens for one in documents]
    assert found.masks == [one.mask if masked else [] for one in documents]
    assert [line["document_id"] for line in found.lines] == [one.identity for one in documents]
    places = [[line[name] for name in ("row", "token_start", "document_start")] for line in found.lines]
    assert places == [[row, 0, 0] for row in range(60)]
    assert [line["token_end"] for line in found.lines] == [len(one.tokens) for one in documents]
    assert len(found.sizes) > 1
    assert packed.shards[1].raw.basename == "part-00001.00001.mds"
    stated = pq.read_schema(tmp_path / "out" / PROVENANCE_NAME).metadata
    assert HashRange.from_metadata(stated) == HashRange(SEED, documents[0].key, documents[-1].key)
    assert replace(packed, shards=[]) == Packed(
        documents=60,
        rows=60,
        tokens=sum(len(one.tokens) for one in documents),
        pieces=60,
        row_padding=histogram([0] * 60),
        row_pieces=histogram([1] * 60),
        trained=sum(sum(one.mask) for one in documents) if masked else 0,
    )


def test_a_shard_of_a_store_has_all_documents_that_it_has_room_for(tmp_path: Path) -> None:
    documents = make_documents(120)
    pack = PackConfig(sequence_length=LENGTH)
    [one] = packed_into(tmp_path / "one", documents, pack, format="tokens", shard_bytes=1 << 20).shards
    offsets = np.fromfile(tmp_path / "one" / one.raw.basename, "<u4", len(documents) + 2)[1:]
    takes = (np.diff(offsets.astype(np.int64)) + offsets.itemsize).tolist()
    for least in range(3):
        most = sum(takes[: 40 + least]) - least
        expected, room = [0], most
        for size in takes:
            if size > room:
                expected, room = [*expected, 0], most
            expected[-1], room = expected[-1] + 1, room - size
        folder = tmp_path / str(least)
        packed = packed_into(folder, documents, pack, format="tokens", shard_bytes=most)
        assert [info.samples for info in packed.shards] == expected
        assert expected[0] == 40 + least - (least > 0), "the last one does not fit by as many bytes"
    large = replace(documents[1], tokens=[10] * 3000 + [EOS])
    packed = packed_into(tmp_path / "large", [documents[0], large, *documents[2:4]], pack, format="tokens")
    assert [info.samples for info in packed.shards] == [1, 1, 2]


@pytest.mark.parametrize("form", ["mds", "wds"])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_are_dealt_evenly_to_as_few_shards_as_their_bytes_need(
    tmp_path: Path, form: Any, masked: bool
) -> None:
    documents = [
        replace(one, tokens=[10] * (LENGTH - 1) + [EOS], mask=[1] * LENGTH) for one in make_documents(120)
    ]
    pack = PackConfig(sequence_length=LENGTH)

    def sizes(shard_bytes: int, rows: int = 120) -> list[int]:
        folder = tmp_path / str(shard_bytes)
        settings: dict[str, Any] = {"masked": masked, "format": form, "shard_bytes": shard_bytes}
        packed = packed_into(folder, documents[:rows], pack, **settings)
        return [info.samples for info in packed.shards]

    assert sizes(1 << 20) == [120]
    if form == "mds":
        file = tmp_path / str(1 << 20) / "part-00000.00000.mds"
        first, second = np.fromfile(file, "<u4", 3)[1:].tolist()
        row_bytes = second - first + 4
    else:
        with tarfile.open(tmp_path / str(1 << 20) / "part-00000.00000.tar") as opened:
            row_bytes = opened.getmembers()[2 if masked else 1].offset
    assert sizes(60 * row_bytes) == [60, 60]
    assert sizes(60 * row_bytes - 1) == [40, 40, 40]
    assert sizes(29 * row_bytes) == [24] * 5
    assert sizes(40 * row_bytes, rows=118) == [39, 39, 40]


def test_a_row_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    documents = [replace(one, tokens=[10] * 300 + [EOS]) for one in make_documents(3)]
    packed = packed_into(tmp_path / "out", documents, PackConfig(sequence_length=600), wide=True)
    assert [info.samples for info in packed.shards] == [1, 1, 1]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("settings", [{}, {"max_repetitions": 3}, {"strategy": "best_fit_crop"}])
@pytest.mark.parametrize("form", ["mds", "tokens"])
def test_a_partition_without_documents_has_empty_counts(
    tmp_path: Path, form: str, settings: dict[str, Any], masked: bool
) -> None:
    pack = PackConfig(sequence_length=LENGTH, **settings)
    packed = packed_into(tmp_path / "out", [], pack, masked=masked, format=form)
    named = [packed.cropped, packed.cropped_documents, packed.repeated, packed.repeated_documents]
    crops, repeats = form == "mds" and pack.crops, form == "mds" and pack.max_repetitions is not None
    assert named == [0 if crops else None] * 2 + [0 if repeats else None] * 2
    of_policies = dict.fromkeys(("cropped", "cropped_documents", "repeated", "repeated_documents"))
    assert replace(packed, **of_policies) == Packed()  # type: ignore[arg-type]
    assert pq.read_table(tmp_path / "out" / PROVENANCE_NAME).num_rows == 0
    if form == "mds":
        groups = Groups(GroupConfig(by="g"), None, has_bos=True)
        packed = packed_into(tmp_path / "groups", [], PackConfig(sequence_length=LENGTH), groups=groups)
        assert packed == Packed(joined=0)


def test_a_document_that_occurs_twice_is_named(tmp_path: Path) -> None:
    documents = make_documents(40)
    twice = [*documents, documents[9], documents[30]]
    with pytest.raises(BuildError, match=f"document {documents[9].identity.hex()} occurs twice"):
        packed_into(tmp_path / "out", twice, PackConfig(sequence_length=LENGTH))


def test_what_does_not_add_up_is_refused(tmp_path: Path) -> None:
    documents = [replace(one, tokens=[10] * 8 + [EOS]) for one in make_documents(4)]
    rows, payload = rows_of(documents, wide=False, masked=False)
    starts = np.cumsum(rows["size"]) - rows["size"]
    table = documents_of(rows, payload, starts, 2)
    part = Partition(payload.view(np.uint16), starts // 2, rows["tokens"].copy(), table)

    def of_texts(*firsts: int) -> Partition:
        everything = np.arange(4)
        joined = Joined(everything, part.starts, part.lengths, 0 * everything, np.array(firsts), 0)
        return replace(part, joined=joined)

    for wrong, booked in (
        (replace(part, table=table.slice(1)), 36),  # a document more than the table has
        (of_texts(0, 2, 2), 45),  # one twice
        (of_texts(1, 1), 36),  # one twice, and another one not at all
    ):
        message = f"partition 7 has 36 tokens, but {booked} were packed or cropped; this is a bug"
        pack = PackConfig(sequence_length=256)
        with pytest.raises(ConservationError, match=message):
            pack_documents(
                tmp_path, wrong, 7, PackSettings(pack, OutputConfig(path="out"), SEED, EOS, "uint16")
            )


@pytest.mark.parametrize(("partitions", "digits"), [(10_000, 12), (10_001, 14), (MAX_PARTITIONS, 14)])
def test_keys_have_the_fewest_digits_with_room_for_the_last_partition(partitions: int, digits: int) -> None:
    assert tar_key_digits(partitions) == digits
    assert partitions * TAR_KEY_STEP <= 10**digits


def digests(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shuffles_differ_between_partitions_and_seeds_and_not_between_orders_of_writing(
    tmp_path: Path,
) -> None:
    documents, pack = make_documents(60), PackConfig(sequence_length=LENGTH)
    made: dict[tuple[int, int], list[list[int]]] = {}
    for number, (partition, seed, order) in enumerate([(0, 4, 0), (0, 4, 1), (1, 4, 0), (0, 5, 0)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        piece = slice_of(tmp_path / f"{number}.run", documents, seed=order)
        output = OutputConfig(path="out", shard_bytes=1 << 20)
        settings = PackSettings(pack, output, seed, EOS, "uint16")
        packed = pack_partition(folder, piece, partition, settings)
        found = Found.of(folder, packed, has_masks=False)
        if order:
            assert digests(folder) == digests(tmp_path / "0")
        made[partition, seed] = found.tokens
    assert len({str(rows) for rows in made.values()}) == 3
    assert len({str(sorted(rows)) for rows in made.values()}) == 1


GROUP = {"by": "g", "begin": "<begin>", "separator": "<separator>"}


@pytest.mark.parametrize(
    ("changes", "bos", "separator", "skipped"),
    [
        ({"inputs": [{"path": "x", "prompt": "p", "completion": "c"}]}, None, None, 0),
        ({"group": {"by": "g"}}, BOS, None, 1),
        ({"group": {"by": "g"}}, None, None, 0),
        ({"group": GROUP}, BOS, SEPARATOR, 2),
    ],
)
def test_tasks_pack_each_document_in_the_range_of_its_hash(
    tmp_path: Path, changes: dict[str, Any], bos: int | None, separator: int | None, skipped: int
) -> None:
    content = {
        "inputs": [{"path": "x", "metadata": ["g"]}],
        "tokenizer": {"path": "t", "eos": "e"},
        "pack": {"sequence_length": LENGTH},
        "output": {"path": "out", "format": "wds"},
        "seed": SEED,
    } | changes
    recipe = recipe_from_mapping(content, folder=tmp_path)
    documents, masked = make_documents(40), recipe.is_masked
    if recipe.group is not None:
        documents = grouped(documents, separator=separator)
    run = slice_of(tmp_path / "tokens.run", documents, masked=masked).runs[0][0]
    whole = Exchanged(TOKENS, [(Segment(run.file, run.bytes, "tokens", 0, 1 << 64),)], DEFAULT_LIMITS)
    facts = TokenizerFacts(EOS, bos, 1 << 16, "uint16", "tokenizers", separator_id=separator)
    made = tasks(recipe, facts, whole, 3)
    assert [str(task) for task in made] == [f"pack/{k:05d}-of-00003" for k in range(3)]
    assert len({task.digest for task in made}) == len({task.args["documents"].content for task in made}) == 3
    placed = range_of(np.array([one.key for one in documents], np.uint64), 3).tolist()
    for number, task in enumerate(made):
        folder = tmp_path / task.name
        folder.mkdir()
        packed = task.run(folder)
        assert isinstance(packed, Packed)
        found = Found.of(folder, packed, has_masks=masked)
        mine = [one for one, place in zip(documents, placed, strict=True) if place == number]
        assert found.pieces().keys() == {one.identity for one in mine}
        assert all(info.raw.basename.startswith(f"part-{number:05d}") for info in packed.shards)
        first = tar.open_shard(folder, packed.shards[0])
        assert first.key(0) == f"{number * 10**8:012d}"
        if recipe.group is None:
            check(found, packed, mine, recipe.pack, masked=masked)
        else:
            assert packed.joined == len(mine) // 4 * 2 * (1 + skipped), (
                "of each group's three, two at each end"
            )
