"""Reads dumps, without PyTorch, and runs and analyses the models in them.

``debug`` writes a dump; ``schema`` is the format of its files. ``reading`` returns its runs, graphs and values. The
other modules compare and bisect its models, and find nodes that lose precision, produce NaN or take long. The commands
and ``report`` call them.
"""
