"""`train_classifier`: trains a fastText model on labeled texts, for the `classifier` filter.

A part of the records, chosen by a hash of their text, is held out to measure the quality of the model.
Training uses fastText's own code in the package floret, which has a module name of its own, unlike other
packages of that code. The model is converted to fastText's format, so that fastText can read it too. Training
uses one thread and a seed: the same records and settings give the same bytes.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from shardkit.errors import BuildError, MissingExtraError
from shardkit.files import load_json, local_path
from shardkit.kernels.text_arrays import text_bytes, text_offsets
from shardkit.writers.kernels.fasttext import FastTextScorer
from shardkit.writers.kernels.fasttext_model import LABEL_PREFIX, load_fasttext

_SPACES = str.maketrans("\n\r\t\v\f\0", "      ")
_EXTRA_AT, _EXTRA_BYTES = 52, 8  # offset and size of the two arguments that floret adds to fastText's format
_PLAIN = struct.pack("<2i", 1, 1)  # these arguments for fastText's method: a word table, one hash per n-gram
_BATCH_TEXTS = 1024


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Arguments of fastText's training. N-grams of characters are not used.

    A model takes 4 * dimensions * (words + buckets) bytes.
    """

    epochs: int = 5
    learning_rate: float = 0.5
    dimensions: int = 64
    word_ngrams: int = 2
    buckets: int = 200_000
    min_count: int = 1
    seed: int = 17
    held_out: float = 0.1


@dataclass(frozen=True)
class LabelQuality:
    """The precision and recall of a model for one label, on held-out documents; None if there were none."""

    label: str
    documents: int
    held_out: int
    precision: float | None
    recall: float | None


@dataclass(frozen=True)
class TrainedClassifier:
    """A trained model and its quality on the held-out documents."""

    path: str
    bytes: int
    documents: int
    held_out: int
    accuracy: float | None
    labels: tuple[LabelQuality, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def train_classifier(
    labelled: Path | str,
    output: Path | str,
    *,
    text: str = "text",
    label: str = "label",
    settings: TrainingSettings | None = None,
) -> TrainedClassifier:
    """Train on JSONL records with the fields `text` and `label`, and write the model to `output`.

    Raises BuildError for a record that cannot be used, and MissingExtraError if floret is not installed.
    """
    settings, output = settings or TrainingSettings(), local_path(output)
    floret = _floret()
    records = list(_records(local_path(labelled), text, label))
    held_out = [_is_held_out(one, settings) for one, _ in records]
    trained = Counter(name for (_, name), out in zip(records, held_out, strict=True) if not out)
    if len(trained) < 2:
        raise BuildError(f"{labelled}: a classifier needs documents of two labels, found {len(trained)}")
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        train, model = Path(folder, "train.txt"), Path(folder, "model.bin")
        with train.open("w", encoding="utf-8", newline="") as file:
            for (one, name), out in zip(records, held_out, strict=True):
                if not out:
                    file.write(f"{LABEL_PREFIX}{name} {_line(one)}\n")
        try:
            floret.train_supervised(str(train), **_arguments(settings)).save_model(str(model))
        except (RuntimeError, ValueError) as error:  # for example, NaN because the learning rate is too high
            raise BuildError(f"{labelled}: fastText cannot train on it: {error}") from error
        _as_fasttext(model)
        result = _measure(model, output, records, held_out)
        model.replace(output)
    return result


def _floret() -> Any:
    try:
        import floret
    except ImportError as error:
        # The extra leaves floret out where it has no wheel.
        extra = "classifier" if sys.version_info < (3, 13) else None
        purpose = "training a classifier (on Python 3.13, pip builds floret, which requires a C++ compiler)"
        raise MissingExtraError("floret", extra, purpose) from error
    return floret


def _arguments(settings: TrainingSettings) -> dict[str, Any]:
    return {
        "epoch": settings.epochs,
        "lr": settings.learning_rate,
        "dim": settings.dimensions,
        "wordNgrams": settings.word_ngrams,
        "bucket": settings.buckets,
        "minCount": settings.min_count,
        "seed": settings.seed,
        "thread": 1,
        "verbose": 0,
    }


def _records(path: Path, text: str, label: str) -> Iterator[tuple[str, str]]:
    """Yield (text, label) of each record; `text` and `label` are the names of the fields."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if line.strip():
                    yield _record(line, text, label, f"{path}: record {number:,}")
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror or error}") from error


def _record(line: bytes, text: str, label: str, where: str) -> tuple[str, str]:
    try:
        record = load_json(line)
    except ValueError as error:
        raise BuildError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get(text), str):
        raise BuildError(f"{where} has no text in field {text!r}; set `text` to the name of the field")
    name = record.get(label)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise BuildError(f"{where} has no label in field {label!r}; it must be a string or a whole number")
    name = str(name).removeprefix(LABEL_PREFIX)
    if not name or name.translate(_SPACES).strip() != name or " " in name:
        raise BuildError(f"{where}: label {name!r} is empty or has white space, which fastText forbids")
    return record[text], name


def _is_held_out(text: str, settings: TrainingSettings) -> bool:
    value = xxhash.xxh3_64_intdigest(text.encode(errors="replace"), settings.seed)
    return value < settings.held_out * 2**64


def _line(text: str) -> str:
    """Return a text as one line for fastText, without words that fastText takes for a label or a line end."""
    plain = text.translate(_SPACES).replace("</s>", " ").replace(LABEL_PREFIX, " ")
    return plain.encode(errors="replace").decode()


def _as_fasttext(path: Path) -> None:
    """Remove floret's two additional arguments from a model file, so that it is in fastText's format."""
    data = path.read_bytes()
    assert data[_EXTRA_AT : _EXTRA_AT + _EXTRA_BYTES] == _PLAIN, "not a model of floret 0.10"
    path.write_bytes(data[:_EXTRA_AT] + data[_EXTRA_AT + _EXTRA_BYTES :])


def _measure(
    model: Path, output: Path, records: Sequence[tuple[str, str]], held_out: Sequence[bool]
) -> TrainedClassifier:
    scorer = FastTextScorer(load_fasttext(model))
    chosen = [record for record, out in zip(records, held_out, strict=True) if out]
    guessed: list[str] = []
    for at in range(0, len(chosen), _BATCH_TEXTS):
        encoded = [one.encode(errors="replace") for one, _ in chosen[at : at + _BATCH_TEXTS]]
        texts = pa.array(encoded, pa.large_binary()).cast(pa.large_string())
        scores = scorer.scores(text_bytes(texts), text_offsets(texts), np.ones(len(texts), np.bool_))
        best = scores.argmax(axis=1)
        guessed += [scorer.model.labels[number] for number in best.tolist()]
    names = [name for _, name in chosen]
    right = Counter(name for name, guess in zip(names, guessed, strict=True) if name == guess)
    documents, true, told = Counter(name for _, name in records), Counter(names), Counter(guessed)
    labels = [
        LabelQuality(name, documents[name], true[name], _part(right, told, name), _part(right, true, name))
        for name in sorted(documents)
    ]
    accuracy = float(np.sum(list(right.values())) / len(chosen)) if chosen else None
    size = model.stat().st_size
    return TrainedClassifier(str(output), size, len(records), len(chosen), accuracy, tuple(labels))


def _part(part: Mapping[str, int], whole: Mapping[str, int], name: str) -> float | None:
    return part[name] / whole[name] if whole[name] else None
