"""Reads dump folders, and works on them without PyTorch.

``debug`` writes a dump; ``schema`` is the format of its files. ``reading`` returns its runs, graphs and values; the
other modules replay, compare and bisect its models, and find where precision, NaN, determinism or time is lost. The
commands and ``report`` call them.
"""
