from __future__ import annotations

import random
from collections.abc import Collection, Hashable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.lines import (
    reference_cut,
    reference_cut_spans,
    reference_hash,
    reference_spans,
    reference_units,
    reference_words,
)
from shardkit.writers.dedup.config import LinesDedupConfig
from shardkit.writers.dedup.exact import KEYS
from shardkit.writers.dedup.lines import LINE_KEYS, LineKeys, remove_lines, write_line_keys
from shardkit.writers.dedup.outcomes import OUTCOME, SplitRemovals
from shardkit.writers.dedup.population import SplitDocuments
from shardkit.writers.dedup.rewriting import left_of
from shardkit.writers.exchange.exchange import Limits, RunWriter
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.kernels import line_units as lines_units
from shardkit.writers.kernels.line_units import cut_spans, cut_units, find_spans, find_units, span_windows
from shardkit.writers.stages.exact import EQUAL_TEXTS, remove_equal
from shardkit.writers.stages.passes import exact_keys
from support.documents import write_documents
from support.task_folders import TaskFolders, commit_folder

Document = tuple[bytes, int, str]  # id, source, text
SMALL = Limits(fan_in=3, least_segments=4, block_bytes=200, read_bytes=400)

LINES = st.lists(st.sampled_from(["", " ", "a", "ab", "  ab", "ab\r", "\u00e9\u00e9b", "\u3000", "x" * 40]))
TEXTS = LINES.map("\n".join)
CONFIGS = st.builds(
    LinesDedupConfig,
    unit=st.sampled_from(["line", "paragraph"]),
    min_characters=st.integers(1, 5),
    keep=st.integers(1, 3),
)
# Few words, so that windows are equal and values are; passages, so that texts share long runs.
WORD = st.sampled_from(["a", "b", "a b", "\u00e9t\u00e9", "\u6f22\u5b57", "x\u5b57y", "\u0e01", "-", "word"])
SPACE = st.sampled_from([" ", " ", " ", "  ", "\n", "\n\n", " \n", "\u3000", "\r\n", "\x1f", ""])
PASSAGE = st.lists(st.tuples(WORD, SPACE).map("".join), max_size=30).map("".join)
SHARED = [
    "".join(f"{word % 7}{' ' * (word % 5 < 4)}\u5b57 w{word}\n" for word in range(at, at + 9))
    for at in (0, 3, 50)
]
SPAN_TEXTS = st.lists(st.one_of(st.sampled_from(SHARED), PASSAGE, SPACE), max_size=5).map("".join)
SPAN_CONFIGS = st.builds(
    LinesDedupConfig, unit=st.just("span"), words=st.integers(8, 13), keep=st.integers(1, 2)
)


def write_split(path: Path, documents: list[Document], batch_rows: int = 3) -> Path:
    ids, sources, texts = ([document[place] for document in documents] for place in range(3))
    return write_documents(path, texts, batch_rows=batch_rows, document_id=ids, source=sources)  # type: ignore[arg-type]


def read_documents(path: Path) -> list[Document]:
    table = pa.ipc.open_file(path).read_all()
    return list(
        zip(*(table.column(name).to_pylist() for name in ("document_id", "source", "text")), strict=True)
    )


