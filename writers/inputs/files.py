"""Finds the input files that a recipe's paths match, gives them names, and opens them.

A path is a file, a folder (all files below it), a glob or a list in braces, on this machine or in a store
(patterns.py). In a dataset folder only the listed files are read, and only those of the dataset split to
train on (dataset_folders.py).

Documents' ids are made from the names of their files:
- The name of a local file is its path relative to the input's `base`, or without one to the recipe's folder,
  with "/" between the parts (without `base`, an absolute path outside that folder stays absolute).
- The name of a URL is the part after the input's `base`, or without one the whole URL; the query of a web
  address is left out.
So documents keep their ids, and the dataset its shards, when recipe and corpus move together, or with a
`base` that moves with the corpus: from data/ next to the recipe to /mnt/data/ with `base: /mnt`, or to
s3://bucket/corpus/data/ with `base: s3://bucket/corpus`.

A file in a store is one version of an object: the size and version (S3: the ETag) that the listing contained
when the build began. Every read requires that version, so if an object is replaced during the build, the
build stops and never mixes the two. Objects are not copied to this machine. The branch of a repository
(hf://) is looked up once per input; all its files are read at that commit, and later commits are ignored.
Names contain the branch as written in the recipe, and versions are hashes of contents, so a new commit
changes neither for files that it does not touch.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from os.path import normpath
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from shardkit.errors import RecipeError, warn_user
from shardkit.files import file_version
from shardkit.hashing import digest_of
from shardkit.hints import near_path
from shardkit.storage.object_file import open_object
from shardkit.storage.store import ObjectInfo, ObjectNotFoundError, StorageOptions, StoreError
from shardkit.storage.url import is_remote
from shardkit.writers.inputs.dataset_folders import MAX_LIST_BYTES, Chosen, data_files
from shardkit.writers.inputs.dataset_splits import held_out_names, names_a_split
from shardkit.writers.inputs.path_lists import Line, Root, read_lines, sample, unique
from shardkit.writers.inputs.patterns import (
    Match,
    alternatives,
    expand_path,
    fixed_part,
    key_matches,
)
from shardkit.writers.inputs.remote_files import (
    MissingObjectError,
    connect_root,
    expand_url,
    look_up,
    split_root,
)
from shardkit.writers.recipe.inputs import READER, InputConfig
from shardkit.writers.recipe.recipe import Recipe

_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file as it was found; plain data that may be pickled, compared and hashed."""

    name: str  # the name from which the ids of its documents are made
    path: str  # path or URL
    bytes: int
    version: str  # changes whenever the content does: `local_version`, or the ETag of an object
    storage: StorageOptions | None = None
    digest: str = ""  # xxh3-128 of the bytes if it is known, as of the build's own files
    first_record: int = 0  # number of the file's first record

    @property
    def content(self) -> str:
        """The digest of the file's name, size and version (or known digest), but not of its location."""
        return digest_of([self.name, self.bytes, self.digest or self.version])

    @property
    def is_remote(self) -> bool:
        return is_remote(self.path)


def identities(files: Iterable[InputFile]) -> Iterator[str]:
    """Yield an identity for each file: two paths to the same file have the same identity."""
    folders: dict[str, str] = {}
    for file in files:
        if file.is_remote or Path(file.path).is_symlink():
            yield file.path if file.is_remote else os.path.realpath(file.path)
            continue
        folder, name = os.path.split(file.path)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        yield f"{folders[folder].rstrip('/')}/{name}"


@dataclass(frozen=True, slots=True)
class Found:
    """The files that an input's path matches: those that are read, and those that are not."""

    files: Mapping[str, InputFile]  # files that are read, by name, sorted
    hidden: Sequence[str] = ()  # not read: a name in the path begins with a dot or underscore
    left_out: Mapping[str, str] = field(default_factory=dict)  # not read: {name of a file: why}
    held_out: Sequence[str] = ()  # read, although their names suggest a test split


