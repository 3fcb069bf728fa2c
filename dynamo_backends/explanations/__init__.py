"""``explain`` and ``coverage``: reports on what ``torch.compile`` does with a model. ``trace``: what PyTorch captures.

``explain`` and ``coverage`` capture a function, run it in PyTorch, and report graphs, graph breaks, regions, and the
operators that would run in PyTorch, with the reasons. Users and the command ``explain`` call them. ``trace`` captures a
graph with one of PyTorch's tracers; only the command ``trace`` calls it.
"""
