"""The filters that a recipe can name, and profiles: named lists of filters.

A field of FilterEntry registers a filter: its name is the key in a recipe, and its type is the settings class
that builds the filter. Settings of rules that come from datatrove have datatrove's names and defaults, so a
published configuration can be copied.

In a profile, cheap rules come first where order does not affect which documents are kept: filters that only
judge may be reordered, but an editor such as `c4_quality` may not. So the order in the profiles differs from
FineWeb's (language, repetition, quality). The same documents stay; only reported reasons may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)

from shardkit.hints import hint
from shardkit.settings import FieldName, StrictModel
from shardkit.synonyms import FILTERS
from shardkit.writers.filters.ask import AskConfig
from shardkit.writers.filters.base import FilterSettings
from shardkit.writers.filters.bounds import LengthFilter, RatiosFilter
from shardkit.writers.filters.buckets import BucketsConfig
from shardkit.writers.filters.by_language import ByLanguage, read_overrides, with_overrides
from shardkit.writers.filters.c4 import C4ParagraphFilter, C4QualityEditor
from shardkit.writers.filters.code import CodeQualityFilter
from shardkit.writers.filters.decontamination import DecontaminationConfig
from shardkit.writers.filters.dolma import DolmaQualityFilter, DolmaRepetitionFilter
from shardkit.writers.filters.fasttext import ClassifierConfig, LanguageConfig
from shardkit.writers.filters.fineweb import FinewebQualityFilter
from shardkit.writers.filters.gopher import GopherQualityFilter, GopherRepetitionFilter
from shardkit.writers.filters.perplexity import PerplexityConfig, UnigramLogProbConfig
from shardkit.writers.filters.pii import PiiEditor
from shardkit.writers.filters.repeated_lines import RepeatedLinesEditor
from shardkit.writers.filters.scores import ScoresConfig
from shardkit.writers.filters.url_lists import UrlListsConfig
from shardkit.writers.filters.user import PythonConfig
from shardkit.writers.filters.word_lists import BadWordsConfig, StopWordsConfig

_ByLanguage = dict[FieldName, dict[FieldName, Any]]
_BY_LANGUAGE_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "object", "additionalProperties": {"type": ["object", "string", "array"]}},
    ]
}
_NO_FILTERS = ("profile", "by_language")

_Entry = Mapping[str, Mapping[str, Any]]

_GOPHER: tuple[_Entry, ...] = ({"gopher_quality": {}}, {"gopher_repetition": {}})
_FINEWEB: tuple[_Entry, ...] = ({"c4_quality": {"filter_no_terminal_punct": False}}, {"fineweb_quality": {}})
_ENGLISH: _Entry = {"language": {"languages": ["en"], "threshold": 0.65}}


def _with_words(words: str, entries: tuple[_Entry, ...]) -> tuple[_Entry, ...]:
    """Return the entries with `words` as the setting of this name; `c4_quality` does not have it."""
    return tuple(
        {name: settings if name == "c4_quality" else {**settings, "words": words}}
        for entry in entries
        for name, settings in entry.items()
    )


PROFILES: Mapping[str, tuple[_Entry, ...]] = {
    # Keeps documents of at least ten words.
    "minimal": ({"length": {"min_words": 10}},),
    # Rae et al. 2021, as implemented in datatrove.
    "gopher": _GOPHER,
    # Raffel et al. 2020, without its list of bad words.
    "c4": ({"c4_quality": {}},),
    # Penedo et al. 2024, as in datatrove's examples/fineweb.py, but without lists of URLs.
    "fineweb": (*_GOPHER, _ENGLISH, *_FINEWEB),
    # The filters of `fineweb` with words split by spaCy, as in datatrove: FineWeb as it was published.
    "fineweb_published": (
        *_with_words("spacy:en", _GOPHER),
        _ENGLISH,
        *_with_words("spacy:en", _FINEWEB),
    ),
    # The filters of `fineweb` without language identification.
    "fineweb_rules": (*_GOPHER, *_FINEWEB),
    # Soldaini et al. 2024: the rules of Dolma v1.5's web pages, without its classifiers and deduplication.
    "dolma": ({"dolma_quality": {}}, {"dolma_repetition": {}}),
    # Penedo et al. 2025: the settings that all languages share; `by_language` has the others.
    "fineweb2": (
        {"gopher_quality": {}},
        {"gopher_repetition": {"dup_para_frac": 0.0, "dup_line_char_frac": 0.0, "dup_para_char_frac": 0.0}},
        {"fineweb_quality": {"short_line_thr": 1.0, "char_duplicates_ratio": 0.1}},
    ),
}


class FilterEntry(StrictModel):
    """One entry under `filters` in a recipe: one filter's name with its settings, or `profile`.

    The key `by_language` may be added to it.
    """

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 2})

    length: LengthFilter | None = Field(default=None, description="Bounds on words and characters.")
    ratios: RatiosFilter | None = Field(default=None, description="Bounds on kinds of characters.")
    gopher_quality: GopherQualityFilter | None = Field(default=None, description="Gopher's quality rules.")
    gopher_repetition: GopherRepetitionFilter | None = Field(
        default=None, description="Gopher's repetition rules."
    )
    fineweb_quality: FinewebQualityFilter | None = Field(default=None, description="FineWeb's line rules.")
    c4_quality: C4QualityEditor | None = Field(default=None, description="C4's line rules.")
    c4_paragraph: C4ParagraphFilter | None = Field(default=None, description="mC4's rule: enough long lines.")
    dolma_quality: DolmaQualityFilter | None = Field(default=None, description="dolma's quality rules.")
    dolma_repetition: DolmaRepetitionFilter | None = Field(
        default=None, description="dolma's repetition rules."
    )
    code_quality: CodeQualityFilter | None = Field(
        default=None, description="StarCoder's rules for source files."
    )
    repeated_lines: RepeatedLinesEditor | None = Field(
        default=None, description="Cut lines that occurred earlier in the document."
    )
    url_lists: UrlListsConfig | None = Field(default=None, description="Lists of hosts, URLs and URL words.")
    bad_words: BadWordsConfig | None = Field(default=None, description="Drop documents with listed words.")
    stop_words: StopWordsConfig | None = Field(default=None, description="Require stop words of a language.")
    python: PythonConfig | None = Field(default=None, description="A Python function of your own.")
    pii: PiiEditor | None = Field(
        default=None,
        description="Redact e-mail and IP addresses, phone numbers; if set, cards, IBANs and access keys.",
    )
    language: LanguageConfig | None = Field(default=None, description="Language identification by fastText.")
    classifier: ClassifierConfig | None = Field(
        default=None, description="A fastText classifier of your own."
    )
    scores: ScoresConfig | None = Field(
        default=None, description="Scores that were computed elsewhere, joined by the document's id."
    )
    ask: AskConfig | None = Field(
        default=None, description="A language model behind an endpoint scores, labels or rewrites documents."
    )
    buckets: BucketsConfig | None = Field(
        default=None, description="Quality classes from an ensemble of scores, for routing documents."
    )
    decontamination: DecontaminationConfig | None = Field(
        default=None, description="Drop, cut or mark documents that overlap evaluation sets."
    )
    perplexity: PerplexityConfig | None = Field(
        default=None, description="Perplexity in your own KenLM model."
    )
    unigram_log_prob: UnigramLogProbConfig | None = Field(
        default=None, description="Mean log-probability of words."
    )
    profile: (
        Literal[
            "c4", "dolma", "fineweb", "fineweb2", "fineweb_published", "fineweb_rules", "gopher", "minimal"
        ]
        | None
    ) = Field(default=None, description="A named list of filters, such as gopher.")
    by_language: Annotated[_ByLanguage, WithJsonSchema(_BY_LANGUAGE_SCHEMA)] | None = Field(
        default=None,
        description="Settings of the entry's filter or profile that differ by language, by label; `default` "
        "is for languages that are not named. Or a glob of files with such settings, named by label.",
        examples=[{"deu_Latn": {"max_avg_word_length": 15}}, "configs/*.yml"],
    )

    _steps: tuple[tuple[str, FilterSettings], ...] = PrivateAttr(default=())

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        """Use a filter's defaults for `- gopher_quality:` and `- gopher_quality: true`."""
        if isinstance(data, dict):
            return {
                k: {} if (v is None or v is True) and k in cls.model_fields and k not in _NO_FILTERS else v
                for k, v in data.items()
            }
        return data

    @field_validator("by_language", mode="before")
    @classmethod
    def _with_files(cls, given: object, info: ValidationInfo) -> object:
        folder = (info.context or {}).get("folder")
        return read_overrides(given, folder)

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        names = [name for name in type(self).model_fields if name != "by_language"]
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"each entry of the list is one filter, but this one has {', '.join(given) or 'none'}; write "
                "each as an entry of its own, such as [{length: {min_words: 50}}, gopher_quality]"
            )
        self._steps = with_overrides(self._shared(), self.by_language or {})
        return self

    @model_serializer(mode="wrap")
    def _only_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}

    def filters(self) -> tuple[tuple[str, FilterSettings], ...]:
        """Return (name, settings) of each filter in this entry, in order."""
        return self._steps

    def _shared(self) -> tuple[tuple[str, FilterSettings], ...]:
        """Return (name, settings) of each filter in this entry, without applying `by_language`."""
        if self.profile is not None:
            entries = [FilterEntry.model_validate(entry) for entry in PROFILES[self.profile]]
            return tuple(step for entry in entries for step in entry.filters())
        named = ((name, getattr(self, name)) for name in FilterEntry.model_fields if name not in _NO_FILTERS)
        return tuple((name, config) for name, config in named if config is not None)


def entry_named(name: str, kind: str = "filter", others: Sequence[str] = ()) -> dict[str, object]:
    """Return the entry for a bare name of a filter or profile, such as `gopher`.

    Raises ValueError for an unknown name; its message calls the name a `kind` and also suggests `others`.
    """
    if name in PROFILES:
        return {"profile": name}
    known = [*(field for field in FilterEntry.model_fields if field not in _NO_FILTERS), *PROFILES]
    if name not in known:
        names = [*known, *others]
        said = hint(name, names, FILTERS, {one: repr(one) for one in names})
        said = said or f"known: {', '.join(names)}"
        raise ValueError(f"there is no {kind} {name!r}; {said}")
    return {name: {}}


def with_known_languages(entries: tuple[FilterEntry, ...]) -> tuple[FilterEntry, ...]:
    """Return the entries unchanged. Raises ValueError if `by_language` comes before any `language` filter."""
    found = False
    for number, entry in enumerate(entries):
        for name, config in entry.filters():
            if isinstance(config, ByLanguage) and not found:
                raise ValueError(
                    f"by_language of filters[{number}]: {name} needs a `language` filter before it"
                )
            found |= isinstance(config, LanguageConfig)
    return entries
