"""Read tar headers, group members into samples, and keep both in an index file.

Headers: v7, ustar, PAX (`x`, `g`: path and size overrides) and GNU (`L`, `K`, base-256 numbers) are read from
a buffer. Nothing is trusted: checksums, lengths and ends are checked before use, extension headers have
limits, and any violation raises `ShardError` with the byte offset. Stricter than `tarfile` and GNU tar on
purpose, because both lose samples silently: a damaged header in mid-file is an error, not the end of the
archive, and so is anything but zeros after the end marker. Member names are only keys, and no file is ever
created under them, so absolute names and `..` are harmless. Reading takes a few microseconds per member.

Samples, as WebDataset groups them: a key is the path up to the first dot of its last component, the extension
is the rest in lower case. Consecutive members with the same key are one sample. Members in a top-level
`__name__` folder are metadata and names without an extension are not data: both are skipped, as `webdataset`
does, and so are the files that macOS adds (`._name`, `.DS_Store`). A repeated extension inside a sample is an
error, and so is a key that recurs later in the tar, which would split its sample in two. Base names with dots
("22.05.txt" and "22.06.txt") make one sample, usually by mistake: a warning names the first two. A `TarIndex`
is a few arrays: about 20 bytes per member, plus the keys.

Layout of the index file, which saves scanning the tar again:

    magic (8) | u32 bytes of the head | head JSON | xxh3_128 of all before | body | xxh3_128 of the body
    body: i64 starts[samples + 1] | i64 offsets[members] | i64 sizes[members] | i64 key ends[samples]
          | i32 kinds[members] | keys, UTF-8

The head names the object and its version, and holds everything that a manifest records about a tar: opening a
dataset reads only heads, opening a shard reads one body. An index file takes about 30 bytes per member, plus
the keys. A file that is truncated, damaged or about another tar raises ValueError, and the caller scans the
tar again.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, BinaryIO, NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.errors import NOT_WHOLE, ShardError, warn_user
from shardkit.files import load_json
from shardkit.formats.tar.shard_list import fixed_size
from shardkit.manifest import Column

BLOCK = 512
MAX_EXTENSION_HEADERS = 16  # maximum number before one member; common writers use up to four: x, L, K, g
MAX_EXTENSION_BYTES = 1 << 20  # maximum size of one header's PAX records, usually a path and timestamps
MAX_NAME_BYTES = 1 << 16  # far above Linux's PATH_MAX, which is 4,096
MAX_MEMBERS = 1 << 23  # maximum number per shard; the index of 8 million members takes about a gigabyte

_ZEROS = bytes(BLOCK)
_END_PIECE = 1 << 20
_REGULAR = frozenset(b"0\x007")  # type 7 is a contiguous file, stored like a regular one
_NO_PAYLOAD = frozenset(b"123456")  # links, devices, folders and pipes, whose size field has no meaning
_EXTENSIONS = frozenset(b"xgXLK")  # X is the type that Solaris uses for x

_MAGIC = b"shardtx2"  # format version 2: indexes of version 1 may have recurring keys
_PREFIX = struct.Struct("<8sI")
_DIGEST_BYTES = 16
_MAX_HEAD_BYTES = 1 << 22
_MAX_COUNT = 1 << 53  # every JSON reader represents integers below this exactly
_I64, _I32 = np.dtype("<i8"), np.dtype("<i4")
_Ints = npt.NDArray[np.int64]
_Kinds = npt.NDArray[np.int32]

Path = str | PathLike[str]


class Member(NamedTuple):
    """A regular member of a tar, located by byte offsets.

    `start` is its first extension header (or `header` if it has none), `header` its own header, and `offset`
    its payload.
    """

    start: int
    header: int
    offset: int
    size: int
    name: str


class _Header(NamedTuple):
    kind: int
    size: int
    name: bytes


def padded(size: int) -> int:
    """Round `size` up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


class Bytes(Protocol):
    """Access to a tar's bytes for `walk_members`, which reads slices whose start offsets never decrease."""

    def __len__(self) -> int: ...
    def __getitem__(self, span: slice, /) -> bytes | memoryview: ...


