from __future__ import annotations

import pickle

from shardkit.errors import MissingExtraError, ShardError


def test_a_shard_error_says_where_and_survives_a_process_border() -> None:
    error = ShardError("a/shard.00017.mds", "sample 412 is cut off", offset=8_421_376)
    assert str(error) == "a/shard.00017.mds: byte 8,421,376: sample 412 is cut off"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.file, again.offset) == (str(error), error.file, error.offset)


def test_a_missing_extra_says_what_to_install() -> None:
    error = pickle.loads(pickle.dumps(MissingExtraError("Pillow", "formats", "reading images")))
    assert str(error) == "reading images needs Pillow: pip install 'shardkit[formats]'"
    assert isinstance(error, ImportError)
