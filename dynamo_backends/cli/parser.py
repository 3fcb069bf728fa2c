"""Argument parsing that names the near matches of what it does not know."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class UsageError(SystemExit):
    """The arguments are wrong, which was said on standard error; it ends the process with exit code 2.

    Attributes:
        said: what is wrong, without the usage.
    """

    def __init__(self, said: str) -> None:
        super().__init__(2)
        self.said = said


class Parser(argparse.ArgumentParser):
    """``argparse``'s, whose errors end with what may have been meant; its subcommands are of the same class.

    ::

        $ dynamo-backends passes --wyh onnx.attention
        dynamo-backends passes: error: unrecognized arguments: --wyh. Did you mean '--why'?
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As ``argparse``'s, but nothing is unknown: also what a subcommand does not know is its error."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = self._option_string_actions
            hints = [hint for name in unknown if name.startswith("-") and (hint := _hint(name.split("=")[0], options))]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(hints)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Says what is wrong, and how the command is used.

        Raises:
            UsageError: always.
        """
        try:
            super().error(message)
        except SystemExit:
            raise UsageError(message) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            valid = ", ".join(map(repr, choices))
            said = f"invalid choice: {value!r} (choose from {valid}){_hint(str(value), choices)}"
            raise argparse.ArgumentError(action, said)


def _hint(name: str, valid: Iterable[str]) -> str:
    near: Sequence[str] = difflib.get_close_matches(name, list(valid), n=3)
    return f". Did you mean {' or '.join(map(repr, near))}?" if near else ""
