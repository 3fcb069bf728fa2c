"""``dynamo_backends.export``: a model as one ONNX file that needs neither PyTorch nor this package.

``export`` takes a module with example arguments. ``torch.export`` captures it (``capture``), the stages from ``joint``
on lower it as for ``torch.compile``, but to one ONNX model of the whole graph (``model``), which is written and checked
(``export``). Users call it, and the commands ``export`` and ``trace --onnx``.
"""
