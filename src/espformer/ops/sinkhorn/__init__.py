"""Sinkhorn attention, the baseline: in torch, and fused for the GPU."""
