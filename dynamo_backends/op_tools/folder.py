"""The folder of a capture: ``<root>/<rank>/<time>/<operator>/<number>/``, written by the rules of a dump."""

from __future__ import annotations

import hashlib
import itertools
import re
import time
from pathlib import Path

from ..debug.dump_folder import DumpFolder, rank


class CaptureFolder(DumpFolder):
    """The folder of one capture of this process; each file is whole or not there, and an error of the file system
    never ends the model, see ``DumpFolder``."""

    def _make_run_folder(self) -> Path:
        parent = self.root / (rank() or "0")
        parent.mkdir(parents=True, exist_ok=True)
        name = time.strftime("%Y-%m-%d--%H-%M-%S")
        for number in itertools.count(1):
            location = parent / (name if number == 1 else f"{name}_{number}")
            try:
                location.mkdir()
            except FileExistsError:
                continue
            return location
        raise AssertionError


def operator_folder(name: str) -> str:
    """An operator's name as that of a folder: names of users' operators may hold anything. Two names have two."""
    folder = re.sub(r"[^\w.]", "_", name).strip(".")[:150]
    return folder if folder == name else f"{folder}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
