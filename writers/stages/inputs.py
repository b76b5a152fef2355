"""The inputs of a build, which are examined before the first task: splits, dedup indexes, the files of
filters, the tokenizer, and files with scores and vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, ClassVar

from shardkit.errors import BuildError, RecipeError, ShardError
from shardkit.formats.tokenizer_file import Encoding, Engine, find_tokenizer, own_engine
from shardkit.hashing import digest_of, hash_file
from shardkit.storage.store import StorageOptions
from shardkit.storage.url import is_remote
from shardkit.tokens.tokenizer import Encoder, Ranges, load_encoder, tokenizer_digest
from shardkit.writers.dedup.config import EmbedConfig
from shardkit.writers.dedup.index import DedupIndex, open_index
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS, Limits
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.digests import DecidesNoByte, RecipeKey
from shardkit.writers.filters.scores import ScoresConfig
from shardkit.writers.inputs.masking import Masking
from shardkit.writers.inputs.scan import Split, hash_splits, scan_inputs
from shardkit.writers.inputs.small_files import group_small_files
from shardkit.writers.recipe.inputs import InputConfig
from shardkit.writers.recipe.outputs import TiktokenConfig
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.recipe.steps import FilterPass
from shardkit.writers.stages.vectors import dimensions_of


@dataclass(frozen=True)
class BuildInputs:
    """All inputs of a build, examined before the first task.

    `indexes` are those of `near` by their paths in the recipe, in order. `filter_files` has the digests of
    the files of filters and readers by their paths in the recipe; `filter_folder` is the folder where tasks
    find them, if not the recipe's folder. `tokenizer` is None if no dataset has tokens. `scores` are the
    files of `scores` filters, `vectors` those of `dedup.semantic`. `limits` apply to all exchanges; tests set
    small ones, so that small data behaves like large data.
    """

    recipe: Recipe
    splits: Sequence[Split]
    indexes: Mapping[str, DedupIndex]
    filter_files: Mapping[str, str]
    filter_folder: Artifact | None = None
    masking: Masking | None = None
    limits: Limits = DEFAULT_LIMITS
    tokenizer: TokenizerFile | None = None
    scores: Sequence[ScoreFiles] = ()
    vectors: VectorFiles | None = None

    @classmethod
    def of(
        cls, recipe: Recipe, splits: Sequence[Split], storage: StorageOptions | None = None
    ) -> BuildInputs:
        """Open dedup indexes and hash the files of filters. Raises RecipeError if one cannot be used."""
        editing = [name for name, config in recipe.filter_chain() if config.may_edit]
        if recipe.is_masked and editing:
            raise RecipeError(
                f"filters: {editing[0]} edits texts, which would damage conversations and prompts; build "
                f"these inputs with a separate recipe"
            )
        return cls(
            recipe,
            splits_of_tasks(recipe, splits),
            _open_indexes(recipe, storage),
            filter_files(recipe),
            masking=Masking.of(recipe),
            tokenizer=TokenizerFile.of(recipe),
            limits=DEFAULT_LIMITS.within(recipe.memory),
            scores=find_score_files(recipe, storage),
            vectors=find_vector_files(recipe, storage),
        )

    @property
    def joined(self) -> Sequence[JoinedFiles]:
        """The files with values that documents are joined with by their ids."""
        return self.scores if self.vectors is None else (*self.scores, self.vectors)

    @cached_property
    def read_files(self) -> Mapping[str, str]:
        """The digests of all files that filters and duplicate removal read, by name."""
        joined = (one.digests() for one in self.joined)
        return {name: digest for files in (self.filter_files, *joined) for name, digest in files.items()}

    @property
    def folder_of_filters(self) -> Artifact:
        """The folder where tasks find the files of filters."""
        return Artifact(self.recipe.folder) if self.filter_folder is None else self.filter_folder

    def files_of(self, filters: FilterPass) -> dict[str, str]:
        """Return the digests of the files of these filters by their paths in the recipe."""
        return {path: self.filter_files[path] for _, config in filters for path in config.files()}

    def files_of_reader(self, source: int) -> dict[str, str]:
        """Return the digests of the files of an input's `reader` by their paths; {} without a reader."""
        found = _reader_files(self.recipe, source)
        return {path: self.filter_files[path] for path in found}


def _reader_files(recipe: Recipe, source: int) -> list[str]:
    reader = recipe.inputs[source].reader
    return [] if reader is None else [*reader.code_files(f"inputs[{source}].reader")]


def filter_files(recipe: Recipe) -> dict[str, str]:
    """Return the xxh3-128 of each file that filters, readers and embedders read, by path in the recipe.

    Raises RecipeError if a file cannot be read.
    """
    named = [(f"filters: {name}", path) for name, config in recipe.filter_chain() for path in config.files()]
    for source in range(len(recipe.inputs)):
        named += [(f"inputs[{source}].reader", path) for path in _reader_files(recipe, source)]
    digests = {}
    if recipe.dedup.semantic is not None:
        named += [("dedup.semantic.embed", path) for path in recipe.dedup.semantic.embed.files()]
    for key, path in named:
        try:
            digests[path] = hash_file(recipe.resolve(path), ["xxh3_128"])["xxh3_128"]
        except ShardError as error:
            raise RecipeError(f"{key}: {error}") from None
    return digests


