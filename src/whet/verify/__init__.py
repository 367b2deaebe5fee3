"""Will a model run on a device, is what it computes there right, is a causal model causal, and does it fit?"""
