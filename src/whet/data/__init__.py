"""Data sources, the order of samples, global batches and micro-batches, and worker processes."""
