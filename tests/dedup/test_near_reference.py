"""The stages on disk give what plain Python gives, however documents, memory and tasks are divided."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.near import ReferenceResult, Text, reference_near
from shardkit.hashing import hash_file
from shardkit.writers.dedup.config import MinHashConfig, NearDedupConfig
from shardkit.writers.dedup.index import DedupIndex
from shardkit.writers.dedup.near import find_near_duplicates, remove_near
from shardkit.writers.dedup.outcomes import Removed, SplitRemovals
from shardkit.writers.dedup.population import DOCUMENTS_FILE, SplitDocuments
from shardkit.writers.dedup.signatures import bands_and_rows, sign_documents
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.stage import Task
from support.dedup_indexes import NOTHING
from support.dedup_indexes import make_index as index_of
from support.documents import write_documents
from support.task_folders import TaskFolders

CONFIG = NearDedupConfig(minhash=MinHashConfig(permutations=32), bands=8, rows=4)
IdResult = tuple[dict[bytes, bytes], dict[bytes, int]]


def make_texts(rng: random.Random, count: int) -> list[Text]:
    """Families of texts that share most words, and what is special: few words, ever the same ones, none."""
    families = [[f"w{rng.randrange(5000)}" for _ in range(rng.choice([8, 40, 70]))] for _ in range(4)]
    families += [["buy", "now"] * 90, ["ÄHNLICH"]]
    texts = []
    for number in range(count):
        words = list(rng.choice(families))
        if len(words) > 1:
            for _ in range(rng.choice([0, 0, 1, 1, 2])):
                words[rng.randrange(len(words))] = f"w{rng.randrange(5000)}"
            words = words[: len(words) - rng.choice([0, 0, 0, 1, 3])]
        text = rng.choice([" ", ", "]).join(words)
        text = rng.choice([text, text.upper(), text + "!", "..." if rng.random() < 0.2 else text])
        value = (None, "x.org", "é")[number % 3]
        texts.append(Text("input", rng.randrange(2), rng.randbytes(16), text, value))
    return texts


def write_texts(path: Path, texts: list[Text], rng: random.Random) -> None:
    """An Arrow file of documents, in batches of any size."""
    columns: dict[str, list[Any]] = {
        "document_id": [text.id for text in texts],
        "source": [text.source for text in texts],
        "metadata": [
            None if text.value is None else json.dumps({"a": 1, "site": text.value}) for text in texts
        ],
    }
    write_documents(path, [text.text for text in texts], batch_rows=rng.choice([1, 7, 1000]), **columns)


def find(
    folder: Path,
    texts: list[Text],
    config: NearDedupConfig,
    files: int,
    memory_bytes: int,
    *,
    index: DedupIndex | None = None,
    indexed: Sequence[Text] = (),
) -> tuple[IdResult, Mapping[str, Any]]:
    """({removed: kept}, {kept: copies}) by ids, of texts in random order in so many files; counts."""
    rng = random.Random(folder.name)
    members: list[list[Text]] = [[] for _ in range(files)]
    for text in rng.sample(texts, len(texts)):
        rng.choice(members).append(text)
    folder.mkdir()
    paths = [folder / f"{number}.arrow" for number in range(files)]
    for path, own in zip(paths, members, strict=True):
        write_texts(path, own, rng)
    indexes = () if index is None else (index,)
    work = folder / "work"
    found = find_near_duplicates(paths, config, folder=work, memory_bytes=memory_bytes, indexes=indexes)
    parts = [
        Artifact(folder)
        for number in range(files)
        for folder in (work / "signatures").glob(f"{number:05d}.*")
    ]
    parts += [part.folder for part in index.parts] if index else []
    ids = {text.rank: text.id for text in (*texts, *indexed)}
    numbered = [ids[bytes(rank)] for part in parts for rank in np.load((part / DOCUMENTS_FILE).path)["id"]]
    removed = {members[row["split"]][row["row"]].id: numbered[row["kept"]] for row in found.losers}
    copies = {members[row["split"]][row["row"]].id: int(row["copies"]) for row in found.winners}
    assert found.result.decided.losers == len(removed) == len(found.losers)
    return (removed, copies), found.result.counts


def make_index(folder: Path, texts: list[Text], config: NearDedupConfig, sketch: int) -> DedupIndex:
    """The index of texts none of which is like another; they keep their order."""
    folder.mkdir()
    write_texts(folder / "texts.arrow", texts, random.Random(0))
    (folder / "part").mkdir()
    how = config.minhash, bands_and_rows(config), config.scope
    sign_documents(Artifact(folder / "texts.arrow"), Removed(), *how, folder / "part")
    return index_of(folder, [(folder / "texts.arrow", folder / "part", NOTHING)], config, sketch)


def by_ids(texts: list[Text], result: ReferenceResult) -> IdResult:
    removed = {texts[lo].id: texts[hi].id for lo, hi in result.removed.items()}
    return removed, {texts[at].id: count for at, count in result.copies.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(5))
def test_the_stages_remove_what_the_reference_removes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    texts = make_texts(rng, 60)
    changes: list[dict[str, Any]] = [
        {},
        {"containment": 0.8, "similarity": 0.9},
        {"scope": "source", "small_shingles": 0},
        {"minhash": MinHashConfig(permutations=32, unit="characters", ngram=7)},
        {"scope": {"field": "site"}},
    ]
    config = NearDedupConfig.model_validate(CONFIG.model_dump() | changes[seed])
    expected = by_ids(texts, reference_near(texts, config))
    assert 10 < len(expected[0]) < 55
    assert find(tmp_path / "one", texts, config, 1, 64 << 20)[0] == expected
    assert find(tmp_path / "many", texts, config, 4, 10_000)[0] == expected


def test_arguments_of_tasks_do_not_grow_with_the_number_of_splits(tmp_path: Path) -> None:
    texts = make_texts(random.Random(3), 70)
    largest: dict[str, int] = {}

    class Watched(TaskFolders):
        def _run(self, task: Task) -> Commit:
            largest[task.stage] = max(largest.get(task.stage, 0), len(pickle.dumps(task.args)))
            return super()._run(task)

    splits = []
    for number in range(70):
        file = tmp_path / f"{number}.arrow"
        write_texts(file, texts[number : number + 1], random.Random(0))
        digest = hash_file(file, ["xxh3_128"])["xxh3_128"]
        documents = Artifact(file, content=digest)
        splits.append(SplitDocuments(f"{number:05d}", documents, file.stat().st_size))
    remove_near(Watched(tmp_path / "work"), splits, [SplitRemovals()] * 70, CONFIG, 1 << 20)
    assert largest.pop("parts") > 70 * 10  # one task
    assert {"equal", "candidates", "shingles", "near_lost"} <= largest.keys()
    assert max(largest.values()) < 64 * 256, largest  # of 64 runs the names: above that they are merged


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ({"scope": "source"}, "signatures"),
        ({"minhash": MinHashConfig(permutations=32, seed=2)}, "signatures"),
        ({"bands": 4, "rows": 8}, "signatures"),
        ({"similarity": 0.9}, "candidates"),
        ({"containment": 0.9}, "verify"),
        ({"small_shingles": 3}, "verify"),
    ],
)
def test_a_setting_redoes_the_stages_that_read_it_and_what_follows(
    tmp_path: Path, change: dict[str, Any], stage: str
) -> None:
    file = tmp_path / "texts.arrow"
    write_texts(file, make_texts(random.Random(1), 40), random.Random(0))
    documents = Artifact(file, content=hash_file(file, ["xxh3_128"])["xxh3_128"])
    splits, run = [SplitDocuments("texts", documents, file.stat().st_size)], TaskFolders(tmp_path / "work")
    remove_near(run, splits, [SplitRemovals()], CONFIG, 1 << 20)
    before = len(run.ran)
    remove_near(run, splits, [SplitRemovals()], CONFIG.model_copy(update=change), 1 << 20)
    assert run.ran[before].partition("/")[0] == stage
    count = len(run.ran)
    remove_near(run, splits, [SplitRemovals()], CONFIG, 1 << 20)
    assert len(run.ran) == count


@pytest.mark.parametrize("sketch", [0, 30])
def test_documents_of_an_index_win_over_all(tmp_path: Path, sketch: int) -> None:
    rng = random.Random(sketch)
    texts = make_texts(rng, 80)
    kept = reference_near(texts[:40], CONFIG).removed
    indexed = [
        text._replace(kind="index") for at, text in enumerate(texts[:40]) if at not in kept and text.text
    ]
    own = texts[40:]
    expected = by_ids([*own, *indexed], reference_near([*own, *indexed], CONFIG, sketch=sketch or None))
    assert set(expected[0].values()) & {text.id for text in indexed}
    index = make_index(tmp_path / "index", indexed, CONFIG, sketch)
    found, counts = find(tmp_path / "own", own, CONFIG, 2, 20_000, index=index, indexed=indexed)
    assert found == expected
    assert counts["kept_by_index"] == sum(hi not in {text.id for text in own} for hi in expected[0].values())


def test_the_reference_follows_the_rule_by_hand() -> None:
    """Of three texts the middle one is 0.84 like both others, which are 0.7 alike: it alone goes."""
    words = [f"w{number}" for number in range(100)]

    def text(first: int, id: int, kind: Any = "input") -> Text:
        return Text(kind, 0, bytes([id]) * 16, " ".join(words[first : first + 60]))

    config = NearDedupConfig(minhash=MinHashConfig(permutations=128), bands=64, rows=2)
    texts = [text(0, 1), text(5, 2), text(10, 3), text(10, 4), Text("input", 0, b"5" * 16, "?!")]
    lengths = [len(one.text) for one in texts]
    assert lengths[0] < lengths[1] < lengths[2] == lengths[3]  # so the third one has the highest priority
    assert reference_near(texts, config) == ReferenceResult({1: 2, 3: 2}, {2: 3})
    indexed = [*texts, text(0, 9, "index")]
    assert reference_near(indexed, config) == ReferenceResult({0: 5, 1: 5, 3: 2}, {2: 2})
