"""A recipe names a tokenizer by its file, its folder, or the name of a model in the cache of the Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.errors import RecipeError
from shardkit.formats.tokenizer_file import end_token, find_tokenizer


def test_a_file_or_a_folder_comes_before_a_model_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    with pytest.raises(RecipeError, match=r"tokenizer\.path: the folder .*gpt2 has no tokenizer\.json"):
        find_tokenizer(tmp_path, "gpt2")
    (tmp_path / "gpt2/tokenizer.json").write_text("{}")
    assert find_tokenizer(tmp_path, "gpt2") == tmp_path / "gpt2/tokenizer.json"
    (tmp_path / "gpt3").write_text("{}")
    assert find_tokenizer(tmp_path, "gpt3") == tmp_path / "gpt3"


def test_a_model_is_found_in_the_cache_and_else_the_error_says_how_to_fetch_it(tmp_path: Path) -> None:
    model = tmp_path / "models--org--name"
    (model / "snapshots/abc").mkdir(parents=True)
    (model / "snapshots/abc/tokenizer.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs/main").write_text("abc")
    code = (
        "from pathlib import Path; from shardkit.formats.tokenizer_file import find_tokenizer\n"
        "print(find_tokenizer(Path('/'), 'org/name'))\nfind_tokenizer(Path('/'), 'org/other')"
    )
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stdout.strip() == str(model / "snapshots/abc/tokenizer.json")
    assert "there is no file /org/other" in done.stderr
    assert done.stderr.rstrip().endswith("to fetch it: hf download org/other tokenizer.json")


@pytest.mark.parametrize("path", ["missing.json", "a/b/c", "../gpt2", "/models/gpt2"])
def test_what_cannot_be_a_model_is_a_path(path: str, tmp_path: Path) -> None:
    assert find_tokenizer(tmp_path, path) == tmp_path / path


@pytest.mark.parametrize(
    ("special", "end"),
    [
        (["<|im_start|>", "<|im_end|>", "<|endoftext|>"], "<|endoftext|>"),
        (["<unk>", "<s>", "</s>"], "</s>"),
        (["<pad>", "<MY_EOS>"], "<MY_EOS>"),
        (["<pad>"], None),
    ],
)
def test_the_token_that_ends_documents_is_known_by_its_name(
    special: list[str], end: str | None, tmp_path: Path
) -> None:
    tokens = [{"id": number, "content": token, "special": True} for number, token in enumerate(special)]
    (tmp_path / "t.json").write_text(
        json.dumps({"model": {}, "added_tokens": [*tokens, {"id": 9, "content": "</end>"}]})
    )
    assert end_token(tmp_path / "t.json") == end


def test_a_file_that_is_no_tokenizer_has_no_such_token(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("[")
    assert end_token(tmp_path / "t.json") is None
    assert end_token(tmp_path / "none.json") is None
