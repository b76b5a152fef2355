"""Finds the splits of a dataset: which files are to train on, and which may be training data by mistake.

    README.md          clone of a Hub repository: the splits in `configs` of its front matter
    dataset_info.json  cache of Hugging Face datasets: Arrow files that are named after their splits
    dataset_dict.json  `DatasetDict.save_to_disk`: one folder per split

The split `train` is read, or the only one; files of other splits are left out and reported. For a repository
with several configs, the default config is used. If these rules do not decide, it is an error that says which
files the recipe can name.

Elsewhere only names indicate splits: `held_out_names` finds files called test, validation and so on next to
files called train. They are read, because the recipe names them; the build warns, and `shardkit init` leaves
them out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import yaml

from shardkit.files import load_json
from shardkit.writers.inputs.patterns import Match, alternatives, grade_of

README, CACHE_INFO = "README.md", "dataset_info.json"
TRAIN = "train"
_SHOWN = 12  # maximum number of names in an error message
_FRONT_MATTER = re.compile(rb"\A(?:\xef\xbb\xbf)?---[ \t]*\r?\n(.*?\n)---[ \t]*\r?(?:\n|\Z)", re.DOTALL)
_MAX_FRONT_MATTER = 1 << 20
# The words for splits in Hugging Face datasets; no letter or digit may precede a word, and no letter follow.
_HELD_OUT = re.compile(
    r"(?<![a-z0-9])(?:test|testing|eval|evaluation|validation|valid|dev|val)(?![a-z])", re.IGNORECASE
)
_TRAINED = re.compile(r"(?<![a-z0-9])train(?:ing)?(?![a-z])", re.IGNORECASE)
_NUMBERS = re.compile(r"(?:[-_.]?\d+(?:-of-\d+)?)+")
_PART = re.compile(r"-\d+-of-\d+\Z")  # end of a name such as c4-train.tfrecord-00000-of-01024
# Suffixes of files that are usually one document each, so the word "test" rarely means a split.
_TEXT_ENDINGS = frozenset({".txt", ".text", ".md", ".py", ".html"})


class Splits(NamedTuple):
    """The files of the split that is read, and for each file of another split why it is left out."""

    read: set[str]
    left_out: dict[str, str]


def of_readme(data: bytes, names: Collection[str]) -> Splits | None:
    """Choose among the files of a repository by `data`, the content of its README.md.

    `names` are paths relative to the repository. Returns None if README.md has no `configs`. Raises
    ValueError if `configs` does not decide on a config or split, or names only files that do not exist.
    """
    configs = _configs(data)
    if not configs:
        return None
    config = _default_config(configs)
    patterns = _patterns_of(config)
    splits = (
        {}
        if patterns is None
        else {
            split: {name for name in names if any(_names(one, name) for one in globs)}
            for split, globs in patterns.items()
        }
    )
    if patterns is None:
        folder = str(config.get("data_dir") or "").strip("./")
        below = [name for name in names if name.startswith(f"{folder}/" if folder else "") and name != README]
        held_out = set(held_out_names(below))
        splits = {TRAIN: set(below) - held_out, "test or validation": held_out}
    found = _chosen({split: files for split, files in splits.items() if files}, "configs declares")
    others = [one for one in configs if one is not config]
    for other in others:
        for globs in (_patterns_of(other) or {}).values():
            for name in names:
                if name not in found.read and any(_names(one, name) for one in globs):
                    found.left_out.setdefault(name, f"in the config {other.get('config_name')}")
    return found


def of_cache(data: bytes, names: Iterable[str]) -> Splits | None:
    """Choose among the files in a cache of Hugging Face datasets; None if no file is named after a split."""
    try:
        splits = load_json(data).get("splits")
    except (ValueError, RecursionError, AttributeError):
        return None
    if not isinstance(splits, Mapping) or not splits:
        return None
    files: dict[str, set[str]] = {str(split): set() for split in splits}
    for name in names:
        ending = r"(?:-\d{5}-of-\d{5})?\.arrow"
        fitting = [one for one in files if re.fullmatch(rf"(?:.*-)?{re.escape(one)}{ending}", name)]
        if fitting:
            files[max(fitting, key=len)].add(name)
    if not any(files.values()):
        return None
    return _chosen(
        {split: of_split for split, of_split in files.items() if of_split}, f"{CACHE_INFO} declares"
    )


def of_folders(splits: Mapping[str, set[str]]) -> Splits:
    """Choose among the folders of `DatasetDict.save_to_disk`; raise ValueError if no split is to train on."""
    return _chosen(splits, "the folder has")


def _chosen(splits: Mapping[str, set[str]], who: str) -> Splits:
    shown = ", ".join(sorted(splits)[:_SHOWN])
    if not splits:
        raise ValueError("none of the files that configs names exists; download the dataset again")
    if TRAIN in splits:
        name = TRAIN
    elif len(splits) == 1 and not _HELD_OUT.search(next(iter(splits))):
        [name] = splits
    else:
        example = min(next(iter(splits.values())), default="")
        raise ValueError(
            f"{who} the splits {shown}, and none is {TRAIN}; set `path` to certain files, such as {example}"
        )
    read = splits[name]
    others = {file: split for split, files in sorted(splits.items()) for file in files - read}
    return Splits(set(read), {file: f"in the split {split}" for file, split in others.items()})


def _configs(data: bytes) -> list[Mapping[str, Any]]:
    """Return the entries of `configs` in the front matter of a dataset card; [] if it cannot be read."""
    found = _FRONT_MATTER.match(data[:_MAX_FRONT_MATTER])
    if found is None:
        return []
    try:
        card = yaml.safe_load(found[1])
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    configs = card.get("configs") if isinstance(card, Mapping) else None
    return [one for one in configs if isinstance(one, Mapping)] if isinstance(configs, list) else []


def _default_config(configs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    if len(configs) == 1:
        return configs[0]
    chosen = [one for one in configs if one.get("default") is True]
    chosen = chosen or [one for one in configs if one.get("config_name") == "default"]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(str(one.get("config_name")) for one in configs[:_SHOWN])
    patterns = _patterns_of(configs[0]) or {}
    example = next((globs[0] for globs in patterns.values() if globs), "")
    raise ValueError(
        f"configs declares {names}, none as the default; set `path` to the files of one of them, such as "
        f"{example}"
    )


def _patterns_of(config: Mapping[str, Any]) -> dict[str, list[str]] | None:
    """Return {split: globs} for a config, or None if the config names no files."""
    given = config.get("data_files")
    folder = str(config.get("data_dir") or "").strip("/")
    if not given:
        return None
    if isinstance(given, Mapping):
        entries = [(split, paths) for split, paths in given.items()]
    elif isinstance(given, list) and all(isinstance(one, Mapping) for one in given):
        entries = [(one.get("split", TRAIN), one.get("path")) for one in given]
    else:
        entries = [(TRAIN, given)]
    patterns: dict[str, list[str]] = {}
    for split, paths in entries:
        for path in paths if isinstance(paths, list) else [paths]:
            if isinstance(path, str) and path:
                relative = f"{folder}/{path}" if folder else path
                patterns.setdefault(str(split), []).append(relative.removeprefix("./"))
    return patterns


def _names(pattern: str, name: str) -> bool:
    return any(grade_of(one, name) is Match.YES for one in alternatives(pattern))


def names_a_split(path: str) -> bool:
    """Return whether a recipe's path names a test or validation split, which is then read on purpose."""
    return _HELD_OUT.search(path) is not None


