"""One interface for CUDA, MPS, CPU and fake devices. No other package calls a torch backend directly."""
