"""The input files of a recipe: what they are called, where they lie, and how they are opened.

Files are named relative to the recipe's folder with "/" between the parts (a path given as absolute and
outside that folder stays absolute), so a document keeps its identity when the folder moves. Everything that
reads an input opens it with `open_input`, wherever it lies.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardkit.errors import BuildError, RecipeError
from shardkit.writers.file_names import expand_path
from shardkit.writers.recipe import InputConfig, Recipe

__all__ = ["InputFile", "check_unchanged", "find_files", "open_input"]


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file as it was found. Plain data: may be pickled, compared and hashed."""

    name: str  # what its documents' ids are made from
    path: str  # where it is on this machine
    bytes: int
    version: int | str  # changes when the file is written to: its modification time in ns

    @property
    def identity(self) -> str:
        """The same for two ways to say the same file."""
        return str(Path(self.path).resolve())


def find_files(recipe: Recipe, config: InputConfig, key: str) -> dict[str, InputFile]:
    """{name: file} of an input, sorted by name; `key` is its key path in the recipe, for errors.

    RecipeError when it matches nothing, or what is no regular file.
    """
    files = {}
    for path in expand_path(recipe.folder, config.path):
        try:
            found = path.stat()
        except OSError as error:
            raise RecipeError(f"{key}: {path}: {error.strerror or error}") from error
        if not stat.S_ISREG(found.st_mode):
            raise RecipeError(f"{key}: {path} is not a regular file")
        name = _name_of(path, recipe.folder, absolute=Path(config.path).is_absolute())
        try:
            name.encode()
        except UnicodeEncodeError:
            raise RecipeError(f"{key}: file name {name!r} is not UTF-8; rename the file") from None
        files[name] = InputFile(name, str(path), found.st_size, found.st_mtime_ns)
    if not files:
        raise RecipeError(f"{key}: {config.path} matches no file (looked in {recipe.folder})")
    return dict(sorted(files.items()))


def open_input(file: InputFile) -> BinaryIO:
    """The file for reading in pieces, seekable; OSError with an errno when it cannot be read."""
    return Path(file.path).open("rb")


def check_unchanged(files: Iterable[InputFile]) -> None:
    """BuildError if one was written to since it was found."""
    for file in files:
        try:
            found = Path(file.path).stat()
        except OSError as error:
            raise BuildError(f"{file.path}: cannot be read: {error.strerror or error}") from error
        if (found.st_size, found.st_mtime_ns) != (file.bytes, file.version):
            raise BuildError(f"{file.path}: changed while the build ran; run it again")


def _name_of(path: Path, folder: Path, *, absolute: bool) -> str:
    relative = os.path.relpath(path, folder)
    outside = relative == ".." or relative.startswith(".." + os.sep)
    return Path(path if absolute and outside else relative).as_posix()
