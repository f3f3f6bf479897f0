"""Single instructions that Triton has no name for, and what the interpreter does instead."""

from __future__ import annotations

import os

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
ROOT_LOG2E = tl.constexpr(1.2011224087864498)
QUARTER = tl.constexpr(1.5707963267948966)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:  # the interpreter knows neither libdevice nor PTX

    @triton.jit
    def fast_cosine(angle):
        return tl.cos(angle)

    @triton.jit
    def fast_sine(angle):
        return tl.sin(angle)

    @triton.jit
    def times(x, y):
        return x * y

    @triton.jit
    def exp2(x):
        return tl.exp2(x)

    @triton.jit
    def exp2_minus_abs(x):
        return tl.exp2(-tl.abs(x))

    @triton.jit
    def exp2_minus_square(x):
        return tl.exp2(-x * x)

    @triton.jit
    def like_product(x, rows, columns):
        return x

    @triton.jit
    def roomy(x):
        if x.dtype == tl.float16:  # there is no bfloat16
            x = x.to(tl.float32)
        return x

    @triton.jit
    def with_sign(x, y):
        return tl.where(y > 0, x, tl.where(y < 0, -x, 0.0))
else:
    from triton.language.extra import libdevice

    @triton.jit
    def fast_cosine(angle):
        """Cosine in one instruction, good to 2^-21 up to π; beyond, what it multiplies decays."""
        return libdevice.fast_cosf(angle)

    @triton.jit
    def fast_sine(angle):
        """Sine, likewise: of a small angle most digits are lost."""
        return libdevice.fast_sinf(angle)

    @triton.jit
    def times(x, y):
        """A product that is rounded: not fused with what is added to it, so that ties stay ties."""
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def exp2(x):
        """2^x in one instruction; results below the smallest normal number are zero."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def exp2_minus_abs(x):
        """2^-|x|, still in one instruction: it can change the sign of what it reads."""
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; abs.f32 t, $1; neg.f32 t, t; ex2.approx.ftz.f32 $0, t; }", "=f,f",
            [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip

    @triton.jit
    def exp2_minus_square(x):
        """2^(-x²) in two instructions."""
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, $1; neg.f32 t, t; ex2.approx.ftz.f32 $0, t; }", "=f,f",
            [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip

    @triton.jit
    def like_product(x, rows, columns):
        """x itself, but held by the same threads as the matrix product ``rows columnsᵀ``.

        A matrix that is made from two vectors has no natural layout, and the compiler's choice
        would send every entry through shared memory on its way to the tensor cores. The layout of
        a product's result is the one that they take operands in. So here is a product, of rows
        that lie in shared memory anyway, and nobody looks at it.
        """
        product = tl.dot(rows, tl.trans(columns))
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f,f", [x, product], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def with_sign(x, y):
        """x with the sign of y, and zero where y is."""
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t; .reg .pred p;
            and.b32 t, $2, 0x80000000; xor.b32 t, t, $1;
            setp.eq.f32 p, $2, 0f00000000; selp.b32 $0, 0, t, p; }""",
            "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip

    @triton.jit
    def roomy(x):
        """x in a type with the range of float32: means over many tokens leave that of float16."""
        if x.dtype == tl.float16:
            x = x.to(tl.bfloat16)
        return x


@triton.jit
def exact_cosine(angle, QUARTERS: tl.constexpr = 0):
    """Cosine of an angle up to a thousand and QUARTERS right ones, to the last bit or two.

    The library's has a branch for angles of any size: over a third of a kernel's code.
    """
    quarters = tl.floor(angle * (1 / QUARTER) + 0.5)
    # π/2 in three parts; the first two are so short that their products are not rounded.
    rest = angle - quarters * 1.5703125
    rest = rest - quarters * 0.0004838705062866211
    rest = rest + quarters * 4.371138828673793e-08
    z = rest * rest
    even = 1.0 + z * (z * (4.16666466e-02 + z * (-1.38873560e-03 + z * 2.44370787e-05)) - 0.5)
    odd = rest + rest * z * (-0.1666665 + z * (0.00833197 - z * 0.00019494))
    q = quarters.to(tl.int32) + QUARTERS
    y = tl.where((q & 1) == 0, even, odd)
    return tl.where(((q + 1) & 2) == 0, y, -y)


@triton.jit
def cosine(angle, EXACT: tl.constexpr):
    """Large weights multiply the waves of float32 rows, and an error of 2^-21 with them."""
    if EXACT:
        y = exact_cosine(angle)
    else:
        y = fast_cosine(angle)
    return y


@triton.jit
def rotation(angle, EXACT: tl.constexpr):
    """``exp(-i angle)``, real and imaginary part.

    EXACT where many of them multiply and errors add up: a small angle keeps all its digits, which
    ``angle + π/2`` would lose.
    """
    if EXACT:
        re, im = exact_cosine(angle), exact_cosine(angle, 1)
    else:
        re, im = fast_cosine(angle), -fast_sine(angle)
    return re, im
