"""Every option of a loader that is a path on this machine reads it the same way, and makes no folder "~"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardkit.cache import CacheOptions
from shardkit.errors import PathError
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import Layout, grouped
from shardkit.loaders.pytorch import StreamingDataset
from shardkit.storage.memory import MemoryStore
from support.loader_data import make_dataset
from support.remote_harness import fresh_url, put_folder

OPTIONS = ["cache_dir", "usage_log"]


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A remote dataset of 53 rows; home and working folder are empty folders."""
    remote = fresh_url()
    put_folder(make_dataset(tmp_path / "data", "mds"), MemoryStore(remote))
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return remote


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("written", ["~/it", "file://{home}/it"])
def test_a_tilde_and_a_file_url_lead_to_the_folder_that_is_meant(
    url: str, tmp_path: Path, option: str, written: str
) -> None:
    place = written.format(home=tmp_path / "home")
    with StreamingLoader(url, batch_size=8, **grouped({"tensors": "numpy", option: place})) as loader:
        assert len(list(loader)) == 7
    assert [entry.name for entry in (tmp_path / "home").iterdir()] == ["it"]
    assert not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("written", ["$HOME/it", "s3://bucket/it", "", "~nobody-of-this-name/it"])
def test_what_is_no_path_here_is_refused_before_anything_is_made(
    url: str, tmp_path: Path, option: str, written: str
) -> None:
    kinds: tuple[Any, ...] = (StreamingLoader, StreamingDataset)
    for kind in kinds:
        with pytest.raises(PathError, match=f"^{option}: "):
            kind(url, batch_size=8, **{option: written})
    assert not list((tmp_path / "here").iterdir())


def test_a_dataset_is_opened_below_the_home_folder(url: str, tmp_path: Path) -> None:
    make_dataset(tmp_path / "home" / "set", "mds")
    for place in ("~/set", Path("~/set"), "~/set/index.json", f"file://{tmp_path}/home/set"):
        with StreamingLoader(place, batch_size=8, layout=Layout(tensors="numpy")) as loader:
            assert len(list(loader)) == 7
    with pytest.raises(PathError, match="begins with a variable"):
        StreamingLoader("$HOME/set", batch_size=8)
    with pytest.raises(PathError, match="removes slashes of URLs"):
        StreamingLoader(Path("s3://bucket/set"), batch_size=8)


def test_the_options_of_a_cache_read_their_folder_alike() -> None:
    with pytest.raises(PathError, match=r"^cache_dir: "):
        CacheOptions(folder="gs://bucket/cache")