def find_files(
    recipe: Recipe,
    config: InputConfig,
    key: str,
    storage: StorageOptions | None = None,
    *,
    progress: bool = False,
) -> Found:
    """Find the files of an input; `key` is the key path of its `path` in the recipe, for errors.

    `progress` shows how many files of a long list were found. Raises RecipeError if the path matches nothing,
    or something that is not a regular file or cannot be read.
    """
    if config.storage is not None:
        storage = config.storage.over(storage)
    if config.list:
        listed = _find_listed(recipe, config, key, storage, progress=progress)
        return Found(listed, held_out=held_out_names(listed, ()))
    if is_remote(config.path):
        files, hidden = _find_remote(config, key, storage)
    else:
        files, hidden = _find_local(recipe, config, key)
    chosen = _choose(files, recipe, config, key)
    kept = {name: files[name] for name in sorted(chosen.kept)}
    for name in kept:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise RecipeError(f"{key}: file name {name!r} is not UTF-8; rename the file") from None
    kept = {name: kept[name] for name in sample([*kept], config.files)}
    held_out = [] if names_a_split(config.path) else held_out_names(kept, chosen.of_splits)
    return Found(kept, sorted(hidden), chosen.left_out, held_out)


def _choose(files: Mapping[str, InputFile], recipe: Recipe, config: InputConfig, key: str) -> Chosen:
    """Choose the files that hold documents; skip files of other dataset splits or that describe a dataset."""

    def read(name: str) -> bytes:
        file = files[name]
        if file.bytes > MAX_LIST_BYTES:
            raise RecipeError(f"{key}: {file.path} has {file.bytes:,} bytes; the limit is {MAX_LIST_BYTES:,}")
        try:
            with open_input(file) as stored:
                return stored.read(file.bytes)
        except OSError as error:
            raise RecipeError(f"{key}: {file.path}: {error.strerror or error}") from error

    def is_excluded(name: str) -> bool:
        if is_remote(config.path):
            url = name if config.base is None else f"{config.base.rstrip('/')}/{name}"
            return _is_excluded(config, url)
        return _is_excluded(config, normpath(recipe.folder / (config.base or "") / name), recipe.folder)

    format = config.format if config.reader is None else READER
    return data_files({name: file.bytes for name, file in files.items()}, format, key, read, is_excluded)


def fields_of_path(config: InputConfig, name: str) -> dict[str, str]:
    """Return the fields that `path_fields` finds in a file's name; raise ValueError if it does not match.

    Values of hive folders (key=value) are unquoted, as Spark and Hive quote them; a null value gives no
    field.
    """
    if config.path_fields is None or config.is_sample:
        return {}
    if config.path_fields == "hive":
        parts = [part.partition("=") for part in name.split("/")[:-1] if "=" in part]
        return {unquote(key): unquote(value) for key, _, value in parts if key and value != _HIVE_NULL}
    found = re.search(config.path_fields, name)
    if found is None:
        raise ValueError(f"the expression {config.path_fields!r} does not match the name {name}")
    return {key: value for key, value in found.groupdict().items() if value is not None}


def open_input(file: InputFile) -> BinaryIO:
    """Open a file for reading, with seeks; raise OSError with an errno if it cannot be read."""
    if file.is_remote:
        root, key = split_root(file.path)
        store = connect_root(root, file.storage, has_answered=True)  # it has listed the file
        return open_object(store, ObjectInfo(key, file.bytes, str(file.version)))
    return Path(file.path).open("rb")


def local_version(status: os.stat_result) -> str:
    """Return the value of `InputFile.version` for a local file."""
    return "-".join(map(str, file_version(status)[1:]))


def version_now(file: InputFile) -> tuple[int, str] | None:
    """Return the current (bytes, version) of a local file; None if it is remote or does not exist."""
    if file.is_remote:
        return None
    try:
        status = Path(file.path).stat()
    except OSError:
        return None
    return status.st_size, local_version(status)


