"""What is trained? A net that sees a board as its mover does, and says where to play and who will win.

A board is turned so that the mover joins top and bottom: (B, N, N) with 0 empty, 1 the mover's stone, 2 the other's.
The net is convolutional throughout, so one set of weights plays any size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from whet.device.kernels.group_norm import group_norm_activation
from whet.recipes.hex.arch import NUM_PLANES, Arch
from whet.recipes.hex.blocks import make_activation, make_blocks, make_norm

IMPOSSIBLE = -1e9
"""The logit of a taken cell: its probability is 0, and a full board has no NaN."""


class Judgement(NamedTuple):
    """What a net says of boards, as logits."""

    policy: Tensor
    """(B, N * N): where to play; taken cells are impossible."""
    value: Tensor
    """(B): whether the mover wins."""
    error: Tensor
    """(B): how far the probability of winning is from the result, squared, as the net expects it."""

    @property
    def win(self) -> Tensor:
        """The mover's probability of winning."""
        return torch.sigmoid(self.value)

    @property
    def uncertainty(self) -> Tensor:
        """How far `win` is from the result, as the net expects it: 0 sure, 0.5 no idea."""
        return torch.sigmoid(self.error).sqrt()


class HexNet(nn.Module):
    """A stem, residual blocks, a 1x1 convolution for the policy, and the value from what the whole board shows."""

    def __init__(self, arch: Arch, *, dropout: float = 0.0) -> None:
        super().__init__()
        width = arch.width
        self.stem = nn.Conv2d(NUM_PLANES, width, 3, padding=1, bias=False)
        self.blocks = make_blocks(arch)
        self.norm = make_norm(arch, width)
        self.activation = make_activation(arch)
        # A bias would add the same to every cell.
        self.policy = nn.Conv2d(width, 1, 1, bias=False)
        self.value_in = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.value_out = nn.Linear(width, 2)
        # So that the first answers are even: all moves, and both results.
        for layer in (self.policy, self.value_out):
            nn.init.normal_(layer.weight, std=0.01)
        nn.init.zeros_(self.value_out.bias)

    def forward(self, boards: Tensor) -> Judgement:
        x = self.stem(planes(boards, like=self.stem.weight))
        for block in self.blocks:
            x = block(x)
        x = group_norm_activation(self.norm, self.activation, x)
        policy = self.policy(x).flatten(1).float().masked_fill(boards.flatten(1) != 0, IMPOSSIBLE)
        seen = torch.cat((x.mean((2, 3)), x.amax((2, 3))), dim=1)
        value, error = self.value_out(self.dropout(self.activation(self.value_in(seen)))).float().unbind(1)
        return Judgement(policy, value, error)


def planes(boards: Tensor, *, like: Tensor) -> Tensor:
    """What the net is shown: stones of both, and which cells touch whose edges, (B, 4, N, N)."""
    size = boards.shape[-1]
    line = torch.arange(size, device=boards.device)
    is_outer = ((line == 0) | (line == size - 1)).expand(size, size)
    shown = (boards == 1, boards == 2, is_outer.T.expand_as(boards), is_outer.expand_as(boards))
    return torch.stack(shown, dim=1).to(like.dtype)
