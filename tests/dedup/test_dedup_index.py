"""The index: what stayed alone, the same bytes however made, used only where settings fit, damage named."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.errors import BuildError, RecipeError
from shardkit.hashing import hash_file
from shardkit.writers import index_build, index_files
from shardkit.writers.dedup.blocks import PLACES
from shardkit.writers.dedup.compare import PairRule, compare_pairs
from shardkit.writers.dedup.config import MinHashConfig, NearDedupConfig
from shardkit.writers.dedup.index import (
    BANDS_OF_INDEX,
    INDEX_FILE,
    PART_FILES,
    TABLE_FILES,
    WORDS,
    DedupIndex,
    check_indexable,
    open_index,
)
from shardkit.writers.dedup.near import find_near_duplicates
from shardkit.writers.dedup.outcomes import Removed
from shardkit.writers.dedup.population import (
    DOCUMENTS_FILE,
    INDEX_PRINTS,
    INDEXED,
    Part,
    priority,
)
from shardkit.writers.dedup.shingle_store import TEXTS as TEXTS_RUN
from shardkit.writers.dedup.shingle_store import Sets, distinct_sets, indexed_rows, write_texts
from shardkit.writers.dedup.signatures import SIGN, bands_and_rows, print_bytes, sign_batch, sign_documents
from shardkit.writers.dedup.sketches import SKETCHES_FILE, read_sketches
from shardkit.writers.dedup.tables import RowFile, Rows, RowsWriter
from shardkit.writers.exchange.exchange import RunWriter
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS, BlockWriter, payload_ends
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.index_files import index_part
from shardkit.writers.kernels.shingles import shingle_batch
from support.dedup_indexes import make_index
from support.documents import write_documents
from support.small_build import tree
from support.task_folders import read_run, slice_of

CONFIG = NearDedupConfig(minhash=MinHashConfig(permutations=32), bands=8, rows=4)
MADE_FROM = {"recipe_digest": "0123", "inputs": [{"source": "old", "files": 2}]}
COPIED = {3: 5, 40: 2, 77: 9}  # documents that stand for so many
NONE = np.zeros(0, np.int64)


def write_records(path: Path, texts: dict[int, str], **settings: Any) -> Path:
    """{record: text}, with ids as a build gives them."""
    return write_documents(path, list(texts.values()), records=list(texts), **settings)


def made_texts(count: int, seed: int = 0) -> dict[int, str]:
    """Families of documents of 10 to 300 words; of the members of one some are near-duplicates."""
    rng = random.Random(seed)
    families = [[f"w{rng.randrange(5000)}" for _ in range(rng.randrange(10, 300))] for _ in range(count // 4)]
    texts = {}
    for record in range(count):
        words = list(rng.choice(families))
        for _ in range(rng.choice([0, 1, 1, 2, 5, 20])):
            words[rng.randrange(len(words))] = f"x{rng.randrange(10**9)}"
        texts[record] = " ".join(words)
    return texts


def signed(
    folder: Path, texts: dict[int, str], config: NearDedupConfig = CONFIG, copied: dict[int, int] = COPIED
) -> tuple[Path, Path]:
    """(Arrow file, part folder); `copied` by row."""
    folder.mkdir(parents=True)
    documents = write_records(folder / "documents.arrow", texts)
    part = folder / "part"
    part.mkdir()
    rows, copies = (np.array(list(column), np.int64) for column in (copied.keys(), copied.values()))
    removed = Removed({"exact_duplicate": np.array([1, 2])}, rows, copies)
    how = config.minhash, bands_and_rows(config), config.scope
    sign_documents(Artifact(documents), removed, *how, part)
    return documents, part


TEXTS = made_texts(120) | {10: "…", 119: ""}  # wordless ones are not in the part
NEAR = np.array([0, 118, 60, 61, 62, 63, 64, 65, 66, 67, 5])  # ascending is not asked for
STAYED = [n for n in TEXTS if n not in (1, 2, 10, 119) and n not in NEAR]


def made_index(
    folder: Path,
    config: NearDedupConfig = CONFIG,
    sketch: int = 64,
    texts: Sequence[dict[int, str]] = (TEXTS, made_texts(9, 1)),
    replace: bool = False,
) -> DedupIndex:
    """An index of two splits in folder/index."""
    work = folder / f"work{len(list(folder.glob('work*')))}"
    splits = []
    for number, split in enumerate(texts):
        documents, part = signed(work / str(number), split, config)
        splits.append((documents, part, NEAR if number == 0 else NONE))
    return make_index(
        folder, splits, config, sketch, made_from=MADE_FROM, work=work / "index", replace=replace
    )


def folder_of(index: DedupIndex) -> Path:
    assert isinstance(index.location, Path)
    return index.location


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> DedupIndex:
    return made_index(tmp_path_factory.mktemp("index"))


@pytest.fixture
def index(original: DedupIndex, tmp_path: Path) -> DedupIndex:
    """A copy to damage."""
    shutil.copytree(folder_of(original), tmp_path / "index")
    return open_index(tmp_path / "index")


@pytest.mark.parametrize("memory_bytes", [1 << 29, 10_000])
@pytest.mark.parametrize("sketch", [64, 0])
def test_an_index_part_is_the_part_of_the_documents_that_stayed(
    tmp_path: Path, memory_bytes: int, sketch: int
) -> None:
    documents, part = signed(tmp_path / "all", TEXTS)
    alone = write_records(tmp_path / "stayed.arrow", {record: TEXTS[record] for record in STAYED})
    (tmp_path / "signed").mkdir()
    sign_documents(Artifact(alone), Removed(), CONFIG.minhash, (8, 4), "global", tmp_path / "signed")
    made = []
    for name, file, signatures, removed, memory in (
        ("made", documents, part, NEAR, memory_bytes),
        ("alone", alone, tmp_path / "signed", NONE, 1 << 29),
    ):
        (folder := tmp_path / name).mkdir()
        args = removed, CONFIG.minhash, sketch, folder
        made.append(index_part(Artifact(file), Artifact(signatures), *args, memory_bytes=memory))
    assert tree(tmp_path / "made") == tree(tmp_path / "alone")
    assert replaced(made[0], removed=0) == made[1]
    assert (made[0].documents, made[0].removed) == (len(STAYED), len(NEAR))
    assert made[0].bytes == sum(len(TEXTS[record]) for record in STAYED)
    texts = pa.array([TEXTS[record] for record in STAYED], pa.large_string())
    sets = distinct_sets(np.arange(len(STAYED), dtype=np.uint64), *shingle_batch(texts, CONFIG.minhash))
    rows = np.load(tmp_path / "made" / DOCUMENTS_FILE)
    assert rows["distinct"].tolist() == sets.rows["distinct"].tolist()
    assert rows["stored"].tolist() == np.minimum(sets.rows["distinct"], sketch or 1 << 30).tolist()
    assert made[0].sketches == int((rows["stored"] < rows["distinct"]).sum())
    assert bool(made[0].sketches) == bool(sketch)
    values = sign_batch(texts, CONFIG.minhash).values
    assert np.array_equal(np.load(tmp_path / "made" / INDEX_PRINTS), print_bytes(values))


def test_tables_lead_to_the_documents_of_all_parts_in_the_order_of_keys(original: DedupIndex) -> None:
    words, bands = (table.slice(0, 1 << 64).read()[0] for table in (original.words, original.bands))
    assert sorted(words["number"].tolist()) == list(range(original.documents))
    assert sorted(bands["number"].tolist()) == sorted([*range(original.documents)] * 8)
    for table, rows in ((original.words, words), (original.bands, bands)):
        assert (rows["key"][1:] >= rows["key"][:-1]).all()
        wanted = np.unique(np.append(rows["key"][::7], np.uint64(5)))
        found = table.slice(0, 1 << 64).matching(wanted)
        assert np.array_equal(found, rows[np.isin(rows["key"], wanted)])


def test_an_index_opens_as_parts_and_tells_what_it_is(original: DedupIndex) -> None:
    original.verify()
    again = open_index(folder_of(original))
    assert again.documents == len(STAYED) + 7
    assert again.parts == [
        Part(Artifact(folder_of(original) / "part-00000"), len(STAYED), "index"),
        Part(Artifact(folder_of(original) / "part-00001"), 7, "index"),
    ]
    assert again.parts[0].folder.content != again.parts[1].folder.content
    facts = again.to_dict()
    assert (facts["sketch"], facts["parts"], facts["made_from"]) == (64, 2, MADE_FROM)
    tables = [path for path in folder_of(original).rglob("*-0*/*") if path.is_file()]
    assert facts["stored_bytes"] == sum(path.stat().st_size for path in tables)
    again.check(CONFIG.model_copy(update={"similarity": 0.9, "small_shingles": 3}))


def test_the_same_documents_make_the_same_bytes(original: DedupIndex, tmp_path: Path) -> None:
    again = made_index(tmp_path)
    assert tree(folder_of(again)) == tree(folder_of(original))
    assert again.digest == original.digest
    assert made_index(tmp_path, sketch=65, replace=True).digest != original.digest


def test_a_split_that_lost_all_its_documents_is_an_empty_part(tmp_path: Path) -> None:
    documents, part = signed(tmp_path / "all", {0: "a b c d e f", 1: "", 2: ""}, copied={})
    index = make_index(tmp_path, [(documents, part, np.array([0]))], CONFIG, 64)
    assert index.documents == index.parts[0].documents == 0
    dump = write_records(tmp_path / "dump.arrow", {0: "a b c d e f"})
    found = find_near_duplicates([dump], CONFIG, folder=tmp_path / "work", indexes=[index])
    assert not len(found.losers)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"minhash": {"permutations": 40}},
            "settings: minhash.permutations is 32 in the index, 40 here; use",
        ),
        (
            {"minhash": {"permutations": 32, "ngram": 6}},
            "settings: minhash.ngram is 5 in the index, 6 here; use",
        ),
        ({"bands": 4}, "settings: bands is 8 in the index, 4 here; use"),
        ({"bands": 6, "rows": 5}, "bands is 8 in the index, 6 here; rows is 4 in the index, 5 here; use"),
        ({"scope": "source"}, "by_source is False in the index, True here; use"),
    ],
)
def test_settings_that_do_not_fit_are_named(
    original: DedupIndex, changed: dict[str, Any], message: str
) -> None:
    plain = {"minhash": {"permutations": 32}, "bands": 8, "rows": 4} | changed
    with pytest.raises(RecipeError) as caught:
        original.check(NearDedupConfig.model_validate(plain), "dedup.near.against[1]")
    assert str(caught.value).startswith(
        f"dedup.near.against[1]: {folder_of(original)} was made with different"
    )
    assert message in str(caught.value)


def edit(index: DedupIndex, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder_of(index) / INDEX_FILE
    data = json.loads(file.read_bytes())
    change(data)
    file.write_text(json.dumps(data))


@pytest.mark.parametrize("name", ["normalization", "probe"])
def test_an_index_of_another_unicode_version_or_of_other_hashes_does_not_fit(
    index: DedupIndex, name: str
) -> None:
    edit(index, lambda data: data["settings"].update({name: "another"}))
    with pytest.raises(RecipeError, match=f"settings: {name} is another in the index, [^;]* here; use"):
        open_index(folder_of(index)).check(CONFIG)


def test_an_older_index_of_another_hash_scheme_does_not_fit(index: DedupIndex) -> None:
    assert open_index(folder_of(index)).settings["minhash"]["scheme"] == "shardkit", "as older ones name it"
    edit(index, lambda data: data["settings"]["minhash"].update(scheme="datasketch"))
    with pytest.raises(
        RecipeError, match=r"settings: minhash\.scheme is datasketch in the index, shardkit here"
    ):
        open_index(folder_of(index)).check(CONFIG)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format=5), "is format 5, this shardkit reads format 4; make"),
        (lambda data: data.clear(), "is format None, this"),
        (lambda data: data["parts"][1].update(folder="../part-00001"), r"parts\.1\.folder: .*pattern"),
        (lambda data: data["parts"][0]["files"].pop("prints.npy"), "part-00000 does not list exactly"),
        (lambda data: data["tables"][0]["files"].pop("words.run"), "table-00000 does not list exactly"),
        (lambda data: data.update(tables=[]), "lists no tables"),
        (lambda data: data["parts"][0]["files"].update({"../x": {}}), r"parts\.0\.files"),
        (lambda data: data.update(documents=-1), "documents: .*greater than or equal to 0"),
        (lambda data: data.update(documents=1), "`documents` is not the sum over the parts"),
    ],
)
def test_a_record_that_is_not_ours_is_refused(
    index: DedupIndex, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit(index, change)
    with pytest.raises(BuildError, match=message):
        open_index(folder_of(index))


def test_damage_is_named(index: DedupIndex, tmp_path: Path) -> None:
    table = folder_of(index) / "part-00001" / "prints.npy"
    data = table.read_bytes()
    table.write_bytes(data[:-1])
    with pytest.raises(BuildError, match=r"part-00001/prints.npy: is 735 bytes, expected 736"):
        open_index(folder_of(index))
    table.unlink()
    with pytest.raises(BuildError, match=r"part-00001/prints.npy: cannot be read: No such file"):
        open_index(folder_of(index))
    table.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(BuildError, match=r"part-00001/prints.npy: has xxh3-128 [0-9a-f]{32}, expected"):
        open_index(folder_of(index)).verify()
    (folder_of(index) / INDEX_FILE).write_text("{")
    with pytest.raises(BuildError, match="is not valid JSON"):
        open_index(folder_of(index))
    with pytest.raises(BuildError, match=r"cannot be read: No such file .*shardkit dedup-index"):
        open_index(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "read"),
    [("documents.npy", lambda file: Rows(file, INDEXED)), ("prints.npy", RowFile)],
)
def test_damage_that_is_met_while_an_index_is_used_does_not_ask_for_the_work_folder(
    index: DedupIndex, name: str, read: Callable[[Artifact], object]
) -> None:
    file = index.parts[1].folder / name
    data = file.read_bytes()
    file.path.write_bytes(data[:8] + bytes([data[8] ^ 1]) + data[9:])
    with pytest.raises(BuildError, match=rf"part-00001/{name}: .*; make the index again$"):
        read(file)


def test_another_index_is_replaced_only_on_request_and_whole(tmp_path: Path) -> None:
    first = made_index(tmp_path)
    record = folder_of(first) / INDEX_FILE
    before, number = tree(folder_of(first)), record.stat().st_ino
    made_index(tmp_path)
    assert record.stat().st_ino == number  # the very same index: not touched
    with pytest.raises(BuildError, match="holds another index; use --replace"):
        made_index(tmp_path, texts=[TEXTS])
    assert tree(folder_of(first)) == before
    made_index(tmp_path, texts=[TEXTS], replace=True)
    assert sorted(path.name for path in folder_of(first).iterdir()) == [
        INDEX_FILE,
        "part-00000",
        "table-00000",
    ]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] == ".") == []


def test_a_damaged_index_can_be_replaced(index: DedupIndex) -> None:
    before = tree(folder_of(index))
    (folder_of(index) / "part-00000" / "prints.npy").write_bytes(b"")
    with pytest.raises(BuildError, match="make the index again, with --replace"):
        made_index(folder_of(index).parent)
    assert tree(folder_of(made_index(folder_of(index).parent, replace=True))) == before


def test_files_that_no_index_has_are_never_removed(index: DedupIndex, tmp_path: Path) -> None:
    (folder_of(index) / "part-00000" / "notes.txt").write_text("mine")
    with pytest.raises(BuildError, match=r"not part of an index \(first: part-00000/notes.txt\)"):
        made_index(folder_of(index).parent, texts=[TEXTS], replace=True)
    (tmp_path / "other" / "index").mkdir(parents=True)
    made_index(tmp_path / "other")  # an empty folder is no obstacle
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "index").write_text("mine")
    with pytest.raises(BuildError, match="is not a folder"):
        made_index(tmp_path / "file", replace=True)


def test_what_interrupts_a_publication_leaves_the_old_index_or_is_made_good(
    index: DedupIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, before = folder_of(index).parent, tree(folder_of(index))

    def full(source: Path, target: Path) -> None:
        if target.name == SKETCHES_FILE:
            raise OSError(28, "No space left on device", str(target))
        target.write_bytes(source.read_bytes())

    with monkeypatch.context() as patch:
        patch.setattr(index_build, "link_or_copy", full)
        with pytest.raises(BuildError, match=r"No space left on device.*run the same command again"):
            made_index(folder, texts=[TEXTS], replace=True)
    assert tree(folder_of(index)) == before
    folder_of(index).rename(folder / ".index.replaced")  # a crash between the renames
    made_index(folder, texts=[TEXTS])
    assert sorted(path.name for path in folder.iterdir() if path.name[0] == ".") == []


@pytest.mark.parametrize("memory_bytes", [2000, 1 << 20])
def test_sketches_take_part_as_they_are_stored_under_numbers_of_the_population(
    original: DedupIndex, tmp_path: Path, memory_bytes: int
) -> None:
    part, first = original.parts[0], 1 << 33
    rows = [0, 3, 4, 5, 50, len(STAYED) - 1]
    wanted = [(first + row, block) for row in rows for block in ([3, 1] if row == 4 else [2])]
    with RunWriter(tmp_path / PLACES.file, PLACES, memory_bytes=1 << 20) as run:
        run.write(np.array(wanted, PLACES.dtype))
    places = slice_of(tmp_path / PLACES.file, PLACES).within(first, first + part.documents)
    sent = write_texts(tmp_path, part, None, places, memory_bytes)
    assert (sent.documents, sent.texts) == (len(rows), len(wanted))
    found, payload = slice_of(tmp_path / TEXTS_RUN.file, TEXTS_RUN).read()
    assert sorted(zip(found["number"].tolist(), found["key"].tolist(), strict=True)) == sorted(wanted)
    blocks = found["key"]
    assert (found["number"][1:] > found["number"][:-1])[blocks[1:] == blocks[:-1]].all()
    ends = payload_ends(found, TEXTS_RUN)
    once = np.flatnonzero(blocks != 3)[np.argsort(found["number"][blocks != 3])]
    payload = np.concatenate([payload[ends[at] : ends[at + 1]] for at in once])
    found = found[once]
    described = np.load((part.folder / DOCUMENTS_FILE).path)[rows]
    assert found["priority"].tolist() == priority(described, "index").tolist()
    [(_, hashes)] = read_sketches(part.folder, np.array(rows))
    assert payload.view("<u8").tolist() == hashes.tolist()
    assert (found["size"] // 8).tolist() == described["stored"].tolist()
    for name in ("distinct", "total"):
        assert found[name].tolist() == described[name].tolist()


def test_the_error_of_sketches_is_the_stated_one(tmp_path: Path) -> None:
    rng = random.Random(5)
    texts, likes = {}, []
    for record in range(150):
        words = [f"w{rng.getrandbits(60)}" for _ in range(1000)]
        texts[record] = " ".join(words)
        likes.append(" ".join([*words[:889], *(f"x{rng.getrandbits(60)}" for _ in range(111))]))
    index = made_index(tmp_path, sketch=200, texts=[{}, texts])
    part, rows = index.parts[1], np.arange(index.parts[1].documents)
    [(described, hashes)] = read_sketches(part.folder, rows)
    sketches = Sets.of(*indexed_rows(described, hashes))
    kept = pa.array([text for record, text in enumerate(likes) if record not in (1, 2)], pa.large_string())
    whole = distinct_sets(rows.astype(np.uint64), *shingle_batch(kept, CONFIG.minhash))
    any_similarity = CONFIG.model_copy(update={"similarity": 1e-9})
    estimated = compare_pairs(sketches, whole, rows, rows, PairRule.of(any_similarity)).jaccard
    true = 885 / (2 * 996 - 885)  # 0.7995
    bound = (true * (1 - true) / 200) ** 0.5
    assert abs(float(estimated.mean()) - true) < 4 * bound / 148**0.5
    assert 0.6 * bound < float(np.sqrt(((estimated - true) ** 2).mean())) < 1.15 * bound


def test_a_dump_loses_to_an_index_what_it_would_lose_to_the_corpus_itself(tmp_path: Path) -> None:
    texts = made_texts(200, seed=9)
    old, new = ({n: text for n, text in texts.items() if n % 2 == side} for side in (0, 1))
    paths = [write_records(tmp_path / f"{name}.arrow", some) for name, some in (("old", old), ("new", new))]
    alone = find_near_duplicates(paths[:1], CONFIG, folder=tmp_path / "old-work", to_index=True)
    [part] = (tmp_path / "old-work" / "signatures").iterdir()
    index = make_index(tmp_path, [(paths[0], part, alone.losers["row"])], CONFIG, 0)
    found = find_near_duplicates(paths[1:], CONFIG, folder=tmp_path / "new-work", indexes=[index])
    as_second = write_records(tmp_path / "second.arrow", new, source=[1] * len(new))
    together = find_near_duplicates([paths[0], as_second], CONFIG, folder=tmp_path / "both-work")
    expected = together.losers["row"][together.losers["split"] == 1].tolist()
    assert found.losers["row"].tolist() == expected
    assert 20 < found.result.decided.kept_by_index <= len(expected) < len(new)


def test_tables_of_many_ranges_lead_to_the_same_documents(
    original: DedupIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_files, "_TABLE_BYTES", 1000)
    many = made_index(tmp_path)
    assert len(many.record.tables) > 5
    for one, other in ((original.words, many.words), (original.bands, many.bands)):
        (rows, _), (same, _) = (table.slice(0, 1 << 64).read() for table in (one, other))
        assert np.array_equal(rows, same)
        assert np.array_equal(other.slice(0, 1 << 64).matching(np.unique(rows["key"])), rows)
    dump = write_records(tmp_path / "dump.arrow", made_texts(60, seed=2) | {n: TEXTS[n] for n in STAYED[60:]})
    found = [
        find_near_duplicates([dump], CONFIG, folder=tmp_path / f"run{at}", indexes=[index]).losers.tolist()
        for at, index in enumerate((original, many))
    ]
    assert found[0] == found[1]
    assert len(found[0]) > 30


def test_what_an_index_has_already_is_neither_signed_nor_compared(
    original: DedupIndex, tmp_path: Path
) -> None:
    first = [TEXTS[record] for record in STAYED]
    others = {200: " ".join(f"n{at}" for at in range(60)), 201: first[3].upper() + " !", 202: "…"}
    dump = write_records(tmp_path / "dump.arrow", TEXTS | others, file="new.jsonl")
    found = find_near_duplicates([dump], CONFIG, folder=tmp_path / "work", indexes=[original])
    texts = [*TEXTS.values(), *others.values()]
    words = [" ".join(text.lower().replace("!", "").split()) for text in texts]
    known = {row for row, text in enumerate(words) if text in first}
    assert len(STAYED) < len(known)
    [part] = found.result.parts
    inputs = SIGN.result(part).documents
    assert inputs + len(known) == sum(bool(re.search(r"\w", text)) for text in texts)
    booked = {int(row["row"]): int(row["kept"]) for row in found.losers}
    assert {row: booked[row] - inputs for row in known} == {row: first.index(words[row]) for row in known}
    assert found.result.counts["equal"] >= len(known)
    assert found.result.counts["documents"] == inputs + len(known)
    compared = np.load(tmp_path / "work" / "signatures" / part.folder.name / DOCUMENTS_FILE)["row"]
    assert not known & set(compared.tolist())


def test_recipes_that_no_index_can_be_made_of_are_refused() -> None:
    assert check_indexable(CONFIG, 0) is CONFIG
    with pytest.raises(RecipeError, match=r"^dedup\.near: is not set"):
        check_indexable(None, 64)
    with pytest.raises(RecipeError, match=r"^dedup\.near\.scope: is source"):
        check_indexable(CONFIG.model_copy(update={"scope": "source"}), 64)
    with pytest.raises(ValueError, match="sketch is 63 hashes"):
        check_indexable(CONFIG, 63)


# Made by others: sizes and hashes are stated right, the content is not.

EXTREMES = (-1, 0, -(1 << 31), 1 << 20)  # of these, the second and the fourth go into every other row
TABLES = {DOCUMENTS_FILE: INDEXED, WORDS.file: WORDS.dtype, BANDS_OF_INDEX.file: BANDS_OF_INDEX.dtype}
RUNS = {table.file: table for table in (WORDS, BANDS_OF_INDEX)}
COMPARE = """
import shutil, sys
from pathlib import Path
from shardkit.errors import BuildError
from shardkit.writers.dedup.config import MinHashConfig, NearDedupConfig
from shardkit.writers.dedup.index import open_index
from shardkit.writers.dedup.near import find_near_duplicates

