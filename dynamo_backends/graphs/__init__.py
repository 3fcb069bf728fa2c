"""What PyTorch's graphs need before and after our stages.

It takes Dynamo's and AOTAutograd's FX graphs, and gives what is known of them: weights, aliases, memory layouts, source
lines, and the graph as code, JSON or text. ``aot`` and ``inductor`` are the only modules that use private parts of
PyTorch. ``artifacts`` holds the data that travels between the stages. Every room above calls it.
"""
