"""The training loops, one file each: `run(workload, gate, spec)` calls `gate.step` after every step."""
