"""``dynamo-backends cache``: the folder, number of entries and size of the cache of compiled graphs."""

from __future__ import annotations

import argparse

from .common import add_json_argument, print_json

DETAILS = "The folder is set by DYNAMO_BACKENDS_CACHE_DIR, else XDG_CACHE_HOME."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clear", action="store_true", help="remove all compiled graphs")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    from ..cache.graphs import store_of
    from ..options import parse_options

    options = parse_options()
    store = store_of(options)
    usage = store.clear() if arguments.clear else store.usage()
    left = store.usage()
    not_used = store.reason_against()
    if arguments.clear and left.entries:
        raise OSError(f"{left.entries} entries of {store.folder} could not be removed")
    if arguments.json:
        print_json(
            {
                "folder": store.folder,
                "entries": usage.entries,
                "bytes": usage.bytes,
                "most_bytes": store.size,
                "is_on": options.cache,
                "not_used": not_used,
                "cleared": arguments.clear,
            }
        )
    elif arguments.clear:
        print(f"removed {usage.entries} entries, {_size(usage.bytes)}, from {store.folder}")
    else:
        print(f"folder   {store.folder}\nentries  {usage.entries}")
        print(f"size     {_size(usage.bytes)} of at most {_size(store.size)}")
        if not options.cache:
            print("disabled by DYNAMO_BACKENDS_CACHE")
        if not_used is not None:
            print(f"not used: {not_used}")
    return 0


def _size(number: int) -> str:
    return f"{number / 2**20:.1f} MiB"
