"""Every kernel compiles for Hopper on a machine without a GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from espformer.ops.exponentials import ABSOLUTE, GAUSSIAN
from espformer.ops.triton.chunks import inflow_kernel, scan_kernel
from espformer.ops.triton.column import column_kernel
from espformer.ops.triton.gather import dot_kernel, gather_kernel
from espformer.ops.triton.grad import grad_kernel
from espformer.ops.triton.launch import state_table
from espformer.ops.triton.matching import match_kernel
from espformer.ops.triton.mix import mix_kernel
from espformer.ops.triton.norms import norm_grad_kernel, norm_kernel
from espformer.ops.triton.ranking import pack_kernel, unpack_kernel, unrank_kernel
import triton.language as tl

INDICES = {"ORDER", "X_ORDER", "P_ORDER", "OUT_ORDER", "INDEX", "FROM", "TO", "WORDS", "LENGTHS"}
SIZES = {"N", "L", "HEADS", "CHUNKS", "D", "BLOCKS"}
WARPS = 4


def build(kernel, constants, warps=WARPS, **types):
    def kind(name):
        if name in constants:
            return "constexpr"
        if name in types:
            return types[name]
        return "*i32" if name in INDICES else "i32" if name in SIZES else "*fp32"

    signature = {name: kind(name) for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    target = GPUTarget("cuda", 90, 32)
    compiled = compile(source, target=target, options={"num_warps": warps})
    assert len(compiled.asm["cubin"]) > 0
    print(kernel.__name__)


def build_chunks(table, row, chunk):
    complex_ = table is not ABSOLUTE
    rows = 4 * len(table.poles) if complex_ else 4
    base = dict(COMPLEX=complex_, ROWS=rows, BLOCK_D=64, D=64, C=chunk)
    base["TABLE"] = state_table("squared" if complex_ else "absolute", row == "*fp32")
    plain = dict(GATHER=True, SCALED=False, EVEN=False, X_SCALE=None)
    build(inflow_kernel, base | plain, X=row)
    scan = dict(BLOCK_R=4 if complex_ else 2, AHEAD=2, EXACT=row == "*fp32")
    build(scan_kernel, base | scan, warps=1)
    mix = plain | dict(SCALED=True, HAS_SCALE=True, NEXT_ROWS=rows)
    mix |= dict(WEIGHTED=False, WEIGHT=None, OUT_ORDER=None, DOT=None, TO="ranks")
    del mix["X_SCALE"]
    build(mix_kernel, base | mix, X=row, OUT=row)
    end = dict(GATHER=False, ORDER=None, SCALED=False, X_SCALE=None, HAS_SCALE=False, SCALE=None)
    end |= dict(WEIGHTED=True, NEXT_ROWS=0, NEXT_S=None, NEXT_STATES=None)
    build(mix_kernel, base | end | dict(TO="tokens", DOT=None, EVEN=True), X=row)
    build(mix_kernel, base | end | dict(TO="dot", EVEN=True), X=row, OUT=row)
    grad = dict(X_GATHER=False, X_SCALED=False, X_ORDER=None, X_SCALE=None, P_GATHER=True)
    grad |= dict(P_SCALED=True, HAS_SCALE=True, WEIGHTED=True, HAS_AGREE=True, HAS_ALIGN=True)
    ranks = dict(TO="ranks", OUT_ORDER=None, NEXT_ROWS=rows, EVEN=False)
    build(grad_kernel, base | grad | ranks, X=row, P=row, OUT=row)
    tokens = dict(TO="tokens", NEXT_ROWS=0, NEXT_S=None, NEXT_STATES=None, EVEN=True)
    build(grad_kernel, base | grad | tokens, X=row, P=row)


for table in (ABSOLUTE, GAUSSIAN[3]):
    build_chunks(table, "*bf16", 64)
build_chunks(GAUSSIAN[4], "*fp32", 16)
for table in (ABSOLUTE, GAUSSIAN[4]):
    numbers = tuple(
        number
        for w, p in zip(table.weights, table.poles)
        for number in (complex(w).real, complex(w).imag, complex(p).real, complex(p).imag)
    )
    poles = dict(TABLE=numbers, POLES=len(table.poles), COMPLEX=table is not ABSOLUTE)
    poles |= dict(BLOCK=256, EXACT=True)
    build(column_kernel, poles | dict(GRAD=False, P=None, SLOPE=None), warps=1)
    build(column_kernel, poles | dict(GRAD=True), warps=1)
build(gather_kernel, dict(PER_SLICE=False, WEIGHTED=True, BLOCK_N=32, BLOCK_D=64), X="*bf16")
build(dot_kernel, dict(BLOCK_N=32, BLOCK_D=64), X="*bf16", Y="*bf16")
build(match_kernel, dict(BLOCK=256), OUT="*i32")
build(norm_kernel, dict(BLOCK=256))
build(norm_grad_kernel, dict(ATOMIC=True, BLOCK=256))
build(pack_kernel, dict(MASKED=True, BLOCK_N=64, BLOCK_D=64), X="*bf16", MASK="*u8", OUT="*i32")
sort = dict(HALF=tl.bfloat16, MASKED=True, SORT=True, BLOCK_N=256)
build(unpack_kernel, sort, warps=1, scale="fp32")
build(unrank_kernel, dict(BLOCK_N=128, BLOCK_L=16), scale="fp32", DX="*bf16")
"""


def test_kernels_compile_for_hopper() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(run.stdout.splitlines()) == 33
