from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.writers.kernels import numba_support as module
from shardkit.writers.kernels.numba_support import kernel_cache


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_kernels_are_kept_by_the_version_of_all_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [folder] = kernel_cache().values()
    assert Path(folder).parent == tmp_path / "cache" / "shardkit"
    assert Path(folder).is_dir()
    assert kernel_cache() == {"NUMBA_CACHE_DIR": folder}
    (tmp_path / "a.py").write_text("import numba\n")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "kernels" / "numba_support.py"))
    [other] = kernel_cache().values()
    (tmp_path / "b.py").write_text("no kernel in here\n")
    assert kernel_cache() == {"NUMBA_CACHE_DIR": other}
    (tmp_path / "a.py").write_text("import numba as nb\n")
    os.utime(folder, (0, 0))
    [last] = kernel_cache().values()
    assert not Path(folder).exists()
    assert Path(other).exists()
    assert len({folder, other, last}) == 3


def test_the_user_s_own_place_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/somewhere")
    assert kernel_cache() == {}


def test_without_a_place_workers_compile_for_themselves(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert kernel_cache() == {}


EXTENDED = """
import sys, types
from importlib import metadata
from shardkit.writers.kernels.numba_support import load_extensions, start_numba

sys.modules["extension"] = types.SimpleNamespace(init=lambda: print("loaded"))
entry = metadata.EntryPoint("init", "extension:init", "numba_extensions")
metadata.entry_points = lambda: metadata.EntryPoints([entry])
start_numba()
print("started")
load_extensions()
import numba
print(numba.njit(lambda number: number + 1)(1))
"""


def test_extensions_of_numba_are_loaded_for_code_of_the_user_only() -> None:
    done = subprocess.run([sys.executable, "-c", EXTENDED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["started", "loaded", "2"]
