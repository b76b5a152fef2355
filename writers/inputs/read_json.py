"""Reads JSON records: one object per line, or the objects of arrays (`[{...}, {...}]`) over several lines.

Arrays are read as a stream: the file is divided into values by their brackets and quotes, and each value is
parsed by itself, so memory is one record. A value that is not valid JSON is quarantined alone. NaN, Infinity
and numbers of any size, which Python and others write, are accepted, and so are values nested too deeply for
parsers, unless the text is among them. Between values there may be blanks and commas; anything else there is
a bad record. A file may also contain objects one after the other without an array, as `jq` prints them. A
file that ends inside a value or an array is damaged.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import orjson

from shardkit.writers.inputs.fields import MAX_DEPTH, MISSING, field_at
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.lines import Line
from shardkit.writers.inputs.records import RecordSink
from shardkit.writers.recipe.inputs import InputConfig

_BOM = b"\xef\xbb\xbf"
_HEAD_BYTES = 256
_OUT_OF_MEMORY = "Not enough memory"  # beginning of orjson's JSONDecodeError for lack of memory
_TOO_DEEP = ("depth limit exceeded", "Recursion limit reached")
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
_BETWEEN = re.compile(rb"(?:[ \t\r\n,]|\xef\xbb\xbf)*+")  # joined files have byte order marks inside
_SCALAR = re.compile(rb"[^ \t\r\n,\[\]{}\"]*+")  # anything but a string, array or object; may be invalid
_EXACT = frozenset({str, int, bool, type(None), type(MISSING)})  # types that orjson reads without loss
_STARTS = (b"{", b"[", b'"', b"}", b"]")
_BRACKETS = re.compile(rb"[^\"\[\]{}]*+([\"\[\]{}])")
_STRING = re.compile(rb"[^\"\\]*+(?:\\.[^\"\\]*+)*+(\"|\\?\Z)", re.DOTALL)


def read_json(sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Read a JSON file: pass all of its objects to the sink."""
    with open_input(sink.split.input) as file:
        yield from read_values(sink, config, sink.pieces(file))


def read_values(sink: RecordSink, config: InputConfig, pieces: Iterator[bytes]) -> Iterator[None]:
    """Read JSON in pieces: pass all of its objects to the sink."""
    sink.offset = 0
    values = Values(pieces, max_value_bytes=sink.max_record_bytes)
    for offset, length, data, whole in values:
        sink.offset = offset
        if whole:
            take_json(sink, config, data)
        else:
            sink.too_long(length, head=data)
        sink.record, sink.offset = sink.record + 1, values.offset
        yield
    if values.problem:
        sink.offset = values.unfinished
        sink.damaged(values.problem, bytes=sink.position - values.unfinished)


def take_json(sink: RecordSink, config: InputConfig, line: bytes) -> None:
    """Parse one JSON object and pass it to the sink."""
    refused = None
    try:
        try:
            fields = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            refused = error
            fields = _parse(sink, line, refused)
    except orjson.JSONDecodeError as error:
        reason, problem = _json_problem(line, error, sink.charset)
        sink.bad(reason, problem + _hint_of_array(sink, line), head=line)
        return
    if not isinstance(fields, dict):
        problem = f"the record is a JSON {_kind(fields)}, but an object is expected"
        sink.bad("not_an_object", problem + _hint_of_array(sink, line), head=line)
        return
    if refused is not None and not all(_is_exact(field_at(fields, path)) for path in _texts(config)):
        sink.bad(*_json_problem(line, refused, sink.charset), head=line)
        return
    if sink.is_masked:
        sink.add_masked(fields, bytes=len(line), head=line)
        return
    text = field_at(fields, sink.text_path)
    if not isinstance(text, str):
        sink.bad("no_text", _no_text(sink, fields, text), head=line)
        return
    for path in sink.carried:
        value = field_at(fields, path)
        if type(value) not in _EXACT and refused is None and _holds_large_number(value):
            # orjson reads integers of more than 64 bits as floats. Python's json keeps them, unless nested
            # too deeply.
            with suppress(RecursionError):
                fields = json.loads(line)
            break
    sink.add(text, fields, bytes=len(line))


