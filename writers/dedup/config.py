"""The settings of duplicate removal, as a recipe holds them under `dedup`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from shardkit.settings import FieldName, Listed, Ratio, Shorthand, Source, StrictModel
from shardkit.writers.filters.scores import DocumentId
from shardkit.writers.filters.user_code import FunctionName, UserCode, named_after_the_file

MAX_PERMUTATIONS = 1024


class UrlDedupConfig(StrictModel):
    """Keeps one document per canonical URL, and all documents without a URL; see the guide for the rules."""

    keep: Literal["first", "longest"] = Field(
        default="first",
        description="Which document is kept. first: the one from the earliest input, and within one input "
        "the lowest hash; longest: the longest text of all inputs, and of equally long ones as first.",
    )
    drop_parameters: Listed[Annotated[str, Field(min_length=1, pattern=r"^[^*]+\*?$")]] = Field(
        default=(),
        max_length=1000,
        description="Query parameters to ignore, in addition to utm_* and other parameters that track "
        "visitors. A final * matches any ending, as in ref_*; case is ignored.",
        examples=[["sessionid", "ref_*"]],
    )


class ExactDedupConfig(StrictModel):
    """Keeps one document per text: the one from the earliest input, and within one input the lowest hash."""

    text: Literal["raw", "normalized"] = Field(
        default="raw",
        description="raw: equal UTF-8; normalized: equal words, ignoring case and everything between words.",
    )


class LinesDedupConfig(StrictModel):
    """Cuts lines, paragraphs or spans out of a document if earlier documents contain them."""

    unit: Literal["line", "paragraph", "span"] = Field(
        default="line",
        description="line: text between line ends (LF); paragraph: text between blank lines; span: any run "
        "of `words` words or more (exact substring deduplication).",
    )
    min_characters: int = Field(
        default=30,
        ge=1,
        description="Shorter lines and paragraphs are never cut; white space at both ends does not count.",
    )
    words: int = Field(
        default=50,
        ge=8,
        le=1000,
        description="Number of words in a span. Every shared run of this many words is cut, except up to a "
        "third of `words` at each end; runs of less than two thirds of `words` are never cut.",
    )
    keep: int = Field(default=1, ge=1, description="Number of documents that keep a repeated line.")

    def content(self) -> dict[str, Any]:
        """Return the settings that affect the output; `words`, unknown to version 1, only if unit is span."""
        found = super().content()
        return found if self.unit == "span" else {key: found[key] for key in found if key != "words"}

    @model_validator(mode="after")
    def _of_the_unit(self) -> Self:
        """Raise ValueError if `words` or `min_characters` is set, but does not apply to this unit."""
        other = "min_characters" if self.unit == "span" else "words"
        if getattr(self, other) != type(self).model_fields[other].default:
            own = "words" if self.unit == "span" else "min_characters"
            raise ValueError(f"{other} has no effect with unit: {self.unit}; set {own} instead")
        return self


class MinHashConfig(StrictModel):
    """Settings of MinHash signatures; only signatures with the same settings can be compared."""

    unit: Literal["words", "characters", "auto"] = Field(
        default="words",
        description="words: n-grams of words; characters: n-grams of the normalized text's characters; auto: "
        "n-grams of words, where each Chinese, Japanese, Thai, Lao, Khmer or Burmese character is a word.",
    )
    ngram: int = Field(default=5, ge=1, le=64, description="Number of units in one n-gram (shingle).")
    permutations: int = Field(
        default=112, ge=8, le=MAX_PERMUTATIONS, description="Number of hash functions and signature values."
    )
    seed: int = Field(default=1, ge=0, lt=1 << 32, description="Seed of the hash functions.")


class FieldScope(StrictModel):
    """Compares documents with the same value of a field; documents without the field form one group."""

    field: FieldName = Field(description="A field that inputs keep in `metadata`, or a path field.")


Scope = Literal["global", "source", "language"] | FieldScope


class NearDedupConfig(StrictModel):
    """Removes a document if and only if a kept document of higher priority verifies as similar to it."""

    similarity: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8, description="Minimum Jaccard similarity of the sets of n-grams of near-duplicates."
    )
    containment: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Two documents are also near-duplicates if at least this share of the smaller set of "
        "n-grams is in the other one. null: containment is ignored.",
    )
    minhash: MinHashConfig = Field(default=MinHashConfig(), description="Settings of the signatures.")
    bands: int | None = Field(
        default=14,
        ge=1,
        description="Number of bands of a signature; null, with rows: null, is the best for `similarity`.",
    )
    rows: int | None = Field(
        default=8, ge=1, description="Number of values in a band; bands x rows <= permutations."
    )
    scope: Scope = Field(
        default="global",
        description="Which documents are compared. global: all; source: those of the same input; language: "
        "those of the same language (needs the `language` filter); {field: NAME}: those of the same value.",
        examples=["source", {"field": "dump"}],
    )
    small_shingles: int = Field(
        default=20, ge=0, description="Documents with fewer distinct n-grams need `small_similarity`."
    )
    small_repetition: float = Field(
        default=10.0,
        ge=1,
        description="Documents whose n-grams occur at least this often on average need `small_similarity`.",
    )
    small_similarity: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.95,
        description="Minimum similarity if one document is small or repetitive (the two settings above).",
    )
    against: Listed[Annotated[str, Field(min_length=1)]] = Field(
        default=(),
        max_length=256,
        description="Indexes of `shardkit dedup-index`, whose documents have priority over all inputs.",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        """Raise ValueError if only one of bands and rows is set."""
        if isinstance(data, dict) and ("bands" in data) != ("rows" in data):
            raise ValueError("only one of bands and rows is set; set both, such as bands: 14 with rows: 8")
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.bands is None) != (self.rows is None):
            raise ValueError("only one of bands and rows is null; set both to numbers, or both to null")
        if self.bands and self.rows and self.bands * self.rows > self.minhash.permutations:
            needed = self.bands * self.rows
            raise ValueError(
                f"{self.bands} bands x {self.rows} rows need {needed} permutations, but minhash.permutations "
                f"is {self.minhash.permutations}"
            )
        if self.against and self.scope != "global":
            raise ValueError("against compares with corpora that have other sources; use scope: global")
        return self

    def content(self) -> dict[str, Any]:
        """Return the settings that affect the output, and the key `measure` of version 1, now unused."""
        return {**super().content(), "measure": None}

    @property
    def scope_name(self) -> str:
        """The scope in one or two words, for messages."""
        return f"field {self.scope.field}" if isinstance(self.scope, FieldScope) else self.scope


class EmbedConfig(StrictModel):
    """The origin of the vectors of documents: a static model, your `function`, or files (`vectors`)."""

    omitted_at_default: ClassVar[frozenset[str]] = frozenset({"vectors", "column", "key", "document"})

    model: FieldName | None = Field(
        default=None,
        description="A safetensors file with a vector per token, as model2vec writes: a document's vector is "
        "the mean of those of its tokens.",
        examples=["model.safetensors"],
    )
    tokenizer: FieldName | None = Field(
        default=None, description="The tokenizer.json of `model`.", examples=["tokenizer.json"]
    )
    max_tokens: int = Field(
        default=512, ge=1, le=1 << 20, description="Tokens of a document that `model` reads, from its start."
    )
    function: FunctionName | None = Field(
        default=None,
        description="package.module:function of your code, or a class; it gets a list of texts and returns "
        "their vectors, float32[n, dimensions].",
        examples=["my_vectors:embed"],
    )
    file: FieldName | None = Field(
        default=None, description="Python file that defines `function`, instead of an installed module."
    )
    parameters: dict[str, JsonValue] = Field(default={}, description="Keyword arguments of `function`.")
    data: dict[FieldName, FieldName] = Field(
        default={}, description="Files that `function` reads: keyword arguments that get their paths."
    )
    vectors: Listed[Source] = Field(
        default=(),
        max_length=4096,
        description="Parquet files or JSON lines with vectors that were made elsewhere, one row per "
        "document, in any order: paths, globs or URLs.",
        examples=["vectors/*.parquet"],
    )
    column: FieldName = Field(
        default="embedding", description="Column of `vectors` with a list of numbers per row."
    )
    key: FieldName = Field(
        default="document_id", description="Column of `vectors` with a document's id, as text or integers."
    )
    document: DocumentId = Field(
        default="document_id",
        description="Which id of a document the key is compared with: document_id as in text outputs and "
        "annotations, or the document's own `id` or `url`.",
    )

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: Any) -> Any:
        return named_after_the_file(data)

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        """Raise ValueError unless the settings are those of one origin of vectors, all of them."""
        of = {
            "model": ("tokenizer", "max_tokens"),
            "function": ("file", "parameters", "data"),
            "vectors": ("column", "key", "document"),
        }
        given = [name for name in of if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                "vectors come from `model` (with `tokenizer`), from `function`, or from files (`vectors`); "
                "give one of them"
            )
        for name in (one for origin in of if origin not in given for one in of[origin]):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with {given[0]}; leave it out")
        if self.model is not None and self.tokenizer is None:
            raise ValueError("model needs its tokenizer; set tokenizer, such as tokenizer.json")
        if self.vectors and self.key == self.column:
            raise ValueError(f"{self.key!r} is the id column; it cannot have the vectors too")
        return self

    @property
    def origin(self) -> str:
        """The name of what makes the vectors, for messages and cards."""
        return self.function or self.model or ", ".join(self.vectors)

    @property
    def code(self) -> UserCode | None:
        """The user's code that makes vectors; None if they are of another origin."""
        if self.function is None:
            return None
        return UserCode(function=self.function, file=self.file, parameters=self.parameters, data=self.data)

    def files(self) -> tuple[str, ...]:
        """Return the paths of the model and code, relative to the recipe's folder; not those of `vectors`."""
        if self.code is not None:
            return self.code.code_files("dedup.semantic.embed")
        return () if self.model is None or self.tokenizer is None else (self.model, self.tokenizer)


