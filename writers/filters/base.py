"""The contract of a filter: its settings, the rules that it judges by, and the edits that it makes.

A filter is a FilterSettings model, whose fields are the settings in a recipe, with a method that judges
batches (`Filter`) or rewrites them (`Editor`). If the filter needs a model or a word list, the method is in a
separate class, which `FilterSettings.build` instantiates. To add a filter, write its module and add one field
to `config.FilterEntry`.

A rule reports, for each document of a batch, whether the document fails and the value that was compared, so
that values can be written out and thresholds changed later. Rules are tried in a fixed order; the first one
that a document fails is the reason it is dropped. A ratio whose denominator is 0 is 0.

Reading a recipe must not import Numba or Arrow or load a model: filter modules import these packages inside
the functions that use them, and kernels live in writers/kernels/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
from pydantic import Field, StringConstraints, model_validator

from shardkit.errors import RecipeError
from shardkit.files import FileVersion, file_version
from shardkit.settings import WHITE_SPACE, StrictModel
from shardkit.writers.execution.resources import Resources

if TYPE_CHECKING:
    import pyarrow as pa

    from shardkit.writers.filters.batch import TextBatch


_Loaded = TypeVar("_Loaded")


class FilterSettings(StrictModel):
    """Base class of all filters' settings."""

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
        """Create the filter and load its models and lists; `folder` is the base of relative paths."""
        assert isinstance(self, Filter | Editor), "a class without a judge or edit method must override build"
        return self

    def files(self) -> tuple[str, ...]:
        """Return the paths of the lists and models that the filter uses, relative to the recipe's folder."""
        return ()

    @property
    def may_edit(self) -> bool:
        """Whether the filter may change texts."""
        return isinstance(self, Editor)

    @property
    def can_wait(self) -> bool:
        """Whether `order: cheapest` runs it behind `exact`: it is slow, and judges equal texts alike."""
        return False

    @property
    def added_fields(self) -> Sequence[str]:
        """The names of the fields that the filter adds to the metadata of documents."""
        return ()

    @property
    def resources(self) -> Resources:
        """The resources of a machine that a task with this filter needs."""
        return Resources()

    @property
    def is_costly(self) -> bool:
        """Whether judging costs so much that the filter gets no dropped documents and is not rehearsed."""
        return self.resources.gpus > 0

    def entry(self, name: str) -> dict[str, Any]:
        """Return these settings as plain data, in the form of an entry under `filters` in a recipe."""
        return {name: self.content()}


class WordSettings(FilterSettings):
    """Base class of settings of filters that count words."""

    omitted_at_default: ClassVar[frozenset[str]] = frozenset({"words"})

    words: Annotated[str, StringConstraints(pattern=r"^(whitespace|spacy:[a-z]{2,3})$")] = Field(
        default=WHITE_SPACE,
        description="How text is split into words. `whitespace`: by `str.split()`; `spacy:en`: by spaCy's "
        "tokenizer for a language, as in datatrove (`spacy:xx`: by the rules that all languages share).",
        examples=["spacy:en"],
    )

    def build(self, folder: Path) -> Filter | Editor:
        """See FilterSettings.build."""
        if self.words != WHITE_SPACE:
            from shardkit.writers.filters.batch import load_splitter

            load_splitter(self.words)
        return super().build(folder)


