"""CUDA kernels on a CPU: `emulator.h`, compiled by the C++ compiler of the machine."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from torch import Tensor

from espformer.ops.common.cuda import CudaLaunch
from espformer.ops.esp.cuda import recurrences

HERE = Path(__file__).parent
H200 = 132, 227 << 10  # multiprocessors, shared memory of a block in bytes


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="espformer-emulated-"))


@functools.cache
def library(source: Path, definitions: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    compiler = shutil.which("c++")
    assert compiler is not None
    built = _folder() / f"{abs(hash((source, definitions)))}.so"
    defined = [f"-D{name}={value}" for name, value in definitions]
    options = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", f'-DSOURCE="{source}"']
    command = [compiler, *options, *defined, str(HERE / "emulated.cpp"), "-o", str(built)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(built))


def launch(self: CudaLaunch, device: int, *tensors: Tensor | None) -> None:
    assert all(x is None or x.is_contiguous() for x in tensors)
    blocks, threads, shared = self.grid
    assert shared <= H200[1]
    emulated = library(self.source, self.definitions)
    emulated.launch(self.name.encode(), blocks, threads, self.packed(tensors))


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run on the CPU, as if it were a GPU."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler for the emulator")
    monkeypatch.setattr(CudaLaunch, "__call__", launch)
    monkeypatch.setattr(recurrences, "limits", lambda: H200)
    monkeypatch.setattr(recurrences, "_can_compile", lambda: True)
