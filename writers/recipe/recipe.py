"""The recipe: all settings that the bytes of a dataset depend on, as one validated YAML file.

A recipe is validated as a whole: all problems are reported together, each with its key path
(`filters[2].gopher_quality.min_doc_words`). An unknown key is an error that names the closest known key.
Values are strict (no "17" for 17). Paths stay as written, relative to the recipe's folder, so that the
recipe's digest and the ids of documents stay the same if the folder moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from shardkit.errors import RecipeError
from shardkit.formats.trainers import TRAINER_FORMATS
from shardkit.settings import (
    TRAIN,
    Bounds,
    FieldName,
    Listed,
    LocalPath,
    Place,
    Ratio,
    Shorthand,
    Size,
    StrictModel,
)
from shardkit.writers.dedup.config import DedupConfig, FieldScope
from shardkit.writers.filters.ask import AskConfig
from shardkit.writers.filters.base import FilterSettings
from shardkit.writers.filters.buckets import BucketsConfig
from shardkit.writers.filters.config import FilterEntry, with_known_languages
from shardkit.writers.filters.scores import ScoresConfig
from shardkit.writers.recipe.inputs import GroupConfig, InputConfig, with_documents
from shardkit.writers.recipe.outputs import (
    AmountConfig,
    ChoiceConfig,
    OutputConfig,
    PackConfig,
    SplitConfig,
    TokenizerConfig,
    short_split,
)
from shardkit.writers.recipe.plain import plain_recipe
from shardkit.writers.recipe.problems import describe_problems
from shardkit.writers.recipe.steps import (
    SAMPLE,
    FilterPass,
    GlobalStep,
    Move,
    StepEntry,
    cheapest,
    ends_of,
    fields_made,
    filter_named,
    is_short,
    moves_of,
    of_schemes,
    removal_of,
    step_named,
)


def _plain(section: StrictModel | tuple[StrictModel, ...]) -> Any:
    """Return a section as plain data, to compare sections of different classes that have the same keys."""
    if isinstance(section, tuple):
        return [one.model_dump(mode="json") for one in section]
    return section.model_dump(mode="json")


def _is_within(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}/")


class Recipe(StrictModel):
    """The settings of a whole build. Relative paths start at `folder`, which does not affect the bytes."""

    # These settings do not affect bytes of a dataset. `outputs`: a recipe of one dataset has only `output`.
    # `max_failed_splits`: which splits failed is in the ledger.
    not_content = frozenset({"outputs", "work", "scratch", "check_disk", "max_failed_splits"})
    omitted_at_default = frozenset({"amounts", "group", "limit", "order", "split", "steps", "tokenizer"})

    inputs: Listed[Annotated[InputConfig, Shorthand(text="path")]] = Field(
        min_length=1,
        max_length=4096,
        description="Sources of documents; of duplicates, the one from the earlier input is kept.",
        examples=["data/*.jsonl", [{"path": "data/*.jsonl", "text": "text"}]],
    )
    filters: Annotated[
        Listed[Annotated[FilterEntry, Shorthand(text=filter_named)]], AfterValidator(with_known_languages)
    ] = Field(
        default=(),
        max_length=64,
        description="Applied in order; the first rule that fails drops a document.",
        examples=[["gopher_quality", {"length": {"min_words": 50}}]],
    )
    steps: Annotated[
        Listed[Annotated[StepEntry, Shorthand(text=step_named)]], AfterValidator(with_known_languages)
    ] = Field(
        default=(),
        max_length=64,
        description="In place of `filters` and `dedup`: filters, duplicate removal and samples, in the order "
        "in which they run, such as an expensive filter behind duplicate removal.",
        examples=[["gopher_quality", "exact", {"near": 0.8}, {"python": {"function": "my_filters:keep"}}]],
    )
    order: Literal["given", "cheapest"] = Field(
        default="given",
        description="given: all filters, then duplicate removal. cheapest: filters that are slow and decide "
        "by the text alone (classifier, language, perplexity, unigram_log_prob, ask if its prompt has only "
        "{text}) run behind `exact`, on what it leaves; the same documents survive.",
    )
    annotate: bool = Field(
        default=False,
        description="Write the value of every filter rule for every document that it judges to "
        "annotations/*.parquet.",
    )
    dedup: Annotated[DedupConfig, BeforeValidator(lambda given: {} if given is None else given)] = Field(
        default=DedupConfig(),
        description="Which duplicate documents are removed; null: none.",
        examples=[{"exact": True, "near": 0.8}],
    )
    group: Annotated[GroupConfig, Shorthand(text="by")] | None = Field(
        default=None,
        description="Documents that are joined into one text after duplicate removal, such as the files of a "
        "repository; null: none.",
        examples=["repo", {"by": "repo", "separator": "<file_sep>", "title": "path"}],
    )
    amounts: dict[FieldName, AmountConfig] = Field(
        default={},
        description="How much of each source goes into the datasets, by the label of the input; sources that "
        "are not listed are used whole.",
        examples=[{"web": {"documents": "10M"}, "code": {"share": "25%"}}],
    )
    split: Annotated[SplitConfig, BeforeValidator(short_split)] | None = Field(
        default=None,
        description="Parts that become separate datasets, such as {validation: 0.1%}; null: none.",
        examples=[{"validation": "0.1%"}],
    )
    tokenizer: Annotated[TokenizerConfig, Shorthand(text="path")] | None = Field(
        default=None,
        description="The tokenizer; null only for builds that write text only.",
        examples=[{"path": "tokenizer.json", "eos": "<|endoftext|>"}],
    )
    pack: PackConfig = Field(
        default=PackConfig(),
        description="How documents are packed into sequences.",
        examples=[{"sequence_length": 2048}],
    )
    output: Annotated[OutputConfig, Shorthand(text="path")] = Field(
        default=None,  # type: ignore[assignment]  # `_has_outputs` sets it to the first of `outputs`
        description="Place and format of the dataset.",
        examples=["out"],
    )
    outputs: Listed[Annotated[OutputConfig, Shorthand(text="path")]] = Field(
        default=(),
        max_length=64,
        description="Several datasets of one build, instead of `output`; each has the same bytes as if it "
        "were the only one.",
        examples=[[{"path": "text", "format": "parquet"}, {"path": "packed", "format": "mds"}]],
    )
    work: Place | None = Field(
        default=None,
        description="Folder or URL for intermediate files, which machines may share; null: a folder next to "
        "the output, removed after success (for a remote output: in the recipe's folder, named after the "
        "last part of the URL).",
    )
    scratch: LocalPath | None = Field(
        default=None,
        description="If `work` is a URL: folder on each machine for the files that its tasks write; null: "
        "below the system's temporary folder.",
    )
    limit: Annotated[int, Field(ge=1, le=1 << 40)] | None = Field(
        default=None,
        description="For a trial: maximum number of records to read of each input, from splits spread "
        "evenly over it; null: all.",
    )
    seed: int = Field(default=17, ge=0, lt=1 << 63, description="Seed of the shuffles.")
    memory: Annotated[Size, Field(ge=1 << 28)] = Field(
        default=2_000_000_000, description="Memory that one worker may use, in bytes (or 2GB)."
    )
    check_disk: bool = Field(
        default=True, description="Whether to reject a build that would not fit on its disks."
    )
    max_bad_fraction: Ratio = Field(
        default=0.0,
        description="Share of a file's records, and of its bytes, that may be unreadable; 0: stop at the "
        "first.",
    )
    max_failed_splits: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="Maximum number of splits (a compressed file, or a part of a plain one) whose tasks fail "
        "in every attempt; each is quarantined as a whole.",
    )
    max_record_bytes: Annotated[Size, Field(ge=1 << 10, le=1 << 30)] = Field(
        default=1 << 26,
        description="Maximum size of a record (a line, a row's text, the named values of a sample), in "
        "bytes; a longer record counts as unreadable.",
    )

    _folder: Path = PrivateAttr(default_factory=Path.cwd)
    _part: str | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _has_outputs(self) -> Self:
        if (self.output is None) == (not self.outputs):
            raise ValueError("give `output`, or a list of `outputs`")
        if self.outputs:
            self.__dict__["output"] = self.outputs[0]
        if self.steps:
            self._take_steps()
        self._check_order()
        places = [output.path for output in self.outputs]
        for number, place in enumerate(places):
            if any(_is_within(place, other) or _is_within(other, place) for other in places[:number]):
                raise ValueError(
                    f"outputs[{number}].path: {place} is the same as, inside of or around another output"
                )
        if self.is_masked and self.dedup.lines is not None:
            raise ValueError(
                "dedup.lines would remove lines of conversations and prompts; use a separate build for these"
            )
        if self.is_masked and any(config.fim for config in self.inputs):
            raise ValueError("fim moves parts of documents, which would break loss masks; use two builds")
        if self.is_masked and self.tokenizer is None:
            raise ValueError("tokenizer: is missing; its chat template is needed to render messages")
        self._check_buckets()
        self._check_where()
        self._check_amounts()
        self._check_samples()
        self._check_scope()
        self._check_group()
        self._check_split()
        self._check_trainers()
        packs = [self.pack, *(output.pack for output in self._all() if output.pack is not None)]
        if any(pack.row_bos for pack in packs) and (self.tokenizer is None or self.tokenizer.bos is None):
            raise ValueError(
                "pack.row_bos: tokenizer.bos is missing; set it to the token that rows begin with"
            )
        if any(pack.order == "source" for pack in packs):
            stores = any(output.format == "tokens" for output in self._all())
            if self.group is not None or self.repeats or stores:
                what = "output.format: tokens" if stores else "amounts.repeat" if self.repeats else "group"
                raise ValueError(f"pack.order: source cannot be used with {what}, which orders documents")
        if self.tokenizer is None and not all(output.is_text for output in self._all()):
            raise ValueError("tokenizer: is missing; only outputs of format parquet or jsonl do not need it")
        return self

    def _take_steps(self) -> None:
        """Set the keys that `steps` stands for to its entries. Raises ValueError if they conflict."""
        filters = tuple(step for step in self.steps if step.over_all is None)
        dedup = removal_of(self.steps, self.dedup)
        for key, settings in ends_of(self.steps).items():
            if getattr(self, key) not in (None, settings):
                raise ValueError(f"{key}: `steps` has it, too, with other settings; leave out one of them")
            self.__dict__[key] = settings
        for key, given, derived in (
            ("filters", self.filters, filters),
            ("dedup", self.dedup if self.dedup.asked else dedup, dedup),
        ):
            if given and [given] != [derived] and _plain(given) != _plain(derived):
                raise ValueError(f"{key}: `steps` lists all of it in order; leave out {key} or `steps`")
        self.__dict__["filters"], self.__dict__["dedup"] = filters, dedup

    def _check_order(self) -> None:
        """Raise ValueError for an order of steps that is not possible."""
        if self.order == "cheapest" and self.steps:
            raise ValueError("order: `steps` lists the steps in their order; leave out order or `steps`")
        _ = self.moves  # raises ValueError if `order` is not possible

    def _check_buckets(self) -> None:
        """Raise ValueError if `buckets` reads a score that does not exist, or a label a field that exists."""
        columns: set[str] = set()
        found = 0
        for config in self._steps_in_order():
            if isinstance(config, GlobalStep):
                columns |= fields_made(config)
                continue
            if isinstance(config, ScoresConfig):
                if twice := sorted(columns & config.columns.keys()):
                    raise ValueError(f"filters: two `scores` filters have a column {twice[0]!r}; rename one")
                columns |= config.columns.keys()
            if isinstance(config, AskConfig) and config.score is not None:
                if config.score.name in columns:
                    raise ValueError(f"filters: two scores are called {config.score.name!r}; rename one")
                columns.add(config.score.name)
            columns |= {*config.added_fields}
            if not isinstance(config, BucketsConfig):
                continue
            found += 1
            known = columns.union(*(config.metadata for config in self.inputs))
            if unknown := [one.column for one in config.scores if one.column and one.column not in known]:
                raise ValueError(
                    f"filters: buckets: no `scores`, `ask` or `python` before it has the column "
                    f"{unknown[0]!r}, and no input keeps it in `metadata`; add one"
                )
            if config.field in {"source", "language", "copies"} | (self._fields or set()):
                raise ValueError(
                    f"filters: buckets.field: documents already have a field {config.field!r}; rename it"
                )
        semantic = self.dedup.semantic
        for column, name in ({} if semantic is None else semantic.fields).items():
            taken = {"source", "language", "copies"}.union(*(config.metadata for config in self.inputs))
            taken |= {self.buckets.field} if self.buckets is not None else set()
            if name in taken:
                key = "field" if column == "cluster" else column
                raise ValueError(f"dedup.semantic.{key}: documents already have a field {name!r}; rename it")
        if found > 1:
            raise ValueError("filters: a recipe may have only one `buckets` filter; give it all scores")

    def _steps_in_order(self) -> Iterator[FilterSettings | GlobalStep]:
        for move in self.moves:
            if isinstance(move, GlobalStep):
                yield move
            else:
                yield from (config for _, config in move)

    def _check_scope(self) -> None:
        """Raise ValueError if a scope of `near` needs a language or a field that documents do not have."""
        for scope in (step.settings.scope for step in self.global_steps if step.name == "near"):
            if scope == "language" and not any(step == "language" for step, _ in self.filter_chain()):
                raise ValueError(
                    "dedup.near.scope: languages are known only with the `language` filter; add it to filters"
                )
            if isinstance(scope, FieldScope) and self._fields is not None and scope.field not in self._fields:
                raise ValueError(
                    f"dedup.near.scope: no input keeps a field {scope.field!r}; add it to inputs[].metadata"
                )

    def _check_group(self) -> None:
        """Raise ValueError if `group` needs fields that documents lack, or conflicts with other settings."""
        if self.group is None:
            return
        if self.is_masked:
            raise ValueError("group: conversations and prompts cannot be joined; use two builds")
        if any(output.format == "tokens" for output in self._all()):
            raise ValueError("group: a token store holds single documents; pack rows in this build")
        if others := [output.format for output in self._all() if output.is_for_trainer]:
            raise ValueError(f"group: {others[0]} files hold single documents; use mds or wds rows")
        packs = [self.pack, *(output.pack for output in self._all() if output.pack is not None)]
        if wrong := [pack for pack in packs if pack.row_bos or pack.crops]:
            key = "row_bos" if wrong[0].row_bos else f"strategy: {wrong[0].strategy}"
            raise ValueError(f"group: cannot be used with pack.{key}; use best_fit or concat without row_bos")
        kept = self._fields
        if kept is not None and (missing := [name for name in self.group.fields if name not in kept]):
            raise ValueError(f"group: no input keeps a field {missing[0]!r}; add it to inputs[].metadata")

    def _check_split(self) -> None:
        """Raise ValueError if documents lack the field `split.by`, or if parts would take groups apart."""
        if self.split is None:
            return
        by = self.split.by
        if self.group is not None and by != self.group.by:
            raise ValueError(
                f"split.by: documents with one {self.group.by} are joined by `group`, so they must be in one "
                f"part; write by: {self.group.by}"
            )
        if by is not None:
            self._check_field("split.by", by)

    def _check_trainers(self) -> None:
        """Raise ValueError if an output's format, which is another trainer's, cannot hold loss masks."""
        for number, output in enumerate(self._all()):
            if not output.is_for_trainer:
                continue
            key = f"outputs[{number}].format" if self.outputs else "output.format"
            if self.is_masked and TRAINER_FORMATS[output.format].mask is None:
                raise ValueError(
                    f"{key}: {output.format} files have no loss mask, which conversations and prompts "
                    "need; use olmo, datatrove or mds"
                )
            if self.pack.max_repetitions is not None and not any(one.has_rows for one in self._all()):
                raise ValueError(
                    f"pack.max_repetitions: masks tokens of rows, but {output.format} files hold whole "
                    "documents; leave it out, or use mds or wds"
                )

    def _check_where(self) -> None:
        """Raise ValueError if an output's `where` selects by a value or field that documents do not have."""
        for number, output in enumerate(self._all()):
            key = f"outputs[{number}].where" if self.outputs else "output.where"
            for name, values in (output.where or {}).items():
                if isinstance(values, Bounds) and name in ("source", "language"):
                    raise ValueError(f"{key}: {name} is not a number; give a list of values, not bounds")
                if name == "source" and (unknown := {*values} - {*self.sources}):
                    known = ", ".join(dict.fromkeys(self.sources))
                    raise ValueError(f"{key}: there is no source {min(unknown)!r}; sources: {known}")
                self._check_field(key, name, ("source", "copies"))

    def _check_field(self, key: str, name: str, own: Sequence[str] = ()) -> None:
        """Raise ValueError if documents do not have a field `name`, nor is it one of `own`."""
        if name == "language" and not any(step == "language" for step, _ in self.filter_chain()):
            raise ValueError(f"{key}: languages are known only with the `language` filter; add it to filters")
        known = {"language", *own} | (self._fields or set())
        if self.buckets is not None:
            known.add(self.buckets.field)
        if self.dedup.semantic is not None:
            known |= {*self.dedup.semantic.fields.values()}
        if name not in known and self._fields is not None:
            raise ValueError(
                f"{key}: no input keeps a field {name!r}; add it to inputs[].metadata, or to `columns` of "
                "the step that finds it"
            )

    def _check_amounts(self) -> None:
        """Raise ValueError if `amounts` names a source that does not exist, or counts tokens without any."""
        for label, amount in self.amounts.items():
            if label not in self.sources:
                known = ", ".join(dict.fromkeys(self.sources))
                raise ValueError(f"amounts.{label}: there is no source {label!r}; sources: {known}")
            self._check_choice(f"amounts.{label}", amount)
            if amount.repeat is None:
                continue
            if wrong := [output.format for output in self._all() if not output.has_rows]:
                raise ValueError(
                    f"amounts.{label}.repeat: only rows of tokens (mds, wds) repeat documents; an output of "
                    f"format {wrong[0]} has each document once: write it with another recipe"
                )
            if self.group is not None:
                raise ValueError(
                    f"amounts.{label}.repeat: grouped documents cannot be repeated; use a mixture"
                )

    def _check_choice(self, key: str, choice: ChoiceConfig) -> None:
        """Raise ValueError if documents cannot be chosen so: by a field or by tokens that there are not."""
        if choice.by is not None:
            self._check_field(f"{key}.by", choice.by)
            if self.group is not None:
                raise ValueError(f"{key}.by: a group may have several values; leave out by")
        if choice.tokens is not None and all(output.is_text for output in self._all()):
            raise ValueError(
                f"{key}.tokens: no output has tokens; give documents or share, or add an output of format "
                "mds, wds or tokens"
            )

    def _check_samples(self) -> None:
        """Raise ValueError if a `sample` names an unknown source, or a field that is found later."""
        for number, move in enumerate(self.moves):
            if not isinstance(move, GlobalStep) or move.name != SAMPLE:
                continue
            if unknown := [label for label in move.settings.sources if label not in self.sources]:
                known = ", ".join(dict.fromkeys(self.sources))
                raise ValueError(f"sample.sources: there is no source {unknown[0]!r}; sources: {known}")
            self._check_choice(SAMPLE, move.settings)
            by = move.settings.by
            if any(by in fields_made(later) for later in self.moves[number:]):
                raise ValueError(
                    f"sample.by: {by!r} is found by a step behind this one; move sample behind that step"
                )

    @property
    def _fields(self) -> set[str] | None:
        """The fields of documents' metadata; None if inputs have `path_fields`, which may be any."""
        if any(config.path_fields for config in self.inputs):
            return None
        steps = [config.added_fields for _, config in self.filter_chain()]
        return {name for names in (*(one.metadata for one in self.inputs), *steps) for name in names}

    def _all(self) -> tuple[OutputConfig, ...]:
        return self.outputs or (self.output,)

    @property
    def is_masked(self) -> bool:
        """Whether an input has documents with a loss mask; if so, all rows and token stores have one."""
        return any(config.is_masked for config in self.inputs)

    @property
    def has_masked_rows(self) -> bool:
        """Whether the rows of this dataset have a loss mask, from documents or for repetitions."""
        return self.output.has_rows and (self.is_masked or self.pack.max_repetitions is not None)

    @property
    def part(self) -> str | None:
        """The part in this recipe's dataset, such as "train"; None if the recipe has no `split`."""
        return self._part

    def datasets(self) -> tuple[Recipe, ...]:
        """Return one recipe per dataset: this recipe with one output, for one part of the split.

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
        """Return the same recipe for one part of the split; None for a recipe without a split."""
        copy = self.model_copy()
        copy._part = part
        return copy

    @property
    def folder(self) -> Path:
        """The folder that relative paths start at: of the recipe's file, or the argument of `in_folder`."""
        return self._folder

    def resolve(self, path: str) -> Path:
        """Return a path in this recipe as a path on this machine."""
        return self._folder / path

    def in_folder(self, folder: Path) -> Recipe:
        """Return the same recipe with relative paths starting at `folder`."""
        copy = self.model_copy()
        copy._folder = folder.absolute()
        return copy

    def as_trial(self, limit: int) -> Recipe:
        """Return a recipe that reads at most `limit` records of each input, with separate output folders."""
        paths = [{"path": f"{output.path}-limit-{limit}"} for output in self._all()]
        outputs = tuple(one.model_copy(update=path) for one, path in zip(self._all(), paths, strict=True))
        several = outputs if self.outputs else ()
        return self.model_copy(update={"limit": limit, "output": outputs[0], "outputs": several})

    @property
    def sources(self) -> tuple[str, ...]:
        """The label of each input."""
        return tuple(config.source or f"input-{number}" for number, config in enumerate(self.inputs))

    def repeat_of(self, source: int) -> float:
        """Return how often this dataset has each document of input number `source`."""
        amount = self.amounts.get(self.sources[source])
        is_train = self.part in (None, TRAIN)
        return 1.0 if amount is None or amount.repeat is None or not is_train else amount.repeat

    @property
    def repeats(self) -> bool:
        """Whether this dataset has documents more than once."""
        return any(self.repeat_of(number) > 1 for number in range(len(self.inputs)))

    @property
    def buckets(self) -> BucketsConfig | None:
        """The settings of the recipe's `buckets` filter, or None if it has none."""
        return next((one for _, one in self.filter_chain() if isinstance(one, BucketsConfig)), None)

    def content(self) -> dict[str, Any]:
        """Return all settings that affect the bytes of one of the `datasets`, as plain data.

        Profiles are expanded to their filters.
        """
        found = super().content()
        if not self.output.has_rows:
            del found["pack"]
        if self.part is not None:
            found["part"] = self.part
        found["filters"] = [config.entry(name) for name, config in self.filter_chain()]
        if "steps" in found:
            found["steps"] = [entry for step in self.steps for entry in step.contents()]
        if is_short(self.moves):
            found.pop("steps", None)  # `filters` and `dedup` express the same order
        return found

    def without_costly_filters(self) -> Recipe:
        """Return the recipe without filters that cost too much to run them on a sample; see `is_costly`.

        Its outputs do not select by the fields that these filters add.
        """
        costly = [config for _, config in self.filter_chain() if config.is_costly]
        if not costly:
            return self
        fields = {name for one in costly for name in one.added_fields}

        def cheap(entries: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(one for one in entries if not any(config.is_costly for _, config in one.filters()))

        def plain(output: OutputConfig) -> OutputConfig:
            where = {name: asked for name, asked in (output.where or {}).items() if name not in fields}
            return output.model_copy(update={"where": where or None})

        changes = {"filters": cheap(self.filters), "steps": cheap(self.steps), "output": plain(self.output)}
        return self.model_copy(update={**changes, "outputs": tuple(map(plain, self.outputs))})

    def filter_chain(self) -> FilterPass:
        """Return (name, settings) of every filter in order, with profiles expanded."""
        return tuple(step for entry in self.filters for step in entry.filters())

    @property
    def passes(self) -> list[FilterPass]:
        """The passes of filters, in order."""
        return [move for move in self.moves if not isinstance(move, GlobalStep)]

    @property
    def global_steps(self) -> list[GlobalStep]:
        """The steps over all documents, in order."""
        return [move for move in self.moves if isinstance(move, GlobalStep)]

    @property
    def moves(self) -> tuple[Move, ...]:
        """Passes of filters, and between them steps over all documents, in order.

        The first item is the pass over the documents as read from the inputs.
        """
        if self.steps:
            return moves_of(self.steps)
        if self.order == "cheapest":
            return cheapest(self.filter_chain(), self.dedup)
        return self.filter_chain(), *of_schemes(self.dedup)


def recipe_from_mapping(data: object, *, folder: Path, name: str = "recipe") -> Recipe:
    """Create a Recipe from plain data; raises RecipeError with all problems, each with its key path."""
    try:
        return Recipe.model_validate(data, context={"folder": folder}).in_folder(folder)
    except ValidationError as error:
        raise RecipeError(describe_problems(name, error, Recipe)) from None


def load_recipe(
    recipe: Recipe | Mapping[str, object] | str | PathLike[str],
    overrides: Sequence[str] = (),
    *,
    for_documents: bool = False,
) -> Recipe:
    """Check a YAML file, a dict of the same keys, or a Recipe; raise RecipeError with all problems.

    `overrides` such as "pack.sequence_length=512" replace keys, with values in YAML. Relative paths start at
    the file's folder, or for a dict at the current one. `for_documents`: the only input are those of Python.
    """
    if isinstance(recipe, Recipe) and not overrides and not for_documents:
        return recipe
    given = recipe.model_dump(mode="json") if isinstance(recipe, Recipe) else recipe
    data, folder, name = plain_recipe(given, overrides)
    folder = recipe.folder if isinstance(recipe, Recipe) else folder
    return recipe_from_mapping(with_documents(data) if for_documents else data, folder=folder, name=name)


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe, for editors."""
    schema = Recipe.model_json_schema(mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "shardkit recipe"} | {
        key: value for key, value in schema.items() if key != "title"
    }
