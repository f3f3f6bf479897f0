"""The Sinkhorn kernels compile without a GPU: on Hopper for its tensor cores, without spilling."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

PROGRAM = """
import json, re, subprocess, sys, tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from espformer.ops.sinkhorn import triton as sinkhorn

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
SIZES = {"N", "M", "rows", "heads", "last", "updates", "my_last", "their_last"}
TOKENS = {f"{name}_ptr" for name in "x y x2 y2 q k v up dv dx".split()}


def registers(cubin):
    # Spilled registers lie on the stack: its size in bytes, or None without the tool.
    if not TOOL.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        usage = [str(TOOL), "-res-usage", file.name]
        text = subprocess.run(usage, capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\\d+)", text.stdout + text.stderr).group(1))


def build(kernel, dtype, meta, **more):
    constants = meta | more
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    factors = "*bf16" if dtype != "fp32" else "*fp32"

    def kind(name):
        if name in constants:
            return "constexpr"
        if name in SIZES:
            return "i32"
        if name in ("scale", "to_tokens"):
            return "fp32"
        output_is_token = kernel in (sinkhorn.output_kernel, sinkhorn.delta_kernel)
        if name in TOKENS or (name == "out_ptr" and output_is_token):
            return f"*{dtype}"
        if "factors" in name:
            return factors
        return "*i1" if name == "mask_ptr" else "*fp32"

    signature = {name: kind(name) for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    variant = {name: x for name, x in more.items() if isinstance(x, bool)}
    print(json.dumps({
        "kernel": f"{kernel.__name__} {variant}", "stack": registers(compiled.asm["cubin"]),
        "wgmma": "wgmma.mma_async" in compiled.asm["ptx"], "shared": compiled.metadata.shared,
    }))


dtype, (width, updates, architecture) = sys.argv[1], map(int, sys.argv[2:])
halves, large = dtype != "fp32", architecture == 90
one = sinkhorn.constants("potential", halves, width, large=large)
build(sinkhorn.potential_kernel, dtype, one, MASKED=True)
build(sinkhorn.potential_kernel, dtype, one, MASKED=False, mask_ptr=None)
build(sinkhorn.pull_kernel, dtype, one, HAS_DIRECT=True)
build(sinkhorn.pull_kernel, dtype, one, HAS_DIRECT=False, direct_ptr=None)
two = sinkhorn.constants("output", halves, width, width, large=large)
build(sinkhorn.output_kernel, dtype, two, LAST_IS_ROWS=True, MASKED=True)
build(sinkhorn.output_kernel, dtype, two, LAST_IS_ROWS=False, MASKED=False, mask_ptr=None)
for pull in (True, False):
    build(sinkhorn.value_grad_kernel, dtype, two, PULL=pull)
warps = {"num_warps": 4, "num_stages": 2}
block = two["BLOCK_W"]
build(sinkhorn.delta_kernel, dtype, warps, WIDTH=width, BLOCK_W=block, ROWS=4096 // block)
rank = sinkhorn.rank_of(updates, halves)
three = sinkhorn.constants("grad", halves, width, width, large=large) | {"RANK": rank}
for of_queries, factored in ((True, True), (False, True), (True, False)):
    build(sinkhorn.score_grad_kernel, dtype, three, OF_QUERIES=of_queries, FACTORED=factored)
build(sinkhorn.factors_kernel, dtype, warps, OF_QUERIES=True, SPLIT=halves, RANK=rank, BLOCK=1024)
"""

# For one program: on Hopper, and on the GPUs of workstations.
SHARED_MEMORY = {90: 227 * 1024, 89: 99 * 1024}


def build_all(dtype: str, width: int, updates: int, architecture: int) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    numbers = [str(number) for number in (width, updates, architecture)]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, dtype, *numbers],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    built = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(built) == 13
    for one in built:
        assert one["shared"] <= SHARED_MEMORY[architecture], one
    return built


@pytest.mark.parametrize(
    ("dtype", "width", "updates"),
    [
        ("bf16", 64, 3),
        pytest.param("fp16", 16, 5, marks=pytest.mark.slow),
        pytest.param("bf16", 80, 21, marks=pytest.mark.slow),
        pytest.param("bf16", 256, 42, marks=pytest.mark.slow),
        pytest.param("fp32", 64, 3, marks=pytest.mark.slow),
        pytest.param("fp32", 96, 21, marks=pytest.mark.slow),
        pytest.param("fp32", 256, 21, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_for_hopper(dtype: str, width: int, updates: int) -> None:
    for one in build_all(dtype, width, updates, 90):
        if one["kernel"].startswith(("factors_kernel", "delta_kernel")):
            continue
        assert one["wgmma"] or (dtype == "fp32" and width > 64), one
        rare = "'FACTORED': False" in one["kernel"]  # potentials that change by more than 2^24
        assert not one["stack"] or rare or (dtype == "fp32" and one["stack"] <= 16), one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "width", "updates"),
    [("bf16", 128, 21), ("bf16", 256, 21), ("fp32", 64, 3), ("fp32", 256, 21)],
)
def test_kernels_fit_in_small_multiprocessors(dtype: str, width: int, updates: int) -> None:
    build_all(dtype, width, updates, 89)
