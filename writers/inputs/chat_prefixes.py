"""The texts of all beginnings of a conversation, in time linear in its length.

A mask is proved by rendering the first k messages for every answer (shardkit.writers.inputs.chat). Rendered
one by one, n messages take n² steps. But a template is a program, and its run over the first k messages does
what its run over all does, up to the first read whose answer differs. So the whole is rendered once with
messages that note what is read of them, and then a beginning is rendered by a run that skips those iterations
of a loop over the messages that are known:

    whole:   prolog  [0] [1] [2] [3] [4] ... [n-1]  epilog
    first 4: prolog  (text of [0] to [2] of the whole)  [3]  epilog

At the start of each iteration, the run of the whole keeps the length of its text and the attributes of every
`namespace()`, which are all that an iteration of a template leaves to the next one. A run of k messages may
skip to iteration j if nothing that it has read before the loop has another answer than in the whole (such as
`messages | length`), and no iteration before j has read beyond message k. After such a loop the namespaces
must be those of the whole, or nothing is skipped any more. What cannot be skipped is rendered, so the texts
are right in any case, and only the time differs: templates that look through all messages from the end, or
count them, take n² steps, which are counted (`Work`).

Loops are followed that are not inside of another one, of a macro or a block, and have no `else` or `break`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import get_ident
from typing import Any

import jinja2.nodes
from jinja2.runtime import LoopContext, Undefined
from jinja2.utils import Namespace

from shardkit.errors import RecipeError
from shardkit.writers.inputs.chat_template import ChatTemplate
from shardkit.writers.inputs.chat_work import TemplateLimitError, Work, namespace_values

_FOLLOW = " follow"  # the name of a filter that no template can spell
_LOOP = "_loop_"  # what `loop` is called in a loop that is followed
_ALL = 1 << 62  # the "message" that is read by whoever asks how many there are
# Filters whose results remember how far they were read; kept in a variable, they would be a hidden state.
_LAZY = frozenset((
    "batch", "items", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "unique",
))  # fmt: skip
_State = list[dict[str, Any]] | None  # of each namespace; None if it has what cannot be compared


class Messages(Sequence[Any]):
    """The messages of a run from the `first` on, as a template sees them; tells the run what is read."""

    __hash__ = None  # type: ignore[assignment]  # as of lists

    def __init__(self, run: _Run, first: int = 0) -> None:
        self._run, self._first = run, first

    def __len__(self) -> int:
        self._run.note(_ALL)
        return max(0, self._run.stop - self._first)

    def __bool__(self) -> bool:
        self._run.note(self._first)
        return self._run.stop > self._first

    def __getitem__(self, key: Any) -> Any:
        run = self._run
        if isinstance(key, int) and key >= 0:
            run.note(self._first + key)
            if self._first + key < run.stop:
                return run.messages[self._first + key]
            raise IndexError("list index out of range")
        if isinstance(key, slice) and key.stop is None and key.step in (None, 1) and (key.start or 0) >= 0:
            return Messages(run, self._first + (key.start or 0))
        run.note(_ALL)
        return self._plain()[key]

    def __iter__(self) -> Iterator[Any]:
        return self._reading_from(self._first)

    def _reading_from(self, first: int) -> Iterator[Any]:
        """Yield messages by their numbers in the conversation, each noted when it is asked for."""
        run, number = self._run, first
        while True:
            run.note(number)
            if number >= run.stop:
                return
            yield run.messages[number]
            number += 1

    def _plain(self) -> list[Any]:
        """The same as a list of Python."""
        self._run.note(_ALL)
        return self._run.messages[self._first : self._run.stop]

    def __eq__(self, other: object) -> bool:
        return self._plain() == (other._plain() if isinstance(other, Messages) else other)

    def __add__(self, other: Any) -> Any:
        return self._plain() + (other._plain() if isinstance(other, Messages) else other)

    def __radd__(self, other: Any) -> Any:
        return other + self._plain()

    def __repr__(self) -> str:
        return repr(self._plain())

    def copy(self) -> list[Any]:
        """Return a list of the messages, as lists do."""
        return self._plain()


class _Loop(LoopContext):
    """A template's `loop` over messages, which may begin in their midst."""

    def __init__(self, messages: Messages, run: _Run, skipped: int) -> None:
        super().__init__(messages, Undefined)
        self._run = run
        if skipped:
            self.index0 = skipped - 1
            self._current = run.messages[messages._first + skipped - 1]
            self._iterator = messages._reading_from(messages._first + skipped)

    def changed(self, *value: Any) -> bool:
        """Ask Jinja2: the answer depends on all iterations before, so that none may be skipped."""
        self._run.note(_ALL)
        return super().changed(*value)


