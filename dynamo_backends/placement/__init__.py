"""Times the engines that can run a training graph (PyTorch, ONNX Runtime, Inductor), and chooses one.

It splits no graph; ``partition`` splits those for ONNX Runtime. It takes AOTAutograd's graphs, and returns their
runners. ``engines`` makes the candidates, ``autotuner`` times them on real steps in the order of ``search``, and
``outcomes`` keeps the result on disk. ``pipeline`` calls it for training graphs, and with ``placement="fastest"`` for
all graphs.
"""
