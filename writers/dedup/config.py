"""The settings of duplicate removal, as a recipe holds them under `dedup`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from shardkit.settings import FieldName, Listed, Ratio, Shorthand, StrictModel

MAX_PERMUTATIONS = 1024


class UrlDedupConfig(StrictModel):
    """Of documents with the same canonical URL one stays, and all without one; the guide has the rules."""

    keep: Literal["first", "longest"] = Field(
        default="first",
        description="first: of the first input, then of the lowest hash; longest: the longest text of all "
        "inputs, then as first.",
    )
    drop_parameters: Listed[Annotated[str, Field(min_length=1, pattern=r"^[^*]+\*?$")]] = Field(
        default=(),
        max_length=1000,
        description="Parameters of the query that make no difference, besides utm_* and others that track "
        "visitors; ref_* is all names that begin so, and case makes no difference.",
        examples=[["sessionid", "ref_*"]],
    )


class ExactDedupConfig(StrictModel):
    """Of documents with the same text, the one of the first input, then of the lowest hash stays."""

    text: Literal["raw", "normalized"] = Field(
        default="raw",
        description="raw: equal UTF-8; normalized: equal words, whatever their case and what is between.",
    )


class LinesDedupConfig(StrictModel):
    """Lines, paragraphs or spans that stand in other documents already are cut out of later ones."""

    unit: Literal["line", "paragraph", "span"] = Field(
        default="line",
        description="line: between line ends (LF); paragraph: between blank lines; span: a run of `words` "
        "words or more, wherever it begins (exact substring deduplication).",
    )
    min_characters: int = Field(
        default=30, ge=1, description="Shorter ones are never cut, counted without white space at both ends."
    )
    words: int = Field(
        default=50,
        ge=8,
        le=1000,
        description="span: every shared run of so many words is cut, but for up to a third at each end; runs "
        "of less than two thirds never are.",
    )
    keep: int = Field(default=1, ge=1, description="So many documents keep a line that many have.")

    def content(self) -> dict[str, Any]:
        """Return all that decides a byte; `words` came after version 1, and only spans have it."""
        found = super().content()
        return found if self.unit == "span" else {key: found[key] for key in found if key != "words"}

    @model_validator(mode="after")
    def _of_the_unit(self) -> Self:
        """The length of one unit is not set for another."""
        other = "min_characters" if self.unit == "span" else "words"
        if getattr(self, other) != type(self).model_fields[other].default:
            own = "words" if self.unit == "span" else "min_characters"
            raise ValueError(f"unit: {self.unit} has its least length in {own}, not in {other}")
        return self


class MinHashConfig(StrictModel):
    """How a document becomes a MinHash signature; signatures compare only where all of this is the same."""

    unit: Literal["words", "characters", "auto"] = Field(
        default="words",
        description="n-grams of words, or of the normalized text's characters; auto: of words, with each "
        "Chinese, Japanese, Thai, Lao, Khmer or Burmese character a word by itself.",
    )
    ngram: int = Field(default=5, ge=1, le=64, description="Units in one n-gram (shingle).")
    permutations: int = Field(
        default=112, ge=8, le=MAX_PERMUTATIONS, description="Hash functions: values in one signature."
    )
    seed: int = Field(default=1, ge=0, lt=1 << 32, description="Seed of the hash functions.")


class FieldScope(StrictModel):
    """Documents are compared where they have the same value of a field; those without it among themselves."""

    field: FieldName = Field(description="A field that inputs keep in `metadata`, or a path field.")


Scope = Literal["global", "source", "language"] | FieldScope


class NearDedupConfig(StrictModel):
    """A document goes if and only if one that stays, of higher priority, verifies as similar to it."""

    similarity: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8, description="Least Jaccard similarity of the sets of n-grams."
    )
    containment: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Also remove when so much of the smaller set lies in the other one; null: never.",
    )
    minhash: MinHashConfig = Field(default=MinHashConfig(), description="Signatures.")
    bands: int | None = Field(
        default=14, ge=1, description="Bands of the signature; null (with rows): best for the similarity."
    )
    rows: int | None = Field(default=8, ge=1, description="Values in a band; bands x rows <= permutations.")
    scope: Scope = Field(
        default="global",
        description="global: among all inputs; source: within each input alone; language: within each "
        "language that the `language` filter found; {field: NAME}: among documents of the same value.",
        examples=["source", {"field": "dump"}],
    )
    small_shingles: int = Field(
        default=20, ge=0, description="Documents with fewer distinct n-grams are compared more strictly,"
    )
    small_repetition: float = Field(
        default=10.0,
        ge=1,
        description="and those whose n-grams occur so often on average (few words, much text):",
    )
    small_similarity: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.95, description="the least similarity if either document is such a one."
    )
    against: Listed[Annotated[str, Field(min_length=1)]] = Field(
        default=(),
        max_length=256,
        description="Indexes of `shardkit dedup-index` whose documents win over all inputs.",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        """Bands and rows go together: one of them alone cannot be null."""
        if isinstance(data, dict) and ("bands" in data) != ("rows" in data):
            raise ValueError("bands and rows are set together, such as bands: 14 with rows: 8")
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.bands is None) != (self.rows is None):
            raise ValueError("bands and rows are both numbers, or both null")
        if self.bands and self.rows and self.bands * self.rows > self.minhash.permutations:
            needed = self.bands * self.rows
            raise ValueError(
                f"{self.bands} bands x {self.rows} rows need {needed} permutations, minhash.permutations is "
                f"{self.minhash.permutations}"
            )
        if self.against and self.scope != "global":
            raise ValueError(
                "against compares with other corpora, which have other sources: use scope: global"
            )
        return self

    def content(self) -> dict[str, Any]:
        """Return all that decides a byte, with a key that version 1 had, which never decided one."""
        return {**super().content(), "measure": None}

    @property
    def scope_name(self) -> str:
        """The scope in a word or two."""
        return f"field {self.scope.field}" if isinstance(self.scope, FieldScope) else self.scope


class DedupConfig(StrictModel):
    """Removal of repeated documents."""

    omitted_at_default = frozenset({"url"})

    url: Annotated[UrlDedupConfig | None, Shorthand(switch=True)] = Field(
        default=None, description="true: remove documents of equal URLs; null: keep them.", examples=[True]
    )
    exact: Annotated[ExactDedupConfig | None, Shorthand(switch=True)] = Field(
        default=None, description="true: remove equal texts; null: keep them.", examples=[True]
    )
    lines: Annotated[LinesDedupConfig | None, Shorthand(switch=True)] = Field(
        default=None, description="true: cut repeated lines out of documents; null: do not.", examples=[True]
    )
    near: Annotated[NearDedupConfig | None, Shorthand(switch=True, number="similarity")] = Field(
        default=None,
        description="true, or the similarity: remove near-duplicates; null: keep them.",
        examples=[0.8, {"similarity": 0.8}],
    )
    max_removed_fraction: Ratio = Field(
        default=0.9,
        description="A build stops when an input of 1,000 documents or more loses more than this of them.",
    )

    @classmethod
    def schemes(cls) -> list[str]:
        """Return the keys that ask for duplicate removal, each of another kind."""
        return [name for name, info in cls.model_fields.items() if info.default is None]

    @property
    def asked(self) -> frozenset[str]:
        """The schemes that the recipe asks for."""
        return frozenset(name for name in self.schemes() if getattr(self, name) is not None)
