"""CUDA kernels on a CPU: `emulator.h`, compiled by the C++ compiler of the machine."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from espformer.ops.common import cuda
from espformer.ops.common.cuda import CudaLaunch, Limits
from espformer.ops.esp.cuda import recurrences

HERE = Path(__file__).parent
H200 = Limits(processors=132, shared_bytes=227 << 10)


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
    """Whichever warps are ahead, results are the same."""
    assert all(x is None or x.is_contiguous() for x in tensors)
    blocks, threads, shared = self.grid
    assert shared <= H200.shared_bytes
    emulated = library(self.source, self.definitions)
    before = [None if x is None else x.clone() for x in tensors]
    found = []
    for last_first in (False, True):
        for x, y in zip(tensors, before, strict=True):
            if x is not None and y is not None:
                x.copy_(y)
        emulated.launch(self.name.encode(), blocks, threads, last_first, self.packed(tensors))
        found.append([None if x is None else x.clone() for x in tensors])
    for x, y in zip(*found, strict=True):
        if x is not None and y is not None:
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, equal_nan=True)


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run on the CPU, as if it were a GPU; a head has one block, with several slices."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler for the emulator")
    monkeypatch.setattr(CudaLaunch, "__call__", launch)
    on_gpu = {torch.float32: H200}
    monkeypatch.setattr(recurrences, "limits", lambda x: on_gpu.get(x.dtype))
    monkeypatch.setattr(cuda, "limits", lambda device: H200)
    monkeypatch.setattr(recurrences, "_blocks", lambda *_: 1)
