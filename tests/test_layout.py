"""The structure that keeps the package readable: layout, budgets, and who may import whom."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import shardkit

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    "shardkit": ROOT / "shardkit",
    "shardkit.writers": ROOT / "writers",
    "shardkit.loaders": ROOT / "loaders",
}
MODULE_LINES = 650  # a module is one concept; nine in ten stay below LONG_MODULE
LONG_MODULE = 450
FUNCTION_LINES = 60
INIT_ARGUMENTS = 10
# Editors and help() show only arguments that a signature lists, so the class that everyone types lists those
# that most people use. Others are in its groups (Layout, Order, Run) or a TypedDict.
WRITTEN_OUT = {SOURCES["shardkit.loaders"] / "loader.py": 20}


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted module name, file) of every module of the three folders."""
    for package, folder in SOURCES.items():
        for file in sorted(folder.rglob("*.py")):
            relative = file.relative_to(folder)
            if package == "shardkit" and relative.parts[0] in ("writers", "loaders"):
                continue  # the links
            parts = relative.with_suffix("").parts
            yield ".".join([package, *parts]).removesuffix(".__init__"), file


MODULES = list(modules())


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def test_pyproject_lists_every_package_of_the_tree() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {name for name, file in MODULES if file.name == "__init__.py"}
    assert sorted(listed) == sorted(found)


def test_folders_of_tests_have_the_names_of_packages_or_say_what_they_are_about() -> None:
    packages = {name.rpartition(".")[2] for name, file in MODULES if file.name == "__init__.py"}
    about = {
        *("api", "documentation", "mutation", "simulation", "spec"),  # not of one package
        "core",  # modules directly in shardkit/, and datasets/, as a package of Hugging Face is called, too
        "cluster",  # several machines, or namespaces of this one
        "builds",  # modules directly in writers/, and stages; kernels are tested with filters
        "frameworks",  # loaders inside PyTorch, Lightning and others
    }
    folders = {file.parent.relative_to(ROOT / "tests") for file in (ROOT / "tests").rglob("test_*.py")}
    assert {folder.name for folder in folders} - packages - about == {""}


@pytest.mark.parametrize("name", ["writers", "loaders"])
def test_links_show_type_checkers_what_pip_installs(name: str) -> None:
    link = ROOT / "shardkit" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"


def test_the_installed_version_is_the_one_in_pyproject() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == shardkit.__version__


def test_modules_and_functions_keep_their_budgets() -> None:
    for _, file in MODULES:
        text = file.read_text()
        assert text.count("\n") <= MODULE_LINES, f"{file}: over {MODULE_LINES} lines: split it by concept"
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                check_function(node, file)
    long = [str(file) for _, file in MODULES if file.read_text().count("\n") > LONG_MODULE]
    assert len(long) <= len(MODULES) // 10, (
        f"more than a tenth of the modules exceed {LONG_MODULE} lines: {long}"
    )


def check_function(node: ast.FunctionDef | ast.AsyncFunctionDef, file: Path) -> None:
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    assert lines <= FUNCTION_LINES, f"{file}:{node.lineno}: {node.name} has {lines} lines"
    if node.name == "__init__":
        arguments = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1
        most = WRITTEN_OUT.get(file, INIT_ARGUMENTS)
        assert arguments <= most, f"{file}:{node.lineno}: __init__ takes {arguments} arguments"


def test_every_module_says_what_it_guarantees() -> None:
    silent = [str(file) for _, file in MODULES if not ast.get_docstring(parsed(file))]
    assert not silent, f"without a docstring: {silent}"


