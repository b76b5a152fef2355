"""The texts of all prefixes of a conversation, in time linear in its length.

A mask is proved by rendering the first k messages for every answer (shardkit.tokens.chat). Rendered
one by one, n messages take n^2 steps. But a template is a program, and its run over the first k messages does
the same as its run over all messages, up to the first read that returns something else. So all messages are
rendered once, in the *whole run*, with a list that notes which messages are read. A prefix is then rendered
by a run that skips those iterations of a loop over the messages that would repeat the whole run:

    whole:   prolog  [0] [1] [2] [3] [4] ... [n-1]  epilog
    first 4: prolog  (text of [0] to [2] of the whole)  [3]  epilog

At the start of each iteration, the whole run keeps the length of its text and the attributes of every
`namespace()`: an iteration of a template passes nothing else to the next one. A run over k messages may skip
to iteration j if every read before the loop returned the same as in the whole run (`messages | length` does
not), and no iteration before j has read a message from number k on. After such a loop the namespaces must
equal those of the whole run; if not, nothing more is skipped. Iterations that cannot be skipped are rendered,
so the texts are right in any case and only the time differs: templates that search all messages from the end,
or count them, take n^2 steps, which are counted (`Work`).

A loop is followed if it is not inside another loop, a macro or a block, and has no `else` or `break`.
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
from shardkit.tokens.chat_template import ChatTemplate
from shardkit.tokens.chat_work import TemplateLimitError, Work, namespace_values

_FOLLOW = " follow"  # name of the filter that follows loops; no template can use it because of the space
_LOOP = "_loop_"  # replaces the name `loop` in a loop that is followed
_ALL = 1 << 62  # noted as the message number when a read depends on how many messages there are
# Filters with lazy results, which remember how far they were read. In a variable, that would be hidden state.
_LAZY = frozenset((
    "batch", "items", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "unique",
))  # fmt: skip
_State = list[dict[str, Any]] | None  # attributes of each namespace; None if some cannot be compared


class Messages(Sequence[Any]):
    """A run's messages from number `first` on, as the template sees them; notes in the run what is read."""

    __hash__ = None  # type: ignore[assignment]  # unhashable, as lists are

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
        """Yield the messages from number `first` on; note each one when it is read."""
        run, number = self._run, first
        while True:
            run.note(number)
            if number >= run.stop:
                return
            yield run.messages[number]
            number += 1

    def _plain(self) -> list[Any]:
        """Return the messages as a plain list; note that all of them were read."""
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
        """Return the messages as a plain list, as `list.copy` does."""
        return self._plain()


class _Loop(LoopContext):
    """The variable `loop` of a template's loop over messages, which may skip its first iterations."""

    def __init__(self, messages: Messages, run: _Run, skipped: int) -> None:
        super().__init__(messages, Undefined)
        self._run = run
        if skipped:
            self.index0 = skipped - 1
            self._current = run.messages[messages._first + skipped - 1]
            self._iterator = messages._reading_from(messages._first + skipped)

    def changed(self, *value: Any) -> bool:
        """Return whether the value changed; note that this depends on all earlier iterations."""
        self._run.note(_ALL)
        return super().changed(*value)


@dataclass
class _Site:
    """Records of the whole run (the rendering of all messages) for one template loop.

    Each list has one entry per iteration, recorded when the iteration starts.
    """

    first: int  # number of the loop's first message
    lengths: list[int] = field(default_factory=list)  # length of the text written so far
    states: list[_State] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)  # highest number of a message read by earlier iterations
    end: _State = None  # attributes of the namespaces after the loop


