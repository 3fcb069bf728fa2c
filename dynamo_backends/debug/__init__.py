"""The observer of ``onnx_debug``: writes the dump folder, and compares runs with eager and float64.

The pipeline passes it the graph of each stage and each compiled graph; it returns files and verdicts. ``backends``
creates it when the debug backend is used.
"""