def _find_local(recipe: Recipe, config: InputConfig, key: str) -> tuple[dict[str, InputFile], list[str]]:
    """Return ({name: file} for the files that a local path matches, the names of hidden files)."""
    files, hidden = {}, []
    base = f"{normpath(recipe.folder.absolute() / (config.base or '')).rstrip('/')}/"
    try:
        found_paths = expand_path(recipe.folder, config.path)
    except FileNotFoundError as error:
        problem = f"{config.path} lists {error}, which matches no file (looked in {recipe.folder})"
        raise RecipeError(f"{key}: {problem}") from None
    for path, match in found_paths.items():
        where = str(path)
        if _is_excluded(config, where, recipe.folder):
            continue
        name = where.removeprefix(base) if where.startswith(base) else _name_of(path, recipe, config, key)
        if match is Match.HIDDEN:
            hidden.append(name)
            continue
        try:
            found = path.stat()
        except OSError as error:
            raise RecipeError(f"{key}: {path}: {error.strerror or error}") from error
        if not stat.S_ISREG(found.st_mode):
            raise RecipeError(f"{key}: {path} is not a regular file")
        files[name] = InputFile(name, where, found.st_size, local_version(found))
    if not files:
        left = _nothing_left("file", len(found_paths), hidden)
        near = "" if found_paths else f"; {near_path(recipe.folder / config.path)}"
        raise RecipeError(f"{key}: {config.path} matches {left} (looked in {recipe.folder}){near}")
    return files, hidden


def _find_remote(
    config: InputConfig, key: str, storage: StorageOptions | None
) -> tuple[dict[str, InputFile], list[str]]:
    """Return ({name: file} for the objects that a URL matches, the names of hidden objects)."""
    try:
        found = expand_url(config.path, storage)
    except FileNotFoundError as error:
        raise RecipeError(f"{key}: {config.path} lists {error}, which matches no object") from None
    except StoreError as error:
        raise RecipeError(f"{key}: {error}") from error
    files, hidden = {}, []
    for url, (place, info, match) in found.items():
        if _is_excluded(config, url):
            continue
        name = _name_of_url(url, config.base, key)
        if match is Match.HIDDEN:
            hidden.append(name)
        else:
            files[name] = InputFile(name, place, info.bytes, info.version, storage)
    if not files:
        raise RecipeError(f"{key}: {config.path} matches {_nothing_left('object', len(found), hidden)}")
    return files, hidden


def _find_listed(
    recipe: Recipe, config: InputConfig, key: str, storage: StorageOptions | None, *, progress: bool
) -> dict[str, InputFile]:
    """Return {name: file} for the files that the lists at an input's path name, sorted by name.

    Raises RecipeError that names the list and the line of a file that is not there.
    """
    whole = config.model_copy(update={"exclude": (), "base": None})
    find = (
        partial(_find_remote, whole, key, storage)
        if is_remote(config.path)
        else partial(_find_local, recipe, whole, key)
    )
    lines: list[Line] = []
    for file in find()[0].values():
        try:
            with open_input(file) as stored:
                lines += read_lines(stored, file.bytes, file.path, _root_of(recipe, config, file, storage))
        except ValueError as error:
            raise RecipeError(f"{key}: {error}") from None
        except OSError as error:
            raise RecipeError(f"{key}: {file.path}: {error.strerror or error}") from error
    lines, repeated = unique(lines)
    if repeated:
        warn_user(f"{key}: {config.path} names files again in {repeated:,} lines; each file is read once")
    named: dict[str, Line] = {}
    for line in (one for one in lines if not _is_left_out(one, config)):
        name = _name_of_listed(line, recipe, config)
        if (other := named.setdefault(name, line)) is not line:
            clash = f"{other.place} ({other.where}) and {line.place} ({line.where})"
            raise RecipeError(f"{key}: {clash} would both be called {name}; change base")
    if not named:
        matched = f"{len(lines):,} files, but all are excluded by `exclude`" if lines else "no file"
        raise RecipeError(f"{key}: {config.path} lists {matched}")
    most = min((one for one in (config.files, recipe.limit) if one is not None), default=None)
    wanted = {name: named[name] for name in sample(sorted(named), most)}
    remote = [line.place for line in wanted.values() if is_remote(line.place)]
    try:
        found = look_up(remote, storage, progress=progress)
    except MissingObjectError as error:
        line = next(line for line in wanted.values() if line.place == error.url)
        raise RecipeError(f"{key}: {line.where}: {error.error}{_advice(error.error)}") from error
    files = {}
    for name, line in wanted.items():
        if (there := found.get(line.place)) is not None:
            files[name] = InputFile(name, there[0], there[1].bytes, there[1].version, storage)
        else:
            files[name] = _listed_file(name, line, key)
    return files


def _advice(error: Exception) -> str:
    advice = "; remove the line, leave the file out with `exclude`, or set `base` to where the lines start"
    return advice if isinstance(error, ObjectNotFoundError | FileNotFoundError) else ""


