"""Reads and prepares the FX graphs that Dynamo and AOTAutograd give us.

It finds weights, aliases, memory layouts, the user's names and source lines, and writes graphs as JSON, text or tables.
``artifacts`` defines the data that the stages exchange. Only ``aot`` and ``saving`` use private parts of AOTAutograd,
and only ``inductor`` compiles with Inductor. Most folders above use it.
"""
