from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardkit.errors import BuildError
from shardkit.writers.dedup import tables as array_rows
from shardkit.writers.dedup.population import DOCUMENT
from shardkit.writers.dedup.tables import RowFile
from shardkit.writers.execution.artifacts import Artifact


@pytest.mark.parametrize("piece_bytes", [1, 3000, 1 << 20])
def test_rows_are_those_of_the_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(array_rows, "_PIECE_BYTES", piece_bytes)
    rng = np.random.default_rng(1)
    table = rng.integers(0, 1 << 32, (2000, 112), np.uint32)
    documents = np.zeros(2000, DOCUMENT)
    documents["id"], documents["row"] = rng.integers(0, 256, (2000, 16)), np.arange(2000)
    for name, array in {"table": table, "documents": documents}.items():
        np.save(tmp_path / f"{name}.npy", array)
        file = RowFile(Artifact(tmp_path / f"{name}.npy"))
        assert (file.rows, file.row_shape) == (2000, array.shape[1:])
        picks = [
            [],
            [0],
            [1999],
            [0, 1, 2, 30, 31, 1000, 1999],
            sorted(rng.choice(2000, 700, False)),
            range(2000),
        ]
        for rows in picks:
            wanted = np.array(rows, np.int64)
            assert np.array_equal(file.read(wanted), array[wanted])


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    np.save(path, np.arange(1000))
    file = RowFile(Artifact(path))
    path.write_bytes(path.read_bytes()[:-1])
    assert file.read(np.array([0, 998])).tolist() == [0, 998]
    with pytest.raises(BuildError, match="is shorter than its header says"):
        file.read(np.array([0, 999]))
    with pytest.raises(BuildError, match=r"is 8,127 bytes, its header says \(1000,\) of int64"):
        RowFile(Artifact(path))
