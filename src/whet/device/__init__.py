"""CUDA, MPS, CPU and fake devices behind one interface. No other package calls a torch backend directly."""
