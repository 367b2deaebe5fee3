"""How large may a tensor be on MPS? Read in PyTorch's sources and issues; no Mac was asked."""

LARGEST_BUFFER = 0.75
"""Metal's maxBufferLength as a share of the recommended memory: an assumption."""

MOST_DIMENSIONS = 16
MOST_IN_ONE_DIMENSION = 2**31 - 1
MOST_ELEMENTS = 2**32
MOST_CHANNELS = 65_536
"""Output channels of a convolution."""
