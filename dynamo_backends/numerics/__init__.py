"""Whether a value is right: float64 as the reference, one measure of errors, one rule, one verdict.

It takes values of a run, runs the same computation in PyTorch and in float64, and gives for each value its error, its
tolerance, and a ``Verdict``. ``debug``, ``op_tools``, ``partition`` and ``placement`` call it. ``measure`` needs only
numpy: ``dumps`` uses it too, and ``repro.py`` contains it.
"""
