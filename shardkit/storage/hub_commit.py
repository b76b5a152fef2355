"""Commits to dataset repositories of the Hugging Face Hub, by `huggingface_hub`.

It asks the Hub which files belong into git and which beside it, sends the contents of the latter that the Hub
does not have (git LFS, in one request or in parts, or Xet), and then names all of them in one commit. Where
this is cut short, nothing is seen of it, and what was sent need not be sent again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardkit.errors import MissingExtraError
from shardkit.storage.hub_client import hub_endpoint, hub_token, status_error
from shardkit.storage.store import StoreError, TransientError, open_source

_UPLOADS = 8  # contents of one commit, at a time
_HTTP_LIBRARIES = ("requests", "urllib3", "httpx", "httpcore")  # and httpx2


class OtherCommitError(Exception):
    """The branch has moved on from the commit that ours was to follow."""


def make_commit(
    repository: str,
    branch: str,
    files: Mapping[str, bytes | Path],
    deleted: Sequence[str],
    subject: str,
    where: str,
    parent: str | None,
) -> str:
    """Write `files` and delete others, by their paths in the repository; return the commit's hash.

    OtherCommitError if `parent` is given and is no longer the branch's last commit. StoreErrors name `where`.
    """
    try:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "hub", where) from error
    for data in files.values():
        open_source(where, data).close()  # StoreError if it cannot be read
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
    except Exception as error:  # the library's HTTP client, and so its errors, depend on its version
        raise _translated(where, error, parent) from error
    return str(made.oid)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Our callers show progress of their own."""
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
    """The error of a commit: by the HTTP answer behind it, if there was one."""
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
    # hf_xet has one error for all that goes wrong; what the library refuses by itself is a ValueError.
    by_http = any(type(each).__module__.startswith(_HTTP_LIBRARIES) for each in chain)
    if by_http or isinstance(error, OSError | RuntimeError):
        return TransientError(where, text)
    return StoreError(where, text)
