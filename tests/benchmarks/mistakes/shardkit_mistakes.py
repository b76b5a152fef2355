"""shardkit: twenty mistakes and five tasks."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from mistake_side import cut, ids_of, mistake, prepare, resumed, serve, task

COLUMNS = {"id": "int", "tokens": "ndarray:int32:16"}


@prepare
def data() -> None:
    """Two datasets of 64 samples, in shards of about 13."""
    import shardkit as sk

    for folder, first in (("data", 0), ("other", 100)):
        with sk.MdsWriter(folder, columns=COLUMNS, shard_bytes=1200) as writer:
            for number in range(64):
                writer.write({"id": first + number, "tokens": np.full(16, first + number, np.int32)})


def loaded(folder: Any, **options: Any) -> list[Any]:
    """All batches of an epoch."""
    import shardkit as sk

    return list(sk.StreamingLoader(folder, **options))


@mistake(names="no/such")
def path_missing() -> None:
    loaded("no/such", batch_size=8)


@mistake(names="empty")
def folder_empty() -> None:
    Path("empty").mkdir()
    loaded("empty", batch_size=8)


@mistake(names="tables")
def folder_of_another_format() -> None:
    loaded("tables", batch_size=8)


@mistake(names="shard.00001.mds")
def shard_truncated() -> None:
    cut(Path("data/shard.00001.mds"))
    loaded("data", batch_size=8)


@mistake(names="index.json")
def index_damaged() -> None:
    cut(Path("data/index.json"))
    loaded("data", batch_size=8)


@mistake(names="shufle")
def option_misspelled() -> None:
    loaded("data", batch_size=8, shufle="none")


@mistake(names="batch_size")
def option_of_wrong_type() -> None:
    loaded("data", batch_size="8")


@mistake(names="batch_size")
def batch_size_zero() -> None:
    loaded("data", batch_size=0)


@mistake(names="seed")
def seed_negative() -> None:
    loaded("data", batch_size=8, seed=-1)


@mistake(names="tokens")
def field_missing() -> None:
    import shardkit as sk

    with sk.MdsWriter("new", columns=COLUMNS) as writer:
        writer.write({"id": 0})


@mistake(names="boto3")
def package_missing() -> None:
    modules: dict[str, Any] = sys.modules
    modules |= dict.fromkeys(("boto3", "botocore"))  # as if these were not installed
    loaded("s3://bucket/data", batch_size=8)


@mistake(names="zstdd")
def compression_unknown() -> None:
    import shardkit as sk

    with sk.MdsWriter("new", columns=COLUMNS, compression="zstdd"):
        pass


@mistake(names="new")
def writing_unfinished() -> None:
    import shardkit as sk

    writer = sk.MdsWriter("new", columns=COLUMNS, shard_bytes=1200)
    for number in range(64):
        writer.write({"id": number, "tokens": np.full(16, number, np.int32)})
    loaded("new", batch_size=8)


@mistake(names="data")
def folder_not_empty() -> None:
    import shardkit as sk

    with sk.MdsWriter("data", columns=COLUMNS) as writer:
        writer.write({"id": 0, "tokens": np.zeros(16, np.int32)})


@mistake(names="meta")
def object_not_serializable() -> None:
    import shardkit as sk

    with sk.MdsWriter("new", columns={"meta": "json"}) as writer:
        writer.write({"meta": {"lock": threading.Lock()}})


@mistake(names=r"\bother\b|fingerprint")
def state_of_other_data() -> None:
    import shardkit as sk

    loader = sk.StreamingLoader("data", batch_size=8)
    next(iter(loader))
    state = loader.state_dict()
    loader = sk.StreamingLoader("other", batch_size=8)
    loader.load_state_dict(state)
    list(loader)


@mistake(names="batch_size")
def state_of_other_batch_size() -> str | None:
    import shardkit as sk

    loader = sk.StreamingLoader("data", batch_size=8)
    seen = ids_of([batch for _, batch in zip(range(2), loader, strict=False)])
    state = loader.state_dict()
    loader = sk.StreamingLoader("data", batch_size=4)
    loader.load_state_dict(state)
    return resumed(seen, ids_of(loader))


@mistake(names="transform")
def transform_not_picklable() -> str | None:
    from shardkit.loaders.pytorch import StreamingDataLoader, StreamingDataset

    lock = threading.Lock()

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return {"id": sample["id"], "tokens": sample["tokens"] + 1}

    dataset = StreamingDataset("data", batch_size=8, transform=transform)
    return resumed([], ids_of(StreamingDataLoader(dataset, num_workers=2)))


@mistake(names="credentials")
def s3_without_credentials() -> None:
    loaded("s3://bucket/data", batch_size=8)


@mistake(names="64")
def index_out_of_range() -> None:
    import shardkit as sk

    sk.open("data")[64]


@task()
def pack() -> None:
    import shardkit as sk

    sk.build("texts/*.jsonl", output="packed", tokenizer="tokenizer.json", sequence_length=128)


@task()
def resume() -> None:
    import shardkit as sk

    loader = sk.StreamingLoader("data", batch_size=8, seed=17)
    for _step, _batch in zip(range(3), loader, strict=False):
        state = loader.state_dict()
    loader.load_state_dict(state)
    for _batch in loader:
        pass


@task()
def stream() -> None:
    import shardkit as sk

    for _batch in sk.StreamingLoader("s3://bucket/data", batch_size=8, cache_dir="cache"):
        pass


@task()
def mix() -> None:
    import shardkit as sk

    streams = [sk.Stream("data", weight=0.7), sk.Stream("other", weight=0.3)]
    for _batch in sk.StreamingLoader(streams, batch_size=8):
        pass


@task()
def inspect() -> None:
    import shardkit as sk

    print(sk.open("data")[17])


if __name__ == "__main__":
    serve()
