"""Reads dumps, and runs and analyses the models in them, without PyTorch.

``debug`` writes a dump; ``schema`` is the format of its files. ``reading`` returns its runs, graphs and values. The
other modules replay, compare and bisect its models, and find nodes that lose precision, produce NaN, differ between
runs or take long. The commands and ``report`` call them.
"""
