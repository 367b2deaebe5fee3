"""One interface for CUDA, MPS and the CPU. No other package calls a torch backend directly."""
