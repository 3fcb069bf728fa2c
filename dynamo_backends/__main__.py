"""``python -m dynamo_backends``, the command where its script is not on the path.

``python -m`` puts the current folder in front of ``sys.path``: a ``json.py`` in it would be executed instead of
Python's. The script ``dynamo-backends`` has no such folder on its path, so it is removed here, before anything else is
imported. In a checkout, where the current folder holds this package, it moves to the end instead. No code of ours can
prevent that Python takes a folder ``dynamo_backends`` in the current folder for this package.
"""

import os  # it is imported when Python starts, as is sys
import sys

if sys.path and not getattr(sys.flags, "safe_path", False):
    try:
        _current = os.getcwd()
    except FileNotFoundError:  # it was removed
        _current = ""
    if sys.path[0] in ("", _current):
        del sys.path[0]
        if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == _current:
            sys.path.append(_current)

from .cli import main  # noqa: E402

sys.exit(main())
