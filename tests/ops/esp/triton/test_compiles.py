"""Every kernel compiles for Hopper on a machine without a GPU."""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import espformer.ops

pytest.importorskip("triton")

PROGRAM = """
import re
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from espformer.ops.esp.exponentials import ABSOLUTE, GAUSSIAN
from espformer.ops.esp.triton.costs import centre_grad_kernel, centre_kernel
from espformer.ops.esp.triton.costs import norm_costs_grad_kernel, norm_costs_kernel
from espformer.ops.esp.triton.hard_plan import compose_kernel, gather_kernel, match_kernel
from espformer.ops.esp.triton.hard_plan import match_runs_kernel, pair_kernel
from espformer.ops.esp.triton.normalise import BACKWARD, FORWARD, balance_kernel, column_kernel
from espformer.ops.esp.triton.numbers import block_config, short_numbers_grad_kernel
from espformer.ops.esp.triton.numbers import short_numbers_kernel, short_rows_grad_kernel
from espformer.ops.esp.triton.numbers import short_rows_kernel, sort_block_config
from espformer.ops.esp.triton.short_columns import dense_column_kernel, dense_norm_costs_grad_kernel
from espformer.ops.esp.triton.short_columns import dense_norm_costs_kernel, short_column_kernel
from espformer.ops.esp.triton.short_plan import short_apply_kernel
from espformer.ops.esp.triton.soft_plan import REGISTERS, apply_kernel, cross_kernel, link_kernel
from espformer.ops.esp.triton.soft_plan import scan_kernel, state_table, sums_kernel
from espformer.ops.esp.triton.sort import back_project_kernel, merge_runs_kernel, pack_kernel
from espformer.ops.esp.triton.sort import point_grad_kernel, project_kernel, rank_kernel
from espformer.ops.esp.triton.sort import sort_config, sort_runs_kernel, spread_kernel
from espformer.ops.esp.triton.sort import unpack_kernel
import triton.language as tl

INDICES = {"order_ptr", "key_order_ptr", "query_order_ptr", "index_ptr", "from_ptr", "to_ptr"}
INDICES |= {"words_ptr", "lengths_ptr"}
SIZES = {"N", "L", "HEADS", "CHUNKS", "START", "COUNT", "D", "BLOCKS", "STRIDE", "TOKENS"}
SIZES |= {"PAIRS", "KEYS", "QUERIES", "SEGMENTS", "LENGTH", "D8"}
WARPS = 4
EVERY_VARIANT = sys.argv[1:] == ["every variant"]
built = set()


def build(kernel, constants, warps=WARPS, registers=None, aligned=False, **types):
    if kernel in built and not EVERY_VARIANT:
        return None
    built.add(kernel)

    def kind(name):
        if name in constants:
            return "constexpr"
        if name in types:
            return types[name]
        return "*i32" if name in INDICES else "i32" if name in SIZES else "*fp32"

    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    signature = {name: kind(name) for name in kernel.arg_names}
    pointers = [i for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*"]
    attributes = {(i,): [["tt.divisibility", 16]] for i in pointers if aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", 90, 32)
    compiled = compile(source, target=target, options={"num_warps": warps, "maxnreg": registers})
    assert len(compiled.asm["cubin"]) > 0
    print(kernel.__name__)
    return compiled


def assert_lanes_agree(compiled):
    # A sum over lanes that is fused with the products that it adds differs from lane to lane. That
    # takes rows with one number for every lane: at most 32 of them.
    ptx = compiled.asm["ptx"].splitlines()
    for number, line in enumerate(ptx):
        exchanged = re.search(r"shfl.sync.bfly.b32\\s+(%r\\d+),", line)
        users = [x for x in ptx[number + 1 : number + 20] if exchanged and exchanged[1] + ";" in x]
        assert not any("fma" in x for x in users), users


def build_chunks(table, row, chunk, alone=False, width=64):
    complex_ = table is not ABSOLUTE
    exact = row == "*fp32"
    rows = 4 * len(table.poles) if complex_ else 4
    base = dict(COMPLEX=complex_, STATE_ROWS=rows, BLOCK_D=32, D=width, SPAN=chunk, C=chunk)
    base["TABLE"] = state_table("squared" if complex_ else "absolute", exact)
    if alone:  # one chunk, and no states
        base |= dict(STATE_ROWS=0, x_states_ptr=None, g_states_ptr=None, w_states_ptr=None)
    tokens = dict(x_ptr=row, g_ptr=row, warps=max(1, chunk // 16))
    if not (complex_ or exact or alone):
        names = ("", "next_", "prev_", "x_", "w_", "g_")
        tokens |= {f"{name}states_ptr": "*bf16" for name in names}
    for both in () if alone else (False, True):
        more = dict(EVEN=both, WITH_NEXT=both)
        build(sums_kernel, base | more | (dict(scale_ptr=None) if both else {}), **tokens)
    scan = dict(BLOCK_R=4 if complex_ else 2, AHEAD=2, FP32_ROWS=exact, WITH_LINKS=not complex_)
    for survey in () if alone else (False, True):
        build(scan_kernel, base | scan | dict(ENDS_ONLY=survey), **tokens | dict(warps=1))
    if complex_ and not alone:
        build(link_kernel, dict(D=width, STATE_ROWS=rows, BLOCK_D=32), warps=1)
    for even in (False, True):
        more = base | dict(EVEN=even, ATOMIC=even)
        more |= dict(key_scale_ptr=None, query_scale_ptr=None) if even else {}
        build(cross_kernel, more, **tokens)
        scales = dict(totals_ptr=None, d_mid_scale_ptr=None)
        query_scale = dict(d_query_scale_ptr=None) if even else {}
        none = dict(g_ptr=None, g_states_ptr=None, d_points_ptr=None, d_query_scale_ptr=None)
        none |= dict(d_inv_bandwidth_ptr=None)
        build(apply_kernel, more | none | scales, **tokens)
        build(apply_kernel, more | query_scale | dict(out_ptr=None), **tokens)
        build(apply_kernel, more | query_scale | scales | dict(d_inv_bandwidth_ptr=None), **tokens)
        every = build(apply_kernel, more | query_scale | dict(totals_ptr=None), **tokens)
        if every and width != 32:
            # The slope, the dots of both scales and d_inv_bandwidth live through all blocks.
            carried = every.asm["ttir"].split("scf.for")[1].split("->")[1].split("{")[0]
            assert carried.count("tensor<") == (3 if even else 4), carried


# As they are launched: whole rows, two states, bounded registers.
base = dict(COMPLEX=False, STATE_ROWS=2, BLOCK_D=64, D=64, SPAN=64, C=64)
base |= dict(TABLE=state_table("absolute", False), EVEN=True, ATOMIC=True)
base |= dict(key_scale_ptr=None, query_scale_ptr=None)
rows = dict(x_ptr="*bf16", g_ptr="*bf16", x_states_ptr="*bf16", w_states_ptr="*bf16")
rows |= dict(g_states_ptr="*bf16")
none = dict(g_ptr=None, g_states_ptr=None, d_points_ptr=None, d_query_scale_ptr=None)
none |= dict(totals_ptr=None, d_mid_scale_ptr=None, d_inv_bandwidth_ptr=None)
build(apply_kernel, base | none, registers=REGISTERS["absolute"]["rows"], **rows)
every = dict(STATE_ROWS=4, d_query_scale_ptr=None, totals_ptr=None)
build(apply_kernel, base | every, registers=REGISTERS["absolute"]["all"], **rows)
build(apply_kernel, base | every | dict(d_inv_bandwidth_ptr=None), **rows)
build(apply_kernel, base | every | dict(C=16, EVEN=False), warps=1, **rows)
scan = dict(BLOCK_R=1, AHEAD=8, FP32_ROWS=False, WITH_LINKS=True)
scan |= dict(ends_ptr=None, ENDS_ONLY=False)
build(scan_kernel, base | scan, warps=1, states_ptr="*bf16", prev_states_ptr="*bf16")
for table in (ABSOLUTE, GAUSSIAN[3]):
    build_chunks(table, "*bf16", 64)
    build_chunks(table, "*bf16", 16, alone=True)
build_chunks(ABSOLUTE, "*fp16", 32, width=0)  # told when it is launched
build_chunks(ABSOLUTE, "*fp32", 16, width=256)
build_chunks(GAUSSIAN[4], "*fp32", 16)
for table in (ABSOLUTE, GAUSSIAN[4]):
    numbers = tuple(
        number
        for w, p in zip(table.weights, table.poles)
        for number in (complex(w).real, complex(w).imag, complex(p).real, complex(p).imag)
    )
    poles = dict(TABLE=numbers, POLES=len(table.poles), COMPLEX=table is not ABSOLUTE)
    poles |= dict(BLOCK=256)
    build(column_kernel, poles | dict(lengths_ptr=None, y_ptr=None, d_mid_ptr=None), warps=1)
    normalisers = dict(x_ptr=None, upstream_ptr=None, d_mid_ptr=None, slope_ptr=None)
    build(column_kernel, poles | normalisers, warps=1)
    build(column_kernel, poles | dict(x_ptr=None, upstream_ptr=None), warps=1)
    build(column_kernel, poles | dict(x_ptr=None, lengths_ptr=None), warps=1)
    for exponents, absent in ((FORWARD, dict(upstream_ptr=None, scale_ptr=None)), (BACKWARD, {})):
        steps = dict(EXPONENTS=exponents, STEPS=len(exponents))
        build(balance_kernel, poles | steps | absent, warps=1)
    build(norm_costs_kernel, poles, warps=1)
    build(norm_costs_kernel, poles | dict(in_scale_ptr=None), warps=1)
    build(norm_costs_grad_kernel, poles | dict(ATOMIC=False), warps=1)
    ones = dict(ATOMIC=True, in_scale_ptr=None, d_in_scale_ptr=None)
    build(norm_costs_grad_kernel, poles | ones, warps=1)
groups = dict(R=7, G=32, LEVELS=5)
build(short_column_kernel, groups | normalisers, warps=1)
build(short_column_kernel, groups | dict(x_ptr=None, upstream_ptr=None, lengths_ptr=None), warps=1)
build(short_column_kernel, groups | dict(y_ptr=None, d_mid_ptr=None, lengths_ptr=None), warps=1)
blocks = dict(BLOCKS=16, BLOCK_M=32, BLOCK_N=16)
build(dense_column_kernel, blocks | normalisers, warps=1)
build(dense_column_kernel, blocks | dict(x_ptr=None, upstream_ptr=None, lengths_ptr=None), warps=1)
build(dense_column_kernel, blocks | dict(y_ptr=None, d_mid_ptr=None, lengths_ptr=None), warps=1)
build(dense_norm_costs_kernel, blocks | dict(in_scale_ptr=None), warps=1)
build(dense_norm_costs_grad_kernel, blocks | dict(ATOMIC=False), warps=1)
ones = dict(ATOMIC=True, in_scale_ptr=None, d_in_scale_ptr=None)
build(dense_norm_costs_grad_kernel, blocks | ones, warps=1)
for width, rows in ((8, "*bf16"), (0, "*fp16")):
    short = dict(D=max(width, 5), BLOCK_D=8, R=7 if EVERY_VARIANT else 2, G=32, LEVELS=5)
    scales = dict(key_scale_ptr=None, query_scale_ptr=None, d_query_scale_ptr=None)
    none = dict(g_ptr=None, d_points_ptr=None, d_mid_scale_ptr=None, totals_ptr=None)
    found = build(short_apply_kernel, short | scales | none, warps=1, aligned=True, x_ptr=rows)
    if found and width == 8:  # groups exchange rows within a warp, without shared memory
        assert found.metadata.shared == 0
    types = dict(x_ptr=rows, g_ptr=rows)
    build(short_apply_kernel, short, warps=1, **types)
    build(short_apply_kernel, short | scales | dict(out_ptr=None, totals_ptr=None), 1, **types)
    only = dict(weight_ptr=None, out_ptr=None, d_points_ptr=None, d_mid_scale_ptr=None)
    build(short_apply_kernel, short | scales | only, warps=1, **types)
least = dict(LEAST_SIZE=1e-28, LEAST_SHARE=1e-6)
build(spread_kernel, least | dict(BLOCK=4096), warps=8)
for count in (1000, 4096):
    block, sort = block_config(count), sort_block_config(count)
    warps = block.pop("num_warps"), sort.pop("num_warps")
    sort |= least | dict(INFINITY=0x7F800000)
    some = dict(mask_ptr=None, expected_ptr=None, spread_ptr=None, d_inv_bandwidth_ptr=None)
    build(short_numbers_kernel, sort, warps[1], mask_ptr="*u8")
    build(short_numbers_kernel, sort | some, warps[1], aligned=True)
    build(short_numbers_grad_kernel, block | dict(numbers_ptr=None), warps[0])
    build(short_numbers_grad_kernel, block | some, warps[0], aligned=True)
    for none in ({}, some):
        back = none | dict(BACK=none is some)
        build(short_rows_kernel, sort | back, warps[1], mask_ptr="*u8")
        rows = build(short_rows_grad_kernel, block | back, warps[0])
        if rows:  # the slope, and the gradient of z
            carried = rows.asm["ttir"].split("scf.for")[1].split("->")[1].split("{")[0]
            assert carried.count("tensor<") == 2, carried
for projected in (False, True):
    grad = dict(TOKENS_FIRST=not projected, BLOCK=256)
    grad |= dict(lengths_ptr=None) if projected else dict(spread_ptr=None)
    grad |= dict(dy_ptr=None) if projected else dict(more_ptr=None)
    types = {} if projected else dict(dx_ptr="*bf16", dy_ptr="*bf16")
    build(point_grad_kernel, grad, warps=1, scale="fp32", **types)
for shared, width in ((True, 64), (False, 0)):
    project = dict(SHARED=shared, D=width, BLOCK_N=64, BLOCK_D=64)
    one_side = {} if shared else dict(dy_ptr=None)
    build(back_project_kernel, project | one_side, dx_ptr="*bf16", dy_ptr="*bf16")
    project["SLICES"] = 8
    for kind in ("*i32", "*i64"):
        types = dict(x_ptr="*bf16", y_ptr="*bf16", mask_ptr="*u8", out_ptr=kind, scale="fp32")
        none = {} if shared else dict(y_ptr=None)
        build(project_kernel, project | none | dict(MASKED=shared), **types)
centre = dict(MASKED=True, D=64, BLOCK_N=64, BLOCK_D=64)
half = dict(scale="fp32", mask_ptr="*u8", x_ptr="*bf16", rows_ptr="*bf16")
half |= dict(y_ptr="*bf16", dx_ptr="*bf16", dy_ptr="*bf16")
for one_side in ({}, dict(y_ptr=None, dy_ptr=None)):
    build(centre_kernel, centre | one_side, **half)
    build(centre_grad_kernel, centre | one_side, **half)
rows = dict(D=64, BLOCK_N=512, BLOCK_D=64)
build(gather_kernel, rows, warps=32, x_ptr="*bf16")
for distance in (False, True):
    build(pair_kernel, rows | dict(DISTANCE=distance), warps=32, x_ptr="*bf16", y_ptr="*bf16")
build(compose_kernel, dict(BLOCK=256), out_ptr="*i32")
for point, bits, infinity, kind, word in (
    ("bf16", 16, 0x7F80, "i16", "*i32"), ("fp32", 32, 0x7F800000, "i32", "*i64")
):
    point_type = tl.bfloat16 if bits == 16 else tl.float32
    for out in ("*" + kind, word):
        pack = dict(BITS=bits, MASKED=True, BLOCK_N=64, BLOCK_D=64)
        types = dict(x_ptr="*" + point, y_ptr="*" + point, mask_ptr="*u8", out_ptr=out)
        build(pack_kernel, pack, scale="fp32", **types)
    ends = dict(BITS=bits, INFINITY=infinity)
    kinds = ends | dict(POINT=point_type, MASKED=True)
    for tokens in (20, 100, 1000):
        sort = sort_config(tokens)
        warps = sort["num_warps"]
        sort = {key: value for key, value in sort.items() if key != "num_warps"}
        for spread in ({}, dict(spread_ptr=None)):
            rank = build(
                rank_kernel, kinds | sort | least | spread, warps, scale="fp32", bits_ptr="*" + kind
            )
            if rank:
                assert_lanes_agree(rank)
        types = dict(weight="fp32", bits_ptr="*" + kind, out_ptr="*i32")
        match = build(match_kernel, ends | sort, warps, **types)
        # Two names for one value before a loop, and it would carry one of them: the queries were
        # lost.
        if match:
            carried = match.asm["ttir"].split("scf.for")[1].split("->")[1].split("{")[0]
            assert carried.count("tensor<") == 2, carried
    sort = sort_config(1024)
    warps = sort["num_warps"]
    run = {k: v for k, v in sort.items() if k != "num_warps"}
    words = dict(words_ptr=word)
    build(sort_runs_kernel, run, warps, **words)
    build(merge_runs_kernel, dict(BLOCK=1024, DIMS=sort["DIMS"]), warps, out_ptr=word, **words)
    build(unpack_kernel, kinds | dict(BLOCK=1024), scale="fp32", **words)
    build(match_runs_kernel, ends | dict(BLOCK=1024, DIMS=10), warps=1, out_ptr="*i32", **words)
"""


