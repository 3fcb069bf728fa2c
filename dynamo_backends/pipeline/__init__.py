"""Runs the stages in order, from Dynamo's graph to a runner.

It takes a graph and the options, and returns a runner: a function that runs the graph on ONNX Runtime, or in PyTorch if
our own code fails. ``stages`` has them all in order; ``pipeline`` leads up to it, by Dynamo and AOTAutograd, and
``runners`` loads a Program from the cache or has it compiled. ``backends`` calls it; an ``Observer`` is notified of
each stage.
"""