@cache
def imported_names(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


# Layers point one way: the folders of the core <- writers, loaders <- tools <- cli.
BASE = {"base"}  # the modules directly in shardkit/
FORMATS = BASE | {"order", "storage", "formats"}
TOKENS = FORMATS | {"kernels", "tokens"}
CORE = TOKENS | {"cache", "datasets", "publish"}
ALLOWED = {
    "base": BASE,
    "order": BASE | {"order"},
    "storage": BASE | {"storage"},
    "formats": FORMATS,
    "kernels": BASE | {"kernels"},
    "tokens": TOKENS,
    "cache": FORMATS | {"cache"},
    "datasets": CORE - {"publish"},
    "publish": CORE,
    "writers": CORE | {"writers"},
    "loaders": CORE | {"loaders"},
    "tools": CORE | {"writers", "loaders", "tools"},
    "cli": CORE | {"writers", "loaders", "tools", "cli"},
}


def layer_of(module: str) -> str:
    """The layer that a module belongs to, by its name."""
    if module == "shardkit.__main__":
        return "cli"
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "base"


def test_layers_point_one_way() -> None:
    """Imports in functions and for type checkers, too."""
    for name, file in MODULES:
        if name == "shardkit":
            continue  # its public names, imported when they are used, are of every layer
        for imported in imported_names(file):
            if imported.split(".")[0] == "shardkit":
                assert layer_of(imported) in ALLOWED[layer_of(name)], f"{file} imports {imported}"


# Folders of writers/, the lowest first. Modules directly in writers/ are what users call: above all folders.
WRITERS = (
    *("kernels", "rows", "execution", "exchange", "filters", "dedup", "recipe"),
    *("inputs", "tokens", "stages", "report"),
)


def test_folders_of_writers_import_those_below_them() -> None:
    """Imports in functions and for type checkers, too."""
    for name, file in MODULES:
        if name.startswith("shardkit.writers.") and (folder := name.split(".")[2]) in WRITERS:
            below = {f"shardkit.writers.{one}" for one in WRITERS[: WRITERS.index(folder) + 1]}
            for imported in imported_names(file):
                if imported.startswith("shardkit.writers."):
                    assert ".".join(imported.split(".")[:3]) in below, f"{file} imports {imported}"


def test_every_folder_of_writers_has_its_place_in_the_list() -> None:
    folders = {name.split(".")[2] for name in PACKAGES if name.startswith("shardkit.writers.")}
    assert folders == set(WRITERS)


def test_readmes_of_packages_name_modules_that_exist() -> None:
    for folder in SOURCES.values():
        for readme in folder.rglob("README.md"):
            if folder.name == "shardkit" and readme.relative_to(folder).parts[0] in ("writers", "loaders"):
                continue  # the links
            known = {file.name for _, file in MODULES} | {file.name for file in ROOT.glob("examples/*.py")}
            tables = [line for line in readme.read_text().splitlines() if line.startswith("|")]
            named = {name for line in tables for name in re.findall(r"`(\w+\.py)`", line)}
            assert named <= known, f"{readme} names modules that are gone: {sorted(named - known)}"


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        (
            "shardkit.manifest, shardkit.hashing",
            [
                *("torch", "tokenizers", "gigatoken", "boto3", "pyarrow", "numba", "pydantic", "rich"),
                "lightning",
            ],
        ),
        (  # libraries that only some recipes need
            "shardkit.writers.pipeline",
            ["pandas", "torch", "faiss", "httptools", "boto3", "ray", "lxml", "datatrove", "asyncio"],
        ),
    ],
    ids=["shardkit", "build"],
)
def test_importing_imports_nothing_heavy(imported: str, absent: list[str]) -> None:
    code = f"import sys, {imported}; print([m for m in {absent} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def folder_of(module: str) -> str:
    """The package that a module stands in; a package's own `__init__` stands in it, too.

    Modules directly in writers/ and loaders/ tell how their folders work together, or are what all of these
    share: each counts as a folder of its own.
    """
    folder = module if module in PACKAGES else module.rpartition(".")[0]
    return module if folder in ("shardkit.writers", "shardkit.loaders") else folder


PACKAGES = {name for name, file in MODULES if file.name == "__init__.py"}
# The entry point stands above all, and these packages re-export what stands highest, when asked for it.
ABOVE_ALL = ("shardkit", "shardkit.__main__", "shardkit.writers", "shardkit.loaders")


