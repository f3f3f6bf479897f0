"""The tables that ``espformer bench`` makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from espformer.lab.bench.attentions import OPERATORS, SINKHORN
from espformer.lab.bench.cases import MODES, TOLERANCES, Case
from espformer.lab.bench.targets import target_cases

_FORWARD, _BOTH = MODES
_SINKHORN_BACKENDS = ("eager", "compiled", "triton", "flash_sinkhorn")


def quick() -> list[Case]:
    """A few rows at one small size."""
    pairs = [
        ("esp", "triton"), ("esp", "cpu"), ("esp", "linear"), ("esp", "dense"),
        ("esp-hard", "triton"), ("esp-hard", "cpu"), ("esp-hard", "linear"),
        ("softmax", "sdpa"), ("sinkhorn-3", "eager"), ("sinkhorn-3", "triton"),
    ]  # fmt: skip
    return [Case(*pair, mode, tokens=256, heads=8) for mode in MODES for pair in pairs]


def paper() -> list[Case]:
    """The runtime figures of the paper: 16 heads of width 64 (d = 1024), one example."""
    pairs = [
        ("esp-squared", "triton"), ("esp-squared", "dense"), ("esp", "triton"),
        ("esp-hard", "triton"), ("softmax", "flash"), ("differential", "sdpa"),
        *((name, backend) for name in SINKHORN for backend in ("eager", "triton")),
    ]  # fmt: skip
    return [
        Case(*pair, mode, tokens=tokens, heads=16)
        for pair in pairs
        for mode in MODES
        for tokens in (50, 100, 500, 1000)
    ]


def long() -> list[Case]:
    """Sequences up to 131,072 tokens with 16 heads, and 1,048,576 with one."""
    pairs = [
        ("esp", "triton"), ("esp-hard", "triton"), ("esp-squared", "triton"), ("esp", "linear"),
        ("softmax", "flash"), ("sinkhorn-3", "eager"), ("sinkhorn-3", "triton"),
    ]  # fmt: skip
    cases = [
        Case(*pair, mode, tokens=tokens, heads=16)
        for pair in pairs
        for mode in MODES
        for tokens in (4096, 16384, 65536, 131072)
    ]
    million = [
        Case(*pair, mode, tokens=1 << 20, heads=1)
        for pair in pairs[:2]
        for mode in MODES
    ]  # fmt: skip
    return cases + million


def defaults() -> list[Case]:
    """ESP with its defaults beside softmax and Sinkhorn, by length: 16 heads of width 64."""
    eight = Case("esp-default", "triton", _BOTH, heads=16, slices=8)
    rows = (
        eight,
        replace(eight, slices=None, qk_width=8),  # `Attention(qk_dim=8)`: axes, nothing to project
        Case("softmax", "flash", _BOTH, heads=16),
        Case("sinkhorn-3", "triton", _BOTH, heads=16),
    )
    lengths = (256, 1024, 2048, 4096, 8192, 16384)
    return [replace(row, tokens=tokens) for tokens in lengths for row in rows]


def peers() -> list[Case]:
    """Everything at N = 1024."""
    pairs = [
        ("esp", "triton"), ("esp", "cpu"), ("esp", "linear"), ("esp", "dense"),
        ("esp-padded", "triton"),
        ("esp-balanced", "triton"), ("esp-squared", "triton"), ("esp-hard", "triton"),
        ("softmax", "flash"), ("softmax", "sdpa"), ("differential", "sdpa"), ("kernel", "linear"),
        *((name, backend) for name in SINKHORN for backend in _SINKHORN_BACKENDS),
    ]  # fmt: skip
    return [Case(*pair, mode) for mode in MODES for pair in pairs]


SUITES: Mapping[str, Callable[[], list[Case]]] = MappingProxyType(
    {
        "quick": quick, "defaults": defaults, "targets": target_cases, "paper": paper,
        "long": long, "peers": peers,
    }
)  # fmt: skip


def device_of(name: str) -> torch.device:
    """Return the device of that name; ``auto`` is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cuda", "cpu"):
        raise ValueError(f"--device must be cuda, cpu or auto, got '{name}'")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA device here; take --device cpu")
    return torch.device(name)


def select(
    suite: str,
    *,
    dtype: str | None = None,
    tokens: str | None = None,
    heads: int | None = None,
    width: int | None = None,
    operators: str | None = None,
    backends: str | None = None,
    modes: str | None = None,
    shrink: int = 1,
) -> list[Case]:
    """Return the cases of a suite that were asked for, with other sizes if these were given.

    Raises:
        ValueError: an unknown name, or nothing left.
    """
    if suite not in SUITES:
        raise ValueError(f"there is no suite '{suite}'; choose from {', '.join(SUITES)}")
    if dtype is not None and dtype not in TOLERANCES:
        raise ValueError(f"--dtype must be one of {', '.join(TOLERANCES)}, got '{dtype}'")
    for option, number in (("heads", heads), ("width", width), ("shrink", shrink)):
        if number is not None and number < 1:
            raise ValueError(f"--{option} must be at least 1, got {number}")
    names = _names("operators", operators, (name for name, _ in OPERATORS))
    ways = _names("backends", backends, (backend for _, backend in OPERATORS))
    kinds = _names("modes", modes, MODES)
    cases = [
        case.shrunk(shrink)
        for case in SUITES[suite]()
        if case.operator in names and case.backend in ways and case.mode in kinds
    ]
    asked: dict[str, Any] = {"dtype": dtype, "heads": heads, "width": width}
    asked = {name: value for name, value in asked.items() if value is not None}
    cases = [replace(case, **asked) for case in cases]
    if tokens is not None:
        cases = [replace(case, tokens=n) for case in cases for n in _numbers(tokens)]
    if not cases:
        raise ValueError(f"nothing of the suite '{suite}' is left by the names that were given")
    return list(dict.fromkeys(cases))


def _names(option: str, text: str | None, known: Iterable[str]) -> list[str]:
    choices = list(dict.fromkeys(known))
    if text is None:
        return choices
    chosen = text.split(",")
    for name in chosen:
        if name not in choices:
            raise ValueError(f"--{option}: there is no '{name}'; choose from {', '.join(choices)}")
    return chosen


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ValueError(f"--tokens: expected numbers such as 512,1024, got '{text}'")
    return numbers
