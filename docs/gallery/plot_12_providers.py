"""
Another execution provider
==========================

ONNX Runtime runs a model on *execution providers*: the CPU's, and those of other hardware, which come as packages
beside ``onnxruntime``: ``pip install onnxruntime-ep-openvino``. The option ``providers`` lists them in order of
preference.
"""

import torch

model, x = torch.nn.Linear(8, 4).eval(), torch.randn(2, 8)
CPU = "CPUExecutionProvider"

# %%
# A provider that does not exist is an error, which names those that do.

try:
    torch.compile(model, backend="onnxrt", options={"providers": ["OpenVinoExecutionProvider", CPU]})(x)
except Exception as error:
    print(error)
else:
    raise AssertionError("a provider that does not exist was taken")

# %%
# OpenVINO's provider needs hardware of Intel: on other machines, and where it is not installed, that is an error too.
# A region that a provider rejects goes to the next one. The first results of each region are compared with PyTorch's;
# if they are wrong, the region goes to the next provider too.

with torch.no_grad():
    try:
        compiled = torch.compile(model, backend="onnxrt", options={"providers": ["OpenVINOExecutionProvider", CPU]})
        result = compiled(x)
    except Exception as error:
        print(error)
        result = torch.compile(model, backend="onnxrt", options={"providers": [CPU]})(x)
    torch.testing.assert_close(result, model(x))
