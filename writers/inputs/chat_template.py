"""Run a chat template: Jinja2's sandbox, with limits on the work that one record may cause.

Templates come with models that were downloaded, and what they render comes from raw inputs, so neither is
trusted to end. The sandbox keeps a template from the machine, but not from `9**9**7`, nested loops, or
strings that double. Here a template spends *steps* of a `Work`: for a loop's iterations, calls, attributes,
filters, and for the sizes of values, which are limited before they are made. Steps are counted, so a record
that is refused is refused on every machine. Time is not, so it never decides about a record: a rendering that
takes `_MOST_SECONDS` although it has steps left stops the build.

The environment is that of transformers, with its options, `raise_exception` and `tojson`. Missing are what
differs from run to run (`random`, `lipsum`), and filters for HTML that need time quadratic in a text
(`striptags`, `urlize`). `strftime_now` gives the date of the variable of that name, and is refused without.

Import this module only where templates are rendered: it needs the extra `chat`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from shardkit.errors import RecipeError

__all__ = [
    "CLOSE",
    "EACH",
    "OPEN",
    "ChatTemplate",
    "TemplateLimitError",
    "Work",
    "date_of",
    "namespace_values",
    "size_of",
]

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters that enclose what `{% generation %}` blocks write."""

# A step takes 0.2 to 2 microseconds. A usual template takes 50 to 150 for a message, in five renderings, and
# a message takes 30 characters at least: so the first steps are for templates whose work is not linear.
_FIRST_STEPS, _STEPS_PER_CHARACTER, _MOST_STEPS = 4_000_000, 32, 64_000_000
_FIRST_LARGEST, _LARGEST_PER_CHARACTER = 16 << 20, 4
_CHARACTERS_PER_STEP_BITS = 6  # to copy 64 characters takes less than a step
_MOST_SECONDS = 600.0
_MOST_DEPTH = (
    64  # of macros that call macros: far below Python's limit, which counts the caller's frames, too
)
_CLOCK_EVERY = 1 << 12  # calls of Work
_MOST_INDENT = 64
_LONG_TEXT = 1 << 10  # of the template itself: counted each time it is written, as values are

# Names of filters that no template can spell.
EACH, _CONCAT, _LITERAL = " each", " concat", " literal"

_MISSING = ("random", "striptags", "urlize")
# Filters that take containers without writing them out as text.
_ITEMWISE = frozenset((
    "attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "join", "last",
    "length", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "slice",
    "sort",
    "sum", "unique",
))  # fmt: skip
_LONG_NUMBER = re.compile(r"\d{4,}|\*")


class TemplateLimitError(Exception):
    """A template needs more steps than a record has, or asks for something without bounds."""


class Work:
    """What a record whose values have so many characters may still cost: steps, and the size of a value.

    `limit` are the steps that it began with, `largest` the characters or items of a value or the output.
    """

    def __init__(self, characters: int, *, first: int = _FIRST_STEPS, seconds: float = _MOST_SECONDS) -> None:
        self.limit = self._left = min(first + _STEPS_PER_CHARACTER * characters, _MOST_STEPS)
        self.largest = _FIRST_LARGEST + _LARGEST_PER_CHARACTER * characters
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._calls = 0

    def spend(self, steps: int = 1) -> None:
        """Take steps; TemplateLimitError without any left, RecipeError when the last resort is reached."""
        self._left -= steps
        if self._left < 0:
            raise TemplateLimitError(
                f"the chat template needs more than {self.limit:,} steps (iterations, calls, attributes)"
            )
        self._calls += 1
        if self._calls % _CLOCK_EVERY == 0 and time.monotonic() > self._deadline:
            raise RecipeError(
                f"tokenizer.chat_template: one record has been rendered for {self._seconds:.0f} s, within "
                f"its steps; the build stops, because dropping it would depend on this machine's speed"
            )

    def make(self, size: int) -> None:
        """Take the steps for a value of so many characters or items; TemplateLimitError if too many."""
        if size > self.largest:
            raise TemplateLimitError(
                f"the chat template makes a value of more than {self.largest:,} characters or items"
            )
        self.spend(1 + (size >> _CHARACTERS_PER_STEP_BITS))


