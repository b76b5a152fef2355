"""Commits to dataset repositories of the Hugging Face Hub, by `huggingface_hub`.

The library asks the Hub which files it stores in git and which outside. It uploads the contents of the files
outside of git, unless the Hub has them (by git LFS, in one request or in parts, or by Xet), and then adds all
files in one commit. After an interruption, no file is visible, and uploaded contents need not be sent again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardkit.errors import MissingExtraError
from shardkit.storage.hub_client import hub_endpoint, hub_token, status_error
from shardkit.storage.store import StoreError, TransientError, open_source

_UPLOADS = 8  # maximum number of files of a commit that are uploaded in parallel
_HTTP_LIBRARIES = ("requests", "urllib3", "httpx", "httpcore")  # prefixes of module names, such as httpx2


class OtherCommitError(Exception):
    """The commit that was given as the parent is no longer the branch's last commit."""


def make_commit(
    repository: str,
    branch: str,
    files: Mapping[str, bytes | Path],
    deleted: Sequence[str],
    subject: str,
    where: str,
    parent: str | None,
) -> str:
    """Write `files` and delete the paths in `deleted` in one commit; return the commit's hash.

    Paths are relative to the repository. Raises OtherCommitError if `parent` is given and is no longer the
    branch's last commit; StoreErrors name `where`.
    """
    try:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "hub", where) from error
    for data in files.values():
        open_source(where, data).close()  # raises StoreError if the file cannot be read
    api = HfApi(endpoint=hub_endpoint(where), token=hub_token() or False, library_name="shardkit")
    try:
        operations: list[Any] = [
            CommitOperationAdd(path_in_repo=path, path_or_fileobj=data) for path, data in files.items()
        ]
        operations += [CommitOperationDelete(path_in_repo=path, is_folder=False) for path in deleted]
        with _without_progress_bars():
            made = api.create_commit(
                repo_id=repository,
                operations=operations,
                commit_message=subject,
                repo_type="dataset",
                revision=branch,
                parent_commit=parent,
                num_threads=_UPLOADS,
            )
    except Exception as error:  # the library's versions use different HTTP clients with different errors
        raise _translated(where, error, parent) from error
    return str(made.oid)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Disable the library's progress bars in the block, because shardkit shows its own."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _translated(where: str, error: Exception, parent: str | None) -> Exception:
    """Return the error to raise for a failed commit, by the HTTP answer in its causes if there is one."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    for each in chain:
        response = getattr(each, "response", None)
        status = getattr(response, "status_code", None)
        if isinstance(each, StoreError):
            return each
        if isinstance(status, int):
            if status == 412 and parent is not None:
                return OtherCommitError()
            found = status_error(where, status, getattr(response, "headers", {}), writes=True)
            return StoreError(where, found.problem, status=status) if status == 404 else found
    text = f"{type(error).__name__}: {error}"[:300]
    # hf_xet raises one class for all failures; the library itself raises ValueErrors.
    by_http = any(type(each).__module__.startswith(_HTTP_LIBRARIES) for each in chain)
    if by_http or isinstance(error, OSError | RuntimeError):
        return TransientError(where, text)
    return StoreError(where, text)
