"""The stages in order, from Dynamo's graph to what runs.

It takes a graph and the options, and gives a runner: a function that runs the graph on ONNX Runtime, or in PyTorch if
something of ours fails. ``pipeline`` starts it, ``runners`` finds a Program in the cache or has it compiled,
``compiler`` runs the passes on FX graphs, ``lowering`` makes the ONNX models. ``backends`` calls it; an ``Observer``
is told of each stage.
"""
