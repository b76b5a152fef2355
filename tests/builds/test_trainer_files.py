"""Builds write the files of other trainers: the bytes of their own tools, with provenance beside them."""

from __future__ import annotations

import gzip
import importlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
from crash.builds import Cell, Crashes
from shardkit.cli.main import main
from shardkit.errors import BuildError, RecipeError, ShardError, ShardkitError
from shardkit.formats.tokens import MegatronIndex, write_token_files
from shardkit.formats.trainers import TRAINER_FORMATS, trainer_dtype
from shardkit.loaders import StreamingLoader
from shardkit.publish.contents import find_only_contents
from shardkit.publish.repository_card import repository_card
from shardkit.storage.hub import HubPlace
from shardkit.storage.local import LocalStore
from shardkit.writers import build
from shardkit.writers.recipe.recipe import recipe_from_mapping
from shardkit.writers.rows.ledger import Count
from shardkit.writers.stages.rows import count_partitions
from shardkit.writers.token_store import pack_store
from spec.reader import Dataset as Reader
from support.s3_moto import s3_server
from support.small_build import EOS, text_of, train_bpe, tree

SHARD = {"shard_bytes": "4KiB"}
KINDS = [*TRAINER_FORMATS]
MASKED = [kind for kind in KINDS if TRAINER_FORMATS[kind].mask]
Documents = list[list[int]]


def reference(
    kind: str, documents: Documents, masks: Documents | None, dtype: str, tokenizer: str
) -> dict[str, bytes]:
    """The files of one number by their endings, made of Python's own numbers, one by one."""
    ids = [one for document in documents for one in document]
    code = {"uint8": "B", "uint16": "H", "uint32": "I", "int32": "i"}[dtype]
    flat = struct.pack(f"<{len(ids)}{code}", *ids)
    ends = [sum(len(one) for one in documents[: number + 1]) for number in range(len(documents))]
    mask = None if masks is None else bytes(one for document in masks for one in document)
    found: dict[str, bytes | None] = {}
    if kind == "megatron":
        size, count = struct.calcsize(code), len(documents)
        index = b"MMIDIDX\0\0" + struct.pack("<QB", 1, {"H": 8, "i": 4}[code])
        index += struct.pack("<QQ", count, count + 1)
        index += b"".join(struct.pack("<i", len(document)) for document in documents)
        index += b"".join(struct.pack("<q", start * size) for start in [0, *ends[:-1]])
        index += b"".join(struct.pack("<q", mark) for mark in range(count + 1))
        found = {"bin": flat, "idx": index}
    elif kind == "olmo":
        lines = "".join(f"{start},{end}\n" for start, end in zip([0, *ends], ends, strict=False))
        found = {"npy": flat, "csv.gz": lines.encode(), "mask.npy": mask}
    elif kind == "nanogpt":
        found = {"bin": flat}
    elif kind == "llmc":
        magic, version = {"H": (20240520, 1), "I": (20240801, 7)}[code]
        found = {"bin": struct.pack("<3i", magic, version, len(ids)) + bytes(253 * 4) + flat}
    else:
        size = struct.calcsize(code)
        digits, exponent = f"{len(ids):.2e}".split("e")
        thousands, more = divmod(int(exponent), 3)
        number = f"{float(digits) * 10**more:.{2 - more}f} {' kM'[thousands].strip()}T"
        found = {
            "ds": flat,
            "ds.index": struct.pack(f"<{len(ends)}Q", *ends),
            "ds.metadata": f"{tokenizer}|{size}\n{len(ids)}\n{number}".encode(),
            "ds.loss": mask,
        }
    return {ending: data for ending, data in found.items() if data is not None}


