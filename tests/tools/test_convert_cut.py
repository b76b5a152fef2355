"""Cutting documents into rows: every token is where plain Python puts it, whatever blocks it came in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit import open_dataset
from shardkit.errors import ConservationError, ShardError
from shardkit.formats.mds import MdsWriter
from shardkit.tools.convert.cut import TokenCounts, cut_rows, documents
from shardkit.tools.convert.source import CutOptions, OutputOptions, TokenBlock
from shardkit.tools.convert.write import RowWriter, rows_per_shard

EOS = 9


def blocks_of(
    texts: Sequence[Sequence[int]], cuts: Sequence[int], dtype: Any = np.int64
) -> Iterator[TokenBlock]:
    """Documents as blocks that end after the tokens `cuts`, wherever documents end."""
    stream = np.array([token for text in texts for token in text], dtype)
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64) if texts else np.zeros(0, np.int64)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for start, stop in pairwise(edges):
        here = ends[(ends > start) & (ends <= stop)] if start else ends[ends <= stop]
        document = int((ends <= start).sum()) if start else 0
        begun = int(ends[ends <= start].max(initial=0))
        yield TokenBlock(stream[start:stop], here - start, "f", document, start - begun, 1)


texts = st.lists(st.lists(st.integers(0, EOS), max_size=9), max_size=12)
cuts = st.lists(st.integers(0, 100), max_size=6)


@settings(max_examples=60, deadline=None)
@given(texts, cuts, st.integers(1, 11), st.sampled_from([None, EOS]), st.sampled_from([None, 3]))
def test_rows_are_the_stream_of_all_documents(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[list[int]],
    cuts: list[int],
    length: int,
    eos: int | None,
    pad: int | None,
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    drop = pad is None and eos is None
    cut = CutOptions(sequence_length=length, eos=eos, pad=pad, drop_tail=drop)
    row_bytes = 4 * length
    output = OutputOptions(shard_bytes=400 + 3 * (row_bytes + 4), hashes=())
    stream: list[int] = []
    for text in texts:
        stream += text
        stream += [eos] if eos is not None and text and text[-1] != eos else []
    tail = len(stream) % length
    expected = stream[: len(stream) - tail] if drop else stream + [cut.fill or 0] * (-len(stream) % length)
    with ThreadPoolExecutor(1) as background:
        writer = RowWriter(
            folder, output, background, column="tokens", dtype=np.dtype(np.uint32), shape=(length,)
        )
        counts = TokenCounts()
        cut_rows(blocks_of(texts, cuts), writer, cut, counts)
        manifest, _ = writer.finish()
    counts.check(manifest.samples * length)
    found = [np.asarray(sample["tokens"]) for sample in open_dataset(folder)] if manifest.samples else []
    assert np.concatenate([*found, np.zeros(0)]).tolist() == expected
    assert counts.tokens_dropped == (tail if drop else 0)
    assert counts.eos_added + counts.tokens_read == len(stream)


@settings(max_examples=60, deadline=None)
@given(texts, cuts, st.sampled_from([None, EOS]))
def test_documents_come_back_whole_from_any_blocks(
    texts: list[list[int]], cuts: list[int], eos: int | None
) -> None:
    counts = TokenCounts()
    cut = CutOptions(keep_lengths=True, drop_empty=True, eos=eos)
    found = list(documents(blocks_of(texts, cuts), np.dtype(np.uint16), cut, counts))
    ends = [] if eos is None else [eos]
    filled = [text for text in texts if text]
    if any(texts):
        assert counts.documents_dropped == len(texts) - len(filled)
    assert [tokens.tolist() for _, tokens in found] == [t + (ends if t[-1] != eos else []) for t in filled]
    counts.check(sum(len(tokens) for _, tokens in found))


@pytest.mark.parametrize(
    ("token", "dtype", "message"),
    [
        (70_000, np.uint16, "f: document 2, token 1: 70,000 does not fit uint16; use --dtype uint32"),
        (-1, np.uint16, "f: document 2, token 1: -1 is not a token id"),
        (1 << 40, np.uint32, "f: document 2, token 1: 1,099,511,627,776 does not fit uint32"),
    ],
)
@pytest.mark.parametrize("cuts", [[], [4], [5]])
def test_an_id_that_does_not_fit_is_named(
    token: int, dtype: Any, message: str, cuts: list[int], tmp_path: Path
) -> None:
    texts = [[1, 2], [3], [4, token, 5]]
    cut = CutOptions(sequence_length=2, drop_tail=True)
    with ThreadPoolExecutor(1) as background:
        writer = RowWriter(
            tmp_path, OutputOptions(), background, column="tokens", dtype=np.dtype(dtype), shape=(2,)
        )
    with pytest.raises(ShardError) as caught:
        cut_rows(blocks_of(texts, cuts), writer, cut, TokenCounts())
    assert str(caught.value) == message


def test_tokens_that_do_not_add_up_are_a_bug() -> None:
    with pytest.raises(ConservationError, match="this is a bug"):
        TokenCounts(tokens_read=10, eos_added=1).check(10)


@pytest.mark.parametrize("limit", [900, 1000, 1001, 4096])
def test_shards_are_cut_where_mosaicml_cuts_them(limit: int, tmp_path: Path) -> None:
    rows = np.arange(20 * 50, dtype=np.uint16).reshape(20, 50)
    output = OutputOptions(shard_bytes=limit)
    with ThreadPoolExecutor(1) as background:
        (tmp_path / "a").mkdir()
        writer = RowWriter(tmp_path / "a", output, background, column="tokens", dtype=rows.dtype, shape=(50,))
        for start in range(0, 1000, 333):
            writer.append(rows.reshape(-1)[start : start + 333])
        writer.finish()
    with MdsWriter(
        tmp_path / "b", columns={"tokens": "ndarray:uint16:50"}, hashes=["xxh64"], shard_bytes=limit
    ) as theirs:
        theirs.write_rows(rows)
    assert {f.name: f.read_bytes() for f in (tmp_path / "a").iterdir()} == {
        f.name: f.read_bytes() for f in (tmp_path / "b").iterdir()
    }


def test_tars_stay_within_the_limit(tmp_path: Path) -> None:
    output = OutputOptions(format="wds", shard_bytes=50_000)
    dtype = np.dtype(np.uint32)
    count = rows_per_shard(output, "tokens", dtype, (300,))
    with ThreadPoolExecutor(1) as background:
        writer = RowWriter(tmp_path, output, background, column="tokens", dtype=dtype, shape=(300,))
        writer.append(np.zeros(300 * (count + 1), dtype))
        manifest, _ = writer.finish()
    assert [shard.samples for shard in manifest.shards] == [count, 1]
    assert 40_000 < manifest.shards[0].raw.bytes <= 50_000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence_length": 8}, "the last tokens may not fill a row"),
        ({"sequence_length": 8, "keep_lengths": True}, "not both"),
        ({"sequence_length": 0, "pad": 1}, "must be from 1"),
        ({"sequence_length": 8, "pad": 1, "drop_tail": True}, "either pad or drop_tail"),
        ({"pad": 1}, "give sequence_length"),
        ({"eos": 1}, "eos would change rows that are copied"),
        ({"sequence_length": 8, "eos": 70_000, "dtype": "uint16"}, "eos 70,000 does not fit uint16"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"drop_empty": True}, "drop_empty needs keep_lengths"),
    ],
)
def test_options_that_contradict_themselves_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CutOptions(**settings)
