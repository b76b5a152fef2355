"""README.md of a dataset repository on the Hugging Face Hub: the content of the dataset's page.

It depends only on the dataset's index and card, so equal datasets have equal pages. Its header tells the
`datasets` library and the Hub's viewer which files are data: the tables or lines of a text dataset, but not
provenance or dropped documents. The viewer is turned off for packed tokens, which it cannot show. The owner
of the data adds the license. The parts of a split, each a dataset in its own folder, share a page.

The last line contains a hash of all lines before it. A README.md without that line, or with another hash, was
written or edited by somebody else, and is never overwritten.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from shardkit.card import DatasetCard
from shardkit.errors import ShardError, warn_user
from shardkit.formats.trainers import TRAINER_FORMATS
from shardkit.hashing import hash_bytes
from shardkit.publish.contents import (
    CONTENT_HASH,
    INDEX_NAMES,
    Contents,
    find_only_contents,
    head_if_any,
)
from shardkit.storage.hub import HubPlace
from shardkit.storage.resilient import connect
from shardkit.storage.store import Store
from shardkit.units import format_bytes

PAGE_NAME = "README.md"
_PACKED = {"mds": "MosaicML Streaming (MDS) shards", "tar": "WebDataset tars"} | {
    name: f"token files for {kind.trainer}" for name, kind in TRAINER_FORMATS.items()
}
_MAX_PAGE_BYTES = 10 << 20
_SIGNATURE = re.compile(rb"<!-- written by shardkit; ([0-9a-f]{32}) -->\n")
_SIZES = (("n<1K", 10**3), ("1K<n<10K", 10**4), ("10K<n<100K", 10**5), ("100K<n<1M", 10**6),
          ("1M<n<10M", 10**7), ("10M<n<100M", 10**8), ("100M<n<1B", 10**9), ("1B<n<10B", 10**10),
          ("10B<n<100B", 10**11), ("100B<n<1T", 10**12))  # fmt: skip


def write_repository_card(store: Store, contents: Contents) -> None:
    """Write the repository's page if the store is its root, or a folder in it with one part of a split.

    Otherwise do nothing. A README.md that shardkit did not write is kept; if shardkit wrote it and somebody
    edited it, a warning is issued. Raises StoreError; ShardError if another part is damaged.
    """
    if not store.url.startswith("hf://"):
        return
    place = HubPlace.parse(store.url)
    if not place.path:
        _write_page(store, repository_card({"": contents}, place))
    elif "/" not in place.path and contents.card is not None and contents.card.has("split"):
        place = HubPlace(place.repository, place.revision, "")
        with closing(connect(place.root)) as top:
            _write_page(top, repository_card(_parts(top), place))


def _write_page(top: Store, page: bytes) -> None:
    if info := head_if_any(top, PAGE_NAME):
        old = top.get(PAGE_NAME, version=info.version) if info.bytes <= _MAX_PAGE_BYTES else b""
        if old == page:
            return
        if not _is_ours(old):
            if _SIGNATURE.search(old):
                warn_user(
                    f"{top.url}/{PAGE_NAME}: was edited after shardkit wrote it, so it is not updated; "
                    "delete it to let the next upload write it again"
                )
            return
    top.put(PAGE_NAME, page)


def _parts(top: Store) -> dict[str, Contents]:
    """Return {folder: contents} of the parts of a split that are in the repository, train first."""
    folders = {
        info.key.partition("/")[0]
        for info in top.list()
        if info.key.count("/") == 1 and info.key.endswith(INDEX_NAMES)
    }
    found = {}
    for folder in sorted(folders, key=lambda name: (name != "train", name)):
        with closing(connect(f"{top.url}/{folder}")) as store:
            contents = find_only_contents(store)
        if contents is not None and contents.card is not None and contents.card.has("split"):
            found[folder] = contents
    return found


def repository_card(datasets: Mapping[str, Contents], place: HubPlace) -> bytes:
    """Return README.md for {folder: contents}: one dataset at the root (""), or the parts of a split."""
    texts = {name for name, contents in datasets.items() if contents.manifest.format not in _PACKED}
    is_text = len(texts) == len(datasets)
    parts = [_header(datasets, is_text=is_text), f"# {place.repository.partition('/')[2]}\n"]
    for name, contents in datasets.items():
        parts += [f"## {name}\n" if name else "", _summary(contents, is_text=name in texts)]
        parts.append("" if contents.card is None else _funnel(contents.card))
    if (card := next(iter(datasets.values())).card) is not None:
        parts += [_tokenizer(card), _recipe(card)]
    first, kind = next(iter(datasets)), next(iter(datasets.values())).manifest.format
    parts.append(_how_to_load(place, first, is_text=is_text, is_cut=kind in TRAINER_FORMATS))
    text = "\n".join(part for part in parts if part).encode() + b"\n"
    return text + _signature(text)


def _is_ours(page: bytes) -> bool:
    text, mark, _ = page.rpartition(b"<!-- written by shardkit;")
    return bool(mark) and page == text + _signature(text)


def _signature(text: bytes) -> bytes:
    return f"<!-- written by shardkit; {hash_bytes(text, [CONTENT_HASH])[CONTENT_HASH]} -->\n".encode()


def _header(datasets: Mapping[str, Contents], *, is_text: bool) -> str:
    """Return the metadata for the Hub as YAML; strings are written as JSON, which is valid YAML."""
    count = sum(contents.manifest.samples for contents in datasets.values())
    size = next((label for label, limit in _SIZES if count < limit), "n>1T")
    lines = ["---", "# license: state it here; the page is then yours, and no longer written by shardkit"]
    lines.append(f"size_categories: [{json.dumps(size)}]")
    if is_text:
        lines += ["configs:", "- config_name: default", "  data_files:"]
        for name, contents in datasets.items():
            names = (posixpath.join(name, s.stored.basename) for s in contents.manifest.shards)
            paths = ", ".join(json.dumps(pattern) for pattern in _patterns(names, name))
            lines.append(f"  - {{split: {name or 'train'}, path: [{paths}]}}")
    else:
        lines.append("viewer: false  # packed tokens: see below how to load them")
    return "\n".join([*lines, "---", ""])


def _patterns(names: Iterable[str], top: str) -> list[str]:
    """Return globs for files; "*" replaces the first number in a name, and each folder below `top`."""
    found = set()
    for name in names:
        folder, base = posixpath.split(posixpath.relpath(name, top or "."))
        depth = folder.count("/") + 1 if folder else 0
        found.add(posixpath.join(top, "*/" * depth + re.sub(r"\d+", "*", base, count=1)))
    return sorted(found)


def _summary(contents: Contents, *, is_text: bool) -> str:
    manifest, card = contents.manifest, contents.card
    stored = sum(shard.stored.bytes for shard in manifest.shards)
    is_packed = card is not None and card.has("sequence_length")
    kind = "documents" if is_text else "sequences" if is_packed else "samples"
    rows: list[tuple[str, str]] = [
        ("form", _PACKED.get(manifest.format, f"documents in {manifest.format} files")),
        (kind, f"{manifest.samples:,}"),
        ("files", f"{len(manifest.shards):,}, {format_bytes(stored)}"),
    ]
    if card is not None and not is_text:
        stated = (("tokens", "tokens"), ("tokens in a sequence", "sequence_length"), ("type", "dtype"))
        rows[2:2] = [(label, _number(card.data[key])) for label, key in stated if card.has(key)]
    rows.append(("fingerprint", f"`{manifest.fingerprint}`"))
    return _table(("", ""), rows)


def _funnel(card: DatasetCard) -> str:
    """Return a table of the funnel's steps; "" if the card has none or is damaged."""
    if not card.has("funnel"):
        return ""
    try:
        steps = card.funnel_steps()
    except ShardError:
        return ""
    rows = [
        (
            _cell(step.label),
            f"{step.lost_documents:,}" if step.lost_documents or step.lost_bytes else "",
            f"{step.documents:,}",
            format_bytes(step.bytes),
        )
        for step in steps
    ]
    table = _table(("step", "documents lost", "documents left", "text left"), rows, right=(1, 2, 3))
    return f"### From raw text to these documents\n\n{table}"


