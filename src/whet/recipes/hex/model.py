"""The Hex net: residual blocks, attention over cells, policy and value heads, and the loss."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.data.batch import MicroBatch
from whet.device.kernels.group_norm import group_norm_activation
from whet.recipes.hex.architecture import NUM_PLANES, HexArch, num_groups

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "mish": nn.Mish}


def make_blocks(arch: HexArch) -> nn.ModuleList:
    """The trunk's blocks in order."""
    convolution = BottleneckBlock if arch.block == "bottleneck" else PlainBlock
    is_attention = [arch.kind == "attention" and number % 2 == 1 for number in range(arch.depth)]
    return nn.ModuleList(CellAttention(arch) if looks_around else convolution(arch) for looks_around in is_attention)


def make_norm(arch: HexArch, width: int) -> nn.Module:
    return nn.BatchNorm2d(width) if arch.norm == "batch" else nn.GroupNorm(num_groups(width), width)


def make_activation(arch: HexArch) -> nn.Module:
    return _ACTIVATIONS[arch.activation]()


class PreActivation(nn.Sequential):
    """Norm, activation and convolution in turns; the first two in one kernel where there is one (norms=own)."""

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        for norm, activation, convolution in zip(layers[::3], layers[1::3], layers[2::3], strict=True):
            x = convolution(group_norm_activation(norm, activation, x))
        return x


class PlainBlock(nn.Module):
    """Two 3x3 convolutions, added to what came in."""

    def __init__(self, arch: HexArch) -> None:
        super().__init__()
        width = arch.width
        self.layers = PreActivation(
            *pre_activation(arch, width, width, kernel=3), *pre_activation(arch, width, width, kernel=3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class BottleneckBlock(nn.Module):
    """Down to half the width, a 3x3 convolution there, and up again."""

    def __init__(self, arch: HexArch) -> None:
        super().__init__()
        width, inner = arch.width, arch.inner_width
        self.layers = PreActivation(
            *pre_activation(arch, width, inner, kernel=1),
            *pre_activation(arch, inner, inner, kernel=3),
            *pre_activation(arch, inner, width, kernel=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class CellAttention(nn.Module):
    """Every cell looks at every cell; where a cell lies it knows from the convolutions before."""

    def __init__(self, arch: HexArch) -> None:
        super().__init__()
        width = arch.width
        self.num_heads = arch.heads
        self.attention_norm = make_norm(arch, width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = make_norm(arch, width)
        self.feed_forward_in = nn.Linear(width, 2 * width)
        self.activation = make_activation(arch)
        self.feed_forward_out = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[2:]
        mixture = self.queries_keys_values(_as_cells(self.attention_norm(x)))
        queries, keys, values = mixture.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(queries, keys, values)
        x = x + _as_board(self.attention_out(found.transpose(1, 2).flatten(2)), shape)
        inner = self.activation(self.feed_forward_in(_as_cells(self.feed_forward_norm(x))))
        return x + _as_board(self.feed_forward_out(inner), shape)


def pre_activation(arch: HexArch, width_in: int, width_out: int, *, kernel: int) -> list[nn.Module]:
    """Norm, activation and a convolution, which needs no bias: a norm follows, or the sum of the block."""
    convolution = nn.Conv2d(width_in, width_out, kernel, padding=kernel // 2, bias=False)
    return [make_norm(arch, width_in), make_activation(arch), convolution]


def _as_cells(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def _as_board(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.transpose(1, 2).unflatten(2, shape)


IMPOSSIBLE = -1e9
"""The logit of a taken cell: its probability is 0, and a full board has no NaN."""


class NetOutput(NamedTuple):
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

    def __init__(self, arch: HexArch, *, dropout: float = 0.0) -> None:
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

    def forward(self, boards: Tensor) -> NetOutput:
        x = self.stem(encode_boards(boards, like=self.stem.weight))
        for block in self.blocks:
            x = block(x)
        x = group_norm_activation(self.norm, self.activation, x)
        policy = self.policy(x).flatten(1).float().masked_fill(boards.flatten(1) != 0, IMPOSSIBLE)
        seen = torch.cat((x.mean((2, 3)), x.amax((2, 3))), dim=1)
        value, error = self.value_out(self.dropout(self.activation(self.value_in(seen)))).float().unbind(1)
        return NetOutput(policy, value, error)


def encode_boards(boards: Tensor, *, like: Tensor) -> Tensor:
    """What the net is shown: stones of both, and which cells touch whose edges, (B, 4, N, N)."""
    size = boards.shape[-1]
    line = torch.arange(size, device=boards.device)
    is_outer = ((line == 0) | (line == size - 1)).expand(size, size)
    shown = (boards == 1, boards == 2, is_outer.T.expand_as(boards), is_outer.expand_as(boards))
    return torch.stack(shown, dim=1).to(like.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossWeights:
    """What each part of the loss counts."""

    policy: float = 1.0
    value: float = 1.0
    uncertainty: float = 0.1


def hex_loss(said: NetOutput, micro: MicroBatch, weights: LossWeights) -> Tensor:
    """The mean over positions."""
    parts = (
        weights.policy * policy_losses(said, micro),
        weights.value * value_losses(said, micro),
        weights.uncertainty * uncertainty_losses(said, micro),
    )
    return sum(parts[1:], start=parts[0]).mean()


def policy_losses(said: NetOutput, micro: MicroBatch) -> Tensor:
    """Of each position: against the move that was played, or the shares of a search; 0 where there is no move."""
    logs = said.policy.log_softmax(1)
    if "shares" in micro.fields:
        # A taken cell has the share 0, and 0 times its logarithm is 0: it is finite.
        return -(micro.shares.float() * logs).sum(1)
    return -logs.gather(1, micro.move.clamp(min=0)[:, None])[:, 0] * (micro.move >= 0)


def value_losses(said: NetOutput, micro: MicroBatch) -> Tensor:
    """Of each position: against who won."""
    return functional.binary_cross_entropy_with_logits(said.value, micro.win, reduction="none")


def uncertainty_losses(said: NetOutput, micro: MicroBatch) -> Tensor:
    """Of each position: how well the net knows how wrong its value is; the value itself does not move for it."""
    squared = (said.win.detach() - micro.win).square()
    return functional.binary_cross_entropy_with_logits(said.error, squared, reduction="none")