def size_of(value: object, work: Work) -> int:
    """Characters and items of a value, those inside of containers included, as often as they are in it.

    Spends a step for each item, so that it ends for containers that have themselves many times over.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return 1 + value.bit_length() // 8
    total, stack = 1, [value]
    while stack:
        one = stack.pop()
        work.spend(1)
        total += 1
        if isinstance(one, str | bytes):
            total += len(one)
        elif isinstance(one, Mapping):
            stack += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            stack += one
        elif isinstance(one, Namespace):
            stack.append(namespace_values(one))
    return total


def namespace_values(namespace: Namespace) -> dict[str, Any]:
    """The attributes of a `namespace()`, to read and to set."""
    values: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return values


class ChatTemplate:
    """A compiled template; RecipeError if it cannot be compiled. Renders one conversation at a time.

    `rewrite` may change the syntax tree before it is compiled; `hooks` are its filters.
    """

    def __init__(
        self,
        source: str,
        rewrite: Callable[[jinja2.nodes.Template], None] | None = None,
        hooks: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.environment = _Environment()
        self.environment.filters |= hooks or {}
        try:
            tree = self.environment.parse(source)
            if rewrite is not None:
                rewrite(tree)
            self._template = self.environment.from_string(_Counted().visit(tree))
        except jinja2.TemplateSyntaxError as error:
            raise RecipeError(f"tokenizer.chat_template: line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError) as error:
            raise RecipeError("tokenizer.chat_template: it is nested too deeply to be compiled") from error
        except Exception as error:  # whatever Python's compiler says of what Jinja2 has written
            raise RecipeError(f"tokenizer.chat_template: it cannot be compiled: {error}") from error

    def chunks(self, work: Work, variables: Mapping[str, Any]) -> Iterator[str]:
        """Render; yields text as it is written. Raises whatever the template does."""
        self.environment.work, self.environment.depth = work, 0
        written = 0
        for chunk in self._template.generate(variables):
            work.spend(1 + (len(chunk) >> _CHARACTERS_PER_STEP_BITS))
            if (written := written + len(chunk)) > work.largest:
                raise TemplateLimitError(
                    f"the chat template writes more than {work.largest:,} characters for it"
                )
            yield chunk


class _Counted(NodeTransformer):
    """Makes loops, `~` and literals of containers spend steps."""

    def visit_For(self, node: Any) -> Any:  # noqa: N802  # as jinja2 names it
        self.generic_visit(node)
        node.iter = _filtered(node.iter, EACH)
        return node

    def visit_Concat(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node.nodes[0], _CONCAT, *node.nodes[1:])

    def visit_TemplateData(self, node: Any) -> Any:  # noqa: N802
        if len(node.data) < _LONG_TEXT:
            return node
        return _filtered(jinja2.nodes.Const(node.data).set_lineno(node.lineno), _LITERAL)

    def _container(self, node: Any) -> Any:
        self.generic_visit(node)
        is_plain = getattr(node, "ctx", "load") == "store" or all(
            isinstance(one, jinja2.nodes.Const) for one in node.iter_child_nodes()
        )
        return node if is_plain else _filtered(node, _LITERAL)

    visit_List = visit_Tuple = visit_Dict = _container  # noqa: N815


def _filtered(node: Any, name: str, *arguments: Any) -> Any:
    return jinja2.nodes.Filter(node, name, [*arguments], [], None, None).set_lineno(node.lineno)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: what a template says is generated."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja2's sandbox as transformers sets it up, where all work is counted."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        # Without the optimizer: it computes constants, such as a filter of one, while a template is compiled.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=self._shown,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        self.work, self.depth = Work(0), 0
        for name in _MISSING:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters["tojson"] = self._to_json
        self.filters = {name: self._counted(name, function) for name, function in self.filters.items()}
        self.filters |= {EACH: self._each, _CONCAT: self._concat, _LITERAL: self._literal}
        self.globals |= {"raise_exception": _refuse, "strftime_now": _no_date}

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, a method or a macro of the template."""
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        self.work.spend(1)
        if isinstance(owner, str | bytes | int):
            args = self._method(owner, name, args, kwargs)
        elif obj is dict or obj is Namespace:
            self.work.make(size_of([*args, kwargs], self.work))
        if self.depth == _MOST_DEPTH:
            raise TemplateLimitError(
                f"macros of the chat template call each other more than {_MOST_DEPTH} deep"
            )
        self.depth += 1
        try:
            return super().call(context, obj, *args, **kwargs)
        finally:
            self.depth -= 1

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute with an operator whose result may be larger than what it is made of."""
        work = self.work
        if operator == "+":
            if not isinstance(left, int | float):
                work.make(size_of(left, work) + size_of(right, work))
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, int) and isinstance(times, int):
                    work.spend((value.bit_length() * times.bit_length()) >> 6)
                elif isinstance(times, int):
                    work.make(size_of(value, work) * max(times, 0))
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                work.make(left.bit_length() * max(right, 0))
        elif isinstance(left, str | bytes):
            self._format_with(left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        """The sandbox's `str.format`, of which each width is a number of characters."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def run(*args: Any, **kwargs: Any) -> str:
            has_widths = re.search(r":[^{}]*\{", value.__self__)
            self._format_with(value.__self__, [*args, kwargs] if has_widths else ())
            self.work.make(size_of([*args, kwargs], self.work))
            return str(wrapped(*args, **kwargs))

        return run

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may have an attribute: not those that make texts of any length from tables."""
        self.work.spend(1)
        if isinstance(obj, Namespace):  # which has nothing of its own
            return not attr.startswith("_")
        if isinstance(obj, str | bytes) and attr == "translate":
            return False
        return super().is_safe_attribute(obj, attr, value)

    def _format_with(self, text: str | bytes, arguments: Any) -> None:
        """Spend what the widths in a format may ask for, those among its arguments included."""
        shown = text.decode("latin-1") if isinstance(text, bytes) else text
        found = _LONG_NUMBER.findall(shown)
        self.work.make(len(shown) + sum(int(one[:20]) for one in found if one != "*"))
        if "*" in found or not isinstance(arguments, tuple | str):
            values = arguments if isinstance(arguments, list | tuple) else [arguments]
            self.work.make(sum(abs(one) for one in values if isinstance(one, int)))

    def _method(
        self, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Spend what a method of a text or number makes; returns its arguments."""
        work, numbers = self.work, [one for one in (*args, *kwargs.values()) if isinstance(one, int)]
        length = 1 if isinstance(owner, int) else len(owner)
        work.make(length)
        if name in ("center", "ljust", "rjust", "zfill", "to_bytes"):
            work.make(max([0, *numbers]))
        elif name == "expandtabs":
            work.make(length * max([8, *numbers]))
        elif name == "replace" and len(args) > 1 and isinstance(args[0], type(owner) | str):
            work.make((owner.count(args[0]) + 1) * size_of(args[1], work))
        elif name == "join" and args:
            items = list(self._each(args[0]))
            work.make(length * len(items) + sum(len(one) for one in items if isinstance(one, str | bytes)))
            return (items, *args[1:])
        return args

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that spends what it is given and what it makes."""
        at = int(hasattr(function, "jinja_pass_arg"))  # of the value among the arguments

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            work, value, rest = self.work, args[at], [*args[at + 1 :], *kwargs.values()]
            work.make(0 if name in _ITEMWISE and not isinstance(value, str) else size_of(value, work))
            numbers = [abs(one) for one in rest if isinstance(one, int)]
            match name:
                case "center" | "batch" | "slice" | "round":
                    work.make(sum(numbers))
                case "indent":
                    width = sum(numbers) + sum(len(one) for one in rest if isinstance(one, str))
                    work.make(width * (str(value).count("\n") + 1))
                case "replace" if len(rest) > 1:
                    work.make((str(value).count(str(rest[0])) + 1) * size_of(rest[1], work))
                case "join":
                    items = list(self._each(value))
                    glue = sum(len(one) for one in rest if isinstance(one, str))
                    work.make(size_of(items, work) + glue * len(items))
                    args = (*args[:at], items, *args[at + 1 :])
                case "format":
                    self._format_with(str(value), rest)
                    work.make(size_of(rest, work))
                case "sum" if any(isinstance(one, list | tuple) for one in rest):
                    raise TemplateLimitError("the chat template adds lists with the filter `sum`")
            made = function(*args, **kwargs)
            if isinstance(made, list | str):
                work.make(len(made))
            return made

        return run

    @jinja2.pass_context
    def _shown(
        self, _context: Any, value: Any
    ) -> Any:  # with a context, so that no constant is computed early
        self.work.make(size_of(value, self.work))
        return value

    def _each(self, values: Any) -> Iterator[Any]:
        for value in values:
            self.work.spend(1)
            yield value

    def _concat(self, *values: Any) -> str:
        self.work.make(sum(size_of(value, self.work) for value in values))
        return "".join(map(str, values))

    def _literal(self, value: Any) -> Any:
        self.work.make(size_of(value, self.work))
        return value

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if indent is not None and not (isinstance(indent, int) and indent <= _MOST_INDENT):
            raise TemplateLimitError(f"the chat template indents JSON by more than {_MOST_INDENT} spaces")
        if separators is not None and sum(map(len, separators)) > _MOST_INDENT:
            raise TemplateLimitError("the chat template separates JSON by long texts")
        made = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
            default=_plain,
        )
        self.work.make(len(made))
        return made


def _plain(value: Any) -> Any:
    """What JSON has for a list of messages that is no list of Python."""
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"an object of type {type(value).__name__} is no JSON")


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _no_date(_: str) -> None:
    raise jinja2.TemplateError(
        "it asks for today's date, with which a build could not be repeated; give one, such as "
        'tokenizer.chat_template_kwargs: {strftime_now: "2026-01-31"}, or the variable that the template '
        "reads (Llama 3: date_string)"
    )


def date_of(day: object) -> Callable[[str], str]:
    """Return a `strftime_now` for which it is always this day (ISO 8601); ValueError if it is none."""
    moment = datetime.fromisoformat(str(day))

    def formatted(form: str) -> str:
        if _LONG_NUMBER.search(form):
            raise TemplateLimitError("the chat template asks for a date of more than 999 characters")
        return moment.strftime(form)

    return formatted