config = NearDedupConfig(minhash=MinHashConfig(permutations=32), bands=8, rows=4)
documents, folder = map(Path, sys.argv[1:])
for index in sorted(folder.iterdir()):
    try:
        find_near_duplicates([documents], config, folder=folder / "work", indexes=[open_index(index)])
        print(index.name, "compared", sep="\\t")
    except BuildError as error:
        print(index.name, error, sep="\\t")
    shutil.rmtree(folder / "work", ignore_errors=True)
"""


def written(index: DedupIndex, folder: Path, name: str, data: bytes) -> Path:
    """A copy of the index in which a file of the first part or table has these bytes, as its record says."""
    shutil.copytree(folder_of(index), folder)
    kind = "tables" if name in RUNS else "parts"
    record = json.loads((folder / INDEX_FILE).read_text())
    listed = record[kind][0]
    path = folder / listed["folder"] / name
    path.write_bytes(data)
    listed["files"][name] = {"bytes": len(data), "xxh3_128": hash_file(path, ["xxh3_128"])["xxh3_128"]}
    (folder / INDEX_FILE).write_text(json.dumps(record))
    return folder


def file_of(index: DedupIndex, name: str) -> Path:
    return folder_of(index) / ("table-00000" if name in RUNS else "part-00000") / name


def with_field(index: DedupIndex, folder: Path, name: str, field: str, value: int, rows: slice) -> Path:
    path = file_of(index, name)
    table = read_run(path, RUNS[name]) if name in RUNS else np.load(path)
    table[field][rows] = np.array(value).astype(TABLES[name][field].base, casting="unsafe")
    data = folder.with_name("data")
    if name in RUNS:
        with BlockWriter(data, RUNS[name], table.nbytes, DEFAULT_LIMITS) as writer:
            writer.write(table, np.empty(0, np.uint8))
    else:
        with RowsWriter(data, table.dtype) as rows_of_table:
            rows_of_table.write(table)
    changed = data.read_bytes()
    data.unlink()
    return written(index, folder, name, changed)


def compared(documents: Path, folder: Path) -> dict[str, str]:
    """{folder of an index: what came of comparing with it}; the process that does it must live to the end."""
    command = [sys.executable, "-c", COMPARE, str(documents), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert not done.returncode, done.stderr
    return dict(line.split("\t", 1) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of which many are in the index."""
    return write_records(tmp_path_factory.mktemp("dump") / "dump.arrow", TEXTS, file="new.jsonl")


