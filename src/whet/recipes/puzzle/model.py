"""The tiny recursive model, its loss, and the names of its weights in the official implementation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.base.errors import WhetError
from whet.data.batch import MicroBatch
from whet.device.tracing import widest_float
from whet.recipes.layers import (
    AttentionArgs,
    PostNormBlock,
    SwiGLU,
    init_embedding,
    init_linear,
    refine,
    rms_norm,
    rotary_angles,
    truncated_normal_,
)
from whet.recipes.puzzle.slots import SlotBatch, SlotInput, Slots

_OFFICIAL_NAMES = {
    "tokens.weight": "embed_tokens.embedding_weight",
    "places.weight": "embed_pos.embedding_weight",
    "table.weight": "puzzle_emb.weights",
    "to_tokens.weight": "lm_head.weight",
    "to_halt.weight": "q_head.weight",
    "to_halt.bias": "q_head.bias",
    "y0": "H_init",
    "z0": "L_init",
}
_OFFICIAL_BLOCK_NAMES = {
    "attention.queries_keys_values.weight": "self_attn.qkv_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mix.gate_up.weight": "mlp_t.gate_up_proj.weight",
    "mix.down.weight": "mlp_t.down_proj.weight",
    "feed_forward.gate_up.weight": "mlp.gate_up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
_PREFIXES = ("_orig_mod.", "model.", "inner.")
"""Put in front by compiling, by the loss head and by the wrapper that halts, in this order."""


def official_name(name: str) -> str:
    """The name there of one of our weights.

    >>> their_name("blocks.1.feed_forward.down.weight")
    'L_level.layers.1.mlp.down_proj.weight'
    """
    if name.startswith("blocks."):
        _, index, rest = name.split(".", 2)
        return f"L_level.layers.{index}.{_OFFICIAL_BLOCK_NAMES[rest]}"
    return _OFFICIAL_NAMES[name]


def strip_prefixes(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state of theirs without what stands in front of the names."""
    plain = {}
    for name, tensor in state.items():
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        plain[name] = tensor
    return plain


Positions = Literal["rope", "learned", "none"]
_HALT_BIAS = -5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PuzzleShape:
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
class SlotConfig:
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

    def __init__(self, shape: PuzzleShape, slotting: SlotConfig) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = init_embedding(shape.num_tokens, shape.width)
        self.places = init_embedding(shape.num_places, shape.width) if shape.positions == "learned" else None
        self.table = PuzzleTable(shape.num_puzzles, shape.puzzle_width) if shape.puzzle_width else None
        self.blocks = nn.ModuleList(_block(shape) for _ in range(shape.num_layers))
        self.to_tokens = init_linear(shape.width, shape.num_tokens)
        self.to_halt = nn.Linear(shape.width, 2)
        nn.init.zeros_(self.to_halt.weight)
        nn.init.constant_(self.to_halt.bias, _HALT_BIAS)
        self.register_buffer("y0", truncated_normal_(torch.empty(shape.width), deviation=1))
        self.register_buffer("z0", truncated_normal_(torch.empty(shape.width), deviation=1))
        # Made once: compiled, each of the 42 layers of a step would compute them anew for every element.
        turns = rotary_angles(torch.arange(shape.num_places), shape.width // shape.num_heads)
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
        kind = _compute_dtype(self.to_tokens.weight)
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

    def _look(self) -> AttentionArgs:
        if self.shape.positions != "rope" or self.shape.mixes_by_mlp:
            return AttentionArgs()
        return AttentionArgs(rotation=(self.cosines, self.sines))


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

    def forward(self, x: Tensor, look: AttentionArgs) -> Tensor:  # noqa: ARG002 (as a block with attention)
        turned = x.transpose(1, 2)
        x = rms_norm(turned + self.mix(turned)).transpose(1, 2)
        return rms_norm(x, self.feed_forward(x))


def _block(shape: PuzzleShape) -> nn.Module:
    if shape.mixes_by_mlp:
        return MixerBlock(shape.width, num_places=shape.num_places, expansion=shape.expansion)
    return PostNormBlock(shape.width, num_heads=shape.num_heads, expansion=shape.expansion)


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """What states are kept in: that of matrix products, as autocast says, so that nothing is converted in between."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


IGNORED_LABEL = -100
"""The label of a place that does not count."""
_HALT_WEIGHT = 0.5


class PuzzleLosses(NamedTuple):
    """For each puzzle; tensors of the same length."""

    tokens: Tensor
    halting: Tensor
    is_right: Tensor


def stablemax_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p of each label, 0 where it is ignored: p is s(v) / sum s, and s is v + 1, or 1 / (1 - v) below 0."""
    wide = logits.to(widest_float(logits.device))
    # min and max keep both branches finite, so that the gradient of the one not taken is not 0 times infinity.
    sizes = torch.where(wide < 0, 1 / (1 - wide.clamp(max=0)), wide.clamp(min=0) + 1)
    counts = labels != IGNORED_LABEL
    chosen = sizes.gather(-1, torch.where(counts, labels, 0)[..., None]).squeeze(-1)
    return torch.where(counts, sizes.sum(-1).log() - chosen.log(), 0)


def puzzle_losses(logits: Tensor, halt: Tensor, labels: Tensor) -> PuzzleLosses:
    """The losses of each puzzle, and whether all its tokens are right."""
    counts = labels != IGNORED_LABEL
    number = counts.sum(-1).clamp(min=1)
    is_right = ((logits.argmax(-1) == labels) | ~counts).all(-1)
    halting = functional.binary_cross_entropy_with_logits(halt, is_right.to(halt.dtype), reduction="none")
    return PuzzleLosses(tokens=stablemax_loss(logits, labels).sum(-1) / number, halting=halting, is_right=is_right)


def puzzle_loss(model: PuzzleModel, micro: MicroBatch) -> Tensor:
    """The mean over the slots of a micro-batch. In training mode the slots go one step on; else nothing remembers."""
    offer = slot_input(micro)
    held = model.slots.held(offer) if model.training else new_batch(model, offer)
    y, z, logits, halting = model(held.inputs, held.puzzles, held.y, held.z, held.is_new)
    found = puzzle_losses(logits, halting[:, 0], held.labels)
    if model.training:
        model.slots.settle(offer.first, held, y=y, z=z, halt=halting[:, 0])
    return (found.tokens + _HALT_WEIGHT * found.halting).mean()


def slot_input(micro: MicroBatch) -> SlotInput:
    """Rows of data as slots take them."""
    if micro.first_index is None:
        raise WhetError(
            "the samples of a micro-batch must lie in a row in the global batch",
            got="samples sorted by length",
            try_="puzzles of one length",
        )
    return SlotInput(
        first=micro.first_index,
        inputs=micro.inputs.long(),
        labels=micro.labels.long(),
        puzzles=micro.puzzles.long(),
    )


def new_batch(model: PuzzleModel, offer: SlotInput) -> SlotBatch:
    """What is offered, at its beginning."""
    shape = (len(offer.inputs), model.shape.num_places, model.shape.width)
    return SlotBatch(
        inputs=offer.inputs,
        labels=offer.labels,
        puzzles=offer.puzzles,
        y=model.y0.expand(shape),
        z=model.z0.expand(shape),
        is_new=torch.ones_like(offer.puzzles, dtype=torch.bool),
        steps=torch.zeros_like(offer.puzzles),
    )