def dedup(
    folder: Path, splits: list[list[Document]], config: LinesDedupConfig, partitions: int, exact: bool
) -> list[Commit]:
    """All three steps, and exact dedup before them if so wanted: each split's last commit."""
    described, cleaned = [], []
    for number, documents in enumerate(splits):
        source = folder / f"split-{number}"
        source.mkdir(parents=True)
        write_split(source / "documents.arrow", documents)
        with RunWriter(source / KEYS.file, KEYS, memory_bytes=1 << 20) as keys:
            first = 0
            for batch in pa.ipc.open_file(source / "documents.arrow").read_all().to_batches():
                keys.write(exact_keys(batch, first_row=first))
                first += batch.num_rows
        cleaned.append(commit_folder(source, "clean", source.name))
        size = sum(len(text) for *_, text in documents)
        described.append(SplitDocuments(source.name, cleaned[-1].file("documents.arrow"), size))
    run = TaskFolders(folder)
    removals = [SplitRemovals() for _ in splits]
    if exact:
        count = sum(map(len, splits))
        halves = replace(SMALL, partition_bytes=(count // 2 + 1) * KEYS.dtype.itemsize)
        _, tables = remove_equal(run, EQUAL_TEXTS, KEYS, cleaned, count, "first", 1 << 20, halves)
        removals = [SplitRemovals({"exact_duplicate": table}) for table in tables]
    lines = sum(text.count("\n") + 1 for split in splits for *_, text in split)
    rows = max(1, -(-lines // partitions))
    limits = replace(SMALL, partition_bytes=rows * LINE_KEYS.dtype.itemsize)
    return remove_lines(run, described, removals, config, 5000, limits=limits)


def _priority(document: Document) -> tuple[int, bytes, bytes]:
    id, source, text = document
    return source, xxhash.xxh3_128_digest(text.encode())[:8], id


def brute_force(documents: list[Document], config: LinesDedupConfig, exact: bool) -> list[Document]:
    """The documents that stay with what is left of them, by dictionaries over everything."""
    ranked = sorted(documents, key=_priority)
    if exact:
        ranked = list({text: (id, source, text) for id, source, text in reversed(ranked)}.values())
        ranked.sort(key=_priority)
    had: dict[Hashable, int] = {}
    left = []
    for id, source, text in ranked:
        units = _units(text, config)
        cut = {number for number, unit in units if had.get(unit, 0) >= config.keep}
        for unit in {unit for _, unit in units}:
            had[unit] = had.get(unit, 0) + 1
        rest = _without(text, cut, config) if cut else text
        if not cut or rest.strip():
            left.append((id, source, rest))
    return left


def _units(text: str, config: LinesDedupConfig) -> list[tuple[int, Hashable]]:
    if config.unit == "span":
        return [*reference_spans(text, config.words)]
    return [*reference_units(text, config)]


def _without(text: str, units: Collection[int], config: LinesDedupConfig) -> str:
    if config.unit == "span":
        return reference_cut_spans(text, units, config.words)
    return reference_cut(text, units, config)


@pytest.mark.extended
@settings(max_examples=60, deadline=None)
@given(
    corpus=st.one_of(
        st.tuples(st.lists(TEXTS, max_size=14), CONFIGS),
        st.tuples(st.lists(SPAN_TEXTS, max_size=14), SPAN_CONFIGS),
    ),
    seed=st.integers(0, 1 << 30),
    splits=st.integers(1, 4),
    partitions=st.integers(1, 5),
    exact=st.booleans(),
)
def test_what_is_left_is_what_dictionaries_leave_for_any_splits_partitions_and_runs(
    tmp_path_factory: pytest.TempPathFactory,
    corpus: tuple[list[str], LinesDedupConfig],
    seed: int,
    splits: int,
    partitions: int,
    exact: bool,
) -> None:
    texts, config = corpus
    rng = random.Random(seed)
    documents = [(rng.randbytes(16), rng.randrange(2), text) for text in texts]
    cut = [documents[at::splits] for at in range(splits)]
    results = dedup(tmp_path_factory.mktemp("lines"), cut, config, partitions, exact)
    expected = {document[0]: document for document in brute_force(documents, config, exact)}
    for commit, before in zip(results, cut, strict=True):
        out = commit.folder
        left = [expected[id] for id, _, _ in before if id in expected]
        assert read_documents(out / "documents.arrow") == left
        rows = [row for row, (id, _, _) in enumerate(before) if id in expected]
        assert np.load(out / "rows.npy").tolist() == rows
        ledger = commit.ledger()
        ledger.check("test")
        assert ledger.read.bytes == sum(len(text.encode()) for *_, text in before)
        assert ledger.kept.bytes == sum(len(text.encode()) for *_, text in left)
        copies = dict(left_of(commit).read(OUTCOME)[["row", "copies"]].tolist())
        same = [texts.count(before[row][2]) if exact else 1 for row in rows]
        assert copies == {row: count for row, count in enumerate(same) if count > 1}


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=5), config=CONFIGS, data=st.data())
def test_kernels_find_and_cut_what_the_references_do(
    texts: list[str], config: LinesDedupConfig, data: st.DataObject
) -> None:
    array = pa.array(["before", *texts], pa.large_string())[1:]
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts))))
    units = find_units(array, wanted, config)
    expected = [
        (document, number, reference_hash(unit.encode()))
        for document, text in enumerate(texts)
        if wanted[document]
        for number, unit in reference_units(text, config)
    ]
    hashes = [high << 64 | low for high, low in zip(units.high.tolist(), units.low.tolist(), strict=True)]
    assert list(zip(units.document.tolist(), units.unit.tolist(), hashes, strict=True)) == expected
    chosen = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(expected), max_size=len(expected))), bool
    )
    document, unit = units.document[chosen], units.unit[chosen]
    left, blank = cut_units(array, document, unit, config.unit)
    for number, text in enumerate(texts):
        numbers = unit[document == number].tolist()
        assert left[number].as_py() == (reference_cut(text, numbers, config) if numbers else text)
        assert blank[number] == (bool(numbers) and not left[number].as_py().strip())


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(SPAN_TEXTS, min_size=1, max_size=4), words=st.integers(8, 13), data=st.data())
def test_kernels_find_and_cut_the_spans_that_the_references_do(
    texts: list[str], words: int, data: st.DataObject
) -> None:
    array = pa.array(["before", *texts], pa.large_string())[1:]
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts))))
    units = find_spans(array, wanted, words)
    expected = [
        (document, first, value)
        for document, text in enumerate(texts)
        if wanted[document]
        for first, value in reference_spans(text, words)
    ]
    hashes = [high << 64 | low for high, low in zip(units.high.tolist(), units.low.tolist(), strict=True)]
    assert list(zip(units.document.tolist(), units.unit.tolist(), hashes, strict=True)) == expected
    assert units.found == sum(
        len(reference_words(text)) for text, yes in zip(texts, wanted, strict=True) if yes
    )
    size, _ = span_windows(words)
    places = [
        (document, first)
        for document, text in enumerate(texts)
        for first in range(len(reference_words(text)) - size + 1)
        if data.draw(st.booleans())
    ]
    document, first = (np.array([place[at] for place in places], kind) for at, kind in ((0, "i8"), (1, "u4")))
    left, blank = cut_spans(array, document, first, words)
    for number, text in enumerate(texts):
        firsts = first[document == number].tolist()
        assert left[number].as_py() == (reference_cut_spans(text, firsts, words) if firsts else text)
        assert blank[number] == (bool(firsts) and not left[number].as_py().strip())