def _listed_file(name: str, line: Line, key: str) -> InputFile:
    try:
        status = Path(line.place).stat()
    except OSError as error:
        problem = f"{line.place}: {error.strerror or error}{_advice(error)}"
        raise RecipeError(f"{key}: {line.where}: {problem}") from error
    if not stat.S_ISREG(status.st_mode):
        raise RecipeError(f"{key}: {line.where}: {line.place} is not a file; a line names one file")
    return InputFile(name, line.place, status.st_size, local_version(status))


def _root_of(recipe: Recipe, config: InputConfig, file: InputFile, storage: StorageOptions | None) -> Root:
    """Return where the lines of a list start."""
    if config.base is None:
        start = file.path.partition("?")[0].rpartition("/")[0]
    else:
        start = config.base if is_remote(config.base) else normpath(recipe.folder.absolute() / config.base)
    return Root(start.rstrip("/") or "/", file.is_remote, storage is not None and storage.follow_urls)


def _is_left_out(line: Line, config: InputConfig) -> bool:
    """Return whether `exclude` leaves out a listed file: by a name in its path, or by the end of its path."""
    names = line.place.split("/")
    inside = names[3 if "://" in line.place else 1 :]
    for pattern in (one.strip("/") for given in config.exclude for one in alternatives(given)):
        if "/" not in pattern and any(fnmatchcase(name, pattern) for name in inside):
            return True
        if "/" in pattern and any(key_matches(pattern, "/".join(names[at:])) for at in range(len(names))):
            return True
    return False


def _name_of_listed(line: Line, recipe: Recipe, config: InputConfig) -> str:
    """Return the name of a listed file: relative to `base` if it is below, else its URL or path."""
    place, base = line.place, config.base
    if is_remote(place):
        place = place.partition("?")[0] if place.lower().startswith(("http:", "https:")) else place
        return place if base is None else place.removeprefix(f"{base.rstrip('/')}/")
    above = normpath(recipe.folder.absolute() / (base if base is not None and not is_remote(base) else ""))
    return place.removeprefix(f"{above.rstrip('/')}/")


def _nothing_left(noun: str, matched: int, hidden: Sequence[str]) -> str:
    if hidden:
        return (
            f"no {noun} except {len(hidden):,} whose names begin with . or _, such as {hidden[0]}; to read "
            f"these, write that character in the path"
        )
    return f"{matched:,} {noun}s, but all are excluded by `exclude`" if matched else f"no {noun}"


def _is_excluded(config: InputConfig, place: str, folder: Path | None = None) -> bool:
    """Return whether the recipe excludes a file.

    `place` is a URL, or an absolute path if `folder` is given, to which local patterns are relative.
    """
    if not config.exclude:
        return False

    def whole(pattern: str) -> str:
        return pattern if folder is None else normpath(folder / pattern)

    above = whole(config.path)
    if not place.startswith(f"{above.rstrip('/')}/"):
        above = fixed_part(above).rpartition("/")[0]
    names = place.removeprefix(above).strip("/").split("/")
    for pattern in (one for given in config.exclude for one in alternatives(given)):
        if "/" in pattern:
            if key_matches(whole(pattern), place):
                return True
        elif any(fnmatchcase(name, pattern) for name in names):
            return True
    return False


def _name_of(path: Path, recipe: Recipe, config: InputConfig, key: str) -> str:
    relative = os.path.relpath(path, recipe.folder / (config.base or ""))
    outside = relative in (".", "..") or relative.startswith(".." + os.sep)
    if outside and config.base is not None:
        raise RecipeError(f"{key.removesuffix('path')}base: {path} is not below {config.base}")
    return Path(path if outside and Path(config.path).is_absolute() else relative).as_posix()


def _name_of_url(url: str, base: str | None, key: str) -> str:
    if urlsplit(url).scheme.lower() in ("http", "https"):
        url = url.partition("?")[0]  # the query may be a signature, which changes and is a secret
    if base is None:
        return url
    name = url.removeprefix(base.rstrip("/") + "/")
    if name == url:
        raise RecipeError(f"{key.removesuffix('path')}base: {url} is not below {base}")
    return name
