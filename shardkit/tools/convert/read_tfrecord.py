"""Reads TFRecord files of tf.train.Example: as tokens of one feature, or as samples of all features.

With options that cut rows, an int64 feature (`input_ids`, `tokens`, or the only one) is read as documents.
Otherwise each feature becomes a column. The files are read twice, because only all records show what a column
must hold:

| values of the feature                     | MDS encoding                                                  |
|-------------------------------------------|---------------------------------------------------------------|
| one int64, or one float, in every record  | int, float32                                                  |
| one bytes value in every record           | jpeg or png if all begin as such, str if all are UTF-8, bytes |
| several numbers in every record           | ndarray:int64 or ndarray:float32, with the shape if all agree |
| any other count of numbers or UTF-8 texts | json: a list, empty where a record lacks the feature          |

Bytes that are not UTF-8 are refused if their count differs from one, and features of two kinds always.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shardkit.errors import ShardError
from shardkit.formats.mds.encodings import encoding_of
from shardkit.formats.tfrecord import Feature, FeatureKind, is_tfrecord_name, parse_example, read_records
from shardkit.hashing import hash_file
from shardkit.manifest import Column, FileInfo
from shardkit.tools.convert.columns import KEY, to_members, unchanged
from shardkit.tools.convert.source import BLOCK_BYTES, SOURCE_HASH, TOKEN_COLUMNS, Sample, TokenBlock

_MAX_FEATURES = 10_000
_OF = re.compile(r"(.*)-(\d+)-of-(\d+)(\.gz|\.tfrecords?)*")
_IMAGES = {b"\xff\xd8\xff": "jpeg", b"\x89PNG\r\n\x1a\n": "png"}


def tfrecord_files(folder: Path) -> list[Path]:
    """Return the TFRecord files of a folder, sorted; raises ShardError for several sets or a part of one."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and is_tfrecord_name(file.name))
    sets: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if found := _OF.fullmatch(file.name):
            sets.setdefault((found[1], int(found[3])), set()).add(int(found[2]))
    if len(sets) > 1:
        names = ", ".join(sorted(name for name, _ in sets))[:200]
        raise ShardError(folder, f"has several sets of files ({names}): give a pattern that matches one")
    for (name, count), numbers in sets.items():
        if len(numbers) < count:
            lacking = next(n for n in range(count) if n not in numbers)
            problem = (
                f"has {len(numbers):,} of the {count:,} files {name}-…, not number {lacking:,}: get the "
            )
            raise ShardError(folder, problem + "others, or give a pattern that matches those to convert")
    return files


class _TFRecords:
    """Base class of `TFRecordTokens` and `TFRecordSamples`: reads and parses all records."""

    kind: ClassVar[str] = "tfrecord"

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        try:
            self.bytes = sum(path.stat().st_size for path in self._paths)
        except OSError as error:
            raise ShardError(self._paths[0], f"cannot be read: {error.strerror or error}") from error
        self.files, self.files_done = len(self._paths), 0
        self.digests: list[FileInfo] = []

    def _examples(self, path: Path) -> Iterator[tuple[str, dict[str, Feature], int]]:
        """Yield (location, features, stored bytes) of each record of a file."""
        for number, (offset, data, stored) in enumerate(read_records(path)):
            place = f"{path}: record {number:,} at byte {offset:,}"
            try:
                yield place, parse_example(data), stored
            except ValueError as error:
                raise ShardError(place, f"is not a valid tf.train.Example: {error}") from error

    def _finish(self, path: Path) -> None:
        self.digests.append(FileInfo(path.name, path.stat().st_size, hash_file(path, [SOURCE_HASH])))
        self.files_done += 1


