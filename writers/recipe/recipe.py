"""The recipe: everything that decides the bytes of a dataset, as one checked YAML file.

A recipe is read whole and checked whole: every problem is reported at once, each with its key path
(`filters[2].gopher_quality.min_doc_words`), and a key that no model knows is an error that names the closest
one. Values are strict (no "17" for 17). Paths stay as written, relative to the recipe's folder, so that the
recipe's digest and the documents' identities do not depend on where the folder lies.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from shardkit.errors import RecipeError
from shardkit.files import local_path
from shardkit.formats.tokenizer_file import EncodingName
from shardkit.hashing import HASH_NAMES
from shardkit.settings import (
    TRAIN,
    Bounds,
    FieldName,
    Listed,
    LocalPath,
    Place,
    Ratio,
    Shorthand,
    StrictModel,
)
from shardkit.units import parse_bytes
from shardkit.writers.dedup.config import DedupConfig, FieldScope
from shardkit.writers.execution.digests import DecidesNoByte
from shardkit.writers.filters.base import FilterSettings
from shardkit.writers.filters.buckets import BucketsConfig
from shardkit.writers.filters.config import FilterEntry, entry_named, with_known_languages
from shardkit.writers.filters.scores import ScoresConfig
from shardkit.writers.recipe.inputs import GroupConfig, InputConfig, TemplateVariables
from shardkit.writers.recipe.problems import describe_problems
from shardkit.yaml_file import apply_override, load_yaml

__all__ = [
    "InputConfig",
    "OutputConfig",
    "PackConfig",
    "Recipe",
    "SplitConfig",
    "TokenizerConfig",
    "load_recipe",
    "recipe_from_mapping",
    "recipe_schema",
]


def _known_hash(name: str) -> str:
    if name not in HASH_NAMES:
        raise ValueError(f"unknown hash {name!r}; known: {', '.join(sorted(HASH_NAMES))}")
    return name


def _known_compression(name: str) -> str:
    if not re.fullmatch(r"(br|bz2|gz|snappy|zstd)(:-?\d{1,2})?", name):
        raise ValueError(
            f"unknown compression {name!r}; write zstd, zstd:7 (with a level), gz, bz2, br or snappy"
        )
    return name


def _size(value: object) -> int:
    if not isinstance(value, int | str):
        raise ValueError(f"not a size: {value!r:.80} (bytes, or text such as 64MiB)")
    return parse_bytes(value)


_SIZE_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGTPkmgtp]?[iI]?[bB])?\s*$"},
    ]
}


def _is_within(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}/")


PartName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]


def _share(value: object) -> float | int:
    """A share as a float, a number of documents as an int; "0.1%" is 0.001."""
    if isinstance(value, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", value)):
        value = float(found[1]) / 100
    if isinstance(value, float) and 0 < value < 1:
        return value
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40:
        return value
    raise ValueError(f"write a share such as 0.1% or 0.001, or a number of documents, not {value!r}")


def _short_split(given: object) -> object:
    """`{validation: 0.1%}` is short for `{parts: {validation: 0.1%}}`."""
    if isinstance(given, dict) and "parts" not in given:
        settings = {key: given[key] for key in ("similarity",) if key in given}
        return {"parts": {key: value for key, value in given.items() if key not in settings}} | settings
    return given


Size = Annotated[int, BeforeValidator(_size), WithJsonSchema(_SIZE_SCHEMA)]


class TiktokenConfig(StrictModel):
    """What a file of byte pairs and ranks does not say."""

    pattern: str = Field(min_length=1, description="The regular expression that splits texts (`pat_str`).")
    special_tokens: dict[str, int] = Field(default={}, description="Ids of special tokens.")


class TokenizerConfig(StrictModel):
    """The tokenizer that turns documents into token ids."""

    omitted_at_default = frozenset({"bos", "chat_template", "encoding"})

    path: LocalPath = Field(
        description="A Hugging Face tokenizer.json, a SentencePiece model or a .tiktoken file, relative to "
        "the recipe's folder; a folder that has one; or the name of a model whose tokenizer is in the cache "
        "of Hugging Face on this machine, such as gpt2."
    )
    eos: str = Field(
        min_length=1,
        description="The special token that ends every document.",
        examples=["<|endoftext|>", "</s>"],
    )
    bos: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="The special token that begins every document, as Llama's models expect; null: none.",
        examples=["<s>", "<|begin_of_text|>"],
    )
    encoding: EncodingName | TiktokenConfig | None = Field(
        default=None,
        description="Of files of byte pairs and ranks (tiktoken): the published encoding they are of, or "
        "its pattern and special tokens; null: as the file is named.",
        examples=["cl100k_base", {"pattern": "\\S+|\\s+", "special_tokens": {"<|end|>": 512}}],
    )
    chat_template: LocalPath | None = Field(
        default=None,
        description="File with the Jinja template of conversations; null: chat_template.jinja or "
        "tokenizer_config.json beside the tokenizer.",
    )
    chat_template_kwargs: TemplateVariables = Field(
        default={},
        description="Variables of the chat template, as transformers and TRL give them; a record's own come "
        "first. strftime_now: the date that a template takes for today's.",
        examples=[{"enable_thinking": False}, {"date_string": "26 Jul 2024"}],
    )


class PackConfig(StrictModel):
    """How documents become sequences of equal length."""

    omitted_at_default = frozenset({"row_bos", "max_repetitions"})

    sequence_length: int = Field(default=2048, ge=2, le=1 << 24, description="Tokens per sequence.")
    strategy: Literal["best_fit", "concat", "best_fit_truncate", "best_fit_crop"] = Field(
        default="best_fit",
        description="best_fit: no avoidable cut, little padding; concat: cut anywhere, no padding. Two begin "
        "every row with a document, and leave tokens out: best_fit_truncate those beyond a row's length, as "
        "TRL does; best_fit_crop all that do not fit, so that no row is padded, as nanochat does.",
    )
    row_bos: bool = Field(
        default=False,
        description="Whether a row that continues a document begins with `tokenizer.bos` again, so that each "
        "row begins with it (best_fit and concat).",
    )
    max_repetitions: Annotated[int, Field(ge=1, le=1 << 20)] | None = Field(
        default=None,
        description="Rows get a loss mask that leaves out the tokens of spans in which the same 1 to 13 "
        "tokens follow each other more than so many times; null: none. 31 finds what OLMo 2 leaves out with "
        "the whole row.",
    )

    @property
    def crops(self) -> bool:
        """Whether tokens are left out."""
        return self.strategy in ("best_fit_truncate", "best_fit_crop")

    @model_validator(mode="after")
    def _begins_rows_once(self) -> Self:
        if self.row_bos and self.crops:
            raise ValueError(f"row_bos: with {self.strategy} every row begins with a document already")
        return self


TEXT_FORMATS = ("parquet", "jsonl")
Share = Annotated[float | int, BeforeValidator(_share)]


class SplitConfig(StrictModel):
    """Parts of the documents that become datasets of their own, such as a validation set; the rest is train.

    They are drawn after duplicate removal by a hash of the document, so that a part does not depend on those
    after it. A document that is like any other one stays in train, so that no part leaks into another; others
    are drawn in its place.
    """

    parts: dict[PartName, Share | dict[FieldName, Share]] = Field(
        min_length=1,
        max_length=8,
        description="By name: a share such as 0.1% or 0.001, a number of documents, or one of these for each "
        "source that gives any. `split: {validation: 0.1%}` is short for this.",
        examples=[{"validation": "0.1%"}, {"validation": {"docs": "1%", "code": 500}}],
    )
    similarity: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8,
        description="A document stays in train that shares so much of its n-grams with another (Jaccard), or "
        "whose n-grams lie in another one to this degree (containment).",
    )

    @model_validator(mode="after")
    def _leave_something(self) -> Self:
        if TRAIN in self.parts:
            raise ValueError(f"{TRAIN} is the name of what is left; name the parts that are taken from it")
        if sum(share for share in self.parts.values() if isinstance(share, float)) >= 1:
            raise ValueError("the parts take everything; nothing is left to train on")
        return self


class OutputConfig(StrictModel):
    """Where the dataset goes and in which form."""

    not_content = frozenset({"path", "pack"})  # `Recipe.datasets` puts an output's `pack` into its recipe
    omitted_at_default = frozenset({"prefixes", "where"})

    path: Annotated[Place, DecidesNoByte("tasks write into folders of their own")] = Field(
        description="Folder of the finished dataset, relative to the recipe's folder, or s3://bucket/prefix."
    )
    format: Literal["mds", "wds", "parquet", "jsonl", "tokens"] = Field(
        default="mds",
        description="mds: MosaicML Streaming; wds: WebDataset tar; parquet or jsonl: the documents' text; "
        "tokens: whole documents as MDS, for `shardkit pack`.",
    )
    where: Annotated[
        dict[FieldName, Listed[str] | Bounds] | None, DecidesNoByte("tasks that select get a `Selection`")
    ] = Field(
        default=None,
        description="Only documents with one of these values: of `source`, of `language` (which needs that "
        "filter), of a field in `metadata`, of the label of `buckets`, or of `copies`: how many documents it "
        "stands for. Of numbers also bounds; null: all.",
        examples=[{"language": ["de", "fr"]}, {"source": "web", "bucket": "high"}, {"copies": {"min": 2}}],
    )
    pack: Annotated[PackConfig | None, DecidesNoByte("tasks that pack get it")] = Field(
        default=None,
        description="How documents become sequences in this output; null: as the recipe's `pack` says.",
    )
    shard_bytes: Annotated[Size, Field(ge=1 << 10, lt=1 << 32)] = Field(
        default=1 << 26, description="Target size of a shard before compression, bytes (or 64MiB)."
    )
    compression: Annotated[str, AfterValidator(_known_compression)] | None = Field(
        default=None,
        description="MDS: zstd, zstd:7, gz, bz2, br, snappy; null: none, the fastest to load. JSON lines: "
        "zstd or gz. (Parquet is compressed by zstd within.)",
    )
    hashes: Listed[Annotated[str, AfterValidator(_known_hash)]] = Field(
        default=("xxh64",),
        max_length=8,
        description="Hashes of every shard that the index records.",
    )
    prefixes: Annotated[
        Annotated[int, Field(ge=2, le=4096)] | None, DecidesNoByte("publishing names the shards")
    ] = Field(
        default=None,
        description="Deal shards to so many folders, for stores that limit the requests to each prefix.",
    )

    @property
    def is_text(self) -> bool:
        """Whether documents are written as text."""
        return self.format in TEXT_FORMATS

    @model_validator(mode="after")
    def _fits_the_format(self) -> Self:
        if self.format == "wds" and self.compression is not None:
            raise ValueError("compression is for format mds; tar shards are plain")
        if self.format == "parquet" and self.compression is not None:
            raise ValueError("compression is for mds and jsonl; Parquet files are compressed by zstd within")
        if self.format == "jsonl" and self.compression not in (None, "zstd", "gz"):
            raise ValueError("JSON lines are compressed by zstd or gz")
        if self.pack is not None and self.format not in ("mds", "wds"):
            raise ValueError(f"pack is for rows of tokens; an output of format {self.format} has none")
        return self


class Recipe(StrictModel):
    """A whole build. `folder` is where relative paths start; it is not part of the recipe's content."""

    # A dataset has one output, and says in its ledger which splits failed.
    not_content = frozenset({"outputs", "work", "scratch", "check_disk", "max_failed_splits"})
    omitted_at_default = frozenset({"group", "limit", "split", "tokenizer"})

    inputs: Listed[Annotated[InputConfig, Shorthand(text="path")]] = Field(
        min_length=1,
        max_length=4096,
        description="Sources; earlier ones win over later duplicates.",
        examples=["data/*.jsonl", [{"path": "data/*.jsonl", "text": "text"}]],
    )
    filters: Annotated[
        Listed[Annotated[FilterEntry, Shorthand(text=entry_named)]], AfterValidator(with_known_languages)
    ] = Field(
        default=(),
        max_length=64,
        description="Applied in order; the first rule that fails drops a document.",
        examples=[["gopher_quality", {"length": {"min_words": 50}}]],
    )
    annotate: bool = Field(
        default=False,
        description="Keep what every filter thought of every document in annotations/*.parquet.",
    )
    dedup: Annotated[DedupConfig, BeforeValidator(lambda given: {} if given is None else given)] = Field(
        default=DedupConfig(),
        description="Which repeated documents are removed; null: none.",
        examples=[{"exact": True, "near": 0.8}],
    )
    group: Annotated[GroupConfig, Shorthand(text="by")] | None = Field(
        default=None,
        description="Documents that are joined to one text after duplicate removal, such as the files of a "
        "repository; null: none.",
        examples=["repo", {"by": "repo", "separator": "<file_sep>", "title": "path"}],
    )
    split: Annotated[SplitConfig, BeforeValidator(_short_split)] | None = Field(
        default=None,
        description="Parts that become datasets of their own, such as {validation: 0.1%}; null: none.",
        examples=[{"validation": "0.1%"}],
    )
    tokenizer: Annotated[TokenizerConfig, Shorthand(text="path")] | None = Field(
        default=None,
        description="The tokenizer; null is for builds that write text only.",
        examples=[{"path": "tokenizer.json", "eos": "<|endoftext|>"}],
    )
    pack: PackConfig = Field(
        default=PackConfig(),
        description="How documents become sequences.",
        examples=[{"sequence_length": 2048}],
    )
    output: Annotated[OutputConfig, Shorthand(text="path")] = Field(
        default=None,  # type: ignore[assignment]  # the first of `outputs` then
        description="Where the dataset goes.",
        examples=["out"],
    )
    outputs: Listed[Annotated[OutputConfig, Shorthand(text="path")]] = Field(
        default=(),
        max_length=64,
        description="In place of `output`: several datasets of one build, each with the same bytes as if it "
        "were the only one.",
        examples=[[{"path": "text", "format": "parquet"}, {"path": "packed", "format": "mds"}]],
    )
    work: Place | None = Field(
        default=None,
        description="Folder or URL for intermediate files, which machines may share; null: removed after "
        "success, and beside the output (of a remote one: in the recipe's folder, named as the last part of "
        "the URL).",
    )
    scratch: LocalPath | None = Field(
        default=None,
        description="Where `work` is a URL: folder of each machine for what its tasks write; null: below the "
        "system's temporary folder.",
    )
    limit: Annotated[int, Field(ge=1, le=1 << 40)] | None = Field(
        default=None,
        description="For a trial: read at most this many records of each input, from splits spread "
        "evenly over it; null: all.",
    )
    seed: int = Field(default=17, ge=0, lt=1 << 63, description="Seed of the shuffles.")
    memory: Annotated[Size, Field(ge=1 << 28)] = Field(
        default=2_000_000_000, description="Memory that one worker may use, bytes (or 2GB)."
    )
    check_disk: bool = Field(
        default=True, description="Whether a build that would not fit on its disks is refused."
    )
    max_bad_fraction: Ratio = Field(
        default=0.0,
        description="Part of a file's records, and of its bytes, that may be unreadable; 0: stop at one.",
    )
    max_failed_splits: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="Splits (a compressed file, or a part of a plain one) whose tasks may fail in every "
        "attempt; each is quarantined whole.",
    )
    max_record_bytes: Annotated[Size, Field(ge=1 << 10, le=1 << 30)] = Field(
        default=1 << 26,
        description="Longest record (a line, a row's text, the named values of a sample), bytes; a longer "
        "one is unreadable.",
    )

    _folder: Path = PrivateAttr(default_factory=Path.cwd)
    _part: str | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _has_outputs(self) -> Self:
        if (self.output is None) == (not self.outputs):
            raise ValueError("give `output`, or a list of `outputs`")
        if self.outputs:
            self.__dict__["output"] = self.outputs[0]
        places = [output.path for output in self.outputs]
        for number, place in enumerate(places):
            if any(_is_within(place, other) or _is_within(other, place) for other in places[:number]):
                raise ValueError(f"outputs[{number}].path: {place} is, lies in or holds another output")
        if self.is_masked and self.dedup.lines is not None:
            raise ValueError(
                "dedup.lines would cut into conversations and prompts; give those a build of their own"
            )
        if self.is_masked and any(config.fim for config in self.inputs):
            raise ValueError("fim moves parts of documents, so a loss mask cannot be kept: use two builds")
        if self.is_masked and self.tokenizer is None:
            raise ValueError("tokenizer: is missing; its chat template renders messages")
        self._check_buckets()
        self._check_where()
        self._check_scope()
        self._check_group()
        packs = [self.pack, *(output.pack for output in self._all() if output.pack is not None)]
        if any(pack.row_bos for pack in packs) and (self.tokenizer is None or self.tokenizer.bos is None):
            raise ValueError(
                "pack.row_bos: tokenizer.bos is missing; it names the token that rows begin with"
            )
        if self.tokenizer is None and not all(output.is_text for output in self._all()):
            raise ValueError("tokenizer: is missing; only outputs of format parquet or jsonl need none")
        return self

    def _check_buckets(self) -> None:
        """ValueError for buckets of scores that there are not, or under a name that is taken."""
        columns: set[str] = set()
        found = 0
        for _, config in self.filter_chain():
            if isinstance(config, ScoresConfig):
                if twice := sorted(columns & config.columns.keys()):
                    raise ValueError(f"filters: two `scores` filters have a column {twice[0]!r}")
                columns |= config.columns.keys()
            if not isinstance(config, BucketsConfig):
                continue
            found += 1
            if unknown := [one.column for one in config.scores if one.column and one.column not in columns]:
                raise ValueError(
                    f"filters: buckets: no `scores` filter before it has the column {unknown[0]!r}"
                )
            taken = {"source", "language", "copies"}.union(*(config.metadata for config in self.inputs))
            if config.field in taken:
                raise ValueError(f"filters: buckets.field: documents have a {config.field!r} already")
        if found > 1:
            raise ValueError("filters: a recipe has one `buckets` filter; give it all scores")

    def _check_scope(self) -> None:
        """ValueError for near-duplicates by what documents of this recipe do not have."""
        scope = None if self.dedup.near is None else self.dedup.near.scope
        if scope == "language" and not any(step == "language" for step, _ in self.filter_chain()):
            raise ValueError(
                "dedup.near.scope: only the `language` filter knows languages; add it to filters"
            )
        if not isinstance(scope, FieldScope) or any(config.path_fields for config in self.inputs):
            return
        if not any(scope.field in config.metadata for config in self.inputs):
            raise ValueError(
                f"dedup.near.scope: no input keeps a field {scope.field!r}; add it to inputs[].metadata"
            )

    def _check_group(self) -> None:
        """ValueError for a group of what documents of this recipe do not have, or that cannot be kept."""
        if self.group is None:
            return
        if self.is_masked:
            raise ValueError("group: conversations and prompts are texts of their own; use two builds")
        if any(output.format == "tokens" for output in self._all()):
            raise ValueError("group: a token store holds single documents; pack rows in this build")
        packs = [self.pack, *(output.pack for output in self._all() if output.pack is not None)]
        if wrong := [pack for pack in packs if pack.row_bos or pack.crops]:
            key = "row_bos" if wrong[0].row_bos else f"strategy: {wrong[0].strategy}"
            raise ValueError(f"group: is not for pack.{key}; use best_fit or concat, without row_bos")
        if any(config.path_fields for config in self.inputs):
            return
        kept = {field for config in self.inputs for field in config.metadata}
        if missing := [name for name in self.group.fields if name not in kept]:
            raise ValueError(f"group: no input keeps a field {missing[0]!r}; add it to inputs[].metadata")

    def _check_where(self) -> None:
        """ValueError for a `where` of something that documents of this recipe do not have."""
        for number, output in enumerate(self._all()):
            key = f"outputs[{number}].where" if self.outputs else "output.where"
            for name, values in (output.where or {}).items():
                if isinstance(values, Bounds) and name in ("source", "language"):
                    raise ValueError(f"{key}: {name} is no number; give the values")
                if name == "source" and (unknown := {*values} - {*self.sources}):
                    known = ", ".join(dict.fromkeys(self.sources))
                    raise ValueError(f"{key}: there is no source {min(unknown)!r}; there are {known}")
                if name == "language" and not any(step == "language" for step, _ in self.filter_chain()):
                    raise ValueError(f"{key}: only the `language` filter knows languages; add it to filters")
                carried = {field for config in self.inputs for field in config.metadata}
                own = name in ("source", "language", "copies") or any(
                    config.path_fields for config in self.inputs
                )
                own = own or (self.buckets is not None and self.buckets.field == name)
                if not own and name not in carried:
                    raise ValueError(f"{key}: no input keeps a field {name!r}; add it to inputs[].metadata")

    def _all(self) -> tuple[OutputConfig, ...]:
        return self.outputs or (self.output,)

    @property
    def is_masked(self) -> bool:
        """Whether documents have a loss mask: all rows and token stores have it then."""
        return any(config.is_masked for config in self.inputs)

    @property
    def has_masked_rows(self) -> bool:
        """Whether the rows of this dataset have a loss mask, that of documents or of repetitions."""
        is_packed = self.output.format in ("mds", "wds")
        return is_packed and (self.is_masked or self.pack.max_repetitions is not None)

    @property
    def part(self) -> str | None:
        """The part of the split that the dataset of this recipe holds; None without a split."""
        return self._part

    def datasets(self) -> tuple[Recipe, ...]:
        """The recipe of each dataset: the same with one output, for one part of the split.

        A dataset has the same bytes whether it is built with others or alone.
        """
        made = []
        for output in self._all():
            pack = self.pack if output.pack is None else output.pack
            parts = [None] if self.split is None else [TRAIN, *self.split.parts]
            for part in parts:
                path = output.path if part is None else f"{output.path}/{part}"
                one = output.model_copy(update={"path": path, "pack": None})
                copy = self.model_copy(update={"output": one, "outputs": (), "pack": pack})
                made.append(copy.of_part(part))
        return tuple(made)

    def of_part(self, part: str | None) -> Recipe:
        """The same recipe for the dataset that holds one part of the split."""
        copy = self.model_copy()
        copy._part = part
        return copy

    @property
    def folder(self) -> Path:
        """The folder that relative paths start from: the recipe file's, or the one at creation."""
        return self._folder

    def resolve(self, path: str) -> Path:
        """A path of this recipe as a path on this machine."""
        return self._folder / path

    def in_folder(self, folder: Path) -> Recipe:
        """The same recipe with relative paths starting from `folder`."""
        copy = self.model_copy()
        copy._folder = folder.absolute()
        return copy

    def as_trial(self, limit: int) -> Recipe:
        """The same recipe for at most `limit` records of each input, with an output of its own."""
        paths = [{"path": f"{output.path}-limit-{limit}"} for output in self._all()]
        outputs = tuple(one.model_copy(update=path) for one, path in zip(self._all(), paths, strict=True))
        several = outputs if self.outputs else ()
        return self.model_copy(update={"limit": limit, "output": outputs[0], "outputs": several})

    @property
    def sources(self) -> tuple[str, ...]:
        """The label of each input."""
        return tuple(config.source or f"input-{number}" for number, config in enumerate(self.inputs))

    @property
    def buckets(self) -> BucketsConfig | None:
        """The settings of its `buckets` filter, if it has one."""
        return next((one for _, one in self.filter_chain() if isinstance(one, BucketsConfig)), None)

    def content(self) -> dict[str, Any]:
        """Return all that decides a byte of one dataset (`datasets`), as plain data.

        Profiles are written out as the filters they stand for.
        """
        found = super().content()
        if self.output.format not in ("mds", "wds"):
            del found["pack"]
        if self.part is not None:
            found["part"] = self.part
        return found | {"filters": [config.entry(name) for name, config in self.filter_chain()]}

    def filter_chain(self) -> tuple[tuple[str, FilterSettings], ...]:
        """(name, settings) of every filter in order, profiles expanded."""
        return tuple(step for entry in self.filters for step in entry.filters())


def recipe_from_mapping(data: object, *, folder: Path, name: str = "recipe") -> Recipe:
    """A Recipe from plain data; RecipeError lists all problems, each with its key path."""
    try:
        return Recipe.model_validate(data, context={"folder": folder}).in_folder(folder)
    except ValidationError as error:
        raise RecipeError(describe_problems(name, error, Recipe)) from None


def load_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a YAML recipe; `overrides` such as "pack.sequence_length=512" replace keys, values read as YAML.

    Relative paths start from the recipe's folder, those in overrides too.
    """
    path = local_path(path)
    data = load_yaml(path)
    for override in overrides:
        data = apply_override(data, override)
    return recipe_from_mapping(data, folder=path.absolute().parent, name=str(path))


def recipe_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe, for editors."""
    schema = Recipe.model_json_schema(mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "shardkit recipe"} | {
        key: value for key, value in schema.items() if key != "title"
    }
