"""Find a recipe's tokenizer, and convert its file to the content of a Hugging Face tokenizer.json.

A recipe names a file, a folder that has one, or a model of the Hugging Face Hub. Nothing is downloaded: a
model's name, such as `gpt2` or `org/model`, is looked up in the Hub's cache on this machine; if it is not
there, the error tells how to download it. A file or folder of that name has priority.

Besides tokenizer.json, two more kinds of file are read: SentencePiece models (`tokenizer.model` of Llama 2,
Mistral, Gemma, T5) and byte pairs with ranks (`.tiktoken`, and `tokenizer.model` of Llama 3).
`tokenizer_config` converts them to an equivalent tokenizer.json, for the fast engine and for decoding. The
reference for their ids is the library for which they are made (`own_engine`);
shardkit.tokens.tokenizer compares the ids with it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from shardkit.errors import RecipeError
from shardkit.files import load_json
from shardkit.formats.sentencepiece_file import huggingface_config, sentencepiece_config
from shardkit.hashing import digest_of

Engine = Literal["gigatoken", "tokenizers", "sentencepiece", "tiktoken"]
EncodingName = Literal["r50k_base", "p50k_base", "cl100k_base", "o200k_base", "llama3", "qwen"]

NAME = "tokenizer.json"
_NAMES = (NAME, "tokenizer.model", "qwen.tiktoken")
_HUB_NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?")
_HEAD_BYTES = 1 << 12  # number of bytes from which a file's kind is determined
_MOST_IDS = 1 << 21  # limit, because libraries allocate tables up to the largest id; published: up to 1 M
_FILE_ENDINGS = (".json", ".model", ".tiktoken", ".txt", ".bin")
# Tokens that end documents in published models, the most common first.
_END_TOKENS = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|eot|>", "[EOS]", "<|im_end|>", "[SEP]",
)  # fmt: skip


def find_tokenizer(folder: Path, path: str) -> Path:
    """Return the file for `path`, a recipe's `tokenizer.path`, which may be relative to `folder`.

    Raises RecipeError if a folder or model has no tokenizer; a missing file is reported when it is read.
    """
    given = folder / path
    if given.is_dir():
        names = [*_NAMES, *sorted(file.name for file in given.glob("*.tiktoken"))]
        if files := [given / name for name in names if (given / name).is_file()]:
            return files[0]
        raise RecipeError(f"tokenizer.path: the folder {given} has no {NAME}, tokenizer.model or .tiktoken")
    if given.exists() or path.endswith(_FILE_ENDINGS) or not _HUB_NAME.fullmatch(path):
        return given  # if it is missing or malformed, reading it raises the error
    cached = (_in_hub_cache(path, name) for name in _NAMES)
    found = next((file for file in cached if file is not None), None)
    if found is None:
        raise RecipeError(
            f"tokenizer.path: there is no file {given}, and the Hugging Face cache has no tokenizer of "
            f"{path!r}; to fetch it: hf download {path} {NAME}"
        )
    return found


def _in_hub_cache(model: str, name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError:  # it is installed with the tokenizers package, which is missing
        return None
    try:
        found = try_to_load_from_cache(model, name)
    except HFValidationError:  # not a valid model name
        return None
    return Path(found) if isinstance(found, str) else None


def end_token(file: Path) -> str | None:
    """Return the special token that ends documents; None if it cannot be determined.

    It is the `eos_token` from the configuration files in the tokenizer's folder, or else a special token with
    a typical name, such as <|endoftext|>.
    """
    try:
        config = tokenizer_config(file, file.read_bytes())
    except (OSError, RecipeError):
        return None
    tokens = special_tokens(config)
    stated = stated_tokens(file).get("eos")
    if stated is not None and (stated in tokens or not tokens):
        return stated
    likely = [token for token in _END_TOKENS if token in tokens]
    likely += [token for token in tokens if re.search("eos|end", token, re.IGNORECASE)]
    return likely[0] if likely else None


def stated_tokens(file: Path) -> dict[str, str]:
    """Return {"eos": token, "bos": token} from the configuration files in the tokenizer's folder.

    A key "adds_bos" has the "bos" token, too, if every text shall begin with it. tokenizer_config.json has
    priority over special_tokens_map.json. Tokens that are not recorded and unreadable files are left out.
    """
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            data = load_json(file.with_name(name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if not isinstance(data, Mapping):
            continue
        for kind in ("eos", "bos"):
            token = data.get(f"{kind}_token")
            token = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(token, str) and token:
                found[kind] = token
        if data.get("add_bos_token") is True and "bos" in found:
            found["adds_bos"] = found["bos"]
    return found


def special_tokens(config: Mapping[str, Any]) -> list[str]:
    """Return the texts of the special tokens in `config`, the result of `tokenizer_config`."""
    added = config.get("added_tokens") or ()
    return [token["content"] for token in added if token.get("special") and token["content"]]


def reason_of(error: BaseException) -> str:
    """Return the first line of a tokenizer library's error. Raises `error` again if it has another cause.

    A Rust panic counts as an error of the library, although it is not an Exception. Signals and MemoryError
    do not count, and are raised again.
    """
    is_panic = type(error).__name__ == "PanicException"
    if isinstance(error, MemoryError) or not (is_panic or isinstance(error, Exception)):
        raise error
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True, slots=True)
class Encoding:
    """The pattern that splits texts before byte pairs are merged, and the special tokens.

    `pattern` is the regular expression for tiktoken, `plain` the one for engines without possessive
    quantifiers; only white space at the end of a text is split differently. `special` holds (token, id)
    pairs; with `after_ranks`, these ids are relative to the first id after all ranks.
    """

    pattern: str
    special: tuple[tuple[str, int], ...] = ()
    plain: str | None = None
    after_ranks: bool = False

    @property
    def content(self) -> str:
        """Digest of all fields, which identifies the encoding."""
        return digest_of(asdict(self))

    @classmethod
    def of(cls, given: str | Mapping[str, Any] | None) -> Encoding | None:
        """Return the encoding that a recipe names, or gives as `pattern` and `special_tokens`."""
        if isinstance(given, Mapping):
            return cls(given["pattern"], tuple(given.get("special_tokens", {}).items()))
        return None if given is None else ENCODINGS[given]

    @classmethod
    def named_by(cls, path: Path) -> Encoding | None:
        """Return the known encoding that a file is named after, as in cl100k_base.tiktoken, or None."""
        return ENCODINGS.get(path.stem) if path.suffix == ".tiktoken" else None

    def special_ids(self, ranks: Mapping[bytes, int]) -> dict[str, int]:
        """Return {special token: id} for a tokenizer file with these ranks."""
        first = max(ranks.values()) + 1 if self.after_ranks else 0
        return {token: first + number for token, number in self.special}


_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_GPT2_PLAIN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4 = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])  # fmt: skip
_LLAMA3_SPECIAL = (
    "<|begin_of_text|>", "<|end_of_text|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(4)),
    "<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(5, 251)),
)  # fmt: skip
_QWEN_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))
)  # fmt: skip


def _numbered(tokens: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((token, number) for number, token in enumerate(tokens))


ENCODINGS: Mapping[str, Encoding] = {
    "r50k_base": Encoding(_GPT2, (("<|endoftext|>", 50256),), _GPT2_PLAIN),
    "p50k_base": Encoding(_GPT2, (("<|endoftext|>", 50256),), _GPT2_PLAIN),
    "cl100k_base": Encoding(
        _GPT4,
        (
            ("<|endoftext|>", 100257),
            ("<|fim_prefix|>", 100258),
            ("<|fim_middle|>", 100259),
            ("<|fim_suffix|>", 100260),
            ("<|endofprompt|>", 100276),
        ),
        _LLAMA3,
    ),
    "o200k_base": Encoding(_GPT4O, (("<|endoftext|>", 199999), ("<|endofprompt|>", 200018))),
    "llama3": Encoding(_LLAMA3, _numbered(_LLAMA3_SPECIAL), after_ranks=True),
    "qwen": Encoding(_LLAMA3.replace("{1,3}", ""), _numbered(_QWEN_SPECIAL), after_ranks=True),
}
"""Published encodings by tiktoken's names; llama3 is for Llama 3 and 4, qwen for Qwen and Qwen 2."""


