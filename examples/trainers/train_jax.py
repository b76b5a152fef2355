"""A tiny decoder in JAX, without torch, resumed at the exact next sample on any number of processes.

    python examples/trainers/train_jax.py --data out --folder run --steps 40

One process a host: with several, start each with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or leave
`jax.distributed` to find them on a cluster. Each reads its part of a global batch; a checkpoint is one file.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.loaders import Layout, StreamingLoader

VOCABULARY, WIDTH = 256, 32
Parameters = dict[str, jax.Array]


def make_parameters() -> Parameters:
    rng = np.random.default_rng(17)
    shapes = {"embedding": (VOCABULARY, WIDTH), "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, VOCABULARY)}
    return {name: jnp.array(rng.normal(0, 0.3, shape), jnp.float32) for name, shape in shapes.items()}


def loss_of(parameters: Parameters, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross entropy over all processes; attention stays inside of documents."""
    x = parameters["embedding"][batch["inputs"]]
    q, k, v = jnp.split(x @ parameters["qkv"], 3, axis=-1)
    documents = batch["inputs_segmentation"]
    mask = jnp.tril(documents[:, :, None] == documents[:, None, :])
    scores = jnp.where(mask, q @ k.swapaxes(1, 2) / WIDTH**0.5, -1e9)
    logits = (x + jax.nn.softmax(scores) @ v) @ parameters["out"]
    scored = batch["targets"] >= 0  # -100: padding, or the first token of another document
    chosen = jnp.take_along_axis(logits, jnp.maximum(batch["targets"], 0)[..., None], axis=-1)[..., 0]
    return jnp.sum(scored * (jax.nn.logsumexp(logits, axis=-1) - chosen)) / scored.sum()


@partial(jax.jit, donate_argnums=0)
def train_step(parameters: Parameters, batch: dict[str, jax.Array]) -> tuple[Parameters, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
    return jax.tree.map(lambda value, slope: value - 0.5 * slope, parameters, gradients), loss


def save(file: Path, step: int, parameters: Parameters, loader: StreamingLoader) -> None:
    """Replace the checkpoint as a whole; parameters and loader state are the same in all processes."""
    if jax.process_index() == 0:
        arrays = {name: np.asarray(value.addressable_data(0)) for name, value in parameters.items()}
        unfinished = file.with_suffix(".unfinished.npz")
        arrays |= {"step": np.array(step), "loader": np.array(json.dumps(loader.state_dict()))}
        np.savez(unfinished, **arrays)  # type: ignore[arg-type]  # of its one named option, `allow_pickle`
        unfinished.replace(file)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="dataset made by `shardkit build`")
    parser.add_argument("--folder", type=Path, required=True, help="checkpoint and logs of the run")
    parser.add_argument("--steps", type=int, default=40, help="train until this step")
    parser.add_argument("--global-batch", type=int, default=12, help="sequences per step over all processes")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args()

    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, processes, int(os.environ["RANK"]))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())

    loader = StreamingLoader(
        options.data,
        batch_size=options.global_batch // jax.process_count(),
        rank=jax.process_index(),
        world_size=jax.process_count(),
        labels="shifted",
        layout=Layout(
            document_ids=True,
            rename={"tokens": "inputs", "labels": "targets", "document_ids": "inputs_segmentation"},
            tensors="numpy",
        ),
        dtype="int32",
        endless=True,
        usage_log=options.folder / "usage",
    )
    done, parameters, checkpoint = 0, make_parameters(), options.folder / "last.npz"
    if checkpoint.exists():
        saved: dict[str, Any] = dict(np.load(checkpoint))
        done, parameters = int(saved["step"]), {name: jnp.array(saved[name]) for name in parameters}
        loader.load_state_dict(json.loads(str(saved["loader"])))
    parameters = jax.device_put(parameters, everywhere)

    for step, batch in zip(range(done + 1, options.steps + 1), loader, strict=False):
        arrays = {name: jax.make_array_from_process_local_data(rows, value) for name, value in batch.items()}
        parameters, loss = train_step(parameters, arrays)
        if jax.process_index() == 0:
            with (options.folder / "losses.jsonl").open("a") as log:
                log.write(json.dumps({"step": step, "loss": float(loss)}) + "\n")
        if step % options.checkpoint_every == 0 or step == options.steps:
            save(checkpoint, step, parameters, loader)
    loader.close()


if __name__ == "__main__":
    main()