class TFRecordTokens(_TFRecords):
    """Reads one int64 feature; each record is a document."""

    has_documents = True
    max_token: int | None = None
    dtype: np.dtype[Any] = np.dtype(np.int64)

    def __init__(self, paths: Sequence[Path], columns: Sequence[str] | None = None) -> None:
        super().__init__(paths)
        self.feature = self._choose(columns)
        self._others: set[str] = set()

    def _choose(self, columns: Sequence[str] | None) -> str:
        if columns is not None:
            if len(columns) != 1:
                problem = f"only one feature of tokens can be converted, got {', '.join(columns)}"
                raise ShardError(self._paths[0], problem)
            return columns[0]
        first = next((example for path in self._paths for example in self._examples(path)), None)
        if first is None:
            raise ShardError(self._paths[0], "has no records: there is nothing to convert")
        place, features, _ = first
        numbers = [name for name, feature in features.items() if feature.kind == "int64"]
        chosen = [name for name in numbers if name in TOKEN_COLUMNS] or numbers
        if len(chosen) != 1:
            names = ", ".join(f"{name} ({feature.kind})" for name, feature in sorted(features.items()))[:500]
            problem = f"has no single int64 feature of tokens among {names}: name one with --columns"
            raise ShardError(place, problem)
        return chosen[0]

    @property
    def left_out(self) -> Sequence[str]:
        """Names of the other features that the records had so far."""
        return sorted(self._others)

    @property
    def facts(self) -> Mapping[str, object]:
        return {"feature": self.feature}

    def blocks(self) -> Iterator[TokenBlock]:
        """Yield the documents of all files in order, a few megabytes at a time."""
        document = 0
        for path in self._paths:
            held: list[Any] = []
            size = read = 0
            for place, features, stored in self._examples(path):
                if size >= BLOCK_BYTES:
                    yield _block(path, held, document, read, is_last=False)
                    document += len(held)
                    held, size, read = [], 0, 0
                values = self._tokens(place, features)
                held.append(values)
                size, read = size + values.nbytes, read + stored
                if len(self._others) < _MAX_FEATURES:
                    self._others.update(name for name in features if name != self.feature)
            if held:
                yield _block(path, held, document, read, is_last=True)
            document += len(held)
            self._finish(path)

    def _tokens(self, place: str, features: Mapping[str, Feature]) -> Any:
        feature = features.get(self.feature)
        if feature is None:
            names = ", ".join(sorted(features))[:500]
            raise ShardError(place, f"has no feature {self.feature!r}; its features: {names or 'none'}")
        if feature.kind not in ("int64", None):
            raise ShardError(place, f"feature {self.feature!r} holds {feature.kind} values, not int64 tokens")
        return feature.values


def _block(path: Path, held: Sequence[Any], document: int, read: int, *, is_last: bool) -> TokenBlock:
    ends = np.cumsum([len(values) for values in held], dtype=np.int64)
    tokens = np.concatenate([np.zeros(0, np.int64), *held])
    return TokenBlock(tokens, ends, str(path), document, 0, read, is_last)


@dataclass(slots=True)
class _Seen:
    """The content of one feature in all records: kind, first place, counts, and kinds of bytes."""

    kind: FeatureKind | None
    place: str
    records: int = 0
    least: int = 1 << 62
    most: int = 0
    image: str | None = None
    is_text: bool = True

    def add(self, name: str, feature: Feature, place: str) -> None:
        if self.kind is None:
            self.kind, self.place = feature.kind, place
        elif feature.kind not in (self.kind, None):
            raise ShardError(
                place,
                f"feature {name!r} holds {feature.kind} values, but {self.kind} ones in {self.place}: "
                "leave it out by naming the others with --columns",
            )
        count = len(feature.values)
        self.least, self.most = min(self.least, count), max(self.most, count)
        if self.kind == "bytes":
            for value in feature.values:
                self._add_bytes(value)
        self.records += 1

    def _add_bytes(self, value: bytes) -> None:
        image = next((kind for start, kind in _IMAGES.items() if value.startswith(start)), "")
        self.image = image if self.image in (None, image) else ""
        if self.is_text and image:
            self.is_text = False
        elif self.is_text:
            try:
                str(value, "utf-8")
            except UnicodeDecodeError:
                self.is_text = False

    def encoding(self, name: str, records: int) -> str:
        least = self.least if self.records == records else 0
        if self.kind == "bytes":
            if least == self.most == 1:
                return self.image or ("str" if self.is_text else "bytes")
            if self.is_text:
                return "json"
            counts = f"{least:,} to {self.most:,}" if least < self.most else f"{least:,}"
            problem = (
                f"feature {name!r} has {counts} bytes values a record, which a column cannot hold: leave it "
            )
            raise ShardError(self.place, problem + "out by naming the others with --columns")
        if least == 0:
            return "json"
        if self.most == 1:
            return "int" if self.kind == "int64" else "float32"
        dtype = "int64" if self.kind == "int64" else "float32"
        return f"ndarray:{dtype}:{least}" if least == self.most else f"ndarray:{dtype}"


