"""Values of documents in batches are those of the records that the documents are from, in any form."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import shardkit as sk
from shardkit.datasets.document_values import ShardValues, arrow_values, json_values, missing
from shardkit.datasets.segments import find_segments
from shardkit.errors import ShardError, ShardkitError
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.loaders.document_values import DocumentValues, RowValues
from shardkit.loaders.streaming_dataset import StreamingDataset
from shardkit.loaders.streams import Streams
from shardkit.storage.memory import MemoryStore
from support.loader_data import make_dataset, write_card
from support.plain_provenance import documents_at
from support.remote_harness import QUICK, fresh_url, put_folder
from support.resume import (
    assert_equal,
    assert_exact_resume,
    assert_exact_resume_in_new_process,
    batches,
    run,
    run_ranks,
)
from support.row_files import KINDS, write_tables
from support.small_build import EOS, train_bpe

LENGTH = 32
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "12",
    "lazy",
    "dogs,",
    "naïve",
    "café",
    "你好",
    "👩\u200d👧",
]
NAMES = ["score", "source", "topic", "lang", "url"]
OPTIONS: dict[str, Any] = {"batch_size": 4, **QUICK, "return_ids": True, "document_ids": True}
SOURCES = {"web": 130, "books": 30, "code": 60}

pytestmark = pytest.mark.filterwarnings("ignore:.*rows cannot be verified:RuntimeWarning")


def text_of(draw: np.random.Generator, longest: int) -> str:
    return " ".join(draw.choice(WORDS, int(draw.integers(1, longest))))


def records(source: str) -> list[dict[str, Any]]:
    """Records with scores and topics that some of them lack; each seventh repeats the one before."""
    draw = np.random.default_rng(len(source))
    made: list[dict[str, Any]] = []
    for number in range(SOURCES[source]):
        one: dict[str, Any] = {
            "text": text_of(draw, 60 if source == "books" else 14),
            "url": f"https://{source}/{number}",
        }
        if number % 5:
            one["score"] = number if number % 3 == 0 else number / 7
        if source != "code":
            one |= {"topic": number * 10**6, "lang": ["en", "de", None][number % 3]}
        if number % 7 == 6:
            one["text"] = made[-1]["text"]
        made.append(one)
    return made


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    train_bpe([" ".join(WORDS)] * 20, vocabulary=300, special=(EOS, "<s>", "<sep>")).save(
        str(folder / "tokenizer.json")
    )
    for source in SOURCES:
        lines = [json.dumps(one, ensure_ascii=False) for one in records(source)]
        (folder / f"{source}.jsonl").write_text("\n".join(lines))
    return folder


def metadata_of(source: str) -> list[str]:
    return ["score"] if source == "code" else ["score", "topic", "lang"]


def build(raw: Path, place: Path, **changes: Any) -> Path:
    recipe = {
        "inputs": [
            {"path": f"{raw}/{source}.jsonl", "source": source, "metadata": metadata_of(source)}
            for source in SOURCES
        ],
        "dedup": {"exact": {}, "near": {"similarity": 0.8}},
        "tokenizer": {"path": str(raw / "tokenizer.json"), "eos": EOS},
        "pack": {"sequence_length": LENGTH},
        "output": {"path": str(place), "shard_bytes": "1KiB"},
    }
    sk.build(recipe | changes, progress=False)
    return place


@pytest.fixture(scope="module")
def built(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(raw, tmp_path_factory.mktemp("built") / "out")


def loader(place: Any, **options: Any) -> StreamingLoader:
    return StreamingLoader(place, **grouped(OPTIONS | {"document_values": NAMES} | options))


def expected_values(dataset: Path, raw: Path, shard: int, row: int, token: int) -> dict[str, Any] | None:
    """The values of the document at a token, from the record itself; None: it has no document."""
    # A repeated bos stands before the piece of its document.
    found = documents_at(dataset, shard, row, token) or documents_at(dataset, shard, row, token + 1)
    if not found:
        return None
    line = json.loads((raw / Path(found[0].file).name).read_text().splitlines()[found[0].record])
    lang, topic = line.get("lang"), line.get("topic")
    return {
        "score": np.float32(line.get("score", math.nan)),
        "source": list(SOURCES).index(Path(found[0].file).stem),
        "topic": np.float32(math.nan if topic is None else topic),
        "lang": -1 if lang is None else hash_of(lang),
        "url": hash_of(line["url"]),
    }


def hash_of(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def check(batch: dict[str, Any], dataset: Path, raw: Path, starts: Any) -> int:
    """Compare a batch of rows with the records; return the number of documents. Token ids begin documents."""
    rows, documents = batch["sample_id"].tolist(), batch["document_ids"].reshape(len(batch["sample_id"]), -1)
    widths = {tuple(batch[name].shape) for name in NAMES}
    assert widths == {(len(rows), int(documents.max()) + 1)}
    assert [batch[name].dtype for name in NAMES] == [
        torch.float32,
        torch.int64,
        torch.float32,
        *[torch.int64] * 2,
    ]
    count = 0
    for number, sample in enumerate(rows):
        shard = int(np.searchsorted(starts, sample, side="right")) - 1
        ids = documents[number].tolist()
        for entry in range(batch["score"].shape[1]):
            got = {name: batch[name][number, entry].item() for name in NAMES}
            wanted = None
            if sample >= 0 and entry in ids:
                wanted = expected_values(dataset, raw, shard, sample - int(starts[shard]), ids.index(entry))
            if wanted is None:
                assert math.isnan(got["score"])
                assert math.isnan(got["topic"])
                assert [got[name] for name in ("source", "lang", "url")] == [-1, -1, -1]
            else:
                count += 1
                assert all(got[n] == wanted[n] or wanted[n] != wanted[n] != got[n] for n in NAMES), (
                    got,
                    wanted,
                )
    return count


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"pack": {"strategy": "concat"}}, {"labels": "shifted"}),
        ({"output": {"format": "wds", "shard_bytes": "40KiB"}}, {"labels": "shifted", "keep_length": True}),
        ({"pack": {"strategy": "best_fit_truncate"}}, {"flat": True, "labels": True}),
        ({"pack": {"strategy": "best_fit_crop"}}, {"tail": "pad", "batch_size": 7}),
        ({"pack": {"row_bos": True}, "bos": "<s>"}, {"doc_lens": True}),
        ({"pack": {"row_bos": True, "strategy": "concat"}, "bos": "<s>"}, {}),
        ({"pack": {"order": "source"}, "dedup": {}}, {"max_repetitions": 31, "labels": True}),
        ({"output": {"format": "mds", "shard_bytes": "2KiB", "compression": "zstd"}}, {"shuffle": "global"}),
    ],
)  # fmt: skip
def test_values_are_those_of_the_records(
    changes: dict[str, Any], options: dict[str, Any], raw: Path, tmp_path: Path
) -> None:
    output = {"path": str(tmp_path / "out"), "shard_bytes": "4KiB"} | changes.get("output", {})
    tokenizer = {"path": str(raw / "tokenizer.json"), "eos": EOS}
    tokenizer |= {"bos": changes.pop("bos")} if "bos" in changes else {}
    pack = {"sequence_length": LENGTH} | changes.get("pack", {})
    changes |= {"output": output, "tokenizer": tokenizer, "pack": pack}
    folder = build(raw, tmp_path / "out", **changes)
    with loader(folder, **options) as read:
        starts, count = read.dataset.manifest.shard_starts, 0
        assert len(read.dataset.manifest.shards) > 1
        assert read.sources == [*SOURCES]
        for batch in read:
            count += check(batch, folder, raw, starts)
            if "doc_lens" in batch:
                assert batch["doc_lens"].shape == batch["score"].shape
        assert count > 150


def test_values_stay_with_their_rows_on_any_number_of_ranks_and_after_a_restart(built: Path) -> None:
    def maker(rank: int, ranks: int) -> StreamingLoader:
        return loader(built, rank=rank, world_size=ranks, batch_size=6 // ranks)

    def samples(batch: dict[str, Any]) -> list[Any]:
        values = [[v for v in row if v != -1] for row in batch["url"].tolist()]
        return list(zip(batch["sample_id"].tolist(), values, strict=True))

    reference = run_ranks(maker, 1, 20, samples=samples)
    for ranks in (1, 2, 3):
        for stop in (0, 4, 13):
            rest = run_ranks(maker, ranks, 19 - stop, reference[stop][1], samples=samples)
            assert rest == reference[stop + 1 :]


@pytest.mark.parametrize("options", [{}, {"labels": "shifted", "tail": "drop"}, {"balance": "attention"}])
def test_a_run_resumes_exactly(built: Path, options: dict[str, Any]) -> None:
    assert_exact_resume(lambda: loader(built, **options, rank=0, world_size=2), steps=12, tail_steps=4)


@pytest.mark.extended
def test_a_run_resumes_exactly_in_another_process(built: Path, tmp_path: Path) -> None:
    arguments = OPTIONS | {"dataset": str(built), "document_values": {"score": "float32", "url": "hash"}}
    assert_exact_resume_in_new_process(arguments, tmp_path, steps=9, at=[0, 4])


def test_values_change_neither_samples_nor_state_nor_other_fields(built: Path) -> None:
    with loader(built, labels=True) as read, loader(built, labels=True, document_values=None) as plain:
        for (batch, state), (without, its_state) in zip(run(read, 20), run(plain, 20), strict=True):
            assert_equal({k: v for k, v in batch.items() if k not in NAMES}, without, "other fields")
            assert state == its_state
    with (
        loader(built, labels=True, document_ids=False) as read,
        loader(built, labels=True, document_ids=False, document_values=None) as plain,
    ):
        for batch, without in zip(read, plain, strict=True):
            assert torch.equal(batch["labels"], without["labels"])  # values alone mask no starts


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_of_a_dataloader_give_the_same_values(built: Path, workers: int) -> None:
    with loader(built) as read:
        expected = [batch for batch, _ in run(read, 9)]
    options = grouped(OPTIONS | {"document_values": NAMES})
    dataset = StreamingDataset(built, **options)
    got = list(islice(DataLoader(dataset, batch_size=None, num_workers=workers), 9))
    for one, other in zip(got, expected, strict=True):
        assert_equal(one, other, "worker")


def test_remote_data_has_the_values_of_local_data(built: Path) -> None:
    store = MemoryStore(fresh_url())
    put_folder(built, store)
    with loader(built) as local, loader(store.url) as remote:
        for (got, _), (expected, _) in zip(run(remote, 30), run(local, 30), strict=True):
            assert_equal(got, expected, "remote")


@pytest.mark.filterwarnings("ignore:document_values take:RuntimeWarning")
def test_values_are_read_again_after_memory_ran_out(built: Path) -> None:
    with sk.open(built) as dataset:
        streams = Streams([dataset], ["a"])
        rows = np.arange(len(dataset))
        tokens = np.stack([np.asarray(dataset[row]["tokens"]) for row in rows.tolist()])
        assert dataset.card is not None
        eos = dataset.card.tokenizer.eos_id
        whole = DocumentValues(streams, NAMES)
        small = DocumentValues(streams, NAMES, max_bytes=2000)
        tiny = DocumentValues(streams, NAMES, max_bytes=100)
        tiny.open_rows(rows[:1])
        with pytest.warns(RuntimeWarning, match=r"document_values take .* the rows of a plan are in many"):
            tiny.open_rows(rows)
        draw = np.random.default_rng(3)
        reads = 0
        for _ in range(60):
            some = draw.choice(rows, 5)
            some[draw.integers(0, 5)] = -1
            segments = find_segments(tokens[some], eos, some < 0)
            before = small._bases >= 0
            opened = [values.open_rows(some) for values in (whole, small)]
            expected, got = (values.by_batch(5, LENGTH, segments) for values in opened)
            for name in NAMES:
                np.testing.assert_array_equal(got[name][0], expected[name][0])
            reads += int(((small._bases >= 0) & ~before).sum())
        assert reads > 2 * len(dataset.manifest.shards)
        assert small._bytes < whole._bytes


def test_streams_of_a_mixture_may_lack_fields_and_share_the_numbers_of_sources(
    built: Path, raw: Path, tmp_path: Path
) -> None:
    inputs = [
        {"path": f"{raw}/code.jsonl", "source": "more code"},
        {"path": f"{raw}/web.jsonl", "source": "web", "metadata": ["score"]},
    ]
    other = build(raw, tmp_path / "other", inputs=inputs)
    third = make_dataset(tmp_path / "third", "mds")
    write_card(third)
    streams = [Stream(built, 2), Stream(other, 1), Stream(built, 1, name="again"), Stream(third, 0, name="c")]
    with pytest.raises(ValueError, match="different shapes"):
        loader(streams)
    with loader(streams[:3], batch_size=8) as mixed:
        assert mixed.sources == [*SOURCES, "more code"]
        seen: set[int] = set()
        for batch, _ in run(mixed, 20):
            for stream, source, topic in zip(
                *(batch[n] for n in ("stream_id", "source", "topic")), strict=True
            ):
                labels = {mixed.sources[n] for n in source.tolist() if n >= 0}
                assert labels <= ({"more code", "web"} if stream == 1 else {*SOURCES})
                assert stream != 1 or topic.isnan().all()
                seen |= {*source.tolist()}
        assert seen == {-1, 0, 1, 2, 3}
    alone: dict[int, torch.Tensor] = {}
    with loader(built) as read:
        for batch in read:
            alone |= {int(n): one[one != -1] for n, one in zip(batch["sample_id"], batch["url"], strict=True)}
    with loader(streams[:3], batch_size=8) as mixed:
        for batch, _ in run(mixed, 20):
            rows = zip(*(batch[name] for name in ("stream_id", "sample_id", "url")), strict=True)
            for stream, sample, url in rows:
                assert stream == 1 or torch.equal(url[url != -1], alone[int(sample)])


def test_a_stream_without_provenance_has_missing_values(built: Path, tmp_path: Path) -> None:
    from shardkit.formats import mds

    with mds.MdsWriter(tmp_path / "mds", columns={"tokens": f"ndarray:uint16:{LENGTH}"}) as writer:
        for number in range(9):
            writer.write({"tokens": np.full(LENGTH, number, np.uint16)})
    with loader([Stream(built), Stream(tmp_path / "mds")], eos_id=0) as mixed:
        for batch, _ in run(mixed, 10):
            foreign = batch["stream_id"] == 1
            assert batch["score"][foreign].isnan().all()
            assert (batch["url"][foreign] == -1).all()
            assert (batch["url"][~foreign][:, 0] != -1).all()
    with pytest.raises(ValueError, match="has no provenance tables"):
        loader(tmp_path / "mds", eos_id=0)


def test_types_may_be_chosen_and_values_of_other_kinds_are_missing_with_a_warning(built: Path) -> None:
    chosen = {"topic": "int64", "source": "hash", "score": "float64", "lang": "float32", "nowhere": "int64"}
    with loader(built, document_values=chosen) as read, loader(built) as plain:
        with pytest.warns(RuntimeWarning, match="documents of a shard have a 'lang' that is not float32"):
            batch = next(iter(read))
        other = next(iter(plain))
        topic = other["topic"].double().nan_to_num(-1).long()
        assert torch.equal(batch["topic"], topic)
        assert batch["score"].dtype == torch.float64
        assert torch.equal(batch["score"].float().nan_to_num(-1), other["score"].nan_to_num(-1))
        labels = torch.tensor([hash_of(label) for label in plain.sources] + [-1])
        assert torch.equal(batch["source"], labels[other["source"]])
        assert batch["lang"].isnan().all()
        assert (batch["nowhere"] == -1).all()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("score", "must be a list of names"),
        (["score", 1], "must be a list of names"),
        ({"score": "int8"}, "must be one of float32, float64, int64, hash, not 'int8'"),
        (["scroe"], "no document among those looked at has 'scroe'"),
        (["tokens", "score"], "no document among those looked at has 'tokens'"),
    ],
)
def test_mistakes_are_named(built: Path, wanted: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader(built, document_values=wanted)


def test_a_field_of_the_name_of_another_is_refused_and_may_be_renamed(built: Path) -> None:
    names = {"document_values": {"tokens": "float32"}}
    with pytest.raises(
        ValueError, match="has a column 'tokens', which an option of the loader would replace"
    ):
        loader(built, **names)
    with loader(built, document_values=["score"], rename={"score": "quality"}) as read:
        assert "quality" in next(iter(read))
    with loader(built, document_values=["metadata.score"]) as read:
        assert "metadata.score" in next(iter(read))


def test_a_missing_or_damaged_table_is_an_error_that_names_it(built: Path, tmp_path: Path) -> None:
    import shutil

    damaged = tmp_path / "damaged"
    shutil.copytree(built, damaged)
    [table] = (damaged / "provenance").glob("*.parquet")
    lines = pq.read_table(table)
    pq.write_table(lines.filter(pa.array(np.array(lines.column("row")) != 2)).cast(lines.schema), table)
    with loader(damaged) as read, pytest.raises(ShardError, match=r"row \d+ is in no provenance table"):
        list(read)
    broken = lines.set_column(
        lines.schema.get_field_index("metadata"), "metadata", pa.array(["{"] * lines.num_rows)
    )
    pq.write_table(broken.cast(lines.schema), table)
    with pytest.raises(ShardkitError, match="metadata is no JSON"):
        loader(damaged)
    with (
        loader(damaged, document_values={"score": "float32"}) as read,
        pytest.raises(ShardError, match="metadata is no JSON"),
    ):
        next(iter(read))


def test_documents_joined_to_groups_have_the_values_of_the_first_file_of_each_text(
    raw: Path, tmp_path: Path
) -> None:
    folder = build(raw, tmp_path / "out", group={"by": "lang"})
    with loader(folder) as read:
        for batch in read:
            starts = read.dataset.manifest.shard_starts
            shard = np.searchsorted(starts, batch["sample_id"].numpy(), side="right") - 1
            rows = zip(shard.tolist(), batch["sample_id"].tolist(), strict=True)
            for number, (at, sample) in enumerate(rows):
                row = sample - int(starts[at])
                ids = batch["document_ids"][number].tolist()
                for entry in range(ids[-1] + 1):
                    wanted = expected_values(folder, raw, at, row, ids.index(entry))
                    assert batch["url"][number, entry] == (-1 if wanted is None else wanted["url"])


def test_conversations_with_masks_have_values(raw: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    (tmp_path / "chat.jinja").write_text(template)
    draw = np.random.default_rng(1)
    chats = [
        {
            "messages": [{"role": r, "content": text_of(draw, 6)} for r in ["user", "assistant"] * 2],
            "rating": number / 4,
        }
        for number in range(40)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    recipe = {
        "inputs": [{"path": str(tmp_path / "chats.jsonl"), "messages": "messages", "metadata": ["rating"]}],
        "tokenizer": {
            "path": str(raw / "tokenizer.json"),
            "eos": EOS,
            "chat_template": str(tmp_path / "chat.jinja"),
        },
        "pack": {"sequence_length": 64},
        "output": {"path": str(tmp_path / "out")},
    }
    sk.build(recipe, progress=False)
    seen = set()
    with loader(tmp_path / "out", document_values=["rating"], labels=True) as read:
        assert read.dataset.loss_mask_column == "loss_mask"
        for batch in read:
            for number, sample in enumerate(batch["sample_id"].tolist()):
                ids = batch["document_ids"][number].tolist()
                for entry in range(ids[-1] + 1):
                    found = documents_at(tmp_path / "out", 0, sample, ids.index(entry))
                    wanted = chats[found[0].record]["rating"] if found else math.nan
                    got = batch["rating"][number, entry].item()
                    seen.add(got)
                    assert got == wanted or (math.isnan(got) and not found)
    assert len(seen) > 30


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 99)), max_size=5), min_size=1, max_size=6),
    st.data(),
)
def test_entries_of_rows_are_found_as_by_a_search(
    rows: list[list[tuple[int, int]]], data: st.DataObject
) -> None:
    """Pieces of random lengths in random rows, at random places: as a scan of the pieces finds them."""
    length = 26
    row = np.repeat(np.arange(len(rows)), [len(pieces) for pieces in rows])
    ends = np.array([end for one in rows for end in np.cumsum([size for size, _ in one]).tolist()], np.int64)
    values = np.array([value for one in rows for _, value in one], np.float32)
    made = ShardValues.of(len(rows), row, ends, {"v": (values, 0)}, {"v": "float32"})
    for number, pieces in enumerate(rows):
        place = data.draw(st.integers(0, length - 1))
        low, high = made.firsts[number : number + 2].tolist()
        entry = low + int(np.searchsorted(made.starts[low:high], place, side="right")) - 1
        before, wanted = 0, math.nan
        for size, value in pieces:
            if before <= place < before + size:
                wanted = float(value)
            before += size
        assert made.values["v"][entry] == wanted or (
            math.isnan(wanted) and math.isnan(made.values["v"][entry])
        )


@settings(deadline=None)
@given(st.data())
def test_documents_are_the_same_with_and_without_a_search_for_eos(data: st.DataObject) -> None:
    """Rows whose last document is cut or followed by padding; shifted labels leave out a row's last token."""
    length, batch = 12, 2
    tokens, row, end = np.zeros((4, length), np.uint16), list[int](), list[int]()
    for number in range(4):
        ends = ends_of(data.draw(st.lists(st.integers(2, 7), min_size=1)), length)
        for first, last in pairwise([0, *ends]):
            tokens[number, first : last - 1] = 5
        if ends[-1] == length and data.draw(st.booleans()):
            tokens[number, -1] = 5  # goes on in another row
        if ends[-1] == length - 1:  # the last document has one token of this row
            ends, tokens[number, -1] = [*ends, length], 9
        row += [number] * len(ends)
        end += ends
    values = np.arange(len(row)).astype(np.float32)
    made = ShardValues.of(4, np.array(row), np.array(end), {"v": (values, 0)}, {"v": "float32"})
    after = made.firsts[1:] - 1
    opened = RowValues(made.firsts[:-1], after, made.starts[after], made.starts, made.values, False)
    segments = find_segments(tokens, 0)
    for own, seen in ((length, segments), (length - 1, segments.without_last_tokens())):
        wanted = []
        for number, ids in enumerate(seen.document_ids().tolist()):
            begins = [ids.index(n) for n in range(max(ids) + 1)]
            places = [
                next((n for n in range(len(row)) if row[n] == number and first < end[n]), -1)
                for first in begins
            ]
            wanted.append([float(values[n]) if n >= 0 else math.nan for n in places])
        for way in (None, seen):
            for at, table in enumerate(opened.by_batch(batch, own, way)["v"]):
                rows = wanted[batch * at : batch * (at + 1)]
                width = max(map(len, rows))
                expected = [one + [math.nan] * (width - len(one)) for one in rows]
                np.testing.assert_array_equal(table, np.array(expected, np.float32))


