"""Compiled graphs on disk, so that another process need not compile them again.

``pipeline.program_cache`` asks for the Program of a graph with its options, and gives the one that it
compiled otherwise.

- ``store``: files by key in a folder of limited size, with checksums;
- ``environment``: everything besides the graph and the options that a compiled graph depends on;
- ``description``: a graph as JSON, for its key;
- ``program_record``: converts a Program to a record and back;
- ``graphs``: the interface for the pipeline.

A cached graph runs without the compiler: nothing here imports the compiler, or a library that makes ONNX models.
"""
