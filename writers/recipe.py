"""The recipe: everything that decides the bytes of a dataset, as one checked YAML file.

A recipe is read whole and checked whole: every problem is reported at once, each with its key path
(`filters[2].gopher_quality.min_doc_words`), and a key that no model knows is an error that names the closest
one. Values are strict (no "17" for 17). Paths stay as written, relative to the recipe's folder, so that the
recipe's digest and the documents' identities do not depend on where the folder lies.
"""

from __future__ import annotations

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
from shardkit.hashing import HASH_NAMES
from shardkit.storage.url import is_remote
from shardkit.units import parse_bytes
from shardkit.writers.dedup.config import DedupConfig
from shardkit.writers.filters.base import FilterSettings
from shardkit.writers.filters.config import FilterEntry
from shardkit.writers.recipe_text import apply_override, describe_problems, load_yaml
from shardkit.writers.settings import FieldName, Ratio, StrictModel

__all__ = [
    "InputConfig",
    "OutputConfig",
    "PackConfig",
    "Recipe",
    "TokenizerConfig",
    "load_recipe",
    "recipe_from_mapping",
    "recipe_schema",
]


def _local(path: str) -> str:
    """Refuse what would be read as a folder named "s3:"."""
    if "://" in path:
        raise ValueError("a local path is needed here; only inputs and the output may be URLs")
    if not path or "\0" in path:
        raise ValueError("a path cannot be empty or hold a NUL")
    return path


def _url_or_path(path: str) -> str:
    if path.lower().startswith("file://"):
        raise ValueError("write a local path without file://")
    scheme, mark, rest = path.partition("://")
    if not mark:
        return _local(path)
    if not scheme.isalnum() or not rest.strip("/") or "\0" in path:
        raise ValueError(f"{path!r} is no URL, such as s3://bucket/prefix")
    return path


def _place(path: str) -> str:
    """A local path, or the URL of a bucket and prefix."""
    path = _url_or_path(path)
    return path.rstrip("/") if is_remote(path) else path


def _known_hash(name: str) -> str:
    if name not in HASH_NAMES:
        raise ValueError(f"unknown hash {name!r}; known: {', '.join(sorted(HASH_NAMES))}")
    return name


def _size(value: object) -> int:
    if not isinstance(value, int | str):
        raise ValueError(f"not a size: {value!r} (bytes, or text such as 64MiB)")
    return parse_bytes(value)


_SIZE_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGTPkmgtp]?[iI]?[bB])?\s*$"},
    ]
}
LocalPath = Annotated[str, AfterValidator(_local)]
Place = Annotated[str, AfterValidator(_place)]
Source = Annotated[str, AfterValidator(_url_or_path)]
Size = Annotated[int, BeforeValidator(_size), WithJsonSchema(_SIZE_SCHEMA)]


class InputConfig(StrictModel):
    """One source of documents."""

    path: Source = Field(
        description="File, folder or glob of these (** crosses folders), from the recipe's folder, or a URL "
        "of these."
    )
    base: Source | None = Field(
        default=None,
        description="Folder (or URL, of a remote input) that file names are relative to, so that documents "
        "keep their ids when the files move; null: the recipe's folder, or nothing of a URL.",
    )
    text: FieldName = Field(
        default="text",
        description="Field or column that holds the text; a.b is field b inside a (id, url, metadata too).",
    )
    id: FieldName | None = Field(
        default=None,
        description='Field with your own id; null: "id" where a record has it.',
    )
    url: FieldName | None = Field(
        default=None,
        description='Field with the URL; null: "url" where a record has it.',
    )
    metadata: tuple[FieldName, ...] = Field(
        default=(),
        strict=False,
        description="Other fields to keep in the provenance table, as one JSON object.",
    )
    source: FieldName | None = Field(
        default=None,
        description="Label of this input in reports and provenance; null: input-<number in the recipe>.",
    )
    format: Literal["jsonl", "parquet", "arrow", "csv", "text", "warc"] | None = Field(
        default=None,
        description="null: from the name (before .gz .zst .bz2 .xz .lz4): .jsonl .parquet .arrow .feather "
        ".csv .tsv .txt .warc .wet .arc and a few more.",
    )
    extract: Literal["resiliparse", "trafilatura", "none"] | None = Field(
        default=None,
        description="Takes the main text out of HTML; null: resiliparse for pages of WARC files, else none.",
    )
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = Field(
        default=None, description="CSV: between fields; null: a tab for names with .tsv, else a comma."
    )
    columns: tuple[FieldName, ...] = Field(
        default=(), strict=False, description="CSV: names of the columns; (): the first row has them."
    )
    lines: bool = Field(
        default=False, description="Text files: each line is a document (default: each file is one)."
    )

    _is_sample: bool = PrivateAttr(default=False)

    @property
    def is_sample(self) -> bool:
        """Whether this reads a sample of another input's files."""
        return self._is_sample

    def as_sample(self, path: str) -> InputConfig:
        """This input for a sample of its files, at `path`."""
        copy = self.model_copy(update={"path": path, "base": None})
        copy._is_sample = True
        return copy

    @model_validator(mode="after")
    def _base_is_above_the_path(self) -> Self:
        if self.base is not None and is_remote(self.path) != is_remote(self.base):
            raise ValueError("base is a folder above the path, or a URL above the path's if that is a URL")
        return self


