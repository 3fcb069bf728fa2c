"""
Another execution provider
==========================

ONNX Runtime runs a model by *execution providers*: the CPU's, and those of other hardware, each in a package of its
own. They are named in the order of preference.
"""

import onnxruntime
import torch

print(onnxruntime.get_available_providers())
model, x = torch.nn.Linear(8, 4).eval(), torch.randn(2, 8)

# %%
# One that is not installed is an error, which says what is there and which package brings it.

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
# Where it is installed (``pip install onnxruntime-openvino`` in an environment of its own, as it takes the place of
# ``onnxruntime``), the same line runs on it. What a provider does not take goes to the next; the first results of each
# region are compared with PyTorch's, and a region that it computes wrongly goes to the next one, too.

providers = [name for name in wanted if name in onnxruntime.get_available_providers()]
torch._dynamo.reset()
with torch.no_grad():
    compiled = torch.compile(model, backend="onnxrt", options={"providers": providers})
    torch.testing.assert_close(compiled(x), model(x))
