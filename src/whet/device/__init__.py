"""Devices: CUDA, MPS, CPU and a fake one behind one interface. The only package that calls a backend of torch."""
