"""Reads and prepares the FX graphs that Dynamo and AOTAutograd give us.

It takes FX graphs, and gives what they do not say themselves: which arguments are weights, which results share memory,
memory layouts, the user's names and source lines. It also writes graphs as JSON, text or tables. ``artifacts`` defines
the data that the stages exchange. Private parts of AOTAutograd are used only in
``aot``; Inductor is called only in ``inductor``. All folders above use it.
"""