def walk_members(data: Bytes, file: Path) -> Iterator[Member]:
    """Yield the regular members of a tar in order; skip folders, links and devices.

    Stops at the end marker, or at the end of the data if the tar has no marker. Error messages name `file`.
    """
    if len(data) == 0:
        raise ShardError(file, f"is empty, but even a tar without members has an end marker: {NOT_WHOLE}")
    position, shared = 0, dict[bytes, bytes]()
    while position < len(data):
        start, own, long_name, pending = position, dict[bytes, bytes](), b"", False
        for _ in range(MAX_EXTENSION_HEADERS + 1):
            header = _read_header(data, position, file)
            if header is None or header.kind not in _EXTENSIONS:
                break
            body = _extension_body(data, position, header, file)
            if header.kind == ord("L"):
                long_name = _up_to_nul(body)
            elif header.kind in b"xX":
                own = _pax_records(body, file, position + BLOCK)
            elif header.kind == ord("g"):
                shared |= _pax_records(body, file, position + BLOCK)
            pending = pending or header.kind != ord("g")
            position += BLOCK + padded(header.size)
        else:
            raise ShardError(
                file, f"has more than {MAX_EXTENSION_HEADERS} extension headers in a row", offset=start
            )
        if header is None:
            if pending:
                raise ShardError(file, "ends after an extension header without a member", offset=start)
            check_end(data, position, file)
            return
        overrides = {**shared, **own} if shared else own
        size = _payload_size(header, overrides, file, position)
        offset = position + BLOCK
        if offset + padded(size) > len(data):
            problem = (
                f"a member of {size:,} bytes ends after the file ({len(data):,} bytes); the file is cut short"
            )
            raise ShardError(file, problem, offset=position)
        if header.kind in _REGULAR and not (header.kind == 0 and header.name.endswith(b"/")):
            path = overrides.get(b"path", b"").rstrip(b"/")
            name = (path or long_name or header.name).decode("utf-8", "surrogateescape")
            yield Member(start, position, offset, size, name)
        position = offset + padded(size)


def check_end(data: Bytes, position: int, file: Path) -> None:
    """Raise ShardError unless all bytes from the end marker at `position` on are zeros."""
    for at in range(position, len(data), _END_PIECE):
        piece = bytes(data[at : at + _END_PIECE])
        if piece.count(0) != len(piece):
            problem = (
                "has data after the end-of-archive marker, which readers would drop silently. If tars were "
                "concatenated, keep them as separate shards"
            )
            raise ShardError(file, problem, offset=at + len(piece) - len(piece.lstrip(b"\0")))


def _read_header(data: Bytes, position: int, file: Path) -> _Header | None:
    """Read the header at `position`; return None at the end of the archive."""
    block = bytes(data[position : position + BLOCK])
    if not block or block == _ZEROS:
        return None
    if len(block) < BLOCK:
        if not any(block):
            return None
        raise ShardError(file, "the file ends inside a tar header; it is cut short", offset=position)
    _check_sum(block, file, position)
    kind = block[156]
    name = _up_to_nul(block[:100])
    if block[257:263] == b"ustar\0" and block[345]:
        name = _up_to_nul(block[345:500]) + b"/" + name
    return _Header(kind, _number(block[124:136], "size", file, position), name)


def _check_sum(block: bytes, file: Path, position: int) -> None:
    """Raise ShardError unless the header's checksum is the sum of its bytes, as unsigned or signed values."""
    field = block[148:156]
    stored = _number(field, "checksum", file, position)
    instead = sum(field) - 8 * 32  # the checksum counts its own field as eight spaces
    # The low half of adler32 is 1 + the sum of all bytes, modulo 65,521; it is five times faster than `sum`.
    # If half of the 512 bytes are zero, the sum is at most 256 * 255, so the modulo does not change it.
    if 2 * block.count(0) >= BLOCK and 1 + stored + instead == zlib.adler32(block) & 0xFFFF:
        return
    unsigned = sum(block) - instead
    if stored != unsigned and stored != unsigned - 256 * sum(1 for c in block[:148] + block[156:] if c > 127):
        raise ShardError(file, f"tar header checksum is {unsigned}, but it states {stored}", offset=position)


def _number(field: bytes, what: str, file: Path, position: int) -> int:
    """Parse the non-negative number in a header field: octal digits, or GNU's base 256. Empty means 0."""
    digits = field.rstrip(b"\0 ")
    if digits.isdigit() and b"8" not in digits and b"9" not in digits:
        return int(digits, 8)
    if field[0] & 0x80:
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        if field[0] & 0x40:  # the sign bit: base 256 uses two's complement
            raise ShardError(file, f"tar header has a negative {what}", offset=position)
        return value
    text = _up_to_nul(field).strip(b" ")
    if not text:
        return 0
    if not text.isdigit() or b"8" in text or b"9" in text:
        raise ShardError(
            file, f"tar header has an unreadable {what}: {text!r}; is it a tar file?", offset=position
        )
    return int(text, 8)


