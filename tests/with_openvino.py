"""Runs tests with ``onnxruntime-openvino`` instead of ``onnxruntime``, on its provider and on the CPU's.

::

    python tests/with_openvino.py                            # a part that takes some minutes
    python tests/with_openvino.py tests/pipeline/test_models.py -n 2    # arguments are passed to pytest
    python tests/with_openvino.py --run tests/operators_sweep.py --mode values --only add,sin  # a script instead

It creates a virtual environment once, in the folder ``~/.cache/dynamo-backends`` (in ``$XDG_CACHE_HOME`` if that is
set), and installs this checkout with the other packages of ``constraints.txt``. The default option there is
``providers=["OpenVINOExecutionProvider", "CPUExecutionProvider"]``.

The exit code is pytest's, or pip's if the installation fails.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from environments import Environment  # noqa: E402

PROVIDERS = "OpenVINOExecutionProvider,CPUExecutionProvider"

TESTS = (
    "tests/runtime/test_providers.py",
    "tests/pipeline/test_models.py",
    "tests/debug/test_onnx_debug.py",
    "-k",
    "not training",
)


def main(arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    environment = Environment("openvino", sys.executable)
    failed = environment.install(["-e", ".[test]"], not_from_constraints="onnxruntime")
    # Both packages are one folder: that which is installed last is there, and no other may be removed after it.
    failed = failed or environment.pip("uninstall", "--yes", "onnxruntime", "onnxruntime-openvino")
    failed = failed or environment.pip("install", "--no-deps", "onnxruntime-openvino")
    if failed:
        return failed
    script = arguments[1:] if arguments[:1] == ["--run"] else ["-m", "pytest", *(arguments or TESTS)]
    settings = environment.settings_with({"DYNAMO_BACKENDS_PROVIDERS": PROVIDERS})
    return subprocess.run(environment.command(*script), **settings).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