@dataclass
class _Site:
    """What the run over all messages has seen at one loop; entries are of the starts of its iterations."""

    first: int
    lengths: list[int] = field(default_factory=list)
    states: list[_State] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)  # the highest message read by the iterations before
    end: _State = None


class _Run:
    """One rendering of the first `stop` messages; `whole` is that of all, if it may skip what that has done.

    `parts` are what it wrote, and (begin, end) in the whole's text for what it skipped.
    """

    def __init__(self, messages: list[Any], stop: int, whole: _Run | None, work: Work) -> None:
        self.messages, self.stop, self._whole, self._work = messages, stop, whole, work
        self.namespaces: list[Namespace] = []
        self.sites: dict[int, _Site] = {}
        self.parts: list[str | tuple[int, int]] = []
        self.text = ""
        self._length = 0
        self._differs = False  # whether something was read that has another answer in the whole
        self._is_following = False
        self._highest = -1  # message read in the loop that is followed

    def write(self, template: ChatTemplate, variables: Mapping[str, Any]) -> None:
        """Render; raises whatever the template does."""
        for chunk in template.chunks(self._work, {"messages": Messages(self), **variables}):
            self.parts.append(chunk)
            self._length += len(chunk)
        if self._whole is None:
            self.text = "".join(part for part in self.parts if isinstance(part, str))

    def note(self, message: int) -> None:
        """Take down that a message was read, or whether there is one."""
        if self._is_following:
            self._highest = max(self._highest, message)
        elif message >= self.stop:
            self._differs = True

    def follow(self, messages: Any, site: int) -> Iterator[tuple[Any, Any]]:
        """Yield what a loop gets: each item, and the `loop`."""
        if not isinstance(messages, Messages):
            yield from LoopContext(messages, Undefined)
            return
        known = None if self._whole is None else self._whole.sites.get(site)
        skipped = 0 if known is None or known.first != messages._first else self._skip(known)
        loop = _Loop(messages, self, skipped)
        entry = len(self.namespaces)
        seen = _Site(messages._first)
        self._is_following, self._highest = True, -1
        while True:
            if self._whole is None:
                seen.lengths.append(self._length)
                seen.states.append(self._state(entry, seen.states[-1] if seen.states else None))
                seen.reads.append(self._highest)
            if (pair := next(loop, None)) is None:
                break
            yield pair
        self._is_following = False
        end = self._state(entry, None)
        del self.namespaces[
            entry:
        ]  # out of reach, unless one outside has one of them, which is no plain state
        if self._whole is None:
            seen.end, self.sites[site] = end, seen
        elif known is None or end is None or known.end is None or not _same(end, known.end):
            self._differs = True

    def _skip(self, known: _Site) -> int:
        """Go to the last iteration that is known, of those before this run's last one; returns its number."""
        most = min(self.stop - known.first - 1, bisect_right(known.reads, self.stop - 1) - 1)
        if self._differs or most <= 0 or (state := known.states[most]) is None:
            return 0
        self.parts.append((known.lengths[0], known.lengths[most]))
        for namespace, values in zip(self.namespaces, state, strict=True):
            own = namespace_values(namespace)
            own.clear()
            own.update(values)
        return most

    def _state(self, count: int, before: _State) -> _State:
        """The attributes of the first namespaces; None if they have what a later run could not compare."""
        state = [dict(namespace_values(one)) for one in self.namespaces[:count]]
        for number, values in enumerate(state):
            old = before[number] if before is not None else {}
            if not all(
                (name in old and old[name] is value) or self._is_plain(value)
                for name, value in values.items()
            ):
                return None
        return state

    def _is_plain(self, value: Any) -> bool:
        stack = [value]
        while stack:
            one = stack.pop()
            self._work.spend(1)
            if isinstance(one, dict):
                stack += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple):
                stack += one
            elif not isinstance(one, str | int | float | None):
                return False
        return True


