"""Farthest point sampling of point clouds: the loop in torch, and one kernel for GPUs."""
