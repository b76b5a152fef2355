"""Settings of a filter that differ by language: the key `by_language` of an entry under `filters`.

    - language: {model: glotlid.bin, by_language: ...}     finds the language of each document
    - gopher_quality: {min_stop_words: 2}
      by_language:
        deu_Latn: {max_avg_word_length: 15, stop_words: [der, die, und]}

An earlier `language` filter finds the language of each document. The document is then judged by the settings
of the entry, in which the keys given for its language replace others. The keys under `default` apply to
languages that are not named; without `default`, these languages are judged by the entry's own settings. The
`language` filter itself drops languages that are not named, under its usual rule, unless `default` or
`languages` is given. Rules keep their names, so a rule whose bounds differ by language is still one line of
the ledger.

Instead of a mapping, `by_language` may be a file or a glob of files named by language: `deu_Latn.yml` has the
keys for deu_Latn. The files may use the keys of FineWeb2's published configurations (Penedo et al. 2025), for
`profile: fineweb2`: `language_score` means `threshold` of `language`, `stopwords` means `stop_words`, and
fractions below 0 or above 1 (such as -1 or 1.32) mean 0 or 1. Files are read with the recipe and become part
of it, so a build does not depend on the files later.

Documents of one language are judged together, as a batch of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import SerializeAsAny, ValidationError

from shardkit.errors import RecipeError
from shardkit.files import FileVersion, file_version
from shardkit.hints import hint
from shardkit.writers.filters.base import Editor, Filter, FilterSettings, Rule, SideOutput
from shardkit.writers.filters.fasttext import OTHERS, LanguageConfig
from shardkit.yaml_file import load_yaml

if TYPE_CHECKING:
    from shardkit.writers.filters.batch import TextBatch


Overrides = Mapping[str, Mapping[str, Any]]
"""For each language's label, and for `default`, the settings (key: value) that differ."""

_Settings = TypeVar("_Settings", bound=FilterSettings)
_FILES = "files"
_MOST_FILES = 4096  # maximum number of files; FineWeb2 has 1,929
_OTHER_NAMES = {"language_score": "threshold", "stopwords": "stop_words"}
_FINEWEB2 = frozenset(
    {
        *("threshold", "stop_words", "dup_line_frac", "dup_n_grams", "top_n_grams", "line_punct_thr"),
        *("new_line_ratio", "max_avg_word_length", "min_avg_word_length", "max_non_alpha_words_ratio"),
    }
)
_SAME_FOR_ALL = ("ask", "buckets", "decontamination", "scores")
_JUDGES_ONLY = (
    "settings of filters that edit texts, and of the filters "
    f"{', '.join(_SAME_FOR_ALL)}, must be the same for all languages; remove them from by_language"
)
_FRACTIONS = ("dup_line_frac", "line_punct_thr")


class ByLanguage(FilterSettings):
    """Settings of a filter that differ by language: `languages` by label, `base` for all other labels."""

    base: SerializeAsAny[FilterSettings]
    languages: dict[str, SerializeAsAny[FilterSettings]]

    def build(self, folder: Path) -> FilterByLanguage:
        """See FilterSettings.build. Raises RecipeError for filters that cannot differ by language."""
        base = self.base.build(folder)
        works = {label: config.build(folder) for label, config in self.languages.items()}
        if isinstance(base, Editor | SideOutput):
            raise RecipeError(f"by_language: {_JUDGES_ONLY}")
        judges: dict[str, Filter] = {label: work for label, work in works.items() if isinstance(work, Filter)}
        return FilterByLanguage(base, judges)

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        configs = (self.base, *self.languages.values())
        return tuple(dict.fromkeys(file for config in configs for file in config.files()))

    def entry(self, name: str) -> dict[str, Any]:
        """See FilterSettings.entry."""
        entry, own = self.base.entry(name), self.base.model_dump(mode="json")
        dumps = {label: config.model_dump(mode="json") for label, config in self.languages.items()}
        differ = {
            label: {key: value for key, value in dump.items() if value != own[key]}
            for label, dump in sorted(dumps.items())
        }
        return {**entry, "by_language": differ}


