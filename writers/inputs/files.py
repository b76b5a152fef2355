"""The input files of a recipe: what its paths name, what the files are called, and how they are opened.

A path is a file, a folder (all files below it), a glob or a list in braces, on this machine or in a store
(patterns.py). Of a folder that is a dataset only the files are read that its list names, and of its splits
the one to train on (dataset_folders.py).

The name of a file is what its documents' ids are made from:
- of a local file its path relative to the input's `base`, or without one to the recipe's folder, with "/"
  between the parts (without `base`, an absolute path outside that folder stays absolute);
- of a URL what follows the input's `base`, or without one the whole URL, without the query of a web address.
So documents keep their ids, and the dataset its shards, when recipe and corpus move together, or with a
`base` that moves with the corpus: from data/ next to the recipe to /mnt/data/ with `base: /mnt`, or to
s3://bucket/corpus/data/ with `base: s3://bucket/corpus`.

A file in a store is one version of an object: the size and version (of S3 the ETag) that the listing stated
when the build began. Every read asks for that version, so an object that is replaced meanwhile stops the
build and is never mixed into it. Nothing of it is stored on this machine. A branch of a repository (hf://) is
looked up once for each input; all is read at its commit, and later commits are not seen. Names have the
branch as the recipe writes it, and versions are hashes of contents: so what is the same stays the same.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from os.path import normpath
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from shardkit.errors import RecipeError
from shardkit.files import file_version
from shardkit.hashing import digest_of
from shardkit.storage.hub import HubPlace
from shardkit.storage.object_file import open_object
from shardkit.storage.resilient import ResilientStore, connect
from shardkit.storage.store import ObjectInfo, ObjectNotFoundError, StorageOptions, Store, StoreError
from shardkit.storage.url import is_remote
from shardkit.writers.inputs.dataset_folders import MAX_LIST_BYTES, Chosen, data_files
from shardkit.writers.inputs.dataset_splits import held_out_names, names_a_split
from shardkit.writers.inputs.patterns import (
    Match,
    alternatives,
    expand_path,
    fixed_part,
    grade_of,
    is_glob,
    key_matches,
)
from shardkit.writers.recipe.recipe import InputConfig, Recipe

_STORES = 16
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
# s3://bucket, gs://bucket, https://host: what a connection is made to; hdfs:///folder has no host.
_ROOT = re.compile(r"([^:/]+://(?:[^/]+|/[^/]+))(?:/(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file as it was found. Plain data: may be pickled, compared and hashed."""

    name: str  # what its documents' ids are made from
    path: str  # or a URL
    bytes: int
    version: str  # another one when the content is another one: `local_version`, or the ETag of an object
    storage: StorageOptions | None = None

    @property
    def content(self) -> str:
        """Digest of its name and version, wherever it is."""
        return digest_of([self.name, self.bytes, self.version])

    @property
    def is_remote(self) -> bool:
        return is_remote(self.path)


def identities(files: Iterable[InputFile]) -> Iterator[str]:
    """Yield the identity of each file, the same for two ways to name one file."""
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
    """What an input's path stands for: the files that are read, by name and sorted, and what is not."""

    files: Mapping[str, InputFile]
    hidden: Sequence[str] = ()  # files whose names, or those of their folders, begin with a dot or underscore
    left_out: Mapping[str, str] = field(default_factory=dict)  # other splits of a dataset: why, by name
    held_out: Sequence[str] = ()  # files that are read, though their names are those of test splits


def find_files(recipe: Recipe, config: InputConfig, key: str, storage: StorageOptions | None = None) -> Found:
    """Find the files of an input; `key` is its key path in the recipe, for errors.

    RecipeError if it matches nothing, or something that is not a regular file or cannot be reached.
    """
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
    held_out = [] if names_a_split(config.path) else held_out_names(kept, chosen.of_splits)
    return Found(kept, sorted(hidden), chosen.left_out, held_out)


def _choose(files: Mapping[str, InputFile], recipe: Recipe, config: InputConfig, key: str) -> Chosen:
    """Leave out files that only describe a dataset that the others make up, and those of its other splits."""

    def read(name: str) -> bytes:
        file = files[name]
        if file.bytes > MAX_LIST_BYTES:
            raise RecipeError(f"{key}: {file.path} has {file.bytes:,} bytes, the limit is {MAX_LIST_BYTES:,}")
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

    return data_files(
        {name: file.bytes for name, file in files.items()}, config.format, key, read, is_excluded
    )


def fields_of_path(config: InputConfig, name: str) -> dict[str, str]:
    """Find the fields of `path_fields` in a file's name; ValueError if its expression does not match.

    Values of hive folders are unquoted as Spark and Hive quote them; their mark of a null gives no field.
    """
    if config.path_fields is None or config.is_sample:
        return {}
    if config.path_fields == "hive":
        parts = [part.partition("=") for part in name.split("/")[:-1] if "=" in part]
        return {unquote(key): unquote(value) for key, _, value in parts if key and value != _HIVE_NULL}
    found = re.search(config.path_fields, name)
    if found is None:
        raise ValueError(f"the expression {config.path_fields!r} matches nothing in the name {name}")
    return {key: value for key, value in found.groupdict().items() if value is not None}


def open_input(file: InputFile) -> BinaryIO:
    """Open the file for reading, seekable; OSError with an errno if it cannot be read."""
    if file.is_remote:
        root, key = _split_url(file.path)
        return open_object(_connect(root, file.storage), ObjectInfo(key, file.bytes, str(file.version)))
    return Path(file.path).open("rb")


