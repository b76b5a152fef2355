"""The contract of a filter: its settings, the rules that it judges by, and the edits that it makes.

A filter is a FilterSettings model, whose fields are what a recipe says, with a method that judges batches
(`Filter`) or rewrites them (`Editor`). Where that takes a model or a list of words, the method belongs to a
class of its own, which `FilterSettings.build` loads. To add a filter, write its module and add one field to
`config.FilterEntry`.

A rule reports, for each document of a batch, whether the document fails and the value that was compared, so
that values can be written out and thresholds changed later. Rules are tried in a fixed order; the first one
that a document fails is the reason it is dropped. A ratio without a denominator is 0.

A recipe is read without Numba, Arrow or a model: filter modules import those inside the functions that use
them, and kernels live in writers/kernels/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
from pydantic import Field, StringConstraints, model_validator

from shardkit.errors import RecipeError
from shardkit.files import FileVersion, file_version
from shardkit.settings import WHITE_SPACE, StrictModel

if TYPE_CHECKING:
    import pyarrow as pa

    from shardkit.writers.filters.batch import TextBatch


_Loaded = TypeVar("_Loaded")


class FilterSettings(StrictModel):
    """The settings of one filter."""

    @model_validator(mode="after")
    def _some_value_passes(self) -> Self:
        for name in type(self).model_fields:
            other = name.replace("min_", "max_", 1)
            if not name.startswith("min_") or other not in type(self).model_fields:
                continue
            least, most = getattr(self, name), getattr(self, other)
            if least is not None and most is not None and least > most:
                raise ValueError(f"{name} {least:,} is more than {other} {most:,}: no document can pass both")
        return self

    def build(self, folder: Path) -> Filter | Editor:
        """Load what the filter needs. `folder` is the base of the relative paths in the settings."""
        assert isinstance(self, Filter | Editor), "settings without a judge or edit method override build"
        return self

    def files(self) -> tuple[str, ...]:
        """Paths, relative to the recipe's folder, of the lists and models that the filter uses."""
        return ()

    @property
    def may_edit(self) -> bool:
        """Whether the filter may change texts."""
        return isinstance(self, Editor)

    def entry(self, name: str) -> dict[str, Any]:
        """The entry of a recipe's `filters` that stands for these settings, as plain data."""
        return {name: self.model_dump(mode="json")}


class WordSettings(FilterSettings):
    """The settings of a filter whose rules count words."""

    words: Annotated[str, StringConstraints(pattern=r"^(whitespace|spacy:[a-z]{2,3})$")] = Field(
        default=WHITE_SPACE,
        description="What a word is. `whitespace`: as `str.split()` has it; `spacy:en`: as spaCy's rules for "
        "a language have it (`xx`: those that all share), which is what datatrove counts.",
        examples=["spacy:en"],
    )

    def build(self, folder: Path) -> Filter | Editor:
        """See FilterSettings.build."""
        if self.words != WHITE_SPACE:
            from shardkit.writers.filters.batch import load_splitter

            load_splitter(self.words)
        return super().build(folder)

    def entry(self, name: str) -> dict[str, Any]:
        """See FilterSettings.entry."""
        own = self.model_dump(mode="json")
        if self.words == WHITE_SPACE:
            del own["words"]  # as in the recipes of older versions
        return {name: own}


@dataclass(frozen=True, slots=True)
class Rule:
    """The result of one rule for a batch of n documents.

    `fails` is bool[n], or None if the rule is switched off. `values` [n] are the numbers or labels that were
    compared. Both are meaningful only where `batch.wanted` is true. `bound` is the limit that numbers were
    compared with, if there is one: one for all, or float64[n] with NaN for none. `labels`, object[n], say
    what numbers are about, such as the evaluation item that was found.
    """

    name: str
    fails: npt.NDArray[np.bool_] | None
    values: npt.NDArray[Any] | None = None
    bound: float | npt.NDArray[np.float64] | None = None
    labels: npt.NDArray[np.object_] | None = None