def ends_of(sizes: list[int], length: int) -> list[int]:
    """Where documents end that fit into a row; the first is cut."""
    ends = np.cumsum([min(sizes[0], length), *sizes[1:]])
    return [int(end) for end in ends if end <= length]


ANY = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text()
    | st.lists(st.integers())
)


def test_metadata_that_is_no_object_has_no_fields() -> None:
    texts = pa.array(["null", "[1]", "1", '"v"', None, '{"v": 2}', '{"v": null, "w": {"v": 3}}'])
    assert json_values(texts, {"v": ("v", "int64")})["v"][0].tolist() == [-1, -1, -1, -1, -1, 2, -1]


@settings(deadline=None)
@given(st.lists(ANY), st.sampled_from(["float32", "float64", "int64", "hash"]))
def test_values_of_json_are_those_of_plain_python(found: list[Any], kind: Any) -> None:
    """Numbers of any size, texts, and what is neither: the fast way and the exact one give the same."""
    texts = [None if one is None else json.dumps({"a": 1, "v": one}) for one in found]
    values, wrong = json_values(pa.array(texts, pa.string()), {"v": ("v", kind)})["v"]
    wanted, bad = missing(len(found), kind), 0
    for number, one in enumerate(found):
        made: Any = None
        if kind == "hash":
            if isinstance(one, str) or type(one) is int:
                made = hash_of(str(one))
        elif isinstance(one, (int, float)):
            if kind == "int64":
                made = int(one) if abs(one) < 2**63 and one == math.floor(one) else None
            elif abs(one) < (
                2**128 - 2**103 if kind == "float32" else math.inf
            ):  # what rounds to a finite number
                made = np.dtype(kind).type(float(one))
        if made is None:
            bad += one is not None and one == one
        else:
            wanted[number] = made
    np.testing.assert_array_equal(values, wanted)
    assert wrong == bad


