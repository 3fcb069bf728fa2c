"""What a backend raises of its options: an error that Dynamo hands to the caller as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._dynamo.exc import ShortenTraceback


class OptionError(ValueError, ShortenTraceback):
    """An unknown option or an impossible value, raised at the caller's line.

    Any other error of a backend becomes a ``BackendCompilerFailed``, whose first line names the backend, at the end of
    a traceback through Dynamo; errors of this kind are let through, and their traceback is theirs.
    """

    def __init__(self, message: str) -> None:
        ShortenTraceback.__init__(self, message, first_useful_frame=None)

    def remove_dynamo_frames(self) -> OptionError:
        return self.with_traceback(None)


@contextlib.contextmanager
def option_errors() -> Iterator[None]:
    """A ``ValueError`` inside, which is one of an option, becomes an ``OptionError``."""
    try:
        yield
    except ValueError as error:
        raise OptionError(str(error)) from None
