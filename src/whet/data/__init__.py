"""Data: sources of global batches, their order, their split into micro-batches, and worker processes."""
