"""Run a chat template: Jinja2's sandbox, with limits on the work that one record may cause.

Templates come with downloaded models and render raw inputs, so neither is trusted to let a rendering end. The
sandbox keeps a template away from the machine, but allows `9**9**7`, nested loops, and strings that double.
Here a template takes *steps* from a `Work`: for the iterations of loops, calls, attributes, filters, and the
sizes of values, which are checked before the values are made. The number of steps is the same on every
machine, so a record is refused on all of them or on none. Time differs between machines, so it never decides
about a record: a rendering that takes ten minutes although it has steps left stops the build.

The environment is the one of transformers, with the same options, `raise_exception` and `tojson`. It lacks
functions whose results differ from run to run (`random`, `lipsum`), and filters for HTML whose time is
quadratic in the length of a text (`striptags`, `urlize`). `strftime_now` formats the date in the template
variable of that name, and fails without it.

Import this module only where templates are rendered: it needs the extra `chat`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from itertools import chain
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from shardkit.errors import RecipeError
from shardkit.tokens.chat_work import (
    CHARACTERS_PER_STEP_BITS,
    TemplateLimitError,
    Work,
    size_of,
)

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters that enclose the text of `{% generation %}` blocks."""

_LOOKED_AT_PER_STEP_BITS = 3  # log2 of the number of characters per step, if they are examined one by one
# Maximum nesting of macro calls: far below Python's recursion limit, which counts the caller's frames, too.
_MOST_DEPTH = 64
_MOST_INDENT = 64
_LONG_TEXT = 1 << 10  # minimum length of literal text that takes steps when it is written

# Names of the filters that `_Counted` inserts; the space keeps templates from using them.
EACH, _CONCAT, _LITERAL, _WEIGH = " each", " concat", " literal", " weigh"

_MISSING = ("random", "striptags", "urlize")
# Filters that use the items of a container, and do not convert it to text.
_ITEMWISE = frozenset((
    "attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "join", "last",
    "length", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "slice",
    "sort",
    "sum", "unique",
))  # fmt: skip
# Filters of a container that take constant time, whatever its size.
_AT_ONCE = frozenset(("attr", "count", "d", "default", "first", "items", "last", "length"))
_COMPARING = frozenset((
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan",
    "lower", "lt", "ne", "upper",
))  # fmt: skip
_MOST_BITS = 1 << 16  # maximum size of an integer: dividing larger ones takes Python too long
_LONG_NUMBER = re.compile(r"\d{4,}|\*")


