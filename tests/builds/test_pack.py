"""What comes out of the shards is what went into the tokenizer, and always the same bytes."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest

from shardkit.errors import BuildError
from shardkit.formats import mds, tar
from shardkit.tokens.tokenizer import Encoder
from shardkit.writers.dedup.outcomes import SplitRemovals
from shardkit.writers.exchange.addresses import Addressed, Pieces, exchange_in_place, range_start
from shardkit.writers.exchange.exchange import Exchanged, Limits, Segment, Slice
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.stage import Task
from shardkit.writers.execution.work import Work, run_task
from shardkit.writers.recipe.outputs import OutputConfig, PackConfig
from shardkit.writers.recipe.recipe import load_recipe
from shardkit.writers.rows.documents import document_ids
from shardkit.writers.stages.inputs import TokenizerFile
from shardkit.writers.stages.pack import (
    PACK,
    TAR_KEY_STEP,
    Packed,
    PackSettings,
    pack_partition,
    sums_of,
    tasks,
)
from shardkit.writers.stages.provenance import PROVENANCE_NAME
from shardkit.writers.stages.tokenize import (
    TOKENS,
    TokenizerFacts,
    TokenSettings,
    tokenize_split,
)
from support.default_cases import cases
from support.documents import write_documents
from support.small_build import EOS, make_corpus, train_bpe

SEED = 3
LENGTH = 64
Rows = npt.NDArray[Any]


def texts(count: int) -> list[str]:
    """Documents from one token to several rows; some spell the special token, a few are empty."""
    sizes = np.random.default_rng(count).geometric(0.03, count)
    made = [f"{i} " + "hello world the fox " * int(n) for i, n in enumerate(sizes)]
    # Bytes outside the merges are one token each: lengths around whole rows, where a remainder is one eos.
    made += [
        "\u0001" * n for n in (1, LENGTH - 2, LENGTH - 1, LENGTH, LENGTH + 1, 2 * LENGTH - 1, 2 * LENGTH)
    ]
    made += ["\u0001" * (LENGTH * (2 + n % 3)) for n in range(20)]
    return [*made, "", f"{EOS}{EOS}", EOS, "\n\n", ""]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    made = train_bpe(["hello world the quick fox "] * 9)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return Encoder(path, EOS)


@dataclass(frozen=True)
class Split:
    """Records [start, stop) of one file."""

    file: str
    start: int
    texts: Sequence[str]


def spill(folder: Path, split: Split, encoder: Encoder, memory_bytes: int = 1 << 20) -> Path:
    """Tokenize one split as a build does."""
    folder.mkdir(parents=True)
    records = range(split.start, split.start + len(split.texts))
    write_documents(folder / "in.arrow", split.texts, batch_rows=50, file=split.file, records=records)
    tokenizer = TokenizerFile(Artifact(encoder.path), encoder.eos, engine=encoder.engine)
    documents, settings = Artifact(folder / "in.arrow"), TokenSettings(SEED)
    tokenize_split(folder, documents, SplitRemovals(), tokenizer, settings, memory_bytes)
    return folder


def documents(
    spills: Sequence[Path], partition: int, partitions: int, limits: Limits = DEFAULT_LIMITS
) -> Slice | Pieces:
    """The documents of one partition; read in place if `limits.least_segments` is 0."""
    files = [folder / TOKENS.file for folder in spills]
    runs = [(Segment(Artifact(file), file.stat().st_size, file.parent.name, 0, 1 << 64),) for file in files]
    edges = (range_start(number, partitions) for number in (partition, partition + 1))
    exchanged = Exchanged(TOKENS, runs, limits)
    if limits.least_segments:
        return exchanged.slice(*edges)
    folder = spills[0].with_name(f"addresses-{partition}")
    folder.mkdir(exist_ok=True)
    work = Work.at(folder)

    def run(*groups: Sequence[Task]) -> list[list[Commit]]:
        return [[run_task(task, task.digest, work) for task in group] for group in groups]

    found = exchange_in_place(run, PACK, exchanged, partitions, memory_bytes=1 << 20, limits=limits)
    assert isinstance(found, Addressed)
    return found.slice(*edges)


def pack_all(
    folder: Path,
    spills: Sequence[Path],
    encoder: Encoder,
    partitions: int,
    *,
    strategy: Literal["best_fit", "concat"] = "best_fit",
    limits: Limits = DEFAULT_LIMITS,
    **output: Any,
) -> list[Packed]:
    """Pack every partition into its own folder."""
    results = []
    settings = OutputConfig(path="out", **({"shard_bytes": 4096} | output))
    pack = PackConfig(sequence_length=LENGTH, strategy=strategy)
    for partition in range(partitions):
        (folder / str(partition)).mkdir(parents=True)
        results.append(
            pack_partition(
                folder / str(partition),
                documents(spills, partition, partitions, limits),
                partition,
                PackSettings(pack, settings, SEED, encoder.eos_id, encoder.dtype.name),
            )
        )
    return results


def read_rows(folder: Path, result: Packed) -> list[Rows]:
    """The token matrix of each shard, through the package's own readers."""
    matrices = []
    for info in result.shards:
        module = tar if info.raw.basename.endswith(".tar") else mds
        matrix = module.open_shard(folder, info).fixed_rows("tokens")
        assert matrix is not None
        matrices.append(np.array(matrix))
        assert len(matrices[-1]) == info.samples
    return matrices


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wide", [False, True], ids=["uint16", "uint32"])
@pytest.mark.parametrize("partitions", cases([1, 5], [5]))
@pytest.mark.parametrize("form", ["mds", "wds"])
@pytest.mark.parametrize("strategy", ["best_fit", "concat"])
def test_documents_come_back_as_they_were_encoded(
    encoder: Encoder, tmp_path: Path, strategy: Any, form: Any, partitions: int, wide: bool
) -> None:
    if wide:
        encoder = widened(encoder, tmp_path / "tokenizer.json")
    made = texts(100)
    cuts = (0, 40, 41, len(made))
    splits = [Split("a.jsonl", a, made[a:b]) for a, b in pairwise(cuts)]
    spills = [spill(tmp_path / f"s{k}", s, encoder, 30_000) for k, s in enumerate(splits)]
    results = pack_all(tmp_path / "out", spills, encoder, partitions, strategy=strategy, format=form)

    ids = document_ids("a.jsonl", range(len(made)))
    encoded = {
        i: [*encoder.encode([t])[0].tolist(), encoder.eos_id] for i, t in zip(ids, made, strict=True) if t
    }
    rebuilt: dict[bytes, list[int]] = {i: [] for i in encoded}
    by_scan: list[list[int]] = []
    tokens = 0
    for partition, result in enumerate(results):
        folder = tmp_path / "out" / str(partition)
        matrices = read_rows(folder, result)
        assert all(m.dtype == encoder.dtype for m in matrices)
        covered = [np.zeros(m.shape, bool) for m in matrices]
        lines = pq.read_table(folder / PROVENANCE_NAME).to_pylist()
        for line in sorted(lines, key=lambda x: (x["document_id"], x["document_start"])):
            place = (line["shard"], line["row"], slice(line["token_start"], line["token_end"]))
            assert len(rebuilt[line["document_id"]]) == line["document_start"]
            rebuilt[line["document_id"]] += matrices[place[0]][place[1:]].tolist()
            assert ids[line["record"]] == line["document_id"]
            assert not covered[place[0]][place[1:]].any()
            covered[place[0]][place[1:]] = True
        for matrix, taken in zip(matrices, covered, strict=True):
            ends = matrix == encoder.eos_id
            padding = ends & np.pad(ends, ((0, 0), (1, 0)))[:, :-1]
            assert np.array_equal(padding, ~taken)  # the rule by which readers know padding
            by_scan += [
                d for row, mask in zip(matrix, taken, strict=True) for d in documents_in(row[mask], encoder)
            ]
        assert result.tokens == sum(int(c.sum()) for c in covered)
        assert result.rows * LENGTH == result.tokens + result.padding
        tokens += result.tokens
    assert rebuilt == encoded
    assert tokens == sum(map(len, encoded.values()))
    assert sum(r.documents for r in results) == len(encoded)
    if strategy == "best_fit":
        assert sum(r.needless_cuts for r in results) == 0
        whole = sorted(d for d in encoded.values() if len(d) <= LENGTH)
        long = [d for d in encoded.values() if len(d) > LENGTH]
        tails = [d[i : i + LENGTH] for d in long for i in range(0, len(d), LENGTH)]
        assert sorted(by_scan) == sorted(whole + tails)


