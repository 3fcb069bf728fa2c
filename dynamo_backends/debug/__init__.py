"""The observer of ``onnx_debug``: writes the dump folder, and compares runs with eager and float64.

The pipeline passes it the graph of each stage and each compiled graph; it writes files and verdicts. ``backends``
creates it for ``onnx_debug``, and for ``onnxrt`` in a block of ``dump``. The folder ``dumps`` reads what it writes.
"""
