"""Training loops of other projects, each as it is and ported to whet. `benchmarks/ports.py` runs them."""
