"""What all tests of the cache share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.ended_threads import ended_threads


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """No thread of one test is there in the next."""
    with ended_threads():
        yield