def _texts(config: InputConfig) -> list[str]:
    """Return the paths of the fields that texts are made of."""
    fields_of_chat = (config.messages, config.prompt, config.completion, config.tools)
    masked = (*fields_of_chat, config.chat_template_kwargs)
    return [path for path in masked if path] if config.is_masked else [config.text]


def _no_text(sink: RecordSink, fields: dict[str, Any], value: object) -> str:
    if value is not MISSING:
        return f"field {sink.text_path!r} holds {_kind(value)}, not text"
    known = ", ".join(sorted(fields)[:20]) or "none"
    problem = f"no field {sink.text_path!r}; its fields: {known}"
    if not sink.records:
        key = f"inputs[{sink.split.source}]"
        problem += f"; set {key}.text to the field with the text, or leave the file out ({key}.exclude)"
    return problem


def _parse(sink: RecordSink, line: bytes, refused: orjson.JSONDecodeError) -> Any:
    """Return the value of a line that orjson refused, if Python's parser accepts it.

    Python's parser also reads NaN, infinities, numbers of any size and halves of surrogate pairs, which many
    programs write. Values nested too deeply for both parsers become null. Raises `refused` if the line is not
    JSON, or not UTF-8 and the recipe does not replace bad text.
    """
    if refused.msg.startswith(_OUT_OF_MEMORY):
        raise MemoryError(refused.msg)
    try:
        text = sink.decode(line)
        value = json.loads(text, parse_int=_integer)
        return sink.check_value(value) if sink.replaces else value
    except ValueError:
        raise refused from None
    except RecursionError:
        line, cut = text.encode(), _cut_deep(text.encode())
        if sink.is_masked or cut == line:  # a conversation must not be rendered without its deep values
            raise refused from None
    try:
        return orjson.loads(cut)
    except orjson.JSONDecodeError as error:
        return _parse(sink, cut, error)


def _integer(digits: str) -> int | float:
    """Return the integer, or infinity if it has more digits than Python converts."""
    try:
        return int(digits)
    except ValueError:
        return math.inf


def _cut_deep(line: bytes) -> bytes:
    """Return the line with null in place of every value that is nested more than `MAX_DEPTH` deep."""
    parts: list[bytes] = []
    depth = at = start = 0
    for token in _TOKEN.finditer(line):
        if token[0] in (b"{", b"["):
            depth += 1
            start = token.start() if depth == MAX_DEPTH + 1 else start
        elif token[0] in (b"}", b"]"):
            if depth == MAX_DEPTH + 1:
                parts += [line[at:start], b"null"]
                at = token.end()
            depth -= 1
    return b"".join([*parts, line[at:]])


def _is_exact(value: object) -> bool:
    """Return whether a value has no surrogate halves, NaN or infinities in it."""
    held = [value]
    while held:
        value = held.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                return False
        elif isinstance(value, float) and not math.isfinite(value):
            return False
        elif isinstance(value, dict | list):
            held += [*value, *value.values()] if isinstance(value, dict) else value
    return True


def _hint_of_array(sink: RecordSink, line: bytes) -> str:
    """Return a hint for the first line of a file if it looks like the beginning of an array, or ""."""
    if sink.record or sink.split.format == "json" or line.lstrip()[:1] not in (b"[", b"{"):
        return ""
    key = f"inputs[{sink.split.source}].format"
    return f"; if the file is an array of objects, or has objects of several lines, set {key}: json"


def _holds_large_number(value: object) -> bool:
    """Return whether a value has a float in it that may be an integer of more than 64 bits."""
    held = [value]
    while held:
        value = held.pop()
        if isinstance(value, float) and abs(value) >= 1 << 63:
            return True
        if isinstance(value, dict | list):
            held += value.values() if isinstance(value, dict) else value
    return False


def _json_problem(line: bytes, error: orjson.JSONDecodeError, charset: str) -> tuple[str, str]:
    try:
        line.decode()
    except UnicodeDecodeError as bad:
        return "bad_utf8", f"byte {bad.start:,} of the line is not {charset}"
    if error.msg.startswith(_TOO_DEEP):
        return "bad_json", "not JSON that can be read: values are nested too deeply"
    return "bad_json", f"not JSON: {error.msg} at character {error.pos:,} of the line"


