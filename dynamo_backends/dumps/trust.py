"""What of a dumped session is used only if the user asks for it: a folder that somebody sent is no reason to run code.

Libraries of custom operators are loaded if the user names them (``runtime/custom_operators.py``). Options of execution
providers may name libraries and files, or be addresses: those that this package sets by itself are used, others if the
environment gives them, too. Entries of the session's configuration may name files to read and to write: those that this
package sets are used, and no others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..runtime.provider_options import is_own
from .reading import DumpError

VARIABLE = "DYNAMO_BACKENDS_PROVIDERS"
"""The variable of the environment that sets the option ``providers``."""

_CONFIG = frozenset(
    {"session.disable_quant_qdq", "session.intra_op.allow_spinning", "session.intra_op.spin_duration_us"}
)
"""The entries of the configuration that sessions of this package have, see ``SessionSettings.config``."""


def check_providers(providers: Sequence[str], options: Sequence[Mapping[str, str]]) -> None:
    """Checks the options of execution providers that a dump names.

    Args:
        providers: the names.
        options: for each of them; fewer are the first ones'.

    Raises:
        DumpError: one is neither ours nor given by the environment; the message says how to give it.
    """
    allowed = _of_environment()
    for name, given in zip(providers, options, strict=False):
        foreign = {
            option: value
            for option, value in given.items()
            if not is_own(name, option, value) and allowed.get(name, {}).get(option) != value
        }
        if foreign:
            pairs = [[name, dict(more)] if more else name for name, more in zip(providers, options, strict=False)]
            raise DumpError(
                f"the dump names options of {name}, which may load libraries or use files: {_written(foreign)}. They "
                f"are not taken from a dump; if you trust them: {VARIABLE}='{json.dumps(pairs)}'"
            )


def check_config(config: Mapping[str, str]) -> None:
    """Checks the entries of a session's configuration that a dump names.

    Raises:
        DumpError: one is not of those that this package sets.
    """
    foreign = {key: value for key, value in config.items() if key not in _CONFIG}
    if foreign:
        raise DumpError(
            f"the dump names entries of the session's configuration that are none of dynamo-backends, and may read or "
            f"write files: {_written(foreign)}. Take them out of its manifest.json"
        )


def _of_environment() -> dict[str, dict[str, str]]:
    """The options by provider that the user gives.

    Raises:
        DumpError: they cannot be read.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text.startswith("["):  # names alone
        return {}
    try:
        given: list[Any] = json.loads(text)
        pairs = [item for item in given if not isinstance(item, str)]
        return {str(name): {str(key): str(value) for key, value in options.items()} for name, options in pairs}
    except (ValueError, TypeError, AttributeError) as error:
        raise DumpError(f"{VARIABLE}: expected a list of names and of [name, options], got {text!r}: {error}") from None


def _written(options: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items())