class _Run:
    """One rendering of the first `stop` messages; may skip iterations that are known from the `whole` run.

    `parts` has the text that the run wrote and, for skipped iterations, (begin, end) in the whole run's text.
    """

    def __init__(self, messages: list[Any], stop: int, whole: _Run | None, work: Work) -> None:
        self.messages, self.stop, self._whole, self._work = messages, stop, whole, work
        self.namespaces: list[Namespace] = []
        self.sites: dict[int, _Site] = {}
        self.parts: list[str | tuple[int, int]] = []
        self.text = ""
        self._length = 0
        self._differs = False  # whether a read returned something else than in the whole run
        self._is_following = False
        self._highest = -1  # highest number of a message read in the loop that is followed

    def write(self, template: ChatTemplate, variables: Mapping[str, Any]) -> None:
        """Run the template on the messages and collect its text; raises any exception of the template."""
        for chunk in template.chunks(self._work, {"messages": Messages(self), **variables}):
            self.parts.append(chunk)
            self._length += len(chunk)
        if self._whole is None:
            self.text = "".join(part for part in self.parts if isinstance(part, str))

    def note(self, message: int) -> None:
        """Record that the template read the message with this number, or tested whether it exists."""
        if self._is_following:
            self._highest = max(self._highest, message)
        elif message >= self.stop:
            self._differs = True

    def follow(self, messages: Any, site: int) -> Iterator[tuple[Any, Any]]:
        """Yield (item, `loop`) for each iteration of a template's loop, without the skipped ones."""
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
        # The template cannot use namespaces made in the loop any more, unless an outer namespace refers to
        # one: then `end` is None.
        del self.namespaces[entry:]
        if self._whole is None:
            seen.end, self.sites[site] = end, seen
        elif known is None or end is None or known.end is None or not _same(end, known.end):
            self._differs = True

    def _skip(self, known: _Site) -> int:
        """Skip iterations that would repeat the whole run, but not this run's last one; return how many."""
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
        """Return the attributes of the first `count` namespaces, or None if any of them is not plain data."""
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
    """Return whether a template cannot tell two plain values from each other."""
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
    """A compiled template that hands its loops to the current run, where they can be followed."""

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
        """Execute the template on the messages of `run`, which collects the rendered text."""
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
    """Rename the variable `loop`, except inside inner loops, which have their own."""
    for node in nodes:
        if isinstance(node, jinja2.nodes.Name) and node.name == "loop":
            node.name = _LOOP
        inner = isinstance(node, jinja2.nodes.For)
        _rename_loop([*node.iter_child_nodes(only=("iter", "else_") if inner else None)])


def _keeps_lazy(node: Any, *, is_read: bool = False) -> bool:
    """Return whether the template may keep a lazy result, rather than pass it to a filter or loop at once."""
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
    return _Template(source)  # one per thread, because a template renders one conversation at a time


class Prefixes:
    """The rendered text of a conversation, and the lengths of its first k messages in this text.

    `variables` are passed to every rendering. Raises any exception of the template, RecipeError if the
    template cannot be compiled, and TemplateLimitError when the steps of `work` are used up.
    """

    def __init__(self, source: str, messages: list[Any], variables: Mapping[str, Any], work: Work) -> None:
        self._template = _compiled(source, get_ident())
        self._messages, self._variables, self._work = messages, variables, work
        self.text = self._render_list(len(messages), prompt=False)
        self._wholes: dict[bool, _Run | None] = {}
        self._common: dict[bool, int] = {}

    def _render_list(self, stop: int, *, prompt: bool) -> str:
        """Render the first `stop` messages as a plain list, as transformers does."""
        run = _Run([], 0, None, self._work)
        variables = {**self._variables, "add_generation_prompt": prompt}
        self._template.render(run, {**variables, "messages": self._messages[:stop]})
        return run.text

    def _whole(self, *, prompt: bool) -> _Run | None:
        """Return the run over all messages; None if it fails, or its text differs from a plain list's."""
        if prompt not in self._wholes:
            run = _Run(self._messages, len(self._messages), None, self._work)
            made: _Run | None = run
            try:
                self._template.render(run, {**self._variables, "add_generation_prompt": prompt})
            except (RecipeError, TemplateLimitError):
                raise
            except Exception:  # an error for all messages says nothing about the prefixes
                made = None
            if made is not None and not prompt and made.text != self.text:
                made = None
            self._wholes[prompt] = made
            self._common[prompt] = 0 if made is None else _common(made.text, self.text)
        return self._wholes[prompt]

    def length_of(self, stop: int, *, prompt: bool, tail: str = "") -> int | None:
        """Return the length of the text of the first `stop` messages; None if it is not a prefix of `text`.

        With `prompt`, that text ends with the prompt of the next answer. If it is not a prefix and ends with
        `tail`, it is compared again without `tail`.
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
        """Return the total length of the parts, or None if `text` does not begin with them."""
        at = 0
        for part in parts:
            if isinstance(part, str):
                if not self.text.startswith(part, at):
                    return None
                at += len(part)
            else:
                begin, end = part  # a range of `other`, whose first `common` characters are those of `text`
                if not (begin == at and end <= common) and not self.text.startswith(other[begin:end], at):
                    return None
                at += end - begin
        return at


def _without(parts: Sequence[str | tuple[int, int]], tail: str) -> list[str | tuple[int, int]] | None:
    """Return the parts without the text `tail` at their end, or None if they do not end with it."""
    rest, last = list(parts), ""
    while rest and isinstance(part := rest[-1], str) and len(last) < len(tail):
        last = part + last
        rest.pop()
    return [*rest, last[: -len(tail)]] if last.endswith(tail) else None


def _common(a: str, b: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
