"""litdata: its mistakes and tasks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
from mistake_side import before, cut, ids_of, mistake, prepare, resumed, serve, task


def row(number: int) -> dict[str, Any]:
    return {"id": number, "tokens": np.full(16, number, np.int32)}


def locked(number: int) -> dict[str, Any]:
    return {"id": number, "meta": threading.Lock()}


def uneven(number: int) -> dict[str, Any]:
    return row(number) if number != 7 else {"id": number}


@before
def reach_a_server_without_tls() -> None:
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


@prepare
def data() -> None:
    """Two datasets of 64 samples, in chunks of 13."""
    import litdata

    for folder, first in (("data", 0), ("other", 100)):
        numbers = list(range(first, first + 64))
        litdata.optimize(row, numbers, folder, chunk_size=13, num_workers=1)


def loaded(folder: str, batch_size: Any = 8, **options: Any) -> list[Any]:
    """All batches of an epoch."""
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(folder, shuffle=True, **options)
    return list(StreamingDataLoader(dataset, batch_size=batch_size))


@mistake(names="no/such")
def path_missing() -> None:
    loaded("no/such")


@mistake(names="empty")
def folder_empty() -> None:
    Path("empty").mkdir()
    loaded("empty")


@mistake(names="tables")
def folder_of_another_format() -> None:
    loaded("tables")


@mistake(names="chunk-0-1.bin")
def shard_truncated() -> None:
    cut(Path("data/chunk-0-1.bin"))
    loaded("data")


@mistake(names="index.json")
def index_damaged() -> None:
    cut(Path("data/index.json"))
    loaded("data")


@mistake(names="shufle")
def option_misspelled() -> None:
    from litdata import StreamingDataset

    StreamingDataset("data", shufle=True)


@mistake(names="batch_size")
def option_of_wrong_type() -> None:
    loaded("data", "8")


@mistake(names="batch_size")
def batch_size_zero() -> None:
    loaded("data", 0)


@mistake(names="seed")
def seed_negative() -> None:
    loaded("data", seed=-1)


@mistake(names="tokens|item=7")
def field_missing() -> None:
    import litdata

    litdata.optimize(uneven, list(range(64)), "new", chunk_size=13, num_workers=1)
    loaded("new")


@mistake(names="polars")
def package_missing() -> None:
    import litdata

    litdata.index_parquet_dataset("tables")


@mistake(names="zstdd")
def compression_unknown() -> None:
    import litdata

    litdata.optimize(row, list(range(64)), "new", chunk_size=13, num_workers=1, compression="zstdd")


@mistake(names="data")
def writing_unfinished() -> None:
    Path("data/index.json").unlink()  # the index is written last
    loaded("data")


@mistake(names="data")
def folder_not_empty() -> None:
    import litdata

    litdata.optimize(row, list(range(64)), "data", chunk_size=13, num_workers=1)


@mistake(names="meta|item=0")
def object_not_serializable() -> None:
    import litdata

    litdata.optimize(locked, list(range(64)), "new", chunk_size=13, num_workers=1)


@mistake(names=r"\bother\b")
def state_of_other_data() -> None:
    from litdata import StreamingDataLoader, StreamingDataset

    loader = StreamingDataLoader(StreamingDataset("data", shuffle=True), batch_size=8)
    next(iter(loader))
    state = loader.state_dict()
    loader = StreamingDataLoader(StreamingDataset("other", shuffle=True), batch_size=8)
    loader.load_state_dict(state)
    list(loader)


@mistake(names="batch.size")
def state_of_other_batch_size() -> str | None:
    from litdata import StreamingDataLoader, StreamingDataset

    loader = StreamingDataLoader(StreamingDataset("data", shuffle=True), batch_size=8)
    seen = ids_of([batch for _, batch in zip(range(2), loader, strict=False)])
    state = loader.state_dict()
    loader = StreamingDataLoader(StreamingDataset("data", shuffle=True), batch_size=4)
    loader.load_state_dict(state)
    return resumed(seen, ids_of(loader))


@mistake(names="transform")
def transform_not_picklable() -> str | None:
    from litdata import StreamingDataLoader, StreamingDataset

    lock = threading.Lock()

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return {"id": sample["id"], "tokens": sample["tokens"] + 1}

    dataset = StreamingDataset("data", shuffle=True, transform=transform)
    return resumed([], ids_of(StreamingDataLoader(dataset, batch_size=8, num_workers=2)))


@mistake(names="credentials")
def s3_without_credentials() -> None:
    loaded("s3://bucket/data", cache_dir="cache")


@mistake(names="64")
def index_out_of_range() -> None:
    from litdata import StreamingDataset

    StreamingDataset("data")[64]


def tokenize(file: str) -> Any:
    import json

    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file("tokenizer.json")
    eos = tokenizer.token_to_id("<|endoftext|>")
    for line in Path(file).read_text().splitlines():
        yield torch.tensor([*tokenizer.encode(json.loads(line)["text"]).ids, eos])


@task(tokenize)
def pack() -> None:
    from litdata import TokensLoader, optimize

    files = [str(file) for file in sorted(Path("texts").glob("*.jsonl"))]
    loader = TokensLoader(block_size=128)
    optimize(tokenize, files, "packed", chunk_size=128 * 64, item_loader=loader, num_workers=2)


@task()
def resume() -> None:
    from litdata import StreamingDataLoader, StreamingDataset

    loader = StreamingDataLoader(StreamingDataset("data", shuffle=True, seed=17), batch_size=8)
    for _step, _batch in zip(range(3), loader, strict=False):
        state = loader.state_dict()
    loader.load_state_dict(state)
    for _batch in loader:
        pass


@task()
def stream() -> None:
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset("s3://bucket/data", cache_dir="cache", shuffle=True)
    for _batch in StreamingDataLoader(dataset, batch_size=8):
        pass


@task()
def mix() -> None:
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

    parts = [StreamingDataset("data", shuffle=True), StreamingDataset("other", shuffle=True)]
    dataset = CombinedStreamingDataset(parts, weights=[0.7, 0.3], iterate_over_all=False)
    for _batch in StreamingDataLoader(dataset, batch_size=8):
        pass


@task()
def inspect() -> None:
    from litdata import StreamingDataset

    print(StreamingDataset("data")[17])


if __name__ == "__main__":
    serve()
