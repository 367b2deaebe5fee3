"""Is what a model computes on a device right? `whet compare`: against the CPU, and where it goes wrong first."""
