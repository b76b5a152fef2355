"""Reads files of any format with a function of the user: `reader` of an input.

    def read(file, name, **parameters):
        for record in my_format(file):
            yield {"text": record.body, "id": record.key}

The function gets the file as it is stored, opened for binary reads and seeks, on this machine or in a store,
and the file's name in ids and reports. It returns dicts, usually as a generator; what it holds counts as
memory of reading (`memory`). Records are numbered from 0 in the order in which they come. For a record that
it cannot read, it yields an exception instead of raising it: that record goes into quarantine, and reading
goes on. An exception that it raises ends the task of the split.

The same file must give the same records, because a file may be read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardkit.errors import BuildError
from shardkit.writers.inputs.fields import MISSING, field_at, json_of
from shardkit.writers.inputs.files import open_input
from shardkit.writers.inputs.records import RecordSink
from shardkit.writers.recipe.inputs import InputConfig

UserReader = Callable[..., Any]
_HEAD_BYTES = 256
_KNOWN = 20  # maximum number of field names in an error message


def read_by_function(function: UserReader, sink: RecordSink, config: InputConfig) -> Iterator[None]:
    """Pass the records that the user's function finds in the file to the sink."""
    assert config.reader is not None
    name = config.name_of(sink.split.file)
    with open_input(sink.split.input) as file:
        for record in _records(sink, config, lambda: function(file, name)):
            if isinstance(record, Exception):
                sink.bad("bad_record", f"{type(record).__name__}: {record}")
            elif config.is_masked:
                _take_masked(sink, config, record)
            else:
                _take(sink, config, record)
            sink.record += 1
            yield


def _records(
    sink: RecordSink, config: InputConfig, call: Callable[[], Any]
) -> Iterator[Mapping[str, Any] | Exception]:
    """Yield what the function returns; raise BuildError if it fails, or returns anything but records."""
    try:
        found = call()
        if isinstance(found, Mapping) or not hasattr(found, "__iter__"):
            raise _problem(sink, config, f"returned {_kind(found)}; yield a dict for each record")
        records = iter(found)
    except (BuildError, MemoryError):
        raise
    except Exception as error:  # the user's code may raise anything
        raise _problem(sink, config, f"{type(error).__name__}: {error}") from error
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except MemoryError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise _problem(sink, config, f"{type(error).__name__}: {error}") from error
        if not isinstance(record, Mapping | Exception):
            raise _problem(sink, config, f"yielded {_kind(record)}; yield a dict for each record")
        if isinstance(record, Mapping) and not all(isinstance(name, str) for name in record):
            raise _problem(sink, config, "yielded a dict whose keys are not all text")
        yield record


def _problem(sink: RecordSink, config: InputConfig, problem: str) -> BuildError:
    assert config.reader is not None
    key = f"inputs[{sink.split.source}].reader"
    return BuildError(
        f"{sink.split.path}: at record {sink.record:,}: {key}: {config.reader.function}: {problem}"
    )


def _kind(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _take(sink: RecordSink, config: InputConfig, fields: Mapping[str, Any]) -> None:
    value = field_at(fields, config.text)
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
    else:
        problem = f"field {config.text!r} holds {_kind(value)}, not text"
        if value is MISSING:
            problem = f"no field {config.text!r}; its fields: {', '.join(sorted(fields)[:_KNOWN]) or 'none'}"
        sink.bad("no_text", problem)
        return
    if len(data) > sink.max_record_bytes:
        sink.too_long(len(data), head=data[:_HEAD_BYTES])
        return
    try:
        text = sink.check_text(value) if isinstance(value, str) else sink.text_of(data)
    except UnicodeError:  # bytes that are not UTF-8, or half a surrogate pair
        sink.bad(
            "bad_utf8",
            f"field {config.text!r} is not {sink.charset}",
            head=data[:_HEAD_BYTES],
            bytes=len(data),
        )
        return
    sink.add(text, fields, bytes=len(data))


def _take_masked(sink: RecordSink, config: InputConfig, fields: Mapping[str, Any]) -> None:
    named = (config.messages, config.prompt, config.completion, config.tools, config.chat_template_kwargs)
    found = {path: field_at(fields, path) for path in named if path is not None}
    found = {path: value for path, value in found.items() if value is not MISSING}
    data = json_of(found)
    if len(data) > sink.max_record_bytes:
        sink.too_long(len(data), head=data[:_HEAD_BYTES])
        return
    try:
        checked = sink.check_value(found)
    except UnicodeEncodeError:
        sink.bad("bad_utf8", "a text has half a surrogate pair", head=data[:_HEAD_BYTES], bytes=len(data))
    except RecursionError:
        sink.bad("bad_messages", "values are nested too deeply", bytes=len(data))
    else:
        sink.add_masked({**fields, **checked}, bytes=len(data), head=data[:_HEAD_BYTES])
