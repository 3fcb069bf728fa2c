"""Whether the folder of the cache can be trusted: its entries decide what this process computes.

Only this user and root may be able to write into it, or to replace it:

- the folder belongs to one of the two, and nobody else may write into it;
- the same holds for its parent folders and the symbolic links to it. A parent may be writable for others if it has the
  sticky bit, as ``/tmp`` has, or for a group that is the user's own and has no other members;
- the same holds for each file in it.

Root does not trust another user's folder either, for instance on a volume of a container. Nothing is checked where
files have no such owners and permissions, as on Windows.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_ROOT = 0


def reason_against(folder: Path) -> str | None:
    """Why a folder must not be used, with the remedy; ``None`` if it may be, or does not exist."""
    if not hasattr(os, "geteuid"):
        return None
    path = os.path.join(os.getcwd(), folder)
    try:
        reasons = (_against(place, os.lstat(place), is_folder_itself=False) for place in _places(path))
        return next(filter(None, reasons), None) or _against(path, os.stat(path), is_folder_itself=True)
    except (OSError, RecursionError):  # it does not exist, or cannot be used anyway, as a link to itself
        return None


def _places(path: str) -> Iterator[str]:
    """The folders and symbolic links that a path leads through, and the path."""
    parent = os.path.dirname(path)
    if parent != path:
        yield from _places(parent)
    yield path
    if os.path.islink(path):
        yield from _places(os.path.join(parent, os.readlink(path)))


def is_trusted(status: os.stat_result) -> bool:
    """Whether only this user and root may write to a file; ``status`` is from ``os.fstat``."""
    if not hasattr(os, "geteuid"):
        return True
    return _is_ours(status) and not status.st_mode & _OTHERS_WRITE


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (_ROOT, os.geteuid())


def _against(path: str, status: os.stat_result, *, is_folder_itself: bool) -> str | None:
    elsewhere = "name another folder by the option cache_dir"
    if not _is_ours(status):
        return f"{path} belongs to user {status.st_uid}, but this process to {os.geteuid()}: chown it, or {elsewhere}"
    if stat.S_ISLNK(status.st_mode) or not status.st_mode & _OTHERS_WRITE:
        return None
    if not is_folder_itself and (status.st_mode & stat.S_ISVTX or _only_its_own_group_writes(status)):
        return None
    mode = stat.S_IMODE(status.st_mode)
    return f"others may write into {path} (mode {mode:o}): chmod go-w {path}, or {elsewhere}"


def _only_its_own_group_writes(status: os.stat_result) -> bool:
    """Whether only the owner and the owner's private group may write into a folder."""
    import grp  # not on Windows
    import pwd

    if status.st_mode & stat.S_IWOTH:
        return False
    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    is_private = owner.pw_gid == group.gr_gid and owner.pw_name == group.gr_name
    return is_private and set(group.gr_mem) <= {owner.pw_name}
