"""Facts about this computer and about known machines. This package does not import torch."""
