"""What is a net made of? Pre-activation residual blocks and attention over cells, all at the board's resolution.

Shapes: B boards of N x N cells, W channels: every block takes and gives (B, W, N, N).
"""

from torch import Tensor, nn
from torch.nn import functional

from whet.device.kernels.group_norm import group_norm_activation
from whet.recipes.hex.arch import Arch, num_groups

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "mish": nn.Mish}


def make_blocks(arch: Arch) -> nn.ModuleList:
    """The trunk's blocks in order."""
    convolution = Bottleneck if arch.block == "bottleneck" else Plain
    is_attention = [arch.kind == "attention" and number % 2 == 1 for number in range(arch.depth)]
    return nn.ModuleList(Attention(arch) if looks_around else convolution(arch) for looks_around in is_attention)


def make_norm(arch: Arch, width: int) -> nn.Module:
    return nn.BatchNorm2d(width) if arch.norm == "batch" else nn.GroupNorm(num_groups(width), width)


def make_activation(arch: Arch) -> nn.Module:
    return _ACTIVATIONS[arch.activation]()


class Bent(nn.Sequential):
    """Norm, activation and convolution in turns; the first two in one kernel where there is one (norms=own)."""

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        for norm, activation, convolution in zip(layers[::3], layers[1::3], layers[2::3], strict=True):
            x = convolution(group_norm_activation(norm, activation, x))
        return x


class Plain(nn.Module):
    """Two 3x3 convolutions, added to what came in."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        width = arch.width
        self.layers = Bent(*bent(arch, width, width, kernel=3), *bent(arch, width, width, kernel=3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Bottleneck(nn.Module):
    """Down to half the width, a 3x3 convolution there, and up again."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        width, inner = arch.width, arch.inner_width
        self.layers = Bent(
            *bent(arch, width, inner, kernel=1),
            *bent(arch, inner, inner, kernel=3),
            *bent(arch, inner, width, kernel=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Attention(nn.Module):
    """Every cell looks at every cell; where a cell lies it knows from the convolutions before."""

    def __init__(self, arch: Arch) -> None:
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


def bent(arch: Arch, width_in: int, width_out: int, *, kernel: int) -> list[nn.Module]:
    """Norm, activation and a convolution, which needs no bias: a norm follows, or the sum of the block."""
    convolution = nn.Conv2d(width_in, width_out, kernel, padding=kernel // 2, bias=False)
    return [make_norm(arch, width_in), make_activation(arch), convolution]


def _as_cells(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def _as_board(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.transpose(1, 2).unflatten(2, shape)
