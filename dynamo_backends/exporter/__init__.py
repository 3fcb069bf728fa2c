"""FX nodes to ONNX: torchlib's translations, ours where torchlib has none or is wrong, and the assembled model.

It takes the nodes of a region with their fake tensors, and gives an ONNX model. It knows nothing of ONNX Runtime.
``torch_internals`` is the only module that uses private parts of ``torch.onnx``. ``partition`` and ``pipeline`` call
it.
"""