def _tokenizer(card: DatasetCard) -> str:
    facts = card.tokenizer
    stated = [
        ("file", facts.path or facts.file),
        ("digest", facts.digest),
        ("end of a document", None if facts.eos is None else f"{facts.eos} ({facts.eos_id})"),
    ]
    rows = [(label, f"`{_cell(value)}`") for label, value in stated if value is not None]
    return f"## Tokenizer\n\n{_table(('', ''), rows)}" if rows else ""


def _recipe(card: DatasetCard) -> str:
    """Return a section with the recipe, without keys that are null or empty."""
    recipe = card.data.get("recipe")
    if not isinstance(recipe, dict):
        return ""
    import yaml

    text = yaml.safe_dump(_stated(recipe), sort_keys=False, allow_unicode=True, width=100)
    version, digest = card.data.get("shardkit_version"), card.data.get("recipe_digest")
    by = f"Built by shardkit {version} from the recipe of digest `{digest}`:"
    return f"## Recipe\n\n{by}\n\n````yaml\n{text}````\n"


def _stated(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stated(each) for key, each in value.items() if each not in (None, [], {})}
    return [_stated(each) for each in value] if isinstance(value, list) else value


def _how_to_load(place: HubPlace, name: str, *, is_text: bool, is_cut: bool) -> str:
    url, cut = f"{place.root}/{name}".rstrip("/"), "sequence_length=2048, " if is_cut else ""
    if is_text:
        arguments = f'"{place.repository}", split="{name or "train"}"'
        code = f"from datasets import load_dataset\n\nload_dataset({arguments})"
    else:
        code = (
            "import shardkit as sk\n\n"
            f'loader = sk.StreamingLoader("{url}", {cut}batch_size=8, cache_dir="/nvme/cache")'
        )
    return (
        f"## Load\n\n````python\n{code}\n````\n\n"
        f"`shardkit download {url} folder` fetches all files, and `shardkit verify {url}` "
        "checks them.\n"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    rule = ["---:" if number in right else "---" for number in range(len(head))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))


def _cell(text: str) -> str:
    """Escape untrusted text for a cell of a Markdown table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("`", "'")


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else _cell(str(value))
