"""GRPO without a model: which rows a generation has, and where a run continues."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate import skip_first_batches
from torch.utils.data import DataLoader

__all__ = ["GRPOConfig", "GRPOTrainer"]


@dataclass
class GRPOConfig:
    output_dir: str
    max_steps: int = -1
    save_steps: int = 500
    seed: int = 42
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_generations: int = 8
    num_iterations: int = 1
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None

    def __post_init__(self) -> None:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if self.steps_per_generation is None:
            self.steps_per_generation = self.gradient_accumulation_steps
        self.generation_batch_size = self.per_device_train_batch_size * ranks * self.steps_per_generation


class GRPOTrainer:
    """It keeps the rows of each generation in `generated`, after the step at which it began."""

    def __init__(
        self, model: Any, reward_funcs: Callable[..., list[float]], args: GRPOConfig, train_dataset: Any
    ) -> None:
        assert train_dataset is not None
        self.args, self.reward_funcs = args, reward_funcs
        self.num_generations, self.num_iterations = args.num_generations, args.num_iterations
        ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        self.accelerator = SimpleNamespace(process_index=rank, num_processes=ranks)
        self.generated: list[tuple[int, list[dict[str, Any]]]] = []

    def get_train_dataloader(self) -> DataLoader[Any]:
        raise NotImplementedError

    def train(self, resume_from_checkpoint: bool | None = None) -> None:
        args, folder = self.args, Path(self.args.output_dir)
        steps = [int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*")]
        begin = max(steps) if resume_from_checkpoint else 0
        accumulated = args.gradient_accumulation_steps
        assert args.steps_per_generation is not None
        every = args.steps_per_generation * self.num_iterations
        batches = skip_first_batches(self.get_train_dataloader(), begin * accumulated)
        for number, batch in enumerate(batches):
            step, rest = begin + number // accumulated, (number + 1) % accumulated
            if number % every == 0:
                self.generated.append((step, batch))
                columns = {name: [row[name] for row in batch] for name in batch[0]}
                prompts = columns.pop("prompt")
                self.reward_funcs(prompts=prompts, completions=prompts, **columns)
            if rest == 0 and (step + 1) % args.save_steps == 0:
                (folder / f"checkpoint-{step + 1}").mkdir(parents=True, exist_ok=True)
