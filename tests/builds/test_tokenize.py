"""A run holds every kept document's tokens once, by hash, whatever the memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from shardkit.errors import BuildError, RecipeError
from shardkit.hashing import keyed_hashes
from shardkit.tokens.tokenizer import Encoder
from shardkit.writers.dedup.duplicates import TWINS
from shardkit.writers.dedup.outcomes import Removed
from shardkit.writers.exchange.addresses import range_of, range_start
from shardkit.writers.exchange.exchange import Exchanged, Segment
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit, Output, facts_of
from shardkit.writers.rows.documents import DOCUMENTS_FILE, document_ids
from shardkit.writers.rows.ledger import Count, Ledger
from shardkit.writers.stages import tokenize as module
from shardkit.writers.stages.inputs import TokenizerFile
from shardkit.writers.stages.tokenize import (
    TOKENS,
    Tokenized,
    TokenSettings,
    choose_partitions,
    documents_of,
    parity_task,
    tokenize_split,
)
from support.documents import write_documents
from support.small_build import EOS, train_bpe

TEXTS = [f"document {i} " + "word " * (i * 7 % 23) for i in range(60)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    made = train_bpe(TEXTS)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return Encoder(path, EOS)


def spilled(
    folder: Path,
    texts: Sequence[str],
    encoder: Encoder,
    removed: Removed | None = None,
    *,
    seed: int = 1,
    memory_bytes: int = 1 << 20,
) -> tuple[Tokenized, Path]:
    """Tokenize a split of these texts; returns the counts and the folder of the spill."""
    ids = [f"id-{i}" if i % 2 else None for i in range(len(texts))]
    metadata = [f'{{"n":{i}}}' for i in range(len(texts))]
    documents = write_documents(folder / "in.arrow", texts, batch_rows=11, id=ids, metadata=metadata)
    spill = folder / f"spill-{len(list(folder.iterdir()))}"
    spill.mkdir()
    tokenizer = TokenizerFile(Artifact(encoder.path), EOS, engine=encoder.engine)
    given: Any = SimpleNamespace(load=lambda: removed or Removed())
    result = tokenize_split(spill, Artifact(documents), given, tokenizer, TokenSettings(seed), memory_bytes)
    return result, spill


def contents(folder: Path, dtype: Any) -> dict[bytes, tuple[int, list[int], dict[str, Any]]]:
    """{document id: (hash, tokens, its table line)} of the run."""
    file = folder / TOKENS.file
    assert {path.name for path in folder.iterdir()} == {file.name, TWINS.file}
    segment = Segment(Artifact(file), file.stat().st_size, "", 0, 1 << 64)
    rows, payload = Exchanged(TOKENS, [(segment,)], DEFAULT_LIMITS).slice(0, 1 << 64).read()
    assert (np.diff(rows["key"].astype(object)) >= 0).all()
    starts = np.cumsum(rows["size"]) - rows["size"]
    lines = documents_of(rows, payload, starts, np.dtype(dtype).itemsize).to_pylist()
    tokens = payload.view(dtype)
    found = {}
    for line, start in zip(lines, (starts // tokens.itemsize).tolist(), strict=True):
        assert line["document_id"] not in found
        found[line["document_id"]] = (line["hash"], tokens[start : start + line["tokens"]].tolist(), line)
    return found


@pytest.mark.parametrize("memory_bytes", [1, 20_000, 1 << 20])
def test_every_document_is_written_once_under_its_hash(
    encoder: Encoder, tmp_path: Path, memory_bytes: int
) -> None:
    result, folder = spilled(tmp_path, TEXTS, encoder, seed=5, memory_bytes=memory_bytes)
    found = contents(folder, np.uint16)
    ids = document_ids("a.jsonl", range(len(TEXTS)))
    hashes = keyed_hashes(ids, 5, "shuffle").tolist()
    total = 0
    for i, document_id in enumerate(ids):
        key, tokens, line = found.pop(document_id)
        assert key == hashes[i]
        assert tokens == [*encoder.encode([TEXTS[i]])[0].tolist(), encoder.eos_id]
        assert (line["record"], line["file"], line["metadata"]) == (i, "a.jsonl", f'{{"n":{i}}}')
        assert (line["id"], line["url"]) == (f"id-{i}" if i % 2 else None, None)
        total += len(tokens)
    assert not found
    assert result.tokens == total
    assert result.ledger.kept.documents == len(TEXTS)


def test_losers_and_empty_documents_are_booked_and_left_out(encoder: Encoder, tmp_path: Path) -> None:
    texts = ["keep é", "lose", "", "keep too", "lose also", ""]
    losers = np.array([k * 6 + j for k in range(5) for j in (1, 4)])
    exact, near = losers[losers != 16], losers[losers == 16]
    copied = np.array([0, 9, 15, 16])
    removed = Removed({"exact_duplicate": exact, "near_duplicate": near}, copied, np.array([3, 4, 5, 6]))
    result, folder = spilled(tmp_path, texts * 5, encoder, removed)  # over several batches
    assert result.ledger.read == Count(30, 5 * (7 + 4 + 8 + 9))
    assert result.ledger.kept == Count(10, 5 * (7 + 8))
    dropped = {"exact_duplicate": Count(9, 5 * 13 - 9), "near_duplicate": Count(1, 9), "empty": Count(10, 0)}
    assert result.ledger.dropped == dropped
    kept = {line["record"]: line["copies"] for _, _, line in contents(folder, np.uint16).values()}
    assert kept == {k * 6 + j: 1 for k in range(5) for j in (0, 3)} | {0: 3, 9: 4, 15: 5}


def test_a_text_without_any_token_is_empty_too(encoder: Encoder, tmp_path: Path) -> None:
    # A normalizer may leave nothing of a text; such a document would be a lone eos, which reads as padding.
    made = tokenizers.Tokenizer.from_file(str(encoder.path))
    made.normalizer = normalizers.Strip()
    made.save(str(tmp_path / "tokenizer.json"))
    stripping = Encoder(tmp_path / "tokenizer.json", EOS, engine="tokenizers")
    result, _ = spilled(tmp_path, ["  \n ", "text"], stripping)
    assert result.ledger.dropped == {"empty": Count(1, 4)}
    assert result.ledger.kept == Count(1, 4)


@pytest.mark.parametrize("texts", [[], [""], ["all", "lost"]])
def test_a_split_that_keeps_nothing_leaves_an_empty_spill(
    encoder: Encoder, tmp_path: Path, texts: list[str]
) -> None:
    losers = np.arange(len(texts)) if len(texts) == 2 else np.zeros(0, np.int64)
    result, folder = spilled(tmp_path, texts, encoder, Removed({"exact_duplicate": losers}))
    assert contents(folder, np.uint16) == {}
    assert result.tokens == 0


def test_the_removed_rows_of_a_batch_are_found_without_a_scan_of_the_splits() -> None:
    removed = Removed({"exact_duplicate": np.arange(0, 3_000_000, 3), "near_duplicate": np.arange(1, 30, 3)})
    start = time.process_time()
    parts = [removed.within(first, 600) for first in range(0, 3_000_000, 600)]
    assert time.process_time() - start < 1, "5,000 scans of a million rows take several seconds"
    assert all((part.rows["exact_duplicate"] == np.arange(0, 600, 3)).all() for part in parts)
    assert [len(part.rows["near_duplicate"]) for part in parts[:2]] == [10, 0]


def test_removed_rows_out_of_order_are_refused_rather_than_lost() -> None:
    with pytest.raises(AssertionError):
        Removed({"exact_duplicate": np.array([4, 1])})


@pytest.mark.parametrize("loser", [-1, 60])
def test_a_loser_that_does_not_exist_stops_the_build(encoder: Encoder, tmp_path: Path, loser: int) -> None:
    with pytest.raises(BuildError, match="does not exist; the file has only 60 rows"):
        spilled(tmp_path, TEXTS, encoder, Removed({"x": np.array([loser])}))


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50), st.integers(1, module.MAX_PARTITIONS))
def test_partitions_follow_the_order_of_hashes(hashes: list[int], partitions: int) -> None:
    parts = range_of(np.array(sorted(hashes), np.uint64), partitions)
    assert parts.tolist() == [(h >> 32) * partitions >> 32 for h in sorted(hashes)]
    assert (np.diff(parts) >= 0).all()
    assert 0 <= parts[0] <= parts[-1] < partitions
    for key, part in zip(sorted(hashes), parts.tolist(), strict=True):
        assert range_start(part, partitions) <= key < range_start(part + 1, partitions)


def test_partitions_are_as_many_as_the_memory_needs() -> None:
    assert choose_partitions(0, 0, 1 << 30) == 1
    assert choose_partitions(1 << 20, 100, 1 << 30) == 1
    assert choose_partitions(10**12, 10**9, 10**9) == 3200
    assert choose_partitions(10**12, 10**9, 10**9, token_bytes=2) < 3200
    assert choose_partitions(60 * 10**12, 10**10, 2 * 10**9) > 80_000
    with pytest.raises(
        RecipeError,
        match=r"memory: .* at most 1,000,000 are possible: set `memory` to 2,666,667,200,000 or more",
    ):
        choose_partitions(10**18, 10**9, 10**9)


def test_a_partition_is_as_small_as_little_memory_needs() -> None:
    text, documents, shard = 10**9, 10**6, 1 << 26
    for memory in (1 << 29, 1 << 30):
        partitions = choose_partitions(text, documents, memory, shard_bytes=shard)
        held = (text * 2 + documents * 400) / partitions + 2 * shard
        assert 0.5 * memory < held <= 0.75 * memory
    assert choose_partitions(text, documents, 1 << 28, shard_bytes=1 << 28) < 100  # shards that cannot fit


def test_the_parity_task_reads_a_bounded_number_of_splits(tmp_path: Path) -> None:
    facts = facts_of({"ledger": Ledger().to_dict()}, {DOCUMENTS_FILE: Output(1, "0" * 32)})
    splits = [Commit("clean", str(n), tmp_path / str(n), "", facts) for n in range(1000)]
    tokenizer = TokenizerFile(Artifact(tmp_path / "tokenizer.json", content="0" * 32), EOS)
    files = parity_task(splits, tokenizer, ()).args["documents"]
    numbers = [int(file.path.parent.name) for file in files]
    assert len(numbers) == 256
    assert sorted(set(numbers)) == numbers
    assert (numbers[0], numbers[-1]) == (0, 996)
    assert len(parity_task(splits[:3], tokenizer, ()).args["documents"]) == 3
