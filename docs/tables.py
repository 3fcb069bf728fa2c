"""The tables of the documentation that are made from the code and from stored measurements, so that they stay true.

``python docs/tables.py`` prints them; ``conf.py`` puts them into the pages.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for ``benchmarks``, which is not installed

import torch  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from benchmarks import report  # noqa: E402
from dynamo_backends import events  # noqa: E402
from dynamo_backends.cli import COMMANDS, build_parser  # noqa: E402
from dynamo_backends.options import GROUPS, Options  # noqa: E402


def reset_compiler(settings: object, source: object) -> None:
    """Lets each tutorial begin as a new process would: nothing compiled, nothing counted. For sphinx-gallery."""
    for name in ("dynamo_backends", "passes", "onnxscript"):
        logging.getLogger(name).setLevel(logging.WARNING)  # Sphinx asks all loggers for everything
    torch._dynamo.reset()
    counters.clear()


def options_table(names: Collection[str]) -> str:
    """Some options of the backends: name, default, what it does; Markdown."""
    defaults = dataclasses.asdict(Options())  # ``passes`` as its user writes it
    fields = [item for item in dataclasses.fields(Options) if item.name in names]
    rows = [(f"`{item.name}`", f"`{defaults[item.name]!r}`", item.metadata["help"]) for item in fields]
    return _table(("option", "default", "what it does"), rows)


def all_options() -> str:
    """A table of options for each group, with its title; Markdown."""
    fields = dataclasses.fields(Options)
    names = {group: {item.name for item in fields if item.metadata["group"] == group} for group in GROUPS}
    return "\n".join(f"**{title}**\n\n{options_table(names[group])}" for group, title in GROUPS.items())


def passes_table() -> str:
    """Every pass in the order it runs: what it does, and what it did to the measured models; Markdown."""
    return report.passes_table(report.load_results())


def kept_passes_table() -> str:
    """The passes that are kept although the measurement shows no gain, and the reasons; Markdown."""
    return report.kept_table()


def counters_table() -> str:
    """Every event that is counted; Markdown."""
    return _table(("counter", "what is counted"), [(f"`{name}`", what) for name, what in events.EVENTS.items()])


def commands_reference() -> str:
    """Every subcommand with its usage and its arguments, from its parser; Markdown."""
    parts = []
    for name, parser in _parsers(build_parser()):
        rows = [(_syntax(action), _help(action)) for action in parser._actions if action.dest not in ("help", "action")]
        parts.append(
            f"({name.replace(' ', '-')})=\n## `{name}`\n\n{parser.description}\n\n"
            f"```text\n{_usage(parser)}\n```\n\n{_table(('argument', 'what it does'), rows) if rows else ''}"
        )
    return "\n".join(parts)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parsers of the subcommands, and in the place of one that has subcommands these, each with its name."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser.prog.partition(" ")[2], parser
    for action in below:
        for name in COMMANDS if action.dest == "command" else action.choices:
            yield from _parsers(action.choices[name])


def _usage(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=110)
    return parser.format_usage().removeprefix("usage: ").strip()


def _syntax(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    if not action.option_strings:
        return f"`{value}`"
    return ", ".join(f"`{option}{f' {value}' if action.nargs != 0 else ''}`" for option in action.option_strings)


def _help(action: argparse.Action) -> str:
    return (action.help or "") % {"default": action.default, "prog": "dynamo-backends", "dest": action.dest}


def measured_tables() -> dict[str, str]:
    """What was measured of the passes on models, by the name of the file it goes to; Markdown."""
    results = report.load_results()
    return {
        "measured_on": report.run_sentence(results),
        "measured_models": report.models_table(results),
        "measured_details": report.details_table(results),
        "measured_compiling": report.compile_table(results),
        "measured_training": report.training_table(results),
    }


def _table(headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [headers, tuple("---" for _ in headers), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    print(
        passes_table(),
        kept_passes_table(),
        counters_table(),
        commands_reference(),
        *measured_tables().values(),
        sep="\n",
    )
