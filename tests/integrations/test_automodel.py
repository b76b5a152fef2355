"""Automodel's recipe trains on its page's loader, and resumes with the next sample on other ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from nemo_automodel.components.config.loader import ConfigNode

from shardkit.loaders import StreamingLoader

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers" / "automodel.md"
GLOBAL_BATCH = 12


@pytest.fixture
def page(data: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the page defines; its data is the folder "data" of the current one."""
    monkeypatch.chdir(data.parent)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    space: dict[str, Any] = {}
    exec(compile(blocks[0], str(PAGE), "exec"), space)
    return space


def train(
    page: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, ranks: int, steps: int
) -> list[list[str]]:
    """Train until step `steps`, rank by rank; return the sorted rows of each step, over all ranks."""
    seen = []
    local = GLOBAL_BATCH // ranks // 2  # two micro-batches
    scheduler = {"global_batch_size": GLOBAL_BATCH, "local_batch_size": local, "ckpt_every_steps": 5}
    recipes = []
    for rank in range(ranks):  # all have loaded the last checkpoint before one saves the next
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        config = ConfigNode(
            {
                "step_scheduler": scheduler | {"max_steps": steps},
                "dataset": {"tokenizer": None},
                "checkpoint": {"checkpoint_dir": "checkpoints"},
            }
        )
        recipes.append(page["Recipe"](config))
        recipes[-1].cfg.dataloader = page["ShardkitData"](dataset_config=None, batch_size=local, seed=17)
        recipes[-1].setup()
    for recipe in recipes:
        recipe.run_train_validation_loop()
        recipe.dataloader.close()
    for step in zip(*(recipe.seen for recipe in recipes), strict=True):
        rows = [row for batches in step for batch in batches for row in batch["input_ids"].tolist()]
        seen.append(sorted(map(str, rows)))
    return seen


def test_a_run_resumes_exactly_on_fewer_and_on_more_ranks(
    data: Path, page: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = train(page, monkeypatch, ranks=2, steps=7)
    found += train(page, monkeypatch, ranks=1, steps=12)
    found += train(page, monkeypatch, ranks=3, steps=20)  # 240 samples of epochs of 150
    with StreamingLoader(
        data, batch_size=GLOBAL_BATCH, rank=0, world_size=1, labels="shifted", endless=True
    ) as loader:
        expected = [
            sorted(map(str, batch["tokens"].tolist())) for _, batch in zip(range(20), loader, strict=False)
        ]
    assert found == expected


def test_batches_have_automodels_names_and_shifted_labels(
    page: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = page["ShardkitData"](dataset_config=None, batch_size=3, seed=17).build(
        dp_rank=1, dp_world_size=2, pp_enabled=False, tokenizer=None
    )
    batch = next(iter(loader))
    loader.close()
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["input_ids"].shape == batch["labels"].shape == (3, 64)
    assert (batch["labels"][:, :-1] == batch["input_ids"][:, 1:]).all()
