"""``warm_up``, ``metrics``, ``prometheus_collector``: for programs that serve a compiled model.

They take what ``torch.compile`` returned, and read what ``common.call_statistics`` collects during its calls. Users
call them.
"""
