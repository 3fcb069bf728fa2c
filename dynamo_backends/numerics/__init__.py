"""Decides whether a value is right: one tolerance; the reference is PyTorch in eager and in float64.

``rule`` is the tolerance; it needs only numpy, and ``repro.py`` contains it. ``segments`` judges the values of a run,
each on the values that it was computed from; ``whole_graph`` judges results where there are no others. ``exact`` runs a
single call in float64, ``function_runs`` a whole function; ``operator_facts`` has what is known of operators.
"""