def compiled(*arguments: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the kernels that were compiled, one after another."""
    environment = {k: v for k, v in environment.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.split()


def test_every_kernel_compiles_for_hopper() -> None:
    assert len(compiled()) == 34


@pytest.mark.slow
def test_every_variant_compiles_for_hopper() -> None:
    assert len(compiled("every variant")) == 197


@pytest.mark.slow
def test_every_variant_compiles_with_the_oldest_triton(oldest_triton) -> None:
    assert len(compiled("every variant", environment=oldest_triton)) == 197


def test_no_function_of_a_kernel_returns_a_pointer_that_may_be_none() -> None:
    """Triton 3.6 cannot return None: such a function compiles with 3.7 alone."""
    returned = []
    for path in Path(espformer.ops.__path__[0]).rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and _is_compiled(function):
                returned += [
                    f"{path.name}: {function.name} returns {ast.unparse(node.value)}"
                    for node in ast.walk(function)
                    if isinstance(node, ast.Return) and node.value is not None
                    if _may_be_none(node.value, {a.arg for a in function.args.args})
                ]
    assert not returned


def _is_compiled(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _may_be_none(value: ast.expr, arguments: set[str]) -> bool:
    """Whether an expression is None, or an argument as it was given, under a condition or not."""
    if isinstance(value, ast.IfExp):
        return _may_be_none(value.body, arguments) or _may_be_none(value.orelse, arguments)
    if isinstance(value, ast.Name):
        return value.id in arguments and value.id.endswith("ptr")
    return isinstance(value, ast.Constant) and value.value is None
