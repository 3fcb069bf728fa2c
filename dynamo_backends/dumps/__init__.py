"""What reads a dump folder and works on it, without PyTorch.

It takes a folder that ``debug`` wrote, and gives its graphs and values (``reading``), replays, comparisons of models,
bisections, and where precision, NaN or time are lost. The commands and ``report`` call it. ``schema`` is the form of
the files, shared with ``debug``.
"""
