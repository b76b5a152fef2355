"""Which tokenizer.json a recipe means: a file, a folder that has one, or a model of the Hugging Face Hub.

Nothing is downloaded. A model's name, such as `gpt2` or `org/model`, is looked up in the Hub's cache on this
machine; if it is not there, the error says how to get it. A file or folder of that name comes first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardkit.errors import RecipeError
from shardkit.files import load_json

__all__ = ["end_token", "find_tokenizer"]

NAME = "tokenizer.json"
_HUB_NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?")
_FILE_ENDINGS = (".json", ".model", ".txt", ".bin")
# Tokens that end documents in published models, most usual first.
_END_TOKENS = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|eot|>", "[EOS]", "<|im_end|>", "[SEP]",
)  # fmt: skip


def find_tokenizer(folder: Path, path: str) -> Path:
    """The file that a recipe's `tokenizer.path` means, relative to `folder`. RecipeError if there is none."""
    given = folder / path
    if given.is_dir():
        if not (given / NAME).is_file():
            raise RecipeError(f"tokenizer.path: the folder {given} has no {NAME}")
        return given / NAME
    if given.exists() or path.endswith(_FILE_ENDINGS) or not _HUB_NAME.fullmatch(path):
        return given  # reading it reports what is wrong with it
    found = _in_hub_cache(path)
    if found is None:
        raise RecipeError(
            f"tokenizer.path: there is no file {given}, and the Hugging Face cache has no tokenizer of "
            f"{path!r}; to fetch it: hf download {path} {NAME}"
        )
    return found


def _in_hub_cache(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError:  # tokenizers, which brings it, is not installed
        return None
    try:
        found = try_to_load_from_cache(name, NAME)
    except HFValidationError:  # no possible name of a model
        return None
    return Path(found) if isinstance(found, str) else None


def end_token(file: Path) -> str | None:
    """The special token of a tokenizer.json that ends documents, as far as its name shows that; or None."""
    try:
        config = load_json(file.read_bytes())
    except (OSError, ValueError):
        return None
    tokens = _special_tokens(config)
    likely = [token for token in _END_TOKENS if token in tokens]
    likely += [token for token in tokens if re.search("eos|end", token, re.IGNORECASE)]
    return likely[0] if likely else None


def _special_tokens(config: Any) -> list[str]:
    added = config.get("added_tokens") if isinstance(config, Mapping) else None
    return [
        str(token.get("content"))
        for token in added or ()
        if isinstance(token, Mapping) and token.get("special")
    ]
