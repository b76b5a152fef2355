"""A row that is read in place is traced to its file and its rows there, in each format and for texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers

import shardkit as sk
from shardkit.cli.main import main
from shardkit.datasets.provenance.table import NoProvenanceError
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import grouped
from shardkit.storage.memory import MemoryStore
from support.remote_harness import QUICK, fresh_url, put_folder
from support.row_files import KINDS, write_tables
from support.small_build import EOS, train_bpe

WORDS = ["alpha", "beta", "gamma", "delta", "<|endoftext|>", "naïve", "你好"]
LENGTH = 16

pytestmark = pytest.mark.filterwarnings("ignore:.*rows have no text:RuntimeWarning")


@pytest.fixture(autouse=True)
def indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def texts_of(file: int) -> list[str | None]:
    draw = np.random.default_rng(file)
    texts: list[str | None] = [" ".join(draw.choice(WORDS, n)) for n in draw.integers(1, 40, 50)]
    texts[3], texts[7] = "", None  # no documents, but rows of the file
    return texts


def write(folder: Path, kind: str) -> Path:
    for file in range(3):
        ids = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(100, dtype=np.uint16) + file), 2)
        table = pa.table({"text": pa.array(texts_of(file), pa.string()), "input_ids": ids})
        write_tables(folder, f"part-{file}", kind, [table.slice(0, 20), table.slice(20)])
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe([" ".join(WORDS)] * 20, vocabulary=280, special=(EOS, "<s>")).save(str(path))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_a_file_is_traced_to_its_number_there(kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", kind)
    with sk.open(folder) as dataset:
        for row in (0, 19, 20, 70, 149):
            [found] = dataset.trace(row=row).documents
            assert (Path(found.file).name.split(".")[0], found.record) == (f"part-{row // 50}", row % 50)
            assert dataset[row]["text"] == texts_of(row // 50)[found.record]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pack", ["best_fit", "concat"])
@pytest.mark.parametrize("bos", [None, "<s>"])
@pytest.mark.parametrize("kind", ["parquet", "zst"])
def test_the_documents_of_a_row_of_texts_are_those_whose_tokens_it_has(
    kind: str, bos: str | None, pack: Any, tokenizer: Path, tmp_path: Path
) -> None:
    store = MemoryStore(fresh_url())
    put_folder(write(tmp_path / "in", kind), store)
    made = tokenizers.Tokenizer.from_file(str(tokenizer))
    made.encode_special_tokens = True
    eos = made.token_to_id(EOS)
    given = {"path": str(tokenizer), "eos": EOS} | ({} if bos is None else {"bos": bos})
    for place in (tmp_path / "in", store.url):
        seen: dict[tuple[str, int], int] = {}
        with sk.open(place, tokenizer=given, sequence_length=LENGTH, pack=pack, columns=["text"]) as dataset:
            for row in range(len(dataset)):
                tokens: Any = dataset[row]["tokens"]
                pieces = dataset.documents(row)
                assert pieces[0].start == 0
                for piece in pieces:
                    text = texts_of(int(piece.file[5]))[piece.record]
                    assert text
                    ids = [*([] if bos is None else [made.token_to_id(bos)]), *made.encode(text).ids, eos]
                    part = ids[piece.document_start : piece.document_start + piece.tokens]
                    assert tokens[piece.start : piece.end].tolist() == part
                    seen[piece.file, piece.record] = seen.get((piece.file, piece.record), 0) + piece.tokens
        assert len(seen) == 3 * 48


def test_a_step_of_a_run_and_the_command_line_name_files_and_rows(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "in", "jsonl")
    options = grouped({"columns": ["input_ids"], "batch_size": 4, **QUICK, "return_ids": True})
    with StreamingLoader(folder, **options) as loader:
        batches = iter(loader)
        ids = [next(batches)["sample_id"].tolist() for _ in range(2)][1]
        state = tmp_path / "state.json"
        state.write_text(json.dumps(loader.state_dict()))
        answer = loader.dataset.trace(step=2, state=state, batch_size=4)
    assert [(d.file, d.record) for d in answer.documents] == [(f"part-{n // 50}.jsonl", n % 50) for n in ids]
    run = ["--state", str(state), "--batch-size", "4", "--loader", "columns=input_ids"]
    assert main(["trace", str(folder), "--step", "2", *run]) == 0
    shown = capsys.readouterr().out
    assert all(f"part-{n // 50}.jsonl record {n % 50}" in shown for n in ids)
    made = ["--loader", f"tokenizer={tokenizer}", "--loader", f"sequence_length={LENGTH}"]
    assert main(["trace", str(folder), "--row", "0", "--loader", "columns=text", *made]) == 0
    assert "part-0.jsonl record" in capsys.readouterr().out


def test_rows_in_place_cannot_be_searched_and_say_so(tmp_path: Path) -> None:
    with (
        sk.open(write(tmp_path / "in", "parquet")) as dataset,
        pytest.raises(NoProvenanceError, match="has no tables to search, as its rows are read in place"),
    ):
        dataset.trace(url="a.org/*")
