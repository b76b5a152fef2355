"""`salvage`: what is readable of a damaged member of a compressed file is kept, and the loss is counted."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lz4.frame
import pytest
import zstandard

from shardkit.errors import BuildError
from shardkit.writers import build
from support.foreign_tars import make_tar
from support.read_inputs import put, read

TEXTS = [f"text {i} " + random.Random(i).randbytes(400).hex() for i in range(1200)]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
    "bz2": lambda data: bz2.compress(data, 1),
    "xz": lzma.compress,
    "lz4": lambda data: lz4.frame.compress(data, content_checksum=True),
}


def as_csv() -> bytes:
    file = io.StringIO()
    csv.writer(file).writerows([["text"], *([text] for text in TEXTS)])
    return file.getvalue().encode()


FORMATS: dict[str, bytes] = {
    "a.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode(),
    "a.json": json.dumps([{"text": text} for text in TEXTS]).encode(),
    "a.csv": as_csv(),
    "a.txt": "\n".join(TEXTS).encode(),
    "a.tar": make_tar([(f"{i}.txt", text.encode()) for i, text in enumerate(TEXTS)]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        pytest.param(name, suffix, marks=[] if (number + other) % 5 == 0 else pytest.mark.extended)
        for number, name in enumerate(FORMATS)
        for other, suffix in enumerate(COMPRESS)
    ],
)
def test_the_whole_records_before_the_end_of_a_truncated_member_are_kept_and_the_rest_is_counted(
    tmp_path: Path, name: str, suffix: str
) -> None:
    by_name: dict[str, dict[str, Any]] = {
        "a.json": {"format": "json"},
        "a.txt": {"lines": True},
        "a.tar": {"text": "txt"},
    }
    config = by_name.get(name, {})
    whole = COMPRESS[suffix](FORMATS[name])
    put(tmp_path, f"{name}.{suffix}", whole)
    table, _, ledger = read(tmp_path, f"{name}.{suffix}", allowed=0, salvage=True, **config)
    assert (table["text"].to_pylist(), ledger.dropped) == (TEXTS, {})

    cut = put(tmp_path, f"{name}.{suffix}", whole[: len(whole) * 2 // 3])
    notes: list[str] = []
    table, bad, ledger = read(tmp_path, cut, allowed=0, salvage=True, notes=notes, **config)
    kept = table.num_rows
    assert 400 < kept < 1200
    assert table["text"].to_pylist() == TEXTS[:kept]
    assert not bad
    assert ledger.dropped["salvage/lost"].documents == 1
    (note,) = notes
    assert note.startswith("truncated: the file ends inside")
    assert f"salvage keeps the {kept:,} records" in note

    table, (entry,), _ = read(tmp_path, cut, **config)  # as without the key
    assert (table.num_rows, entry["reason"]) == (0, "damaged_file")
    with pytest.raises(BuildError, match="damaged_file"):
        read(tmp_path, cut, allowed=0, **config)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("suffix", ["gz", "zst", "bz2", "xz"])
def test_damage_inside_a_member_keeps_what_comes_before_it(tmp_path: Path, suffix: str) -> None:
    data = COMPRESS[suffix](FORMATS["a.jsonl"])
    at = len(data) // 2
    put(tmp_path, f"a.jsonl.{suffix}", data[:at] + bytes(50) + data[at + 50 :])
    table, _, ledger = read(tmp_path, f"a.jsonl.{suffix}", salvage=True)
    texts = table["text"].to_pylist()
    assert 200 < len(texts) < 1200
    assert texts[:-2] == TEXTS[: len(texts) - 2]  # where damage is noticed late, a text may hold some of it
    assert ledger.dropped["salvage/lost"].bytes > 0


def test_members_before_the_damaged_one_and_files_that_are_not_compressed_are_as_ever(tmp_path: Path) -> None:
    data = FORMATS["a.jsonl"]
    put(tmp_path, "a.jsonl.gz", gzip.compress(data) + gzip.compress(data)[:200_000])
    table, _, _ = read(tmp_path, "a.jsonl.gz", allowed=0, salvage=True)
    assert table["text"].to_pylist()[:1200] == TEXTS
    assert 1200 < table.num_rows < 2400
    put(tmp_path, "b.json", FORMATS["a.json"][:-10])
    with pytest.raises(BuildError, match="the file ends inside a value"):
        read(tmp_path, "b.json", allowed=0, salvage=True, format="json")


def test_a_build_names_the_file_that_was_salvaged_and_goes_on(tmp_path: Path) -> None:
    whole = gzip.compress(FORMATS["a.jsonl"])
    put(tmp_path, "cut.jsonl.gz", whole[: len(whole) // 2])
    put(tmp_path, "good.jsonl", b'{"text": "a whole document"}\n')
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("inputs: {path: '*.jsonl*', salvage: true}\noutput: {path: out, format: jsonl}\n")
    with pytest.warns(RuntimeWarning, match=r"cut\.jsonl\.gz: truncated: .* salvage keeps the"):
        build(recipe, workers=1, progress=False)
    card = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert "salvage/lost" in json.dumps(card)
