"""Open stores by URL, and read paths as users write them in options, recipes and on the command line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

from shardkit.errors import PathError
from shardkit.storage.store import StorageOptions, Store, StoreError

__all__ = ["is_remote", "local_path", "open_store", "split_url"]


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Return whether `url` is not a path on this machine (file:// is one)."""
    text = os.fspath(url)
    return "://" in text and not text.lower().startswith("file://")


# Of two letters or more, as in browsers: "a:/b" is a folder. `pathlib.Path` removes the second slash.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def local_path(url: str | os.PathLike[str], option: str | None = None) -> Path:
    """Return the path on this machine that `url` names: a path, "~" expanded, or a file:// URL.

    PathError, which begins with the name of the `option`, for any other scheme, for a variable of the shell,
    which would be taken literally, and for nothing.
    """
    text = os.fsdecode(url)
    where = repr(text) if option is None else f"{option}: {text!r}"
    scheme = _SCHEME.match(text)
    if scheme is not None and scheme[1].lower() == "file":
        return _path_of_file_url(text, where)
    if not text or "\0" in text:
        raise PathError(f"{where} is not a path: it is empty or has a NUL character")
    if scheme is not None or "://" in text:
        hint = "" if "://" in text else "; pathlib.Path removes slashes of URLs: give URLs as text"
        raise PathError(f"{where} is a URL, and must be a path on this machine{hint}")
    if text.startswith("$"):
        name = re.match(r"\$\{?(\w*)", text)
        known = f' (in Python, os.environ["{name[1]}"])' if name and name[1] else ""
        raise PathError(
            f"{where} begins with a variable, which is not expanded: give its value{known}; "
            f"a folder of this very name is ./{text}"
        )
    if text.startswith("~"):
        return _expanded(text, where)
    path = Path(text)  # which drops the "./" that protects an odd name
    return path.absolute() if str(path)[:1] in ("$", "~") or _SCHEME.match(str(path)) else path


def _expanded(text: str, where: str) -> Path:
    """Return the path that begins with "~" or "~user"."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        if os.path.lexists(text):  # as in a shell, where "~" in front of no user's name is a plain character
            return Path(text).absolute()
        problem = "HOME is not set" if text.partition("/")[0] == "~" else "there is no such user"
        raise PathError(f"{where}: {problem}; give the whole path") from error


def _path_of_file_url(text: str, where: str) -> Path:
    """Return the path of file:///path, file://localhost/path or file:/path, percent signs decoded."""
    rest = text.partition(":")[2]
    if rest.startswith("//"):
        host, slash, rest = rest[2:].partition("/")
        if not slash or host.lower() not in ("", "localhost"):
            raise PathError(f"{where} names the host {host!r}; write file:///path, or the path")
        rest = f"/{rest}"
    path = unquote(rest)
    if "\0" in path:
        raise PathError(f"{where} has a NUL character")
    return Path(path)


def split_url(url: str) -> tuple[str, str]:
    """Split the URL of a remote file into the URL of its folder and its name."""
    head, _, name = url.rstrip("/").rpartition("/")
    return (head, name) if "://" in head and not head.endswith(":/") else (url.rstrip("/"), "")


def open_store(url: str | os.PathLike[str], options: StorageOptions | None = None) -> Store:
    """Open the store at `url`: a path or file://, s3://bucket/prefix, hf://datasets/org/name, memory://name,
    or any URL of fsspec.

    Nothing is contacted yet. StoreError if the URL is not valid; MissingExtraError if a package is missing.
    """
    options = options or StorageOptions()
    text = os.fspath(url)
    if not is_remote(text):
        from shardkit.storage.local import LocalStore

        return LocalStore(local_path(text))
    scheme = text.partition("://")[0].lower()
    if scheme == "s3":
        from shardkit.storage.s3 import S3Store

        return S3Store(text, options)
    if scheme == "hf":
        from shardkit.storage.hub import HubStore

        return HubStore(text, options)
    if scheme == "memory":
        from shardkit.storage.memory import MemoryStore

        return MemoryStore(text)
    if not scheme.isalnum():
        raise StoreError(
            text, "not a valid URL: expected s3://bucket/prefix, file:///path or a URL of fsspec"
        )
    from shardkit.storage.fsspec_store import FsspecStore

    return FsspecStore(text)
