"""Small changes of a module's functions and constants, each of which some test should notice.

`mutants(source)` lists them in the order of the source: a comparison at its boundary or negated, arithmetic
by the opposite operator, an integer one more or less, `min` for `max`, "left" for "right", a condition
negated, `and` for `or`, a slice that begins or ends one off, a call statement left out, None returned.
Docstrings, annotations, defaults, decorators, class bodies, assertions, error texts and `__repr__` stay as
they are. A mutant's name, like `Domains.of: bits // 2 -> bits * 2`, stays valid when lines move.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Mutant", "mutants"]

_CONTEXT_CHARACTERS = 16  # a shorter expression is shown with what surrounds it: `1 -> 2` says too little

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.Pow: ast.Mult,
}
_SWAPS = [("min", "max"), ("minimum", "maximum"), ("any", "all"), ("bisect_left", "bisect_right")]
_SWAPS += [("add", "subtract"), ("left_shift", "right_shift")]
_NAMES = {**dict(_SWAPS), **{second: first for first, second in _SWAPS}, "bitwise_xor": "bitwise_and"}
_TEXTS = {"left": "right", "right": "left"}  # sides of a binary search; other strings are names or messages
_SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Pass)


@dataclass(frozen=True)
class Mutant:
    """One change: `name` is unique in its module; [line, end] are the lines that run if it can matter."""

    name: str
    line: int
    end: int
    tree: ast.Module
    slot: tuple[ast.AST, str, int | None]
    new: ast.AST

    @contextmanager
    def applied(self) -> Iterator[ast.Module]:
        """The module's tree with the change, which it loses at the end."""
        old = _read(self.slot)
        _write(self.slot, self.new)
        try:
            yield ast.fix_missing_locations(self.tree)
        finally:
            _write(self.slot, old)

    @property
    def statement(self) -> int | None:
        """The index of the module's statement that is changed, if it is not inside a function or class."""
        for index, statement in enumerate(self.tree.body):
            if statement.lineno <= self.line <= (statement.end_lineno or statement.lineno):
                return None if isinstance(statement, ast.FunctionDef | ast.ClassDef) else index
        return None


def mutants(source: str) -> list[Mutant]:
    """All changes of a module."""
    tree = ast.parse(source)
    seen: Counter[str] = Counter()
    found = []
    for slot, statement, function, parents in _slots(tree):
        old = _read(slot)
        for new in _replacements(old, slot):
            ast.copy_location(new, old)
            context = _context(slot, parents)
            before = _text(context)
            if context is slot:
                after = ast.unparse(new)
            else:
                _write(slot, new)
                after = _text(context)
                _write(slot, old)
            name = f"{function}: {before} -> {after}"
            seen[name] += 1
            name += f" ({seen[name]})" if seen[name] > 1 else ""
            found.append(Mutant(name, *_lines(statement), tree, slot, new))
    return found


_Slot = tuple[ast.AST, str, int | None]


def _read(slot: _Slot) -> ast.AST:
    parent, field, index = slot
    value = getattr(parent, field)
    node: ast.AST = value if index is None else value[index]
    return node


def _write(slot: _Slot, node: ast.AST) -> None:
    parent, field, index = slot
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _text(place: ast.AST | _Slot) -> str:
    return " ".join(ast.unparse(_read(place) if isinstance(place, tuple) else place).split())


def _context(slot: _Slot, parents: list[_Slot]) -> _Slot:
    """The slot itself, or the nearest expression around it that is long enough to be recognized."""
    for around in (slot, *reversed(parents)):
        node = _read(around)
        if isinstance(node, ast.stmt) and around is not slot:
            break
        if isinstance(node, ast.expr | ast.stmt) and not isinstance(node, ast.Slice):
            slot = around
            if len(_text(around)) >= _CONTEXT_CHARACTERS:
                break
    return slot


def _lines(statement: ast.AST) -> tuple[int, int]:
    """The lines of a simple statement; of a compound one those before its body."""
    assert isinstance(statement, ast.stmt)
    end = statement.end_lineno or statement.lineno
    body = getattr(statement, "body", None)
    return statement.lineno, max(statement.lineno, body[0].lineno - 1) if body else end


