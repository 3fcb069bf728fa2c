"""Virtual environments, kept between runs, for tests with other packages than those of ``constraints.txt``."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Environment:
    """A virtual environment in ``~/.cache/dynamo-backends``, or in ``$XDG_CACHE_HOME`` if that is set.

    Attributes:
        name: of its folder, with which the version of Python follows.
        interpreter: the Python that it is made with.
    """

    name: str
    interpreter: str

    @property
    def folder(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "dynamo-backends" / f"{self.name}-python-{_version_of(self.interpreter)}"

    @property
    def python(self) -> str:
        return str(self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))

    def command(self, *arguments: str) -> list[str]:
        """A command of the environment's Python."""
        return [self.python, *arguments]

    @property
    def settings(self) -> dict[str, Any]:
        """How its commands are run: in the checkout, and without a PYTHONPATH, which would put another checkout, or
        another environment's packages, before those installed here."""
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        return {"cwd": ROOT, "env": variables}

    def settings_with(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """``settings`` with further environment variables."""
        return {**self.settings, "env": {**self.settings["env"], **variables}}

    def make(self) -> None:
        """Makes it, unless it is there."""
        if not Path(self.python).exists():
            subprocess.run([self.interpreter, "-m", "venv", str(self.folder)], check=True)

    def install(self, packages: Sequence[str], *, not_from_constraints: str = "") -> int:
        """Installs packages, with all others from ``constraints.txt``; quick where all is there.

        Args:
            packages: what pip takes.
            not_from_constraints: a package whose line there does not count.

        Returns:
            pip's exit code.
        """
        self.make()
        constraints = self.folder / "constraints.txt"
        constraints.write_text(constraints_without(not_from_constraints), encoding="utf-8")
        return self.pip("install", "-c", str(constraints), *packages)

    def pip(self, *arguments: str) -> int:
        """Runs pip, and returns its exit code."""
        return subprocess.run(self.command("-m", "pip", "--quiet", *arguments), **self.settings).returncode


def constraints_without(package: str) -> str:
    """The text of ``constraints.txt`` without a package."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not package or not re.match(rf"{re.escape(package)}\W", line))


def _version_of(interpreter: str) -> str:
    asked = [interpreter, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