@given(
    st.lists(st.none() | st.integers(-(2**31), 2**31 - 1)),
    st.sampled_from(["float32", "float64", "int64", "hash"]),
)
def test_values_of_columns_are_those_of_json(numbers: list[int | None], kind: Any) -> None:
    texts = pa.array([json.dumps({"v": one}) for one in numbers], pa.string())
    expected, _ = json_values(texts, {"v": ("v", kind)})["v"]
    for type_ in (pa.int32(), pa.int64(), pa.float64()) if kind != "hash" else (pa.int32(), pa.int64()):
        got, wrong = arrow_values(pa.array(numbers, type_), kind)
        np.testing.assert_array_equal(got, expected)
        assert wrong == 0


@pytest.fixture(scope="module")
def texts(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of texts with columns of every kind that values are made of."""
    folder = tmp_path_factory.mktemp("texts")
    draw = np.random.default_rng(2)
    for number in range(3):
        with pq.ParquetWriter(folder / f"part-{number}.parquet", None or schema()) as writer:
            for _ in range(3):
                count = int(draw.integers(20, 50))
                rows = [
                    {
                        "text": [None, "", text_of(draw, 30)][int(draw.integers(0, 12).clip(0, 2))],
                        "score": None if n % 4 == 0 else float(draw.random()),
                        "topic": int(draw.integers(0, 2**40)),
                        "lang": ["en", "de", None][n % 3],
                        "kind": ["a", "b"][n % 2],
                        "good": bool(n % 2),
                        "url": f"https://a/{number}/{n}",
                        "tags": ["x"],
                    }
                    for n in range(count)
                ]
                writer.write_table(pa.Table.from_pylist(rows, schema()))
    return folder


def schema() -> pa.Schema:
    kinds = {
        "text": pa.string(),
        "score": pa.float64(),
        "topic": pa.int64(),
        "lang": pa.large_string(),
        "kind": pa.dictionary(pa.int8(), pa.string()),
        "good": pa.bool_(),
        "url": pa.string(),
        "tags": pa.list_(pa.string()),
    }
    return pa.schema([*kinds.items()])


OF_TEXTS = {
    "score": "float32",
    "topic": "int64",
    "lang": "hash",
    "kind": "hash",
    "good": "float32",
    "url": "hash",
}


@pytest.fixture(autouse=True)
def indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Indexes without a cache folder are kept in that of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return iter(())


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings(
    "ignore:.*rows have no text:RuntimeWarning", "ignore:cache_bytes of:RuntimeWarning"
)
@pytest.mark.parametrize("strategy", ["best_fit", "concat"])
@pytest.mark.parametrize("wanted", [[*OF_TEXTS], OF_TEXTS])
def test_texts_tokenized_while_loading_have_the_values_of_a_build(
    texts: Path, raw: Path, tmp_path: Path, strategy: str, wanted: Any
) -> None:
    tokenizer = {"path": str(raw / "tokenizer.json"), "eos": EOS}
    inputs = [{"path": f"{texts}/*.parquet", "metadata": ["score", "topic", "lang", "kind", "good"]}]
    pack = {"sequence_length": LENGTH, "strategy": strategy, "order": "source"}
    nothing: dict[str, Any] = {"dedup": {}, "max_bad_fraction": 0.5}
    folder = build(raw, tmp_path / "out", inputs=inputs, tokenizer=tokenizer, pack=pack, **nothing)
    options = {"document_values": wanted, "labels": "shifted"}
    in_place = options | {"tokenizer": tokenizer, "sequence_length": LENGTH, "pack": strategy}
    with loader(folder, **options) as made, loader(texts, **in_place) as read:
        for (got, _), (expected, _) in zip(run(read, 60), run(made, 60), strict=True):
            assert_equal(got, expected, "in place")
        assert (got["url"][:, 0] != -1).all()
        fingerprint = read.dataset.fingerprint
    with loader(texts, **in_place | {"document_values": None}) as plain:
        assert plain.dataset.fingerprint == fingerprint
    store = MemoryStore(fresh_url())
    put_folder(texts, store)
    assert_exact_resume(lambda: loader(store.url, **in_place, cache_dir=tmp_path / "cache"), steps=6)


@pytest.mark.filterwarnings("ignore:.*rows have no text:RuntimeWarning")
def test_workers_and_lost_indexes_give_the_values_of_texts(texts: Path, raw: Path, tmp_path: Path) -> None:
    options = {
        "tokenizer": str(raw / "tokenizer.json"),
        "sequence_length": LENGTH,
        "document_values": OF_TEXTS,
    }
    with loader(texts, **options) as read:
        expected = [batch for batch, _ in run(read, 5)]
    dataset = StreamingDataset(texts, **grouped(OPTIONS | options))
    with sk.open(texts, tokenizer=raw / "tokenizer.json", sequence_length=LENGTH) as opened:
        copied = pickle.loads(pickle.dumps(opened))  # as for a worker that is spawned
        with loader(copied, document_values=OF_TEXTS) as read:
            for one, other in zip(islice(batches(read), 5), expected, strict=True):
                assert_equal(one, other, "copy")
    for one, other in zip(
        islice(DataLoader(dataset, batch_size=None, num_workers=2), 5), expected, strict=True
    ):
        assert_equal(one, other, "worker")
    with loader(texts, **options) as read:
        for file in (tmp_path / "home").rglob("lengths-*"):
            file.unlink()
        for one, other in zip(islice(batches(read), 5), expected, strict=True):
            assert_equal(one, other, "measured again")


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*rows have no text:RuntimeWarning")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "parquet"])
def test_values_are_the_same_from_files_of_any_format(
    texts: Path, raw: Path, tmp_path: Path, kind: str
) -> None:
    for file in texts.iterdir():
        groups = pq.ParquetFile(file)
        tables = [groups.read_row_group(number) for number in range(groups.num_row_groups)]
        write_tables(tmp_path / "other", file.stem, kind, tables)
    options = {
        "tokenizer": str(raw / "tokenizer.json"),
        "sequence_length": LENGTH,
        "document_values": OF_TEXTS,
    }
    with loader(texts, **options) as read, loader(tmp_path / "other", **options) as other:
        for (got, _), (expected, _) in zip(run(other, 30), run(read, 30), strict=True):
            assert got.keys() == expected.keys()
            for name in expected:
                np.testing.assert_array_equal(got[name], expected[name])


@pytest.mark.filterwarnings("ignore:.*rows have no text:RuntimeWarning")
def test_columns_that_are_neither_numbers_nor_texts_are_refused(texts: Path, raw: Path) -> None:
    options = {"tokenizer": str(raw / "tokenizer.json"), "sequence_length": LENGTH}
    with pytest.raises(ValueError, match=r"column 'tags' of .* is list"):
        loader(texts, **options, document_values=["tags"])
    with pytest.raises(ValueError, match="no document among those looked at has 'source'"):
        loader(texts, **options, document_values=["source"])
