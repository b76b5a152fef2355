"""Runs the tests of a module against its mutants: `score(target, sample)`.

pytest collects the tests once, in this process, which runs them all and notes for each test its time and the
lines of the module that it runs. Then a fork for each mutant puts the changed code into the functions that
exist already, and runs the tests that reach it up to the first failure: the one that noticed the last mutant
of the same function, then the fastest first. Forks inherit the compiled kernels of other modules and whatever
else libraries load late, so a mutant costs a few milliseconds beyond its tests. One process runs at a time,
and no file is changed.

Kernels of the module run as plain Python: mutants of theirs need no compiler. A changed constant is assigned
anew, with all constants behind it; what other modules have imported of them stays. A mutant is killed if a
test fails or takes several times as long as it should. Property tests take the same examples each time.
"""

from __future__ import annotations

import ast
import gc
import importlib
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import pytest

from mutation.mutants import Mutant, mutants

__all__ = ["ROOT", "Score", "Target", "score", "targets"]

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 4  # a mutant is killed when its tests take so many times what they take without it ...
GRACE_SECONDS = 0.5  # ... and this much more: forks copy the memory that they write
MEMORY_BYTES = 6 << 30  # an allocation that a mutant makes too large fails, as it would for a user


@dataclass(frozen=True)
class Target:
    """A module, the tests that must notice its mutants, and those that nothing can notice: {name: reason}."""

    path: str
    tests: Sequence[str]
    harmless: Mapping[str, str] = field(default_factory=dict)
    root: Path = ROOT

    @property
    def module(self) -> str:
        """Its dotted name; writers/ and loaders/ are imported as parts of shardkit."""
        name = self.path.removesuffix(".py").replace("/", ".")
        return f"shardkit.{name}" if self.path.startswith(("writers/", "loaders/")) else name


def targets() -> dict[str, Target]:
    """The modules that are held to a score, by path."""
    tables = tomllib.loads((Path(__file__).parent / "targets.toml").read_text())
    return {path: Target(path, table["tests"], table.get("harmless", {})) for path, table in tables.items()}


@dataclass
class Score:
    """What became of the mutants of a module; `killed` has the test that did it."""

    killed: dict[str, str] = field(default_factory=dict)
    survived: list[Mutant] = field(default_factory=list)
    harmless: list[Mutant] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    """Names of harmless mutants that the module does not have, or that a test kills."""

    @property
    def fraction(self) -> float:
        """Killed of those that are not harmless."""
        count = len(self.killed) + len(self.survived)
        return len(self.killed) / count if count else 1.0


def score(
    target: Target,
    *,
    only: str = "",
    sample: int | None = None,
    seed: int = 1,
    report: Callable[[str], None] = print,
) -> Score:
    """Run the tests of `target` against its mutants, or against a sample of those with `only` in their names.

    RuntimeError if the tests fail without a mutant. `report` is called with each survivor.
    """
    runs = _Runs(target, only, sample, seed, report)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        plugins = "-p no:cacheprovider -p no:xdist"
        options = [*f"-qq -s --no-header --disable-warnings {plugins} -m".split(), ""]
        options += [f"--basetemp={folder}/tests", f"--rootdir={target.root}"]
        if target.root == ROOT:
            options += ["-c", str(ROOT / "pyproject.toml")]
        runs.folder = Path(folder)
        before = Path.cwd()
        os.chdir(target.root)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.delenv("PYTEST_ADDOPTS", raising=False)  # for the run that this one may be part of
                status = pytest.main([*options, *target.tests], plugins=[runs])
        finally:
            os.chdir(before)
    if runs.error is not None or status != pytest.ExitCode.OK:
        raise RuntimeError(f"{target.path}: {runs.error or f'pytest ended with {status!r}'}")
    return runs.score


@dataclass(frozen=True)
class _Reach:
    """What a test needs and touches without any mutant."""

    seconds: float
    lines: frozenset[int]


