"""From a step whose loss jumped to the document that did it, and to a run without that document.

    python examples/trace_a_loss_spike.py

One document of the corpus is noise. A small GPT meets it, its loss jumps, and `shardkit trace` names file,
record and URL by the step's number and the loader's state alone: no ids were logged, nothing is replayed.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from gpt import GPT, GPTConfig, next_token_loss

from shardkit.cli.main import main as shardkit
from shardkit.loaders import Stream, StreamingLoader
from shardkit.tools.demo.corpus import EOS, Document, train_tokenizer
from shardkit.writers import build

RECIPE = f"""\
inputs: [{{path: crawl.jsonl, source: crawl}}]
tokenizer: {{path: tokenizer.json, eos: "{EOS}"}}
pack: {{sequence_length: 128, strategy: concat}}
output: {{path: dataset}}
"""
WORDS = "the cat and the dog sat down in a warm house by the river to see the moon rise over the mill"
NOISE = 777  # the record that is no text


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    chance = random.Random(5)
    texts = [" ".join(chance.choices(WORDS.split(), k=60)) for _ in range(1000)]
    texts[NOISE] = base64.b64encode(chance.randbytes(500)).decode()
    with tempfile.TemporaryDirectory() as name:
        folder, state, gone = Path(name), Path(name, "state.json"), Path(name, "gone.txt")
        records = [{"text": text, "url": f"https://a.org/{n}"} for n, text in enumerate(texts)]
        (folder / "crawl.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        documents = [Document(str(number), text, "") for number, text in enumerate(texts)]
        vocabulary = train_tokenizer(folder / "tokenizer.json", documents, vocabulary=512)
        (folder / "recipe.yaml").write_text(RECIPE)
        dataset = build(folder / "recipe.yaml", workers=1, progress=False).location

        torch.manual_seed(17)
        torch.set_num_threads(1)  # a model this small is only slowed down by more
        model = GPT(GPTConfig(vocabulary, layers=1, heads=2, width=32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        with StreamingLoader(dataset, batch_size=4) as loader:
            for batch in loader:
                losses.append(next_token_loss(model, batch))
                optimizer.zero_grad()
                losses[-1].backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            state.write_text(json.dumps(loader.state_dict()))

        jumps = [(now - before).item() for before, now in pairwise(losses)]
        step = jumps.index(max(jumps)) + 2  # the first jump is that to step 2
        before, now = losses[step - 2].item(), losses[step - 1].item()
        print(f"step {step} of {len(losses)}: loss {before:.2f} -> {now:.2f}")
        # As on the command line: shardkit trace DATASET --step …
        run = ["--state", str(state), "--batch-size", "4"]
        assert shardkit(["trace", dataset, "--step", str(step), *run]) == 0

        print(f"\nrecord {NOISE} is the noise: leave out the rows that hold a part of it")
        url = f"https://a.org/{NOISE}"
        assert shardkit(["trace", dataset, "--url", url, "--exclude", str(gone)]) == 0
        with StreamingLoader([Stream(dataset, exclude=gone)], batch_size=1, return_ids=True) as loader:
            left = [int(batch["sample_id"]) for batch in loader]
        print(f"a new run has {len(left)} rows")


if __name__ == "__main__":
    main()
