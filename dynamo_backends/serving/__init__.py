"""``warm_up``, ``metrics``, ``prometheus_collector``: for programs that serve a compiled model.

They take what ``torch.compile`` returned, and read what a ``common.call_recorder.Recorder`` collects during its calls.
Users call them.
"""
