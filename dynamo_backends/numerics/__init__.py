"""Decides whether a value is right: float64 runs as the reference, one measure of errors, one tolerance, one verdict.

It runs the computation of a value in PyTorch and in float64, and gives the value's error, its tolerance and a
``Verdict``. ``debug``, ``op_tools``, ``partition``, ``placement`` and ``bench`` call it. ``measure`` needs only numpy:
``dumps`` uses it too, and ``repro.py`` contains it.
"""
