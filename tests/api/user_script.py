"""A script that uses the API as users do; test_types.py has it checked by type checkers, and runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shardkit as sk


def prepare(folder: Path) -> sk.BuildResult:
    """Check a recipe that is a dict, and build it; then build documents without a recipe."""
    recipe = sk.load_recipe(
        {
            "inputs": {"text": "text"},
            "tokenizer": {"path": folder / "tokenizer.json", "eos": "<|endoftext|>"},
            "pack": {"sequence_length": 65},
            "output": folder / "out",
        },
        ["seed=5"],
        for_documents=True,
    )
    assert recipe.pack.sequence_length == 65
    keys: dict[str, Any] = {"inputs": "plain-*.jsonl", "output": "other"}
    assert sk.load_recipe({**keys, "tokenizer": {"path": "tokenizer.json", "eos": "x"}}).seed == 17
    documents = [{"text": f"document {number} has words"} for number in range(200)]
    tokenizer = folder / "tokenizer.json"
    return sk.build(
        (document for document in documents),
        output=folder / "out",
        tokenizer=tokenizer,
        sequence_length=65,
        workers=1,
        progress=False,
    )


def look(folder: Path) -> list[str]:
    """Look at rows and columns."""
    with sk.open(folder / "out") as dataset:
        row: dict[str, object] = dataset[0]
        assert dataset.head(2)[0].keys() == row.keys()
        rows = dataset.select(number for number in (3, 1))
        arrays = rows.to_numpy(["tokens"])
        assert arrays["tokens"].shape == (2, dataset.sequence_length)
        table = dataset.to_arrow(columns=["tokens"], max_bytes="1GB")
        assert table.num_rows == len(dataset)
        features: dict[str, str] = dataset.features
        dataset.tokenizer.decode([1, 2, 3])
        return [*features, dataset.text(0)]


def train(folder: Path) -> dict[str, object]:
    """Train with the options of the signature, of groups, and rare ones."""

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        return sample

    loader = sk.StreamingLoader(
        [sk.Stream(folder / "out", weight=2), sk.Stream(folder / "out", name="again")],
        batch_size=4,
        shuffle="global",
        labels="shifted",
        columns=["tokens"],
        sequence_length=65,
        endless=True,
        cache_dir=folder / "cache",
        cache_bytes="1GB",
        layout=sk.Layout(position_ids=True, rename={"tokens": "input_ids"}),
        order=sk.Order(global_batch=[(0, 8)]),
        run=sk.Run(prefetch_batches=2),
        eos_id=0,
    )
    losses = 0
    for step in loader.steps():
        for batch in step:
            losses += int(batch["labels"].sum())
        break
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.close()
    with sk.StreamingLoader(folder / "out", batch_size=2, transform=transform, restart=True) as evaluation:
        for batch in evaluation:
            assert batch["tokens"].shape[0] == 2
            break
    return state


def write(folder: Path) -> int:
    """Write any columns in parts."""
    for part in ("part-0", "part-1"):
        with sk.MdsWriter(folder / "raw" / part, columns={"text": "str", "label": "int"}) as writer:
            writer.write({"text": part, "label": 1})
    return sk.merge(folder / "raw").samples
