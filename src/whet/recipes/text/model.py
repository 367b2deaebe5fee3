"""What is trained? A small encoder that reads padded and packed batches alike.

Shapes: B texts, L tokens of the longest, T tokens in all, D width, H heads, C classes.
"""
import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.data.ragged import Packed, Padded