def _same(a: Any, b: Any) -> bool:
    """Whether a template cannot tell two plain values from each other."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(value, b[name]) for name, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


class _Template:
    """A compiled template whose loops over messages are followed where that is possible."""

    def __init__(self, source: str) -> None:
        self.run: _Run | None = None
        self._sites = 0
        hooks = {_FOLLOW: self._follow}
        self.compiled = ChatTemplate(source, self._rewrite, hooks)
        self.compiled.environment.globals["namespace"] = self._namespace

    def _follow(self, values: Any, site: int) -> Iterator[tuple[Any, Any]]:
        assert self.run is not None
        return self.run.follow(values, site)

    def _namespace(self, *args: Any, **kwargs: Any) -> Namespace:
        assert self.run is not None
        made = Namespace(*args, **kwargs)
        self.run.namespaces.append(made)
        return made

    def render(self, run: _Run, variables: Mapping[str, Any]) -> None:
        """Write a run."""
        self.run = run
        run.write(self.compiled, variables)

    def _rewrite(self, tree: jinja2.nodes.Template) -> None:
        names = {node.name for node in tree.find_all(jinja2.nodes.Name)}
        if names.isdisjoint((_LOOP, "cycler", "joiner")) and not _keeps_lazy(tree):
            self._rewrite_all(tree.body)

    def _rewrite_all(self, statements: Sequence[Any]) -> None:
        for node in statements:
            if isinstance(node, jinja2.nodes.If):
                self._rewrite_all([*node.body, *node.elif_, *node.else_])
            elif isinstance(node, jinja2.nodes.For) and _is_simple(node):
                _rename_loop(node.body)
                name = jinja2.nodes.Name(_LOOP, "store").set_lineno(node.lineno)
                node.target = jinja2.nodes.Tuple([node.target, name], "store").set_lineno(node.lineno)
                site = jinja2.nodes.Const(self._sites)
                node.iter = jinja2.nodes.Filter(node.iter, _FOLLOW, [site], [], None, None)
                node.iter.set_lineno(node.lineno)
                self._sites += 1


def _is_simple(node: jinja2.nodes.For) -> bool:
    if node.test is not None or node.recursive or node.else_:
        return False
    return next(node.find_all(jinja2.nodes.Break), None) is None


def _rename_loop(nodes: Sequence[Any]) -> None:
    """Give `loop` its other name, except where it is that of a loop inside."""
    for node in nodes:
        if isinstance(node, jinja2.nodes.Name) and node.name == "loop":
            node.name = _LOOP
        inner = isinstance(node, jinja2.nodes.For)
        _rename_loop([*node.iter_child_nodes(only=("iter", "else_") if inner else None)])


def _keeps_lazy(node: Any, *, is_read: bool = False) -> bool:
    """Whether a lazy result may be kept in a variable: whether it goes elsewhere than to a filter or loop."""
    is_filter = isinstance(node, jinja2.nodes.Filter)
    if is_filter and node.name in _LAZY and not is_read:
        return True
    for name, value in node.iter_fields():
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, jinja2.nodes.Node):
                read = (is_filter and name == "node" and (node.name not in _LAZY or is_read)) or (
                    isinstance(node, jinja2.nodes.For) and name == "iter"
                )
                if _keeps_lazy(child, is_read=read):
                    return True
    return False


@lru_cache(maxsize=8)
def _compiled(source: str, thread: int) -> _Template:
    return _Template(source)  # which renders one conversation at a time, so each thread has its own


class Prefixes:
    """The text of a conversation, and how the texts of its beginnings compare with it.

    `variables` are for all renderings. Raises what a template may raise, which is anything, RecipeError for
    one that cannot be compiled, and TemplateLimitError when the steps of `work` are spent.
    """

    def __init__(self, source: str, messages: list[Any], variables: Mapping[str, Any], work: Work) -> None:
        self._template = _compiled(source, get_ident())
        self._messages, self._variables, self._work = messages, variables, work
        self.text = self._render_list(len(messages), prompt=False)
        self._wholes: dict[bool, _Run | None] = {}
        self._common: dict[bool, int] = {}

    def _render_list(self, stop: int, *, prompt: bool) -> str:
        """Render a list of Python, as transformers does."""
        run = _Run([], 0, None, self._work)
        variables = {**self._variables, "add_generation_prompt": prompt}
        self._template.render(run, {**variables, "messages": self._messages[:stop]})
        return run.text

    def _whole(self, *, prompt: bool) -> _Run | None:
        """The noted run over all messages; None if notes would change what the template does."""
        if prompt not in self._wholes:
            run = _Run(self._messages, len(self._messages), None, self._work)
            made: _Run | None = run
            try:
                self._template.render(run, {**self._variables, "add_generation_prompt": prompt})
            except (RecipeError, TemplateLimitError):
                raise
            except Exception:  # the template's own: what it says of all says nothing of beginnings
                made = None
            if made is not None and not prompt and made.text != self.text:
                made = None
            self._wholes[prompt] = made
            self._common[prompt] = 0 if made is None else _common(made.text, self.text)
        return self._wholes[prompt]

    def length_of(self, stop: int, *, prompt: bool, tail: str = "") -> int | None:
        """How long the text of the first messages is; None if it is no beginning of the whole text.

        With `prompt` it has the prompt of the answer that follows. `tail` is left out where it ends so.
        """
        parts: list[str | tuple[int, int]]
        if self._whole(prompt=False) is None:
            parts, common, other = [self._render_list(stop, prompt=prompt)], 0, ""
        else:
            whole = self._whole(prompt=prompt)
            run = _Run(self._messages, stop, whole, self._work)
            self._template.render(run, {**self._variables, "add_generation_prompt": prompt})
            parts, common, other = run.parts, self._common[prompt], whole.text if whole is not None else ""
        length = self._extent(parts, other, common)
        if length is None and tail and (rest := _without(parts, tail)) is not None:
            length = self._extent(rest, other, common)
        return length

    def _extent(self, parts: Sequence[str | tuple[int, int]], other: str, common: int) -> int | None:
        """How long the parts are; None if the whole text does not begin with them."""
        at = 0
        for part in parts:
            if isinstance(part, str):
                if not self.text.startswith(part, at):
                    return None
                at += len(part)
            else:
                begin, end = part
                if not (begin == at and end <= common) and not self.text.startswith(other[begin:end], at):
                    return None
                at += end - begin
        return at


def _without(parts: Sequence[str | tuple[int, int]], tail: str) -> list[str | tuple[int, int]] | None:
    """The parts without a text at their end; None if it is not there."""
    rest, last = list(parts), ""
    while rest and isinstance(part := rest[-1], str) and len(last) < len(tail):
        last = part + last
        rest.pop()
    return [*rest, last[: -len(tail)]] if last.endswith(tail) else None


def _common(a: str, b: str) -> int:
    """The length of the beginning that two texts share."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
