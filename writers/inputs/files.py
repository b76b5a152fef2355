"""The input files of a recipe: what its paths name, what the files are called, and how they are opened.

A path is a file, a folder (all files below it) or a glob, on this machine or in a store. A folder that a glob
matches is read as a folder, because Spark, Dask and Ray write `part.parquet/`. Names that begin with a dot or
an underscore (`_SUCCESS`, `.crc`) are skipped unless the pattern spells them. Of a folder that is a dataset
only the files are read that its list names (dataset_folders.py). Unlike the standard library's glob, `**`
never follows a link into a folder that it is already inside, so a loop of links ends. The keys of a bucket
are matched by the same rules.

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
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from os.path import normpath
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from shardkit.errors import RecipeError
from shardkit.files import file_version
from shardkit.storage.hub import HubPlace
from shardkit.storage.object_file import open_object
from shardkit.storage.resilient import ResilientStore, connect
from shardkit.storage.store import ObjectInfo, ObjectNotFoundError, StorageOptions, StoreError
from shardkit.storage.url import is_remote
from shardkit.writers.inputs.dataset_folders import MAX_LIST_BYTES, data_files
from shardkit.writers.recipe import InputConfig, Recipe

__all__ = [
    "InputFile",
    "expand_path",
    "expand_url",
    "fields_of_path",
    "find_files",
    "identities",
    "key_matches",
    "local_version",
    "open_input",
    "version_now",
]

_MAGIC = re.compile(r"[*?\[]")
_STORES = 16
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
# s3://bucket, gs://bucket, https://host: what a connection is made to; hdfs:///folder has no host.
_ROOT = re.compile(r"([^:/]+://(?:[^/]+|/[^/]+))(?:/(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file as it was found. Plain data: may be pickled, compared and hashed."""

    name: str  # what its documents' ids are made from
    path: str  # where it is: a path of this machine, or a URL
    bytes: int
    version: str  # another one when the content is another one: `local_version`, or the ETag of an object
    storage: StorageOptions | None = None  # how a URL is reached

    @property
    def is_remote(self) -> bool:
        return is_remote(self.path)


def identities(files: Iterable[InputFile]) -> Iterator[str]:
    """Of each file, what is the same for two ways to say the same file."""
    folders: dict[str, str] = {}
    for file in files:
        if file.is_remote or Path(file.path).is_symlink():
            yield file.path if file.is_remote else os.path.realpath(file.path)
            continue
        folder, name = os.path.split(file.path)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        yield f"{folders[folder].rstrip('/')}/{name}"


def find_files(
    recipe: Recipe, config: InputConfig, key: str, storage: StorageOptions | None = None
) -> dict[str, InputFile]:
    """{name: file} of an input, sorted by name; `key` is its key path in the recipe, for errors.

    RecipeError if it matches nothing, or something that is not a regular file or cannot be reached.
    """
    if is_remote(config.path):
        files = _find_remote(config, key, storage)
    else:
        files = _find_local(recipe, config, key)
    files = _with_documents(files, recipe, config, key)
    for name in files:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise RecipeError(f"{key}: file name {name!r} is not UTF-8; rename the file") from None
    return dict(sorted(files.items()))


def _with_documents(
    files: Mapping[str, InputFile], recipe: Recipe, config: InputConfig, key: str
) -> dict[str, InputFile]:
    """The files without those that only describe a dataset that the others make up."""

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

    sizes = {name: file.bytes for name, file in files.items()}
    kept = data_files(sizes, config.format, key, read, is_excluded)
    return {name: file for name, file in files.items() if name in kept}


