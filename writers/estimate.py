"""Checks before a build that its files will fit on the disks, by an estimate from a sample of its input.

`rehearse` puts a sample through all stages in a temporary folder and scales up the bytes that each stage
wrote: tasks of a split by the stored bytes of their source, tasks of partitions by their documents or tokens.
So the estimate includes the expansion of compressed files, filters, annotations, the tokenizer and
compression of shards. A sample cannot show effects that depend on the whole input:

- duplicates appear only in the whole input. The estimate subtracts nothing for removed duplicates. For the
  stages of near-duplicates, it assumes that at least the share `PAIRED` of all documents is in pairs, which
  take `PAIR_BYTES` per document.
- exchanges merge many runs, and a sample has few: the bytes of merges and of addresses come from
  `stage_needs`.
- runs go after their last readers: the sample shows after which stage (`Order`), and the most that is held
  at a time is added up in this order.
- the documents of an index are not in the sample: the same number of documents is added.

The estimate is high rather than low, by `MARGIN` and by the bytes that duplicate removal saves.

`check_disk` subtracts the bytes that finished tasks of this build hold. An output on the same file system
consists of hard links to it and takes no space; on another one, or if the work folder is in a store, it is a
copy. If the work folder is in a store, each machine needs scratch space for the running tasks of its workers.
If `most_bytes`, an upper bound, fits everywhere, the build is not rehearsed and starts at once; a rehearsal
takes seconds for any input. The bound uses the length of the first records of plain JSON lines, and the worst
case for all other formats. `check_disk: false` in a recipe disables the check.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from shardkit.errors import BuildError, warn_user
from shardkit.progress import make_listener
from shardkit.units import format_bytes
from shardkit.writers.dedup.candidates import CANDIDATES
from shardkit.writers.dedup.duplicates import TWINS
from shardkit.writers.dedup.resolve import NEAR
from shardkit.writers.dedup.shingle_store import SHINGLES
from shardkit.writers.dedup.signatures import SIGN
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.engine import default_workers
from shardkit.writers.execution.progress import StageProgress
from shardkit.writers.execution.stage import Task
from shardkit.writers.execution.work import Work
from shardkit.writers.executors import Execution, open_runner
from shardkit.writers.input_sample import choose_pieces, put_pieces
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.scan import Split, parts_of, scan_inputs
from shardkit.writers.recipe.inputs import InputConfig
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.rows.annotations import ANNOTATIONS_FILE
from shardkit.writers.stages import near, semantic
from shardkit.writers.stages.clean import CLEAN
from shardkit.writers.stages.flow import Documents, Outputs
from shardkit.writers.stages.gather import GATHER
from shardkit.writers.stages.graph import run_build, stage_needs
from shardkit.writers.stages.inputs import BuildInputs, splits_of_tasks
from shardkit.writers.stages.needs import MERGE, Corpus, Order, Shape, compared_lines
from shardkit.writers.stages.provenance import PROVENANCE_NAME
from shardkit.writers.stages.rows import PARTITION_TEXT_BYTES
from shardkit.writers.stages.tokenize import TOKENIZE

SAMPLE_BYTES = 8 << 20  # stored bytes of the sample from all sources, so that a rehearsal takes seconds

MARGIN = 1.1

PAIRED = 0.5

PAIR_BYTES = 400

FILE_BYTES = 4096  # maximum overhead of a file on disk; it matters for many small files

_COMPRESSED = 0.5  # ratio of compressed to plain size of text, if each document is compressed separately


@dataclass(frozen=True)
class StageBytes:
    """Estimated bytes that a whole build writes: `stages` into its work folder, by stage, and its `output`.

    Stages are in the order of the build; `freed` has the bytes of runs that are removed after a stage.
    `largest_task` is the maximum of one task. `documents` and `text_bytes` count what the filters keep.
    """

    stages: Mapping[str, int]
    output: int
    largest_task: int
    documents: int
    text_bytes: int
    freed: Mapping[str, int] = field(default_factory=dict)

    @property
    def work(self) -> int:
        """The most bytes that the work folder has at a time."""
        return self.left({})

    def left(self, finished: Mapping[str, Finished]) -> int:
        """Return by how much the work folder may still grow, after these stages or parts of stages."""
        held = most = now = 0
        for stage, size in self.stages.items():
            done, freed = finished.get(stage, Finished()), self.freed.get(stage, 0)
            if done.complete:
                held += min(size, done.bytes) - freed
                now = held
                continue
            now += min(size, done.bytes)
            held += size
            most, held = max(most, held), held - freed
        return max(0, most - now)


@dataclass(frozen=True)
class _Scales:
    """Ratios of the whole input to the sample: by name for tasks of one split, by stage for other tasks."""

    by_task: Mapping[str, float]
    by_tokens: Collection[str]
    """The stages whose output grows with tokens; the others grow with documents."""
    documents: float
    tokens: float

    def of(self, commit: Commit) -> float:
        if commit.name in self.by_task:
            return self.by_task[commit.name]
        return self.tokens if commit.stage in self.by_tokens else self.documents


def rehearse(
    inputs: BuildInputs,
    workers: int | None = None,
    *,
    sample_bytes: int = SAMPLE_BYTES,
) -> StageBytes:
    """Build a sample in a temporary folder, up to publishing, and estimate the bytes of the whole build.

    Raises the errors that the build would raise, and BuildError if no document of the sample is kept.
    """
    recipe = inputs.recipe
    with tempfile.TemporaryDirectory(prefix="shardkit-rehearsal-") as folder:
        pieces = choose_pieces(inputs.splits, sample_bytes)
        sources, stored = put_pieces(recipe, pieces, Path(folder) / "inputs", cut_anywhere=True)
        share = _share(inputs.splits, stored)
        derived = sample_recipe(recipe, sources, Path(folder), share).without_costly_filters()
        splits = splits_of_tasks(recipe, scan_inputs(derived))
        work = Work.at(Path(folder) / "work")
        vectors = None if inputs.vectors is None else inputs.vectors.as_trial()
        small = replace(inputs, recipe=derived, splits=splits, indexes={}, scores=(), vectors=vectors)
        with make_listener(False) as listener, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the build itself will give the same warnings
            with open_runner(derived, work, Execution(workers=workers), listener) as runner:
                order = Order(runner.run)
                documents = run_build(small, order.run)
        whole: Counter[int] = Counter()
        for split in inputs.splits:
            whole[split.source] += split.bytes
        by_source = [whole[source] / max(1, taken) for source, taken in stored.items()]
        by_task = {split.task_name: by_source[split.source] for split in splits}
        scales = _scales(by_task, documents)
        return _whole(inputs, [commit for _, commit in work.commits()], scales, documents, order)


def sample_recipe(recipe: Recipe, inputs: Sequence[InputConfig], folder: Path, share: float) -> Recipe:
    """Return the recipe of a sample: it reads `inputs`, which have about `share` of the recipe's inputs.

    A build of the sample writes only below `folder`; other paths in its recipe are only read. Limits are
    lifted that a sample could exceed although the whole input does not.
    """
    places = [{"path": str(folder / f"out-{number}")} for number in range(max(1, len(recipe.outputs)))]
    outputs = tuple(
        one.model_copy(update=place)
        for one, place in zip(recipe.outputs or (recipe.output,), places, strict=True)
    )
    labels = {config.source for config in inputs}
    split = recipe.split
    if split is not None:
        parts = {name: _scaled(asked, labels, share) for name, asked in split.parts.items()}
        split = split.model_copy(update={"parts": parts})
    amounts = {label: one.scaled(share) for label, one in recipe.amounts.items() if label in labels}
    changes = {
        "inputs": tuple(inputs),
        "amounts": amounts,
        "steps": tuple(step.scaled(share) for step in recipe.steps),
        "output": outputs[0],
        "outputs": outputs if recipe.outputs else (),
        "work": str(folder / "work"),
        "scratch": None,
        "split": split,
        "dedup": recipe.dedup.model_copy(update={"max_removed_fraction": 1.0}),
        "max_bad_fraction": 1.0,
        "check_disk": False,
    }
    return recipe.model_copy(update=changes)


def _scaled(
    asked: float | Mapping[str, float], labels: Collection[str | None], share: float
) -> float | dict[str, float]:
    """Return a part's size for a sample: scale numbers of documents by `share`, and keep shares as given."""
    if isinstance(asked, Mapping):
        return {
            label: int(one * share) if isinstance(one, int) else one
            for label, one in asked.items()
            if label in labels
        }
    return int(asked * share) if isinstance(asked, int) else asked


