"""Writes the demo's corpus, from text that every machine has, and trains a byte-level BPE tokenizer on it.

The text is the sources and documentation of the Python installation and of its packages. The same
installation gives the same files, byte for byte, and never more text than requested. Files that are not UTF-8
are counted and left out.
"""

from __future__ import annotations

import ast
import contextlib
import gzip
import importlib.metadata
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardkit.errors import MissingExtraError, ShardkitError

EOS = "<|endoftext|>"
MAX_DOCUMENT_BYTES = 2_000_000  # maximum size of a source file; larger ones are generated tables
DOCUMENTATION_SHARE = 0.25
SOURCE_FILES = 4  # number of source files; each compressed file is one split that a task can read in parallel
LICENSE_NAMES = ("license", "copying", "notice", "authors")


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its id and its kind of origin."""

    id: str
    text: str
    kind: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """The names of the corpus files, and counts of their content."""

    source_files: tuple[str, ...]
    documentation_files: tuple[str, ...]
    documents: int
    text_bytes: int
    skipped: int
    origin: str


def write_corpus(folder: Path, limit_bytes: int) -> tuple[Corpus, list[Document]]:
    """Write up to `limit_bytes` of text, a quarter of it prose, as gzipped JSON lines and Parquet.

    Return a summary of the corpus and its documents. Raises ShardkitError if the installation has no text.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    skipped: list[Path] = []
    documentation = list(_until(_documentation(skipped), int(limit_bytes * DOCUMENTATION_SHARE)))
    sources = list(_until(_sources(skipped), limit_bytes - _text_bytes(documentation)))
    if not sources or not documentation:
        raise ShardkitError(
            f"no Python sources or no documentation under {sysconfig.get_path('stdlib')}: the demo needs an "
            "installation whose standard library consists of .py files"
        )
    folder.mkdir(parents=True, exist_ok=True)
    source_files = []
    for part in range(SOURCE_FILES):
        file = folder / f"source-{part}.jsonl.gz"
        lines = (
            json.dumps({"id": d.id, "text": d.text, "kind": d.kind}, ensure_ascii=False) + "\n"
            for d in sources[part::SOURCE_FILES]
        )
        # Leave name and time out of the gzip header, so that the same text gives the same file.
        with file.open("wb") as raw, gzip.GzipFile("", "wb", 3, raw, mtime=0) as zipped:
            zipped.write("".join(lines).encode())
        source_files.append(file.name)
    columns = {name: [getattr(d, name) for d in documentation] for name in ("id", "text", "kind")}
    pq.write_table(pa.table(columns), folder / "documentation.parquet", row_group_size=500)
    documents = [*sources, *documentation]
    corpus = Corpus(
        tuple(source_files), ("documentation.parquet",), len(documents), _text_bytes(documents),
        len(skipped), sysconfig.get_path("stdlib"),
    )  # fmt: skip
    return corpus, documents


def _text_bytes(documents: Iterable[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)


def _until(documents: Iterable[Document], limit_bytes: int) -> Iterator[Document]:
    """Yield documents until `limit_bytes` is reached; skip documents that exceed the remaining bytes."""
    for document in documents:
        size = len(document.text.encode())
        if size <= limit_bytes:
            limit_bytes -= size
            yield document
        if limit_bytes < 1000:
            return


def _documentation(skipped: list[Path]) -> Iterator[Document]:
    """Yield Python's manual pages, descriptions and licenses of packages, then docstrings."""
    with contextlib.suppress(ImportError):  # some distributions ship pydoc_data in a separate package
        from pydoc_data.topics import topics

        for name in sorted(topics):
            yield Document(f"pydoc:{name}", topics[name], "manual")
    yield from _package_texts(skipped)
    for source in _sources(skipped):
        try:
            tree = ast.parse(source.text)
        except (SyntaxError, ValueError, RecursionError):  # Python's tests include broken files on purpose
            continue
        texts = [
            ast.get_docstring(node) or ""
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        if any(texts):
            yield Document(f"docstrings:{source.id}", "\n\n".join(filter(None, texts)), "docstrings")


def _package_texts(skipped: list[Path]) -> Iterator[Document]:
    """Yield descriptions and licenses of packages; many are equal, so that deduplication has an effect."""
    packages = {
        d.metadata["Name"].lower(): d for d in importlib.metadata.distributions() if d.metadata["Name"]
    }
    for name in sorted(packages):
        for entry in sorted(packages[name].files or (), key=str):
            stem = Path(entry.name).stem.lower()
            if not (entry.name == "METADATA" or stem.startswith(LICENSE_NAMES)) or entry.suffix == ".py":
                continue
            text = _read_text(Path(str(entry.locate())), skipped)
            if text is not None:
                yield Document(f"{name}/{entry}", text, "package")


def _sources(skipped: list[Path]) -> Iterator[Document]:
    """Yield the .py files of the standard library, in order of their names, then of installed packages."""
    seen: set[Path] = set()
    for scheme in ("stdlib", "purelib"):
        root = Path(sysconfig.get_path(scheme)).resolve()
        for file in _python_files(root):
            if file in seen:
                continue
            seen.add(file)
            text = _read_text(file, skipped)
            if text is not None:
                yield Document(f"{scheme}/{file.relative_to(root).as_posix()}", text, "source")


def _python_files(root: Path) -> Iterator[Path]:
    """Yield .py files under `root`, depth first in order of names, without nested site-packages folders."""
    foreign = {"site-packages", "dist-packages", "__pycache__"}
    for entry in sorted(root.iterdir(), key=lambda path: path.name) if root.is_dir() else ():
        if entry.is_symlink() or entry.name in foreign:
            continue
        if entry.is_dir():
            yield from _python_files(entry)
        elif entry.suffix == ".py":
            yield entry


def _read_text(file: Path, skipped: list[Path]) -> str | None:
    """Return a file's text; if it is too large, unreadable or not UTF-8, add the file to `skipped`."""
    try:
        if file.stat().st_size <= MAX_DOCUMENT_BYTES:
            return file.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        pass
    skipped.append(file)
    return None


def train_tokenizer(
    file: Path, documents: Sequence[Document], *, vocabulary: int = 8192, sample_bytes: int = 4_000_000
) -> int:
    """Train a tokenizer on about `sample_bytes` of text, write it to `file`; return its vocabulary size."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise MissingExtraError("tokenizers", "write", "the demo") from error

    total = sum(len(document.text) for document in documents)
    stride = max(1, -(-total // sample_bytes))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents[::stride]), trainer=trainer)
    tokenizer.save(str(file))
    return int(tokenizer.get_vocab_size())
