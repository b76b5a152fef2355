from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa

from shardkit.hashing import keyed_hashes, keyed_id_hashes
from shardkit.kernels.text_arrays import text_offsets
from shardkit.writers.rows.documents import (
    content_ranks,
    document_ids,
    id_bytes,
    text_digests,
)


def test_document_ids_are_pinned_because_every_order_hangs_on_them() -> None:
    assert document_ids("data/a.jsonl.gz", [0, 1])[1].hex() == "2fa5fdb045348e669e1fd5a1639791a7"


def test_documents_differ_by_file_and_by_record() -> None:
    ids = document_ids("a", range(100)) + document_ids("b", range(100))
    assert len(set(ids)) == 200
    assert {len(i) for i in ids} == {16}


def test_keyed_hashes_depend_on_seed_and_purpose_but_not_on_company() -> None:
    ids = document_ids("a", range(50))
    whole = keyed_hashes(ids, 17, "shuffle")
    assert whole.dtype == np.uint64
    assert np.array_equal(whole[10:20], keyed_hashes(ids[10:20], 17, "shuffle"))
    assert not np.any(whole == keyed_hashes(ids, 18, "shuffle"))
    assert not np.any(whole == keyed_hashes(ids, 17, "rows"))


def test_hashes_of_ids_as_an_array_are_those_of_ids_one_by_one() -> None:
    ids = document_ids("a", range(300))
    array = pa.array([b"\xff" * 16, *ids], pa.binary(16))[1:]  # which begins amid its buffer
    for seed in (0, 17, 1 << 60):
        expected = keyed_hashes(ids, seed, "shuffle")
        assert np.array_equal(keyed_id_hashes(id_bytes(array), seed, "shuffle"), expected)


def test_content_ranks_are_halves_of_the_digest_and_of_the_id() -> None:
    ids, texts = document_ids("a", range(4)), pa.array(["a", "", "ünï", "a"], pa.large_string())
    digests = text_digests(texts)
    ranks = content_ranks(digests, pa.array([ids[0], *ids], pa.binary(16))[1:])
    assert [bytes(rank) for rank in ranks] == [
        bytes(d)[:8] + i[:8] for d, i in zip(digests, ids, strict=True)
    ]
    assert content_ranks(digests[:0], pa.array([], pa.binary(16))).shape == (0, 16)


def test_keyed_hashes_fill_the_range_evenly() -> None:
    top = (keyed_hashes(document_ids("a", range(16_000)), 17, "shuffle") >> np.uint64(60)).astype(int)
    counts = np.bincount(top, minlength=16)
    assert np.all(np.abs(counts - 1000) < 5 * np.sqrt(1000))


def test_text_offsets_lead_to_every_text_also_in_slices_and_empty_arrays() -> None:
    texts = pa.array(["a", "", "ünï", "d" * 1000], pa.large_string())
    for start, stop in [(0, 4), (1, 3), (2, 4), (3, 3), (0, 0)]:
        part = texts[start:stop]
        offsets = text_offsets(part)
        data = part.buffers()[2].to_pybytes()
        found = [data[a:b].decode() for a, b in pairwise(offsets.tolist())]
        assert found == part.to_pylist()
    assert text_offsets(pa.array([], pa.large_string())).tolist() == [0]