class SemanticDedupConfig(StrictModel):
    """Removes a document if and only if the vector of a kept one of higher priority is verified as alike."""

    omitted_at_default: ClassVar[frozenset[str]] = frozenset({"distance"})

    embed: EmbedConfig = Field(
        description="Where the vectors of documents come from.",
        examples=[{"model": "model.safetensors", "tokenizer": "tokenizer.json"}],
    )
    similarity: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.95, description="Minimum cosine of the vectors of semantic duplicates."
    )
    clusters: Annotated[int, Field(ge=1, le=1 << 20)] | None = Field(
        default=None,
        description="Number of clusters (k-means), within which documents are compared; null: the power of "
        "two nearest to the square root of the number of documents.",
    )
    probes: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Number of nearest clusters in which each document is compared; more find more of the "
        "duplicates at the borders of clusters.",
    )
    field: FieldName | None = Field(
        default=None,
        description="Metadata field in which the number of a document's nearest cluster is stored, for "
        "output.where; null: none.",
        examples=["cluster"],
    )
    distance: FieldName | None = Field(
        default=None,
        description="Metadata field in which a document's cosine distance to the centroid of its nearest "
        "cluster is stored, from 0 (the most typical) to 2, with four decimals; null: none.",
        examples=["distance"],
    )

    @model_validator(mode="after")
    def _two_fields(self) -> Self:
        if self.field is not None and self.field == self.distance:
            raise ValueError(f"field and distance are both {self.field!r}; rename one")
        return self

    @property
    def fields(self) -> dict[str, str]:
        """The metadata fields that documents get, by what they hold: `cluster` and `distance`."""
        named = {"cluster": self.field, "distance": self.distance}
        return {column: name for column, name in named.items() if name is not None}