class FilterByLanguage:
    """Judges documents of each named language by its own filter, and all other documents by `base`."""

    def __init__(self, base: Filter, languages: Mapping[str, Filter]) -> None:
        self.reasons = base.reasons
        self.languages = tuple(languages)
        self._filters = [base, *languages.values()]
        self._numbers = {label: number for number, label in enumerate(languages, start=1)}
        _check_rules(self._filters)

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge. Each rule's bound is float64[n], with NaN for documents without a bound."""
        assert batch.languages is not None, "a language filter must run before a filter with by_language"
        numbers = np.array([self._numbers.get(label, 0) for label in batch.languages.tolist()], np.int64)
        fails = np.zeros((len(self.reasons), len(batch)), np.bool_)
        bounds = np.full(fails.shape, np.nan)
        values: list[npt.NDArray[Any] | None] = [None] * len(self.reasons)
        used = np.zeros(len(self.reasons), np.bool_)
        for number in np.unique(numbers[batch.wanted]).tolist():
            rows = np.flatnonzero(numbers == number)
            for place, rule in enumerate(self._filters[number].judge(batch.part(rows))):
                if rule.fails is not None:
                    fails[place, rows], used[place] = rule.fails, True
                bounds[place, rows] = np.nan if rule.bound is None else rule.bound
                if rule.values is not None:
                    values[place] = _scattered(values[place], rule.values, rows, len(batch))
        return [
            Rule(name, fails[place] if used[place] else None, values[place], bounds[place])
            for place, name in enumerate(self.reasons)
        ]


def _scattered(
    whole: npt.NDArray[Any] | None, part: npt.NDArray[Any], rows: npt.NDArray[np.int64], count: int
) -> npt.NDArray[Any]:
    """Write `part` to whole[rows] and return `whole`. If `whole` is None, create it with `count` zeros."""
    if whole is None:
        whole = np.zeros(count, part.dtype)
    whole[rows] = part
    return whole


def with_overrides(
    steps: Sequence[tuple[str, FilterSettings]], given: Overrides
) -> tuple[tuple[str, FilterSettings], ...]:
    """Return the (name, settings) pairs of a recipe entry's filters with overrides applied.

    `given` are the per-language overrides. Raises ValueError for a key that is not a setting of any of these
    filters.
    """
    _check_keys(steps, given)
    return tuple((name, _differing(name, config, given)) for name, config in steps)


def _check_keys(steps: Sequence[tuple[str, FilterSettings]], given: Overrides) -> None:
    known = {key for _, config in steps for key in type(config).model_fields}
    for label, keys in given.items():
        if unknown := sorted(keys.keys() - known - _FINEWEB2):
            said = hint(unknown[0], sorted(known), spelled={name: repr(name) for name in known})
            said = said or f"known keys: {', '.join(sorted(known))}"
            raise ValueError(f"by_language.{label}.{unknown[0]}: unknown key; {said}")
    if given and not any(keys.keys() & known for keys in given.values()):
        names = ", ".join(name for name, _ in steps)
        raise ValueError(f"by_language: has no key of {names}; give one of {', '.join(sorted(known))}")


def _differing(name: str, config: FilterSettings, given: Overrides) -> FilterSettings:
    known = type(config).model_fields.keys()
    own = {
        label: {key: value for key, value in keys.items() if key in known} for label, keys in given.items()
    }
    if not any(own.values()):
        return config
    if isinstance(config, LanguageConfig):
        return _with_thresholds(config, own)
    if isinstance(config, Editor) or name in _SAME_FOR_ALL:
        raise ValueError(f"by_language: {_JUDGES_ONLY}")
    found = {label: _validated(config, f".{label}", keys) for label, keys in own.items()}
    if isinstance(config, Filter):
        _check_rules([config, *(one for one in found.values() if isinstance(one, Filter))])
    return ByLanguage(base=found.pop(OTHERS, config), languages=found)


def _check_rules(filters: Sequence[Filter]) -> None:
    if len({tuple(one.reasons) for one in filters}) > 1:
        raise ValueError(
            "by_language: the rules must be the same ones in all languages; give each language bounds for "
            "the same n-grams"
        )


