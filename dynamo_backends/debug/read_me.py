"""``README.txt`` of a run folder: what is where, what to open first, which commands there are."""

README = "README.txt"

TEXT = """\
What torch.compile did with a program, and whether the results are right. Start with the verdicts:

    dynamo-backends ls -d {folder}
    dynamo-backends report -d {folder}          a page to look at in a browser

manifest.json            every graph: where in the code, verdict, compile time, what did not run on ONNX Runtime and why
graph_000/               one graph of Dynamo; a graph break or a recompile makes another
  dynamo.py              as Dynamo captured it; pre_grad.py after our passes on it
  joint.py               forward and backward together, in ATen operators
  dynamo.json            the nodes of these for programs: pre_grad.json, joint.json, and below aten.json, post_grad.json
  passes/                what each pass changed, as a diff; further down too
  forward/  backward/  or  inference/
    aten.py              one direction; post_grad.py after our passes on it
    regions.txt          what went to ONNX Runtime, what stayed in PyTorch, and why
    side_by_side.txt     every value: ONNX Runtime and PyTorch against float64; the first wrong one is marked with !
    side_by_side.json    the same with every measure
    region_0/            one ONNX model
      model.onnx             the translation; model.optimized.onnx after our passes; model.session.onnx as it ran
      test_data_set_0/       what it took and returned, in ONNX's test layout
      repro.py               runs it on that again, with onnxruntime and numpy alone
      culprit/               of a node that is wrong by itself: what it is given, and what PyTorch makes of it
    refused/             models that ONNX Runtime refused, and what it said

A stage that changed nothing has no file: manifest.json names the stage it is the same as. Files with the same content
may be hard links of each other: change a copy.

    dynamo-backends show GRAPH          a stage's graph, with source lines          GRAPH: 0, graph_000/backward
    dynamo-backends diff GRAPH A B      what changed between two stages
    dynamo-backends compare A B         two ONNX models side by side
    dynamo-backends replay GRAPH        run the model again, and compare with what was recorded
    dynamo-backends bisect GRAPH        the smallest model that is still wrong
    dynamo-backends nan GRAPH           the first node with NaN or infinity that its inputs did not have
"""
