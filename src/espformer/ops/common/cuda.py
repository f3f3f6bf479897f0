"""CUDA C++ kernels: compiled by NVRTC, which comes with torch, and launched through the driver.

Nothing has to be installed, neither a compiler nor headers. A kernel is compiled for the GPU of a
call when it is first needed, in a few seconds; the machine code is kept in the folder `kernels` of
``~/.cache/espformer``, or of the directory that the environment variable ESPFORMER_CACHE names.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import site
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
FREE_SHARED_BYTES = 48 << 10  # what a kernel may use without asking
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class CudaError(RuntimeError):
    """A call of the driver or of the compiler failed."""


@functools.cache
def compiler() -> ctypes.CDLL | None:
    """NVRTC of the CUDA version that torch was built for; None where there is none."""
    if torch.version.cuda is None:
        return None
    major = torch.version.cuda.split(".")[0]
    name = f"nvrtc64_{major}0_0.dll" if sys.platform == "win32" else f"libnvrtc.so.{major}"
    torch_directory = Path(torch.__file__).parent
    found: list[str | Path] = [name, torch_directory / "lib" / name]
    for packages in dict.fromkeys([str(torch_directory.parent), *site.getsitepackages()]):
        found += sorted(Path(packages).glob(f"nvidia/*/lib/{name}"))
    for place in found:
        try:
            return ctypes.CDLL(str(place))
        except OSError:
            continue
    return None


@functools.cache
def _driver() -> Any:
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    grid = [c_uint] * 7
    driver.cuLaunchKernel.argtypes = [c_void_p, *grid, c_void_p, c_void_p, c_void_p]
    return driver


def _check(result: int, what: str) -> None:
    if result:
        text = c_char_p()
        _driver().cuGetErrorString(result, byref(text))
        told = text.value.decode() if text.value else "unknown error"
        raise CudaError(f"{what}: {told} (CUDA error {result})")


def cache_directory() -> Path:
    """Where machine code is kept."""
    told = os.environ.get("ESPFORMER_CACHE")
    return (Path(told) if told else Path.home() / ".cache" / "espformer") / "kernels"


def machine_code(source: Path, options: Sequence[str]) -> bytes:
    """A source compiled with some options of NVRTC: from the cache, if it is there."""
    nvrtc = compiler()
    if nvrtc is None:
        raise CudaError(
            f"{source.name}: NVRTC, the compiler of torch's CUDA version, was not found; it comes "
            "with torch for CUDA"
        )
    text = source.read_bytes()
    version = c_int(), c_int()
    nvrtc.nvrtcVersion(byref(version[0]), byref(version[1]))
    state = "\0".join([*options, *(str(number.value) for number in version)]).encode() + text
    name = f"{source.stem}-{hashlib.sha256(state).hexdigest()[:32]}.cubin"
    try:
        return (cache_directory() / name).read_bytes()
    except OSError:
        code = _compile(nvrtc, source.name, text, options)
    _keep(cache_directory() / name, code)
    return code


def _compile(nvrtc: ctypes.CDLL, name: str, text: bytes, options: Sequence[str]) -> bytes:
    program, size = c_void_p(), c_size_t()
    if nvrtc.nvrtcCreateProgram(byref(program), text, name.encode(), 0, None, None):
        raise CudaError(f"{name}: NVRTC could not read the source")
    try:
        given = (c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            nvrtc.nvrtcGetProgramLogSize(program, byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            told = log.value.decode(errors="replace")
            raise CudaError(f"{name} did not compile with {' '.join(options)}:\n{told}")
        nvrtc.nvrtcGetCUBINSize(program, byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def _keep(path: Path, code: bytes) -> None:
    """Writes a file as a whole or not at all. Without a place to write only time is lost."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        Path(file.name).replace(path)
    except OSError:
        return


@functools.lru_cache(64)
def _module(source: Path, options: tuple[str, ...], device: int) -> c_void_p:
    code, module = machine_code(source, options), c_void_p()
    result = _driver().cuModuleLoadData(byref(module), code)
    if result == INVALID_CONTEXT:  # torch has not used this device in this thread
        with torch.cuda.device(device):
            torch.cuda.synchronize()
        result = _driver().cuModuleLoadData(byref(module), code)
    _check(result, f"loading {source.name}")
    return module


@functools.lru_cache(256)
def _function(
    source: Path, name: str, definitions: tuple[tuple[str, int], ...], device: int, shared: int
) -> c_void_p:
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17"]
    options += [f"-D{key}={value}" for key, value in definitions]
    module, function = _module(source, tuple(options), device), c_void_p()
    _check(_driver().cuModuleGetFunction(byref(function), module, name.encode()), f"finding {name}")
    if shared > FREE_SHARED_BYTES:
        _check(
            _driver().cuFuncSetAttribute(function, DYNAMIC_SHARED_BYTES, shared),
            f"asking for {shared} bytes of shared memory for {name}",
        )
    return function


class CudaLaunch:
    """A kernel of a source, with its grid and all arguments but its tensors.

    A kernel has a single argument: a struct of pointers, in the order of the tensors of a call, and
    then of 32-bit integers, `numbers`. Tensors are contiguous and on the current
    device, which :func:`espformer.ops.common.operators.operator` sees to.
    """

    __slots__ = ("definitions", "grid", "name", "numbers", "source")

    def __init__(
        self, source: Path, name: str, definitions: Mapping[str, int], blocks: int, threads: int,
        shared: int, numbers: Sequence[int],
    ) -> None:  # fmt: skip
        self.source, self.name = source, name
        self.definitions = tuple(definitions.items())
        self.grid = blocks, threads, shared
        self.numbers = struct.pack(f"{len(numbers)}i0q", *numbers)  # as large as a C struct

    def packed(self, tensors: Sequence[Tensor | None]) -> Any:
        """The argument of the kernel, in memory."""
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        pointers = struct.pack(f"{len(addresses)}Q", *addresses)
        return ctypes.create_string_buffer(pointers + self.numbers)

    def __call__(self, device: int, *tensors: Tensor | None) -> None:
        blocks, threads, shared = self.grid
        function = _function(self.source, self.name, self.definitions, device, shared)
        packed = self.packed(tensors)
        arguments = (c_void_p * 1)(ctypes.addressof(packed))
        stream = torch.cuda.current_stream(device).cuda_stream
        result = _driver().cuLaunchKernel(
            function, blocks, 1, 1, threads, 1, 1, shared, stream, arguments, None
        )
        if result:
            _check(result, f"launching {self.name}")
