"""The Hex net and its loss: residual blocks, attention over cells, and policy and value heads.

Shapes: B boards of N x N cells, W channels. Blocks map (B, W, N, N) to (B, W, N, N).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.data.batch import DictBatch
from whet.device.kernels.group_norm import group_norm_activation
from whet.recipes.hex.architecture import NUM_PLANES, HexArch, num_groups

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "mish": nn.Mish}


def make_blocks(arch: HexArch) -> nn.ModuleList:
    """Create the blocks of the trunk. With kind="attention", every second block is a `CellAttention`."""
    convolution = BottleneckBlock if arch.block == "bottleneck" else PlainBlock
    is_attention = [arch.kind == "attention" and number % 2 == 1 for number in range(arch.depth)]
    return nn.ModuleList(CellAttention(arch) if attends else convolution(arch) for attends in is_attention)


def make_norm(arch: HexArch, width: int) -> nn.Module:
    return nn.BatchNorm2d(width) if arch.norm == "batch" else nn.GroupNorm(num_groups(width), width)


def make_activation(arch: HexArch) -> nn.Module:
    return _ACTIVATIONS[arch.activation]()


class PreActivation(nn.Sequential):
    """A sequence of (norm, activation, convolution) triples. With norms=whet, norm and activation run as one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        for norm, activation, convolution in zip(layers[::3], layers[1::3], layers[2::3], strict=True):
            x = convolution(group_norm_activation(norm, activation, x))
        return x


class PlainBlock(nn.Module):
    """Two 3x3 convolutions with a residual connection."""

    def __init__(self, arch: HexArch) -> None:
        super().__init__()
        width = arch.width
        self.layers = PreActivation(
            *pre_activation(arch, width, width, kernel=3), *pre_activation(arch, width, width, kernel=3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class BottleneckBlock(nn.Module):
    """1x1, 3x3 and 1x1 convolutions at half the width, with a residual connection."""

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
    """Self-attention over all cells, and a feed-forward layer. The preceding convolutions encode the positions."""

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
        qkv = self.queries_keys_values(_as_cells(self.attention_norm(x)))
        queries, keys, values = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values)
        x = x + _as_board(self.attention_out(attended.transpose(1, 2).flatten(2)), shape)
        inner = self.activation(self.feed_forward_in(_as_cells(self.feed_forward_norm(x))))
        return x + _as_board(self.feed_forward_out(inner), shape)


def pre_activation(arch: HexArch, width_in: int, width_out: int, *, kernel: int) -> list[nn.Module]:
    """Create a norm, an activation and a convolution, which has no bias because a norm follows."""
    convolution = nn.Conv2d(width_in, width_out, kernel, padding=kernel // 2, bias=False)
    return [make_norm(arch, width_in), make_activation(arch), convolution]


def _as_cells(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def _as_board(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.transpose(1, 2).unflatten(2, shape)


IMPOSSIBLE = -1e9
"""Logit of an occupied cell. It is finite, so that the softmax of a full board is not NaN."""


class NetOutput(NamedTuple):
    """The outputs of a `HexNet`, as float32 logits."""

    policy: Tensor
    """(B, N * N): logits of the moves. Occupied cells have the logit IMPOSSIBLE."""
    value: Tensor
    """(B,): logit of the probability that the mover wins."""
    error: Tensor
    """(B,): logit of the expected squared error of the win probability."""

    @property
    def win(self) -> Tensor:
        """Probability that the mover wins, (B,)."""
        return torch.sigmoid(self.value)

    @property
    def uncertainty(self) -> Tensor:
        """Expected root mean squared error of `win`, (B,): 0 if it is certain, 0.5 if it is a guess."""
        return torch.sigmoid(self.error).sqrt()


class HexNet(nn.Module):
    """A policy and value net: a stem, blocks, a 1x1 convolution for the policy, and a value head on pooled features."""

    def __init__(self, arch: HexArch, *, dropout: float = 0.0) -> None:
        super().__init__()
        width = arch.width
        self.stem = nn.Conv2d(NUM_PLANES, width, 3, padding=1, bias=False)
        self.blocks = make_blocks(arch)
        self.norm = make_norm(arch, width)
        self.activation = make_activation(arch)
        # No bias: it would be the same for every cell, and the softmax would cancel it.
        self.policy = nn.Conv2d(width, 1, 1, bias=False)
        self.value_in = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.value_out = nn.Linear(width, 2)
        # With small weights, training starts with a nearly uniform policy and win probabilities near 0.5.
        for layer in (self.policy, self.value_out):
            nn.init.normal_(layer.weight, std=0.01)
        nn.init.zeros_(self.value_out.bias)

    def forward(self, boards: Tensor) -> NetOutput:
        x = self.stem(encode_boards(boards, like=self.stem.weight))
        for block in self.blocks:
            x = block(x)
        x = group_norm_activation(self.norm, self.activation, x)
        policy = self.policy(x).flatten(1).float().masked_fill(boards.flatten(1) != 0, IMPOSSIBLE)
        # Pooling by mean and maximum makes the head independent of the board size.
        pooled = torch.cat((x.mean((2, 3)), x.amax((2, 3))), dim=1)
        value, error = self.value_out(self.dropout(self.activation(self.value_in(pooled)))).float().unbind(1)
        return NetOutput(policy, value, error)


def encode_boards(boards: Tensor, *, like: Tensor) -> Tensor:
    """Return the input planes, (B, 4, N, N): the stones of both players, and the cells at the edges of each player."""
    size = boards.shape[-1]
    line = torch.arange(size, device=boards.device)
    is_outer = ((line == 0) | (line == size - 1)).expand(size, size)
    planes = (boards == 1, boards == 2, is_outer.T.expand_as(boards), is_outer.expand_as(boards))
    return torch.stack(planes, dim=1).to(like.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossWeights:
    policy: float = 1.0
    value: float = 1.0
    uncertainty: float = 0.1


def hex_loss(output: NetOutput, micro: DictBatch, weights: LossWeights) -> Tensor:
    """Return the weighted sum of the policy, value and uncertainty losses, averaged over positions."""
    terms = (
        weights.policy * policy_losses(output, micro),
        weights.value * value_losses(output, micro),
        weights.uncertainty * uncertainty_losses(output, micro),
    )
    return sum(terms[1:], start=terms[0]).mean()


def policy_losses(output: NetOutput, micro: DictBatch) -> Tensor:
    """Return the cross entropy with the move played, or with the visit shares of a search, (B,).

    It is 0 for positions without a move.
    """
    logs = output.policy.log_softmax(1)
    if "shares" in micro:
        # Occupied cells have no visits, and their logits are finite, so they contribute 0.
        return -(micro.shares.float() * logs).sum(1)
    return -logs.gather(1, micro.move.clamp(min=0)[:, None])[:, 0] * (micro.move >= 0)


def value_losses(output: NetOutput, micro: DictBatch) -> Tensor:
    """Return the binary cross entropy with the result, (B,)."""
    return functional.binary_cross_entropy_with_logits(output.value, micro.win, reduction="none")


def uncertainty_losses(output: NetOutput, micro: DictBatch) -> Tensor:
    """Return the binary cross entropy with the squared error of `win`, (B,). No gradient flows into the value."""
    squared = (output.win.detach() - micro.win).square()
    return functional.binary_cross_entropy_with_logits(output.error, squared, reduction="none")
