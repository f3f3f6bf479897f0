"""Tensor-level operators: they know tensors, and nothing above them."""