def _up_to_nul(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _extension_body(data: Bytes, position: int, header: _Header, file: Path) -> bytes:
    limit = MAX_NAME_BYTES if header.kind in b"LK" else MAX_EXTENSION_BYTES
    if header.size > limit:
        problem = f"an extension header is {header.size:,} bytes long; the limit is {limit:,}"
        raise ShardError(file, problem, offset=position)
    if position + BLOCK + padded(header.size) > len(data):
        raise ShardError(
            file, "an extension header ends after the file; the file is cut short", offset=position
        )
    return bytes(data[position + BLOCK : position + BLOCK + header.size])


def _pax_records(body: bytes, file: Path, offset: int) -> dict[bytes, bytes]:
    """Parse PAX records; return `path` and `size` only. An empty value cancels an earlier record (POSIX)."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(body) and body[at]:
        space = body.find(b" ", at, at + 8)
        length = int(body[at:space]) if space > at and body[at:space].isdigit() else 0
        stop = at + length
        keyword, equals, value = body[space + 1 : stop - 1].partition(b"=")
        is_whole = space + 1 < stop <= len(body) and body[stop - 1] == 0x0A  # so stop > at: the loop ends
        if not is_whole or not keyword or not equals:
            raise ShardError(file, "a PAX record has a wrong length or form", offset=offset + at)
        if keyword.startswith(b"GNU.sparse"):
            raise ShardError(file, "a member is sparse; write the tar without --sparse", offset=offset + at)
        if keyword == b"path" and len(value) > MAX_NAME_BYTES:
            raise ShardError(file, f"a member name is {len(value):,} bytes long", offset=offset + at)
        if keyword in (b"path", b"size"):
            records[keyword] = value
        at = stop
    return records


def _payload_size(header: _Header, overrides: dict[bytes, bytes], file: Path, position: int) -> int:
    """Return the size in bytes of the payload after a header: the PAX `size` if given, else the header's."""
    if header.kind == ord("S"):
        raise ShardError(file, "a member is sparse; write the tar without --sparse", offset=position)
    if header.kind in _NO_PAYLOAD or (header.kind == 0 and header.name.endswith(b"/")):
        return 0
    stated = overrides.get(b"size", b"")
    if not stated:
        return header.size
    if not stated.isdigit() or len(stated) > 20:
        raise ShardError(file, f"a PAX size is not a number: {stated[:40]!r}", offset=position)
    return int(stated)


@dataclass(frozen=True, slots=True)
class TarIndex:
    """The samples of one tar: sample i consists of members `starts[i]` to `starts[i + 1]` (exclusive).

    `offsets` and `sizes` are the byte offset and size of each member's payload; `kinds` is the index of each
    member's extension in `extensions`.
    """

    keys: Sequence[str]
    starts: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.int32]
    extensions: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.keys)

    def fits(self, size: int) -> bool:
        """Return whether all payloads end within a file of `size` bytes."""
        inside = (self.offsets >= 0) & (self.sizes >= 0) & (self.offsets <= size - self.sizes)
        return bool(inside.all())

    def members_of(self, extension: str) -> npt.NDArray[np.int64] | None:
        """Return the index of each sample's member with this extension; None unless every sample has one."""
        if extension not in self.extensions:
            return None
        members = np.flatnonzero(self.kinds == self.extensions.index(extension))
        # An extension occurs at most once in a sample, so as many members as samples means one in each.
        return members if len(members) == len(self) else None


def split_name(name: str) -> tuple[str, str] | None:
    """Split a member's name into (key, extension); return None if it belongs to no sample."""
    first = name.split("/", 1)[0]
    if len(first) >= 4 and first.startswith("__") and first.endswith("__"):
        return None
    folder = name.rfind("/") + 1
    dot = name.find(".", folder)
    if dot < 0 or name.startswith("._", folder) or name[folder:] == ".DS_Store":
        return None
    if dot == folder:
        # A hidden file, such as a/.txt: the folder is the key, as in webdataset. If the folder's name has a
        # dot, too, the file belongs to no sample.
        parent = name.rfind("/", 0, max(folder - 1, 0)) + 1
        if folder == 0 or "." in name[parent:folder]:
            return None
    return name[:dot], name[dot + 1 :].lower()


