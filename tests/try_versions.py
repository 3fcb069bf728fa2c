"""Tests the package with other versions of Python, PyTorch and its libraries; prints the table of docs/versions.md.

::

    python tests/try_versions.py                      # all that this machine has a Python for
    python tests/try_versions.py lowest python-3.12   # some of them; --list shows them

Each combination has its own virtual environment, which is kept (``environments.py``), and runs a part of the tests in
one process, some five minutes. Pythons are searched on the path and in pyenv's folder. ``lowest`` uses the lowest
version of each library that ``setup.cfg`` allows, as uv resolves it (``--resolution lowest-direct``).

Exit code 1: a test failed; 2: an interpreter is missing, or an installation failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parent))
from environments import Environment  # noqa: E402

TESTS = (
    "test_models",
    "test_onnx_debug",
    "test_freezing",
    "test_session",
    "test_converters",
    "test_torch_versions",
    "test_upstream",
    "test_cache",
)
"""What most depends on versions: whole models, the comparison node by node, memory, sessions, translations, the table
of known faults, files."""


@dataclasses.dataclass(frozen=True)
class Versions:
    """What is tried.

    Attributes:
        name: for the command.
        python: the version.
        torch: the version; empty: that of ``constraints.txt``.
        is_lowest: whether the other libraries are the lowest that ``setup.cfg`` allows, not those of
            ``constraints.txt``.
    """

    name: str
    python: str
    torch: str = ""
    is_lowest: bool = False

    def environment(self) -> Environment | None:
        """Its environment, with all installed; ``None`` if there is no such Python, or pip failed."""
        interpreter = _interpreter(self.python)
        if interpreter is None:
            print(f"{self.name}: there is no python{self.python}", file=sys.stderr)
            return None
        if self.is_lowest:
            return _lowest(Environment("lowest", interpreter))
        environment = Environment(f"torch-{self.torch}" if self.torch else "constraints", interpreter)
        torch = [f"torch=={self.torch}"] if self.torch else []
        failed = environment.install(["-e", ".[test]", *torch], not_from_constraints="torch" if torch else "")
        return None if failed else environment


TRIED = (
    Versions("lowest", "3.11", is_lowest=True),
    Versions("python-3.11", "3.11"),
    Versions("python-3.12", "3.12"),
    Versions("python-3.13", "3.13"),
    Versions("torch-2.14", "3.11", "2.14.1"),
    Versions("torch-2.15", "3.11", "2.15.0"),
)


def _interpreter(version: str) -> str | None:
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for found in (*pyenv.glob(f"{version}.*/bin/python"), shutil.which(f"python{version}")):
        if found is not None:
            return str(found)
    return None


def _lowest(environment: Environment) -> Environment | None:
    failed = environment.install(["uv"])
    command = ("-m", "uv", "pip", "install", "--quiet", "--resolution", "lowest-direct", "-e", ".[test]")
    settings = environment.settings_with({"VIRTUAL_ENV": str(environment.folder)})
    if "PIP_CERT" in os.environ:
        settings["env"].setdefault("SSL_CERT_FILE", os.environ["PIP_CERT"])
    failed = failed or subprocess.run(environment.command(*command), **settings).returncode
    return None if failed else environment


_LIBRARIES = ("torch", "onnxruntime", "onnx", "onnxscript", "onnx-ir", "numpy", "transformers")

_VERSIONS = f"""
import importlib.metadata, platform
print(platform.python_version(), *map(importlib.metadata.version, {_LIBRARIES}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="what is tried; by default all")
    parser.add_argument("--list", action="store_true", help="only prints what can be tried")
    given = parser.parse_args()
    known = {item.name: item for item in TRIED}
    if given.list or set(given.names) - set(known):
        print("\n".join(known))
        return 0 if given.list else 2
    rows: list[list[str]] = []
    code = 0
    for name in given.names or known:
        environment = known[name].environment()
        if environment is None:
            code = 2
            continue
        settings = environment.settings
        asked = environment.command("-c", _VERSIONS)
        versions = subprocess.run(asked, **settings, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        file = environment.folder / "outcome.xml"
        tests = [str(next(Path(__file__).parent.glob(f"*/{test}.py"))) for test in TESTS]
        command = environment.command("-m", "pytest", "--tb=short", "--numprocesses=0", f"--junitxml={file}", *tests)
        code = code or int(subprocess.run(command, **settings, stdout=sys.stderr).returncode != 0)
        suite = ElementTree.parse(file).getroot()[0].attrib
        bad, skipped = int(suite["failures"]) + int(suite["errors"]), int(suite["skipped"])
        rows.append([f"`{name}`", *versions, str(int(suite["tests"]) - bad - skipped), str(bad), str(skipped)])
    for row in (["", "Python", *_LIBRARIES, "passed", "failed", "skipped"], ["---"] * (5 + len(_LIBRARIES)), *rows):
        print(f"| {' | '.join(row)} |")
    return code


if __name__ == "__main__":
    sys.exit(main())
