"""The oldest Triton that is supported, next to the one that is installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture(scope="session")
def oldest_triton(tmp_path_factory) -> dict[str, str]:
    """Environment variables of a process that compiles with the oldest Triton.

    Its compiler accepts less than that of the newest, and GPU machines are slow to change theirs.
    """
    found = re.search(r'"triton>=([\d.]+)', PYPROJECT.read_text())
    assert found is not None
    folder = tmp_path_factory.mktemp("oldest-triton")
    package = f"triton~={found.group(1)}.0"
    install = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(folder)]
    if subprocess.run([*install, package], check=False, capture_output=True).returncode:
        pytest.skip(f"{package} cannot be installed here")
    return os.environ | {"PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}
