"""A dataset answers for itself: what it is, what its rows say, and which documents they come from."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

import shardkit as sk
from shardkit.errors import ShardError, ShardkitError
from shardkit.formats import mds
from support.loader_data import KINDS, make_dataset
from support.small_build import EOS, make_corpus, text_of

URL = "https://site{0}.example.org/page/{1}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, inline_builds: None) -> Path:
    """A dataset whose plain documents have URLs of seven hosts."""
    recipe = make_corpus(tmp_path_factory.mktemp("built"), 80)
    for path in recipe.parent.glob("plain-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["url"] = URL.format(line["number"] % 7, line["number"])
        path.write_text("\n".join(map(json.dumps, lines)))
    return Path(sk.build(recipe, workers=1, progress=False).location)


def test_a_built_dataset_says_what_it_is(built: Path) -> None:
    with sk.open(built) as dataset:
        text, page = repr(dataset), dataset._repr_html_()
        tokens = dataset.card.tokens if dataset.card is not None else 0
    for fact in (
        str(built),
        "each of 64 tokens (uint16)",
        f"{tokens:,}",
        "tokenizer.json",
        EOS,
        "plain, tables, zipped",
    ):
        assert fact in text
        assert fact.replace("<", "&lt;").replace(">", "&gt;") in page


@pytest.mark.parametrize("kind", KINDS)
def test_any_dataset_says_what_it_is_and_opens_no_shard_for_it(tmp_path: Path, kind: str) -> None:
    dataset = sk.open(make_dataset(tmp_path / "data", kind, samples=23))
    for file in (tmp_path / "data").glob("*.mds*"):
        file.unlink()
    assert f"Dataset {tmp_path / 'data'}\n" in repr(dataset)
    assert "rows         23, each" in repr(dataset)
    assert "each of 8 tokens (uint16)" in repr(dataset)
    assert ("varied (ndarray:int32)" in repr(dataset)) == (kind == "columns")


def test_what_a_card_says_cannot_command_a_page_or_a_terminal(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "<b>data", "mds")
    hostile = {"tokenizer": {"file": "<script>\x1b[2J\u202e", "eos": "</td>"}, "inputs": [{"source": "<i>"}]}
    (folder / "dataset.json").write_text(json.dumps(hostile))
    dataset = sk.open(folder)
    assert not {"\x1b", "\u202e"} & set(repr(dataset))
    page = dataset._repr_html_()
    assert not [tag for tag in ("<script", "<b>", "</td></td>", "<i>") if tag in page]
    assert "&lt;script&gt;" in page


def test_a_row_says_its_text_with_the_ends_between_documents_and_without_padding(built: Path) -> None:
    dataset = sk.open(built)
    for row in range(len(dataset)):
        texts = [document.text for document in dataset.documents(row)]
        assert dataset.text(row) == EOS.join(text or "" for text in texts)
    assert dataset.text(-1) == dataset.text(len(dataset) - 1)


def test_the_documents_of_all_rows_are_the_texts_that_were_kept(built: Path) -> None:
    dataset = sk.open(built)
    pieces = [document for row in range(len(dataset)) for document in dataset.documents(row)]
    whole: dict[str, str] = {}
    for piece in sorted(pieces, key=lambda each: each.document_start):
        whole[piece.document_id] = whole.get(piece.document_id, "") + (piece.text or "")
        if piece.url is not None:
            number = json.loads(piece.metadata or "")["number"]
            assert piece.url == URL.format(number % 7, number)
            assert (piece.file, piece.record) == (f"plain-{number // 20}.jsonl", number % 20)
    assert set(whole.values()) == {text_of(number) for number in range(80) if number % 10 != 9}
    assert sum(piece.tokens for piece in pieces) == dataset.card.tokens  # type: ignore[union-attr]
    for piece in pieces:
        assert f"row {piece.row}: {piece.tokens} token" in repr(piece)
        assert (piece.url or f"{piece.file} record {piece.record}") in repr(piece)


def test_a_url_a_row_and_a_step_lead_to_the_same_documents(built: Path) -> None:
    dataset = sk.open(built)
    found = dataset.trace(url=URL.format(3, 17), limit=0)
    assert {document.url for document in found.documents} == {URL.format(3, 17)}
    assert "".join(d.text or "" for d in sorted(found.documents, key=lambda d: d.document_start)) == text_of(
        17
    )
    loader = sk.StreamingLoader(dataset, batch_size=4, shuffle="global", tail="drop")
    run = {"state": loader.state_dict(), "batch_size": 4}
    row = found.documents[0].row
    [document] = [d for d in dataset.trace(row=row, **run).documents if d.url == URL.format(3, 17)]  # type: ignore[arg-type]
    assert document.steps is not None
    for step in document.steps:
        seen = dataset.trace(step=step, limit=0, **run)  # type: ignore[arg-type]
        assert row in {each.row for each in seen.documents}
    assert {document.document_id for document in dataset.trace(id="n17").documents} == {document.document_id}
    everything = sk.trace(str(built), source=["plain", "tables", "zipped"])
    assert (len(everything.documents), everything.facts["rows"]) == (20, len(dataset))
    assert "and 10 more" in repr(everything)
    assert "<table>" in everything._repr_html_()


def test_rows_to_leave_out_are_written_for_a_loader(built: Path, tmp_path: Path) -> None:
    dataset = sk.open(built)
    found = dataset.trace(url="site3.example.org/*", limit=0, exclude=tmp_path / "list.txt")
    stream = sk.Stream(dataset, exclude=tmp_path / "list.txt")
    delivered: set[int] = set()
    for batch in sk.StreamingLoader([stream], batch_size=1, return_ids=True):
        delivered.update(np.asarray(batch["sample_id"]).tolist())
    assert delivered == set(range(len(dataset))) - {document.row for document in found.documents}


def test_a_question_that_cannot_be_answered_says_why(built: Path, tmp_path: Path) -> None:
    dataset = sk.open(built)
    with pytest.raises(TypeError, match="no question is given: give one of row, step, url"):
        dataset.trace()
    with pytest.raises(TypeError, match="row and search are different questions"):
        dataset.trace(row=1, url="example.org/*")
    with pytest.raises(TypeError, match="unexpected keyword argument 'urls'; in shardkit: `url`"):
        dataset.trace(urls="example.org/*")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"depends on the run: give state=loader\.state_dict\(\) and batch"):
        dataset.trace(step=1)
    with pytest.raises(TypeError, match=r"argument 'seed'; in shardkit: `state`, of `loader"):
        dataset.trace(step=1, batch_size=2, seed=17)  # type: ignore[call-arg]
    for ask in (dataset.text, dataset.documents):
        with pytest.raises(IndexError, match=f"no row {len(dataset)}; the dataset has {len(dataset)}"):
            ask(len(dataset))
    foreign = sk.open(make_dataset(tmp_path / "foreign", "mds"))
    with pytest.raises(ShardkitError, match="has no record of its tokenizer: give tokenizer="):
        foreign.text(0)
    for question in (
        lambda: foreign.documents(0),
        lambda: foreign.trace(row=0),
        lambda: foreign.trace(url="a.b/*"),
    ):
        with pytest.raises(ShardkitError, match="has no provenance tables"):
            question()
    assert foreign.text(0, tokenizer=built.parent / "tokenizer.json")


def test_rows_without_tokens_say_their_text_column(tmp_path: Path) -> None:
    for name, column in (("texts", "text"), ("numbers", "number")):
        with mds.MdsWriter(tmp_path / name, columns={column: "str"}) as writer:
            writer.write({column: "row 0"})
    assert sk.open(tmp_path / "texts").text(0) == "row 0"
    with pytest.raises(
        ShardError, match=r"neither tokens nor a text column \(text or txt\); its columns: number"
    ):
        sk.open(tmp_path / "numbers").text(0)


def test_a_dataset_that_was_asked_still_goes_to_other_processes(built: Path) -> None:
    dataset = sk.open(built)
    dataset.documents(0)
    again = pickle.loads(pickle.dumps(dataset))
    assert again.text(0) == dataset.text(0)
