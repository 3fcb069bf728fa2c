"""Compiled graphs on disk, so that a second process need not compile them again.

- ``store``: files of a folder, by key, with checksums, bounded in size;
- ``environment``: all that a compiled graph depends on besides the graph and the options;
- ``description``: a graph as text, for its key;
- ``entry``: a Program as a record, and back;
- ``graphs``: what the pipeline asks.

What is found in the cache runs without the compiler: nothing here imports it, nor the libraries that make ONNX models.
"""