def _share(splits: Sequence[Split], stored: Mapping[int, int]) -> float:
    """Return the share of all stored bytes that is in a sample."""
    return sum(stored.values()) / max(1, sum(split.bytes for split in splits))


def _first(documents: Documents) -> Outputs:
    """Return the first dataset of tokens, or the first dataset if there is none."""
    return next((one for one in documents.outputs if one.tokenized), documents.outputs[0])


def _scales(by_task: Mapping[str, float], made: Documents) -> _Scales:
    by_split = [by_task[split.task_name] for split in made.splits]

    def ratio(amounts: Sequence[int]) -> float:
        scaled = sum(amount * scale for amount, scale in zip(amounts, by_split, strict=True))
        return scaled / max(1, sum(amounts))

    documents = ratio([ledger.kept.documents for ledger in made.written[0].ledgers])
    tokenized = _first(made).tokenized
    tokens = ratio([TOKENIZE.result(commit).tokens for commit in tokenized]) if tokenized else 0.0
    by_tokens = {commit.stage for one in made.outputs for commit in (*one.packed, *one.provenance)}
    return _Scales(by_task, by_tokens, documents, tokens)


def _published(made: Documents) -> dict[str, set[str]]:
    """Return the names of the outputs that become files of a dataset, by the key of the task."""
    annotated = made.joined or made.cleaned
    found = {commit.key: {ANNOTATIONS_FILE} for commit in annotated if made.recipe.annotate}
    for one in made.outputs:
        found |= {commit.key: commit.outputs.keys() - {PROVENANCE_NAME} for commit in one.packed}
        found |= {commit.key: set(commit.outputs) for commit in one.provenance}
        found |= {commit.key: commit.outputs.keys() - {TWINS.file} for commit in one.texts}
    return found


