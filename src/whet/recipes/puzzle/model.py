"""The tiny recursive model: a puzzle's tokens, an answer and a latent, refined in turn by one small network."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.recipes.puzzle.halting import Slots
from whet.recipes.recursive.initial import truncated_normal_
from whet.recipes.recursive.layers import Look, PostNormBlock, SwiGLU, embedding, linear, rms_norm, rotation
from whet.recipes.recursive.recursion import refine

Positions = Literal["rope", "learned", "none"]
_NEVER_HALT = -5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes of a model."""

    num_tokens: int
    length: int
    num_puzzles: int
    width: int
    num_heads: int
    expansion: float
    num_layers: int
    outer_cycles: int
    inner_cycles: int
    positions: Positions
    mixes_by_mlp: bool
    prefix: int
    """Places in front of the puzzle that its own vector is laid out in."""
    puzzle_width: int
    """Numbers of that vector; 0 for none."""

    @property
    def num_places(self) -> int:
        return self.prefix + self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Slotting:
    """How many puzzles are held at once, and for how long."""

    number: int
    most_steps: int
    exploration: float
    seed: int


class PuzzleModel(nn.Module):
    """One call is one step of supervision."""

    y0: Tensor
    z0: Tensor
    cosines: Tensor
    sines: Tensor

    def __init__(self, shape: Shape, slotting: Slotting) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = embedding(shape.num_tokens, shape.width)
        self.places = embedding(shape.num_places, shape.width) if shape.positions == "learned" else None
        self.table = PuzzleTable(shape.num_puzzles, shape.puzzle_width) if shape.puzzle_width else None
        self.blocks = nn.ModuleList(_block(shape) for _ in range(shape.num_layers))
        self.to_tokens = linear(shape.width, shape.num_tokens)
        self.to_halt = nn.Linear(shape.width, 2)
        nn.init.zeros_(self.to_halt.weight)
        nn.init.constant_(self.to_halt.bias, _NEVER_HALT)
        self.register_buffer("y0", truncated_normal_(torch.empty(shape.width), deviation=1))
        self.register_buffer("z0", truncated_normal_(torch.empty(shape.width), deviation=1))
        # Made once: compiled, each of the 42 layers of a step would compute them anew for every element.
        turns = rotation(torch.arange(shape.num_places), shape.width // shape.num_heads)
        for name, table in zip(("cosines", "sines"), turns, strict=True):
            self.register_buffer(name, table, persistent=False)
        self.slots = Slots(
            slotting.number,
            length=shape.length,
            state_shape=(shape.num_places, shape.width),
            most_steps=slotting.most_steps,
            exploration=slotting.exploration,
            seed=slotting.seed,
        )

    def forward(
        self, inputs: Tensor, puzzles: Tensor, y: Tensor, z: Tensor, is_new: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The next y and z, the tokens' logits, and the logits of halting (only the first of its two is used)."""
        kind = _number_format(self.to_tokens.weight)
        x = self._embedded(inputs, puzzles).to(kind)
        y = torch.where(is_new[:, None, None], self.y0, y).to(kind)
        z = torch.where(is_new[:, None, None], self.z0, z).to(kind)
        look = self._look()

        def net(state: Tensor, added: Tensor) -> Tensor:
            state = state + added
            for block in self.blocks:
                state = block(state, look)
            return state

        y, z = refine(net, y, z, x, outer=self.shape.outer_cycles, inner=self.shape.inner_cycles)
        logits = self.to_tokens(y[:, self.shape.prefix :])
        return y.detach(), z.detach(), logits, self.to_halt(y[:, 0]).float()

    def _embedded(self, inputs: Tensor, puzzles: Tensor) -> Tensor:
        shape = self.shape
        x = self.tokens(inputs)
        if self.table is not None:
            vector = functional.pad(self.table(puzzles), (0, shape.prefix * shape.width - shape.puzzle_width))
            x = torch.cat((vector.view(-1, shape.prefix, shape.width), x), dim=1)
        if self.places is not None:
            # Both tables have the same deviation: the sum would be wider.
            x = math.sqrt(0.5) * (x + self.places.weight)
        scaled: Tensor = math.sqrt(shape.width) * x
        return scaled

    def _look(self) -> Look:
        if self.shape.positions != "rope" or self.shape.mixes_by_mlp:
            return Look()
        return Look(rotation=(self.cosines, self.sines))


class PuzzleTable(nn.Module):
    """A vector for each puzzle. A step sees few of them, so they learn by sign, and are not averaged."""

    is_averaged = False
    is_table = True

    def __init__(self, num_puzzles: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_puzzles, width))

    def forward(self, puzzles: Tensor) -> Tensor:
        return functional.embedding(puzzles, self.weight)


class MixerBlock(nn.Module):
    """A feed-forward layer over the places of each feature instead of attention, then one over the features."""

    def __init__(self, width: int, *, num_places: int, expansion: float) -> None:
        super().__init__()
        self.mix = SwiGLU(num_places, expansion=expansion)
        self.feed_forward = SwiGLU(width, expansion=expansion)

    def forward(self, x: Tensor, look: Look) -> Tensor:  # noqa: ARG002 (as a block with attention)
        turned = x.transpose(1, 2)
        x = rms_norm(turned + self.mix(turned)).transpose(1, 2)
        return rms_norm(x, self.feed_forward(x))


def _block(shape: Shape) -> nn.Module:
    if shape.mixes_by_mlp:
        return MixerBlock(shape.width, num_places=shape.num_places, expansion=shape.expansion)
    return PostNormBlock(shape.width, num_heads=shape.num_heads, expansion=shape.expansion)


def _number_format(weight: Tensor) -> torch.dtype:
    """What states are kept in: that of matrix products, as autocast says, so that nothing is converted in between."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
