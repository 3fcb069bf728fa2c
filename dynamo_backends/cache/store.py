"""A folder of files by key, of limited size. Writes are atomic, and damaged files are not read.

A file is a line that identifies the format, the SHA-256 of the rest, and the rest: the length of the header, the header
in JSON, and bytes. The header contains the key, so that a file under another key's name is detected. Many processes may
use a folder at once: files are put in place by a rename, and one that another process removed is a miss. A process may
lock a key while it makes the record, so that the others wait for it. The system releases the lock when a process ends;
as long as the process makes progress, it touches the lock's file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..common.safety_net import caught
from ..events import count
from . import folder_trust

if TYPE_CHECKING:
    from filelock import FileLock

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAGIC = b"dynamo-backends cache 1\n"
_SUFFIX = ".cached"
_UNFINISHED = ".unfinished"
_LOCK = ".lock"
_ABANDONED_SECONDS = 3600.0
"""Age at which the process that wrote an unfinished file, or created a lock, is assumed dead."""

_BEAT_SECONDS = 1.0
"""A process that holds a lock touches its file in this interval, to show that it makes progress."""

_STALLED_SECONDS = 10.0
"""Age of the last touch from which others do not wait. It is the same moment for all locks of a suspended process: it
costs another process this time once, and not once a graph."""

_NO_BEAT = "Processes that need the same graph wait less, and compile it too"

_SILENT_SECONDS = 5.0
"""How long a process waits for another's lock before it logs a warning."""


class DamagedError(Exception):
    """A file is not what was written under its key."""


@dataclasses.dataclass(frozen=True)
class StoredRecord:
    """The content of a file: anything that JSON can hold, and bytes that would be large in JSON."""

    header: Any
    blobs: Sequence[bytes] = ()


@dataclasses.dataclass(frozen=True)
class FolderSize:
    """The number of entries in a folder, and their bytes."""

    entries: int
    bytes: int


