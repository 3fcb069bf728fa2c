"""``docs/examples/my_backend_extras``, installed in its own environment, is found and passes its tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "my_backend_extras"


def test_the_example_package_works_where_it_is_installed(tmp_path: Path) -> None:
    """The environment sees the packages that are installed here, and has this one besides."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (Path(site) / "from_outside.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    source = shutil.copytree(EXAMPLE, tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for command in (
        ["-m", "pip", "install", "--quiet", "--no-deps", str(source)],
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(source / "tests")],
    ):
        ran = subprocess.run(
            [python, *command], cwd=tmp_path, capture_output=True, text=True, env=variables, timeout=600
        )
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
