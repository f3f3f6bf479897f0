"""Every kernel compiles for Hopper on a machine without a GPU, and nothing spills by accident."""

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
from espformer.ops.triton.grad import grad_kernel
from espformer.ops.triton.mix import mix_kernel

POINTERS = {name: "*i32" for name in ("ORDER", "X_ORDER", "P_ORDER", "OUT_ORDER")}
SIZES = {name: "i32" for name in ("N", "L", "CHUNKS", "SIDE")}


def build(kernel, constants):
    signature = {
        name: "constexpr" if name in constants else {**POINTERS, **SIZES}.get(name, "*fp32")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constants)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    print(kernel.__name__, constants["COMPLEX"], len(compiled.asm["cubin"]))


for table in (ABSOLUTE, GAUSSIAN[3]):
    numbers = tuple(
        number
        for w, p in zip(table.weights, table.poles)
        for number in (complex(w).real, complex(w).imag, complex(p).real, complex(p).imag)
    )
    base = dict(TABLE=numbers, POLES=len(table.poles), COMPLEX=table is not ABSOLUTE)
    base |= dict(BLOCK_L=2, BLOCK_D=64, D=64, C=4)
    rows = dict(GATHER=True, SCALED=False, EVEN=False, X_SCALE=None)
    build(inflow_kernel, base | rows | dict(TIES=True))
    build(scan_kernel, base | dict(TIES=True, AHEAD=2))
    mix = dict(HAS_SCALE=True, OUT_ORDER=None, DOT=None, TO="ranks")
    build(mix_kernel, base | rows | mix)
    build(mix_kernel, base | rows | dict(HAS_SCALE=False, SCALE=None, DOT=None, TO="tokens"))
    grad = dict(X_GATHER=False, X_SCALED=False, P_GATHER=True, P_SCALED=True, EVEN=True)
    grad |= dict(HAS_SCALE=True, HAS_AGREE=True, HAS_ALIGN=True, TO="tokens")
    build(grad_kernel, base | grad | dict(X_ORDER=None, X_SCALE=None))
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
    assert len(run.stdout.splitlines()) == 10
