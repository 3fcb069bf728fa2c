"""The observer of ``onnx_debug``: records, the dump folder, the comparison with eager and float64.

It sees the rest of the product only through the observer and the artifacts of the stages.
"""
