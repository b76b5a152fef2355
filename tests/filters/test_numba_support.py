from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.kernels import numba_support as module
from shardkit.kernels.numba_support import kernel_cache


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


def test_the_user_s_own_place_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "own"))
    assert kernel_cache() == {}


KERNEL = """
import os, sys, warnings
warnings.simplefilter("always")
from shardkit.kernels.numba_support import kernel_cache
from shardkit.kernels.utf8 import next_character
import numpy as np
print(next_character(np.frombuffer(b"ab", np.uint8), 0), kernel_cache())
"""


def run_kernel(**environment: str) -> tuple[str, str]:
    """What a process that compiles a kernel prints, with an environment of its own."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, done.stderr


def test_without_a_home_kernels_are_kept_in_a_private_temporary_folder(tmp_path: Path) -> None:
    before, own = os.umask(0), tmp_path / f"shardkit-{os.getuid()}"
    try:
        for home in ("/dev/null/home", ""):
            printed, warned = run_kernel(HOME=home, XDG_CACHE_HOME="/dev/null/x", TMPDIR=str(tmp_path))
            assert str(own) in printed
            assert not warned
    finally:
        os.umask(before)
    assert list(own.rglob("*.nbc"))
    assert own.stat().st_mode & 0o777 == 0o700


@pytest.mark.extended
def test_a_temporary_folder_that_others_made_is_not_used(tmp_path: Path) -> None:
    own = tmp_path / f"shardkit-{os.getuid()}"
    own.mkdir()
    own.chmod(0o777)  # machine code that others put there would be run
    printed, warned = run_kernel(HOME="/dev/null/home", TMPDIR=str(tmp_path))
    assert "{'NUMBA_CACHE_DIR': ''}" in printed
    assert warned.count("compiled kernels cannot be kept") == 1
    assert not list(own.iterdir())


@pytest.mark.extended
def test_a_named_folder_that_cannot_be_written_is_replaced(tmp_path: Path) -> None:
    printed, warned = run_kernel(NUMBA_CACHE_DIR="/dev/null/x", XDG_CACHE_HOME=str(tmp_path))
    assert str(tmp_path / "shardkit" / "kernels-") in printed
    assert not warned


@pytest.mark.extended
@pytest.mark.parametrize(
    "damage",
    ["cut", *(pytest.param(damage, marks=pytest.mark.extended) for damage in ("nonsense", "folder"))],
)
def test_damaged_files_of_the_cache_are_written_again(tmp_path: Path, damage: str) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    expected = run_kernel(**environment)
    files = [*tmp_path.rglob("*.nbi"), *tmp_path.rglob("*.nbc")]
    assert files
    for file in files:
        if damage == "folder":
            file.unlink()
            file.mkdir()
        else:
            file.write_bytes(b"" if damage == "cut" else b"\x80\x04nonsense" + bytes(100))
    assert run_kernel(**environment) == expected
    if damage != "folder":
        assert all(file.stat().st_size > 150 for file in tmp_path.rglob("*.nbc"))


EXTENDED = """
import sys, types
from importlib import metadata
from shardkit.kernels.numba_support import load_extensions, start_numba

sys.modules["extension"] = types.SimpleNamespace(init=lambda: print("loaded"))
entry = metadata.EntryPoint("init", "extension:init", "numba_extensions")
metadata.entry_points = lambda: metadata.EntryPoints([entry])
start_numba()
print("started")
load_extensions()
import numba
print(numba.njit(lambda number: number + 1)(1))
"""


@pytest.mark.extended
def test_extensions_of_numba_are_loaded_for_code_of_the_user_only() -> None:
    done = subprocess.run([sys.executable, "-c", EXTENDED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["started", "loaded", "2"]