def read(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def provenance(folder: Path) -> list[dict[str, Any]]:
    tables = [pq.read_table(file) for file in sorted((folder / "provenance").iterdir())]
    rows: list[dict[str, Any]] = pa.concat_tables(tables).to_pylist()
    return rows


def stored(folder: Path) -> tuple[Documents, Documents | None]:
    """The documents of a token store, and their masks, in the order of training."""
    samples = [*shardkit.open(folder)]
    tokens = [np.asarray(sample["tokens"]).tolist() for sample in samples]
    if "loss_mask" not in samples[0]:
        return tokens, None
    return tokens, [np.asarray(sample["loss_mask"]).tolist() for sample in samples]


def check_files(folder: Path, kind: str, store: Path, dtype: str = "uint16") -> int:
    """Compare all files of a dataset with the reference; returns the number of its documents."""
    documents, masks = stored(store)
    card = json.loads((folder / "dataset.json").read_text())
    tokenizer = card["recipe"]["tokenizer"]["path"]
    by_file: dict[int, list[int]] = {}
    at: dict[int, int] = {}
    for number, piece in enumerate(provenance(folder)):
        length = len(documents[number])
        start = at.get(piece["shard"], 0)
        assert (piece["row"], piece["token_start"], piece["token_end"]) == (0, start, start + length)
        at[piece["shard"]] = start + length
        by_file.setdefault(piece["shard"], []).append(number)
    assert sorted(by_file) == [*range(len(by_file))]
    assert len(by_file) == card["shards"] > 3
    names = set()
    for number, mine in by_file.items():
        own = None if masks is None else [masks[one] for one in mine]
        made = reference(kind, [documents[one] for one in mine], own, dtype, tokenizer)
        for ending, data in made.items():
            name = TRAINER_FORMATS[kind].names[ending].format(f"{number:05d}")
            assert read(folder / name) == data, name
            names.add(name)
    found = {path.name for path in folder.iterdir() if path.name.startswith(("tokens-", "labels_mask-"))}
    assert found == names, "and there are no others"
    assert card["dtype"] == dtype
    assert card["samples"] == len(by_file)
    return sum(map(len, by_file.values()))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trainers")
    train_bpe([text_of(n) for n in range(50)], vocabulary=400).save(str(folder / "tokenizer.json"))
    rows = [{"text": text_of(n), "url": f"https://a.org/{n}", "id": f"n{n}"} for n in range(300)]
    for part in range(2):
        lines = [json.dumps(row) + "\n" for row in rows[part::2]]
        (folder / f"part-{part}.jsonl").write_text("".join(lines))
    return {
        "inputs": [{"path": str(folder / "part-*.jsonl"), "base": str(folder), "source": "web"}],
        "tokenizer": {"path": str(folder / "tokenizer.json"), "eos": EOS},
        "memory": "256MiB",
    }


@pytest.fixture(scope="module")
def chat(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("chat")
    pairs = [{"p": f"what is {n}? ", "c": text_of(n)} for n in range(150)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    chats = {"path": str(folder / "pairs.jsonl"), "prompt": "p", "completion": "c", "base": str(folder)}
    return recipe | {"inputs": [chats], "dedup": None}


@pytest.fixture(scope="module")
def together(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Path:
    folder = tmp_path_factory.mktemp("together")
    outputs = [{"path": str(folder / kind), "format": kind, **SHARD} for kind in ("tokens", *KINDS)]
    build(recipe | {"outputs": outputs}, workers=1, progress=False)
    return folder


@pytest.fixture(scope="module")
def masked(chat: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Path:
    folder = tmp_path_factory.mktemp("masked")
    outputs = [{"path": str(folder / kind), "format": kind, **SHARD} for kind in ("tokens", *MASKED)]
    build(chat | {"outputs": outputs}, workers=1, progress=False)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_has_the_bytes_of_the_tool_in_the_order_of_training(together: Path, kind: str) -> None:
    kept = json.loads((together / kind / "dataset.json").read_text())["funnel"]["kept"]["documents"]
    assert check_files(together / kind, kind, together / "tokens") == kept == 300


@pytest.mark.parametrize("kind", MASKED)
def test_loss_masks_are_files_beside_the_tokens(masked: Path, kind: str) -> None:
    assert check_files(masked / kind, kind, masked / "tokens") == 150
    files = sorted((masked / kind).glob("labels_mask-*.npy" if kind == "olmo" else "*.ds.loss"))
    trained = json.loads((masked / kind / "dataset.json").read_text())["trained_tokens"]
    assert sum(sum(file.read_bytes()) for file in files) == trained > 0
    assert shardkit.verify(masked / kind).ok


@pytest.mark.parametrize("kind", KINDS)
def test_the_index_of_three_documents_is_pinned_byte_for_byte(tmp_path: Path, kind: str) -> None:
    dtype = trainer_dtype(kind, 50_257)
    ids, ends = np.array([7, 8, 0, 9, 0, 65, 0], dtype), np.array([3, 5, 7])
    path = write_token_files(tmp_path, "x", kind, ids, ends, None, "gpt2")
    flat = "0700080000000900000041000000"
    expected = {
        "megatron": {
            "x.bin": flat,
            "x.idx": "4d4d494449445800000100000000000000" + "08" + "0300000000000000" + "0400000000000000"
            "03000000" "02000000" "02000000" "0000000000000000" "0600000000000000" "0a00000000000000"
            "0000000000000000" "0100000000000000" "0200000000000000" "0300000000000000",
        },
        "olmo": {"x.npy": flat, "x.csv.gz": b"0,3\n3,5\n5,7\n".hex()},
        "nanogpt": {"x.bin": flat},
        "llmc": {"x.bin": "88d83401" "01000000" "07000000" + "00" * 1012 + flat},
        "datatrove": {
            "x.ds": flat,
            "x.ds.index": "030000000000000005000000000000000700000000000000",
            "x.ds.metadata": b"gpt2|2\n7\n7.00 T".hex(),
        },
    }[kind]  # fmt: skip
    assert path.name == next(iter(expected))
    assert {file.name: read(file).hex() for file in tmp_path.iterdir()} == expected


@pytest.mark.parametrize(
    ("kind", "below", "above", "vocab_size"),
    [
        ("megatron", "uint16", "int32", 65_500),
        ("olmo", "uint8", "uint16", 257),
        ("olmo", "uint16", "uint32", 65_537),
        ("llmc", "uint16", "uint32", 65_537),
        ("datatrove", "uint16", "uint32", 65_537),
    ],
)
def test_the_dtype_follows_from_the_vocabulary_as_in_the_tool(
    kind: str, below: str, above: str, vocab_size: int
) -> None:
    assert (trainer_dtype(kind, vocab_size - 1).name, trainer_dtype(kind, vocab_size).name) == (below, above)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (1, "1.00 T"),
        (42, "42.0 T"),
        (999, "999 T"),
        (1000, "1.00 kT"),
        (9_999, "10.0 kT"),
        (12_345, "12.3 kT"),
    ],
)
def test_the_number_for_people_is_that_of_datatrove(tmp_path: Path, tokens: int, words: str) -> None:
    """The expectations are those of humanize 4.17, metric(tokens, unit="T")."""
    write_token_files(tmp_path, "x", "datatrove", np.zeros(tokens, "<u2"), np.array([tokens]), None, "name")
    assert (tmp_path / "x.ds.metadata").read_text() == f"name|2\n{tokens}\n{words}"


def big_tokenizer(folder: Path, vocab_size: int) -> Path:
    """The tokenizer of the recipe with further special tokens; the greatest id is `vocab_size` - 1."""
    made = train_bpe([text_of(n) for n in range(50)], vocabulary=400)
    made.add_special_tokens([f"<|{n}|>" for n in range(vocab_size - made.get_vocab_size())])
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_large_vocabularies_have_wide_ids_and_nanogpt_refuses_them(
    recipe: dict[str, Any], tmp_path: Path, inline_builds: None
) -> None:
    tokenizer = {"path": str(big_tokenizer(tmp_path, 65_537)), "eos": EOS}
    kinds = [kind for kind in KINDS if kind != "nanogpt"]
    outputs = [{"path": str(tmp_path / kind), "format": kind, **SHARD} for kind in ("tokens", *kinds)]
    large = recipe | {"tokenizer": tokenizer, "limit": 60}
    build(large | {"outputs": outputs}, workers=1, progress=False)
    for kind in kinds:
        dtype = "int32" if kind == "megatron" else "uint32"
        assert check_files(tmp_path / kind, kind, tmp_path / "tokens", dtype) == 60
        assert shardkit.verify(tmp_path / kind).ok
    output = {"path": str(tmp_path / "nanogpt"), "format": "nanogpt"}
    with pytest.raises(RecipeError, match=r"output.format: nanoGPT's files store ids below 65,536.*65,537"):
        build(large | {"output": output}, workers=1, progress=False)
    with pytest.raises(RecipeError, match=r"output.format: nanoGPT's files store ids below 65,536"):
        pack_store(tmp_path / "tokens", tmp_path / "n", overrides=["output.format=nanogpt"], progress=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_store_gives_the_same_files_without_a_rebuild(
    together: Path, masked: Path, tmp_path: Path, kind: str, inline_builds: None
) -> None:
    words = ["pack", str(together / "tokens"), str(tmp_path / "out"), "--format", kind, "--quiet"]
    assert main([*words, "--set", "output.shard_bytes=4KiB", "--workers", "1"]) == 0
    assert tree(tmp_path / "out") == tree(together / kind)
    if kind in MASKED:
        settings = [f"output.format={kind}", "output.shard_bytes=4KiB"]
        pack_store(masked / "tokens", tmp_path / "m", overrides=settings, workers=1, progress=False)
        assert tree(tmp_path / "m") == tree(masked / kind)
    else:
        with pytest.raises(RecipeError, match=rf"output.format: {kind} files have no loss mask"):
            pack_store(masked / "tokens", tmp_path / "m", overrides=[f"output.format={kind}"], progress=False)


def test_a_dataset_is_the_same_alone_and_with_others(
    recipe: dict[str, Any], together: Path, tmp_path: Path
) -> None:
    output = {"path": str(tmp_path / "megatron"), "format": "megatron", **SHARD}
    build(recipe | {"output": output}, workers=2, progress=False)
    assert tree(tmp_path / "megatron") == tree(together / "megatron")


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_is_traced_to_its_file_and_its_tokens(together: Path, kind: str) -> None:
    data = shardkit.open(together / kind)
    found = data.trace(url="https://a.org/7")
    [document] = found.documents
    ids = np.asarray(data[document.row]["tokens"])
    [piece] = [one for one in provenance(together / kind) if one["url"] == "https://a.org/7"]
    assert (piece["shard"], piece["token_start"]) == (document.row, document.start)
    assert document.text == text_of(7)[: len(document.text or "")]
    assert ids[document.end - 1] == data.card.tokenizer.eos_id  # type: ignore[union-attr]
    assert len(data) == json.loads((together / kind / "dataset.json").read_text())["shards"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_reader_that_follows_the_specification_finds_the_same(together: Path, kind: str) -> None:
    ours, theirs = shardkit.open(together / kind), Reader(together / kind)
    assert theirs.fingerprint == ours.fingerprint
    assert len(theirs.sizes) == len(ours)
    for row in range(len(ours)):
        assert theirs[row]["tokens"] == np.asarray(ours[row]["tokens"]).tobytes()
    assert {name for name in theirs.files() if name.startswith("tokens-")} == {
        name.format(f"{row:05d}")
        for row in range(len(ours))
        for name in [*TRAINER_FORMATS[kind].names.values()][1:]
        if name.startswith("tokens-") and not name.endswith(".loss")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_verify_notices_each_damaged_file(together: Path, tmp_path: Path, kind: str) -> None:
    for source in (together / kind).rglob("*"):
        target = tmp_path / source.relative_to(together / kind)
        target.parent.mkdir(exist_ok=True)
        if source.is_file():
            target.write_bytes(source.read_bytes())
    assert shardkit.verify(tmp_path).ok
    names = [name.format("00001") for name in TRAINER_FORMATS[kind].names.values()]
    for path in [tmp_path / name for name in names if (tmp_path / name).exists()]:
        data = path.read_bytes()
        for damaged in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            report = shardkit.verify(tmp_path)
            assert [problem.file for problem in report.problems] == [path.name]
        path.write_bytes(data)
    index = json.loads((tmp_path / "documents.json").read_text())
    index["files"][0]["tokens"] += 1
    (tmp_path / "documents.json").write_text(json.dumps(index))
    with pytest.raises(ShardError, match=r"tokens-00000\.\w+: states .* tokens, but its size"):
        shardkit.open(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_loaders_read_rows_in_place_and_ask_for_their_length(together: Path, masked: Path, kind: str) -> None:
    with pytest.raises(ShardError, match=r"holds documents for .*, without rows: .* sequence_length=2048"):
        StreamingLoader(together / kind, batch_size=2)
    documents, _ = stored(together / "tokens")
    stream = np.concatenate(documents)
    with pytest.warns(RuntimeWarning, match="fill no row"):
        rows = shardkit.open(together / kind, sequence_length=100)
    assert len(rows) == len(stream) // 100
    assert (rows[:].to_numpy(["tokens"])["tokens"] == stream[: len(rows) * 100].reshape(-1, 100)).all()
    with pytest.raises(ShardkitError, match="provenance"):
        rows.trace(url="https://a.org/7")
    if kind in MASKED:
        with pytest.warns(RuntimeWarning, match="fill no row"):
            rows = shardkit.open(masked / kind, sequence_length=100)
        assert len(rows) == sum(map(len, stored(masked / "tokens")[0])) // 100


@pytest.mark.parametrize("kind", ["olmo", "datatrove"])
def test_convert_says_how_else_to_get_rows(
    together: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(together / kind), str(tmp_path / "out"), "--sequence-length", "64"]
    assert main([*words, "--drop-tail"]) == 1
    assert "without rows: a loader cuts rows in place" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["megatron", "nanogpt", "llmc"])
def test_convert_reads_the_files_back(together: Path, tmp_path: Path, kind: str) -> None:
    documents, _ = stored(together / "tokens")
    one = "tokens-00001.bin" if kind == "megatron" else ""
    words = ["convert", str(together / kind / one), str(tmp_path / "out"), "--sequence-length", "64"]
    assert main([*words, "--drop-tail", "--quiet"]) == 0
    own = documents_of_files(together, kind)[1] if kind == "megatron" else documents
    rows = shardkit.open(tmp_path / "out")[:].to_numpy(["tokens"])["tokens"]
    stream = np.concatenate(own)
    assert (rows == stream[: len(stream) // 64 * 64].reshape(-1, 64)).all()


def test_megatrons_index_is_one_that_our_reader_accepts(together: Path) -> None:
    for index in sorted((together / "megatron").glob("*.idx")):
        tokens = index.with_suffix(".bin")
        with index.open("rb") as file:
            checked = MegatronIndex(file, index, index.stat().st_size, tokens, tokens.stat().st_size)
            ends = np.concatenate([*checked.document_ends(file)])
        ids = np.fromfile(tokens, checked.dtype)
        eos = shardkit.open(together / "megatron").card.tokenizer.eos_id  # type: ignore[union-attr]
        assert (ids[ends - 1] == eos).all()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"output": {"compression": "zstd"}}, "compression is for mds and jsonl; Megatron-LM reads uncompressed"),
    ({"output": {"prefixes": 4}}, "prefixes: Megatron-LM is given one folder of files"),
    ({"output": {"pack": {"sequence_length": 64}}}, "an output of format megatron has no rows"),
    (
        {"pack": {"max_repetitions": 31}},
        "pack.max_repetitions: masks tokens of rows, but megatron files hold",
    ),
    ({"group": "source"}, "group: megatron files hold single documents; use mds or wds rows"),
    (
        {"inputs": [{"path": "a.jsonl", "prompt": "p", "completion": "c"}]},
        "output.format: megatron files have no",
    ),
    ({"tokenizer": None}, "tokenizer: is missing"),
    ({"output": {"format": "megatron2"}}, "output.format"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_a_format_cannot_hold_is_refused_before_the_build(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = {"inputs": ["a.jsonl"], "tokenizer": {"path": "t.json", "eos": EOS}}
    output = {"path": "out", "format": "megatron"} | change.get("output", {})
    with pytest.raises(RecipeError, match=message):
        recipe_from_mapping(base | change | {"output": output}, folder=tmp_path)


def test_a_task_makes_at_least_a_file_of_the_size_that_was_asked_for() -> None:
    def partitions(format: str, shard_bytes: str, memory: str) -> int:
        output = {"path": "out", "format": format, "shard_bytes": shard_bytes}
        base = {"inputs": ["a.jsonl"], "tokenizer": {"path": "t.json", "eos": EOS}, "memory": memory}
        recipe = recipe_from_mapping(base | {"output": output}, folder=Path.cwd())
        return count_partitions(recipe, Count(10**6, 100 * 10**9))

    assert partitions("megatron", "1GiB", "8GiB") == 47
    assert partitions("megatron", "64MiB", "8GiB") == partitions("tokens", "64MiB", "8GiB") == 391
    assert partitions("megatron", "1GiB", "2GiB") > 391


def test_a_build_in_a_store_sends_all_files(
    recipe: dict[str, Any], together: Path, tmp_path: Path, inline_builds: None
) -> None:
    with s3_server() as server:
        url = f"s3://{server.new_bucket()}"
        output = {"path": f"{url}/out", "format": "datatrove", **SHARD}
        built = recipe | {"output": output, "work": f"{url}/work"}
        build(built, workers=1, progress=False)
        assert shardkit.verify(f"{url}/out").ok
        shardkit.download(f"{url}/out", tmp_path / "copy")
        assert tree(tmp_path / "copy") == tree(together / "datatrove")
        found = shardkit.trace(f"{url}/out", url="https://a.org/7")
        assert found.documents[0].text == text_of(7)[: len(found.documents[0].text or "")]


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["megatron", "datatrove"])
def test_a_killed_build_is_continued_with_the_same_bytes(tmp_path: Path, kind: str) -> None:
    with Crashes(tmp_path, format=kind) as crashes:
        cells = [
            Cell(fault="kill", stage=stage, moment=moment)
            for stage in ("pack", "provenance")
            for moment in ("uncommitted", "committed")
        ]
        total = crashes.steps("out")
        cells += [
            Cell(fault="kill", step=step, replace=step % 2 == 0) for step in range(3, total, total // 3)
        ]
        for cell in cells:
            outcome = crashes.run(cell)
            assert outcome.problems == [], str(cell)
            assert outcome.struck, str(cell)


def module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a peer may be there and fail to import
        pytest.skip(f"{name}: {error}")


def documents_of_files(together: Path, kind: str) -> list[list[npt.NDArray[Any]]]:
    documents, _ = stored(together / "tokens")
    found: dict[int, list[npt.NDArray[Any]]] = {}
    for number, piece in enumerate(provenance(together / kind)):
        found.setdefault(piece["shard"], []).append(np.array(documents[number]))
    return [found[number] for number in sorted(found)]


def same_files(folder: Path, other: Path, names: Sequence[str]) -> None:
    assert [(folder / name).read_bytes() for name in names] == [(other / name).read_bytes() for name in names]


def test_megatron_core_reads_and_writes_the_same_files(together: Path, tmp_path: Path) -> None:
    indexed, torch = module("megatron.core.datasets.indexed_dataset"), module("torch")
    for number, documents in enumerate(documents_of_files(together, "megatron")):
        stem = f"tokens-{number:05d}"
        data = indexed.IndexedDataset(str(together / "megatron" / stem))
        assert len(data) == len(documents)
        assert all((data[at] == document).all() for at, document in enumerate(documents))
        own = indexed.IndexedDatasetBuilder(str(tmp_path / f"{stem}.bin"), indexed.DType.optimal_dtype(400))
        for document in documents:
            own.add_document(torch.from_numpy(document), [len(document)])
        own.finalize(str(tmp_path / f"{stem}.idx"))
        same_files(tmp_path, together / "megatron", [f"{stem}.bin", f"{stem}.idx"])


def test_datatrove_reads_and_writes_the_same_files(together: Path, tmp_path: Path) -> None:
    tokenizer, dataset = module("datatrove.pipeline.tokens.tokenizer"), module("datatrove.utils.dataset")
    card = shardkit.open(together / "datatrove").card
    assert card is not None
    name = card.recipe["tokenizer"]["path"]
    streams = []
    for number, documents in enumerate(documents_of_files(together, "datatrove")):
        file = f"tokens-{number:05d}.ds"
        own = tokenizer.TokenizedFile(
            str(tmp_path), file, tokenizer_name_or_path=name, save_final_metadata=True
        )
        for document in documents:
            own.write(document.tolist(), None)
        own.close()
        same_files(tmp_path, together / "datatrove", [file, f"{file}.index", f"{file}.metadata"])
        streams.append(np.concatenate(documents))
    data = dataset.DatatroveFolderDataset(str(together / "datatrove"), 31, return_positions=True)
    windows = [one[: len(one) // 32 * 32].reshape(-1, 32) for one in streams]
    np.testing.assert_array_equal(
        np.stack([data[at]["input_ids"].numpy() for at in range(len(data))]), np.concatenate(windows)
    )


def test_a_file_takes_no_more_tokens_than_the_tools_can_count(tmp_path: Path) -> None:
    huge = np.broadcast_to(np.uint16(0), (1 << 31,))
    with pytest.raises(ValueError, match="2,147,483,648 tokens in one file; at most 2,147,483,647"):
        write_token_files(tmp_path, "x", "llmc", huge, np.array([1 << 31]), None, "name")
    assert not [*tmp_path.iterdir()]


def test_an_output_of_another_format_is_not_replaced(
    recipe: dict[str, Any], together: Path, inline_builds: None
) -> None:
    before = tree(together / "olmo")
    output = {"path": str(together / "olmo"), "format": "megatron"}
    with pytest.raises(BuildError, match="already holds a dataset, made by another recipe"):
        build(recipe | {"output": output}, workers=1, progress=False)
    assert tree(together / "olmo") == before


def test_the_page_of_a_repository_says_how_to_read_the_files(together: Path) -> None:
    contents = find_only_contents(LocalStore(together / "megatron"))
    assert contents is not None
    page = repository_card({"": contents}, HubPlace.parse("hf://datasets/me/tokens")).decode()
    assert "| form | token files for Megatron-LM |" in page
    assert "sequence_length=2048, batch_size=8" in page
    assert "load_dataset" not in page
