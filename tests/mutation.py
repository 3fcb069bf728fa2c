"""Mutation testing: plants small faults in one module, one at a time, and lists those that no test notices.

::

    pip install mutmut pytest-cov
    python tests/mutation.py dynamo_backends/graphs/aliases.py
    python tests/mutation.py dynamo_backends/graphs/aliases.py --sample 50 --seconds 60
    python tests/mutation.py dynamo_backends/graphs/aliases.py --only 77,81 --tests tests/graphs/test_aliases.py

The faults are those of mutmut (another operator, another number, ``None`` instead of a value, the other branch) and
four more: a removed statement, a removed keyword argument, a condition that always or never holds, a removed operand of
``and`` and ``or``. Messages and log lines are not changed. For each fault the tests that reach its line run, then those
that reach its file, until one fails or the time is over. Each fault runs in a process forked from one that has
imported PyTorch, so most take a second or two.

The first use runs the whole suite, which takes twice the usual time, to record which tests reach which lines, and keeps
that in ``.mutation``; ``--record`` records it again. Tests that start other processes (of the command line, of the
documentation) notice nothing, because the fault is not in these processes.

A fault that survives is a missing test, code without effect, or an equivalent program (the order of a set, a cache's
size): a reader decides.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import difflib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import coverage
import libcst as cst
import libcst.matchers as m
import pytest
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

ROOT = Path(__file__).resolve().parent.parent
REACHED = ROOT / ".mutation" / "coverage"
SECONDS = ROOT / ".mutation" / "seconds.json"
PACKAGES = ("dynamo_backends", "passes")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A module's text with one fault, and the line it is in."""

    line: int
    text: str