class TokenizerConfig(StrictModel):
    """The tokenizer that turns documents into token ids."""

    path: LocalPath = Field(description="A Hugging Face tokenizer.json, relative to the recipe's folder.")
    eos: str = Field(min_length=1, description="The special token that ends every document.")


class PackConfig(StrictModel):
    """How documents become sequences of equal length."""

    sequence_length: int = Field(default=2048, ge=2, le=1 << 24, description="Tokens per sequence.")
    strategy: Literal["best_fit", "concat"] = Field(
        default="best_fit",
        description="best_fit: no avoidable cut, little padding; concat: cut anywhere, no padding.",
    )


class OutputConfig(StrictModel):
    """Where the dataset goes and in which form."""

    path: Place = Field(
        description="Folder of the finished dataset, relative to the recipe's folder, or s3://bucket/prefix."
    )
    format: Literal["mds", "wds"] = Field(
        default="mds", description="mds: MosaicML Streaming; wds: WebDataset tar."
    )
    shard_bytes: Annotated[Size, Field(ge=1 << 10, lt=1 << 32)] = Field(
        default=1 << 26, description="Target size of a shard before compression, bytes (or 64MiB)."
    )
    compression: Annotated[str, Field(pattern=r"^(br|bz2|gz|snappy|zstd)(:-?\d{1,2})?$")] | None = Field(
        default=None,
        description="MDS only: zstd, zstd:7, gz, bz2, br, snappy; null: none, the fastest to load.",
    )
    hashes: tuple[Annotated[str, AfterValidator(_known_hash)], ...] = Field(
        default=("xxh64",),
        strict=False,
        max_length=8,
        description="Hashes of every shard that the index records.",
    )

    @model_validator(mode="after")
    def _tar_is_plain(self) -> Self:
        if self.format == "wds" and self.compression is not None:
            raise ValueError("compression is for format mds; tar shards are plain")
        return self


class Recipe(StrictModel):
    """A whole build. `folder` is where relative paths start; it is not part of the recipe's content."""

    inputs: tuple[InputConfig, ...] = Field(
        strict=False,
        min_length=1,
        max_length=4096,
        description="Sources; earlier ones win over later duplicates.",
    )
    filters: tuple[FilterEntry, ...] = Field(
        default=(),
        strict=False,
        max_length=64,
        description="Applied in order; the first rule that fails drops a document.",
    )
    annotate: bool = Field(
        default=False,
        description="Keep what every filter thought of every document in annotations/*.parquet.",
    )
    dedup: Annotated[DedupConfig, BeforeValidator(lambda given: {} if given is None else given)] = Field(
        default=DedupConfig(), description="Which repeated documents are removed; null: none."
    )
    tokenizer: TokenizerConfig = Field(description="The tokenizer.")
    pack: PackConfig = Field(default=PackConfig(), description="How documents become sequences.")
    output: OutputConfig = Field(description="Where the dataset goes.")
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
    max_record_bytes: Annotated[Size, Field(ge=1 << 10, le=1 << 30)] = Field(
        default=1 << 26,
        description="Longest record (a line, or a row's text), bytes; a longer one is unreadable.",
    )

    _folder: Path = PrivateAttr(default_factory=Path.cwd)

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

    @property
    def sources(self) -> tuple[str, ...]:
        """The label of each input."""
        return tuple(config.source or f"input-{number}" for number, config in enumerate(self.inputs))

    def filter_chain(self) -> tuple[tuple[str, FilterSettings], ...]:
        """(name, settings) of every filter in order, profiles expanded."""
        return tuple(step for entry in self.filters for step in entry.filters())


def recipe_from_mapping(data: object, *, folder: Path, name: str = "recipe") -> Recipe:
    """A Recipe from plain data; RecipeError lists all problems, each with its key path."""
    try:
        return Recipe.model_validate(data).in_folder(folder)
    except ValidationError as error:
        raise RecipeError(describe_problems(name, error, Recipe)) from None


def load_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a YAML recipe; `overrides` such as "pack.sequence_length=512" replace keys, values read as YAML.

    Relative paths start from the recipe's folder, those in overrides too.
    """
    path = Path(path)
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
