"""What is tried before a run's first step: is the device right, is a causal model causal, and was it seen before?"""
