"""Complete workloads that ship with whet. A recipe has a torch-free half, so that a plan needs no torch."""
