"""Reads tf.train.Example messages from TFRecord files, as TensorFlow, TFDS, seqio and Beam write them.

A record is a message, and its features are the fields, of which only those that the recipe names are decoded.
The text is a feature with one bytes value; other fields are text, integers or floats, a list if there are
several values, and null if there is none. Bytes that are no readable text become hexadecimal digits, as in
other formats.

Both checksums of every record are verified. The length of a record has one of its own, so a record with
damaged data, or that is no Example, costs itself only. Behind a damaged length the start of the next record
would be a guess: it costs the rest of the file. Files are read from front to back, since nothing in them
says where records begin: a file is one split. Memory is one record of at most `max_record_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from shardkit.formats.tfrecord import HEADER, Feature, masked_crc32c, parse_example
from shardkit.writers.inputs.decompress import ContainerError
from shardkit.writers.inputs.fields import binary_text
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.lines import PieceReader
from shardkit.writers.inputs.records import RecordSink
from shardkit.writers.recipe.inputs import InputConfig

_CHECKSUM_BYTES = 4
_SHOWN = 20  # maximum number of names in a message
_HEAD_BYTES = 256


class _LostError(Exception):
    """The rest of a file cannot be read, because where the next record begins is unknown."""


def read_tfrecord(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Read a TFRecord file: pass all of its records to the sink."""
    checksum = masked_crc32c()
    sink.offset = 0
    with open_input(sink.split.input) as file:
        stream = PieceReader(sink.pieces(file))
        try:
            while head := stream.read(HEADER.size):
                _take_record(sink, config, stream, head, checksum)
                sink.record, sink.offset = sink.record + 1, stream.tell()
                yield
        except _LostError as lost:
            with suppress(ContainerError):
                stream.skip(1 << 62)  # count the bytes that are lost
            sink.damaged(str(lost), bytes=sink.position - (sink.offset or 0))


def _take_record(
    sink: RecordSink,
    config: InputConfig,
    stream: PieceReader,
    head: bytes,
    checksum: Callable[[bytes], int],
) -> None:
    """Read the record that begins with `head`, and pass it to the sink."""
    length = _length(head, checksum, is_first=stream.tell() == len(head))
    if length > sink.max_record_bytes:
        _check_whole(stream.skip(length + _CHECKSUM_BYTES), length)
        sink.too_long(length)
        return
    body = stream.read(length + _CHECKSUM_BYTES)
    _check_whole(len(body), length)
    data = body[:length]
    if checksum(data) != int.from_bytes(body[length:], "little"):
        sink.bad("bad_record", "the record is damaged: wrong checksum", bytes=length)
    else:
        _take(sink, config, data)


def _length(head: bytes, checksum: Callable[[bytes], int], *, is_first: bool) -> int:
    """Return the length of a record's data; raise _LostError if it is not what was written."""
    if len(head) < HEADER.size:
        raise _LostError(f"truncated: the file ends {len(head)} bytes into the header of a record")
    length, stated = HEADER.unpack(head)
    if checksum(head[:8]) == stated:
        return int(length)
    if not is_first:
        raise _LostError("the length of a record is damaged: wrong checksum")
    if head[0] & 15 == 8 and not int.from_bytes(head[:2], "big") % 31:
        raise _LostError(
            "it does not begin with a record, but as zlib data does; compress it by gzip instead"
        )
    raise _LostError("it does not begin with a record: it is damaged, or no TFRecord file")


def _check_whole(found: int, length: int) -> None:
    if found < length + _CHECKSUM_BYTES:
        raise _LostError(f"truncated: the file ends inside a record of {length:,} bytes")


def _take(sink: RecordSink, config: InputConfig, data: bytes) -> None:
    """Parse a message and pass it to the sink, as a document or as a bad record."""
    key = f"inputs[{sink.split.source}]"
    try:
        features = parse_example(data, {config.text, *sink.carried})
        text = features.get(config.text)
        problem = _not_a_text(text, data, config.text)
    except ValueError as error:
        hint = "" if sink.records else f"; {key}.reader takes a function that reads other messages"
        sink.bad("bad_record", f"the record is no tf.train.Example: {error}{hint}", bytes=len(data))
        return
    if problem:
        if text is None and not sink.records:
            problem += f"; set {key}.text to the one with the text, or leave the file out ({key}.exclude)"
        sink.bad("no_text", problem, bytes=len(data))
        return
    assert text is not None
    value = bytes(text.values[0])
    try:
        decoded = sink.text_of(value)
    except UnicodeDecodeError as error:
        problem = f"byte {error.start:,} of feature {config.text!r} is not {sink.charset}"
        sink.bad("bad_utf8", problem, head=value[:_HEAD_BYTES], bytes=len(data))
        return
    carried = {name: _plain(feature) for name, feature in features.items() if name in sink.carried}
    sink.add(decoded, dict.fromkeys(features) | carried, bytes=len(value))


def _not_a_text(text: Feature | None, data: bytes, name: str) -> str:
    """Return why a feature of an Example is not one text, or ""."""
    if text is None:
        features = sorted(parse_example(data).items())
        names = [f"{other} ({feature.kind or 'empty'})" for other, feature in features]
        return f"no feature {name!r}; its features: {', '.join(names[:_SHOWN]) or 'none'}"
    if text.kind not in ("bytes", None):
        return f"feature {name!r} holds {text.kind} values, not text"
    return "" if len(text.values) == 1 else f"feature {name!r} has {len(text.values):,} values, not one text"


def _plain(feature: Feature) -> object:
    """Return a feature's value, a list of several values, or None."""
    held = feature.values
    values = [binary_text(value) for value in held] if isinstance(held, list) else held.tolist()
    return values[0] if len(values) == 1 else values or None


def first_examples(pieces: Iterator[bytes], count: int) -> list[dict[str, object]]:
    """Return the features of up to `count` records that are whole in `pieces`, for `shardkit init`.

    Values that are no text stay bytes. Raises ValueError for a record that is no Example.
    """
    stream, found = PieceReader(pieces), list[dict[str, object]]()
    while len(found) < count and len(head := stream.read(HEADER.size)) == HEADER.size:
        size = HEADER.unpack(head)[0]
        if len(data := stream.read(size)) < size or stream.skip(_CHECKSUM_BYTES) < _CHECKSUM_BYTES:
            break
        found.append({name: _shown(feature) for name, feature in parse_example(data).items()})
    return found


def _shown(feature: Feature) -> object:
    held = feature.values
    if isinstance(held, list) and len(held) == 1:
        with suppress(UnicodeDecodeError):
            return held[0].decode()
        return held[0]
    return _plain(feature)
