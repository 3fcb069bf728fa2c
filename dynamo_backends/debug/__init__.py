"""The observer of ``onnx_debug``: writes the dump folder, and compares each run with eager and with float64.

It takes what the pipeline tells an observer, and gives files and verdicts. It sees the rest of the product only through
the observer and the artifacts of the stages. ``backends`` makes it when the debug backend is asked for.
"""
