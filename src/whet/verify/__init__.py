"""Will a model run on a device, is what it computes there right, and is a causal model causal?"""
