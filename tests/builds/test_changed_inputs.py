"""A kept work folder never gives old text: whatever replaced a file, at whatever size and time."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardkit.errors import BuildError
from shardkit.writers import build
from shardkit.writers.execution.runner import Runner
from shardkit.writers.inputs import scan
from shardkit.writers.report.result import BuildResult

pytestmark = pytest.mark.usefixtures("inline_builds")
OLD, NEW = "AAAA old text", "CCCC new text"


def in_place(old: Path, new: Path) -> None:
    times = old.stat()
    old.write_bytes(new.read_bytes())
    os.utime(old, ns=(times.st_atime_ns, times.st_mtime_ns))


def renamed(old: Path, new: Path) -> None:
    shutil.copystat(old, new)
    new.rename(old)


def copied(old: Path, new: Path) -> None:
    shutil.copystat(old, new)
    shutil.copy2(new, old)


def hard_link(old: Path, new: Path) -> None:
    shutil.copystat(old, new)
    old.unlink()
    os.link(new, old)


def soft_link(old: Path, new: Path) -> None:
    shutil.copystat(old, new)
    old.unlink()
    old.symlink_to(new)


def linked_folder(old: Path, new: Path) -> None:
    """The folder becomes a link to another one, whose files have the same names, sizes and times."""
    other = old.parent.with_name(f"{old.parent.name}-2")
    shutil.copytree(old.parent, other)
    (other / old.name).write_bytes(new.read_bytes())
    shutil.copystat(old, other / old.name)
    shutil.rmtree(old.parent)
    old.parent.symlink_to(other)


WAYS = (in_place, renamed, copied, hard_link, soft_link, linked_folder)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"text": text}) + "\n"
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": [text]}), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(line.encode(), mtime=0))
    else:
        path.write_text(text if path.suffix == ".txt" else line)
    return path


def run(folder: Path, **recipe: object) -> BuildResult:
    made = {"inputs": str(folder / "in"), "work": str(folder / "work")} | recipe
    output = {"path": str(folder / "out"), "format": "jsonl"}
    return build(made | {"output": output}, workers=1, progress=False, replace=True)


def texts(folder: Path) -> list[str]:
    parts = sorted((folder / "out").glob("text-*.jsonl"))
    return [json.loads(line)["text"] for part in parts for line in part.read_text().splitlines()]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet", "a.jsonl.gz"])
@pytest.mark.parametrize("replace", WAYS)
def test_a_replaced_file_of_the_same_size_and_time_is_read_again(
    replace: Callable[[Path, Path], None], name: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "in" / name, OLD)
    run(tmp_path)
    assert texts(tmp_path) == [OLD]
    before = file.stat()
    replace(file, write(tmp_path / "new" / name, NEW))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    run(tmp_path)
    assert texts(tmp_path) == [NEW]


@pytest.mark.parametrize("replace", WAYS)
def test_scores_and_lists_of_the_same_size_and_time_are_read_again(
    replace: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    lines = [{"id": name, "text": f"the word {name}", "url": f"http://{name}.test/"} for name in "abc"]
    (tmp_path / "in/a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    scores, listed = tmp_path / "scores/s.jsonl", tmp_path / "lists/hosts.txt"
    for file, old, new in (
        (scores, '{"id": "a", "s": 1}\n{"id": "b", "s": 0}\n', '{"id": "a", "s": 0}\n{"id": "b", "s": 1}\n'),
        (listed, "a.test\n", "b.test\n"),
    ):
        score = {"path": str(scores), "key": "id", "document": "id", "columns": {"s": {"min": 1}}}
        by_score, by_list = {"scores": score | {"missing": "keep"}}, {"url_lists": {"domains": str(listed)}}
        filters = [by_score if file is scores else by_list]
        file.parent.mkdir()
        file.write_text(old)
        run(tmp_path, filters=filters)
        before = texts(tmp_path)
        other = tmp_path / "other.txt"
        other.write_text(new)
        replace(file, other)
        run(tmp_path, filters=filters)
        assert len(texts(tmp_path)) == len(before) == 2
        assert set(texts(tmp_path)) != set(before), file


def test_a_folder_that_moves_or_is_copied_costs_reading_it_again_and_gives_the_same_bytes(
    tmp_path: Path,
) -> None:
    for number in range(3):
        write(tmp_path / f"in/{number}.jsonl", f"text {number}")
    run(tmp_path)
    made = texts(tmp_path)
    shutil.copytree(tmp_path / "in", tmp_path / "copy")
    shutil.rmtree(tmp_path / "in")
    (tmp_path / "copy").rename(tmp_path / "in")
    run(tmp_path)
    assert texts(tmp_path) == made


def big_lines(path: Path, letter: str) -> None:
    path.write_text("".join(json.dumps({"text": f"{letter} {n:05}" * 9}) + "\n" for n in range(400)))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("split_bytes", [1 << 26, 9000])
@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        (lambda path: path.chmod(0o640), True),
        (lambda path: os.link(path, path.with_suffix(".linked")), True),
        (lambda path: renamed(path, Path(shutil.copy2(path, path.with_suffix(".copy")))), True),
        (lambda path: path.touch(), False),
        (lambda path: big_lines(path, "y"), False),
        (lambda path: path.unlink(), False),
        (lambda path: in_place(path, other_lines(path)), False),
        (lambda path: renamed(path, other_lines(path)), False),
    ],
)
def test_a_file_that_changes_during_the_build_is_an_error_and_one_that_is_only_touched_is_not(
    change: Callable[[Path], None],
    is_same: bool,
    split_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defaults = scan.scan_inputs.__kwdefaults__
    assert defaults is not None
    monkeypatch.setattr(scan, "SPLIT_BYTES", split_bytes)
    monkeypatch.setattr(scan.scan_inputs, "__kwdefaults__", {**defaults, "split_bytes": split_bytes})
    (tmp_path / "in").mkdir()
    big_lines(tmp_path / "in/a.jsonl", "x")
    run_stage = Runner.run

    def change_after(self: Runner, *stages: object) -> object:
        done = run_stage(self, *stages)  # type: ignore[arg-type]
        if not changed:
            change(tmp_path / "in/a.jsonl")
            changed.append(True)
        return done

    changed: list[bool] = []
    monkeypatch.setattr(Runner, "run", change_after)
    if is_same:
        run(tmp_path, inputs=str(tmp_path / "in/a.jsonl"))
        assert len(texts(tmp_path)) == 400
    else:
        with pytest.raises(BuildError, match=r"a\.jsonl: (changed while|cannot be read)"):
            run(tmp_path, inputs=str(tmp_path / "in/a.jsonl"))


def other_lines(path: Path) -> Path:
    other = path.with_suffix(".other")
    big_lines(other, "z")
    return other
