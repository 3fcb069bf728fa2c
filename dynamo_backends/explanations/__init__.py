"""``explain``, ``coverage`` and ``trace``: reports on what ``torch.compile`` does with a model.

They compile a function for its arguments without running sessions, and report graphs, graph breaks, regions, and the
operators that run in PyTorch, with the reasons. Users call them, and so do the commands ``explain`` and ``trace``.
"""
