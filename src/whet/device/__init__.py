"""The only room that names a backend: one small interface, and CUDA, MPS, CPU and a fake device behind one door."""
