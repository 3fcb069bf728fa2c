"""
Another execution provider
==========================

ONNX Runtime runs a model on *execution providers*: the CPU's, and those of other hardware, each in a separate package.
The option ``providers`` lists them in order of preference.
"""

import onnxruntime
import torch

print(onnxruntime.get_available_providers())
model, x = torch.nn.Linear(8, 4).eval(), torch.randn(2, 8)

# %%
# A provider that is not installed is an error, which names the available ones and the package.

wanted = ["OpenVINOExecutionProvider", "CPUExecutionProvider"]
if wanted[0] not in onnxruntime.get_available_providers():
    try:
        torch.compile(model, backend="onnxrt", options={"providers": wanted})(x)
    except Exception as error:
        said = str(error)
        print(said)
        assert "OpenVINOExecutionProvider" in said and "CPUExecutionProvider" in said
    else:
        raise AssertionError("a provider that is not installed was taken")

# %%
# If it is installed (``onnxruntime-openvino`` replaces ``onnxruntime``, so use a separate environment), the same line
# runs on it. A region that a provider rejects goes to the next one. The first results of each region are compared with
# PyTorch's; if they are wrong, the region goes to the next provider too.

providers = [name for name in wanted if name in onnxruntime.get_available_providers()]
torch._dynamo.reset()
with torch.no_grad():
    compiled = torch.compile(model, backend="onnxrt", options={"providers": providers})
    torch.testing.assert_close(compiled(x), model(x))
