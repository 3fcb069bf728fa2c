"""The dump folder of ``onnx_debug`` and ``fx_debug``, with a run folder for each process, and the link ``latest``.

::

    folder = dump_folder("onnx_debug")
    folder.write_text("graph_000/dynamo.py", text)
    folder.location          # onnx_debug/run_20260131_120000_pid4711, onnx_debug/latest points to it

Files are written atomically. The first error of the file system, such as a full disk, disables the dump with one
warning, and the model runs on.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from xxhash import xxh3_128

from ..common.fork_safety import Lock, renew_in_children
from ..dumps.reading import LATEST
from ..graphs.artifacts import GraphName

logger = logging.getLogger(__name__)

_folders: dict[str, DumpFolder] = {}
_folders_lock = Lock()
_temporary_numbers = itertools.count()


def dump_folder(root: str | os.PathLike[str]) -> DumpFolder:
    """This process's run folder under ``root``, created with its first file."""
    path = os.path.abspath(root)
    with _folders_lock:
        if path not in _folders:
            _folders[path] = DumpFolder(path)
        return _folders[path]


def graph_folder(graph: GraphName) -> str:
    """A graph's folder in the run folder: ``graph_000``, or with a direction ``graph_000/forward``."""
    folder = f"graph_{graph.index:03d}"
    return f"{folder}/{graph.direction}" if graph.direction else folder


class DumpFolder:
    """A run folder, ``<root>/run_<date>_<time>_pid<N>[_rank<R>]``; a forked child gets a new one.

    Relative paths use ``/``. Thread-safe. No method raises ``OSError``: the first one is logged and clears
    ``is_enabled``; later writes do nothing and return ``False``.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self.is_enabled = True
        self.forked_from: str | None = None  # the name of the run folder of the parent process
        self._location: Path | None = None
        self.renew_in_child()
        renew_in_children(self)

    def renew_in_child(self) -> None:
        """See ``fork_safety.Renewable``."""
        self._lock = threading.RLock()
        if self._location is not None:
            self.forked_from = self._location.name
        self._location = None
        self._is_announced = False
        self._by_digest: dict[bytes, str] = {}  # the first file with a content
        self._digests: dict[str, bytes] = {}  # by file

    @property
    def location(self) -> Path | None:
        """The run folder, created if it does not exist; ``None`` if that fails."""
        with self._lock:
            if self._location is None and self.is_enabled:
                try:
                    self._location = self._make_run_folder()
                except OSError as error:
                    self._disable(error)
            return self._location

    def announce(self) -> None:
        """Logs once where the folder is, as a warning, because that is shown by default."""
        with self._lock:
            location = None if self._is_announced else self.location
            if location is not None:
                self._is_announced = True
                logger.warning("dumping graphs, models and comparisons to %s", location)

    def path(self, relative: str) -> Path:
        """The path of a file, which need not exist."""
        return (self.location or self.root).joinpath(*relative.split("/"))

    def write_text(self, relative: str, text: str) -> bool:
        """Writes a file in UTF-8 with Unix line ends; returns whether it was written."""
        return self.write_bytes(relative, text.encode("utf-8"))

    def write_bytes(self, relative: str, data: bytes | memoryview) -> bool:
        """Writes a file; returns whether it was written."""
        return self.write_with(relative, lambda path: path.write_bytes(data))

    def write_once(self, relative: str, *parts: bytes | memoryview) -> bool:
        """Writes a file, or a hard link to a file of the run with equal content; returns whether it was written."""
        content = xxh3_128()
        for part in parts:
            content.update(part)
        digest = content.digest()
        target = self.path(relative)
        with self._lock:
            if self._digests.get(relative) == digest and target.exists():
                return True
            first = self._by_digest.get(digest, relative)
            if self._digests.get(first) != digest:  # new content, or the first file was overwritten
                first = self._by_digest[digest] = relative
            self._digests[relative] = digest

        def write(path: Path) -> None:
            if first != relative:
                try:
                    os.link(self.path(first), path)
                    return
                except OSError as error:  # no hard links, too many of one file, or a user moved it
                    logger.debug("cannot link to %s, its content is copied: %s", first, error)
            with path.open("wb") as file:
                file.writelines(parts)

        return self.write_with(relative, write)

    def write_with(self, relative: str, write: Callable[[Path], object]) -> bool:
        """Lets ``write`` write a temporary file, then renames it; returns whether it was written.

        Exceptions of ``write`` other than ``OSError`` are raised, after the temporary file is removed.
        """
        if self.location is None or not self.is_enabled:
            return False
        target = self.path(relative)
        temporary = target.with_name(f".{target.name}.{next(_temporary_numbers)}.tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                write(temporary)
                os.replace(temporary, target)
            except BaseException:
                _remove(temporary)
                raise
        except OSError as error:
            self._disable(error)
            return False
        return True

    def remove(self, relative: str) -> None:
        """Removes a file if it exists."""
        if self._location is not None and self.is_enabled:
            _remove(self.path(relative))

    def _make_run_folder(self) -> Path:
        ranked = f"_rank{rank()}" if rank() else ""
        location = new_folder(self.root, f"run_{time.strftime('%Y%m%d_%H%M%S')}_pid{os.getpid()}{ranked}")
        self._point_latest_to(location.name)
        return location

    def _point_latest_to(self, name: str) -> None:
        """Makes ``latest`` a symbolic link, or a file with the folder's name if the file system has no links."""
        temporary = self.root / f".{LATEST}.{name}.tmp"
        try:
            try:
                temporary.symlink_to(name, target_is_directory=True)
            except OSError:
                temporary.write_text(name)
            os.replace(temporary, self.root / LATEST)
        except OSError as error:
            _remove(temporary)
            logger.info("%s: %r does not point to %s: %s", self.root, LATEST, name, error)

    def _disable(self, error: OSError) -> None:
        with self._lock:
            was_enabled, self.is_enabled = self.is_enabled, False
        if was_enabled:
            logger.warning(
                "cannot write the dump folder %s: %s. The dump stops, and the model runs on. Choose a writable folder "
                "with free space: options={'dump_dir': ...}",
                self._location or self.root,
                error,
            )


def new_folder(parent: Path, name: str) -> Path:
    """Creates the folder ``name``; ``name_2`` and so on if there is one, made by a container that shares ``parent``."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        location = parent / (name if number == 1 else f"{name}_{number}")
        with contextlib.suppress(FileExistsError):
            location.mkdir()
            return location
    raise AssertionError


def rank() -> str:
    """This process's rank in a distributed run, such as ``0``; otherwise ``""``."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return str(torch.distributed.get_rank())
    from_launcher = os.environ.get("RANK", "")
    return from_launcher if from_launcher.isdigit() else ""


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.info("cannot remove %s: %s", path, error)
