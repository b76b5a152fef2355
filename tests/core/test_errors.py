from __future__ import annotations

import contextlib
import pickle
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import MissingExtraError, ShardError, ShardkitError, ShardNotFoundError, warn_user
from shardkit.storage import StoreError
from support.loader_data import make_dataset
from support.remote_harness import fresh_url

ROOT = Path(__file__).resolve().parents[2]


def test_a_shard_error_says_where_and_survives_a_process_border() -> None:
    error = ShardError("a/shard.00017.mds", "sample 412 is cut off", offset=8_421_376)
    assert str(error) == "a/shard.00017.mds: byte 8,421,376: sample 412 is cut off"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.file, again.offset) == (str(error), error.file, error.offset)


def test_what_is_not_there_is_also_pythons_error_for_that(tmp_path: Path) -> None:
    error = pickle.loads(pickle.dumps(ShardNotFoundError("a/b.mds", "is not there", offset=7)))
    assert str(error) == "a/b.mds: byte 7: is not there"
    for path in (tmp_path, tmp_path / "missing", fresh_url(), f"{fresh_url()}/a.tar"):
        with pytest.raises(FileNotFoundError) as caught:
            shardkit.open_dataset(path)
        assert isinstance(caught.value, ShardNotFoundError)
        assert str(caught.value).startswith(str(path).removesuffix("/a.tar"))
    make_dataset(tmp_path / "whole", "mds")
    (tmp_path / "whole" / "shard.00002.mds").unlink()
    with pytest.raises(FileNotFoundError, match=r"shard\.00002\.mds: cannot be opened"):
        list(shardkit.open_dataset(tmp_path / "whole"))


def test_a_missing_extra_says_what_to_install() -> None:
    error = pickle.loads(pickle.dumps(MissingExtraError("Pillow", "formats", "reading images")))
    assert str(error) == "reading images needs Pillow: pip install 'shardkit[formats]'"
    assert isinstance(error, ImportError)


def of_shardkit(name: str, source: str) -> Callable[..., None]:
    """The function `name` of `source`, as if that were a module of shardkit."""
    module = types.ModuleType("shardkit.deep.module")
    module.__dict__.update(warn_user=warn_user, contextlib=contextlib, threading=threading)
    exec(compile(source, "/shardkit/deep/module.py", "exec"), module.__dict__)
    function: Callable[..., None] = getattr(module, name)
    return function


@pytest.mark.parametrize(
    "source",
    [
        "def call(): warn_user('so')",
        "def call():\n  def deep(n): deep(n - 1) if n else warn_user('so')\n  deep(7)",
        "@contextlib.contextmanager\ndef opened():\n  warn_user('so')\n  yield\n"
        "def call():\n  with opened(): pass",
    ],
    ids=["at once", "deep", "through the standard library"],
)
def test_a_warning_points_to_the_users_line(source: str) -> None:
    call = of_shardkit("call", source)
    with pytest.warns(RuntimeWarning, match="so") as caught:
        call()
    assert caught[0].filename == __file__
    assert Path(__file__).read_text().splitlines()[caught[0].lineno - 1].strip() == "call()"


def test_a_warning_of_a_thread_of_ours_points_to_the_line_that_warns() -> None:
    source = "def call():\n t = threading.Thread(target=warn_user, args=('so',))\n t.start()\n t.join()"
    with pytest.warns(RuntimeWarning, match="so") as caught:
        of_shardkit("call", source)()
    assert caught[0].filename == threading.__file__


def test_a_warning_is_shown_once_for_each_line_of_the_user() -> None:
    call = of_shardkit("call", "def call(): warn_user('so')")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            call()
        call()
    assert len(caught) == 2


def test_every_warning_of_shardkit_points_to_the_user() -> None:
    folders = [Path(shardkit.__file__).parent, ROOT / "writers", ROOT / "loaders"]
    files = {file.resolve() for folder in folders for file in folder.rglob("*.py")}
    own = [file for file in files if "warnings.warn(" in file.read_text() or "stacklevel" in file.read_text()]
    assert own == [], "use shardkit.errors.warn_user"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("Bearer hf_SECRETSECRETSECRET is bad", "Bearer *** is bad"),
        ("token hf_SECRETSECRETSECRET", "token ***"),
        ("authorization: bearer abc.def-ghi", "authorization: bearer ***"),
        ("Basic dXNlcjpwYXNzd29yZA== refused", "Basic *** refused"),
        ("https://h/x?X-Amz-Signature=abc&y=1", "https://h/x?X-Amz-Signature=***&y=1"),
        ("https://h/x?a=1&sig=a%2Fb&z", "https://h/x?a=1&sig=***&z"),
        ("http://user:pw@host/a and ftp://u:p@h", "http://host/a and ftp://h"),
        ("http:/user:pw@host/a", "http:/host/a"),
        ("\x1b[31mred\x9b0m\x07", r"\x1b[31mred\x9b0m\x07"),
        ("abc\u202edef\u2066\u2028", r"abc\u202edef\u2066\u2028"),
        ("a\rb\nc\td", "a\\rb\nc\td"),
        ("s3://bucket/a@b/c, basic usage, bearer", "s3://bucket/a@b/c, basic usage, bearer"),
        ("half \ud800", "half \\ud800"),
    ],
)
def test_messages_have_no_secrets_and_nothing_that_commands_a_terminal(text: str, clean: str) -> None:
    assert str(ShardkitError(text)) == clean
    assert str(ShardError("file", text)) == f"file: {clean}"
    store = StoreError(text, text)
    assert (store.where, store.problem) == (clean, clean)
    assert str(pickle.loads(pickle.dumps(store))) == str(store) == f"{clean}: {clean}"
    assert len(str(StoreError("where", "x" * 10**6))) < 3000