@pytest.mark.extended
def test_no_field_of_an_index_can_harm_the_process(original: DedupIndex, dump: Path, tmp_path: Path) -> None:
    made = 0
    for name, table in TABLES.items():
        for field in table.names or ():
            for number, value in enumerate(EXTREMES):
                rows = slice(None, None, 1 + number % 2)
                with_field(original, tmp_path / f"{name} {field} {number}", name, field, value, rows)
                made += 1
    found = compared(dump, tmp_path)
    assert len(found) == made > 40
    refused: dict[str, set[str]] = {name: set() for name in TABLES}
    for place, said in found.items():
        name, field, _ = place.split()
        if said != "compared":
            assert name in said
            refused[name].add(field)
    assert refused == {  # what becomes an address; a key of a band that is wrong finds too many or too few
        DOCUMENTS_FILE: {"start", "size", "stored", "distinct", "total"},
        WORDS.file: {"key", "number"},
        BANDS_OF_INDEX.file: {"number"},
    }


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        (
            INDEX_PRINTS,
            np.zeros((105, 31), np.uint8),
            r"rows of \(31,\) uint8, expected \(32,\) uint8",
        ),
        (
            INDEX_PRINTS,
            np.zeros((105, 32), np.uint64),
            r"rows of \(32,\) uint64, expected \(32,\) uint8",
        ),
        (INDEX_PRINTS, np.zeros((104, 32), np.uint8), "has 104 rows, expected 105"),
        (INDEX_PRINTS, np.zeros((32, 105), np.uint8).T, "not a table of rows in C order: shape"),
        (DOCUMENTS_FILE, np.zeros(106, INDEXED), "documents.npy: has 106 rows, expected 105"),
        (DOCUMENTS_FILE, np.zeros(105), "documents.npy: has rows of float64"),
    ],
)
def test_tables_of_other_shapes_are_refused(
    original: DedupIndex, dump: Path, tmp_path: Path, name: str, table: npt.NDArray[Any], message: str
) -> None:
    data = io.BytesIO()
    np.save(data, table)
    folder = written(original, tmp_path / "index", name, data.getvalue())
    with pytest.raises(BuildError, match=message):
        find_near_duplicates([dump], CONFIG, folder=tmp_path / "work", indexes=[open_index(folder)])


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000, 32)}",
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (-105, 32)}",
        b"{'descr': '|u1', 'fortran_order': False, 'shape': ()}",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (105, 32)}",
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (105, 32}",
        b"{'descr'",
        b"(" * 400,
    ],
)
def test_headers_are_believed_only_if_the_file_has_their_bytes(
    original: DedupIndex, tmp_path: Path, header: bytes
) -> None:
    data = (folder_of(original) / "part-00000" / INDEX_PRINTS).read_bytes()
    changed = data[:10] + header.ljust(501) + b"\n" + data[512:]
    folder = written(original, tmp_path / "index", INDEX_PRINTS, changed)
    with pytest.raises(BuildError, match=r"prints\.npy: "):
        open_index(folder)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_bytes_in_an_index_are_compared_or_refused(
    original: DedupIndex, dump: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from((*PART_FILES, *TABLE_FILES)))
    content = bytearray(file_of(original, name).read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(content) - 1))
        new = data.draw(
            st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f", b"\x80"]) | st.binary(max_size=9)
        )
        content[at : at + len(new)] = new[: len(content) - at]
    folder = tmp_path_factory.mktemp("any")
    index = written(original, folder / "index", name, bytes(content))
    with contextlib.suppress(BuildError):
        found = find_near_duplicates([dump], CONFIG, folder=folder / "work", indexes=[open_index(index)])
        assert found.result.counts["documents"]
