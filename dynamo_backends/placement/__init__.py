"""Chooses the engine that runs the graphs of one of Dynamo's frames: PyTorch, ONNX Runtime or Inductor.

It takes AOTAutograd's graphs, and gives their runners. ``engines`` makes the candidates, ``autotuner`` times them on
real steps in the order of ``search``, and ``outcomes`` keeps the result on disk. ``pipeline`` calls it for training
graphs, and with ``placement="fastest"`` for all graphs.
"""
