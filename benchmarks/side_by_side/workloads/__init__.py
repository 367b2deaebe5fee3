"""The workloads, one file each; every process builds its own from the same seed."""
