"""CUDA C++ kernels: compiled by NVRTC, which comes with torch, and launched through the driver.

Nothing has to be installed, neither a compiler nor headers. A kernel is compiled for the GPU of a
call when it is first needed, in a second or two; Triton's cache keeps the machine code.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import site
import struct
from collections.abc import Mapping, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver as triton_driver
from triton.runtime.cache import get_cache_manager

DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
FREE_SHARED_BYTES = 48 << 10  # what a kernel may use without asking
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class CudaError(RuntimeError):
    """A call of the driver or of the compiler failed."""


class Limits(NamedTuple):
    """Of a GPU."""

    processors: int
    shared_bytes: int  # that a block may ask for


@functools.cache
def limits(device: int) -> Limits:
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", FREE_SHARED_BYTES)
    return Limits(properties.multi_processor_count, shared)


@functools.cache
def _compiler() -> ctypes.CDLL:
    """NVRTC of the CUDA version that torch was built for: torch's own copy, or the system's."""
    if torch.version.cuda is None:
        raise CudaError("this torch was not built for CUDA")
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    torch_directory = Path(torch.__file__).parent
    places = [torch_directory / "lib" / name]
    for packages in dict.fromkeys([str(torch_directory.parent), *site.getsitepackages()]):
        places += sorted(Path(packages).glob(f"nvidia/*/lib/{name}"))
    for place in (*map(str, places), name):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise CudaError(f"{name}, the compiler that comes with torch for CUDA, was not found")


@functools.cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchKernel.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
    return driver


def _check(result: int, what: str) -> None:
    if result:
        text = c_char_p()
        _driver().cuGetErrorString(result, byref(text))
        told = text.value.decode() if text.value else "unknown error"
        raise CudaError(f"{what}: {told} (CUDA error {result})")


@functools.cache
def _target(device: int) -> str:
    """The newest architecture that NVRTC knows and that runs on the device."""
    nvrtc, count = _compiler(), c_int()
    nvrtc.nvrtcGetNumSupportedArchs(byref(count))
    known = (c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(known)
    major, minor = torch.cuda.get_device_capability(device)
    fitting = [arch for arch in known if 10 * major <= arch <= 10 * major + minor]
    if not fitting:
        raise CudaError(
            f"NVRTC {'.'.join(map(str, _version()))} does not know GPUs of compute capability "
            f"{major}.{minor}"
        )
    return f"sm_{max(fitting)}"


def _version() -> tuple[int, int]:
    major, minor = c_int(), c_int()
    _compiler().nvrtcVersion(byref(major), byref(minor))
    return major.value, minor.value


def machine_code(source: Path, options: Sequence[str]) -> bytes:
    """A source compiled with some options of NVRTC: from the cache, if it is there."""
    text, name = source.read_bytes(), f"{source.stem}.cubin"
    state = "\0".join([*options, str(_version())]).encode() + b"\0" + text
    cache = get_cache_manager(hashlib.sha256(state).hexdigest())
    kept = cache.get_file(name)
    if kept is not None:
        return Path(kept).read_bytes()
    code = _compile(source.name, text, options)
    cache.put(code, name)
    return code


def _compile(name: str, text: bytes, options: Sequence[str]) -> bytes:
    nvrtc, program, size = _compiler(), c_void_p(), c_size_t()
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


@functools.cache
def _primary_context(device: int) -> c_void_p:
    handle, context = c_int(), c_void_p()
    _check(_driver().cuDeviceGet(byref(handle), device), f"finding GPU {device}")
    retained = _driver().cuDevicePrimaryCtxRetain(byref(context), handle)
    _check(retained, f"the context of GPU {device}")
    return context


def _call(device: int, what: str, name: str, *arguments: Any) -> None:
    """A call of the driver, in the context of torch; a new thread has none yet."""
    function = getattr(_driver(), name)
    result = function(*arguments)
    if result == INVALID_CONTEXT:
        _check(_driver().cuCtxSetCurrent(_primary_context(device)), what)
        result = function(*arguments)
    _check(result, what)


@functools.cache
def _function(
    source: Path, name: str, definitions: tuple[tuple[str, int], ...], device: int
) -> c_void_p:
    """A kernel, which may ask for all the shared memory of a block."""
    options = [f"--gpu-architecture={_target(device)}", "--std=c++17"]
    options += [f"-D{key}={value}" for key, value in definitions]
    module, function = c_void_p(), c_void_p()
    code = machine_code(source, options)
    _call(device, f"loading {source.name}", "cuModuleLoadData", byref(module), code)
    arguments = byref(function), module, name.encode()
    _call(device, f"finding {name}", "cuModuleGetFunction", *arguments)
    most = limits(device).shared_bytes
    what = f"asking for {most} bytes of shared memory for {name}"
    _call(device, what, "cuFuncSetAttribute", function, DYNAMIC_SHARED_BYTES, most)
    return function


class CudaLaunch:
    """A kernel of a source, with its grid and all arguments but its tensors.

    A kernel has a single argument: a struct of pointers, in the order of the tensors of a call, and
    then of 32-bit integers, `numbers`. Tensors are contiguous and on the current device, which
    :func:`espformer.ops.common.operators.operator` sees to.
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
        if not blocks:
            return
        function = _function(self.source, self.name, self.definitions, device)
        packed = self.packed(tensors)
        arguments = (c_void_p * 1)(ctypes.addressof(packed))
        stream = triton_driver.active.get_current_stream(device)
        _call(
            device, f"launching {self.name}", "cuLaunchKernel", function, blocks, 1, 1, threads, 1,
            1, shared, stream, arguments, None,
        )  # fmt: skip
