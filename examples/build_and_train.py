"""From raw text to a checkpoint on this machine: a recipe, a build, some steps of a small GPT, and a resume.

    python examples/build_and_train.py

The text is that of this Python installation, as in `shardkit demo`. For data of your own replace step 1.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
from gpt import GPT, GPTConfig, next_token_loss

from shardkit.loaders import StreamingLoader
from shardkit.tools.demo.corpus import EOS, train_tokenizer, write_corpus
from shardkit.writers import build

RECIPE = f"""\
inputs:
  - {{path: corpus/documentation.parquet, source: documentation}}
  - {{path: corpus/source-*.jsonl.gz, source: python}}
filters: [{{length: {{min_words: 20}}}}]
dedup: {{exact: {{}}}}
tokenizer: {{path: tokenizer.json, eos: "{EOS}"}}
pack: {{sequence_length: 256}}
output: {{path: dataset, shard_bytes: 256KiB}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, help="work here and keep it (default: a temporary folder)")
    parser.add_argument("--steps", type=int, default=30, help="of training (default: 30)")
    args = parser.parse_args()
    with nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        # 1. Raw text, and a tokenizer.
        corpus, documents = write_corpus(folder / "corpus", 1_000_000)
        vocabulary = train_tokenizer(folder / "tokenizer.json", documents, vocabulary=1024)
        print(f"raw text: {corpus.documents} documents, {corpus.text_bytes / 1e6:.1f} MB")

        # 2. The recipe, and the build: `shardkit build recipe.yaml` does the same.
        (folder / "recipe.yaml").write_text(RECIPE)
        result = build(folder / "recipe.yaml", workers=1, progress=False)
        kept = result.funnel.kept.documents
        print(f"dataset: {kept} documents in {result.samples} rows of {result.sequence_length} tokens")

        # 3. Training. What a step saw and what follows it is one small dict, beside the model's weights.
        torch.manual_seed(17)
        torch.set_num_threads(1)  # a model this small is only slowed down by more
        loader = StreamingLoader(result.location, batch_size=4, endless=True, return_ids=True)
        model = GPT(GPTConfig(vocabulary, layers=2, heads=2, width=64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step, batch in zip(range(1, args.steps + 1), loader, strict=False):
            loss = next_token_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step in (1, args.steps):
                print(f"step {step}: loss {loss.item():.2f}")
        checkpoint = {"model": model.state_dict(), "loader": loader.state_dict()}
        torch.save(checkpoint, folder / "checkpoint.pt")

        # 4. Another process would go on like this, on any number of ranks.
        resumed = StreamingLoader(result.location, batch_size=4, endless=True, return_ids=True)
        resumed.load_state_dict(torch.load(folder / "checkpoint.pt", weights_only=True)["loader"])
        expected, seen = next(iter(loader))["sample_id"], next(iter(resumed))["sample_id"]
        assert torch.equal(expected, seen)
        print(f"resumed: step {args.steps + 1} gets rows {seen.tolist()}, as it would have without a stop")
        loader.close()
        resumed.close()


if __name__ == "__main__":
    main()