def _whole(
    inputs: BuildInputs, commits: Sequence[Commit], scales: _Scales, made: Documents, order: Order
) -> StageBytes:
    stages: dict[str, float] = {}
    runs = defaultdict[tuple[str, str], float](float)
    output = text = 0.0
    tasks, files = Counter[str](), 0
    published, cleaned = _published(made), {commit.key for commit in made.cleaned}
    for commit in commits:
        scale = scales.of(commit)
        stages[commit.stage] = stages.get(commit.stage, 0.0) + scale * commit.bytes
        for name, file in commit.outputs.items():
            runs[commit.stage, name] += scale * file.bytes
        if commit.name in scales.by_task:
            tasks[commit.stage] += 1
            files = max(files, len(commit.outputs) + 1)
        names = published.get(commit.key, set())
        output += scale * sum(commit.outputs[name].bytes for name in names if name in commit.outputs)
        text += scale * commit.ledger().kept.bytes if commit.key in cleaned else 0
    documents = scales.documents * made.written[0].kept.documents
    sampled = dict(stages)
    if inputs.recipe.dedup.near is not None:
        indexed = sum(part.documents for index in inputs.indexes.values() for part in index.parts)
        _add_near(stages, documents, text, indexed)
    if inputs.vectors is not None:  # stored as float16, and so smaller than most files
        stages |= dict.fromkeys((stage.name for stage in semantic.JOINING), _vector_bytes(inputs))
    corpus = _corpus(inputs, scales, made, documents, text)
    needs = {one.stage: one.written_bytes for one in stage_needs(corpus)}
    merges = {stage: size for stage, size in needs.items() if MERGE.fullmatch(stage)}
    stages = {stage: size for stage, size in stages.items() if not MERGE.fullmatch(stage)} | merges
    # A sample has few splits and runs.
    stages |= {one: size for one, size in needs.items() if one == GATHER.name or one.endswith("-addresses")}
    in_order, consumed = order.merged(merges)
    freed = {
        stage: sum(
            MARGIN * (runs[of, name] * stages[of] / max(1.0, sampled[of]) if of in sampled else stages[of])
            for of, name in files
            if of in stages
        )
        for stage, files in consumed.items()
    }
    for stage in tasks:
        count = corpus.splits if stage == CLEAN.name else corpus.gathered
        stages[stage] += count * files * FILE_BYTES / MARGIN
    sizes = {stage: int(MARGIN * stages[stage]) for stage in (*in_order, *stages) if stage in stages}
    split = max(split.bytes for split in inputs.splits) / max(1, sum(split.bytes for split in inputs.splits))
    if corpus.gathered < corpus.splits:
        tasks[GATHER.name] = corpus.gathered
        split = min(1.0, max(split, 1.25 * corpus.limits.gathered(corpus.text_bytes) / corpus.text_bytes))
    partitions = max(1.0, text / PARTITION_TEXT_BYTES)
    largest = 0.0
    for stage, size in sizes.items():
        if stage in tasks:
            largest = max(largest, size * split)
        elif stage in scales.by_tokens:
            largest = max(largest, size / partitions)
        elif stage != NEAR.name:  # partitions of these stages fit the memory of a task
            largest = max(largest, min(size, inputs.recipe.memory))
    gone = {stage: int(size) for stage, size in freed.items() if size}
    return StageBytes(sizes, int(MARGIN * output), int(largest), int(documents), int(text), gone)