def looks_like_a_base_name(extension: str) -> bool:
    """Return whether an extension ("05.txt", "05") may be the end of a base name with dots ("22.05.txt")."""
    return extension[:1].isdigit() and ("." in extension or extension.isdigit())


_warned_of_dots: set[str] = set()  # folders whose tars were warned about: one warning per dataset


def _warn_of_dots(names: Sequence[str], file: str | PathLike[str]) -> None:
    folder = os.fspath(file).rpartition("/")[0]
    if folder in _warned_of_dots:
        return
    _warned_of_dots.add(folder)
    key = (split_name(names[0]) or ("",))[0]
    warn_user(
        f"{os.fspath(file)}: a sample's key ends at the first dot of a name, so {' and '.join(names)} are "
        f"parts of the sample {key!r}: if they are separate samples, replace the dots with other characters"
    )


def group_members(members: Iterable[Member], file: str | PathLike[str]) -> TarIndex:
    """Group a tar's members into samples by their keys, and return the index of the samples.

    Raises ShardError if an extension repeats within a sample, or a key recurs later in the tar.
    """
    keys: list[str] = []
    known: set[str] = set()
    dotted: list[str] = []  # the first two names whose extension looks like part of a base name
    starts, offsets, sizes, kinds = array("q"), array("q"), array("q"), array("i")
    numbers: dict[str, int] = {}
    present: set[int] = set()
    for member in members:
        parts = split_name(member.name)
        if parts is None:
            continue
        key, extension = parts
        if not keys or key != keys[-1]:
            if key in known:
                problem = (
                    f"member {member.name[:200]!r}: its key {key[:200]!r} has occurred before, but members "
                    "of one sample must be consecutive; write the tar with sorted names (tar --sort=name)"
                )
                raise ShardError(file, problem, offset=member.header)
            known.add(key)
            keys.append(key)
            starts.append(len(offsets))
            present.clear()
        number = numbers.setdefault(extension, len(numbers))
        if number in present or extension == "__key__":
            problem = f"member {member.name[:200]!r}: its sample already has {extension!r}"
            raise ShardError(file, problem, offset=member.header)
        if len(dotted) < 2 and looks_like_a_base_name(extension):
            dotted.append(member.name)
        present.add(number)
        offsets.append(member.offset)
        sizes.append(member.size)
        kinds.append(number)
        if len(offsets) > MAX_MEMBERS:
            raise ShardError(file, f"has more than {MAX_MEMBERS:,} members; write smaller shards")
    if dotted:
        _warn_of_dots(dotted, file)
    starts.append(len(offsets))
    return TarIndex(
        keys=keys,
        starts=np.array(starts, dtype=np.int64),
        offsets=np.array(offsets, dtype=np.int64),
        sizes=np.array(sizes, dtype=np.int64),
        kinds=np.array(kinds, dtype=np.int32),
        extensions=tuple(numbers),
    )


@dataclass(frozen=True, slots=True)
class Scanned:
    """The facts for a tar's manifest entry, found by scanning it; `raw_bytes` is its decompressed size."""

    samples: int
    raw_bytes: int
    columns: tuple[Column, ...]


