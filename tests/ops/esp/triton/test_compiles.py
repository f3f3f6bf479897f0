"""Every kernel compiles for Hopper on a machine without a GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from espformer.ops.esp.exponentials import ABSOLUTE, GAUSSIAN
from espformer.ops.esp.triton.apply import apply_kernel, cross_kernel
from espformer.ops.esp.triton.balance import BACKWARD, FORWARD, settle_kernel
from espformer.ops.esp.triton.column import column_kernel
from espformer.ops.esp.triton.gather import gather_kernel, pair_kernel
from espformer.ops.esp.triton.launch import REGISTERS, state_table
from espformer.ops.esp.triton.matching import compose_kernel
from espformer.ops.esp.triton.norms import centre_grad_kernel, centre_kernel
from espformer.ops.esp.triton.norms import norm_grad_kernel, norm_kernel
from espformer.ops.esp.triton.ranking import match_kernel, pack_kernel, rank_kernel
from espformer.ops.esp.triton.ranking import meet_kernel, unpack_kernel, unrank_kernel
from espformer.ops.esp.triton.sorting import merge_kernel, run_kernel, sort_config
from espformer.ops.esp.triton.states import link_kernel, scan_kernel, sums_kernel
import triton.language as tl

INDICES = {"ORDER", "K_ORDER", "Q_ORDER", "INDEX", "FROM", "TO", "WORDS", "LENGTHS"}
SIZES = {"N", "L", "HEADS", "CHUNKS", "START", "COUNT", "D", "BLOCKS", "STRIDE", "ROWS", "TOKENS"}
SIZES |= {"KEYS", "QUERIES", "SEGMENTS", "LENGTH"}
WARPS = 4


def build(kernel, constants, warps=WARPS, registers=None, **types):
    def kind(name):
        if name in constants:
            return "constexpr"
        if name in types:
            return types[name]
        return "*i32" if name in INDICES else "i32" if name in SIZES else "*fp32"

    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    signature = {name: kind(name) for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    target = GPUTarget("cuda", 90, 32)
    compiled = compile(source, target=target, options={"num_warps": warps, "maxnreg": registers})
    assert len(compiled.asm["cubin"]) > 0
    print(kernel.__name__)
    return compiled


def build_chunks(table, row, chunk, alone=False, width=64):
    complex_ = table is not ABSOLUTE
    exact = row == "*fp32"
    rows = 4 * len(table.poles) if complex_ else 4
    base = dict(COMPLEX=complex_, ROWS=rows, BLOCK_D=32, D=width, SPAN=chunk, C=chunk)
    base["TABLE"] = state_table("squared" if complex_ else "absolute", exact)
    if alone:  # one chunk, and no states
        base |= dict(ROWS=0, X_STATES=None, G_STATES=None, W_STATES=None)
    tokens = dict(X=row, G=row, warps=max(1, chunk // 16))
    if not (complex_ or exact or alone):
        names = ("STATES", "NEXT_STATES", "FROM", "X_STATES", "W_STATES", "G_STATES")
        tokens |= {name: "*bf16" for name in names}
    for through in () if alone else (False, True):
        more = dict(EVEN=through, THROUGH=through)
        build(sums_kernel, base | more | (dict(X_SCALE=None) if through else {}), **tokens)
    scan = dict(BLOCK_R=4 if complex_ else 2, AHEAD=2, EXACT=exact, THROUGH=not complex_)
    for survey in () if alone else (False, True):
        build(scan_kernel, base | scan | dict(SURVEY=survey), **tokens | dict(warps=1))
    if complex_ and not alone:
        build(link_kernel, dict(D=width, ROWS=rows, BLOCK_D=32), warps=1)
    for even in (False, True):
        more = base | dict(EVEN=even, ATOMIC=even)
        more |= dict(FIRST=None, FINAL=None) if even else {}
        build(cross_kernel, more, **tokens)
        scales = dict(TOTALS=None, D_SCALE=None)
        final = dict(D_FINAL=None) if even else {}
        none = dict(G=None, G_STATES=None, D_VALUES=None, D_FINAL=None, STRETCH=None)
        build(apply_kernel, more | none | scales, **tokens)
        build(apply_kernel, more | final | dict(OUT=None), **tokens)
        build(apply_kernel, more | final | scales | dict(STRETCH=None), **tokens)
        every = build(apply_kernel, more | final | dict(TOTALS=None), **tokens)
        if width > 32:  # slope, dots, stretch and the factor's live through all blocks of columns
            carried = every.asm["ttir"].split("scf.for")[1].split("->")[1].split("{")[0]
            assert carried.count("tensor<") == (3 if even else 4), carried


# As they are launched: whole rows, two states, bounded registers.
base = dict(COMPLEX=False, ROWS=2, BLOCK_D=64, D=64, SPAN=64, C=64)
base |= dict(TABLE=state_table("absolute", False), EVEN=True, ATOMIC=True, FIRST=None, FINAL=None)
rows = dict(X="*bf16", G="*bf16", X_STATES="*bf16", W_STATES="*bf16", G_STATES="*bf16")
none = dict(G=None, G_STATES=None, D_VALUES=None, D_FINAL=None, TOTALS=None, D_SCALE=None)
none |= dict(STRETCH=None)
build(apply_kernel, base | none, registers=REGISTERS["absolute"]["rows"], **rows)
every = dict(ROWS=4, D_FINAL=None, TOTALS=None)
build(apply_kernel, base | every, registers=REGISTERS["absolute"]["all"], **rows)
build(apply_kernel, base | every | dict(STRETCH=None), **rows)
build(apply_kernel, base | every | dict(C=16, EVEN=False), warps=1, **rows)
scan = dict(BLOCK_R=1, AHEAD=8, EXACT=False, THROUGH=True, ENDS=None, SURVEY=False)
build(scan_kernel, base | scan, warps=1, STATES="*bf16", FROM="*bf16")
for table in (ABSOLUTE, GAUSSIAN[3]):
    build_chunks(table, "*bf16", 64)
    build_chunks(table, "*bf16", 16, alone=True)
build_chunks(ABSOLUTE, "*fp16", 32, width=80)
build_chunks(ABSOLUTE, "*fp32", 16, width=256)
build_chunks(GAUSSIAN[4], "*fp32", 16)
for table in (ABSOLUTE, GAUSSIAN[4]):
    numbers = tuple(
        number
        for w, p in zip(table.weights, table.poles)
        for number in (complex(w).real, complex(w).imag, complex(p).real, complex(p).imag)
    )
    poles = dict(TABLE=numbers, POLES=len(table.poles), COMPLEX=table is not ABSOLUTE)
    poles |= dict(BLOCK=256, EXACT=True)
    build(column_kernel, poles | dict(LENGTHS=None, Y=None), warps=1)
    build(column_kernel, poles | dict(X=None, P=None, SLOPE=None), warps=1)
    build(column_kernel, poles | dict(X=None), warps=1)
    for exponents, absent in ((FORWARD, dict(UPSTREAM=None, SCALE=None)), (BACKWARD, {})):
        steps = dict(EXPONENTS=exponents, STEPS=len(exponents))
        build(settle_kernel, poles | steps | absent, warps=1)
    build(norm_kernel, poles, warps=1)
    build(norm_kernel, poles | dict(FACTOR=None), warps=1)
    build(norm_grad_kernel, poles | dict(ATOMIC=False), warps=1)
    build(norm_grad_kernel, poles | dict(ATOMIC=True, FACTOR=None, D_FACTOR=None), warps=1)
centre = dict(MASKED=True, D=64, BLOCK_N=64, BLOCK_D=64)
half = dict(scale="fp32", MASK="*u8", X="*bf16", ROWS="*bf16", D_ROWS="*bf16", DX="*bf16")
build(centre_kernel, centre, **half)
build(centre_grad_kernel, centre, **half)
rows = dict(D=64, BLOCK_N=512, BLOCK_D=64)
build(gather_kernel, rows, warps=32, X="*bf16")
for distance in (False, True):
    build(pair_kernel, rows | dict(DISTANCE=distance), warps=32, X="*bf16", Y="*bf16")
build(compose_kernel, dict(BLOCK=256), OUT="*i32")
for kind in ("*i16", "*i32"):
    pack = dict(MASKED=True, BLOCK_N=64, BLOCK_D=64)
    build(pack_kernel, pack, X="*bf16", Y="*bf16", MASK="*u8", OUT=kind)
half = dict(HALF=tl.bfloat16, INFINITY=0x7F80, MASKED=True)
for tokens in (100, 1000):
    sort = sort_config(tokens)
    warps = sort["num_warps"]
    sort = {key: value for key, value in sort.items() if key != "num_warps"}
    build(rank_kernel, half | sort, warps, scale="fp32", BITS="*i16")
    types = dict(share="fp32", BITS="*i16", OUT="*i32")
    match = build(match_kernel, dict(INFINITY=0x7F80) | sort, warps, **types)
    # Two names for one value before a loop, and it would carry one of them: the queries were lost.
    carried = match.asm["ttir"].split("scf.for")[1].split("->")[1].split("{")[0]
    assert carried.count("tensor<") == 2, carried
sort = sort_config(1024)
build(run_kernel, {k: v for k, v in sort.items() if k != "num_warps"}, sort["num_warps"])
build(merge_kernel, dict(BLOCK=1024, DIMS=sort["DIMS"]), sort["num_warps"], OUT="*i32")
build(unpack_kernel, half | dict(BLOCK=1024), scale="fp32")
build(meet_kernel, dict(INFINITY=0x7F80, BLOCK=1024, DIMS=10), warps=1, OUT="*i32")
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
    assert len(run.stdout.splitlines()) == 132