def local_version(status: os.stat_result) -> str:
    """Return the version of a local file, as `InputFile.version` has it."""
    return "-".join(map(str, file_version(status)[1:]))


def version_now(file: InputFile) -> tuple[int, str] | None:
    """Return the bytes and version that a local file has now; None for an object, and if there is no file."""
    if file.is_remote:
        return None
    try:
        status = Path(file.path).stat()
    except OSError:
        return None
    return status.st_size, local_version(status)


def _find_local(recipe: Recipe, config: InputConfig, key: str) -> tuple[dict[str, InputFile], list[str]]:
    """{name: file}, and the names of those that are hidden."""
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
        raise RecipeError(f"{key}: {config.path} matches {left} (looked in {recipe.folder})")
    return files, hidden


def _find_remote(
    config: InputConfig, key: str, storage: StorageOptions | None
) -> tuple[dict[str, InputFile], list[str]]:
    """{name: object}, and the names of those that are hidden."""
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


def _nothing_left(noun: str, matched: int, hidden: Sequence[str]) -> str:
    if hidden:
        return (
            f"no {noun}, but {len(hidden):,} whose names begin with . or _, such as {hidden[0]}; spell that"
        )
    return f"{matched:,} {noun}s, and exclude leaves none" if matched else f"no {noun}"


def _is_excluded(config: InputConfig, place: str, folder: Path | None = None) -> bool:
    """Whether a file is left out: a URL, or an absolute path if `folder` is where local patterns start."""

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
        raise RecipeError(f"{key.removesuffix('path')}base: {path} does not lie below {config.base}")
    return Path(path if outside and Path(config.path).is_absolute() else relative).as_posix()


def _name_of_url(url: str, base: str | None, key: str) -> str:
    if urlsplit(url).scheme.lower() in ("http", "https"):
        url = url.partition("?")[0]  # may hold a signature: it changes, and is a secret
    if base is None:
        return url
    name = url.removeprefix(base.rstrip("/") + "/")
    if name == url:
        raise RecipeError(f"{key.removesuffix('path')}base: {url} does not lie below {base}")
    return name


def expand_url(url: str, storage: StorageOptions | None) -> dict[str, tuple[str, ObjectInfo, Match]]:
    """{URL: (where to read it, object, whether it is hidden)} of what `url` stands for (patterns.py).

    An object of this very name wins over a pattern. http(s) has no listings: a file, or a list in braces.
    Where to read it is the URL itself, or that of the commit which its branch has now. StoreError;
    FileNotFoundError names the first item of a list in braces for which there is no object.
    """
    root, pattern = _split_url(url)
    connected = _connect(root, storage)
    store = connected.pinned()
    start = root if store is connected else store.url
    is_web = urlsplit(url).scheme.lower() in ("http", "https")
    if pattern and not pattern.endswith("/"):
        names = alternatives(pattern)
        try:
            return {url: (f"{start}/{pattern}", store.head(pattern), Match.YES)}
        except ObjectNotFoundError:
            if is_web and len(names) == 1:
                raise
        if is_web:
            return {f"{root}/{one}": (f"{start}/{one}", store.head(one), Match.YES) for one in names}
    elif is_web:
        raise StoreError(url, "is no file, and http has no listings")
    found = _matching(store, pattern.rstrip("/"))
    return {f"{root}/{info.key}": (f"{start}/{info.key}", info, match) for info, match in found}


def _matching(store: Store, pattern: str) -> list[tuple[ObjectInfo, Match]]:
    """List the objects that a pattern stands for; braces are taken literally if some names have them."""
    fixed = fixed_part(pattern)
    listed = list(store.list(f"{pattern}/" if pattern and fixed == pattern else fixed))
    graded = _graded([pattern or "**"], listed)[0]
    names = alternatives(pattern)
    if not graded and len(names) > 1:
        graded, unmatched = _graded(names, listed)
        if unmatched:
            raise FileNotFoundError(unmatched[0])
    return [(info, graded[info.key]) for info in listed if info.key in graded]


def _graded(patterns: Sequence[str], listed: Sequence[ObjectInfo]) -> tuple[dict[str, Match], list[str]]:
    """({key: match}, patterns that match nothing)."""
    globs = [one for one in patterns if is_glob(one)]
    names = dict.fromkeys(one for one in patterns if not is_glob(one))
    graded: dict[str, Match] = {}
    used = set()
    for info in listed:
        above = [info.key, *(info.key[:at] for at, one in enumerate(info.key) if one == "/")]
        for one in (*(name for name in above if name in names), *globs):
            if match := grade_of(one, info.key):
                used.add(one)
                graded[info.key] = max(match, graded.get(info.key, Match.NO))
    return graded, [one for one in patterns if one not in used]


def _split_url(url: str) -> tuple[str, str]:
    """(what a store is opened at, the key of the object or the pattern)."""
    if url.lower().startswith("hf://"):
        place = HubPlace.parse(url)
        return place.root, f"{place.path}/" if place.path and url.endswith("/") else place.path
    found = _ROOT.fullmatch(url)
    if found is None:
        raise StoreError(url, "is no URL of a file, such as s3://bucket/folder/file.jsonl")
    return found[1], found[2] or ""


@lru_cache(maxsize=_STORES)
def _connect(root: str, storage: StorageOptions | None) -> ResilientStore:
    """One store for all files of a bucket: connections are kept, and a client takes long to make."""
    return connect(root, storage)
