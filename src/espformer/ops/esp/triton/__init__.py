"""Fused GPU kernels for ESP attention; :mod:`espformer.ops.esp.linear` is their torch twin."""

from espformer.ops.esp.triton.attention import attend, plan

__all__ = ["attend", "plan"]