def _vector_bytes(inputs: BuildInputs) -> float:
    """Return the stored bytes of the files of vectors."""
    return 0.0 if inputs.vectors is None else float(sum(split.bytes for split in inputs.vectors.splits))


def _corpus(inputs: BuildInputs, scales: _Scales, made: Documents, documents: float, text: float) -> Corpus:
    first = _first(made)
    tokens = scales.tokens * sum(TOKENIZE.result(commit).tokens for commit in first.tokenized)
    lines = inputs.recipe.dedup.lines
    return Corpus(
        splits=len(inputs.splits),
        documents=max(1, int(documents)),
        text_bytes=max(1, int(text)),
        tokens=max(1, int(tokens)),
        token_bytes=(4 if first.tokenizer is None else np.dtype(first.tokenizer["dtype"]).itemsize)
        + inputs.recipe.is_masked,
        memory=inputs.recipe.memory,
        shard_bytes=inputs.recipe.output.shard_bytes,
        steps=[step.name for step in inputs.recipe.global_steps],
        lines=0 if lines is None else compared_lines(text, lines.words if lines.unit == "span" else None),
        shape=Shape.of(inputs.recipe),
    )


def _add_near(stages: dict[str, float], documents: float, text: float, indexed: int) -> None:
    """Raise the near-duplicate stages' sizes to an assumed minimum; add `indexed` documents of indexes."""
    least = {SHINGLES.name: PAIRED * text * _COMPRESSED}
    least[CANDIDATES.name] = PAIRED * documents * PAIR_BYTES
    for stage in near.STAGES:
        more = indexed if stage is not SIGN else 0
        size = max(stages.get(stage.name, 0.0), least.get(stage.name, 0.0))
        stages[stage.name] = size * (1 + more / max(1.0, documents))


# Upper bound of bytes written per stored byte of input: compressed text expands up to 10 times, and all
# stages together write up to 12 times the text of short documents.
CERTAIN = 200

_PLAIN = 20  # upper bound of bytes written per byte of plain JSON lines, in addition to `_RECORD_BYTES`

_RECORD_BYTES = 4096  # upper bound of bytes written per record, in addition to `_PLAIN`

_LOOKED_BYTES = 512 << 10  # bytes per source that are read to measure the average length of records

_STAGE = "disk check"


@dataclass(frozen=True, slots=True)
class Finished:
    """The bytes that finished tasks of a stage wrote, and whether all tasks of the stage are finished."""

    bytes: int = 0
    complete: bool = False


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """The bytes that a build still needs on the file system of `folder`; `parts` has them by purpose."""

    folder: Path
    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


def most_bytes(splits: Sequence[Split]) -> int:
    """Return an upper bound of the bytes that a build writes to any disk; takes only milliseconds."""
    most = 0
    by_source = defaultdict[int, list[Split]](list)
    for split in parts_of(splits):
        by_source[split.source].append(split)
    for mine in by_source.values():
        plain = [split for split in mine if split.format == "jsonl" and split.compression is None]
        size = sum(split.bytes for split in plain)
        most += CERTAIN * (sum(split.bytes for split in mine) - size)
        if looked := choose_pieces(plain, _LOOKED_BYTES):
            records, held = 0, 0
            for piece in looked:
                with open_input(piece.split.input) as file:
                    data = file.read(min(piece.bytes, _LOOKED_BYTES))
                records, held = records + data.count(b"\n") + 1, held + len(data)
            of_records = 2 * records * _RECORD_BYTES // max(1, held)  # 2: later records may be half as long
            most += min(CERTAIN, _PLAIN + of_records) * size
    return most