class Values:
    """Iterates over the JSON values in pieces of bytes: items of top-level arrays, and values outside them.

    Yields a `Line` tuple (offset, length, bytes, whether they are complete) per value. If the content ends
    inside a value or an array, `problem` says so afterwards, and `unfinished` is the offset of the incomplete
    part; otherwise `problem` is "".
    """

    def __init__(self, pieces: Iterator[bytes], *, max_value_bytes: int) -> None:
        self._pieces, self._limit = pieces, max_value_bytes
        self.offset = 0  # offset after the last value
        self.problem, self.unfinished = "", 0
        self._depth = 0  # number of open brackets inside the value
        self._in_string = self._escaped = self._in_scalar = self._in_array = False

    def __iter__(self) -> Iterator[Line]:
        held: list[bytes] = []  # parts of the current value
        start, size, before = 0, 0, 0  # offset and length so far of the value; total length of earlier pieces
        inside = False
        for number, piece in enumerate(self._pieces):
            at = 3 if not number and piece.startswith(_BOM) else 0
            while at < len(piece):
                if not inside:
                    at = self._begin(piece, at)
                    self.offset = before + at
                    if at == len(piece):
                        break
                    inside, start, size, held = True, before + at, 0, []
                end, inside = self._end(piece, at)
                part, at = piece[at:end], end
                size += len(part)
                if size > self._limit:
                    held = [b"".join(held)[:_HEAD_BYTES], part[:_HEAD_BYTES]]
                else:
                    held.append(part)
                if not inside:
                    self.offset = before + at
                    data = b"".join(held)
                    yield (
                        start,
                        size,
                        data if size <= self._limit else data[:_HEAD_BYTES],
                        size <= self._limit,
                    )
            before += len(piece)
        if self._in_scalar:  # the content ends with a number, which has no closing bracket or quote
            yield start, size, b"".join(held), size <= self._limit
        elif inside or self._in_array:
            self.unfinished = start if inside else before
            self.problem = f"the file ends inside {'a value' if inside else 'its array'}"

    def _begin(self, piece: bytes, at: int) -> int:
        """Return the index in `piece` where the next value begins, or its end; skip top-level brackets."""
        while at < len(piece):
            blanks = _BETWEEN.match(piece, at)
            assert blanks is not None
            at = blanks.end()
            byte = piece[at : at + 1]
            if byte == b"[" and not self._in_array:
                self._in_array = True
            elif byte == b"]" and self._in_array:
                self._in_array = False
            else:
                return at
            at += 1
        return at

    def _end(self, piece: bytes, at: int) -> tuple[int, bool]:
        """Return (index in `piece` where the current value ends, whether it continues in the next piece)."""
        while at < len(piece):
            if self._in_string:
                at, ended = self._end_string(piece, at)
                if ended and not self._depth:
                    return at, False
            elif self._in_scalar or not (self._depth or piece[at : at + 1] in _STARTS):
                scalar = _SCALAR.match(piece, at)
                assert scalar is not None
                self._in_scalar = scalar.end() == len(piece)
                return scalar.end(), self._in_scalar
            else:
                found = _BRACKETS.match(piece, at)
                if found is None:
                    break
                at = found.end()
                if found[1] == b'"':
                    self._in_string = True
                elif self._close(1 if found[1] in b"[{" else -1):
                    return at, False
        return len(piece), True

    def _close(self, step: int) -> bool:
        """Count a bracket (`step` is 1 or -1); return whether none is open now, so that the value ends."""
        self._depth = max(self._depth + step, 0)
        return not self._depth

    def _end_string(self, piece: bytes, at: int) -> tuple[int, bool]:
        """Return (end of the string, of an escape in it, or of `piece`; whether the string ends there)."""
        if self._escaped:
            self._escaped = False
            return at + 1, False
        found = _STRING.match(piece, at)
        assert found is not None
        self._in_string = found[1] != b'"'
        self._escaped = found[1] == b"\\"
        return found.end(), not self._in_string


def _kind(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