class TFRecordSamples(_TFRecords):
    """Reads all features, or the selected ones, as columns."""

    has_keys = False

    def __init__(self, paths: Sequence[Path], target: str, columns: Sequence[str] | None = None) -> None:
        """Read all records once to choose the encodings; raises ShardError for what columns cannot hold."""
        super().__init__(paths)
        self._chosen = None if columns is None else frozenset(columns)
        self._records, seen = self._scan()
        described = []
        for name in sorted(seen):
            encoding = seen[name].encoding(name, self._records)
            if name == KEY:
                raise ShardError(
                    seen[name].place, f"feature {KEY!r} has the name of a sample's key: leave it out"
                )
            described.append(Column(name, encoding, encoding_of(encoding).size))
        try:
            mapped = to_members(described) if target == "wds" else unchanged(described)
        except ValueError as error:
            raise ShardError(self._paths[0], str(error)) from error
        self._columns = [(column, to) for column, to in zip(described, mapped, strict=True)]
        self.columns = {column.target: column.encoding for column in mapped}
        self.names = {column.target: column.source for column in mapped}

    def _scan(self) -> tuple[int, dict[str, _Seen]]:
        seen: dict[str, _Seen] = {}
        records = 0
        for path in self._paths:
            for place, features, _ in self._examples(path):
                records += 1
                for name in features if self._chosen is None else self._chosen & features.keys():
                    if name not in seen:
                        seen[name] = _Seen(None, place)
                    seen[name].add(name, features[name], place)
                if len(seen) > _MAX_FEATURES:
                    raise ShardError(place, f"is the record at which the features exceed {_MAX_FEATURES:,}")
        if not records:
            raise ShardError(self._paths[0], "has no records: there is nothing to convert")
        if lacking := (self._chosen or frozenset()) - seen.keys():
            raise ShardError(self._paths[0], f"has no feature {', '.join(sorted(lacking))} in any record")
        if not seen:
            raise ShardError(self._paths[0], f"has {records:,} records without any feature")
        return records, seen

    @property
    def facts(self) -> Mapping[str, object]:
        return {"records": self._records}

    def samples(self) -> Iterator[Sample]:
        """Yield all records in order."""
        records = 0
        for path in self._paths:
            for place, features, stored in self._examples(path):
                records += 1
                values: dict[str, bytes | memoryview] = {}
                for column, mapped in self._columns:
                    try:
                        data = _payload(features.get(column.name), column.encoding)
                        values[mapped.target] = mapped.convert(memoryview(data))
                    except (ValueError, TypeError) as error:
                        raise ShardError(place, f"feature {column.name!r}: {error}") from error
                yield Sample(values, None, place, stored)
            self._finish(path)
        if records != self._records:
            problem = f"had {self._records:,} records, now {records:,}: the files were changed meanwhile"
            raise ShardError(self._paths[0], problem)


def _payload(feature: Feature | None, encoding: str) -> bytes:
    """Return a feature's value as MDS stores it in a column of `encoding`."""
    if encoding == "json":
        return _listed([] if feature is None else feature.values)
    if feature is None:
        raise ValueError("is missing now, but was there: the file was changed meanwhile")
    if encoding.startswith("ndarray"):
        return encoding_of(encoding).encode(feature.values)
    [value] = feature.values
    if isinstance(value, bytes):
        return value
    encode: Callable[[Any], bytes] = encoding_of(encoding).encode
    return encode(value)


def _listed(values: Any) -> bytes:
    plain = [str(v, "utf-8") for v in values] if isinstance(values, list) else values.tolist()
    return json.dumps(plain, allow_nan=False).encode()
