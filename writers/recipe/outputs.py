"""Settings of the datasets that a recipe's build writes: tokenizer, packing, amounts, parts and formats."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    WithJsonSchema,
    model_validator,
)

from shardkit.formats.tokenizer_file import EncodingName
from shardkit.formats.trainers import TRAINER_FORMATS
from shardkit.hashing import HASH_NAMES
from shardkit.settings import (
    TRAIN,
    Bounds,
    FieldName,
    Listed,
    LocalPath,
    Place,
    Size,
    StrictModel,
)
from shardkit.units import parse_count
from shardkit.writers.execution.digests import DecidesNoByte
from shardkit.writers.recipe.inputs import TemplateVariables


def _known_hash(name: str) -> str:
    if name not in HASH_NAMES:
        raise ValueError(f"unknown hash {name!r}; known hashes: {', '.join(sorted(HASH_NAMES))}")
    return name


def _known_compression(name: str) -> str:
    if not re.fullmatch(r"(br|bz2|gz|snappy|zstd)(:-?\d{1,2})?", name):
        raise ValueError(
            f"unknown compression {name!r}; write zstd, zstd:7 (with a level), gz, bz2, br or snappy"
        )
    return name


PartName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]


def _share(value: object) -> float | int:
    """Return a share as a float between 0 and 1 ("0.1%" is 0.001), or a number of documents as an int."""
    if isinstance(value, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", value)):
        value = float(found[1]) / 100
    if isinstance(value, float) and 0 < value < 1:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40:
        return value
    raise ValueError(f"write a share such as 0.1% or 0.001, or a number of documents, not {value!r}")


def short_split(given: object) -> object:
    """Expand `{validation: 0.1%}`, which is short for `{parts: {validation: 0.1%}}`."""
    if isinstance(given, dict) and "parts" not in given:
        settings = {key: given[key] for key in ("by", "similarity") if key in given}
        return {"parts": {key: value for key, value in given.items() if key not in settings}} | settings
    return given


class TiktokenConfig(StrictModel):
    """The settings of a tiktoken encoding that its file of byte pairs and ranks does not contain."""

    pattern: str = Field(min_length=1, description="The regular expression that splits texts (`pat_str`).")
    special_tokens: dict[str, int] = Field(default={}, description="Ids of special tokens.")


class TokenizerConfig(StrictModel):
    """The tokenizer that turns documents into token ids."""

    omitted_at_default = frozenset({"bos", "chat_template", "encoding"})

    path: LocalPath = Field(
        description="A Hugging Face tokenizer.json, a SentencePiece model or a .tiktoken file, relative to "
        "the recipe's folder; a folder with one of these; or the name of a model whose tokenizer is in the "
        "cache of Hugging Face on this machine, such as gpt2."
    )
    eos: str = Field(
        min_length=1,
        description="The special token that ends every document.",
        examples=["<|endoftext|>", "</s>"],
    )
    bos: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="The special token that begins every document, as Llama models expect; null: no token.",
        examples=["<s>", "<|begin_of_text|>"],
    )
    encoding: EncodingName | TiktokenConfig | None = Field(
        default=None,
        description="For files of byte pairs and ranks (tiktoken): the name of a published encoding, or its "
        "pattern and special tokens; null: the encoding that the file is named after.",
        examples=["cl100k_base", {"pattern": "\\S+|\\s+", "special_tokens": {"<|end|>": 512}}],
    )
    chat_template: LocalPath | None = Field(
        default=None,
        description="File with the Jinja template of conversations; null: chat_template.jinja or "
        "tokenizer_config.json in the tokenizer's folder.",
    )
    chat_template_kwargs: TemplateVariables = Field(
        default={},
        description="Variables of the chat template, as in transformers and TRL; a record's own variables "
        "take precedence. strftime_now: the date that a template uses as today.",
        examples=[{"enable_thinking": False}, {"date_string": "26 Jul 2024"}],
    )


class PackConfig(StrictModel):
    """How documents are packed into sequences of equal length."""

    omitted_at_default = frozenset({"row_bos", "max_repetitions", "order"})

    sequence_length: int = Field(default=2048, ge=2, le=1 << 24, description="Tokens per sequence.")
    strategy: Literal["best_fit", "concat", "best_fit_truncate", "best_fit_crop"] = Field(
        default="best_fit",
        description="best_fit: no avoidable cut, little padding; concat: cut anywhere, no padding. Two "
        "others begin every row with a document and drop tokens: best_fit_truncate cuts documents at the "
        "row length, as TRL does; best_fit_crop drops all that does not fit, so no row is padded, as "
        "nanochat does.",
    )
    order: Literal["shuffled", "source"] = Field(
        default="shuffled",
        description="shuffled: documents and rows are in random order; source: in the order of the inputs, "
        "packed in units of consecutive documents (row groups of Parquet files), as a loader with a "
        "tokenizer makes them; the loader shuffles them.",
    )
    row_bos: bool = Field(
        default=False,
        description="Whether a row that continues a document begins with `tokenizer.bos` again, so that each "
        "row begins with it (best_fit and concat).",
    )
    max_repetitions: Annotated[int, Field(ge=1, le=1 << 20)] | None = Field(
        default=None,
        description="Rows get a loss mask that excludes spans in which the same 1 to 13 tokens are repeated "
        "more often than this; null: no such mask. 31 finds the repetitions for which OLMo 2 excludes the "
        "whole row.",
    )

    @property
    def crops(self) -> bool:
        """Whether the strategy drops tokens."""
        return self.strategy in ("best_fit_truncate", "best_fit_crop")

    @model_validator(mode="after")
    def _begins_rows_once(self) -> Self:
        if self.row_bos and self.crops:
            raise ValueError(
                f"row_bos: is not needed with {self.strategy}, as every row begins with a document already"
            )
        return self


def _fraction(value: object) -> float:
    """Return a share of documents as a float: "25%" and 0.25 are the same."""
    if isinstance(value, str) or (isinstance(value, float) and 0 < value < 1):
        found = _share(value)
        if isinstance(found, float):
            return found
    raise ValueError(f"write a share between 0 and 1, such as 25% or 0.25, not {value!r:.80}")


def _count(value: object) -> int:
    if not isinstance(value, int | str):
        raise ValueError(
            f"write a number of at least 1, or text such as 10B, 1.5M or 200K, not {value!r:.80}"
        )
    return parse_count(value)


_COUNT_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": r"^\s*\d[\d_,]*(\.\d+)?\s*[KMBTkmbt]?\s*$"},
    ]
}
_SHARE_SCHEMA = {
    "anyOf": [
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "string", "pattern": r"^\s*(\d+(\.\d*)?|\.\d+)\s*%\s*$"},
    ]
}
Number = Annotated[int, BeforeValidator(parse_count), WithJsonSchema(_COUNT_SCHEMA)]
TEXT_FORMATS = ("parquet", "jsonl")
Share = Annotated[float | int, BeforeValidator(_share)]


class SplitConfig(StrictModel):
    """Parts of the documents that become separate datasets, such as a validation set; the rest is train.

    Documents are selected after duplicate removal by a hash of the document, so that a part does not depend
    on later parts. A document that is similar to another stays in train, so that no part leaks into another;
    other documents are selected in its place.
    """

    omitted_at_default = frozenset({"by"})

    parts: dict[PartName, Share | dict[FieldName, Share]] = Field(
        min_length=1,
        max_length=8,
        description="Size of each part by name: a share such as 0.1% or 0.001, a number of documents, or one "
        "of these per source; other sources give none. `split: {validation: 0.1%}` is short for this.",
        examples=[{"validation": "0.1%"}, {"validation": {"docs": "1%", "code": 500}}],
    )
    similarity: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8,
        description="A document stays in train if the similarity of its n-grams to another's (Jaccard), or "
        "the share of its n-grams that another contains, is at least this.",
    )
    by: FieldName | None = Field(
        default=None,
        description="Field of metadata, or label of `buckets`, whose documents with one value stay together, "
        "such as a repository, a conversation or the id of the document that was rewritten: all in one part. "
        "Documents without the field are each their own. A part has its number of documents or up to one "
        "such family more; null: documents are selected one by one.",
        examples=["repo"],
    )

    @model_validator(mode="after")
    def _leave_something(self) -> Self:
        if TRAIN in self.parts:
            raise ValueError(
                f"{TRAIN!r} cannot be a part: it always gets the documents that are in no other part; list "
                "only the other parts"
            )
        if sum(share for share in self.parts.values() if isinstance(share, float)) >= 1:
            raise ValueError("the shares of the parts add up to 1 or more; nothing is left to train on")
        if self.by == "language":
            raise ValueError("by: a language would be in one part as a whole; name a field of metadata")
        return self


_AMOUNTS = ("share", "documents", "tokens", "at_most")


class ChoiceConfig(StrictModel):
    """How many of a source's documents are taken.

    Documents are chosen by a hash of the document: those with the lowest hashes. So a source that grows keeps
    its choice: with `share` a chosen document stays chosen, and with `documents` or `tokens` new documents
    replace those with the highest hashes.
    """

    _nothing: ClassVar[str] = "give share, documents, tokens or at_most; leave out the step to take all"

    share: Annotated[float, BeforeValidator(_fraction), WithJsonSchema(_SHARE_SCHEMA)] | None = Field(
        default=None,
        description="Share of the source's documents; each is chosen by its own hash, so the number varies "
        "by chance.",
        examples=["25%", 0.25],
    )
    documents: Number | None = Field(
        default=None, description="Number of documents, exactly.", examples=[100000, "1.5M"]
    )
    tokens: Number | None = Field(
        default=None,
        description="Number of tokens, eos included, as they are before packing: the first documents that "
        "have so many together, so at most one document more. Needs an output of tokens.",
        examples=["10B"],
    )
    by: FieldName | None = Field(
        default=None,
        description="A field of `metadata`, `language` (needs that filter) or the label of `buckets`: "
        "`documents` and `tokens` hold for each of its values, of which there may be 1,000; documents "
        "without the field are a value of their own, null.",
    )
    at_most: Annotated[float, Field(ge=1)] | None = Field(
        default=None,
        description="With `by`: no value of the field has more than so many times the documents of the "
        "rarest one; 10: at most 10:1.",
        examples=[10],
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name in _AMOUNTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give {' or '.join(given)}, not both")
        if not given and not self._may_take_all:
            raise ValueError(self._nothing)
        if self.at_most is not None and self.by is None:
            raise ValueError("at_most: give `by`, the field whose values are compared")
        if self.by is not None and given in ([], ["share"]):
            raise ValueError(
                "by: is for documents, tokens and at_most; a share of a source is one of each value, too"
            )
        return self

    @property
    def _may_take_all(self) -> bool:
        return False

    def scaled(self, share: float) -> Self:
        """Return the settings for a sample of `share` of the source."""
        given = {"documents": self.documents, "tokens": self.tokens}
        changes = {name: max(1, int(one * share)) for name, one in given.items() if one is not None}
        return self.model_copy(update=changes)

    @property
    def chooses(self) -> bool:
        """Whether some documents of the source are left out."""
        return self.share is not None or self.counts

    @property
    def counts(self) -> bool:
        """Whether documents or tokens are counted to choose."""
        return self.number is not None or self.at_most is not None

    @property
    def number(self) -> int | None:
        """The number of documents or tokens; None for a share."""
        return self.documents or self.tokens


class AmountConfig(ChoiceConfig):
    """How much of a source goes into the datasets: what is left after all steps, and before `split`."""

    _nothing: ClassVar[str] = (
        "give share, documents, tokens, at_most or repeat; leave out the source to take all of it"
    )

    repeat: Annotated[float, Field(gt=1, le=1000)] | None = Field(
        default=None,
        description="How often each chosen document is in the rows of train, at different places of the "
        "order; 2.5: all of them twice, and half of them, by hash, a third time. Other parts of a `split` "
        "have each document once.",
        examples=[2, 2.5],
    )

    @property
    def _may_take_all(self) -> bool:
        return self.repeat is not None


class SampleConfig(ChoiceConfig):
    """How many documents of each source a `sample` among the `steps` takes; later steps read only these."""

    sources: Listed[FieldName] = Field(
        default=(),
        description="Labels of the inputs of which so much is taken; the others stay whole. Empty: all.",
        examples=[["web"]],
    )

    def of(self, labels: Sequence[str]) -> dict[str, SampleConfig]:
        """Return the settings by source, of the sources that are sampled; `labels` are all sources."""
        return {label: self for label in labels if not self.sources or label in self.sources}


def _text_of(value: object) -> object:
    """Convert a number in a list of values to text; documents' values are compared as text."""
    return str(value) if isinstance(value, int | float) else value


