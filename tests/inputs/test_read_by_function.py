"""Files of any format, read by a function of the user: records, bad records, errors that name their place."""

from __future__ import annotations

import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

import shardkit as sk
from shardkit.errors import BuildError, RecipeError
from shardkit.tools.explore.explored import Explored
from shardkit.tools.explore.raw import read_raw
from shardkit.writers import estimate
from shardkit.writers.recipe.recipe import Recipe, recipe_from_mapping
from shardkit.writers.stages.inputs import BuildInputs, filter_files
from support.s3_moto import s3_server
from support.small_build import EOS, text_of, train_bpe, tree

READERS = '''
import struct, zlib

def read(file, name, *, magic):
    """Blocks of (length, CRC, text); a block with a wrong CRC is a bad record."""
    assert name.endswith(".rec") and name.startswith("data/"), name
    if file.read(4).decode() != magic:
        raise ValueError("no such magic")
    number = 0
    while head := file.read(8):
        length, crc = struct.unpack("<II", head)
        body = file.read(length)
        if zlib.crc32(body) != crc:
            yield ValueError(f"CRC of block {number}")
        else:
            yield {"body": body.decode(), "number": number, "where": {"file": name}}
        number += 1

def a_list(file, name): return [{"text": line.decode()} for line in file.read().splitlines()]
def nothing(file, name): pass
def a_dict(file, name): return {"text": "x"}
def texts(file, name):
    yield {"text": "one"}
    yield "two"
def keys(file, name): yield {1: "x"}
def fails(file, name):
    yield {"text": "one"}
    yield {"text": "two"}
    raise KeyError("third")
def no_disk(file, name):
    yield {"text": "one"}
    raise OSError("the format's own")
def no_memory(file, name): yield {"text": "x" * (1 << 40)}
def odd(file, name):
    yield {"text": "fine words to keep"}
    yield {"text": 5}
    yield {"other": "x"}
    yield {"text": "a " * 4000}
    yield {"text": b"bytes of text \\xc3\\xa9"}
    yield {"text": b"\\xff"}
    yield {"text": "\\ud800"}
    yield {"text": "the last of them"}
def chat(file, name):
    for line in file:
        question, answer = line.decode().split("|")
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    yield {"messages": 5}
'''
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> str:
    return str(train_bpe([text_of(n) for n in range(50)], vocabulary=400).to_str())


def block(text: str, *, damage: int = 0) -> bytes:
    data = text.encode()
    return struct.pack("<II", len(data), zlib.crc32(data) ^ damage) + data


@pytest.fixture
def folder(tokenizer: str, tmp_path: Path) -> Path:
    """Three files of blocks; the second has a bad one."""
    (tmp_path / "data").mkdir()
    for number in range(3):
        blocks = [block(text_of(100 * number + n)) for n in range(40)]
        if number == 1:
            blocks[7] = block("damaged", damage=1)
        (tmp_path / "data" / f"{number}.rec").write_bytes(b"REC1" + b"".join(blocks))
    (tmp_path / "my_readers.py").write_text(READERS)
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    return tmp_path


BLOCKS = {"function": "read", "file": "my_readers.py", "parameters": {"magic": "REC1"}}


def recipe(folder: Path, reader: object = BLOCKS, **more: Any) -> Recipe:
    own = {"path": "data/*.rec", "text": "body", "metadata": ["number", "where.file"], "reader": reader}
    data = {
        "inputs": {**own, **more.pop("inputs", {})},
        "tokenizer": {"path": "tokenizer.json", "eos": EOS},
        "dedup": {"exact": {}},
        "pack": {"sequence_length": 64},
        "output": {"path": "out", "shard_bytes": "8KiB"},
    }
    return recipe_from_mapping(data | more, folder=folder)


def of_function(folder: Path, name: str, **more: Any) -> Recipe:
    (folder / "data" / "one.txt").write_text("first line\nsecond line\n")
    inputs = {"path": "data/one.txt", "text": "text", "metadata": [], **more.pop("inputs", {})}
    return recipe(folder, {"function": name, "file": "my_readers.py"}, inputs=inputs, **more)


@pytest.mark.extended
def test_two_workers_make_the_bytes_of_one_and_a_bad_record_is_named(folder: Path) -> None:
    allowed = recipe(folder, max_bad_fraction=0.1)
    one = sk.build(allowed, workers=1, progress=False)
    two = sk.build(allowed, workers=2, progress=False, output=folder / "two")
    assert tree(one.output) == tree(two.output)
    assert one.funnel.read.documents == 120
    [bad] = map(json.loads, (one.output / "quarantine.jsonl").read_text().splitlines())
    assert (bad["file"], bad["record"], bad["reason"]) == ("data/1.rec", 7, "bad_record")
    assert bad["error"] == "ValueError: CRC of block 7"
    found, *_ = sk.open(one.output).trace(file="data/2.rec").documents
    assert json.loads(found.metadata or "") == {"number": found.record, "where.file": "data/2.rec"}
    with pytest.raises(BuildError, match=r"data/1\.rec: record 7.*CRC of block 7"):
        sk.build(recipe(folder), workers=1, progress=False, output=folder / "strict")


