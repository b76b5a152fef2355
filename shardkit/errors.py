"""All errors that shardkit raises on purpose, and `warn_user` for warnings.

A message says what was wrong, where, and what to do. Catch `ShardkitError` to catch them all.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from os import PathLike, fspath

__all__ = [
    "NOT_WHOLE",
    "BuildError",
    "ConservationError",
    "MissingExtraError",
    "PathError",
    "PeerError",
    "RanksDisagreeError",
    "RecipeError",
    "ShardError",
    "ShardNotFoundError",
    "ShardkitError",
    "StateError",
    "StreamExhaustedError",
    "TransformError",
    "clean_message",
    "naming_extras",
    "warn_user",
    "without_password",
]

# Matches user and password in a URL, even if pathlib.Path has removed the second slash after the scheme.
_USER_INFO = re.compile(r"(?<=://)[^/\s\"'<>]*@|(?<=:/)[^/\s\"'<>@:]*:[^/\s\"'<>]*@")
_SECRETS = re.compile(
    r"(?i)(\bbearer\s+|\bbasic\s+(?=[a-z0-9+/]{8})|\bx-amz-(?:signature|security-token|credential)\b[=:]\s*|"
    r"[?&](?:sig|signature|token|access_token|awsaccesskeyid)=)[^\s\"'<>&,;:]+|\b(?-i:hf_)[a-z0-9]{16,}"
)
# Control characters except tab and newline, and characters that change the text direction or break lines.
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)

# Import name of an optional module -> (distribution, extra of shardkit that installs it).
_EXTRAS = {
    "PIL": ("Pillow", "formats"),
    "awkward": ("awkward", "write"),
    "boto3": ("boto3", "s3"),
    "botocore": ("boto3", "s3"),
    "brotli": ("Brotli", "formats"),
    "cramjam": ("python-snappy", "formats"),  # a dependency of python-snappy
    "cbor2": ("cbor2", "webdataset"),
    "faiss": ("faiss-cpu", "semantic"),
    "floret": ("floret", "classifier"),
    "fsspec": ("fsspec", "fsspec"),
    "gigatoken": ("gigatoken", "write"),
    "google_crc32c": ("google-crc32c", "tfrecord"),
    "h11": ("uvicorn", "view"),  # a dependency of uvicorn
    "httptools": ("httptools", "ask"),
    "huggingface_hub": ("tokenizers", "write"),  # a dependency of tokenizers
    "isal": ("isal", "fast"),
    "jinja2": ("Jinja2", "view"),
    "lightning": ("lightning", "lightning"),
    "llvmlite": ("numba", "write"),
    "lz4": ("lz4", "formats"),
    "msgpack": ("msgpack", "webdataset"),
    "markupsafe": ("Jinja2", "view"),  # a dependency of Jinja2
    "mwparserfromhell": ("mwparserfromhell", "wiki"),
    "numba": ("numba", "write"),
    "orjson": ("orjson", "write"),
    "pyarrow": ("pyarrow", "write"),
    "ray": ("ray", "ray"),
    "pypdfium2": ("pypdfium2", "pdf"),
    "resiliparse": ("resiliparse", "html"),
    "sentencepiece": ("sentencepiece", "sentencepiece"),
    "simplejpeg": ("simplejpeg", "images"),
    "snappy": ("python-snappy", "formats"),
    "jieba": ("jieba", "spacy"),
    "spacy": ("spacy", "spacy"),
    "starlette": ("starlette", "view"),
    "tiktoken": ("tiktoken", "tiktoken"),
    "tokenizers": ("tokenizers", "write"),
    "torch": ("torch", "torch"),
    "trafilatura": ("trafilatura", "html"),
    "urllib3": ("urllib3", "http"),
    "uvicorn": ("uvicorn", "view"),
    "warcio": ("warcio", "warc"),
    "webdataset": ("webdataset", "webdataset"),
    "webencodings": ("webencodings", "write"),
}

# Modules that no extra installs, because their users have them: trainers of shardkit.loaders.integrations,
# Jupyter, pandas and clients of metrics. Import name -> what to pass to pip install.
_WITHOUT_EXTRA = {
    "IPython": "ipython",
    "accelerate": "accelerate",
    "composer": "mosaicml",
    "datasets": "datasets",
    "datatrove": "datatrove",
    "grain": "grain",
    "jax": "jax",
    "litgpt": "litgpt",
    "maxtext": "git+https://github.com/AI-Hypercomputer/maxtext",
    "megatron": "megatron-core",
    "nanotron": "git+https://github.com/huggingface/nanotron",
    "olmo_core": "ai2-olmo-core",
    "pandas": "pandas",
    "prometheus_client": "prometheus-client",
    "torchtitan": "torchtitan",
    "transformers": "transformers",
    "tyro": "torchtitan",
}


class ShardkitError(Exception):
    """Base of all errors raised by shardkit on purpose."""

    def __str__(self) -> str:
        return clean_message(super().__str__())


def without_password(text: str) -> str:
    """Return `text` with `user:password@` removed from all URLs."""
    return _USER_INFO.sub("", text)


def clean_message(text: str) -> str:
    """Return a message without secrets and unsafe characters that untrusted files and servers put into it.

    Removes passwords in URLs, and tokens and signatures that a server echoes. Escapes characters that control
    a terminal, and those that UTF-8 cannot encode (unpaired surrogates, from file names that are not UTF-8).
    """
    text = _SECRETS.sub(lambda found: f"{found[1] or ''}***", without_password(text))
    text = _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return text.encode("utf-8", "backslashreplace").decode()


NOT_WHOLE = "its writer did not finish, or it was not copied whole"
"""The cause that error messages give for files that are empty or end early."""


class ShardError(ShardkitError):
    """A shard, index or card is missing, damaged, hostile or not what it claims to be.

    The message names the file and, where one is known, the byte offset.
    """

    def __init__(self, file: str | PathLike[str], problem: str, *, offset: int | None = None) -> None:
        self.file = fspath(file)
        self.offset = offset
        self.problem = problem
        where = self.file if offset is None else f"{self.file}: byte {offset:,}"
        super().__init__(f"{where}: {problem}")

    def __reduce__(self) -> tuple[object, ...]:
        # Builds send exceptions between processes: rebuild them with the keyword argument.
        return (partial(type(self), offset=self.offset), (self.file, self.problem))


class ShardNotFoundError(ShardError, FileNotFoundError):
    """There is no dataset or shard at the given place."""


class PathError(ShardkitError, ValueError):
    """A path option is not a path on this machine: a URL, an unexpanded variable, or empty."""


class RecipeError(ShardkitError):
    """A recipe has an unknown key or an invalid value; the message contains the key path."""


class BuildError(ShardkitError):
    """A build cannot continue; finished work is kept, and running the same command again resumes it."""


class ConservationError(BuildError):
    """The document counts of a task violate in = kept + dropped + quarantined. Always a bug."""


class StateError(ShardkitError):
    """A loader state does not match the dataset or the settings of the loader that restores it."""


class StreamExhaustedError(ShardkitError):
    """A stream of a mixture has delivered all samples that its `repeat` or `choose` allows."""


class TransformError(ShardkitError):
    """A `transform` or `collate_fn` failed, or returned what cannot be in a batch; names the sample."""


class PeerError(ShardkitError):
    """The loader of another rank failed, so this one stops too; the message is from that rank."""

    def __init__(self, rank: int, step: int | None, problem: str) -> None:
        self.rank, self.step, self.problem = rank, step, problem
        where = "" if step is None else f" at step {step:,}"
        super().__init__(f"rank {rank} stopped{where}: {problem}")

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.rank, self.step, self.problem))


class RanksDisagreeError(ShardkitError, ValueError):
    """Ranks of one run differ in settings, data or position; the message names the differences and ranks."""


class MissingExtraError(ShardkitError, ImportError):
    """An optional package is not installed; the message says what to install."""

    def __init__(self, package: str, extra: str | None, purpose: str) -> None:
        """`extra`: the extra of shardkit that installs the package; None if none does."""
        wanted = package if extra is None else f"'shardkit[{extra}]'"
        super().__init__(f"{purpose} needs {package}: pip install {wanted}")
        self.package, self.extra, self.purpose = package, extra, purpose

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.package, self.extra, self.purpose))


@contextmanager
def naming_extras(purpose: str, **extras: str) -> Iterator[None]:
    """Convert a failed import of an optional package in the block into a MissingExtraError.

    `extras`: {package: extra to name}, where another one than the package's usual extra suits the purpose.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in _WITHOUT_EXTRA:
            raise MissingExtraError(_WITHOUT_EXTRA[package], None, purpose) from error
        if package not in _EXTRAS:
            raise
        distribution, extra = _EXTRAS[package]
        raise MissingExtraError(distribution, extras.get(package, extra), purpose) from error


def warn_user(message: str) -> None:
    """Issue a RuntimeWarning at the line of the user's code (or of another library) that called shardkit.

    The line is in the innermost frame outside shardkit and the standard library (whose contextlib and threads
    call back into shardkit). In a thread of shardkit, which has no such frame, the line of the `warn_user`
    call is used.
    """
    here = frame = sys._getframe(1)
    while _is_passed_over(frame.f_globals.get("__name__", "")):
        if frame.f_back is None:
            frame = here
            break
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    name, file = frame.f_globals.get("__name__"), frame.f_code.co_filename
    warnings.warn_explicit(clean_message(message), RuntimeWarning, file, frame.f_lineno, name, registry)


def _is_passed_over(module: str) -> bool:
    package = module.partition(".")[0]
    return package == "shardkit" or package in sys.stdlib_module_names
