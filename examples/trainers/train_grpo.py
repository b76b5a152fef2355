"""A tiny Llama with TRL's GRPOTrainer on prompts of a shardkit dataset, resumed on any number of ranks.

    torchrun --nproc-per-node 2 examples/trainers/train_grpo.py --data out --folder run --steps 40

The prompts are the first tokens of each row, written as numbers. Completions are sampled, so losses of two
runs cannot be compared: as "loss", the log has the mean of a number of each prompt of a step, over all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from train_hugging_face import (  # type: ignore[import-not-found, unused-ignore]
    make_model,
    newest_checkpoint,
    parse_arguments,
    training_arguments,
)
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from shardkit.loaders import Layout, Run, StreamingLoader

GENERATIONS = 4  # completions of a prompt


class StreamingGRPOTrainer(GRPOTrainer):  # type: ignore[misc, unused-ignore]
    """GRPOTrainer with prompts of a `StreamingLoader`; the number of a generation is its position."""

    data: str
    usage_log: Path

    def get_train_dataloader(self) -> DataLoader[Any]:
        args, rank = self.args, self.accelerator.process_index
        prompts = args.generation_batch_size // self.num_generations  # of a generation, over all ranks
        rows = args.generation_batch_size // self.accelerator.num_processes  # of this rank
        loader = StreamingLoader(
            self.data,
            batch_size=prompts,
            seed=args.seed,
            rank=0,
            world_size=1,
            endless=True,
            layout=Layout(tensors="numpy"),
            run=Run(prefetch_batches=0),
            usage_log=None if rank else self.usage_log,
        )

        @lru_cache(1)
        def generation(number: int) -> list[dict[str, str]]:
            loader.seek(number * prompts)
            tokens = next(iter(loader))["tokens"][:, :8].tolist()
            texts = [" ".join(map(str, row)) for row in tokens for _ in range(self.num_generations)]
            return [{"prompt": text} for text in texts[rank * rows : (rank + 1) * rows]]

        repeats = args.steps_per_generation * self.num_iterations
        numbers: Any = range(args.max_steps * args.gradient_accumulation_steps)  # of micro-batches
        return DataLoader(numbers, batch_size=1, collate_fn=lambda number: generation(number[0] // repeats))


class Reward:
    """Rewards completions by their first token, and appends what each step was given to losses.jsonl."""

    __name__ = "reward"

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], trainer_state: Any, **columns: object
    ) -> list[float]:
        numbers = [sum(map(int, prompt.split())) for prompt in prompts]
        gathered: list[Any] = [numbers]
        if dist.is_initialized():
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, numbers)
        if not dist.is_initialized() or dist.get_rank() == 0:
            every = [number for rank in gathered for number in rank]
            step = trainer_state.global_step + 1
            with self._file.open("a") as log:
                log.write(json.dumps({"step": step, "loss": sum(every) / len(every)}) + "\n")
        return [float(text.startswith("1")) for text in completions]


def main() -> None:
    options = parse_arguments()
    words = Tokenizer(models.WordLevel({str(number): number for number in range(256)}, unk_token="1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment, unused-ignore]
    # Yours: AutoTokenizer.from_pretrained(...).
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call, unused-ignore]
        tokenizer_object=words, eos_token="0", pad_token="0"
    )
    args = GRPOConfig(
        **training_arguments(options), num_generations=GENERATIONS, max_completion_length=4, bf16=False
    )
    trainer = StreamingGRPOTrainer(
        model=make_model(),
        args=args,
        processing_class=tokenizer,
        reward_funcs=Reward(options.folder / "losses.jsonl"),
        train_dataset=Dataset.from_list([{"prompt": ""}]),  # TRL wants a dataset; it is not read
    )
    trainer.data, trainer.usage_log = options.data, options.folder / "usage"
    trainer.train(resume_from_checkpoint=newest_checkpoint(options.folder))


if __name__ == "__main__":
    main()