def index_file_bytes(origin: str, scanned: Scanned, index: TarIndex) -> bytes:
    """Encode a tar's scan result and index as an index file; `origin` names the tar and its version."""
    keys = [key.encode("utf-8", "surrogateescape") for key in index.keys]
    ends = np.cumsum([len(key) for key in keys], dtype=np.int64)
    body = b"".join(
        [
            *(array.astype(_I64).tobytes() for array in (index.starts, index.offsets, index.sizes, ends)),
            index.kinds.astype(_I32).tobytes(),
            *keys,
        ]
    )
    head = {
        "origin": origin,
        "samples": scanned.samples,
        "members": len(index.offsets),
        "key_bytes": int(ends[-1]) if len(ends) else 0,
        "raw_bytes": scanned.raw_bytes,
        "columns": [[column.name, column.encoding, column.size] for column in scanned.columns],
        "extensions": list(index.extensions),
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    front = _PREFIX.pack(_MAGIC, len(text)) + text
    return front + xxhash.xxh3_128_digest(front) + body + xxhash.xxh3_128_digest(body)


def read_head(file: BinaryIO, origin: str) -> Scanned:
    """Read the head of an index file. Raises ValueError if it is damaged or of another tar than `origin`."""
    return _scanned(_read_head(file, origin))


def read_index(file: BinaryIO, origin: str) -> tuple[Scanned, TarIndex]:
    """Read a whole index file: return its head and the tar's index. Raises ValueError like `read_head`."""
    head = _read_head(file, origin)
    samples, members, key_bytes = head["samples"], head["members"], head["key_bytes"]
    counts = [samples + 1, members, members, samples]
    size = 8 * sum(counts) + 4 * members + key_bytes
    start = file.tell()
    if file.seek(0, os.SEEK_END) - start != size + _DIGEST_BYTES:  # before allocating
        raise ValueError("the members are cut short")
    file.seek(start)
    data = file.read(size + _DIGEST_BYTES)
    if len(data) != size + _DIGEST_BYTES or xxhash.xxh3_128_digest(data[:size]) != data[size:]:
        raise ValueError("the members are cut short or damaged")
    arrays, at = [], 0
    for count in counts:
        arrays.append(np.frombuffer(data, _I64, count, at).astype(np.int64, copy=False))
        at += 8 * count
    starts, offsets, sizes, ends = arrays
    kinds = np.frombuffer(data, _I32, members, at).astype(np.int32, copy=False)
    _check_places(head, starts, offsets, sizes, ends, kinds)
    keys = PackedKeys(data[at + 4 * members : size], ends)
    return _scanned(head), TarIndex(keys, starts, offsets, sizes, kinds, tuple(head["extensions"]))


def _check_places(
    head: dict[str, Any], starts: _Ints, offsets: _Ints, sizes: _Ints, ends: _Ints, kinds: _Kinds
) -> None:
    """Raise ValueError unless every member belongs to a sample and ends within the tar.

    Checksums alone do not suffice: a maliciously crafted file can have valid ones.
    """
    in_order = bool((np.diff(starts) >= 0).all() and (np.diff(ends, prepend=0) >= 0).all())
    is_whole = starts[0] == 0 and starts[-1] == head["members"]
    are_keys = (int(ends[-1]) if len(ends) else 0) == head["key_bytes"]
    are_known = not len(kinds) or 0 <= int(kinds.min()) <= int(kinds.max()) < len(head["extensions"])
    limit = head["raw_bytes"]
    lie_inside = bool((sizes >= 0).all() and (offsets >= 0).all() and (sizes <= limit).all())
    if not (in_order and is_whole and are_keys and are_known and lie_inside):
        raise ValueError("the members contradict the head or each other")
    if bool((offsets > limit - sizes).any() or (offsets % BLOCK).any()):
        raise ValueError("a member is outside the tar or not aligned to a block")


def _read_head(file: BinaryIO, origin: str) -> dict[str, Any]:
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise ValueError("the file is cut short")
    magic, size = _PREFIX.unpack(prefix)
    if magic != _MAGIC or size > _MAX_HEAD_BYTES:
        raise ValueError("the file is not an index of a tar")
    text = file.read(size)
    if xxhash.xxh3_128_digest(prefix + text) != file.read(_DIGEST_BYTES):
        raise ValueError("the head is cut short or damaged")
    head: dict[str, Any] = load_json(text)
    counts = [head[key] for key in ("samples", "members", "key_bytes", "raw_bytes")]
    if head["origin"] != origin or not all(
        type(count) is int and 0 <= count < _MAX_COUNT for count in counts
    ):
        raise ValueError("the index is about another tar")
    if not counts[0] <= counts[1] <= MAX_MEMBERS:
        raise ValueError("the counts of samples and members are impossible")
    names = [*head["extensions"], *(name for column in head["columns"] for name in column[:2])]
    if not all(isinstance(name, str) for name in names) or len(set(head["extensions"])) < len(
        head["extensions"]
    ):
        raise ValueError("the extensions or columns are not distinct strings")
    if any(type(size) is bool or size != fixed_size(encoding) for _, encoding, size in head["columns"]):
        raise ValueError("a column's size contradicts its encoding")
    return head


def _scanned(head: dict[str, Any]) -> Scanned:
    columns = tuple(Column(name, encoding, size) for name, encoding, size in head["columns"])
    return Scanned(head["samples"], head["raw_bytes"], columns)


class PackedKeys(Sequence[str]):
    """The keys of all samples in one buffer, each decoded on access; key i ends before byte `ends[i]`."""

    def __init__(self, data: bytes, ends: npt.NDArray[np.int64]) -> None:
        self._data, self._ends = data, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        start = int(self._ends[number - 1]) if number else 0
        return self._data[start : int(self._ends[number])].decode("utf-8", "surrogateescape")
