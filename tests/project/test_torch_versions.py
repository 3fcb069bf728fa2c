"""Versions of PyTorch: the warning for an untested one, and the script that tests one."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import subprocess
import sys
import warnings
from pathlib import Path

import private_parts
import pytest
import torch
from environments import constraints_without
from packaging.requirements import Requirement
from packaging.version import Version

from dynamo_backends.common.installation import warn_if_untested
from dynamo_backends.versions import TESTED

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "version", ["2.13.0", "2.13.0+cpu", "2.14.1+cu132", "2.15.0", "2.15.3.dev20260901", "2.15.0rc1"]
)
def test_a_tested_version_is_no_warning(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested(version)


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0.dev20270101+cpu", "3.0"])
def test_a_newer_version_is_a_warning_that_names_it_and_the_tested_ones(version: str) -> None:
    with pytest.warns(UserWarning, match=re.escape(version)) as warned:
        warn_if_untested(version)
    assert all(tested in str(warned[0].message) for tested in TESTED)


IMPORTED_WITH = """
import torch
torch.__version__ = {version!r}
import dynamo_backends
import dynamo_backends.backends
model = torch.nn.Linear(2, 2)
torch.compile(model, backend="onnxrt")(torch.ones(1, 2))
"""


@pytest.mark.parametrize(("version", "count"), [("2.99.0", 1), (torch.__version__, 0)])
def test_the_import_warns_once_and_works(version: str, count: int) -> None:
    command = [sys.executable, "-W", "always", "-c", IMPORTED_WITH.format(version=version)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("dynamo-backends was tested with") == count


def test_the_package_may_be_installed_with_all_tested_versions_and_newer_ones() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = [Requirement(line) for line in setup["options"]["install_requires"].split("\n") if line]
    [of_torch] = [requirement.specifier for requirement in required if requirement.name == "torch"]
    assert all(f"{version}.0" in of_torch for version in (*TESTED, "2.99"))
    assert "2.12.1" not in of_torch
    assert Version(importlib.metadata.version("torch")).base_version in of_torch


def test_the_readme_names_the_tested_versions() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Tested with PyTorch {', '.join(TESTED[:-1])} and {TESTED[-1]}" in text


def test_the_command_takes_all_constraints_but_torchs() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    left_out = set(lines) - set(constraints_without("torch").splitlines())
    assert len(left_out) == 1
    assert left_out.pop().startswith(f"torch=={TESTED[0]}.")


def test_the_command_without_a_version_says_how_it_is_used() -> None:
    command = [sys.executable, str(ROOT / "tests" / "with_torch.py"), "tests/project/test_docs.py"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "with_torch.py 2.15.0" in ran.stderr


@pytest.mark.parametrize("library", private_parts.LIBRARIES)
def test_the_docs_list_what_is_private_and_used_here(library: str) -> None:
    text = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    assert private_parts.table(library) in text, "put in what python tests/private_parts.py prints"
    tests = {name: private_parts.noticed_by(name) for name in private_parts.used(library)}
    assert tests and all(test and any((ROOT / "tests").glob(f"*/{test}")) for test in tests.values()), tests
