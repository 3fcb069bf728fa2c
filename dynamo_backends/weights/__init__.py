"""Weights as constants of a session, never stale.

It takes the arguments of an inference graph, decides which are weights (``selection``), and gives a session that holds
them as constants (``frozen_session``) and is rebuilt when one changes (``changes``). ``partition.program`` makes the
sessions; ``pipeline`` selects the weights.
"""
