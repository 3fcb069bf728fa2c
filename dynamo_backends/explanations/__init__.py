"""``explain``, ``coverage`` and ``trace``: what ``torch.compile`` makes of a model, for people.

It takes a function and its arguments, compiles them without running sessions, and gives an ``Explanation``: graphs,
breaks, regions, and what runs in PyTorch and why. Users call it, and the commands ``explain`` and ``trace``.
"""