@runtime_checkable
class Filter(Protocol):
    """A step that judges documents and leaves their texts unchanged."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Names of the rules in the order they are tried; known before the first batch."""

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """Return one rule for each of `reasons`, in that order."""


@dataclass(frozen=True, slots=True)
class Edit:
    """What an editor did to a batch of n documents: new texts, rules that drop documents, and byte counts.

    `cut` has the UTF-8 bytes removed from each document, int64[n] for each name; negative where a text grew.
    Summed over all names it is the size before minus the size after. `counts` has further statistics,
    int64[n] for each name, such as the number of redacted addresses.
    """

    texts: pa.LargeStringArray
    rules: Sequence[Rule] = ()
    cut: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    counts: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)


@runtime_checkable
class Editor(Protocol):
    """A step that rewrites texts and may drop documents afterwards."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Names of the rules that drop documents, in the order they are tried."""

    @property
    def edits(self) -> tuple[str, ...]:
        """Names under which removed bytes are counted."""

    def edit(self, batch: TextBatch) -> Edit:
        """Rewrite the texts of the wanted documents; what the others become does not matter."""


@runtime_checkable
class SideOutput(Protocol):
    """A step that also writes rows to a JSON-lines file next to the dataset."""

    @property
    def side_file(self) -> str:
        """Name of that file."""

    def take_rows(self) -> list[dict[str, Any]]:
        """Return the rows of the last batch in document order, and clear them."""


def ratio(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Divide integers as Python does; 0 where `whole` is 0."""
    ratios = np.zeros(len(part))
    np.divide(part, whole, out=ratios, where=whole != 0)
    return ratios


def below(name: str, values: npt.NDArray[Any], least: float | None) -> Rule:
    """The rule that values reach `least`; None: switched off."""
    return Rule(name, None if least is None else values < least, values, least)


def above(name: str, values: npt.NDArray[Any], most: float | None) -> Rule:
    """The rule that values do not exceed `most`; None: switched off."""
    return Rule(name, None if most is None else values > most, values, most)


def first_failing(rules: Sequence[Rule], count: int) -> npt.NDArray[np.int64]:
    """int64[count]: 0 where a document passes, else 1 + the index of the first rule that it fails."""
    codes = np.zeros(count, np.int64)
    for number in range(len(rules), 0, -1):
        failed = rules[number - 1].fails
        if failed is not None:
            codes[failed] = number
    return codes


def version_of(path: Path, key: str) -> FileVersion:
    """Return the `file_version` of a file; a RecipeError names the recipe's `key` if it cannot be read."""
    try:
        return file_version(path.stat())
    except OSError as error:
        raise RecipeError(f"{key}: {path}: {error.strerror or error}") from None


def load_list(
    key: str, folder: Path, paths: Iterable[str], make: Callable[[Iterator[str]], _Loaded]
) -> _Loaded:
    """Call `make` with the entries of list files, and cache its result for the life of the process.

    A file has one entry per line; blank lines and lines that start with # are skipped. Entries are streamed.
    `make` must be a module-level function, because it is part of the cache key. A file that changes
    is read again. A RecipeError names the recipe's `key` if a file cannot be read.
    """
    files = tuple((folder / path, version_of(folder / path, key)) for path in paths)
    loaded: _Loaded = _load(make, files)
    return loaded


@lru_cache(maxsize=32)
def _load(make: Callable[[Iterator[str]], Any], files: tuple[tuple[Path, FileVersion], ...]) -> Any:
    return make(_entries(path for path, _ in files))


def _entries(paths: Iterable[Path]) -> Iterator[str]:
    """Entries without white space at both ends."""
    for path in paths:
        try:
            with path.open(encoding="utf-8-sig") as file:
                stripped = map(str.strip, file)
                yield from (entry for entry in stripped if entry and not entry.startswith("#"))
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: not a list, one entry a line in UTF-8: {error}") from None