@dataclass(frozen=True, slots=True)
class Rule:
    """The result of one rule for a batch of n documents.

    `fails`: bool[n], or None if the rule is switched off. `values`: array[n] of the numbers or labels that
    the rule compared. Both are meaningful only where `batch.wanted` is true. `bound`: the limit that values
    were compared with, as one number for all documents, or as float64[n] with NaN for documents without a
    limit; None if there is no limit. `labels`: object[n], texts that explain the values, such as the name of
    the evaluation item that was found.
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
        """Names of the rules, in the order in which they are tried. They never change after `build`."""

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """Judge the wanted documents; return one Rule for each of `reasons`, in that order."""


@dataclass(frozen=True, slots=True)
class Edit:
    """An editor's result for a batch of n documents: new texts, rules that drop documents, and byte counts.

    `cut` maps each name in `Editor.edits` to int64[n], the UTF-8 bytes removed from each document; negative
    where a text grew. For each document, the sum over all names is its size before minus its size after.
    `counts` maps names to further statistics, int64[n], such as the number of redacted addresses.
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
        """Names of the rules that drop documents, in the order in which they are tried."""

    @property
    def edits(self) -> tuple[str, ...]:
        """Names of the kinds of edits; removed bytes are counted for each kind."""

    def edit(self, batch: TextBatch) -> Edit:
        """Rewrite the texts of the wanted documents; the new texts of other documents are never read."""


@runtime_checkable
class SideOutput(Protocol):
    """A step that also writes rows to a JSON-lines file next to the dataset."""

    @property
    def side_file(self) -> str:
        """Name of the JSON-lines file."""

    def take_rows(self) -> list[dict[str, Any]]:
        """Return the rows that the last batch produced, in document order, and forget them."""


@runtime_checkable
class Paid(Protocol):
    """A step that pays for what it judges. Its settings say that it `is_costly`."""

    def take_spent(self) -> Mapping[str, float]:
        """Return what the batches since the last call cost, by name, and forget it."""


def ratio(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return part[i] / whole[i] as float64; 0 where `whole` is 0."""
    ratios = np.zeros(len(part))
    np.divide(part, whole, out=ratios, where=whole != 0)
    return ratios


def below(name: str, values: npt.NDArray[Any], least: float | None) -> Rule:
    """Return the rule that fails documents whose value is less than `least`; None switches it off."""
    return Rule(name, None if least is None else values < least, values, least)


def above(name: str, values: npt.NDArray[Any], most: float | None) -> Rule:
    """Return the rule that fails documents whose value is greater than `most`; None switches it off."""
    return Rule(name, None if most is None else values > most, values, most)


def first_failing(rules: Sequence[Rule], count: int) -> npt.NDArray[np.int64]:
    """Return int64[count]: 1 + the index of the first rule that a document fails, or 0 if it passes all."""
    codes = np.zeros(count, np.int64)
    for number in range(len(rules), 0, -1):
        failed = rules[number - 1].fails
        if failed is not None:
            codes[failed] = number
    return codes


def version_of(path: Path, key: str) -> FileVersion:
    """Return a file's `file_version`. Raises RecipeError with the recipe's `key` if it cannot be read."""
    try:
        return file_version(path.stat())
    except OSError as error:
        raise RecipeError(f"{key}: {path}: {error.strerror or error}") from None


def load_list(
    key: str, folder: Path, paths: Iterable[str], make: Callable[[Iterator[str]], _Loaded]
) -> _Loaded:
    """Call `make` with the entries of list files, and cache its result for the life of the process.

    A file has one entry per line; blank lines and lines that start with # are skipped. `make` gets an
    iterator of entries; it must be a module-level function, because it is part of the cache key. A file that
    has changed is read again. Raises RecipeError with the recipe's `key` if a file cannot be read.
    """
    files = tuple((folder / path, version_of(folder / path, key)) for path in paths)
    loaded: _Loaded = _load(make, files)
    return loaded


@lru_cache(maxsize=32)
def _load(make: Callable[[Iterator[str]], Any], files: tuple[tuple[Path, FileVersion], ...]) -> Any:
    return make(_entries(path for path, _ in files))


def _entries(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the entries of list files, without leading and trailing white space."""
    for path in paths:
        try:
            with path.open(encoding="utf-8-sig") as file:
                stripped = map(str.strip, file)
                yield from (entry for entry in stripped if entry and not entry.startswith("#"))
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path}: not a list with one entry per line, in UTF-8: {error}") from None