def documents_in(row: Rows, encoder: Encoder) -> list[list[int]]:
    """A row's documents by an eos scan alone."""
    parts = np.split(row, np.flatnonzero(row == encoder.eos_id) + 1)
    return [part.tolist() for part in parts if len(part)]


def widened(encoder: Encoder, path: Path) -> Encoder:
    config = json.loads(encoder.path.read_text())
    config["added_tokens"] += [config["added_tokens"][0] | {"id": 70_000, "content": "<|far|>"}]
    path.write_text(json.dumps(config))
    return Encoder(path, "<|far|>")


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.parametrize("form", ["mds", "wds"])
def test_bytes_do_not_depend_on_splits_runs_or_their_order(
    encoder: Encoder, tmp_path: Path, form: Any
) -> None:
    made = texts(80)
    whole = spill(tmp_path / "whole", Split("a.jsonl", 0, made), encoder)
    pack_all(tmp_path / "out0", [whole], encoder, 3, format=form)
    expected = digests(tmp_path / "out0")
    assert len(expected) > 10
    for trial, memory_bytes in ((1, 1), (2, 4000), (3, 1 << 20)):
        rng = np.random.default_rng(trial)
        cuts = sorted({0, len(made), *rng.integers(0, len(made), 4).tolist()})
        splits = [Split("a.jsonl", a, made[a:b]) for a, b in pairwise(cuts)]
        named = [spill(tmp_path / f"{trial}-{k}", s, encoder, memory_bytes) for k, s in enumerate(splits)]
        rng.shuffle(named)
        pack_all(tmp_path / f"out{trial}", named, encoder, 3, format=form)
        assert digests(tmp_path / f"out{trial}") == expected
        in_place = replace(DEFAULT_LIMITS, least_segments=0, piece_bytes=0)
        pack_all(tmp_path / f"in-place{trial}", named, encoder, 3, format=form, limits=in_place)
        assert digests(tmp_path / f"in-place{trial}") == expected


