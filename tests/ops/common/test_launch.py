"""Launches pick the kernel that Triton would pick, on a machine whose GPU is made up."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton.compiler
from triton import knobs
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from espformer.ops.common import triton as launch
from espformer.ops.common.triton import Launch

DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.bool)
SIZES = (0, 1, 15, 16, 17, 1024, 2**31, 2**40)


class Pointer:
    """A tensor as a launch sees it."""

    def __init__(self, dtype: torch.dtype, address: int, device: int) -> None:
        self.dtype, self.address, self.device = dtype, address, device

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.device


class Driver:
    """A driver whose streams are numbered by device."""

    device = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 + device


launched: list[tuple[Any, ...]] = []


class Compiled(triton.compiler.CompiledKernel):
    """A kernel that writes down how it was launched."""

    packed_metadata = metadata = hash = None
    module = "loaded"

    def __init__(self, src: Any) -> None:
        self.src, self.name = src, "kernel"
        self.function = self  # Triton keeps one object for all that it takes for the same
        self._run = self.write_down

    def write_down(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        _, metadata, enter, leave, *arguments = rest
        for hook in (enter, leave):
            if hook is not None:
                hook(metadata)
        given = [a.data_ptr() if isinstance(a, Pointer) else a for a in arguments]
        launched.append(((x, y, z), stream, function, given))


def sizes_and_pointers(x_ptr, y_ptr, N, M, scale, flag, z_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[JITFunction[Any]]:
    monkeypatch.setattr(launch, "DIRECT", True)
    monkeypatch.setattr(triton.compiler, "compile", lambda src, **_: Compiled(src))
    before = driver._active
    driver.set_active(Driver())
    launched.clear()
    yield JITFunction(sizes_and_pointers, do_not_specialize=("M",))
    driver._active = before


def drawn_pointers(draw: random.Random, device: int = 0) -> list[Pointer | None]:
    """Three, of some dtype and alignment each, or None."""
    return [
        None
        if draw.random() < 0.2
        else Pointer(draw.choice(DTYPES), 1024 + draw.choice((0, 0, 0, 4, 8)), device)
        for _ in range(3)
    ]


def drawn_arguments(draw: random.Random) -> dict[str, Any]:
    return {
        "N": draw.choice(SIZES),
        "M": draw.choice(SIZES),
        "scale": draw.choice((0.5, 1.0, 2.0)),
        "flag": draw.choice((True, False)),
        "BLOCK": draw.choice((16, 32, "text", (1.0, 2.0), None)),
        "num_warps": draw.choice((1, 4)),
    }


@pytest.mark.parametrize("seed", range(40))
def test_the_kernel_is_the_one_that_triton_picks(kernel: JITFunction[Any], seed: int) -> None:
    """Whatever was launched before with other tensors, and every time."""
    draw = random.Random(seed)
    launches = [Launch(kernel, (seed + 1,), **drawn_arguments(draw)) for _ in range(3)]
    for _ in range(60):
        ours, pointers = draw.choice(launches), drawn_pointers(draw)
        ours(*pointers)
        arguments = dict(zip(("x_ptr", "y_ptr", "z_ptr"), pointers, strict=True))
        kernel[ours.grid](**arguments, **ours.arguments)
        found, expected = launched[-2:]
        assert found == expected
        assert found[2] is expected[2]


def test_known_tensors_do_not_pass_through_triton(
    kernel: JITFunction[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = Pointer(torch.float32, 1024, 0)
    ours = Launch(kernel, (2, 3), **drawn_arguments(random.Random(0)))
    ours(x, x, None)
    monkeypatch.setattr(JITFunction, "run", None)
    ours(x, Pointer(torch.float32, 2048, 0), None)
    assert launched[1][0] == (2, 3, 1)
    assert launched[1][3][:2] == [1024, 2048]
    for other in (None, Pointer(torch.int32, 1024, 0), Pointer(torch.float32, 1028, 0)):
        with pytest.raises(TypeError, match="not callable"):
            ours(x, other, None)


def test_every_device_has_its_kernel_and_its_stream(kernel: JITFunction[Any]) -> None:
    ours = Launch(kernel, (1,), **drawn_arguments(random.Random(0)))
    for device in (0, 1, 0, 1):
        driver.active.device = device
        ours(*(Pointer(torch.float32, 1024, device) for _ in range(3)))
    assert [stream for _, stream, _, _ in launched] == [100, 101, 100, 101]
    functions = [function for _, _, function, _ in launched]
    assert functions[0] is functions[2]
    assert functions[1] is functions[3]
    assert functions[0] is not functions[1]


def test_hooks_see_every_launch(kernel: JITFunction[Any]) -> None:
    ours = Launch(kernel, (1,), **drawn_arguments(random.Random(0)))
    pointers = [Pointer(torch.float32, 1024, 0) for _ in range(3)]
    seen: list[Any] = []
    ours(*pointers)
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        ours(*pointers)
        ours(*pointers)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    ours(*pointers)
    assert [metadata.data["name"] for metadata in seen] == ["kernel", "kernel"]
    assert len(launched) == 4


def test_triton_launches_where_it_is_not_known(
    kernel: JITFunction[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "DIRECT", False)
    ours = Launch(kernel, (1,), **drawn_arguments(random.Random(0)))
    for _ in range(2):
        ours(*(Pointer(torch.float32, 1024, 0) for _ in range(3)))
    assert len(launched) == 2
    assert not ours.compiled


def test_a_version_that_is_not_known_is_told_once(
    kernel: JITFunction[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "DIRECT", False)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "VERSION", (9, 9))
    launch._tell_of_version.cache_clear()
    pointers = [Pointer(torch.float32, 1024, 0) for _ in range(3)]
    first, second = (Launch(kernel, (1,), **drawn_arguments(random.Random(i))) for i in range(2))
    with pytest.warns(RuntimeWarning, match=r"with triton 3\.6 and 3\.7, .* are slower"):
        first(*pointers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second(*pointers)
    launch._tell_of_version.cache_clear()


def test_the_installed_version_is_known() -> None:
    """Of a new one, read `CompiledKernel.run` and what its backend compiles tensors for."""
    assert launch.VERSION in launch.KNOWN


def test_wrong_numbers_of_tensors_are_refused(kernel: JITFunction[Any]) -> None:
    ours = Launch(kernel, (1,), **drawn_arguments(random.Random(0)))
    with pytest.raises(ValueError, match="zip"):
        ours(None, None)


def test_calls_of_a_known_shape_do_not_pass_through_triton() -> None:
    """Of attention as a whole; and it does not take more launches than it did."""
    tool = Path(__file__).parents[3] / "tools" / "launch_cost.py"
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, tool, "--counts"], capture_output=True, text=True, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert {name: counts["by Triton"] for name, counts in found.items()} == dict.fromkeys(found, 0)
    launches = {name: counts["launches"] for name, counts in found.items()}
    most = {"mean": 14, "costs": 31, "balanced": 15, "squared": 16, "hard, forward": 3}
    assert launches == most | {"sinkhorn": 12}
