"""Compare training loops: each trains the same workload in its own process."""
