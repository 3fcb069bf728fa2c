"""``dynamo-backends bench``: measures backends on models, each in its own process. docs/bench.md defines the figures.

::

    parent   cli/bench.py, measuring.py   imports no PyTorch; starts the workers and sends them requests in turn
      |----- worker.py, reference         runs eager and float64, and judges the results of the others
      |----- worker.py, backend 1         builds the model, gives a first result, then times its turn of each round
      |----- worker.py, backend 2         ...
"""