_Value = Annotated[str, BeforeValidator(_text_of), WithJsonSchema({"type": ["string", "number", "boolean"]})]


class OutputConfig(StrictModel):
    """The place and the format of a dataset."""

    # `pack` is not content here, because `Recipe.datasets` makes it the `pack` of the dataset's own recipe.
    not_content = frozenset({"path", "pack"})
    omitted_at_default = frozenset({"prefixes", "where"})

    path: Annotated[Place, DecidesNoByte("tasks write into folders of their own")] = Field(
        description="Folder of the finished dataset, relative to the recipe's folder, or s3://bucket/prefix."
    )
    format: Literal[
        "mds", "wds", "parquet", "jsonl", "tokens", "megatron", "olmo", "nanogpt", "llmc", "datatrove"
    ] = Field(
        default="mds",
        description="mds: MosaicML Streaming; wds: WebDataset tar; parquet or jsonl: the documents' text; "
        "tokens: whole documents as MDS, for `shardkit pack`; megatron, olmo, nanogpt, llmc or datatrove: "
        "whole documents in the files of another trainer.",
    )
    where: Annotated[
        dict[FieldName, Listed[_Value] | Bounds] | None, DecidesNoByte("tasks that select get a `Selection`")
    ] = Field(
        default=None,
        description="Only documents with one of these values of `source`, of `language` (needs that filter), "
        "of a field in `metadata`, of the label of `buckets`, or of `copies`, the number of documents that "
        "this one represents. Numbers may have bounds instead; null: all documents.",
        examples=[{"language": ["de", "fr"]}, {"source": "web", "bucket": "high"}, {"copies": {"min": 2}}],
    )
    pack: Annotated[PackConfig | None, DecidesNoByte("tasks that pack get it")] = Field(
        default=None,
        description="How documents are packed in this output; null: by the recipe's `pack`.",
    )
    shard_bytes: Annotated[Size, Field(ge=1 << 10, lt=1 << 32)] = Field(
        default=1 << 26, description="Target size of a shard before compression, bytes (or 64MiB)."
    )
    compression: Annotated[str, AfterValidator(_known_compression)] | None = Field(
        default=None,
        description="MDS: zstd, zstd:7, gz, bz2, br, snappy; null: none, the fastest to load. JSON lines: "
        "zstd or gz. (Parquet files always use zstd internally.)",
    )
    hashes: Listed[Annotated[str, AfterValidator(_known_hash)]] = Field(
        default=("xxh64",),
        max_length=8,
        description="Hash functions whose value for every shard is in the index.",
    )
    prefixes: Annotated[
        Annotated[int, Field(ge=2, le=4096)] | None, DecidesNoByte("publishing names the shards")
    ] = Field(
        default=None,
        description="Number of folders to spread shards over, for stores that limit requests per prefix.",
    )

    @property
    def is_text(self) -> bool:
        """Whether documents are written as text."""
        return self.format in TEXT_FORMATS

    @property
    def has_rows(self) -> bool:
        """Whether documents are packed into rows of one length."""
        return self.format in ("mds", "wds")

    @property
    def is_for_trainer(self) -> bool:
        """Whether whole documents are written as the files of another trainer."""
        return self.format in TRAINER_FORMATS

    @model_validator(mode="after")
    def _fits_the_format(self) -> Self:
        if self.format == "wds" and self.compression is not None:
            raise ValueError("compression is for mds and jsonl; tar shards are never compressed")
        if self.format == "parquet" and self.compression is not None:
            raise ValueError("compression is for mds and jsonl; Parquet files always use zstd internally")
        if self.format == "jsonl" and self.compression not in (None, "zstd", "gz"):
            raise ValueError("compression of JSON lines must be zstd or gz")
        if self.is_for_trainer and self.compression is not None:
            trainer = TRAINER_FORMATS[self.format].trainer
            raise ValueError(f"compression is for mds and jsonl; {trainer} reads uncompressed files")
        if self.is_for_trainer and self.prefixes is not None:
            trainer = TRAINER_FORMATS[self.format].trainer
            raise ValueError(f"prefixes: {trainer} is given one folder of files; leave it out")
        if self.pack is not None and not self.has_rows:
            raise ValueError(f"pack is for rows of tokens, but an output of format {self.format} has no rows")
        return self
