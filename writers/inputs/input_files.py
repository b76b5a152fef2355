"""The input files of a recipe: what they are called, where they lie, and how they are opened.

The name of a file is what its documents' ids are made from:
- of a local file its path relative to the input's `base`, or without one to the recipe's folder, with "/"
  between the parts (without `base`, an absolute path outside that folder stays absolute);
- of a URL what follows the input's `base`, or without one the whole URL, without the query of a web address.
So documents keep their ids, and the dataset its shards, when recipe and corpus move together, or with a
`base` that moves with the corpus: from data/ next to the recipe to /mnt/data/ with `base: /mnt`, or to
s3://bucket/corpus/data/ with `base: s3://bucket/corpus`.

Everything that reads an input opens it with `open_input`, wherever it lies.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from shardkit.errors import BuildError, RecipeError
from shardkit.storage.store import StorageOptions, StoreError
from shardkit.storage.url import is_remote
from shardkit.writers.inputs.file_names import expand_path
from shardkit.writers.recipe import InputConfig, Recipe

__all__ = ["InputFile", "check_unchanged", "find_files", "open_input"]


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file as it was found. Plain data: may be pickled, compared and hashed."""

    name: str  # what its documents' ids are made from
    path: str  # where it is: a path of this machine, or a URL
    bytes: int
    version: int | str  # changes when the file is written to: its modification time in ns, or its ETag
    storage: StorageOptions | None = None  # how a URL is reached

    @property
    def is_remote(self) -> bool:
        return is_remote(self.path)

    @property
    def identity(self) -> str:
        """The same for two ways to say the same file."""
        return self.path if self.is_remote else str(Path(self.path).resolve())


def find_files(
    recipe: Recipe, config: InputConfig, key: str, storage: StorageOptions | None = None
) -> dict[str, InputFile]:
    """{name: file} of an input, sorted by name; `key` is its key path in the recipe, for errors.

    RecipeError when it matches nothing, what is no regular file, or what cannot be reached.
    """
    if is_remote(config.path):
        files = _find_remote(config, key, storage)
    else:
        files = _find_local(recipe, config, key)
    for name in files:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise RecipeError(f"{key}: file name {name!r} is not UTF-8; rename the file") from None
    return dict(sorted(files.items()))


def open_input(file: InputFile) -> BinaryIO:
    """The file for reading in pieces, seekable; OSError with an errno when it cannot be read."""
    if file.is_remote:
        from shardkit.writers.inputs.input_remote import open_url

        return open_url(file.path, file.bytes, str(file.version), file.storage)
    return Path(file.path).open("rb")


def check_unchanged(files: Iterable[InputFile]) -> None:
    """BuildError if a local file was written to since it was found; reads of a URL see that."""
    for file in files:
        if file.is_remote:
            continue
        try:
            found = Path(file.path).stat()
        except OSError as error:
            raise BuildError(f"{file.path}: cannot be read: {error.strerror or error}") from error
        if (found.st_size, found.st_mtime_ns) != (file.bytes, file.version):
            raise BuildError(f"{file.path}: changed while the build ran; run it again")


def _find_local(recipe: Recipe, config: InputConfig, key: str) -> dict[str, InputFile]:
    files = {}
    for path in expand_path(recipe.folder, config.path):
        try:
            found = path.stat()
        except OSError as error:
            raise RecipeError(f"{key}: {path}: {error.strerror or error}") from error
        if not stat.S_ISREG(found.st_mode):
            raise RecipeError(f"{key}: {path} is not a regular file")
        name = _name_of(path, recipe, config, key)
        files[name] = InputFile(name, str(path), found.st_size, found.st_mtime_ns)
    if not files:
        raise RecipeError(f"{key}: {config.path} matches no file (looked in {recipe.folder})")
    return files


def _find_remote(config: InputConfig, key: str, storage: StorageOptions | None) -> dict[str, InputFile]:
    from shardkit.writers.inputs.input_remote import expand_url

    try:
        found = expand_url(config.path, storage)
    except StoreError as error:
        raise RecipeError(f"{key}: {error}") from error
    if not found:
        raise RecipeError(f"{key}: {config.path} matches no object")
    files = {}
    for url, info in found.items():
        name = _name_of_url(url, config.base, key)
        files[name] = InputFile(name, url, info.bytes, info.version, storage)
    return files


def _name_of(path: Path, recipe: Recipe, config: InputConfig, key: str) -> str:
    relative = os.path.relpath(path, recipe.folder / (config.base or ""))
    outside = relative in (".", "..") or relative.startswith(".." + os.sep)
    if outside and config.base is not None:
        raise RecipeError(f"{key.removesuffix('path')}base: {path} does not lie below {config.base}")
    return Path(path if outside and Path(config.path).is_absolute() else relative).as_posix()


def _name_of_url(url: str, base: str | None, key: str) -> str:
    if urlsplit(url).scheme.lower() in ("http", "https"):
        url = url.partition("?")[0]  # a signature, which changes and is nobody's business
    if base is None:
        return url
    name = url.removeprefix(base.rstrip("/") + "/")
    if name == url:
        raise RecipeError(f"{key.removesuffix('path')}base: {url} does not lie below {base}")
    return name
