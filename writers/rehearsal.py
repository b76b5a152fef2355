"""How many bytes a build will write, by stage: what its stages write for a sample of the input, scaled up.

The sample (sample_pieces.py) goes through all stages in a temporary folder. Tasks of a split are scaled by
the stored bytes of their source, those of partitions by the documents, or by the tokens, that come to them.
So expansion of compressed files, filters, editors, annotations, the tokenizer and compressed shards are in it
as they are, whatever the text. A sample cannot show what depends on the whole:

- duplicates meet only there. Nothing is taken off for those that are removed; of near-duplicates,
  `PAIRED` of all documents are taken to be in pairs, with `PAIR_BYTES` each, where the sample has fewer.
- planted copies and the documents of an index are left out of the sample: so many more documents are added.

The result is high rather than low, by `MARGIN` and by what duplicate removal saves.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardkit.progress import make_listener
from shardkit.writers.annotations import ANNOTATIONS_FILE
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.execution.task import Commit
from shardkit.writers.execution.work_local import LocalWork
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.making import PARTITION_TEXT_BYTES, Made, Plan, make_parts
from shardkit.writers.recipe import Recipe
from shardkit.writers.sample_pieces import choose_pieces, put_pieces
from shardkit.writers.session import Execution, open_runner
from shardkit.writers.shards import PROVENANCE_NAME

__all__ = ["FILE_BYTES", "SAMPLE_BYTES", "StageBytes", "rehearse"]

SAMPLE_BYTES = 8 << 20  # stored bytes of all sources: seconds of work, whatever the input
MARGIN = 1.1
PAIRED = 0.5
PAIR_BYTES = 400
FILE_BYTES = 4096  # what a file takes beyond its bytes at most; of small ones there are many
_HASH_BYTES = 8
_WORD_BYTES = 6  # of text; the shortest average of the languages that have spaces
_NEAR = ("signatures", "equal", "candidates", "shingles", "verify", "near")
_BY_TOKENS = ("pack", "provenance")


@dataclass(frozen=True)
class StageBytes:
    """What a whole build writes into its work folder, `stages` in order, and what of it becomes the output.

    `largest_task` is the most that one task of many writes; `documents`, `text_bytes`: what filters keep.
    """

    stages: Mapping[str, int]
    output: int
    largest_task: int
    documents: int
    text_bytes: int

    @property
    def work(self) -> int:
        """All of it: nothing in a work folder goes before the build is done."""
        return sum(self.stages.values())


@dataclass(frozen=True)
class _Scales:
    """By how much the whole is more than the sample: for tasks of a split by its source, else by stage."""

    by_task: Mapping[str, float]
    documents: float
    tokens: float

    def of(self, commit: Commit) -> float:
        if commit.name in self.by_task:
            return self.by_task[commit.name]
        return self.tokens if commit.stage in _BY_TOKENS else self.documents


def rehearse(plan: Plan, workers: int | None = None, *, sample_bytes: int = SAMPLE_BYTES) -> StageBytes:
    """Build from a sample in a temporary folder, up to publishing, and reckon what the whole will take.

    Raises what the build would raise; BuildError also if the sample leaves no document.
    """
    recipe = plan.recipe
    with tempfile.TemporaryDirectory(prefix="shardkit-rehearsal-") as folder:
        pieces = choose_pieces(plan.splits, sample_bytes)
        inputs, stored = put_pieces(recipe, pieces, Path(folder) / "inputs", cut_anywhere=True)
        derived = _derived(recipe).model_copy(update={"inputs": tuple(inputs)}).in_folder(recipe.folder)
        splits = scan_inputs(derived)
        work = LocalWork(Path(folder) / "work")
        small = Plan(derived, splits, plan.digest, (), plan.files)
        with make_listener(False) as listener, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the build says it, too
            with open_runner(derived, work, Execution(workers=workers), listener) as runner:
                tokenizer = recipe.resolve(recipe.tokenizer.path)
                made = make_parts(small, derived, tokenizer, runner.run)
        whole: Counter[int] = Counter()
        for split in plan.splits:
            whole[split.source] += split.bytes
        by_source = [whole[source] / max(1, taken) for source, taken in stored.items()]
        scales = _scales([by_source[split.source] for split in splits], made)
        return _whole(plan, [commit for _, commit in work.commits()], scales, made)


def _derived(recipe: Recipe) -> Recipe:
    """The recipe of the sample: nothing in it stops a build that the whole would not stop."""
    dedup = recipe.dedup.model_copy(update={"max_removed_fraction": 1.0})
    if dedup.near is not None:
        near = dedup.near.model_copy(update={"against": (), "measure": None})
        dedup = dedup.model_copy(update={"near": near})
    return recipe.model_copy(update={"dedup": dedup, "max_bad_fraction": 1.0})


def _scales(by_split: Sequence[float], made: Made) -> _Scales:
    def ratio(amounts: Sequence[int]) -> float:
        scaled = sum(amount * scale for amount, scale in zip(amounts, by_split, strict=True))
        return scaled / max(1, sum(amounts))

    cleaned = made.prepared.cleaned
    documents = ratio([commit.ledger().kept.documents for commit in cleaned])
    tokens = ratio([commit.counts["tokens"] for commit in made.spilled])
    names = [commit.name for commit in cleaned]
    return _Scales(dict(zip(names, by_split, strict=True)), documents, tokens)


def _whole(plan: Plan, commits: Sequence[Commit], scales: _Scales, made: Made) -> StageBytes:
    stages: dict[str, float] = {}
    output = text = 0.0
    tasks: Counter[str] = Counter()
    files = 0
    for commit in commits:
        scale = scales.of(commit)
        stages[commit.stage] = stages.get(commit.stage, 0.0) + scale * commit.bytes
        if commit.name in scales.by_task:
            tasks[commit.stage] += 1
            files = max(files, len(commit.outputs) + 1)
        published = {"pack": commit.outputs.keys() - {PROVENANCE_NAME}, "clean": {ANNOTATIONS_FILE}}
        names = published.get(commit.stage, commit.outputs.keys() if commit.stage == "provenance" else set())
        output += scale * sum(commit.outputs[name].bytes for name in names if name in commit.outputs)
        text += scale * commit.ledger().kept.bytes if commit.stage == "clean" else 0
    documents = scales.documents * sum(c.ledger().kept.documents for c in made.prepared.cleaned)
    near = plan.recipe.dedup.near
    if near is not None:
        indexed = sum(part.documents for index in plan.indexes for part in index.parts)
        _add_near(stages, near, documents, text, indexed)
    for stage in tasks:
        stages[stage] += len(plan.splits) * files * FILE_BYTES / MARGIN
    sizes = {stage: int(MARGIN * size) for stage, size in stages.items()}
    split = max(split.bytes for split in plan.splits) / max(1, sum(split.bytes for split in plan.splits))
    partitions = max(1.0, text / PARTITION_TEXT_BYTES)
    largest = 0.0
    for stage, size in sizes.items():
        if stage in tasks:
            largest = max(largest, size * split)
        elif stage in _BY_TOKENS:
            largest = max(largest, size / partitions)
        elif stage != "near":  # partitions that are sized to the memory of a task
            largest = max(largest, min(size, plan.recipe.memory))
    return StageBytes(sizes, int(MARGIN * output), int(largest), int(documents), int(text))


def _add_near(
    stages: dict[str, float], config: NearDedupConfig, documents: float, text: float, indexed: int
) -> None:
    """What near-duplicates take at least, and what planted copies and documents of an index add."""
    grams = text / (_WORD_BYTES if config.minhash.unit == "words" else 1)
    stages["shingles"] = max(stages.get("shingles", 0.0), PAIRED * grams * _HASH_BYTES)
    stages["candidates"] = max(stages.get("candidates", 0.0), PAIRED * documents * PAIR_BYTES)
    planted = config.measure.planted if config.measure is not None else 0
    for stage in _NEAR:
        more = planted + (indexed if stage in ("equal", "candidates", "shingles", "verify", "near") else 0)
        stages[stage] = stages.get(stage, 0.0) * (1 + more / max(1.0, documents))
