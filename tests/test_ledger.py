from __future__ import annotations

import json

import pytest

from shardkit.errors import ConservationError
from shardkit.writers.ledger import Count, Ledger


def filled() -> Ledger:
    ledger = Ledger(read=Count(10, 100), kept=Count(5, 60))
    ledger.drop("length/short", 2, 15)
    ledger.drop("length/short", 1, 5)
    ledger.quarantine("bad_json", 2, 20)
    return ledger


def test_a_ledger_that_adds_up_passes_and_survives_json() -> None:
    ledger = filled()
    ledger.check("task")
    assert Ledger.from_dict(json.loads(json.dumps(ledger.to_dict()))) == ledger


@pytest.mark.parametrize("change", [Count(1, 0), Count(0, 1), Count(-1, 0)])
def test_one_lost_document_or_byte_is_an_error_that_names_the_task(change: Count) -> None:
    ledger = filled()
    ledger.kept += change
    with pytest.raises(ConservationError, match="clean/00003"):
        ledger.check("clean/00003")


def test_merging_adds_every_reason() -> None:
    total = filled()
    total.merge(filled())
    total.check("all")
    assert total.dropped == {"length/short": Count(6, 40)}
    assert total.quarantined == {"bad_json": Count(4, 40)}