class DedupSchemes(StrictModel):
    """The schemes of duplicate removal, in their default order; all are off by default."""

    url: Annotated[UrlDedupConfig | None, Shorthand(switch=True)] = Field(
        default=None, description="true: remove documents with equal URLs; null: keep them.", examples=[True]
    )
    exact: Annotated[ExactDedupConfig | None, Shorthand(switch=True)] = Field(
        default=None, description="true: remove documents with equal texts; null: keep them.", examples=[True]
    )
    lines: Annotated[LinesDedupConfig | None, Shorthand(switch=True)] = Field(
        default=None, description="true: cut repeated lines out of documents; null: do not.", examples=[True]
    )
    near: Annotated[NearDedupConfig | None, Shorthand(switch=True, number="similarity")] = Field(
        default=None,
        description="true, or the similarity: remove near-duplicates; null: keep them.",
        examples=[0.8, {"similarity": 0.8}],
    )
    semantic: SemanticDedupConfig | None = Field(
        default=None,
        description="Remove documents of the same meaning, by vectors; null: keep them.",
        examples=[{"embed": {"model": "model.safetensors", "tokenizer": "tokenizer.json"}}],
    )

    @classmethod
    def schemes(cls) -> list[str]:
        """Return the names of the schemes of duplicate removal: url, exact, lines, near, semantic."""
        return list(DedupSchemes.model_fields)

    @property
    def asked(self) -> frozenset[str]:
        """The names of the schemes that are set."""
        return frozenset(name for name in self.schemes() if getattr(self, name) is not None)


class DedupConfig(DedupSchemes):
    """Settings of duplicate removal."""

    omitted_at_default = frozenset({"semantic", "url"})

    max_removed_fraction: Ratio = Field(
        default=0.9,
        description="A build fails if duplicate removal takes a larger share of the documents of an input; "
        "inputs of fewer than 1,000 documents are not checked.",
    )
