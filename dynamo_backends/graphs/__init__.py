"""Reads and prepares the FX graphs that Dynamo and AOTAutograd give us.

It takes FX graphs and finds weights, aliases, memory layouts, the user's names and source lines; it writes graphs as
JSON, text or tables. ``artifacts`` defines the data that the stages exchange. Only ``aot`` uses private parts of
AOTAutograd, and only ``inductor`` calls Inductor. All folders above use it.
"""