@pytest.mark.usefixtures("inline_builds")
def test_changed_code_is_another_build(folder: Path) -> None:
    kept = recipe(folder, max_bad_fraction=0.1, work="work")
    first = sk.build(kept, progress=False)
    again = sk.build(kept, progress=False, output=folder / "again")
    assert again.tasks_reused == again.tasks == first.tasks
    card = sk.open(first.output).card
    assert card is not None
    assert card.filter_files.keys() == {"my_readers.py"}
    before = filter_files(kept)
    (folder / "my_readers.py").write_text(READERS.replace("body.decode()", "body.decode().upper()"))
    assert filter_files(kept) != before
    with pytest.raises(BuildError, match="made with other"):
        sk.build(kept, progress=False)
    changed = sk.build(kept, progress=False, output=folder / "changed")
    assert changed.fingerprint != first.fingerprint


@pytest.mark.usefixtures("inline_builds")
def test_files_and_work_may_be_in_a_store(folder: Path) -> None:
    allowed = recipe(folder, max_bad_fraction=0.1)
    expected = tree(sk.build(allowed, progress=False).output)
    with s3_server() as server:
        bucket = server.new_bucket()
        for path in sorted((folder / "data").iterdir()):
            server.client().put_object(Bucket=bucket, Key=f"data/{path.name}", Body=path.read_bytes())
        inputs = {"path": f"s3://{bucket}/data/*.rec", "base": f"s3://{bucket}"}
        remote = recipe(
            folder,
            inputs=inputs,
            max_bad_fraction=0.1,
            work=f"s3://{bucket}/work",
            scratch=str(folder / "scratch"),
        )
        made = tree(sk.build(remote, progress=False, output=folder / "remote").output)
    different = {name for name in expected if made.get(name) != expected[name]}
    assert different <= {"dataset.json", "report.html"}  # these name the place of the inputs


@pytest.mark.usefixtures("inline_builds")
def test_a_check_of_the_disk_reads_files_under_their_own_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimates: list[estimate.StageBytes] = []
    rehearse = estimate.rehearse

    def noted(inputs: BuildInputs, workers: int | None = None) -> estimate.StageBytes:
        estimates.append(rehearse(inputs, workers))
        return estimates[-1]

    monkeypatch.setattr(estimate, "CERTAIN", 1 << 60)
    monkeypatch.setattr(estimate, "most_bytes", lambda splits: 1 << 60)
    monkeypatch.setattr(estimate, "rehearse", noted)
    sk.build(recipe(folder, max_bad_fraction=0.1), progress=False)
    assert estimates[0].documents > 50


@pytest.mark.usefixtures("inline_builds")
@pytest.mark.parametrize(
    ("name", "error", "problem"),
    [
        ("nothing", BuildError, "at record 0: .*my_readers:nothing: returned None; yield a dict"),
        ("a_dict", BuildError, "at record 0: .*returned an object of type dict"),
        ("texts", BuildError, r"one\.txt: at record 1: .*\[0\]\.reader: .* yielded an object of type str"),
        ("keys", BuildError, "keys are not all text"),
        ("fails", BuildError, r"one\.txt: at record 2: .*reader: my_readers:fails: KeyError: 'third'"),
        ("no_disk", BuildError, "at record 1: .*OSError: the format's own"),
        ("no_memory", BuildError, "at record 0: reading it needs more memory"),
        ("read", BuildError, "my_readers:read: TypeError: .*magic"),
        ("absent", RecipeError, r"inputs\[0\]\.reader: my_readers:absent: .*has no function absent"),
        ("READERS_ARE", RecipeError, "has no function"),
    ],
)  # fmt: skip
def test_errors_name_file_record_and_function(
    folder: Path, name: str, error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=re.compile(problem, re.DOTALL)):
        sk.build(of_function(folder, name), progress=False)
    assert not (folder / "out").exists()


@pytest.mark.usefixtures("inline_builds")
def test_a_failing_file_may_be_left_out_as_a_split(folder: Path) -> None:
    (folder / "data" / "3.rec").write_bytes(b"ODD!")
    made = sk.build(recipe(folder, max_bad_fraction=0.1, max_failed_splits=1), progress=False)
    assert made.funnel.read.documents == 121
    bad = [json.loads(line) for line in (made.output / "quarantine.jsonl").read_text().splitlines()]
    assert "ValueError: no such magic" in bad[-1]["error"]


