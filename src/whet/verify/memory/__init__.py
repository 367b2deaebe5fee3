"""Memory of a training step, estimated with fake tensors, and the machines that it fits."""