def mutants_of(source: str) -> list[Mutant]:
    """All faults of a module, in the order of its lines."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    finder = _Finder()
    wrapper.module.visit(finder)
    positions = wrapper.resolve(PositionProvider)
    begin_of_line = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    found: dict[str, Mutant] = {}
    for old, new in finder.found:
        place = positions[old]
        begin = begin_of_line[place.start.line - 1] + place.start.column
        end = begin_of_line[place.end.line - 1] + place.end.column
        text = source[:begin] + wrapper.module.code_for_node(new) + source[end:]
        with contextlib.suppress(SyntaxError):
            compile(text, "<fault>", "exec")
            found.setdefault("".join(text.split()), Mutant(place.start.line, text))
    found.pop("".join(source.split()), None)
    return sorted(found.values(), key=lambda mutant: mutant.line)


_LOG = m.Attribute(value=m.Name("logger"))
_UNTOUCHED = (
    m.Annotation()
    | m.Decorator()
    | m.Assert()
    | m.Raise()
    | m.FormattedString()
    | m.AnnAssign(annotation=m.Annotation(m.Name("TypeAlias")))
    | m.If(test=m.Name("TYPE_CHECKING"))
    | m.Call(func=_LOG | m.Name("isinstance") | m.Name("len"))
    | m.Arg(keyword=m.Name("strict"))
)
_LEFT_OUT = (mutators.operator_string, mutators.operator_arg_removal)  # a call with too few arguments fails at once
_STRICT = m.Call(args=[m.ZeroOrMore(), m.Arg(keyword=m.Name("strict"), value=m.Name("True"))])


_REMOVABLE = m.Expr(~(m.SimpleString() | m.Yield())) | m.Assign([m.AssignTarget(m.Attribute() | m.Subscript())])


class _Finder(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: list[tuple[cst.CSTNode, cst.CSTNode]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if m.matches(node, _UNTOUCHED):
            return False
        is_strict = m.matches(node, _STRICT)
        for kind, operator in (*mutators.mutation_operators, (cst.CSTNode, _more_faults)):
            if isinstance(node, kind) and operator not in _LEFT_OUT:
                self.found.extend((node, new) for new in operator(node) if m.matches(new, _STRICT) == is_strict)
        if isinstance(node, (cst.If, cst.While, cst.CompIf)):
            self.found.extend((node.test, cst.Name(value)) for value in ("True", "False"))
        return True


def _more_faults(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if isinstance(node, cst.BooleanOperation):
        yield from (node.left, node.right)
    elif isinstance(node, cst.Call):
        named = [arg for arg in node.args if arg.keyword is not None]
        yield from (node.with_changes(args=[arg for arg in node.args if arg is not less]) for less in named)
    elif m.matches(node, _REMOVABLE):
        yield cst.Pass()


class _Recorder:
    """How many seconds each test takes that passes."""

    def __init__(self) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()
        self._not_passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self._not_passed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):  # the process that xdist's others report to
            passed = {name: time for name, time in self.seconds.items() if name not in self._not_passed}
            SECONDS.write_text(json.dumps(passed))


def record(jobs: int) -> None:
    """Runs all tests and writes down which lines each reaches."""
    SECONDS.parent.mkdir(exist_ok=True)
    os.environ["COVERAGE_FILE"] = str(REACHED)
    measured = [f"--cov={package}" for package in PACKAGES]
    pytest.main(
        ["--all-cases", "-n", str(jobs), *measured, "--cov-context=test", "--cov-report="], plugins=[_Recorder()]
    )


class Tests:
    """The tests that may notice a fault in a file."""

    def __init__(self, file: Path) -> None:
        data = coverage.CoverageData(str(REACHED))
        data.read()
        self._seconds: dict[str, float] = json.loads(SECONDS.read_text())
        self._of_line = {
            line: {context.rpartition("|")[0] for context in contexts} & self._seconds.keys()
            for line, contexts in data.contexts_by_lineno(str(file)).items()
        }
        self._of_file = set().union(*self._of_line.values())
        self._file = file

    def of(self, line: int, seconds: float) -> tuple[list[str], float]:
        """The tests for a fault in a line, and how long they take: each file's quickest first, files in turn."""
        of_line = self._of_line.get(line, set())
        chosen: list[str] = []
        time_taken = 0.0
        for group in (of_line, self._of_file - of_line):
            ranks: collections.Counter[str] = collections.Counter()
            order = []
            for test in sorted(group, key=self._seconds.__getitem__):
                file = test.partition("::")[0]
                order.append((ranks[file], self._file.stem not in file, self._seconds[test], test))
                ranks[file] += 1
            for *_, test in sorted(order):
                if time_taken + self._seconds[test] <= seconds:
                    time_taken += self._seconds[test]
                    chosen.append(test)
        if not chosen:
            sys.exit(f"no test reaches {self._file} in this process within {seconds} seconds: name --tests")
        return chosen, time_taken


class _Fault(importlib.machinery.SourceFileLoader, importlib.abc.MetaPathFinder):
    """Imports a module from another text than its file's."""

    def __init__(self, module: str, file: Path, text: str) -> None:
        super().__init__(module, str(file))
        self._code = compile(text, str(file), "exec", dont_inherit=True)

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> types.CodeType:
        return self._code


def start(module: str, file: Path, text: str, tests: Sequence[str], seconds: float, modules: int | None = None) -> int:
    """Forks a process that runs tests with another text of a module; its exit code is pytest's.

    Args:
        module: the name of the module.
        file: its file.
        text: the text.
        tests: for pytest.
        seconds: they take; a process that takes far more is ended.
        modules: a file descriptor to which the names of all imported modules of others are written.
    """
    if pid := os.fork():
        return pid
    signal.setitimer(signal.ITIMER_PROF, 4 * seconds + 30)  # of computing: other programs may have the cores
    signal.alarm(int(20 * seconds) + 300)  # of waiting
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    code = 1
    try:
        sys.meta_path.insert(0, _Fault(module, file, text))
        code = _run(tests)
        if modules is not None:
            names = [name for name, item in sys.modules.items() if not _is_ours(item)]
            os.write(modules, json.dumps(names).encode())
    finally:
        os._exit(code)


