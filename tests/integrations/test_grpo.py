"""TRL's GRPO trains on prompts of the loader of its page, and resumes with the next ones on other ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trl import GRPOConfig

from shardkit.loaders import StreamingLoader

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers" / "grpo.md"
PROMPTS = 6  # of a generation
GENERATIONS = 4  # completions of a prompt
SEED = 42  # TRL's default

Rows = dict[int, list[str]]


@pytest.fixture
def trainer_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's trainer; its prompts are in the current folder."""
    monkeypatch.chdir(tmp_path)
    numbers = range(40)
    pq.write_table(pa.table({"prompt": [f"text {i}" for i in numbers], "sum": numbers}), "prompts.parquet")
    [block, *_] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    space: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), space)
    return space["StreamingGRPOTrainer"]


def train(
    trainer_class: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ranks: int,
    per_rank: int,
    steps: int,
    iterations: int,
) -> Rows:
    """Train until step `steps`, rank by rank; return {step: prompts of the generation, by rank}."""
    found: Rows = {}
    rewarded: list[Sequence[int]] = []
    accumulated = PROMPTS * GENERATIONS // (per_rank * ranks)
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        args = GRPOConfig(
            f"run-{rank}" if ranks > 1 else "run-0",
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=per_rank,
            gradient_accumulation_steps=accumulated,
            num_generations=GENERATIONS,
            num_iterations=iterations,
        )
        rewarded.clear()
        trainer = trainer_class(
            model="unused",
            args=args,
            reward_funcs=lambda sum, **others: rewarded.append(sum),
            train_dataset=[{"prompt": ""}],
        )
        trainer.train(resume_from_checkpoint=Path(args.output_dir).exists())
        for step, rows in trainer.generated:
            assert [row["prompt"] for row in rows] == ["text " + str(number) for number in rewarded.pop(0)]
            found.setdefault(step, []).extend(row["prompt"] for row in rows)
    return found


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("per_rank", [6, 4])
def test_generations_have_the_loaders_prompts_also_after_a_resume_on_other_ranks(
    trainer_class: Any, monkeypatch: pytest.MonkeyPatch, per_rank: int, iterations: int
) -> None:
    """With 6 rows of a rank, the completions of a prompt lie on two ranks."""
    whole = train(trainer_class, monkeypatch, ranks=2, per_rank=per_rank, steps=8, iterations=iterations)
    with StreamingLoader(
        "prompts.parquet", batch_size=PROMPTS, seed=SEED, rank=0, world_size=1, endless=True
    ) as loader:
        batches = list(islice(loader, 20))
    for number, (step, prompts) in enumerate(sorted(whole.items())):
        assert step == number * iterations
        assert prompts == [text for text in batches[number]["prompt"] for _ in range(GENERATIONS)]
    longer = train(trainer_class, monkeypatch, ranks=1, per_rank=per_rank, steps=14, iterations=iterations)
    assert min(longer) == 8
    for step, prompts in longer.items():
        assert prompts == [text for text in batches[step // iterations]["prompt"] for _ in range(GENERATIONS)]