def test_rows_are_spread_evenly_over_shards_of_the_wanted_size(encoder: Encoder, tmp_path: Path) -> None:
    folder = spill(tmp_path / "s", Split("a.jsonl", 0, texts(150)), encoder)
    for form in ("mds", "wds"):
        [result] = pack_all(tmp_path / form, [folder], encoder, 1, format=form, shard_bytes=16_384)
        sizes = [info.samples for info in result.shards]
        assert len(sizes) > 3
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == result.rows == sums_of([result])["rows"]
        for info in result.shards:
            assert info.raw.bytes == (tmp_path / form / "0" / info.raw.basename).stat().st_size
            assert info.raw.bytes <= 16_384 + (2048 if form == "mds" else 10_240)  # header, or end of tar
        assert [i.raw.basename.rpartition(".")[0] for i in result.shards] == [
            f"part-00000.{k:05d}" for k in range(len(sizes))
        ]


def test_a_row_larger_than_a_shard_gets_a_shard_of_its_own(encoder: Encoder, tmp_path: Path) -> None:
    folder = spill(
        tmp_path / "s", Split("a.jsonl", 0, ["hello " * 300] * 2), widened(encoder, tmp_path / "t")
    )
    pack = PackConfig(sequence_length=512, strategy="concat")
    settings = PackSettings(pack, OutputConfig(path="out", shard_bytes=1024), SEED, 70_000, "uint32")
    result = pack_partition(folder, documents([folder], 0, 1), 0, settings)
    assert [info.samples for info in result.shards] == [1] * result.rows
    assert result.rows >= 2


def test_rows_are_shuffled_after_packing(encoder: Encoder, tmp_path: Path) -> None:
    # Unshuffled, the rows of the long documents come first: one after the other, in the order of their text.
    made = [("\u0001" * LENGTH * 4) + str(i) for i in range(50)] + ["short"] * 50
    folder = spill(tmp_path / "s", Split("a.jsonl", 0, made), encoder)
    [result] = pack_all(tmp_path / "out", [folder], encoder, 1)
    rows = np.concatenate(read_rows(tmp_path / "out" / "0", result))
    full = ~(rows == encoder.eos_id).any(axis=1)
    assert full.sum() == 200
    assert not full[:200].all()
    places = pq.read_table(tmp_path / "out" / "0" / PROVENANCE_NAME).column("document_start").to_pylist()
    assert places[:12] != [0, 64, 128, 192] * 3