@settings(max_examples=200, deadline=None)
@given(first=SPAN_TEXTS, second=SPAN_TEXTS, words=st.integers(8, 30))
def test_a_shared_span_of_so_many_words_is_cut_but_for_a_third_at_each_end(
    first: str, second: str, words: int
) -> None:
    units = find_spans(pa.array([first, second], pa.large_string()), np.ones(2, bool), words)
    had, size = set(units.high[units.document == 0].tolist()), span_windows(words)[0]
    cut = {
        word
        for at, high in zip(
            *(field[units.document == 1].tolist() for field in (units.unit, units.high)), strict=True
        )
        if high in had
        for word in range(at, at + size)
    }
    old, new = reference_words(first), reference_words(second)
    shared: set[int] = set()  # words in runs of `size` that the first text has
    lengths = {-1: [0] * (len(new) + 1)}  # of the common run that ends with these two words
    for row, one in enumerate(old):
        lengths[row] = [0] * (len(new) + 1)
        for at, other in enumerate(new):
            lengths[row][at] = lengths[row - 1][at - 1] + 1 if one == other else 0
    for row in range(len(old)):
        for at in range(len(new)):
            length = lengths[row][at]
            if length >= size:
                shared.update(range(at - length + 1, at + 1))
            if length >= words:
                inner = range(at - length + 1 + words // 3, at + 1 - words // 3)
                assert cut.issuperset(inner), (row, at, length)
    assert cut <= shared


def test_spans_are_cut_wherever_they_begin_and_paragraphs_stay_apart() -> None:
    notice = (
        "This site uses cookies to improve your experience and by staying here you agree to our use of them"
    )
    config = LinesDedupConfig(unit="span", words=10)
    texts = [
        f"One. {notice}",
        f"Two begins so. {notice}\n\nAnd ends\nso.",
        f"\n\n{notice}\n",
        "Untouched\n\n",
    ]
    array = pa.array(texts, pa.large_string())
    units = find_spans(array, np.ones(4, bool), config.words)
    had = set(units.high[units.document == 0].tolist())
    again = np.array([high in had for high in units.high.tolist()]) & (units.document > 0)
    left, blank = cut_spans(array, units.document[again], units.unit[again], config.words)
    words = [len(reference_words(text)) for text in left.to_pylist()]
    assert words[0] == 20
    assert words[1] - 6 <= 6
    assert words[2] <= 6
    assert left[3].as_py() == texts[3]
    assert left[1].as_py().startswith("Two begins so.")
    assert left[1].as_py().endswith("\n\nAnd ends\nso.")
    assert left[2].as_py().startswith("\n\n")
    assert left[2].as_py().endswith("\n")
    assert blank.tolist() == [False] * 4


@settings(deadline=None)
@given(st.binary(max_size=70))
def test_hashes_of_bytes_of_any_length_are_those_of_the_reference(data: bytes) -> None:
    high, low = lines_units._hash(np.frombuffer(b"-" + data, np.uint8), 1, len(data) + 1)
    assert int(high) << 64 | int(low) == reference_hash(data)


def test_the_hash_is_murmurhash3() -> None:
    # mmh3.hash64("foo", signed=False), as its documentation has it
    assert reference_hash(b"foo") == 16316970633193145697 << 64 | 9128664383759220103
    assert reference_hash(b"") == 0


def test_paragraphs_go_with_the_blank_lines_after_them_and_lines_with_their_line_feed() -> None:
    paragraph = LinesDedupConfig(unit="paragraph", min_characters=1)
    text = "\n\nfirst\nof two\n \n\n second \n\nthird"
    assert reference_units(text, paragraph) == [(0, "first\nof two"), (1, "second"), (2, "third")]
    assert reference_cut(text, {0}, paragraph) == "\n\n second \n\nthird"
    assert reference_cut(text, {1, 2}, paragraph) == "\n\nfirst\nof two\n \n"
    line = LinesDedupConfig(min_characters=1)
    assert reference_cut("a\nb\nc", {1}, line) == "a\nc"
    assert reference_cut("a\nb\n", {1}, line) == "a\n"
    assert reference_cut("a\nb", {1}, line) == "a"


def test_a_line_of_every_document_costs_partitions_one_row_a_chunk(tmp_path: Path) -> None:
    documents = [(at.to_bytes(16, "big"), 0, f"the same line\nline {at}") for at in range(500)]
    write_split(tmp_path / "documents.arrow", documents, batch_rows=100)
    config = LinesDedupConfig(min_characters=5)
    file = Artifact(tmp_path / "documents.arrow")
    for memory_bytes, chunks in ((1 << 20, 1), (32_000, 10)):
        counts = write_line_keys(tmp_path, file, config, SplitRemovals(), memory_bytes)
        assert counts == LineKeys(lines=1000, compared=1000, keys=500 + chunks)
