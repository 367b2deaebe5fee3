"""Architecture options of a Hex net, and its parameter count and activation memory. Does not import torch."""

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whet.base.errors import UsageError

NUM_PLANES = 4
"""Number of input planes: the mover's stones, the opponent's stones, the mover's edges and the opponent's edges."""
MAX_GROUPS = 8
"""Maximum number of groups of a GroupNorm."""

PRESETS: dict[int, dict[str, Any]] = {
    18: {"depth": 8, "width": 128, "block": "plain"},
    34: {"depth": 16, "width": 128, "block": "plain"},
    50: {"depth": 16, "width": 256, "block": "bottleneck"},
}
"""Presets with as many convolutions as ResNet-18, 34 and 50, but without strides, which would merge cells."""


class HexArch(BaseModel):
    """Options of a Hex net, which has a stem, blocks at full resolution, a policy head and a value head."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    preset: Literal[18, 34, 50] | None = Field(None, description="depth, width and block like the ResNet of that name")
    kind: Literal["residual", "attention"] = Field(
        "residual", description="attention: every second block attends over all cells"
    )
    block: Literal["plain", "bottleneck"] = Field(
        "plain", description="two 3x3 convolutions, or 1x1, 3x3, 1x1 at half the width"
    )
    depth: Annotated[int, Field(gt=0, le=1_000)] = Field(4, description="blocks")
    width: Annotated[int, Field(ge=2, le=65_536)] = Field(32, description="channels of every layer")
    heads: Annotated[int, Field(gt=0, le=65_536)] = Field(4, description="attention heads; must divide width")
    activation: Literal["relu", "gelu", "silu", "mish"] = Field("silu", description="activation function")
    norm: Literal["group", "batch"] = Field(
        "group",
        description="group: batches may be split freely; batch: the micro-batch is fixed, since it affects statistics",
    )

    @model_validator(mode="before")
    @classmethod
    def fill_from_preset(cls, given: Any) -> Any:
        """Fill in the values of the preset. Explicit values take precedence."""
        preset = given.get("preset") if isinstance(given, dict) else None
        return {**PRESETS[preset], **given} if isinstance(preset, int) and preset in PRESETS else given

    @model_validator(mode="after")
    def validate_heads(self) -> "HexArch":
        """Raise UsageError if the number of attention heads does not divide the width."""
        if self.kind == "attention" and self.width % self.heads:
            fitting = [str(n) for n in range(1, self.width + 1) if self.width % n == 0][:8]
            raise UsageError(
                "arch.heads must divide arch.width",
                got=f"{self.width} / {self.heads}",
                try_="arch.heads=" + " or ".join(fitting),
            )
        return self

    @property
    def inner_width(self) -> int:
        """Number of channels inside a bottleneck block."""
        return self.width // 2

    @property
    def num_attention_blocks(self) -> int:
        """Number of attention blocks. Every second block is one, starting with the second."""
        return self.depth // 2 if self.kind == "attention" else 0


def num_groups(width: int) -> int:
    """Return the number of groups of a GroupNorm: the largest power of two up to MAX_GROUPS that divides `width`."""
    return math.gcd(width, MAX_GROUPS)


def count_parameters(arch: HexArch) -> int:
    """Return the number of parameters, which does not depend on the board size."""
    width = arch.width
    convolutions = arch.depth - arch.num_attention_blocks
    blocks = convolutions * _block_parameters(arch) + arch.num_attention_blocks * (8 * width**2 + 11 * width)
    stem = 9 * NUM_PLANES * width
    heads = width + 2 * width**2 + width + 2 * width + 2
    return stem + blocks + 2 * width + heads


def _block_parameters(arch: HexArch) -> int:
    width, inner = arch.width, arch.inner_width
    if arch.block == "bottleneck":
        return 2 * width + 4 * inner + 2 * width * inner + 9 * inner**2
    return 4 * width + 18 * width**2


def activation_bytes(arch: HexArch, *, size: int) -> int:
    """Estimate the bytes of float32 activations that are saved for the backward pass of one board.

    These are the inputs of norms, activation functions and convolutions.
    """
    width, cells = arch.width, size * size
    # ReLU saves only its output, which is also the saved input of the next convolution. Other activation functions save
    # their input too.
    kept = 2 if arch.activation == "relu" else 3
    plain = 2 * kept * width
    bottleneck = kept * (width + 2 * arch.inner_width)
    attention = (7 + 2 + 2 * (kept - 1)) * width
    convolution = bottleneck if arch.block == "bottleneck" else plain
    blocks = (arch.depth - arch.num_attention_blocks) * convolution + arch.num_attention_blocks * attention
    return 4 * cells * (blocks + kept * width + NUM_PLANES + 8)