def own_engine(source: bytes | Path) -> Engine:
    """Return the library for which a tokenizer file is made; `source` is its path or its content."""
    if isinstance(source, Path):
        try:
            with source.open("rb") as file:
                source = file.read(_HEAD_BYTES)
        except OSError:
            return "tokenizers"  # reading the file later raises the error
    data = source
    if data.lstrip()[:1] in (b"{", b""):
        return "tokenizers"
    return "tiktoken" if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", data) else "sentencepiece"


def tokenizer_config(
    path: Path,
    data: bytes,
    encoding: Encoding | None = None,
    *,
    parse: Callable[[bytes], Any] = load_json,
) -> dict[str, Any]:
    """Convert `data`, the content of tokenizer file `path`, to the content of a tokenizer.json.

    Raises RecipeError if it is malformed.
    """
    engine = own_engine(data)
    if encoding is not None and engine != "tiktoken":
        raise RecipeError(
            f"tokenizer.encoding: applies only to files of byte pairs and ranks, and {path} is not one"
        )
    if engine == "tiktoken":
        if (encoding := encoding or Encoding.named_by(path)) is None:
            raise RecipeError(
                f"tokenizer.encoding: {path} holds byte pairs and ranks only; name their encoding "
                f"({', '.join(ENCODINGS)}), or give its pattern and special_tokens"
            )
        return _tiktoken_config(read_ranks(path, data), encoding)
    if engine == "sentencepiece":
        return sentencepiece_config(path, data)
    try:
        config = parse(data)
    except ValueError as error:
        raise RecipeError(
            f"tokenizer.path: {path} is not JSON ({error}); give a Hugging Face tokenizer.json"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise RecipeError(f"tokenizer.path: {path} has no `model`; give a Hugging Face tokenizer.json")
    if problem := _problem(config):
        raise RecipeError(f"tokenizer.path: {path} is damaged: {problem}")
    return config


def _problem(config: Mapping[str, Any]) -> str | None:
    """Return a description of the first error in the ids and tokens of a tokenizer.json, or None.

    The tokenizers library checks the other parts.
    """
    vocabulary = config["model"].get("vocab")
    if isinstance(vocabulary, dict):
        if (wrong := next((one for one in vocabulary.items() if not _is_id(one[1])), None)) is not None:
            return f"model.vocab: the id of {wrong[0][:80]!r} is {str(wrong[1])[:80]}"
    elif isinstance(vocabulary, list):  # the form of Unigram models
        for number, entry in enumerate(vocabulary):
            is_pair = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
            if not is_pair or not isinstance(entry[1], int | float):
                return f"model.vocab: entry {number:,} is not a pair of piece and score"
    elif vocabulary is not None:
        return "model.vocab is neither an object nor a list"
    added = config.get("added_tokens")
    if not isinstance(added, list | None):
        return "added_tokens is not a list"
    for number, token in enumerate(added or ()):
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            return f"added_tokens: entry {number:,} has no string `content`"
        if not _is_id(token.get("id")):
            return f"added_tokens: the id of {token['content'][:80]!r} is {str(token.get('id'))[:80]}"
        if not isinstance(token.get("special"), bool | None):
            return f"added_tokens: `special` of {token['content'][:80]!r} is neither true nor false"
    return None


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_IDS


def read_ranks(path: Path, data: bytes) -> dict[bytes, int]:
    """Parse a .tiktoken file into {token's bytes: rank}, where rank is the id. Raises RecipeError."""
    ranks: dict[bytes, int] = {}
    taken: set[int] = set()
    for number, line in enumerate(data.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            pair, place = base64.b64decode(token, validate=True), int(rank)
        except (ValueError, binascii.Error) as error:
            raise RecipeError(
                f"tokenizer.path: {path}: line {number:,} is not a byte pair and a rank ({error})"
            ) from error
        if pair in ranks or place in taken or not _is_id(place) or not pair:
            what = "is out of range" if not _is_id(place) else "or its byte pair occurs twice"
            what = what if pair else "has an empty byte pair"
            raise RecipeError(
                f"tokenizer.path: {path} is damaged: line {number:,}: rank {str(place)[:80]} {what}"
            )
        ranks[pair] = place
        taken.add(place)
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise RecipeError(f"tokenizer.path: {path} has no rank for byte {missing[0]:#04x}")
    return ranks


def _tiktoken_config(ranks: Mapping[bytes, int], encoding: Encoding) -> dict[str, Any]:
    """Return the tokenizer.json of a byte-level BPE with all merges of two tokens that form another token.

    The merges are in ascending order of the rank of the token that they form.
    """
    letters = dict(zip(range(256), _byte_letters(), strict=True))
    named = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=lambda token: ranks[token]):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    special = encoding.special_ids(ranks)
    if wrong := [token for token, number in special.items() if not _is_id(number)]:
        raise RecipeError(
            f"tokenizer.encoding: {wrong[0]!r} has id {special[wrong[0]]}; ids must be integers from 0 to "
            f"{_MOST_IDS - 1:,}"
        )
    gpt2 = encoding.plain == _GPT2_PLAIN
    split = {
        "type": "Split",
        "pattern": {"Regex": encoding.plain or encoding.pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": gpt2}
    return huggingface_config(
        {
            "type": "BPE",
            "byte_fallback": False,
            "ignore_merges": True,  # a piece of split text that is a token is not split into bytes
            "vocab": {named[token]: rank for token, rank in ranks.items()},
            "merges": [f"{named[left]} {named[right]}" for left, right in merges],
        },
        [(number, token, True) for token, number in special.items()],
        pre_tokenizer=byte_level if gpt2 else {"type": "Sequence", "pretokenizers": [split, byte_level]},
        decoder={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    )


def _byte_letters() -> list[str]:
    """Return the letter that represents each byte in byte-level vocabularies (Radford et al. 2019, GPT-2)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]