def running_imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run, also late ones in functions, but not those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (found for child in node.orelse for found in running_imports(child))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        else:
            yield from running_imports(node)


def modules_of(imports: Iterable[ast.AST]) -> set[str]:
    """The modules that these imports name: of `from package import module`, the module."""
    known = {name for name, _ in MODULES}
    found: set[str] = set()
    for node in imports:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & known) or {node.module}
    return found


@cache
def imported_folders(file: Path) -> set[str]:
    """The folders of the modules that `file` imports."""
    return {folder_of(name) for name in modules_of(running_imports(parsed(file)))}


# A circle that is left: of filters with their batch of texts.
@pytest.mark.parametrize("layer", sorted(ALLOWED.keys() - {"writers"}))
def test_modules_of_a_layer_import_each_other_one_way(layer: str) -> None:
    """Imports in functions and for type checkers, too."""
    imports = {
        name: modules_of(ast.walk(parsed(file))) - {name, *ABOVE_ALL}
        for name, file in MODULES
        if name not in ABOVE_ALL and layer_of(name) == layer
    }
    for name in imports:
        above = reached(name, imports)
        assert name not in above, f"{name} imports, in the end, itself: by way of {sorted(above)}"


# Of datasets/, whose provenance/ stands between two of its modules, the test of modules above holds it.
@pytest.mark.parametrize("layer", sorted(ALLOWED.keys() - {"datasets"}))
def test_folders_of_a_layer_import_each_other_one_way(layer: str) -> None:
    imports: dict[str, set[str]] = {}
    for name, file in MODULES:
        if layer_of(name) == layer and name not in ABOVE_ALL:
            folder = folder_of(name)
            imports.setdefault(folder, set()).update(imported_folders(file) - {folder})
    for folder in imports:
        above = reached(folder, imports)
        assert folder not in above, f"{folder} imports, in the end, itself: by way of {sorted(above)}"


def reached(folder: str, imports: dict[str, set[str]]) -> set[str]:
    """What `folder` imports, what these import, and so on."""
    found: set[str] = set()
    waiting = [*imports[folder]]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imports.get(name, ())
    return found


def imported_modules(file: Path, modules: Collection[str]) -> set[str]:
    """Return those of `modules` that a module imports, for types too; a package counts for its own names."""
    found: set[str] = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in inside.values()}
    return found & {*modules}


def test_modules_import_each_other_one_way_for_types_too() -> None:
    files = dict(MODULES)
    imports = {name: imported_modules(file, files) for name, file in files.items()}
    for name in imports:
        assert name not in reached(name, imports), f"{name} imports, in the end, itself"


DOCUMENTED = {  # whole modules of docs/reference/python.md, which shows what they list
    "shardkit.datasets.provenance.documents",
    "shardkit.errors",
    "shardkit.loaders.balanced",
    "shardkit.loaders.pytorch",
}


def test_only_packages_and_modules_that_hand_on_names_or_are_documented_whole_list_their_names() -> None:
    for name, file in MODULES:
        body = parsed(file).body
        lists = [
            node.value for node in body if isinstance(node, ast.Assign) and names_of(node) == {"__all__"}
        ]
        if lists and file.name != "__init__.py" and name not in DOCUMENTED:
            kinds = ast.FunctionDef, ast.ClassDef
            own = {node.name for node in body if isinstance(node, kinds)}
            own |= {
                one for node in body if isinstance(node, ast.Assign | ast.AnnAssign) for one in names_of(node)
            }
            assert {*ast.literal_eval(lists[0])} - own, (
                f"{name}: `_name` says private; a module lists nothing"
            )


def names_of(node: ast.Assign | ast.AnnAssign) -> set[str]:
    """The names that an assignment binds."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}


RIDDLES = ("Those", "That", "Their", "Its", "Of", "As", "What", "Whose", "Where")


def test_docstrings_of_functions_begin_with_a_verb_or_name_the_thing() -> None:
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    for name, file in MODULES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                assert text.split()[0].rstrip(",:;") not in RIDDLES, f"{name}: {node.name}: {text[:60]}"
