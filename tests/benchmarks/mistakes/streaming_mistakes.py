"""mosaicml-streaming: twenty mistakes and five tasks."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
from mistake_side import before, cut, ids_of, mistake, prepare, resumed, serve, task

COLUMNS = {"id": "int", "tokens": "ndarray:int32:16"}
held: list[Any] = []  # open until the process ends


@before
def forget_shared_memory() -> None:
    """Remove shared memory that killed processes left; of a user, one process runs at a time."""
    try:
        import torchvision  # noqa: F401 (its build for CUDA fails beside a torch without)
    except RuntimeError:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support" / "stand_ins"))
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    import streaming

    lock = open(Path(tempfile.gettempdir()) / f"shardkit-tests-streaming-{os.getuid()}.lock", "w")  # noqa
    fcntl.flock(lock, fcntl.LOCK_EX)
    held.append(lock)
    streaming.base.util.clean_stale_shared_memory()


@prepare
def data() -> None:
    """Two datasets of 64 samples, in shards of about 13."""
    from streaming import MDSWriter

    for folder, first in (("data", 0), ("other", 100)):
        with MDSWriter(out=folder, columns=COLUMNS, size_limit=1200) as writer:
            for number in range(64):
                writer.write({"id": first + number, "tokens": np.full(16, first + number, np.int32)})


def loaded(batch_size: Any = 8, **options: Any) -> list[Any]:
    """All batches of an epoch."""
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(batch_size=batch_size, shuffle=True, **options)
    return list(StreamingDataLoader(dataset, batch_size=batch_size))


@mistake(names="no/such")
def path_missing() -> None:
    loaded(local="no/such")


@mistake(names="empty")
def folder_empty() -> None:
    Path("empty").mkdir()
    loaded(local="empty")


@mistake(names="tables")
def folder_of_another_format() -> None:
    loaded(local="tables")


@mistake(names="shard.00001.mds")
def shard_truncated() -> None:
    cut(Path("data/shard.00001.mds"))
    loaded(local="data")


@mistake(names="index.json")
def index_damaged() -> None:
    cut(Path("data/index.json"))
    loaded(local="data")


@mistake(names="shufle")
def option_misspelled() -> None:
    loaded(local="data", shufle=True)


@mistake(names="batch_size")
def option_of_wrong_type() -> None:
    loaded(local="data", batch_size="8")


@mistake(names="batch_size")
def batch_size_zero() -> None:
    loaded(local="data", batch_size=0)


@mistake(names="seed")
def seed_negative() -> None:
    loaded(local="data", shuffle_seed=-1)


@mistake(names="tokens")
def field_missing() -> None:
    from streaming import MDSWriter

    with MDSWriter(out="new", columns=COLUMNS) as writer:
        writer.write({"id": 0})


@mistake(names="pyspark|pandas")
def package_missing() -> None:
    from streaming.base.converters import dataframe_to_mds

    dataframe_to_mds(None, merge_index=True, mds_kwargs={"out": "new", "columns": COLUMNS})


@mistake(names="zstdd")
def compression_unknown() -> None:
    from streaming import MDSWriter

    with MDSWriter(out="new", columns=COLUMNS, compression="zstdd"):
        pass


@mistake(names="new")
def writing_unfinished() -> None:
    from streaming import MDSWriter

    writer = MDSWriter(out="new", columns=COLUMNS, size_limit=1200)
    for number in range(64):
        writer.write({"id": number, "tokens": np.full(16, number, np.int32)})
    loaded(local="new")


@mistake(names="data")
def folder_not_empty() -> None:
    from streaming import MDSWriter

    with MDSWriter(out="data", columns=COLUMNS) as writer:
        writer.write({"id": 0, "tokens": np.zeros(16, np.int32)})


@mistake(names="meta")
def object_not_serializable() -> None:
    from streaming import MDSWriter

    with MDSWriter(out="new", columns={"meta": "json"}) as writer:
        writer.write({"meta": {"lock": threading.Lock()}})


@mistake(names=r"\bother\b")
def state_of_other_data() -> None:
    from streaming import StreamingDataLoader, StreamingDataset

    loader = StreamingDataLoader(StreamingDataset(local="data", batch_size=8, shuffle=True), batch_size=8)
    next(iter(loader))
    state: Any = loader.state_dict()
    loader = StreamingDataLoader(StreamingDataset(local="other", batch_size=8, shuffle=True), batch_size=8)
    loader.load_state_dict(state)
    list(loader)


@mistake(names="batch_size")
def state_of_other_batch_size() -> str | None:
    from streaming import StreamingDataLoader, StreamingDataset

    loader = StreamingDataLoader(StreamingDataset(local="data", batch_size=8, shuffle=True), batch_size=8)
    seen = ids_of([batch for _, batch in zip(range(2), loader, strict=False)])
    state: Any = loader.state_dict()
    loader = StreamingDataLoader(StreamingDataset(local="data", batch_size=4, shuffle=True), batch_size=4)
    loader.load_state_dict(state)
    return resumed(seen, ids_of(loader))


@mistake(names="transform")
def transform_not_picklable() -> str | None:
    from streaming import StreamingDataLoader, StreamingDataset

    lock = threading.Lock()

    class Transformed(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            with lock:
                sample = super().__getitem__(at)
                return {"id": sample["id"], "tokens": sample["tokens"] + 1}

    dataset = Transformed(local="data", batch_size=8, shuffle=True)
    return resumed([], ids_of(StreamingDataLoader(dataset, batch_size=8, num_workers=2)))


@mistake(names="credentials")
def s3_without_credentials() -> None:
    loaded(remote="s3://bucket/data", local="cache")


@mistake(names="64")
def index_out_of_range() -> None:
    from streaming import StreamingDataset

    StreamingDataset(local="data", batch_size=8)[64]


@task()
def pack() -> None:
    import json

    from streaming import MDSWriter
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file("tokenizer.json")
    eos = tokenizer.token_to_id("<|endoftext|>")
    tokens: list[Any] = []
    with MDSWriter(out="packed", columns={"tokens": "ndarray:int32:128"}) as writer:
        for file in sorted(Path("texts").glob("*.jsonl")):
            for line in file.read_text().splitlines():
                tokens += [*tokenizer.encode(json.loads(line)["text"]).ids, eos]
                while len(tokens) >= 128:
                    writer.write({"tokens": np.array(tokens[:128], np.int32)})
                    tokens = tokens[128:]


@task()
def resume() -> None:
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(local="data", batch_size=8, shuffle=True, shuffle_seed=17)
    loader = StreamingDataLoader(dataset, batch_size=8)
    for _step, _batch in zip(range(3), loader, strict=False):
        state: Any = loader.state_dict()
    loader.load_state_dict(state)
    for _batch in loader:
        pass


@task()
def stream() -> None:
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(remote="s3://bucket/data", local="cache", batch_size=8, shuffle=True)
    for _batch in StreamingDataLoader(dataset, batch_size=8):
        pass


@task()
def mix() -> None:
    from streaming import Stream, StreamingDataLoader, StreamingDataset

    streams = [Stream(local="data", proportion=0.7), Stream(local="other", proportion=0.3)]
    dataset = StreamingDataset(streams=streams, batch_size=8, shuffle=True)
    for _batch in StreamingDataLoader(dataset, batch_size=8):
        pass


@task()
def inspect() -> None:
    from streaming import StreamingDataset

    print(StreamingDataset(local="data", batch_size=1)[17])


if __name__ == "__main__":
    serve()
