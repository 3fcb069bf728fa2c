"""An ``ArgumentParser`` whose errors suggest near matches of unknown options and values."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from ..common.suggestions import did_you_mean


class ArgumentsError(SystemExit):
    """The arguments are invalid; the parser has printed the message. It ends the process with exit code 2.

    Attributes:
        message: the error, without the usage.
    """

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


class Parser(argparse.ArgumentParser):
    """Raises ``ArgumentsError`` with suggestions. Its subparsers have the same class."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses all arguments; an unknown one is an error, so that a subparser reports its own."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [name.split("=")[0] for name in unknown if name.startswith("-")]
            hints = (did_you_mean(name, self._option_string_actions) for name in options)
            self.error(f"unrecognized arguments: {' '.join(unknown)}.{''.join(hints)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        try:
            super().error(message)
        except SystemExit:
            raise ArgumentsError(message) from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += f".{did_you_mean(str(value), map(str, action.choices or ()))}"
            raise
