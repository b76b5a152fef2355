"""A tiny Llama with TRL's SFTTrainer on packed rows, resumed at the exact next sample on any number of ranks.

    torchrun --nproc-per-node 2 examples/trainers/train_trl.py --data out --folder run --steps 40

The rows are tokenized and packed already, so that SFTTrainer has nothing to prepare. `position_ids` begin
again in each document: its packing without padding, with attention inside of documents.
"""

from __future__ import annotations

from tokenizers import Tokenizer, models
from train_hugging_face import (  # type: ignore[import-not-found, unused-ignore]
    LossLog,
    make_model,
    newest_checkpoint,
    parse_arguments,
    training_arguments,
)
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from shardkit.loaders import Layout
from shardkit.loaders.integrations.hugging_face import StreamingTrainerMixin, TrainerDataset


class StreamingSFTTrainer(StreamingTrainerMixin, SFTTrainer):  # type: ignore[misc, unused-ignore]
    """SFTTrainer on a `TrainerDataset`."""


def main() -> None:
    options = parse_arguments()
    words = models.WordLevel({str(number): number for number in range(256)}, unk_token="1")
    # Yours: AutoTokenizer.from_pretrained(...).
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call, unused-ignore]
        tokenizer_object=Tokenizer(words), eos_token="0", pad_token="0"
    )
    trainer = StreamingSFTTrainer(
        model=make_model(),
        args=SFTConfig(**training_arguments(options), max_length=None, packing=False, bf16=False),
        processing_class=tokenizer,
        train_dataset=TrainerDataset(
            options.data, layout=Layout(position_ids=True), usage_log=options.folder / "usage"
        ),
        callbacks=[LossLog(options.folder / "losses.jsonl")],
    )
    trainer.train(resume_from_checkpoint=newest_checkpoint(options.folder))


if __name__ == "__main__":
    main()
