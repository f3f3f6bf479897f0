"""The kernels compile with NVRTC on a machine without a GPU, for GPUs of several kinds."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from espformer.ops.esp.cuda.recurrences import KERNELS, SOURCE

PROGRAM = """
import ctypes, os, sys
from pathlib import Path

import torch

from espformer.ops.common import cuda
from espformer.ops.common.cuda import Limits
from espformer.ops.esp.cuda import recurrences

library = ctypes.CDLL(sys.argv[1])
cuda._compiler = lambda: library
cases = (197, 64, False, False), (300, 8, True, True), (1000, 64, True, False), (1, 2, False, True)
for capability in ((8, 0), (9, 0), (12, 0)):
    torch.cuda.get_device_capability = lambda device: capability
    cuda._target.cache_clear()
    for name in recurrences.KERNELS:
        for ranks, width, scales, query_rows in cases:
            launch = recurrences._launch(
                name, (64, 8, ranks), ranks, ranks, width, scales, query_rows,
                Limits(132, 227 << 10),
            )
            options = [f"--gpu-architecture={cuda._target(0)}", "--std=c++17"]
            options += [f"-D{key}={value}" for key, value in launch.definitions]
            code = cuda.machine_code(launch.source, options)
            assert code[:4] == b"\\x7fELF"
            assert name.encode() in code
"""


@pytest.mark.slow
def test_kernels_compile(tmp_path: Path) -> None:
    # The wheel holds the compiler alone; torch is untouched.
    install = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target"]
    wheel = subprocess.run(
        [*install, str(tmp_path), "nvidia-cuda-nvrtc"], check=False, capture_output=True
    )
    found = sorted(tmp_path.glob("nvidia/*/lib/libnvrtc.so.*"))
    if wheel.returncode or not found:
        pytest.skip("NVRTC cannot be installed here")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(found[0])],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_function_says_where_it_runs() -> None:
    """Unlike nvcc, NVRTC takes no functions of the host."""
    begins = ("__device__", "template <", 'extern "C"', "struct ", "typedef ", "static_assert(")
    begins += (*(f"{name}(" for name in KERNELS), "constexpr ", "#", "//", "}")
    for line in SOURCE.read_text(encoding="utf-8").splitlines():
        if line and not line[0].isspace():
            assert line.startswith(begins), line
            assert not (line.startswith("constexpr ") and "{" in line), line