def folder_named(name: str | None) -> Path:
    """The folder ``name``; without one, ``$XDG_CACHE_HOME/dynamo_backends`` or ``~/.cache/dynamo_backends``.

    Raises:
        OSError: it is in a home that is not known, as for a user without a name in a container.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    path = os.path.expanduser(name or os.path.join(base, "dynamo_backends"))
    if path.startswith("~"):
        raise OSError(f"the home in {path} is not known; name a folder by the option cache_dir")
    return Path(path)


@functools.cache
def warn_once(reason: str) -> None:
    """Warns that nothing is cached, once for each reason."""
    logger.warning("compiled graphs are not cached: %s", reason)


@functools.cache
def _warn_of_wait(folder: Path, seconds: float) -> None:
    """Warns of a lock that another process holds, once for each folder."""
    logger.warning(
        "waiting up to %.0f s for another process to compile the same graph: its lock is in %s", seconds, folder
    )


class Store:
    """A folder of at most ``size`` bytes, created at the first ``put``; the least recently used entries are evicted.

    A folder that others may write into is not used.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size

    def get(self, key: str) -> StoredRecord | None:
        """The record under a key, or ``None``. A damaged file is removed."""
        path = self._path(key)
        if self.reason_against() is not None:
            return None
        try:
            with path.open("rb") as file:
                is_trusted = folder_trust.is_trusted(os.fstat(file.fileno()))
                content = file.read() if is_trusted else b""
        except OSError:  # it does not exist, or cannot be read
            return None
        if not is_trusted:
            others = f"others may write to entries in {self.folder}, or own them"
            warn_once(f"{others}; dynamo-backends cache --clear removes them")
            return None
        try:
            record = decoded(content, key)
        except DamagedError as error:
            count("cache_entries_removed")
            logger.warning("a damaged entry of the cache is removed: %s: %s", path, error)
            self.remove(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return record

    def read(self, key: str, decode: Callable[[StoredRecord], T]) -> T | None:
        """The result of ``decode`` for the record under a key; ``None`` if there is none, or it is not valid, and
        removed."""
        record = self.get(key)
        try:
            return None if record is None else decode(record)
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:  # the last are PyTorch's
            count("cache_entries_removed")
            logger.warning("an entry of the cache that is not valid is removed: %s: %r", key, error)
            self.remove(key)
            return None

    def put(self, key: str, record: StoredRecord) -> bool:
        """Stores or replaces a record, and may evict others; whether it succeeded."""
        content = encoded(key, record)
        if len(content) > self.size or self.reason_against() is not None:
            return False
        try:
            _make_private(self.folder)
            descriptor, unfinished = tempfile.mkstemp(_UNFINISHED, dir=self.folder)
            try:
                with open(descriptor, "wb") as file:
                    file.write(content)
                os.replace(unfinished, self._path(key))
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished)
                raise
        except OSError as error:
            self._warn_not_written(error)
            return False
        self._evict(self._path(key))
        return True

    @contextlib.contextmanager
    def locked(self, key: str, seconds: float) -> Iterator[None]:
        """Holds the lock of a key, as one process at a time does.

        The block runs without it if it is not free within ``seconds``, if the process that holds it shows no progress,
        as one that is suspended, or if the file system has no locks.
        """
        from filelock import FileLock, Timeout  # imported lazily: what is in the cache needs no lock

        path = self.folder / f"{key}{_LOCK}"
        lock = FileLock(path, mode=0o600)
        try:
            _make_private(self.folder)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if not _is_progressing(path):
                    raise
                count("cache_waits")
                self._wait(lock, path, seconds)
        except (Timeout, NotImplementedError) as error:
            count("cache_locks_ignored")
            logger.warning("compiling without the cache's lock, perhaps at the same time as another process: %s", error)
        except OSError as error:
            self._warn_not_written(error)
        try:
            with _showing_progress(path) if lock.is_locked else contextlib.nullcontext():
                yield
        finally:
            if lock.is_locked:
                with contextlib.suppress(OSError):
                    path.unlink()
                lock.release()

    def _wait(self, lock: FileLock, path: Path, seconds: float) -> None:
        """Acquires a lock that another process holds.

        Raises:
            Timeout: it is not free within ``seconds``, or its holder shows no progress.
        """
        from filelock import Timeout

        started = time.monotonic()
        while not lock.is_locked:
            waited = time.monotonic() - started
            if waited >= _SILENT_SECONDS:
                _warn_of_wait(self.folder, seconds)
            if waited >= seconds or not _is_progressing(path):
                raise Timeout(lock.lock_file)
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=min(_BEAT_SECONDS, seconds - waited))

    def reason_against(self) -> str | None:
        """Why the folder is not used, with a warning, see ``folder_trust``; ``None`` if it is."""
        reason = folder_trust.reason_against(self.folder)
        if reason is not None:
            warn_once(reason)
        return reason

    def remove(self, key: str) -> None:
        """Removes an entry, if it exists."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def clear(self) -> FolderSize:
        """Removes all entries, unfinished files and locks; returns the usage before."""
        usage = self.usage()
        for path, _ in self._files():
            with contextlib.suppress(OSError):
                path.unlink()
        return usage

    def usage(self) -> FolderSize:
        sizes = [status.st_size for path, status in self._files() if path.suffix == _SUFFIX]
        return FolderSize(len(sizes), sum(sizes))

    def _warn_not_written(self, error: OSError) -> None:
        warn_once(f"{self.folder} cannot be written: {error.strerror or error}")

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        try:
            paths = list(self.folder.iterdir())
        except OSError:
            return
        for path in paths:
            if path.suffix in (_SUFFIX, _UNFINISHED, _LOCK):
                with contextlib.suppress(OSError):  # another process removed it
                    yield path, path.stat()

    def _evict(self, newest: Path) -> None:
        """Removes the least recently used entries above the limit, but not the newest, and abandoned files."""
        files = sorted(self._files(), key=lambda item: item[1].st_mtime, reverse=True)
        total = next((status.st_size for path, status in files if path == newest), 0)
        for path, status in files:
            if path == newest:
                continue
            total += status.st_size
            is_abandoned = path.suffix != _SUFFIX and status.st_mtime < time.time() - _ABANDONED_SECONDS
            if is_abandoned or (path.suffix == _SUFFIX and total > self.size):
                with contextlib.suppress(OSError):
                    path.unlink()
                    total -= status.st_size


def _is_progressing(path: Path) -> bool:
    """Whether the holder of a lock touched its file lately; also if it just released the lock."""
    try:
        return time.time() - path.stat().st_atime < _STALLED_SECONDS  # some filelocks write when they try
    except OSError:
        return True


@contextlib.contextmanager
def _showing_progress(path: Path) -> Iterator[None]:
    """Touches the file of a lock that this process holds, from now until the end of the block."""
    ended = threading.Event()

    def touch() -> None:
        with contextlib.suppress(OSError):
            os.utime(path)

    def keep_touching() -> None:
        try:
            while not ended.wait(_BEAT_SECONDS):
                touch()
        except Exception as error:  # what a thread raises reaches nobody
            caught("showing that a graph is being compiled", error, _NO_BEAT)

    touch()  # it may be left from a process that ended
    try:
        threading.Thread(target=keep_touching, name="dynamo_backends_cache_lock", daemon=True).start()
    except RuntimeError as error:  # too many threads
        logger.info("%s: %s", _NO_BEAT, error)
    try:
        yield
    finally:
        ended.set()


def _make_private(folder: Path) -> None:
    """Creates a folder and its parents for this user alone, whatever the umask is."""
    if not folder.is_dir():
        _make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def encoded(key: str, record: StoredRecord) -> bytes:
    """The content of a file, which ``decoded`` reads."""
    lengths = [len(blob) for blob in record.blobs]
    header = json.dumps({"key": key, "lengths": lengths, "header": record.header}, allow_nan=False).encode()
    body = b"".join([len(header).to_bytes(8, "little"), header, *record.blobs])
    return _MAGIC + hashlib.sha256(body).digest() + body


def encoded_in(content: bytes) -> Iterator[bytes]:
    """What ``encoded`` returned that is contained in a file of another format, such as a pickle.

    Raises:
        DamagedError: one has no header.
    """
    for found in re.finditer(re.escape(_MAGIC), content):
        start = found.end() + hashlib.sha256().digest_size + 8
        end = start + int.from_bytes(content[start - 8 : start], "little")
        try:
            yield content[found.start() : end + sum(json.loads(content[start:end])["lengths"])]
        except (ValueError, TypeError, LookupError) as error:
            raise DamagedError("it has no header") from error


def decoded(content: bytes, key: str) -> StoredRecord:
    """The record in the content of a file.

    Raises:
        DamagedError: it is not what was written under the key.
    """
    start = len(_MAGIC) + hashlib.sha256().digest_size
    if not content.startswith(_MAGIC) or len(content) < start + 8:
        raise DamagedError("it is not an entry of this version")
    body = memoryview(content)[start:]
    if hashlib.sha256(body).digest() != content[len(_MAGIC) : start]:
        raise DamagedError("its checksum is wrong")
    end = 8 + int.from_bytes(body[:8], "little")
    try:
        header = json.loads(bytes(body[8:end]))
        owner, lengths, content_header = header["key"], header["lengths"], header["header"]
    except (ValueError, TypeError, KeyError) as error:  # not written by us
        raise DamagedError("it has no header") from error
    if owner != key:
        raise DamagedError("it belongs to another key")
    blobs = []
    for length in lengths:
        blobs.append(bytes(body[end : end + length]))
        end += length
    return StoredRecord(content_header, blobs)