def held_out_names(names: Iterable[str], known: Collection[str] = ()) -> list[str]:
    """Return the files called test, validation and so on if other files are called train, sorted.

    Names in `known` are ignored. A file of plain text counts only if replacing that word by "train" gives the
    name of another file (numbers aside), because such files may be ordinary documents that happen to be
    called test.
    """
    names = [name for name in names if name not in known]
    held_out = [name for name in names if _word_in(_HELD_OUT, name)]
    if not held_out:
        return []
    trained = [name for name in names if name not in {*held_out} and _word_in(_TRAINED, name)]
    endings = {_ending(name) for name in trained}
    like = {_NUMBERS.sub("", _TRAINED.sub(TRAIN, name)) for name in trained}

    def is_held_out(name: str) -> bool:
        ending = _ending(name)
        if ending not in _TEXT_ENDINGS:
            return ending in endings
        return any(_NUMBERS.sub("", other) in like for other in _with_train(name))

    return sorted(filter(is_held_out, held_out))


def _ending(name: str) -> str:
    return PurePosixPath(_PART.sub("", name)).suffix


def _word_in(word: re.Pattern[str], name: str) -> bool:
    """Return whether a file's own name contains the word, or the name of a folder above it is the word."""
    *folders, last = name.split("/")
    return word.search(last) is not None or any(word.fullmatch(folder) for folder in folders)


def _with_train(name: str) -> Iterator[str]:
    for found in _HELD_OUT.finditer(name):
        yield name[: found.start()] + TRAIN + name[found.end() :]
