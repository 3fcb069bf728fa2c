"""Checks an installation from outside the checkout: the backends are found by name, and run a small model."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

BACKENDS = ("onnxrt", "onnx_debug", "fx_debug")


def main(checkout: Path) -> None:
    # The folder of this script is first on the path; the installed package must be found without it.
    assert Path.cwd() != checkout, "run it outside the checkout"
    found = torch._dynamo.list_backends()
    missing = [name for name in BACKENDS if name not in found]
    assert not missing, f"torch.compile does not know {missing}, only {found}"

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    x = torch.randn(3, 8)
    expected = model(x)
    with tempfile.TemporaryDirectory() as folder:
        for name in BACKENDS:
            torch._dynamo.reset()
            result = torch.compile(model, backend=name, options={"dump_dir": folder})(x)
            torch.testing.assert_close(result, expected)
            result.sum().backward()

        from dynamo_backends.dumps.reading import find_run
        from dynamo_backends.report import gather, render

        assert "<script>" in render(gather(find_run(folder))), "the wheel has the files of the report"

    import dynamo_backends

    location = Path(dynamo_backends.__file__)
    assert checkout not in location.parents, f"{location} is the checkout, not the installed wheel"
    print(f"{', '.join(BACKENDS)} run from {location.parent}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