class ChatTemplate:
    """A compiled template, which renders one conversation at a time.

    `rewrite` may change the syntax tree before it is compiled, and `hooks` are the filters that it inserts.
    Raises RecipeError if the template cannot be compiled.
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
            raise RecipeError("tokenizer.chat_template: the template is nested too deeply") from error
        except Exception as error:  # Python's compiler may fail in any way on the code that Jinja2 generates
            raise RecipeError(f"tokenizer.chat_template: the template cannot be compiled: {error}") from error

    def chunks(self, work: Work, variables: Mapping[str, Any]) -> Iterator[str]:
        """Render with `variables` and yield the text piece by piece; raises any exception of the template."""
        self.environment.work, self.environment.depth = work, 0
        written = 0
        for chunk in self._template.generate(variables):
            work.spend(1 + (len(chunk) >> CHARACTERS_PER_STEP_BITS))
            if (written := written + len(chunk)) > work.largest:
                raise TemplateLimitError(
                    f"the chat template writes more than {work.largest:,} characters for the record"
                )
            yield chunk


class _Counted(NodeTransformer):
    """Inserts filters, which take steps, into loops, `~`, comparisons, long texts and container literals."""

    def visit_For(self, node: Any) -> Any:  # noqa: N802  # the name that jinja2 prescribes
        self.generic_visit(node)
        node.iter = _filtered(node.iter, EACH)
        return node

    def visit_Concat(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node.nodes[0], _CONCAT, *node.nodes[1:])

    def visit_Compare(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        node.expr = _weighed(node.expr)
        for operand in node.ops:
            operand.expr = _weighed(operand.expr)
        return node

    def visit_Test(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        if node.name in _COMPARING:
            node.node, node.args = _weighed(node.node), [*map(_weighed, node.args)]
        return node

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


def _weighed(node: Any) -> Any:
    return node if isinstance(node, jinja2.nodes.Const) else _filtered(node, _WEIGH)


def _filtered(node: Any, name: str, *arguments: Any) -> Any:
    return jinja2.nodes.Filter(node, name, [*arguments], [], None, None).set_lineno(node.lineno)


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}...{% endgeneration %}`, which encloses text that a model generates."""

    tags = {"generation"}  # noqa: RUF012  # a plain set, as in the base class of jinja2

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja2's sandbox as transformers configures it, with all work counted in steps."""

    intercepted_binops = frozenset(("+", "-", "*", "**", "%"))

    def __init__(self) -> None:
        # No optimizer: it would apply filters to constants while the template is compiled, without limits.
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
        self.filters |= {
            EACH: self._each,
            _CONCAT: self._concat,
            _LITERAL: self._literal,
            _WEIGH: self._weigh,
        }
        self.globals |= {"raise_exception": _refuse, "strftime_now": _no_date}

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, method or macro for the template, as the sandbox does, and take steps for it."""
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        self.work.spend(1)
        if isinstance(owner, str | bytes | int):
            args = self._method(owner, name, args, kwargs)
        elif obj is dict or obj is Namespace:
            self.work.make(size_of([*args, kwargs], self.work))
        if self.depth == _MOST_DEPTH:
            raise TemplateLimitError(
                f"macro calls of the chat template are nested more than {_MOST_DEPTH} deep"
            )
        self.depth += 1
        try:
            return super().call(context, obj, *args, **kwargs)
        finally:
            self.depth -= 1

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Take steps for the result of an operator, which may be larger than its operands, then apply it."""
        work = self.work
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(operator, left, right)
        elif operator == "+":
            if not isinstance(left, int | float):
                work.make(size_of(left, work) + size_of(right, work))
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    work.make(size_of(value, work) * max(times, 0))
        elif isinstance(left, str | bytes):
            self._format_with(left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        """Wrap `str.format` as the sandbox does, and take steps for the widths in the format first."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def run(*args: Any, **kwargs: Any) -> str:
            given = [*args, *kwargs.values()]
            if value.__name__ == "format_map":
                given = [*chain.from_iterable(one.values() for one in args if isinstance(one, Mapping))]
            has_widths = re.search(r":[^{}]*\{", value.__self__)
            if has_widths and not all(isinstance(one, str | int | float) for one in given):
                raise TemplateLimitError("the chat template takes a width for `format` from an object")
            self._format_with(value.__self__, given if has_widths else ())
            self.work.make(size_of([*args, kwargs], self.work))
            return str(wrapped(*args, **kwargs))

        return run

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether the sandbox allows a template an attribute; never `translate` or `from_bytes`."""
        self.work.spend(1)
        if isinstance(obj, Namespace):  # all its attributes without "_" were set by the template
            return not attr.startswith("_")
        if (isinstance(obj, str | bytes) and attr == "translate") or attr == "from_bytes":
            return False
        return super().is_safe_attribute(obj, attr, value)

    def _format_with(self, text: str | bytes, arguments: Any) -> None:
        """Take steps for all widths of fields, which are in a format text or among its arguments."""
        shown = text.decode("latin-1") if isinstance(text, bytes) else text
        found = _LONG_NUMBER.findall(shown)
        self.work.make(len(shown) + sum(int(one[:20]) for one in found if one != "*"))
        if "*" in found or not isinstance(arguments, tuple | str):
            values = arguments if isinstance(arguments, list | tuple) else [arguments]
            self.work.make(sum(abs(one) for one in values if isinstance(one, int)))

    def _method(
        self, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Take steps for the result of a method of a text or number; return the arguments to call it with."""
        work, numbers = self.work, [one for one in (*args, *kwargs.values()) if isinstance(one, int)]
        length = 1 if isinstance(owner, int) else len(owner)
        work.make(length)
        work.spend(length >> _LOOKED_AT_PER_STEP_BITS)
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
        """Return a filter that also takes steps for its input and its result."""
        at = int(hasattr(function, "jinja_pass_arg"))  # position of the value among the arguments

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            work, value, rest = self.work, args[at], [*args[at + 1 :], *kwargs.values()]
            if name not in _ITEMWISE or isinstance(value, str):
                size = size_of(value, work)
                work.make(size)
                work.spend(size >> _LOOKED_AT_PER_STEP_BITS)
            elif name not in _AT_ONCE and isinstance(value, list | tuple | range | dict):
                work.spend(1 + len(value))
            else:
                work.spend(1)
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
                    raise TemplateLimitError(
                        "the chat template adds lists with the filter `sum`, in quadratic time"
                    )
            made = function(*args, **kwargs)
            if isinstance(made, list | str):
                work.make(len(made))
            return made

        return run

    @jinja2.pass_context
    def _shown(self, _context: Any, value: Any) -> Any:
        # Without the context, Jinja2 would call this for constants at compile time, where no limit applies.
        self.work.make(size_of(value, self.work))
        return value

    def _each(self, values: Any) -> Iterator[Any]:
        for value in values:
            self.work.spend(1)
            yield value

    def _concat(self, *values: Any) -> str:
        self.work.make(sum(size_of(value, self.work) for value in values))
        return "".join(map(str, values))

    def _weigh(self, value: Any) -> Any:
        """Take steps for comparing or searching a value (none for a dict); return the value."""
        if isinstance(value, str | bytes):
            self.work.spend(len(value) >> CHARACTERS_PER_STEP_BITS)
        elif isinstance(value, list | tuple):
            size_of(value, self.work)
        elif isinstance(value, range):
            self.work.spend(len(value))
        return value

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
            raise TemplateLimitError("the chat template passes separators to `tojson` that are too long")
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


def _check_bits(operator: str, left: int, right: int) -> None:
    """Raise TemplateLimitError if the result of an operator may be an integer of too many bits."""
    sizes = left.bit_length(), right.bit_length()
    made = max(sizes) + 1
    if operator == "*":
        made = sum(sizes)
    elif operator == "**":
        made = sizes[0] * max(right, 0)
    if made > _MOST_BITS:
        raise TemplateLimitError(f"the chat template makes an integer of more than {_MOST_BITS:,} bits")


def _plain(value: Any) -> Any:
    """Return a sequence, such as `Messages`, as a list for JSON; raise TypeError for other values."""
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON")


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _no_date(_: str) -> None:
    raise jinja2.TemplateError(
        "the template uses today's date, with which a build could not be repeated; set a date, such as "
        'tokenizer.chat_template_kwargs: {strftime_now: "2026-01-31"}, or the variable that the template '
        "reads (Llama 3: date_string)"
    )


def date_of(day: object) -> Callable[[str], str]:
    """Return a `strftime_now` that always formats `day`; raise ValueError if it is not an ISO 8601 date."""
    moment = datetime.fromisoformat(str(day))

    def formatted(form: str) -> str:
        if _LONG_NUMBER.search(form):
            raise TemplateLimitError(
                "the chat template formats a date with a width of more than 999 characters"
            )
        return moment.strftime(form)

    return formatted
