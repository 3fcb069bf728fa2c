"""Which nodes run on ONNX Runtime, and what a compiled graph is.

It takes a functional ATen graph, and gives its regions, with a reason for each node that stays in PyTorch
(``regions``), and the ``Program`` that runs them (``program``). It also checks results: those of passes
(``pass_verification``) and those of execution providers (``provider_check``). ``pipeline`` and ``cache`` call it.
"""
