"""Runs the code of a page as a reader would: each block alone, in an empty folder, as written.

::

    python tests/page_blocks.py README.md docs/passes.md
    python tests/page_blocks.py --write docs/command_line.md  # writes the output into the page

A block marked ``python`` becomes the file ``app.py``, run in its own process. A block marked ``text`` directly after
it, separated by an empty line only, must be its output. Lines that begin with ``$ dynamo-backends`` in a block marked
``console`` run in the same folder, one after the other, and must print what follows them. Numbers, times, widths of
tables and paths above the folder may differ; ``...`` on its own line stands for any lines. A block after the Markdown
comment ``% the order changes from run to run`` is run, but its output is not compared.

Blocks of output that follow no block of code are ignored. The processes are forked from one that has imported only
PyTorch.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$\n?", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^\$ (?=dynamo-backends )", re.MULTILINE)


@dataclasses.dataclass
class Example:
    """A block of Python with the output that the page shows of it, and the commands that follow.

    Attributes:
        line: where the block begins in the page.
        code: the block.
        output: what the page says it prints; None if the page does not show it.
        commands: what is run in the same folder afterwards, each with its output, or None where it is not compared.
    """

    line: int
    code: str
    output: str | None = None
    commands: list[tuple[str, str | None]] = dataclasses.field(default_factory=list)


def examples(text: str) -> Iterator[Example]:
    """The examples of a page in Markdown."""
    example, end = None, -1
    for block in _BLOCK.finditer(text):
        kind, content = block[1], block[2]
        is_next = not text[end : block.start()].strip()
        if kind == "python":
            if example:
                yield example
            example = Example(text.count("\n", 0, block.start()) + 2, content)
        elif example and kind == "text" and is_next and example.output is None and not example.commands:
            example.output = content
        elif kind == "console":
            example = example or Example(text.count("\n", 0, block.start()) + 2, "")
            for part in _COMMAND.split(content)[1:]:
                command, _, output = part.partition("\n")
                shown = None if text[: block.start()].endswith("% the order changes from run to run\n") else output
                example.commands.append((command, shown))
        end = block.end()
    if example:
        yield example


def difference(expected: str, printed: str) -> str | None:
    """How what was printed differs from what the page shows, or None."""
    given = [_normalized(line) for line in printed.splitlines()]
    given = [line for line in given if line]
    place = 0
    free = False
    for line in expected.splitlines():
        wanted = _normalized(line)
        if wanted == "...":
            free = True
        elif wanted:
            found = next((n for n in range(place, len(given)) if given[n] == wanted), None) if free else place
            if found is None or found >= len(given) or given[found] != wanted:
                return f"not printed: {line}\nprinted:\n{printed}"
            place, free = found + 1, False
    if place < len(given) and not free:
        return f"not on the page: {given[place]}\nprinted:\n{printed}"
    return None


def _normalized(line: str) -> str:
    line = re.sub(r"\d+-\d+-\d+--\d+-\d+-\d+|run_\d+_\d+_pid\d+", "run", line)
    line = re.sub(r"\S*/(?=app\.py|\w+/\w+\.py:)", "", line)  # where the folder and the packages are
    line = re.sub(r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?", "0", line)
    line = re.sub(r"-{2,}", "---", line)
    return " ".join(line.split())


def run(page: Path, write: bool = False) -> list[str]:
    """Runs the examples of a page: what is wrong with them. ``write`` puts what they print into the page."""
    found = []
    text = page.read_text(encoding="utf-8")
    for example in examples(text):
        folder = Path(
            tempfile.mkdtemp()
        )  # not a TemporaryDirectory, which each forked process would remove when it ends
        try:
            for shown, printed, complaint in _results(example, folder):
                if write and shown is not None and "..." not in shown.splitlines():
                    text = text.replace(shown, printed, 1)
                elif complaint:
                    found.append(f"{page}:{example.line}: {complaint}")
        finally:
            shutil.rmtree(folder)
    if write:
        page.write_text(text, encoding="utf-8")
    return found


def _results(example: Example, folder: Path) -> Iterator[tuple[str | None, str, str | None]]:
    """Of the block and of each command: what the page shows, what is printed, and what is wrong."""
    code, printed = _run(folder, _app, example.code)
    if code:
        yield None, printed, f"ends with {code}:\n{printed}"
        return
    if example.output is not None:
        fence, end = "```text\n", "```\n"  # with its end, an empty output is found in the page, too
        yield fence + example.output + end, fence + printed + end, difference(example.output, printed)
    for command, output in example.commands:
        code, printed = _run(folder, _command, command)
        first = f"$ {command}\n"
        if code not in (0, 1):
            yield None, printed, f"{command} ends with {code}:\n{printed}"
        elif output is not None:
            other = difference(output, printed)
            yield first + output, first + printed, other and f"{command}: {other}"


def _app(code: str) -> None:
    Path("app.py").write_text(code, encoding="utf-8")
    runpy.run_path("app.py", run_name="__main__")


def _command(line: str) -> int:
    from dynamo_backends.cli import main

    return main(shlex.split(line)[1:])


def _run(folder: Path, function: object, argument: str) -> tuple[int, str]:
    """Calls the function in a process of its own: its exit code, and what it printed; with its errors, if it failed."""
    output, errors = folder.parent / f"{folder.name}.out", folder.parent / f"{folder.name}.err"
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.chdir(folder)
            sys.path[0] = str(folder)
            for number, path in ((1, output), (2, errors)):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(descriptor, number)
            try:
                code = function(argument) or 0  # type: ignore[operator]
            except SystemExit as leaves:
                code = leaves.code if isinstance(leaves.code, int) else 1
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            _end()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    printed = output.read_text(encoding="utf-8")
    failed = errors.read_text(encoding="utf-8")
    output.unlink()
    errors.unlink()
    return code, printed + failed if code else printed


def _end() -> None:
    """Runs what a process does at exit and ``os._exit`` does not: the manifest's last write."""
    import atexit

    atexit._run_exitfuncs()
    sys.stdout.flush()


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--write", action="store_true", help="write the output into the pages")
    arguments = parser.parse_args(words)
    import torch
    import torch._dynamo  # noqa: F401  # what takes seconds, once

    torch.set_num_threads(1)  # a pool of threads would not be there after a fork
    found = [complaint for page in arguments.pages for complaint in run(page, arguments.write)]
    print("\n\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