def check_disk(
    inputs: BuildInputs,
    work: Work,
    output: Path | None,
    execution: Execution,
    progress: bool | Callable[[StageProgress], None] = False,
) -> list[DiskNeed]:
    """Return the disk space that the build needs, after checking that it is free; else raise BuildError.

    Returns [] if the build certainly fits, for trials, if the check is disabled, or if it fails. `output` is
    None for a remote output. Writes only a sample, into the system's temporary folder.
    """
    if not inputs.recipe.check_disk or inputs.recipe.limit is not None:
        return []
    vectors = CERTAIN * _vector_bytes(inputs)
    stored = sum(split.bytes for split in inputs.splits)
    places = [work.folder, *([output] if output is not None else [])]
    free = min(_free_bytes(place) for place in places)
    if CERTAIN * stored + vectors <= free:
        return []
    workers = default_workers(inputs.recipe.memory) if execution.workers is None else execution.workers
    start = time.perf_counter()
    with make_listener(progress) as listener:
        try:
            if most_bytes(inputs.splits) + vectors <= free:
                return []
            listener(StageProgress(_STAGE, 0, 1, 0, 0, 0, 0.0))
            estimate = rehearse(inputs, min(workers, default_workers(inputs.recipe.memory)))
        except BuildError as error:
            warn_user(f"cannot check whether the build fits on its disks: {error}")
            return []
        finished = {} if work.local is None else finished_stages(inputs, work)
        listener(StageProgress(_STAGE, 1, 1, 0, 0, 0, time.perf_counter() - start))
    needs = disk_needs(estimate, finished, work, output, workers)
    for need in needs:
        free = _free_bytes(need.folder)
        if need.bytes > free:
            parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in need.parts.items())
            raise BuildError(
                f"{need.folder}: the build would need about {format_bytes(need.bytes)} more there ({parts}), "
                f"but {format_bytes(free)} are free; free space, put `work` or the output "
                f"elsewhere, or build anyway with check_disk=false"
            )
    return needs


def disk_needs(
    estimate: StageBytes, finished: Mapping[str, Finished], work: Work, output: Path | None, workers: int
) -> list[DiskNeed]:
    """Return the bytes that the build still needs, one entry per file system."""
    wanted: list[tuple[Path, str, int]] = []
    linked = False
    if work.local is not None:
        wanted.append((work.folder, "work folder", estimate.left(finished)))
        linked = output is not None and _device(work.folder) == _device(output)
    else:
        wanted.append((work.folder, "scratch", workers * estimate.largest_task))
    if output is not None and not linked:
        wanted.append((output, "output", estimate.output))
    needs: dict[int, tuple[Path, dict[str, int]]] = {}
    for folder, name, size in wanted:
        _, parts = needs.setdefault(_device(folder), (folder, {}))
        parts[name] = size
    return [DiskNeed(folder, parts) for folder, parts in needs.values()]


class _UnfinishedError(Exception):
    """A stage is not finished, so the tasks of later stages are not known."""


def finished_stages(inputs: BuildInputs, work: Work) -> dict[str, Finished]:
    """Return the bytes of finished tasks of this build by stage, up to the first unfinished stage."""
    held: dict[str, Finished] = {}

    def look(*groups: Sequence[Task]) -> list[list[Commit]]:
        found = [[commit for commit in work.find(group) if commit is not None] for group in groups]
        for group, commits in zip(groups, found, strict=True):
            size = sum(commit.bytes + FILE_BYTES * (len(commit.outputs) + 1) for commit in commits)
            if group:
                held[group[0].stage] = Finished(size, len(commits) == len(group))
        if not all(stage.complete for stage in held.values()):
            raise _UnfinishedError
        return found

    with suppress(_UnfinishedError, BuildError):  # the build itself will report errors of finished stages
        run_build(inputs, look)
    return held


def existing_folder(folder: Path) -> Path:
    """Return the folder itself, or the nearest folder above it that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def _device(folder: Path) -> int:
    return existing_folder(folder).stat().st_dev


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(existing_folder(folder)).free