def test_tar_keys_are_unique_over_all_partitions(encoder: Encoder, tmp_path: Path) -> None:
    folder = spill(tmp_path / "s", Split("a.jsonl", 0, texts(60)), encoder)
    results = pack_all(tmp_path / "out", [folder], encoder, 2, format="wds")
    keys = []
    for partition, result in enumerate(results):
        for info in result.shards:
            shard = tar.open_shard(tmp_path / "out" / str(partition), info)
            keys += [shard.key(row) for row in range(len(shard))]
    first = results[0].rows
    assert keys == [f"{r:012d}" for r in range(first)] + [f"{10**8 + r:012d}" for r in range(results[1].rows)]


@pytest.mark.parametrize(("partitions", "digits"), [(10_000, 12), (10_001, 14)])
def test_the_last_partition_of_many_has_room_for_its_keys(
    encoder: Encoder, tmp_path: Path, partitions: int, digits: int
) -> None:
    recipe = load_recipe(make_corpus(tmp_path, documents=1), overrides=["output.format=wds"])
    tokens = Exchanged(TOKENS, [], DEFAULT_LIMITS)
    facts = TokenizerFacts(encoder.eos_id, None, 1 << 16, "uint16", "tokenizers")
    last = tasks(recipe, facts, tokens, partitions)[-1]
    assert last.name == f"{partitions - 1:05d}-of-{partitions:05d}"
    assert digits == last.args["settings"].key_digits
    assert (partitions - 1) * TAR_KEY_STEP + 10**8 <= 10**digits


@pytest.mark.parametrize("partitions", [1, 4])
def test_a_partition_without_documents_has_no_shards(
    encoder: Encoder, tmp_path: Path, partitions: int
) -> None:
    folder = spill(tmp_path / "s", Split("a.jsonl", 0, [] if partitions == 1 else ["one"]), encoder)
    results = pack_all(tmp_path / "out", [folder], encoder, partitions)
    assert sum(r.documents for r in results) == partitions // 4
    empty = [k for k, r in enumerate(results) if not r.documents]
    assert len(empty) == max(1, partitions - 1)
    for k in empty:
        assert (results[k].shards, results[k].rows, results[k].padding) == ([], 0, 0)
        assert pq.read_table(tmp_path / "out" / str(k) / PROVENANCE_NAME).num_rows == 0


def test_compressed_shards_hold_the_same_rows(encoder: Encoder, tmp_path: Path) -> None:
    folder = spill(tmp_path / "s", Split("a.jsonl", 0, texts(60)), encoder)
    [plain] = pack_all(tmp_path / "plain", [folder], encoder, 1)
    [packed] = pack_all(tmp_path / "zstd", [folder], encoder, 1, compression="zstd", hashes=["sha256"])
    assert all(info.zip is not None and "sha256" in info.stored.hashes for info in packed.shards)
    pairs = zip(read_rows(tmp_path / "plain/0", plain), read_rows(tmp_path / "zstd/0", packed), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_damaged_or_repeated_spills_stop_the_build(encoder: Encoder, tmp_path: Path) -> None:
    folder = spill(tmp_path / "s", Split("a.jsonl", 0, texts(30)), encoder)
    with pytest.raises(BuildError, match="occurs twice"):
        pack_all(tmp_path / "twice", [folder, folder], encoder, 1)
    run = (folder / TOKENS.file).read_bytes()
    for damaged in (run[:-1], b"no run"):
        (folder / TOKENS.file).write_bytes(damaged)
        with pytest.raises(BuildError, match=r"tokens\.run: bytes .* differ from their hash"):
            pack_all(tmp_path / str(len(damaged)), [folder], encoder, 1)


@pytest.mark.extended
def test_memory_is_the_partitions_tokens_once_and_one_shard(encoder: Encoder, tmp_path: Path) -> None:
    made = [f"{i} " + "\u0001" * 4000 for i in range(3000)]
    folder = spill(tmp_path / "s", Split("a.jsonl", 0, made), encoder)
    size = (folder / TOKENS.file).stat().st_size
    limits = replace(DEFAULT_LIMITS, read_memory_bytes=3 << 20)
    assert size > 20_000_000
    (tmp_path / "out").mkdir()
    pack, output = PackConfig(sequence_length=2048), OutputConfig(path="out", shard_bytes=1 << 20)
    settings = PackSettings(pack, output, SEED, encoder.eos_id, encoder.dtype.name)
    tracemalloc.start()
    try:
        pack_partition(tmp_path / "out", documents([folder], 0, 1, limits), 0, settings)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size + 6_000_000
