"""Paths as users write them: "~" and file:// are understood, what is no path on this machine is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.errors import PathError, ShardkitError
from shardkit.files import local_path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and working folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("~", ""), ("~/cache", "cache"), ("~/a b/ü", "a b/ü"), ("~//x", "x"),
    ],
)  # fmt: skip
def test_a_tilde_is_the_home_folder(home: Path, written: str, meant: str) -> None:
    assert local_path(written) == home / meant
    assert local_path(Path(written)) == home / meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("file:///nvme/c", "/nvme/c"), ("FILE:///nvme/c", "/nvme/c"), ("file://localhost/nvme/c", "/nvme/c"),
        ("file:/nvme/c", "/nvme/c"), ("file:///a%20b", "/a b"), ("file:///a%23b", "/a#b"),
        ("file:///a#b", "/a#b"), ("file:///a?b", "/a?b"), ("file:///50%", "/50%"), ("file:///$A", "/$A"),
        ("file:///~/x", "/~/x"), ("/a/~/b", "/a/~/b"), ("/a/$b", "/a/$b"), ("a:b/c", "a:b/c"),
        ("2024-01-01T00:00:00/x", "2024-01-01T00:00:00/x"), ("run:1/x", "run:1/x"), ("-x", "-x"),
        ("a:/b", "a:/b"), ("c~", "c~"), ("./x", "x"),
    ],
)  # fmt: skip
def test_a_path_or_a_file_url_is_taken_as_it_is_meant(written: str, meant: str) -> None:
    assert local_path(written) == Path(meant)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("s3://bucket/cache", "is a URL"), ("S3://b", "is a URL"), ("gs://b/c", "is a URL"),
        ("hf://datasets/a/b", "is a URL"), ("dbfs:/mnt/c", "is a URL"), ("memory://x", "is a URL"),
        ("nfs://host/export", "is a URL"), (Path("s3://bucket/cache"), "pathlib.Path removes"),
        ("$HOME/c", r'os.environ\["HOME"\]'), ("${TMP}/c", r'os.environ\["TMP"\]'), ("$", "variable"),
        ("$(pwd)", "variable"), ("file://host/c", "the host 'host'"), ("file://~/c", "the host '~'"),
        ("file://./c", "names the host"), ("file:///a%00b", "NUL"), ("", "empty"), ("a\0b", "NUL"),
        ("~nobody-of-this-name/c", "no such user"),
    ],
)  # fmt: skip
def test_what_would_be_taken_literally_is_refused_by_the_name_of_its_option(
    home: Path, written: str | Path, told: str
) -> None:
    with pytest.raises(PathError, match=told) as raised:
        local_path(written, "cache_dir")
    assert str(raised.value).startswith("cache_dir: ")
    assert isinstance(raised.value, ShardkitError)
    assert isinstance(raised.value, ValueError)
    assert not list(home.iterdir())


def test_a_home_that_nobody_knows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    with pytest.raises(PathError, match="HOME is not set"):
        local_path("~/cache")


@pytest.mark.parametrize("name", ["$x", "~nobody-of-this-name", "s3:/b", "file:/x"])
def test_odd_names_can_be_given_with_a_dot_in_front_and_read_twice(home: Path, name: str) -> None:
    assert local_path(local_path(f"./{name}")) == home / name
