"""Estimates of the memory of a training step with fake tensors, and the machines that it fits."""
