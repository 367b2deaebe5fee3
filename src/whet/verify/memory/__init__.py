"""Memory estimates of a training step from fake tensors, and the machines on which it fits."""
