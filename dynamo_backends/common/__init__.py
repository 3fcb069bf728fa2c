"""What every room may use and what knows none of them: the safety net, fork handling, subprocesses, text tables.

It takes nothing of the pipeline and imports only ``errors``, ``events`` and ``versions``. Importing the package itself
costs nothing: PyTorch imports ``torch_logs`` in every process.
"""
