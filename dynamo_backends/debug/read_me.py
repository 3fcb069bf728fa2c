"""``README.txt`` of a run folder: its files, and the commands that read them."""

README = "README.txt"

TEXT = """\
What torch.compile did with a program, and whether the results are right. Start with the verdicts:

    dynamo-backends ls -d {folder}
    dynamo-backends report -d {folder}          a page for a browser

manifest.json            every graph: source line, verdict, compile time, operators in PyTorch with the reasons
graph_000/               one Dynamo graph; each graph break and each recompile starts another
  dynamo.py              as Dynamo captured it; pre_grad.py: after our passes
  joint.py               forward and backward together, in ATen operators
  dynamo.json            the nodes as JSON; also pre_grad.json, joint.json, and below aten.json, post_grad.json
  passes/                what each pass changed, as a diff; also in the folders below
  forward/  backward/  or  inference/
    aten.py              one direction; post_grad.py: after our passes
    side_by_side.txt     every value: ONNX Runtime and PyTorch against float64; wrong nodes are marked with !
    side_by_side.json    the same with every measure
    region_0/            one ONNX model
      model.onnx             as translated; model.optimized.onnx: after our passes; model.session.onnx: as it ran
      test_data_set_0/       its recorded inputs and outputs, in ONNX's test layout
      repro.py               runs the model on these, with onnxruntime and numpy only
      culprit/               inputs and expected results of a wrong node
    rejected/            models that ONNX Runtime rejected, and its errors

A stage that changed nothing has no file: manifest.json names the earlier stage with the same graph. Files with equal
content may be hard links: change a copy.

    dynamo-backends show GRAPH          the graph of a stage, with source lines          GRAPH: 0, graph_000/backward
    dynamo-backends diff GRAPH A B      what changed between two stages
    dynamo-backends compare A B         compare the values of two ONNX models
    dynamo-backends replay GRAPH        run the models again, and compare with the recorded outputs
    dynamo-backends bisect GRAPH        the smallest model that is still wrong
    dynamo-backends nan GRAPH           the first node that creates NaN or infinity
"""
