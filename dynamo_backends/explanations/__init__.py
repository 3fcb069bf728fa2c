"""``explain``, ``coverage`` and ``trace``: reports on what ``torch.compile`` does with a model.

``explain`` and ``coverage`` capture a function, run it in PyTorch, and report graphs, graph breaks, regions, and the
operators that would run in PyTorch, with the reasons. No session of a graph is made. ``trace`` captures a graph with a
tracer of PyTorch. Users call them, and so do the commands ``explain`` and ``trace``.
"""
