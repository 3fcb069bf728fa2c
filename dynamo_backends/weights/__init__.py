"""Weights as constants of a session, which is rebuilt when one of them changes.

It takes the arguments of an inference graph, decides which are weights (``selection``), makes a session that holds them
as constants (``region_session``), and rebuilds it when one changes (``changes``). ``partition.program`` makes the
sessions; ``pipeline`` selects the weights.
"""
