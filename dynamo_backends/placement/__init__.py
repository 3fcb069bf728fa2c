"""Which engine runs the graphs of one of Dynamo's frames: PyTorch, ONNX Runtime or Inductor.

It takes AOTAutograd's graphs, and gives what runs them: ``engines`` makes the candidates, ``autotuner`` tries them on
real steps in the order that ``search`` says, ``outcomes`` keeps the result on disk. ``pipeline`` calls it for training
graphs, and with ``placement="fastest"`` for all.
"""
