"""Argument parsing that names the near matches of what it does not know."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from ..common.suggestions import did_you_mean


class UsageError(SystemExit):
    """The arguments are wrong, which was said on standard error; it ends the process with exit code 2.

    Attributes:
        said: what is wrong, without the usage.
    """

    def __init__(self, said: str) -> None:
        super().__init__(2)
        self.said = said


class Parser(argparse.ArgumentParser):
    """``argparse``'s, whose errors end with what may have been meant; its subcommands are of the same class."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As ``argparse``'s, but nothing is unknown: also what a subcommand does not know is its error."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [name.split("=")[0] for name in unknown if name.startswith("-")]
            hints = (did_you_mean(name, self._option_string_actions) for name in options)
            self.error(f"unrecognized arguments: {' '.join(unknown)}.{''.join(hints)}")
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
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += f".{did_you_mean(str(value), map(str, action.choices or ()))}"
            raise