@pytest.mark.usefixtures("inline_builds")
def test_what_a_function_yields_is_checked_as_other_records_are(folder: Path) -> None:
    made = sk.build(of_function(folder, "odd", max_bad_fraction=1.0, max_record_bytes=2000), progress=False)
    assert made.funnel.read.documents == 8
    reasons = {reason: count.documents for reason, count in made.funnel.quarantined.items()}
    assert reasons == {"no_text": 2, "too_long": 1, "bad_utf8": 2}
    bad = [json.loads(line) for line in (made.output / "quarantine.jsonl").read_text().splitlines()]
    assert [one["record"] for one in bad] == [1, 2, 3, 5, 6]
    inputs = {"on_bad_text": "replace"}
    replaced = of_function(folder, "odd", max_bad_fraction=1.0, max_record_bytes=2000, inputs=inputs)
    made = sk.build(replaced, progress=False, output=folder / "replaced")
    assert made.funnel.quarantined.keys() == {"no_text", "too_long"}
    assert made.funnel.dropped["text/replaced"].bytes == 4
    listed = sk.build(of_function(folder, "a_list"), progress=False, output=folder / "listed")
    assert listed.funnel.kept.documents == 2


@pytest.mark.usefixtures("inline_builds")
def test_conversations_have_a_loss_mask(folder: Path) -> None:
    (folder / "chat.txt").write_text("what|that\nwho|me\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    inputs = {"path": "chat.txt", "text": "text", "metadata": [], "messages": "messages"}
    asked = recipe(folder, {"function": "chat", "file": "my_readers.py"}, inputs=inputs, max_bad_fraction=0.5)
    made = sk.build(asked, progress=False)
    assert made.funnel.kept.documents == 2
    assert made.funnel.quarantined.keys() == {"bad_messages"}


@pytest.mark.usefixtures("inline_builds")
def test_many_small_files_are_read_by_few_tasks(folder: Path) -> None:
    for number in range(3, 70):
        (folder / "data" / f"{number:03}.rec").write_bytes(b"REC1" + block(text_of(number + 1000)))
    many = recipe(folder, max_bad_fraction=0.1, work="work")
    sk.build(many, progress=False)
    assert len(list((folder / "work" / "clean").iterdir())) < 5


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ({"format": "jsonl"}, "format: `reader` reads files of any format itself"),
        ({"lines": True}, "lines: `reader` reads files"),
        ({"encoding": "utf-16"}, "encoding: `reader` reads"),
        ({"reader": "no function"}, "write module:function"),
        ({"reader": {"function": "a:b", "files": "x"}}, "did you mean 'file'"),
    ],
)
def test_readers_that_cannot_be_are_refused(tmp_path: Path, inputs: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        recipe(tmp_path, inputs=inputs)


def test_code_that_is_not_there_is_named_before_anything_runs(folder: Path) -> None:
    for reader, problem in (
        (
            {"function": "read", "file": "gone.py"},
            r"inputs\[0\]\.reader: .*gone\.py: cannot be read",
        ),
        ("no_such_module_at_all:read", r"inputs\[0\]\.reader: no_such_module_at_all:read: no module"),
    ):
        with pytest.raises(RecipeError, match=problem):
            sk.build(recipe(folder, reader), progress=False)


def test_recipes_without_a_reader_keep_their_digests(tmp_path: Path) -> None:
    plain = recipe_from_mapping(
        {"inputs": "x", "tokenizer": {"path": "t", "eos": "e"}, "output": "o"}, folder=tmp_path
    )
    assert "reader" not in plain.content()["inputs"][0]


def test_files_of_unknown_formats_are_told_of_readers(folder: Path) -> None:
    for name in ("a.rec", "b.zip"):
        (folder / name).write_bytes(b"x")
        with pytest.raises(RecipeError, match=r"inputs\[\]\.reader"):
            sk.build(recipe(folder, None, inputs={"path": name}), progress=False)


@pytest.mark.usefixtures("inline_builds")
def test_code_that_a_card_names_is_not_run_to_show_a_text(folder: Path) -> None:
    made = sk.build(recipe(folder, max_bad_fraction=0.1), progress=False)
    (folder / "my_readers.py").write_text("raise SystemExit('run')")
    with sk.open(made.output) as dataset:
        text, problem = read_raw(Explored(dataset, inputs=folder), 0, "data/0.rec", 9)
    assert text is None
    assert "the recipe's own `reader` reads data/0.rec" in problem
