"""Runs the stages in order, from Dynamo's graph to a runner.

It takes a graph and the options, and returns a runner: a function that runs the graph on ONNX Runtime, or in PyTorch if
our own code fails. ``pipeline`` runs the stages up to AOTAutograd's graphs, ``runners`` loads a Program from the cache
or compiles one, ``compiler`` runs the passes on FX graphs, ``lowering`` has a graph split into regions and makes a
model and a session of each. ``backends`` calls it; an ``Observer`` is notified of each stage.
"""
