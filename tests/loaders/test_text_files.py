"""A loader tokenizes and packs the texts of files itself: the rows of a build, resumed exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import torch
from torch.utils.data import DataLoader

import shardkit as sk
from shardkit.cli.main import main
from shardkit.datasets.dataset import Dataset
from shardkit.datasets.text_packer import TextPacker
from shardkit.errors import RecipeError, ShardkitError
from shardkit.formats import mds
from shardkit.loaders import Stream, StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.loaders.streaming_dataset import StreamingDataset
from shardkit.storage.memory import MemoryStore
from support.remote_harness import QUICK, fresh_url, put_folder
from support.resume import assert_equal, assert_exact_resume, run, run_ranks
from support.row_files import write_tables
from support.small_build import EOS, train_bpe

LENGTH = 32
FILES = [[60, 60, 1], [45], [80, 3], [7], [31]]  # documents in the row groups of each file
FIELDS = {"labels": True, "doc_lens": True}
OPTIONS: dict[str, Any] = {"batch_size": 6, **QUICK, "return_ids": True}
SAYING = "the quick brown fox jumps over 12 lazy dogs, naïve café 你好 <|endoftext|> \u2028 👩‍👧"
WORDS = [*SAYING.split(" "), "\n\n"]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*rows cannot be verified:RuntimeWarning", "ignore:cache_bytes of:RuntimeWarning"
)


def texts_of(first: int, count: int) -> list[str]:
    draw = np.random.default_rng(first)
    lengths = draw.integers(0, 60, count)
    return [" ".join(draw.choice(WORDS, length)) for length in lengths]


def write(file: Path, groups: list[pa.Table]) -> None:
    file.parent.mkdir(exist_ok=True)
    with pq.ParquetWriter(file, groups[0].schema) as writer:
        for group in groups:
            writer.write_table(group)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe([" ".join(WORDS)] * 20, vocabulary=300, special=(EOS, "<s>")).save(str(path))
    return path


def write_folder(folder: Path, kind: str) -> Path:
    for number, counts in enumerate(FILES):
        groups = []
        for place, count in enumerate(counts):
            texts = texts_of(100 * number + place, count)
            rows = {"text": texts, "number": list(range(count)), "waste": ["x" * 2000] * count}
            groups.append(pa.table(rows))
        write_tables(folder, f"part-{number}", kind, groups)
    return folder


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("parquet"), "parquet")


@pytest.fixture(scope="module", params=["parquet", "stream", "zst"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("texts"), request.param)


@pytest.fixture(scope="module")
def url(folder: Path) -> str:
    store = MemoryStore(fresh_url())
    put_folder(folder, store)
    return store.url


@pytest.fixture(autouse=True)
def indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes without a cache folder are kept in that of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def loader(place: Any, tokenizer: Any, **options: Any) -> StreamingLoader:
    given = tokenizer if isinstance(tokenizer, dict) else str(tokenizer)
    return StreamingLoader(
        place, **grouped({**OPTIONS, "tokenizer": given, "sequence_length": LENGTH} | options)
    )


def rows_of(dataset: Dataset) -> list[list[int]]:
    return [np.asarray(row["tokens"]).tolist() for row in dataset]


def concatenated(texts: list[str], tokenizer: Path) -> list[list[int]]:
    """The rows of strategy concat of one shard, in plain Python."""
    made = tokenizers.Tokenizer.from_file(str(tokenizer))
    made.encode_special_tokens = True
    eos = made.token_to_id(EOS)
    assert eos is not None
    ids = [number for text in texts if text for number in [*made.encode(text).ids, eos]]
    ids += [eos] * (-len(ids) % LENGTH)
    return [ids[first : first + LENGTH] for first in range(0, len(ids), LENGTH)]


def test_rows_are_the_documents_of_each_shard_one_after_the_other(folder: Path, tokenizer: Path) -> None:
    expected = []
    for number, counts in enumerate(FILES):  # each of these small files is a shard
        texts = [text for place, count in enumerate(counts) for text in texts_of(100 * number + place, count)]
        expected.append(concatenated(texts, tokenizer))
    with sk.open(folder, tokenizer=tokenizer, sequence_length=LENGTH, pack="concat") as dataset:
        assert dataset.manifest.shard_samples.tolist() == [len(rows) for rows in expected]
        assert rows_of(dataset) == [row for rows in expected for row in rows]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pack", ["best_fit", "concat"])
@pytest.mark.parametrize("bos", [None, "<s>"])
def test_rows_and_order_are_those_of_a_build(
    parquet: Path, tokenizer: Path, tmp_path: Path, pack: str, bos: str | None
) -> None:
    given = {"path": str(tokenizer), "eos": EOS, **({} if bos is None else {"bos": bos})}
    recipe = {
        "inputs": [{"path": f"{parquet}/*.parquet"}],
        "steps": [],
        "tokenizer": given,
        "pack": {"sequence_length": LENGTH, "strategy": pack, "order": "source"},
        "output": {"path": str(tmp_path / "out")},
    }
    sk.build(recipe, progress=False)
    options: dict[str, Any] = {"tokenizer": given, "pack": pack}
    with (
        sk.open(tmp_path / "out") as made,
        sk.open(parquet, sequence_length=LENGTH, **options) as dataset,
    ):
        assert rows_of(dataset) == rows_of(made)
        assert dataset.manifest.shard_samples.tolist() == made.manifest.shard_samples.tolist()
        assert dataset.text(3) == made.text(3)
        assert made.card is not None
        assert not made.card.is_shuffled
        sizes = [one.stream_sizes("a").shuffle_sizes(None, None) for one in (dataset, made)]
        assert sizes[0] == sizes[1]
    with (
        StreamingLoader(tmp_path / "out", **grouped(OPTIONS | FIELDS)) as first,
        loader(parquet, **options | FIELDS) as second,
    ):
        for (expected, _), (got, _) in zip(run(first, 50), run(second, 50), strict=True):
            assert_equal(got, expected, "from texts")


def test_conversations_have_the_loss_masks_of_a_build(tmp_path: Path, tokenizer: Path) -> None:
    template = (
        "{% for m in messages %}<s>{{ m.role }}: {% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    (tmp_path / "chat.jinja").write_text(template)
    draw = np.random.default_rng(1)
    turns = [
        [{"role": role, "content": " ".join(draw.choice(WORDS, 9))} for role in ["user", "assistant"] * pairs]
        for pairs in draw.integers(1, 4, 60)
    ]
    write(tmp_path / "chats" / "a.parquet", [pa.table({"messages": turns, "id": list(range(60))})])
    given = {"path": str(tokenizer), "eos": EOS, "chat_template": str(tmp_path / "chat.jinja")}
    recipe = {
        "inputs": [{"path": str(tmp_path / "chats"), "messages": "messages"}],
        "steps": [],
        "tokenizer": given,
        "pack": {"sequence_length": LENGTH, "order": "source"},
        "output": {"path": str(tmp_path / "out")},
    }
    sk.build(recipe, progress=False)
    with (
        StreamingLoader(tmp_path / "out", **grouped(OPTIONS | {"labels": True})) as first,
        loader(tmp_path / "chats", given, labels=True) as second,
    ):
        assert second.dataset.loss_mask_column == "loss_mask"
        for (expected, _), (got, _) in zip(run(first, 30), run(second, 30), strict=True):
            assert_equal(got, expected, "from conversations")
        assert 0.05 < float((got["labels"] >= 0).float().mean()) < 0.9


@pytest.mark.sampled(4)
@pytest.mark.parametrize("place", ["folder", "url"])
@pytest.mark.parametrize("pack", ["best_fit", "concat"])
def test_a_run_resumes_exactly(
    place: str, pack: str, tokenizer: Path, cache: Path, folder: Path, url: str
) -> None:
    where = folder if place == "folder" else url
    make = lambda: loader(where, tokenizer, pack=pack, cache_dir=cache)  # noqa: E731
    assert_exact_resume(make, steps=16, tail_steps=4)


@pytest.mark.sampled(1)
def test_a_run_continues_on_another_number_of_ranks_and_at_another_place(
    folder: Path, url: str, tokenizer: Path, cache: Path
) -> None:
    def maker(place: Path | str) -> Any:
        def make(rank: int, ranks: int) -> StreamingLoader:
            placed = {"rank": rank, "world_size": ranks, "batch_size": 6 // ranks, "cache_dir": cache}
            return loader(place, tokenizer, **placed)

        return make

    reference = run_ranks(maker(folder), 1, 20)
    for ranks in (1, 2, 3):
        for stop in (0, 4, 13):
            rest = run_ranks(maker(url), ranks, 19 - stop, reference[stop][1])
            assert rest == reference[stop + 1 :]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cache_bytes", ["20kB", "1GB"])
def test_a_small_cache_gives_the_same_rows(
    cache_bytes: str, folder: Path, url: str, tokenizer: Path, cache: Path
) -> None:
    with (
        loader(folder, tokenizer) as local,
        loader(url, tokenizer, cache_dir=cache, cache_bytes=cache_bytes) as remote,
    ):
        assert remote.dataset.fingerprint == local.dataset.fingerprint
        for (got, state), (expected, wanted) in zip(run(remote, 60), run(local, 60), strict=True):
            assert_equal(got, expected, "remote")
            assert state == wanted


@pytest.mark.sampled(1)
def test_processes_of_a_node_share_rows_and_a_second_start_makes_none(
    url: str, tokenizer: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader(url, tokenizer, cache_dir=cache) as first:
        expected = [batch["tokens"].tolist() for batch in first]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a text is tokenized again")

    monkeypatch.setattr(TextPacker, "documents", refuse)
    with loader(url, tokenizer, cache_dir=cache) as second:
        assert [batch["tokens"].tolist() for batch in second] == expected
        cached = second.stats().cache
        assert cached is not None
        assert cached.fetched_bytes == 0
    with loader(url, tokenizer, cache_dir=cache, sequence_length=64):
        pass  # another length is counted from the lengths that are stored
    with pytest.raises(AssertionError, match="tokenized again"):
        loader(url, {"path": str(tokenizer), "bos": "<s>"}, cache_dir=cache)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_dataloader_read_the_same_rows(parquet: Path, tokenizer: Path, workers: int) -> None:
    with loader(parquet, tokenizer) as one:
        expected = [batch["tokens"].tolist() for batch in one]
    options = {**OPTIONS, "tokenizer": str(tokenizer), "sequence_length": LENGTH}
    read = DataLoader(StreamingDataset(parquet, **grouped(options)), batch_size=None, num_workers=workers)
    assert [batch["tokens"].tolist() for batch in read] == expected


def test_a_mixture_has_streams_of_texts_and_of_rows(parquet: Path, tokenizer: Path, tmp_path: Path) -> None:
    with mds.MdsWriter(tmp_path / "mds", columns={"tokens": f"ndarray:uint16:{LENGTH}"}) as writer:
        for number in range(50):
            writer.write({"tokens": np.full(LENGTH, number, np.uint16)})
    store = MemoryStore(fresh_url())
    put_folder(parquet, store)
    streams = [
        Stream(parquet, weight=1),
        Stream(store.url, weight=2, name="b"),
        Stream(tmp_path / "mds", weight=1),
    ]
    with loader(streams, tokenizer, batch_size=8) as mixed:
        ids = torch.cat([batch["stream_id"] for batch, _ in run(mixed, 8)])
    assert torch.bincount(ids).tolist() == [16, 32, 16]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "other", [{"sequence_length": 64}, {"pack": "concat"}, {"tokenizer": {"bos": "<s>"}}, {"columns": ["b"]}]
)
def test_a_state_of_other_rows_is_refused(other: dict[str, Any], tokenizer: Path, tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [pa.table({"text": texts_of(1, 90), "b": texts_of(2, 90)})])
    with loader(tmp_path, tokenizer) as first:
        state = run(first, 2)[-1][1]
    given = {"path": str(tokenizer), "eos": EOS} | other.get("tokenizer", {})
    with (
        loader(tmp_path, given, **{k: v for k, v in other.items() if k != "tokenizer"}) as second,
        pytest.raises(ShardkitError, match="dataset of stream 0: saved"),
    ):
        second.load_state_dict(state)


def test_texts_that_are_null_are_left_out_with_a_warning_and_empty_ones_make_no_document(
    tokenizer: Path, tmp_path: Path
) -> None:
    texts = [None, "", *texts_of(3, 20), None, "end"]
    write(tmp_path / "a.parquet", [pa.table({"text": pa.array(texts, pa.string())})])
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="2 rows have no text"):
            dataset = sk.open(tmp_path, tokenizer=tokenizer, sequence_length=LENGTH, pack="concat")
    assert rows_of(dataset) == concatenated([text for text in texts if text], tokenizer)


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()]
)
def test_every_kind_of_string_is_read(kind: pa.DataType, tokenizer: Path, tmp_path: Path) -> None:
    texts = texts_of(4, 50)
    write(tmp_path / "a.parquet", [pa.table({"text": pa.array(texts, pa.string()).cast(kind)})])
    with sk.open(tmp_path, tokenizer=tokenizer, sequence_length=LENGTH, pack="concat") as dataset:
        assert rows_of(dataset) == concatenated(texts, tokenizer)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("damage", [b"\xff", b"\xe4\xbd", b"\xed\xa0\x80", b"\xc0\x80"])
@pytest.mark.parametrize("before", [0, 700])
def test_a_text_that_is_not_utf8_is_named(
    damage: bytes, before: int, tokenizer: Path, tmp_path: Path
) -> None:
    texts = [*[b"the quick fox"] * before, b"lazy " + damage]
    ends = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))]
    column = pa.Array.from_buffers(pa.string(), len(texts), buffers)
    write(tmp_path / "data" / "a.parquet", [pa.table({"text": column})])
    with pytest.raises(ShardkitError, match=rf"a\.parquet: row {before}: the text is not UTF-8: byte 5 "):
        loader(tmp_path / "data", tokenizer)


def test_files_without_any_text_have_no_rows(tokenizer: Path, tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [pa.table({"text": ["", "", ""]})])
    with pytest.raises(ShardkitError, match="has no text in column 'text'"):
        loader(tmp_path, tokenizer)
    write(tmp_path / "b.parquet", [pa.table({"text": texts_of(5, 30)})])
    with loader(tmp_path, tokenizer) as one:
        assert len(one.dataset.manifest.shards) == 1
        assert len(list(one)) == len(one)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sequence_length": None}, ValueError, "give sequence_length"),
        ({"sequence_length": 1}, ValueError, "at least 2"),
        ({"pack": "worst_fit"}, ValueError, "pack must be one of best_fit, concat"),
        ({"tokenizer": {"path": "x", "eod": "y"}}, ValueError, "no key 'eod'"),
        ({"tokenizer": {"eos": "y"}}, ValueError, "has no path"),
        ({"tokenizer": "missing/tokenizer.json"}, RecipeError, "cannot be read"),
        ({"tokenizer": {"eos": "<none>"}}, RecipeError, "has no token '<none>'"),
        ({"columns": ["number"]}, ValueError, "is int64, not text"),
        ({"columns": ["text", "number"]}, ValueError, "names several"),
        ({"columns": ["body"]}, ValueError, "has no column 'body'"),
    ],
)
def test_mistakes_are_named(
    options: dict[str, Any], error: type[Exception], message: str, parquet: Path, tokenizer: Path
) -> None:
    given = options.pop("tokenizer", str(tokenizer)) if "tokenizer" in options else str(tokenizer)
    if isinstance(given, dict) and given.keys() == {"eos"} and given["eos"] == "<none>":
        given = {"path": str(tokenizer), **given}
    with pytest.raises(error, match=message):
        loader(parquet, given, **options)


def test_columns_of_text_must_be_told_apart(tokenizer: Path, tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [pa.table({"title": texts_of(1, 90), "body": texts_of(2, 90)})])
    with pytest.raises(ValueError, match="several columns of text"):
        loader(tmp_path, tokenizer)
    with loader(tmp_path, tokenizer, columns=["body"], pack="concat") as one:
        assert rows_of(one.dataset) == concatenated(texts_of(2, 90), tokenizer)


def test_a_file_that_is_replaced_is_an_error(tokenizer: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    write(file, [pa.table({"text": texts_of(1, 90)})])
    with loader(tmp_path, tokenizer) as one:
        write(file, [pa.table({"text": texts_of(2, 90)})])
        with pytest.raises(ShardkitError, match="has version"):
            next(iter(one))


def test_an_audit_proves_that_each_row_comes_once(folder: Path, tokenizer: Path) -> None:
    options = [f"tokenizer={tokenizer}", f"sequence_length={LENGTH}", "pack=concat"]
    loaders = [word for option in options for word in ("--loader", option)]
    assert main(["audit", str(folder), "--resume-at", "3", *loaders]) == 0
