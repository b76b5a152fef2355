"""What code a function of shardkit can run, read from the sources: definitions followed by name.

From a definition (a function, a class, an assignment of a module) this follows every name in its body and its
annotations to the definition it stands for, through imports anywhere: at the top, in functions, under
TYPE_CHECKING, re-exported by a package. A class counts with all its methods; `import_module` of an f-string
counts as every module of that package. It finds more than what runs, never less, unless code hides a name
in another way.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "shardkit": ROOT / "shardkit",
    "shardkit.writers": ROOT / "writers",
    "shardkit.loaders": ROOT / "loaders",
}
Definition = tuple[str, str]  # (module, name); the name "" is the module's own statements


@dataclass
class Reached:
    """Definitions that were reached, and top-level packages of others that they import."""

    definitions: set[Definition] = field(default_factory=set)
    packages: set[str] = field(default_factory=set)

    @property
    def modules(self) -> set[str]:
        return {module for module, _ in self.definitions}


class _Module:
    def __init__(self, name: str, file: Path) -> None:
        self.name, self.tree = name, ast.parse(file.read_text())

    @cached_property
    def definitions(self) -> dict[str, list[ast.stmt]]:
        """Statements at the top by the names that they bind; those that bind none under ""."""
        found: dict[str, list[ast.stmt]] = {"": []}
        for statement in _flat(self.tree.body):
            for name in _bound(statement):
                found.setdefault(name, []).append(statement)
        return found

    @cached_property
    def imports(self) -> dict[str, tuple[str, str | None]]:
        return _imports(*_flat(self.tree.body))


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those in its `if`s and `try`s among them."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _flat(handler.body)
        else:
            yield statement


def _bound(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return []
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    stored = [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return stored or [""]


def _imports(*nodes: ast.AST) -> dict[str, tuple[str, str | None]]:
    """(module, name in it or None) by the name that an import binds."""
    found: dict[str, tuple[str, str | None]] = {}
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                found[bound] = (alias.name if alias.asname else bound, None)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "relative imports are not followed"
            found |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    return found


class Sources:
    """All modules of shardkit."""

    def __init__(self) -> None:
        self.modules: dict[str, _Module] = {}
        for package, folder in FOLDERS.items():
            for file in sorted(folder.rglob("*.py")):
                parts = [package, *file.relative_to(folder).with_suffix("").parts]
                name = ".".join(parts).removesuffix(".__init__")
                self.modules[name] = _Module(name, file)

    def calls_of(self, function: str) -> Iterator[tuple[str, ast.Call]]:
        """(module, call) of every call of that name."""
        for name, module in self.modules.items():
            for node in ast.walk(module.tree):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id == function
                ):
                    yield name, node

    def reached_from(self, *starts: Definition) -> Reached:
        """All that these definitions can run, themselves included."""
        reached, waiting = Reached(), list(starts)
        while waiting:
            definition = waiting.pop()
            module = self.modules[definition[0]]
            if definition in reached.definitions:
                continue
            reached.definitions.add(definition)
            waiting.append((module.name, ""))
            for statement in module.definitions[definition[1]]:
                for target, name in self._names_in(module, statement):
                    found = self.find(target, name)
                    if not found and target.split(".")[0] != "shardkit":
                        reached.packages.add(target.split(".")[0])
                    waiting += found
        return reached

    def find(self, module: str, name: str | None) -> list[Definition]:
        """The definitions that a name of a module stands for; none for another package's."""
        if module not in self.modules:
            return []
        if name is None:
            return [(module, "")]
        found = self.modules[module]
        if name in found.definitions:
            return [(module, name)]
        if name in found.imports:
            return self.find(*found.imports[name])
        if f"{module}.{name}" in self.modules:
            return [(f"{module}.{name}", "")]
        if "__getattr__" in found.definitions:
            return [(module, "__getattr__")]
        if name == "*":
            return self.all_of(module)
        raise LookupError(f"{module}: nothing is called {name}")

    def all_of(self, package: str) -> list[Definition]:
        """Every definition of a package's modules."""
        inside = [m for m in self.modules if m == package or m.startswith(f"{package}.")]
        return [(module, name) for module in inside for name in self.modules[module].definitions]

    def _names_in(self, module: _Module, statement: ast.stmt) -> Iterator[tuple[str, str | None]]:
        """(module, name) of all that a statement mentions."""
        inner = _imports(statement)
        imports = {**module.imports, **inner}
        yield from inner.values()
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                imported = self._imported_module(imports.get(node.value.id))
                if imported is not None:
                    yield imported, node.attr
            elif isinstance(node, ast.Name):
                if node.id in imports:
                    yield imports[node.id]
                elif node.id in module.definitions:
                    yield module.name, node.id
            elif isinstance(node, ast.JoinedStr) and isinstance(start := node.values[0], ast.Constant):
                package = str(start.value).rpartition(".")[0]
                if package.startswith("shardkit.") and package in self.modules:
                    yield from self.all_of(package)

    def _imported_module(self, imported: tuple[str, str | None] | None) -> str | None:
        """The module of shardkit that an import binds; None if it binds anything else."""
        if imported is None:
            return None
        name = imported[0] if imported[1] is None else f"{imported[0]}.{imported[1]}"
        return name if name in self.modules else None