def _run(tests: Sequence[str]) -> int:
    """Runs tests until one fails, file by file: if one of the first files fails, the others need not be imported."""
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    for some in by_file.values():
        code = int(pytest.main(["-x", "-q", "-o", "addopts=", "-p", "no:cacheprovider", *some]))
        if code:
            return code
    return 0


def _is_ours(module: object) -> bool:
    file = getattr(module, "__file__", None)
    return file is None or Path(file).is_relative_to(ROOT)


def import_what_tests_import(module: str, file: Path, source: str, tests: Sequence[str], seconds: float) -> None:
    """Runs tests without a fault, in a process of its own, and imports what they import but our own modules.

    Raises:
        SystemExit: a test fails.
    """
    reader, writer = os.pipe()
    pid = start(module, file, source, tests, seconds, writer)
    os.close(writer)
    with open(reader, "rb") as stream:
        names = stream.read()
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"without a fault these fail: {' '.join(tests)}")
    for name in json.loads(names):
        with contextlib.suppress(Exception):  # not all can be imported by their names; it only saves time
            importlib.import_module(name)


def main() -> None:
    arguments = _arguments()
    file = arguments.file and arguments.file.resolve()
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    if file is None:
        record(arguments.jobs)
        return
    if arguments.record or not (SECONDS.exists() or arguments.tests):
        # In another process: this one must not have imported our modules.
        subprocess.run([sys.executable, __file__, "--jobs", str(arguments.jobs)], check=True)
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    source = file.read_text(encoding="utf-8")
    given = arguments.tests, arguments.seconds
    tests_of = (lambda line, seconds: given) if arguments.tests else Tests(file).of
    mutants = mutants_of(source)
    total = len(mutants)
    if arguments.only:
        mutants = [mutant for mutant in mutants if mutant.line in arguments.only]
    if arguments.sample is not None and arguments.sample < len(mutants):
        mutants = random.Random(0).sample(mutants, arguments.sample)
    import_what_tests_import(module, file, source, *tests_of(0, arguments.seconds))
    survivors = []
    running: dict[int, Mutant] = {}

    def wait() -> None:
        pid, status = os.wait()
        mutant = running.pop(pid)
        if status == 0:
            survivors.append(mutant)
            _show(file, source, mutant)

    begin = time.perf_counter()
    for mutant in mutants:
        if len(running) >= arguments.jobs:
            wait()
        chosen, seconds = tests_of(mutant.line, arguments.seconds)
        running[start(module, file, mutant.text, chosen, seconds)] = mutant
    while running:
        wait()
    took = time.perf_counter() - begin
    print(f"{module}: {len(survivors)} of {len(mutants)} faults survived ({total} are possible; {took:.0f} s)")


def _show(file: Path, source: str, mutant: Mutant) -> None:
    lines = difflib.unified_diff(source.splitlines(), mutant.text.splitlines(), lineterm="", n=0)
    changes = [line for line in list(lines)[2:] if not line.startswith("@@")]
    print(f"survived: {file.relative_to(ROOT)}:{mutant.line}", *changes, sep="\n", flush=True)


def _arguments() -> argparse.Namespace:
    summary, _, details = str(__doc__).partition("\n")
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="where faults are planted (none: only --record)")
    parser.add_argument("--seconds", type=float, default=20.0, help="tests for each fault, in seconds (default: 20)")
    parser.add_argument("--sample", type=int, help="so many faults, drawn at random")
    parser.add_argument("--only", type=lambda text: set(map(int, text.split(","))), help="lines, by commas")
    parser.add_argument("--tests", nargs="+", default=[], help="run these and no others, as given to pytest")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (default: 2)")
    parser.add_argument("--record", action="store_true", help="learn anew which tests reach which lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