def _with_thresholds(config: LanguageConfig, own: Overrides) -> LanguageConfig:
    """Return the settings of the language filter with thresholds by language.

    The filter will drop languages that are not named, unless `own` has a default or `languages` is set.
    """
    if other := sorted({key for keys in own.values() for key in keys} - {"threshold"}):
        raise ValueError(f"by_language: {other[0]} of the language filter must be the same for all languages")
    before = config.threshold if isinstance(config.threshold, dict) else {OTHERS: config.threshold}
    languages = config.languages
    if languages is None and OTHERS not in own:
        languages = tuple(sorted(own))
    others = before.get(OTHERS)
    found = {label: keys.get("threshold", before.get(label, others)) for label, keys in own.items()}
    thresholds = before | {label: value for label, value in sorted(found.items()) if value is not None}
    if languages is not None:
        thresholds = {label: thresholds.get(label, others) for label in languages}
        thresholds = {label: value for label, value in thresholds.items() if value is not None}
    return _validated(config, "", {"languages": languages, "threshold": thresholds})


def _validated(config: _Settings, place: str, keys: Mapping[str, Any]) -> _Settings:
    try:
        return type(config).model_validate(config.model_dump() | dict(keys))
    except ValidationError as error:
        [problem, *_] = error.errors(include_url=False)
        where = ".".join(map(str, (f"by_language{place}", *problem["loc"])))
        message = problem["msg"].removeprefix("Value error, ")
        given = f", got {problem['input']!r:.80}" if problem["loc"] else ""
        raise ValueError(f"{where}: {message}{given}") from None


def read_overrides(given: object, folder: Path | None) -> object:
    """Return the value of `by_language` with files read and FineWeb2's names replaced; not validated yet.

    `folder` is the base of relative paths, or None if the recipe did not come from a file. Keys given for a
    language in the recipe override keys read from files. Raises ValueError if a file cannot be read.
    """
    if isinstance(given, str | list | tuple):
        given = {_FILES: given}
    if not isinstance(given, Mapping):
        return given
    named = {label: keys for label, keys in given.items() if label != _FILES}
    patterns = given.get(_FILES, ())
    read = _read_files([patterns] if isinstance(patterns, str) else list(patterns), folder)
    read |= {
        label: read.get(label, {}) | _renamed(keys) if isinstance(keys, Mapping) else keys
        for label, keys in named.items()
    }
    return read


def _read_files(patterns: Sequence[str], folder: Path | None) -> dict[str, Any]:
    if patterns and folder is None:
        raise ValueError("files: needs a recipe that was read from a file; paths are relative to its folder")
    found: dict[str, Any] = {}
    for pattern in patterns:
        assert folder is not None
        absolute = Path(pattern)
        base, rest = (Path(absolute.anchor), pattern.removeprefix(absolute.anchor))
        paths = sorted((base if absolute.is_absolute() else folder).glob(rest))
        if not paths:
            raise ValueError(f"files: no file matches {pattern}")
        if len(paths) > _MOST_FILES:
            raise ValueError(f"files: {len(paths):,} files match {pattern}; the limit is {_MOST_FILES:,}")
        for path in paths:
            if path.stem in found:
                raise ValueError(f"files: {path.name} is a second file for {path.stem}; keep one of the two")
            found[path.stem] = _clamped(_read_file(path, file_version(path.stat())))
    return found


@lru_cache(maxsize=_MOST_FILES)
def _read_file(path: Path, _version: FileVersion) -> Mapping[str, Any]:
    """Read one file's keys; cached, because several entries of a recipe read the same files."""
    try:
        return load_yaml(path)
    except RecipeError as error:
        raise ValueError(str(error)) from None


def _renamed(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {_OTHER_NAMES.get(key, key): value for key, value in keys.items()}


def _clamped(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Rename FineWeb2's keys, and limit their fractions to 0..1, the range of the compared values."""
    found = _renamed(keys)
    for key in _FRACTIONS:
        if isinstance(found.get(key), int | float):
            found[key] = min(max(found[key], 0), 1)
    return found
