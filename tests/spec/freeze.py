"""Freezes what this version writes: small datasets of every form, states saved in mid-run, usage logs.

    python tests/spec/freeze.py     tests/golden/release-VERSION, at each release

`tests/spec/test_releases.py` opens every folder that there is, with every later version. A folder is never
made again: what it holds is what users of that release have. The folders of 0.1.0 (the last commit with
states of version 3 and order version 1) and of 0.2.0 were made by running this script with that code and
`--without masks,text,token_store`, parts that those versions did not have.

    data/NAME/        datasets
    dedup-index/      of the build's documents
    logs/             usage logs of a run on two ranks that was killed, and went on with three
    expected.json     fingerprint and content of each dataset; runs: streams, options, a saved state, and the
                      samples before and after it for each rank
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping
from decimal import Decimal
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

import shardkit
from shardkit.formats import mds, tar
from shardkit.formats.mds import index as mds_index
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.writers import build, build_dedup_index
from shardkit.writers.dedup.index import open_index

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
EOS = "<|endoftext|>"
LENGTH = 16
CUTS = (0, 7, 9, 20, 29, 37)  # of the rows of an MDS dataset into shards
CARD = json.dumps({"tokenizer": {"eos_id": 0}})


def rows_of(seed: int, count: int) -> np.ndarray[Any, Any]:
    """Rows of documents that end with id 0, and padding behind some of them."""
    random = np.random.default_rng(seed)
    rows = random.integers(1, 500, (count, LENGTH)).astype(np.uint16)
    rows[random.random(rows.shape) < 0.1] = 0
    rows[::3, -3:] = 0
    return rows


def write_mds(folder: Path, seed: int, compression: str | None = None) -> None:
    folder.mkdir(parents=True)
    rows = rows_of(seed, CUTS[-1])
    infos = [
        mds.write_rows_shard(
            folder,
            f"shard.{number:05d}.mds",
            rows[low:high],
            hashes=["sha1", "xxh64"],
            compression=compression,
        )
        for number, (low, high) in enumerate(pairwise(CUTS))
    ]
    mds.write_index(folder, infos)
    (folder / "dataset.json").write_text(CARD)


def write_tar(folder: Path, *, masks: bool) -> None:
    """Two tars, of 5 and of 4 rows."""
    folder.mkdir(parents=True)
    rows, infos = rows_of(5, 9), []
    for number, part in enumerate((rows[:5], rows[5:])):
        name, place = f"shard-{number:05d}.tar", {"key_start": 5 * number, "hashes": ["xxh64"]}
        if masks:
            columns = {"tokens": part, "loss_mask": (part % 3 > 0).astype(np.uint8)}
            infos.append(tar.write_columns_shard(folder, name, columns, **place))  # type: ignore[arg-type]
        else:
            infos.append(tar.write_rows_shard(folder, name, part, **place))  # type: ignore[arg-type]
    tar.write_shard_list(folder, infos)
    (folder / "dataset.json").write_text(CARD)


def write_columns(folder: Path) -> None:
    """Columns of many encodings, of fixed and of variable size."""
    columns = {
        "array": "ndarray", "bytes": "bytes", "decimal": "str_decimal", "floats": "ndarray:float32:2,2",
        "half": "float16", "json": "json", "label": "int", "small": "int8", "text": "str",
        "words": "ndarray:int64",
    }  # fmt: skip
    with mds.MdsWriter(folder, columns=columns, shard_bytes=1500, compression="gz", hashes=["md5"]) as writer:
        for number in range(11):
            writer.write(
                {
                    "array": np.full((number % 3 + 1, 2), number, np.uint8),
                    "bytes": bytes(range(number)),
                    "decimal": Decimal(number) / 4,
                    "floats": np.full((2, 2), number / 2, np.float32),
                    "half": number / 8,
                    "json": {"n": [number, None]},
                    "label": number - 5,
                    "small": -number,
                    "text": f"row {number} é",
                    "words": np.arange(number + 1),
                }
            )


# Builds


def make_corpus(folder: Path, *, masks: bool) -> dict[str, Any]:
    """The inputs, and a recipe whose paths are relative to the folder."""
    words = [hashlib.sha256(str(n).encode()).hexdigest()[:6] for n in range(40)]
    texts = [
        f"document {n} has " + " ".join(words[(n * 7 + k) % 40] for k in range(6 + n % 23)) for n in range(36)
    ]
    lines = [
        json.dumps({"text": text, "id": f"n{n}", "url": f"https://example.org/{n}"})
        for n, text in enumerate(texts)
    ]
    (folder / "web.jsonl").write_text(
        "\n".join([*lines, lines[3], json.dumps({"text": "short"})]) + "\n{broken\n"
    )
    again = [json.dumps({"text": text + " end"}) for text in texts[10:14]]
    (folder / "code.jsonl.gz").write_bytes(gzip.compress("\n".join(again).encode(), mtime=0))
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
        ),
    )
    made.save(str(folder / "tokenizer.json"))
    inputs: list[dict[str, Any]] = [
        {"path": "web.jsonl", "source": "web"}, {"path": "code.jsonl.gz", "source": "code"}
    ]  # fmt: skip
    if masks:
        pairs = [json.dumps({"q": f"what is {n}? ", "a": f"it is {words[n]} "}) for n in range(12)]
        (folder / "pairs.jsonl").write_text("\n".join(pairs) + "\n")
        inputs.append({"path": "pairs.jsonl", "source": "pairs", "prompt": "q", "completion": "a"})
    return {
        "inputs": inputs,
        "filters": [{"length": {"min_words": 3}}],
        "dedup": {"exact": {}, "near": {"similarity": 0.8, "bands": 6, "rows": 4}},
        "tokenizer": {"path": "tokenizer.json", "eos": EOS},
        "max_bad_fraction": 0.1,
        "memory": "256MiB",
    }


def build_all(data: Path, index: Path, without: set[str]) -> None:
    outputs: dict[str, dict[str, Any]] = {
        "built": {"format": "mds", "shard_bytes": "1KiB"},
        "token_store": {"format": "tokens", "shard_bytes": "4KiB"},
        "text": {"format": "jsonl", "compression": "zstd", "shard_bytes": "2KiB"},
    }
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        try:
            recipe = make_corpus(Path(temporary), masks="masks" not in without)
            for name, output in outputs.items():
                if name in without:
                    continue
                pack = {"pack": {"sequence_length": 32}} if name == "built" else {}
                made = recipe | pack | {"output": {"path": name} | output, "work": "work"}
                Path("recipe.json").write_text(json.dumps(made))
                build("recipe.json", workers=1, progress=False)
                shutil.move(name, data / name)
            Path("recipe.json").write_text(json.dumps(recipe | {"output": {"path": "none"}, "work": "work"}))
            build_dedup_index("recipe.json", "index", workers=1, progress=False)
            shutil.move("index", index)
        finally:
            os.chdir(before)


# Runs


def ids_of(loader: StreamingLoader, batch: Mapping[str, Any]) -> list[int]:
    """Samples of a batch, numbered over all streams; -1 for padding."""
    firsts = np.cumsum([0, *(len(dataset) for dataset in loader.datasets)])
    found = np.asarray(batch["sample_id"])
    if "stream_id" in batch:
        found = np.where(found < 0, -1, found + firsts[np.asarray(batch["stream_id"])])
    return [int(one) for one in found]


def content_of(batches: Iterable[Mapping[str, Any]]) -> str:
    """A digest of the delivered tokens and labels, of rows that are not padding."""
    state = hashlib.blake2b(digest_size=16)
    for batch in batches:
        kept = np.asarray(batch["sample_id"]) >= 0
        for key in sorted({"tokens", "labels"} & batch.keys()):
            state.update(np.asarray(batch[key])[kept].astype("<i8").tobytes())
    return state.hexdigest()


def loader_of(
    folder: Path, case: Mapping[str, Any], rank: int, ranks: int, batch_size: int, **more: Any
) -> StreamingLoader:
    """The loader of a frozen run."""
    streams = [
        Stream(
            folder / "data" / one["path"],
            weight=one.get("weight", 1),
            exclude=[(begin, end) for begin, end in one.get("exclude", [])] or None,
        )
        for one in case["streams"]
    ]
    options = grouped({"tensors": "numpy", "prefetch_batches": 0, **case["options"], **more})
    return StreamingLoader(
        streams, batch_size=batch_size, rank=rank, world_size=ranks, return_ids=True, endless=True, **options
    )


def deliver(
    folder: Path, case: Mapping[str, Any], state: Any, ranks: int, batch_size: int, steps: int, **more: Any
) -> tuple[dict[str, Any], Any]:
    """(what each rank is given in a run from a state, the state after it)."""
    run: dict[str, Any] = {"ranks": ranks, "batch_size": batch_size, "ids": [], "content": []}
    after: Any = None
    for rank in range(ranks):
        with loader_of(folder, case, rank, ranks, batch_size, **more) as loader:
            if state is not None:
                loader.load_state_dict(state)
            batches = list(islice(loader, steps))
            run["ids"].append([ids_of(loader, batch) for batch in batches])
            run["content"].append(content_of(batches))
            after = json.loads(json.dumps(loader.state_dict()))
    return run, after


def cases() -> dict[str, dict[str, Any]]:
    """Runs by name: their streams and options."""
    mixture = [{"path": "rows", "weight": 3}, {"path": "tar", "weight": 2, "exclude": [[2, 4], [8, 9]]},
               {"path": "zstd", "weight": 1}]  # fmt: skip
    window, both = {"lanes": 4, "window": 6}, {"columns": ["tokens"]}
    changing = [[0, [3, 2, 1]], [20, [1, 0, 1]], [45, [1, 1, 1]]]
    odd = {"seed": 2**64 - 1, **window}
    return {
        "defaults": {"streams": [{"path": "rows"}], "options": {}},
        "window-carry": {"streams": [{"path": "zstd"}], "options": {"seed": 3, **window, "tail": "carry"}},
        "window-pad": {"streams": [{"path": "tar"}], "options": {"seed": 4, **window, "tail": "pad"}},
        "global-drop": {
            "streams": [{"path": "rows"}], "options": {"shuffle": "global", "tail": "drop"}
        },
        "none-excluded": {
            "streams": [{"path": "rows", "exclude": [[0, 3], [8, 20]]}],
            "options": {"shuffle": "none", "tail": "pad"},
        },
        "excluded": {"streams": [{"path": "index_bin", "exclude": [[5, 11]]}], "options": odd},
        "mixture": {"streams": mixture, "options": {"lanes": 2, "window": 5, "tail": "pad", **both}},
        "schedule": {"streams": mixture, "options": {"seed": 8, "schedule": changing, **both}},
        "steps": {"streams": [{"path": "rows"}], "options": {"global_batch": 12, **window}},
        "built": {"streams": [{"path": "built"}], "options": {"seed": 5, "labels": True, "cu_seqlens": True}},
    }  # fmt: skip


def freeze(folder: Path, without: set[str]) -> None:
    data = folder / "data"
    write_mds(data / "rows", 1)
    write_mds(data / "zstd", 2, "zstd:7")
    with mock.patch.object(mds_index, "TABLE_SHARDS", 3):
        write_mds(data / "index_bin", 3, "zstd")
    write_tar(data / "tar", masks="masks" not in without)
    write_columns(data / "columns")
    build_all(data, folder / "dedup-index", without)
    index = open_index(folder / "dedup-index")
    expected: dict[str, Any] = {
        "version": shardkit.__version__, "datasets": {}, "runs": {},
        "dedup_index": {"documents": index.documents, "digest": index.digest},
    }  # fmt: skip
    for path in sorted(data.iterdir()):
        opened = shardkit.open_dataset(str(path))
        expected["datasets"][path.name] = {
            "fingerprint": opened.fingerprint, "samples": len(opened), "content": digest_of_rows(opened)
        }  # fmt: skip
    for name, case in cases().items():
        first, state = deliver(folder, case, None, 2, 3, 5)
        runs = [deliver(folder, case, state, *again)[0] for again in ((3, 2, 4), (1, 5, 3))]
        expected["runs"][name] = case | {"state": state, "first": first, "after": runs}
    with mock.patch.object(socket, "gethostname", return_value="host"):
        case = {"streams": [{"path": "rows"}], "options": {"lanes": 4, "window": 6}}
        _, state = deliver(folder, case, None, 2, 3, 4)
        deliver(folder, case, None, 2, 3, 5, usage_log=folder / "logs")
        deliver(folder, case, state, 3, 2, 5, usage_log=folder / "logs")
    (folder / "expected.json").write_text(json.dumps(expected, sort_keys=True, separators=(",", ":")) + "\n")


def digest_of_rows(dataset: Any) -> str:
    """A digest of all samples of a dataset, whatever their columns are; tokens of tars by their members."""
    state = hashlib.blake2b(digest_size=16)
    is_tar = dataset.manifest.format == "tar"
    members = {name: f"{name}.npy" for name in ("tokens", "loss_mask") if is_tar}
    for row in range(len(dataset)):
        for name, value in sorted(dataset[row].items()):
            if isinstance(value, np.ndarray):
                text = f"{value.dtype.str}{value.shape}".encode() + value.tobytes()
            else:
                text = repr(value.item() if isinstance(value, np.generic) else value).encode()
            state.update(f"{members.get(name, name)}:{len(text)}:".encode() + text)
    return state.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Freeze what this version writes, for tests of later ones.")
    parser.add_argument("--name", default=shardkit.__version__, help="default: the version")
    parser.add_argument("--to", type=Path, default=GOLDEN, help="default: tests/golden")
    parser.add_argument(
        "--without", default="", help="parts that the version does not have, with commas between"
    )
    arguments = parser.parse_args()
    folder = arguments.to / f"release-{arguments.name}"
    if folder.exists():
        parser.error(f"{folder} exists: what a release wrote does not change")
    with tempfile.TemporaryDirectory() as temporary:
        freeze(Path(temporary) / "made", set(filter(None, arguments.without.split(","))))
        shutil.move(Path(temporary) / "made", folder)


if __name__ == "__main__":
    main()
