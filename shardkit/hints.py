"""Words what an error says about an unknown name: the sentence of a table, or a name that is nearly the same.

Every error about an unknown option, key, keyword, verb or filter asks `hint`. It looks in the table of the
place (`shardkit.synonyms`) before it guesses, and guesses only what is nearly the same word: a wrong guess
sends the reader away from the answer.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_LEAST_RATIO = 0.72  # of difflib, for a guess; "workers" and "work" have 0.727, "train" and "trace" 0.6
_LISTED = 10  # maximum number of names that an error message lists
_SHOWN_NAMES = 5  # maximum number of files that an error about a path lists
_LOOKED_AT = 1000  # maximum number of files that are looked at for these
_MOST_NAMESAKES = 5  # maximum number of names with a common word that a guess lists


def hint(
    word: str,
    known: Iterable[str],
    table: Mapping[str, str] | None = None,
    spelled: Mapping[str, str] | None = None,
) -> str:
    """Return what to write instead of an unknown `word`, or "" if nothing is near enough for a guess.

    `table` has sentences for words of other tools; `known` are the names that could have been meant, and
    `spelled` says how to write those of them that are given in another form.
    """
    spelled = spelled or {}
    sentence = (table or {}).get(word.strip("-").replace("-", "_"))
    if sentence is not None and word not in spelled:
        return f"in shardkit: {sentence}"
    names = [word] if word in spelled else closest(word, known)
    return f"did you mean {' or '.join(spelled.get(name, name) for name in names)}?" if names else ""


def closest(word: str, known: Iterable[str]) -> list[str]:
    """Return the known names that `word` may be a misspelling of, or has as a word of its own; often none."""
    plain = {name: name.strip("-").replace("-", "_").lower() for name in known}
    given = word.strip("-").replace("-", "_").lower()
    namesakes = [name for name, text in plain.items() if given in text.split("_")]
    if 0 < len(namesakes) <= _MOST_NAMESAKES:
        return namesakes
    like = difflib.get_close_matches(given, plain.values(), n=1, cutoff=_LEAST_RATIO)
    like = like or [name for name in plain.values() if sorted(name) == sorted(given)]
    like = like or [part for part in reversed(given.split("_")) if part in plain.values()]
    return [next(name for name, text in plain.items() if text == like[0])] if like else []


def near_path(path: Path) -> str:
    """Return what to write instead of a path that does not exist: what its last folder that exists holds."""
    path = path.absolute()
    folder = next((parent for parent in path.parents if parent.is_dir()), path.parent)
    wanted = path.relative_to(folder).parts[0]
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _LOOKED_AT)]
    except OSError:
        return f"look in {folder}"
    near = closest(wanted, names)
    if near:
        return f"did you mean {' or '.join(str(folder / name) for name in near)}?"
    shown = sorted(name for name in names if not name.startswith("."))
    more = ", …" if len(shown) > _SHOWN_NAMES else ""
    return f"{folder} holds {', '.join(shown[:_SHOWN_NAMES]) or 'nothing'}{more}"


def refuse_unknown(
    function: str,
    given: Iterable[str],
    known: Iterable[str],
    table: Mapping[str, str] | None = None,
    spelled: Mapping[str, str] | None = None,
    listed_by: str = "",
    elsewhere: Iterable[str] = (),
) -> None:
    """Raise TypeError for a keyword in `given` that is not in `known`, with a hint at the right one.

    `listed_by` names the object whose help lists the keywords (default: the function); `elsewhere` are
    keywords that its caller takes itself.
    """
    names = list(known)
    for name in given:
        if name not in names:
            few = len(names) <= _LISTED
            listed = (
                f"the arguments are {', '.join(names)}"
                if few
                else f"help({listed_by or function[:-2]}) lists them"
            )
            said = f"{name!r}; {hint(name, [*names, *elsewhere], table, spelled) or listed}"
            raise TypeError(f"{function} got an unexpected keyword argument {said}")


def answers_keywords(
    table: Mapping[str, str],
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Make a function answer unknown keywords with `table`, and too many positions with names.

    A function that takes any keyword checks them itself.
    """

    def decorated(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        parameters = inspect.signature(function).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        named = [name for name, one in parameters.items() if one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD)]
        places = [name for name in parameters if name not in named and name != "self"]

        @functools.wraps(function)
        def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            name = function.__qualname__.removesuffix(".__init__")
            if not takes_any:
                refuse_unknown(f"{name}()", kwargs, parameters, table)
            if len(args) > len(parameters) - len(named):
                raise TypeError(
                    f"{name}() takes {', '.join(places)} by position; give other arguments by name, such as "
                    f"{named[0]}=…"
                )
            return function(*args, **kwargs)

        return checked

    return decorated
