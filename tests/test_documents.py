from __future__ import annotations

import numpy as np

from shardkit.writers.documents import document_ids, keyed_hashes


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


def test_keyed_hashes_fill_the_range_evenly() -> None:
    top = (keyed_hashes(document_ids("a", range(16_000)), 17, "shuffle") >> np.uint64(60)).astype(int)
    counts = np.bincount(top, minlength=16)
    assert np.all(np.abs(counts - 1000) < 5 * np.sqrt(1000))