def _open_indexes(recipe: Recipe, storage: StorageOptions | None) -> dict[str, DedupIndex]:
    indexes = {}
    for near in (step.settings for step in recipe.global_steps if step.name == "near"):
        for number, path in enumerate(near.against):
            key = f"dedup.near.against[{number}]"
            try:
                index = open_index(path if is_remote(path) else recipe.resolve(path), storage)
            except BuildError as error:
                raise RecipeError(f"{key}: {error}") from None
            index.check(near, key)
            indexes[path] = index
    return indexes


def splits_of_tasks(recipe: Recipe, splits: Sequence[Split]) -> Sequence[Split]:
    """Group small files into splits; not with `max_failed_splits`, so that a bad file fails only itself."""
    return splits if recipe.max_failed_splits else group_small_files(splits)


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """The tokenizer of a build: its file, and the special tokens around each text.

    `engine` is None until it is chosen; it encodes all texts except those with characters in `unlike`.
    """

    file: Annotated[Artifact, RecipeKey("tokenizer")]
    eos: Annotated[str, RecipeKey("tokenizer.eos")]
    bos: Annotated[str | None, RecipeKey("tokenizer.bos")] = None
    encoding: Annotated[Encoding | None, RecipeKey("tokenizer.encoding")] = None
    engine: Engine | None = None
    unlike: Annotated[Ranges, DecidesNoByte("follows from the file and the versions of all code")] = ()

    @property
    def digest(self) -> str:
        """The digest of the file's bytes (`tokenizer_digest`)."""
        return self.file.content

    def encoder(self) -> Encoder:
        """Return the loaded tokenizer, which the process caches for its next task."""
        assert self.engine is not None
        return load_encoder(self.file.local(), self.eos, self.engine, self.unlike, self.bos, self.encoding)

    @classmethod
    def of(cls, recipe: Recipe) -> TokenizerFile | None:
        """Return the recipe's tokenizer file on this machine; None if no dataset of the recipe has tokens."""
        if recipe.tokenizer is None or all(one.output.is_text for one in recipe.datasets()):
            return None
        path = find_tokenizer(recipe.folder, recipe.tokenizer.path)
        if recipe.is_masked and own_engine(path) != "tokenizers":
            raise RecipeError(
                f"tokenizer.path: conversations and prompts need a tokenizer.json; {path} is of another kind"
            )
        given = recipe.tokenizer
        stated = given.encoding
        known = Encoding.of(stated.model_dump() if isinstance(stated, TiktokenConfig) else stated)
        encoding = known or Encoding.named_by(path)
        return cls(Artifact(path, content=tokenizer_digest(path)), given.eos, given.bos, encoding)


@dataclass(frozen=True)
class JoinedFiles:
    """Files with a row per document, divided into splits. `kind` begins their names in `digests`."""

    kind: ClassVar[str]
    splits: Sequence[Split]

    @cached_property
    def hashes(self) -> list[str]:
        """The hashes (`hash_split`) of all splits, computed when they are first needed."""
        return hash_splits(self.splits)

    def digests(self) -> dict[str, str]:
        """Return a digest of each file by its path: of its bytes, or in a store of its size and version."""
        found: dict[str, list[str]] = {}
        for split, digest in zip(self.splits, self.hashes, strict=True):
            found.setdefault(split.file, []).append(digest)
        return {f"{self.kind}/{name}": digest_of(digests) for name, digests in found.items()}


@dataclass(frozen=True)
class ScoreFiles(JoinedFiles):
    """The files of one `scores` filter."""

    kind = "scores"
    config: ScoresConfig


@dataclass(frozen=True)
class VectorFiles(JoinedFiles):
    """The files of vectors of `dedup.semantic.embed`; each vector has `dimensions` values."""

    kind = "vectors"
    config: EmbedConfig
    dimensions: int

    def as_trial(self) -> VectorFiles:
        """Return no files, for the trial run before a build, in which no document has a duplicate."""
        return replace(self, splits=())


def find_score_files(recipe: Recipe, storage: StorageOptions | None) -> list[ScoreFiles]:
    """Find the files of each `scores` filter, in recipe order. Raises RecipeError for unusable files."""
    configs = [config for _, config in recipe.filter_chain() if isinstance(config, ScoresConfig)]
    key = "filters: scores.path"
    return [ScoreFiles(_find_joined(recipe, one.path, key, storage), one) for one in configs]


def find_vector_files(recipe: Recipe, storage: StorageOptions | None) -> VectorFiles | None:
    """Find the files of vectors of `dedup.semantic`, and read the first vector; None if it has none.

    Raises RecipeError or BuildError for unusable files.
    """
    semantic = recipe.dedup.semantic
    if semantic is None or not semantic.embed.vectors:
        return None
    splits = _find_joined(recipe, semantic.embed.vectors, "dedup.semantic.embed.vectors", storage)
    return VectorFiles(splits, semantic.embed, dimensions_of(splits, semantic.embed))


def _find_joined(
    recipe: Recipe, paths: Sequence[str], key: str, storage: StorageOptions | None
) -> list[Split]:
    inputs = tuple(InputConfig(path=path) for path in paths)
    of_files = recipe.model_copy(update={"inputs": inputs, "limit": None})
    splits = scan_inputs(of_files, storage, key=f"{key}[{{}}]")
    for split in splits:
        if split.format not in ("parquet", "jsonl"):
            raise RecipeError(f"{key}: {split.path}: is neither Parquet nor JSON lines; convert it")
    return splits