class _Runs:
    """The plugin that takes pytest's loop over tests into forks."""

    def __init__(
        self, target: Target, only: str, sample: int | None, seed: int, report: Callable[[str], None]
    ) -> None:
        self.target, self.report = target, report
        self.folder = Path()
        self.score = Score()
        self.error: str | None = None
        self._only, self._sample, self._random = only, sample, random.Random(seed)
        self._module: ModuleType | None = None
        self._killers: dict[str, str] = {}  # of a function's last mutant that a test noticed

    def pytest_collection(self) -> None:
        """Import the module without compiling its kernels, before tests import names from it."""
        from hypothesis import HealthCheck, Phase, settings

        quick = (Phase.explicit, Phase.generate)
        settings.register_profile(
            "mutation",
            derandomize=True,
            database=None,
            deadline=None,
            phases=quick,
            suppress_health_check=list(HealthCheck),
        )
        settings.load_profile("mutation")
        self._module = _import_plain(self.target.module)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of running the tests once."""
        if session.testsfailed:
            self.error = "the tests cannot be collected"
            return True
        try:
            self._run(session)
        except RuntimeError as error:
            self.error = str(error)
        return True

    def _run(self, session: pytest.Session) -> None:
        assert self._module is not None
        assert self._module.__file__ is not None
        file = self._module.__file__
        gc.unfreeze()  # what the tests' conftest has frozen would not be among the objects
        every_function = [each for each in gc.get_objects() if type(each) is FunctionType]
        functions = [each for each in every_function if each.__code__.co_filename == file]
        with _silenced():
            found = _reaches(session, file, _caches(self._module.__name__))
        every = mutants(Path(file).read_text())
        names = {mutant.name for mutant in every}
        self.score.stale = [name for name in self.target.harmless if name not in names]
        chosen = [mutant for mutant in every if self._only in mutant.name]
        if self._sample is not None and self._sample < len(chosen):
            places = sorted(self._random.sample(range(len(chosen)), self._sample))
            chosen = [chosen[place] for place in places]
        gc.freeze()  # or a collection in a fork would copy all that is shared
        for mutant in chosen:
            self._judge(session, mutant, found, functions, file)

    def _judge(
        self,
        session: pytest.Session,
        mutant: Mutant,
        reaches: dict[str, _Reach],
        functions: Sequence[FunctionType],
        file: str,
    ) -> None:
        """Run the tests that reach a mutant and count it."""
        lines = set(range(mutant.line, mutant.end + 1))
        if mutant.statement is not None:
            items = [item for item in session.items if reaches[item.nodeid].lines]
        else:
            items = [item for item in session.items if lines & reaches[item.nodeid].lines]
        function = mutant.name.partition(":")[0]
        last = self._killers.get(function)
        items.sort(key=lambda item: (item.nodeid != last, reaches[item.nodeid].seconds))
        limits = [PATIENCE * reaches[item.nodeid].seconds + GRACE_SECONDS for item in items]

        def child() -> str | None:
            with mutant.applied() as tree:
                assert self._module is not None
                _install(tree, mutant.statement, functions, self._module, file)
            return _first_failure(session, items, limits)

        killer = self._forked(child, sum(limits)) if items else None
        shutil.rmtree(self.folder / "tests", ignore_errors=True)  # or looking for free names takes long
        (self.folder / "tests").mkdir()
        is_harmless = mutant.name in self.target.harmless
        if killer is not None:
            self.score.killed[mutant.name] = self._killers[function] = str(killer)
            if is_harmless:
                self.score.stale.append(mutant.name)
        elif is_harmless:
            self.score.harmless.append(mutant)
        else:
            self.score.survived.append(mutant)
            self.report(f"{self.target.path}:{mutant.line}: {mutant.name} [{len(items)} tests]")

    def _forked(self, work: Callable[[], object], cpu_seconds: float) -> object:
        """What `work` returns in a fork; a text that says how the fork ended if it did not return."""
        answer = self.folder / "answer"
        answer.unlink(missing_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            _in_child(work, answer)
        # On a busy machine a second of work takes many; only what sleeps reaches this limit.
        end = time.monotonic() + 10 + 10 * cpu_seconds
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > end:
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "takes too long"
            time.sleep(0.002)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # processes that its tests have left
        if not answer.exists():
            return "ended by a signal: took too long, or crashed"
        return pickle.loads(answer.read_bytes())


def _in_child(work: Callable[[], object], answer: Path) -> None:
    """Run `work`, write its result and end the process without what would run at exit."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with _silenced():
        try:
            result = work()
        except BaseException as error:  # whatever a mutant does, the parent must hear of it
            result = f"{type(error).__name__}: {error}"
        answer.write_bytes(pickle.dumps(result))
        os._exit(0)


@contextmanager
def _silenced() -> Iterator[None]:
    """Discard what is printed, by libraries too."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
        for number in (*kept, nowhere):
            os.close(number)


def _caches(module: str) -> list[_lru_cache_wrapper[Any]]:
    """What functions of the module remember, which a mutant must work out anew."""
    found = [each for each in gc.get_objects() if isinstance(each, _lru_cache_wrapper)]
    return [each for each in found if each.__module__ == module]


def _import_plain(name: str) -> ModuleType:
    """Import a module whose own kernels stay Python, while those of modules that it imports are compiled."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    if "numba_support" not in Path(module.__file__).read_text():
        return module  # and its classes remain those that modules before it have imported
    from numba.core import config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "DISABLE_JIT", 1)
        return importlib.reload(module)


def _reaches(session: pytest.Session, file: str, caches: list[_lru_cache_wrapper[Any]]) -> dict[str, _Reach]:
    """Each test's time and lines of `file`, with empty `caches`; RuntimeError if one fails."""
    reaches = {}
    lines: set[int] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != file:
            return None
        if event == "line":
            lines.add(frame.f_lineno)
        return trace

    for item in session.items:
        lines.clear()
        # Timed without the trace, which can make a test many times slower.
        for tracer in (trace, None):
            for cache in caches:
                cache.cache_clear()
            sys.settrace(tracer)
            threading.settrace(tracer)
            began = time.process_time()
            try:
                failed = _first_failure(session, [item])
            finally:
                sys.settrace(None)
            if failed is not None:
                raise RuntimeError(f"a test fails without any mutant: {failed}")
        reaches[item.nodeid] = _Reach(time.process_time() - began, frozenset(lines))
    for cache in caches:
        cache.cache_clear()
    return reaches


def _first_failure(
    session: pytest.Session, items: Sequence[pytest.Item], cpu_seconds: Sequence[float] = ()
) -> str | None:
    """Run tests in this order up to the first that fails; its name. A signal ends what takes too long."""
    for number, item in enumerate(items):
        if cpu_seconds:
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds[number])  # SIGPROF ends a process
        after = items[number + 1] if number + 1 < len(items) else None
        before = session.testsfailed
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        if session.testsfailed > before:
            return item.nodeid
    return None


def _install(
    tree: ast.Module, statement: int | None, functions: Sequence[FunctionType], module: ModuleType, file: str
) -> None:
    """Give functions of the module the code of a changed tree; run changed constants and what follows."""
    if statement is not None:
        constants = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.Expr
        body: list[ast.stmt] = [each for each in tree.body[statement:] if isinstance(each, constants)]
        exec(compile(ast.Module(body, []), file, "exec"), module.__dict__)
        return
    codes = {(code.co_qualname, code.co_firstlineno): code for code in _codes(compile(tree, file, "exec"))}
    for function in functions:
        function.__code__ = codes[function.__code__.co_qualname, function.__code__.co_firstlineno]


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
