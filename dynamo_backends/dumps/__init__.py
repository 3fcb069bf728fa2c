"""What reads the folders that ``onnx_debug`` writes, and works on what is in them.

Nothing here needs PyTorch, executes or unpickles what a dump holds: it is JSON, text, ONNX models and ONNX tensors.
"""