def fields_of_path(config: InputConfig, name: str) -> dict[str, str]:
    """What `path_fields` finds in a file's name; ValueError if its expression does not match.

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


def _find_local(recipe: Recipe, config: InputConfig, key: str) -> dict[str, InputFile]:
    files = {}
    base = f"{normpath(recipe.folder.absolute() / (config.base or '')).rstrip('/')}/"
    found_paths = expand_path(recipe.folder, config.path)
    paths = [path for path in found_paths if not _is_excluded(config, str(path), recipe.folder)]
    for path in paths:
        try:
            found = path.stat()
        except OSError as error:
            raise RecipeError(f"{key}: {path}: {error.strerror or error}") from error
        if not stat.S_ISREG(found.st_mode):
            raise RecipeError(f"{key}: {path} is not a regular file")
        where = str(path)
        name = where.removeprefix(base) if where.startswith(base) else _name_of(path, recipe, config, key)
        files[name] = InputFile(name, where, found.st_size, local_version(found))
    if not files:
        left = f"{len(found_paths):,} files, and exclude leaves none" if found_paths else "no file"
        raise RecipeError(f"{key}: {config.path} matches {left} (looked in {recipe.folder})")
    return files


def _find_remote(config: InputConfig, key: str, storage: StorageOptions | None) -> dict[str, InputFile]:
    try:
        found = expand_url(config.path, storage)
    except StoreError as error:
        raise RecipeError(f"{key}: {error}") from error
    files = {}
    for url, (place, info) in found.items():
        if _is_excluded(config, url):
            continue
        name = _name_of_url(url, config.base, key)
        files[name] = InputFile(name, place, info.bytes, info.version, storage)
    if not files:
        left = f"{len(found):,} objects, and exclude leaves none" if found else "no object"
        raise RecipeError(f"{key}: {config.path} matches {left}")
    return files


def _is_excluded(config: InputConfig, place: str, folder: Path | None = None) -> bool:
    """Whether a file is left out: a URL, or an absolute path if `folder` is where local patterns start."""

    if not config.exclude:
        return False

    def whole(pattern: str) -> str:
        return pattern if folder is None else normpath(folder / pattern)

    above = whole(config.path)
    if not place.startswith(f"{above.rstrip('/')}/"):
        above = _fixed_part(above).rpartition("/")[0]
    names = place.removeprefix(above).strip("/").split("/")
    for pattern in config.exclude:
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


def expand_path(folder: Path, pattern: str) -> list[Path]:
    """Sorted paths that `pattern`, relative to `folder`, names; a literal file wins over a glob."""
    whole = folder / pattern
    if whole.is_dir():
        found = set(_below(whole))
    elif _exists(whole) or not _MAGIC.search(pattern):
        found = {whole} if _exists(whole) else set()
    else:
        parts = [part for part in pattern.split("/") if part not in ("", ".")]
        if parts[-1] == "**":
            parts.append("*")
        found = set(_matches(Path("/") if pattern.startswith("/") else folder, parts))
    paths = (path if normpath(path) == str(path) else Path(normpath(path)) for path in found)
    return sorted(paths, key=lambda path: path.parts)


def _fixed_part(pattern: str) -> str:
    """The prefix of all that matches; the whole pattern if it is no glob."""
    found = _MAGIC.search(pattern)
    return pattern[: found.start()] if found else pattern


def key_matches(pattern: str, key: str) -> bool:
    """Whether the glob `pattern` names `key`; both relative to the same place, with "/" between the parts."""
    if key.endswith("/"):
        return False  # a marker that some tools write to show an empty folder
    parts = pattern.split("/")
    return _parts_match([*parts, "*"] if parts[-1] == "**" else parts, key.split("/"))


def _parts_match(pattern: Sequence[str], key: Sequence[str]) -> bool:
    if not pattern:  # `key` is what lies below a folder that the pattern matched
        return not any(map(_hidden, key))
    if not key:
        return False
    part, name = pattern[0], key[0]
    if part == "**":
        inside = len(key) > 1 and not _hidden(name)
        return _parts_match(pattern[1:], key) or (inside and _parts_match(pattern, key[1:]))
    return _name_matches(part, name) and _parts_match(pattern[1:], key[1:])


def _name_matches(part: str, name: str) -> bool:
    """Whether a part of a glob names a file or folder; a hidden one only if it spells the first character."""
    if not _MAGIC.search(part):
        return part == name
    return fnmatchcase(name, part) and (not _hidden(name) or part[0] == name[0])


def _hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _matches(base: Path, parts: list[str]) -> Iterator[Path]:
    part, rest = parts[0], parts[1:]
    if part == "**":
        yield from _matches(base, rest)
        for folder in _folders_below(base):
            yield from _matches(folder, rest)
        return
    if not _MAGIC.search(part):
        candidates = [(base / part, (base / part).is_dir(), _exists(base / part))]
    else:
        entries = [entry for entry in _entries(base) if _name_matches(part, entry.name)]
        candidates = [(base / entry.name, entry.is_dir(), True) for entry in entries]
    for path, is_folder, exists in candidates:
        if rest:
            yield from _matches(path, rest)
        elif is_folder:
            if not base.resolve().is_relative_to(path.resolve()):  # else a link to where it lies in
                yield from _below(path)
        elif exists:
            yield path


def _below(folder: Path) -> Iterator[Path]:
    """All files below a folder."""
    for base in (folder, *_folders_below(folder)):
        entries = (entry for entry in _entries(base) if not _hidden(entry.name) and not entry.is_dir())
        yield from (base / entry.name for entry in entries)


def _folders_below(base: Path, inside: frozenset[Path] = frozenset()) -> Iterator[Path]:
    inside = inside | {base.resolve()}
    for entry in _entries(base):
        if _hidden(entry.name) or not entry.is_dir():
            continue
        path = base / entry.name
        if path.resolve() not in inside:
            yield path
            yield from _folders_below(path, inside)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, by name: an entry knows whether it is a folder, mostly without asking the disk."""
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except (NotADirectoryError, FileNotFoundError):
        return []


def _exists(path: Path) -> bool:
    """Also true for a broken link, which the caller reports rather than skips."""
    return path.exists() or path.is_symlink()


def expand_url(url: str, storage: StorageOptions | None) -> dict[str, tuple[str, ObjectInfo]]:
    """{URL: (where to read it, object)} of what `url` names: an object, a glob, or all below a folder.

    An object of this very name wins over a glob. http(s) has no listings: one file. Where to read it is the
    URL itself, or that of the commit which its branch has now. StoreError.
    """
    root, pattern = _split_url(url)
    connected = _connect(root, storage)
    store = connected.pinned()
    start = root if store is connected else store.url
    is_web = urlsplit(url).scheme.lower() in ("http", "https")
    if pattern and not pattern.endswith("/"):
        try:
            return {url: (f"{start}/{pattern}", store.head(pattern))}
        except ObjectNotFoundError:
            if is_web:
                raise
    elif is_web:
        raise StoreError(url, "is no file, and http has no listings")
    is_glob = _fixed_part(pattern) != pattern
    pattern = pattern.rstrip("/")
    if not is_glob:
        pattern = f"{pattern}/**" if pattern else "**"
    found = store.list(_fixed_part(pattern))
    keys = [info for info in found if key_matches(pattern, info.key)]
    return {f"{root}/{info.key}": (f"{start}/{info.key}", info) for info in keys}


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
