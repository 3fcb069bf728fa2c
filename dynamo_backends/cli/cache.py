"""``dynamo-backends cache``: where compiled graphs are kept, how many there are, and how large; and their removal."""

from __future__ import annotations

import argparse
import sys

from .common import add_json_argument, print_json

DESCRIPTION = (
    "Shows the cache of compiled graphs. The folder is that of the environment variables "
    "DYNAMO_BACKENDS_CACHE_DIR and XDG_CACHE_HOME, as in torch.compile."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    parser.add_argument("--clear", action="store_true", help="remove all compiled graphs")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Shows the cache, and clears it if asked to; returns the exit code."""
    from ..cache.graphs import store_of
    from ..options import parse_options

    options = parse_options()
    store = store_of(options)
    usage = store.clear() if arguments.clear else store.usage()
    left = store.usage()
    against = store.reason_against()
    if arguments.clear and left.entries:
        raise OSError(f"{left.entries} entries of {store.folder} could not be removed")
    if arguments.json:
        print_json(
            {
                "folder": str(store.folder),
                "entries": usage.entries,
                "bytes": usage.bytes,
                "most_bytes": store.size,
                "is_on": options.cache,
                "not_used": against,
                "cleared": arguments.clear,
            }
        )
    elif arguments.clear:
        sys.stdout.write(f"removed {_entries(usage.entries)}, {_size(usage.bytes)}, from {store.folder}\n")
    else:
        sys.stdout.write(
            f"folder   {store.folder}\nentries  {usage.entries}\nsize     {_size(usage.bytes)} of at most "
            f"{_size(store.size)}\n{'' if options.cache else 'it is off (DYNAMO_BACKENDS_CACHE)' + chr(10)}"
            f"{'' if against is None else f'it is not used: {against}' + chr(10)}"
        )
    return 0


def _entries(number: int) -> str:
    return f"{number} entry" if number == 1 else f"{number} entries"


def _size(number: int) -> str:
    return f"{number / 2**20:.1f} MiB"
