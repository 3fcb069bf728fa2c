"""Decides whether a value is right: float64 runs as the reference, one measure of errors, one tolerance, one verdict.

It computes a value in PyTorch and in float64: ``exact`` a single call, ``graph_execution`` a graph node by node,
``reference_runs`` a whole function, ``call_execution`` a recorded call. It returns the error of the value to check, its
tolerance and a ``Verdict``. ``debug``, ``op_tools``, ``partition``, ``placement`` and ``bench`` call it.
``measure`` needs only numpy:
``dumps`` uses it too, and ``repro.py`` contains it.
"""
