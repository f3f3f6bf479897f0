"""Compiling and launching of CUDA C++, with a compiler and a driver that only take notes."""

import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from espformer.ops.common import cuda
from espformer.ops.common.cuda import CudaError, CudaLaunch


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    for function in (cuda._target, cuda._primary_context):
        function.cache_clear()


class Compiler:
    """NVRTC, as far as architectures go."""

    def __init__(self, *architectures: int) -> None:
        self.architectures = architectures

    def nvrtcGetNumSupportedArchs(self, count: Any) -> None:
        count._obj.value = len(self.architectures)

    def nvrtcGetSupportedArchs(self, into: Any) -> None:
        into[:] = self.architectures

    def nvrtcVersion(self, major: Any, minor: Any) -> None:
        major._obj.value, minor._obj.value = 13, 0


def on_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *architectures: int
) -> None:
    monkeypatch.setattr(cuda, "_compiler", lambda: Compiler(*architectures))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(
    ("capability", "known", "target"),
    [
        ((9, 0), (75, 80, 86, 90, 100), "sm_90"),
        ((8, 9), (75, 80, 86, 90), "sm_86"),
        ((12, 1), (90, 100, 120), "sm_120"),
    ],
)
def test_the_newest_architecture_that_runs(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], known: tuple[int, ...],
    target: str,
) -> None:  # fmt: skip
    on_gpu(monkeypatch, capability, *known)
    assert cuda._target(0) == target


def test_a_gpu_that_the_compiler_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, (10, 3), 80, 90)
    with pytest.raises(CudaError, match=r"NVRTC 13\.0 does not know GPUs .* 10\.3"):
        cuda._target(0)


def test_machine_code_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Until the source, an option or the compiler changes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda, "_version", lambda: (13, 0))
    compiled = []

    def compile_once(name: str, text: bytes, options: list[str]) -> bytes:
        compiled.append((name, text, options))
        return b"code \x00 %d" % len(compiled)

    monkeypatch.setattr(cuda, "_compile", compile_once)
    source = tmp_path / "kernel.cu"
    source.write_text("one")
    assert cuda.machine_code(source, ["-DA=1"]) == cuda.machine_code(source, ["-DA=1"])
    assert compiled == [("kernel.cu", b"one", ["-DA=1"])]
    cuda.machine_code(source, ["-DA=2"])
    source.write_text("two")
    cuda.machine_code(source, ["-DA=2"])
    monkeypatch.setattr(cuda, "_version", lambda: (13, 1))
    assert cuda.machine_code(source, ["-DA=2"]) == b"code \x00 4"
    assert len(compiled) == 4


class Driver:
    """Refuses the first calls of a thread without a context."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.has_context = False

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuCtxSetCurrent":
                self.has_context = True
            free = name in ("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent")
            return 0 if free or self.has_context else cuda.INVALID_CONTEXT

        return call


def test_a_thread_without_a_context_gets_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    cuda._call(0, "launching", "cuLaunchKernel", 1)
    assert driver.calls[0] == driver.calls[-1] == "cuLaunchKernel"
    assert driver.has_context
    cuda._call(0, "launching", "cuLaunchKernel", 1)
    assert driver.calls.count("cuCtxSetCurrent") == 1


def test_errors_of_the_driver_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def cuLaunchKernel(self, *_: Any) -> int:
            return 719

        def cuGetErrorString(self, result: int, text: Any) -> int:
            text._obj.value = b"unspecified launch failure"
            return 0

    monkeypatch.setattr(cuda, "_driver", Broken)
    with pytest.raises(CudaError, match=r"launching it: unspecified launch failure \(CUDA error 7"):
        cuda._call(0, "launching it", "cuLaunchKernel")


def test_the_argument_is_the_struct_of_the_kernel() -> None:
    x = torch.zeros(3)
    launch = CudaLaunch(Path("kernel.cu"), "kernel", {}, 1, 32, 0, (7, 8, 9))
    packed = launch.packed([x, None])

    class Arguments(ctypes.Structure):
        _fields_ = (("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("numbers", ctypes.c_int * 3))

    # A string buffer ends with a zero of its own.
    assert len(packed) == ctypes.sizeof(Arguments) + 1
    arguments = Arguments.from_buffer(packed)
    assert (arguments.x, arguments.y, list(arguments.numbers)) == (x.data_ptr(), None, [7, 8, 9])
    assert struct.calcsize("2Q3i0q") == ctypes.sizeof(Arguments)


def test_nothing_is_launched_for_an_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_function", pytest.fail)
    CudaLaunch(Path("kernel.cu"), "kernel", {}, 0, 32, 0, ())(0)
