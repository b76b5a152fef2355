"""Public names that are imported when they are first used, so that `import shardkit` costs milliseconds."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module

from shardkit.errors import naming_extras


def imported(package: str, name: str, places: Mapping[str, str]) -> object:
    """Import the public name `name` of `package` from its module in `places`.

    A place is "module", or "module:attribute" if the attribute has another name.
    """
    if name not in places:
        from shardkit.hints import hint
        from shardkit.synonyms import PACKAGE

        said = "" if name.startswith("_") else hint(name, places, PACKAGE)
        problem = f"module {package!r} has no attribute {name!r}"
        raise AttributeError(f"{problem}; {said}" if said else problem)
    module, _, attribute = places[name].partition(":")
    with naming_extras(f"{package}.{name}"), collector_paused():
        return getattr(import_module(module), attribute or name)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector in a block that makes many objects that all stay, such as modules.

    The collector would traverse them again and again. Pausing it saves a seventh of the time to import the
    writers.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
