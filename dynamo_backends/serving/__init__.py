"""``warm_up``, ``metrics``, ``prometheus_collector``: for programs that serve a compiled model.

They take what ``torch.compile`` returned, and read what ``events.Recorder`` collects during its calls. Users call them.
"""
