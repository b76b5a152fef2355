"""grain: its mistakes and tasks, over ArrayRecord files."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
from mistake_side import absent, cut, ids_of, mistake, prepare, resumed, serve, task

FILES = ["data/part-0.arrayrecord", "data/part-1.arrayrecord"]

absent(__name__, {"s3_without_credentials": "does not read S3", "stream": "no cache, and no reading from S3"})


def written(file: str, samples: Any) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(file, "group_size:1")
    for sample in samples:
        writer.write(pickle.dumps(sample))
    writer.close()


def row(number: int) -> dict[str, Any]:
    return {"id": number, "tokens": np.full(16, number, np.int32)}


@prepare
def data() -> None:
    """Two datasets of 64 samples, in two files."""
    for folder, first in (("data", 0), ("other", 100)):
        Path(folder).mkdir()
        for part in range(2):
            start = first + 32 * part
            written(f"{folder}/part-{part}.arrayrecord", map(row, range(start, start + 32)))


def loaded(files: Any, batch_size: Any = 8, **options: Any) -> list[Any]:
    """All batches of an epoch."""
    import grain

    source = grain.sources.ArrayRecordDataSource(files)
    dataset = grain.MapDataset.source(source).shuffle(**({"seed": 17} | options)).map(pickle.loads)
    return list(dataset.batch(batch_size).to_iter_dataset())


@mistake(names="no/such")
def path_missing() -> None:
    loaded("no/such.arrayrecord")


@mistake(names="empty")
def folder_empty() -> None:
    Path("empty").mkdir()
    loaded([str(file) for file in Path("empty").glob("*.arrayrecord")])


@mistake(names="tables")
def folder_of_another_format() -> None:
    loaded([str(file) for file in Path("tables").iterdir()])


@mistake(names="part-1")
def shard_truncated() -> None:
    cut(Path(FILES[1]))
    loaded(FILES)


@mistake(names="part-1")
def index_damaged() -> None:
    content = Path(FILES[1]).read_bytes()
    Path(FILES[1]).write_bytes(content[: -(1 << 16)] + bytes(1 << 16))  # the last block is the index
    loaded(FILES)


@mistake(names="sed")
def option_misspelled() -> None:
    loaded(FILES, sed=17)


@mistake(names="batch_size")
def option_of_wrong_type() -> None:
    loaded(FILES, "8")


@mistake(names="batch_size")
def batch_size_zero() -> None:
    loaded(FILES, 0)


@mistake(names="seed")
def seed_negative() -> None:
    loaded(FILES, seed=-1)


@mistake(names="tokens")
def field_missing() -> None:
    written("new.arrayrecord", [row(number) if number != 7 else {"id": number} for number in range(64)])
    loaded("new.arrayrecord")


@mistake(names="pyarrow")
def package_missing() -> None:
    import grain

    list(grain.experimental.ParquetIterDataset("tables/rows.parquet"))


@mistake(names="zstdd")
def compression_unknown() -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    ArrayRecordWriter("new.arrayrecord", "zstdd:3").close()


@mistake(names="new")
def writing_unfinished() -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter("new.arrayrecord", "group_size:1")
    for number in range(64):
        writer.write(pickle.dumps(row(number)))
    loaded("new.arrayrecord")


@mistake(names="part-0")
def folder_not_empty() -> None:
    written(FILES[0], map(row, range(8)))


@mistake(names="meta|lock")
def object_not_serializable() -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer: Any = ArrayRecordWriter("new.arrayrecord", "group_size:1")
    writer.write({"meta": threading.Lock()})


@mistake(names=r"\bother\b")
def state_of_other_data() -> None:
    import grain

    def batches(folder: str) -> Any:
        files = [str(file) for file in sorted(Path(folder).iterdir())]
        dataset = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(files)).shuffle(seed=17)
        return iter(dataset.map(pickle.loads).batch(8).to_iter_dataset())

    first = batches("data")
    next(first)
    second = batches("other")
    second.set_state(first.get_state())
    list(second)


@mistake(names="batch")
def state_of_other_batch_size() -> str | None:
    import grain

    def batches(size: int) -> Any:
        dataset = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(FILES)).shuffle(seed=17)
        return iter(dataset.map(pickle.loads).batch(size).to_iter_dataset())

    first = batches(8)
    seen = ids_of([next(first), next(first)])
    second = batches(4)
    second.set_state(first.get_state())
    return resumed(seen, ids_of(second))


@mistake(names="transform|lock")
def transform_not_picklable() -> str | None:
    import grain

    lock = threading.Lock()

    def transform(record: bytes) -> dict[str, Any]:
        with lock:
            return pickle.loads(record)  # type: ignore[no-any-return]

    dataset = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(FILES)).shuffle(seed=17)
    batches = dataset.map(transform).batch(8).to_iter_dataset()
    return resumed([], ids_of(batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))))


@mistake(names="64")
def index_out_of_range() -> None:
    import grain

    grain.sources.ArrayRecordDataSource(FILES)[64]


@task()
def pack() -> None:
    import json

    from array_record.python.array_record_module import ArrayRecordWriter
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file("tokenizer.json")
    eos = tokenizer.token_to_id("<|endoftext|>")
    tokens: list[Any] = []
    writer = ArrayRecordWriter("packed.arrayrecord", "group_size:1")
    for file in sorted(Path("texts").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            tokens += [*tokenizer.encode(json.loads(line)["text"]).ids, eos]
            while len(tokens) >= 128:
                writer.write(np.array(tokens[:128], np.int32).tobytes())
                tokens = tokens[128:]
    writer.close()


@task()
def resume() -> None:
    import grain

    source = grain.sources.ArrayRecordDataSource(FILES)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shuffled = grain.MapDataset.source(source).shuffle(seed=17)[rank::world_size]
    dataset = shuffled.map(pickle.loads).batch(8)
    batches = iter(dataset.to_iter_dataset())
    for _step, _batch in zip(range(3), batches, strict=False):
        state = batches.get_state()
    batches = iter(dataset.to_iter_dataset())
    batches.set_state(state)
    for _batch in batches:
        pass


@task()
def mix() -> None:
    import grain

    parts = [["data/part-0.arrayrecord", "data/part-1.arrayrecord"], ["other/part-0.arrayrecord"]]
    sources = [grain.sources.ArrayRecordDataSource(files) for files in parts]
    shuffled = [grain.MapDataset.source(source).shuffle(seed=17) for source in sources]
    mixed = grain.MapDataset.mix(shuffled, weights=[0.7, 0.3])
    for _batch in mixed.map(pickle.loads).batch(8).to_iter_dataset():
        pass


@task()
def inspect() -> None:
    import grain

    print(pickle.loads(grain.sources.ArrayRecordDataSource("data/part-0.arrayrecord")[17]))


if __name__ == "__main__":
    serve()
