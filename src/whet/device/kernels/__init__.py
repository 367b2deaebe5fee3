"""Kernels of whet's own, for CUDA in half precision: written where torch's, fused by its compiler, leave time."""
