"""Helpers for all other folders: the safety net, fork handling, subprocesses, text tables.

It imports only ``errors``, ``events``, ``versions`` and ``passes.engine``.
Importing the package itself costs nothing: PyTorch imports
``torch_logs`` in every process.
"""
