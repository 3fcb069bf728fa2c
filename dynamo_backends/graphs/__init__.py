"""What the other folders need to know about FX graphs of Dynamo and AOTAutograd.

It finds weights, aliases, memory layouts, the user's names and source lines, and writes graphs as JSON, text or tables.
``artifacts`` defines the data that the stages exchange. ``dynamo_frames`` reads what Dynamo is compiling, and
``descriptors`` what AOTAutograd is compiling; only ``inductor`` compiles with Inductor. Most folders above use it.
"""
