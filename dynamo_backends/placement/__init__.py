"""Which engine runs the graphs of one of Dynamo's frames: PyTorch, ONNX Runtime or Inductor.

``engines`` takes the graphs of AOTAutograd and gives what runs them; ``autotuner`` tries the engines on real steps, in
the order that ``search`` says; ``graph_facts`` says what may be tried. ``Pipeline`` calls ``engines.placement_of``.
"""