def _slots(tree: ast.Module) -> Iterator[tuple[_Slot, ast.AST, str, list[_Slot]]]:
    """(place, statement, function, places around it) of every node that may change, in order."""

    def walk(
        parent: ast.AST, statement: ast.AST, path: str, around: list[_Slot]
    ) -> Iterator[tuple[_Slot, ast.AST, str, list[_Slot]]]:
        for slot in _children(parent):
            node = _read(slot)
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                name = f"{path}.{node.name}" if path else node.name
                if node.name != "__repr__":
                    yield from walk(node, node, name, [])
                continue
            within = node if isinstance(node, ast.stmt) else statement
            if not isinstance(parent, ast.ClassDef):
                yield slot, within, path or "module", around
            yield from walk(node, within, path, [*around, slot])

    return walk(tree, tree, "", [])


def _children(parent: ast.AST) -> Iterator[_Slot]:
    """Places below a node, without what runs only when modules are imported or describes types."""
    skipped = {"annotation", "returns", "decorator_list", "args", "bases", "keywords", "type_params"}
    is_definition = isinstance(parent, ast.FunctionDef | ast.ClassDef | ast.AnnAssign)
    for field, value in ast.iter_fields(parent):
        if is_definition and field in skipped:
            continue
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(parent, ast.ClassDef) and not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            if isinstance(node, ast.expr | ast.stmt | ast.comprehension | ast.keyword) and not _is_left(node):
                yield parent, field, index


def _is_left(node: ast.AST) -> bool:
    """Whether it stays as it is: errors, texts, imports, names for type checkers."""
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return True
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, _SKIPPED)


def _replacements(node: ast.AST, slot: _Slot) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant):
        yield from _constants(node)
    elif isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            operators = [*node.ops]
            operators[index] = _COMPARISONS[type(operator)]()
            yield ast.Compare(node.left, operators, node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        yield ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Name) and node.id in _NAMES and isinstance(node.ctx, ast.Load):
        yield ast.Name(_NAMES[node.id], node.ctx)
    elif isinstance(node, ast.Attribute) and node.attr in _NAMES and isinstance(node.ctx, ast.Load):
        yield ast.Attribute(node.value, _NAMES[node.attr], node.ctx)
    elif isinstance(node, ast.Slice):
        if node.lower is not None:
            yield ast.Slice(_one_more(node.lower, ast.Add()), node.upper, node.step)
        if node.upper is not None:
            yield ast.Slice(node.lower, _one_more(node.upper, ast.Sub()), node.step)
    elif isinstance(node, ast.stmt):
        yield from _statements(node)
    parent, field, _ = slot
    if isinstance(node, ast.expr) and isinstance(parent, ast.If | ast.While | ast.IfExp | ast.comprehension):
        is_condition = field in ("test", "ifs") and not isinstance(node, ast.Compare | ast.UnaryOp)
        if is_condition:
            yield ast.UnaryOp(ast.Not(), node)


def _constants(node: ast.Constant) -> Iterator[ast.AST]:
    value = node.value
    if isinstance(value, bool):
        yield ast.Constant(not value)
    elif isinstance(value, int):
        yield ast.Constant(value + 1)
        yield ast.Constant(value - 1)
    elif isinstance(value, str) and value in _TEXTS:
        yield ast.Constant(_TEXTS[value])


def _one_more(node: ast.expr, operator: ast.operator) -> ast.expr:
    return ast.BinOp(node, operator, ast.Constant(1))


def _statements(node: ast.stmt) -> Iterator[ast.AST]:
    if isinstance(node, ast.Return) and node.value is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.AugAssign):
        if type(node.op) in _OPERATORS:
            yield ast.AugAssign(node.target, _OPERATORS[type(node.op)](), node.value)
        yield ast.Pass()
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    elif isinstance(node, ast.Continue):
        yield ast.Break()
    elif isinstance(node, ast.Break):
        yield ast.Continue()
