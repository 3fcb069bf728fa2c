"""``dynamo-backends bench``: backends against each other on models, each in a process of its own.

::

    parent   cli/bench.py, measuring.py   reads no model, imports no PyTorch; starts the processes and gives turns
      |----- worker.py, reference         eager and float64: judges the results of the others
      |----- worker.py, backend 1         builds the model, gives a first result, then times turn by turn
      |----- worker.py, backend 2         ...

What is measured, and what it means:

- *first result*: in a fresh process in which the model and its inputs are there, until the result of the first call is;
  imports of the compiler, compilation and the call. The compilers' caches on disk are new folders.
- *latency*: of a call. The backends take turns in rounds; in a turn, calls that warm up are not timed, and the median
  of the others counts; over the rounds the median, and the distance between the quartiles as its spread.
  A training step is zeroing the gradients, forward, loss and backward; the optimizer is not in it.
- *outside the session*: the part of a call that is spent outside ONNX Runtime's sessions, where it runs any; where a
  text is generated, of a call divided by its tokens.
- *overhead of a call*: the latency of a two-layer MLP above that of ``torch.compile(backend="eager")``.
- *memory*: the resident set of the process (on Linux) above what it was when the model and its inputs were there, at
  its highest until the first results, and at the end, when results are let go. Libraries that are imported count.
- *right*: each result (in training each gradient too) is as near to float64 as eager's own, up to another order of
  summation and rounding (``numerics``): after the first results, and after all rounds. A wrong result has no time.
"""
