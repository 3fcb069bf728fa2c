"""Times the engines that can run the graphs of a frame (PyTorch, ONNX Runtime, Inductor), and chooses one.

``engines`` makes the candidates, ``autotuner`` runs them on real steps, and ``search`` decides from the times.
``pipeline`` calls it for training graphs, and with ``placement="fastest"`` for all. It splits no graph: see
``partition``.
"""
