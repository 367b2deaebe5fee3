"""The tiny recursive model, its loss, and the names of its weights in the official implementation.

Shapes: B puzzles, S positions (the prefix with the puzzle's embedding, then its tokens), W width.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.base.errors import WhetError
from whet.data.batch import DictBatch
from whet.data.padding import IGNORED_LABEL
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
from whet.recipes.puzzle.config import PuzzleArch, Sizes
from whet.recipes.puzzle.slots import SlotBatch, SlotInput, Slots

_HALT_BIAS = -5.0
"""Initial bias of the halting head, so that an untrained model does not halt."""
# Weight of the halting loss, as in the official implementation.
_HALT_WEIGHT = 0.5


class PuzzleModel(nn.Module):
    """The network and its slots. One forward pass is one step of deep supervision."""

    y0: Tensor
    z0: Tensor
    cosines: Tensor
    sines: Tensor

    def __init__(self, arch: PuzzleArch, sizes: Sizes, *, num_slots: int, seed: int) -> None:
        """Create a model that works on `num_slots` puzzles at once. `seed` determines the halting exploration."""
        super().__init__()
        self.arch = arch
        self.num_positions = arch.puzzle_emb_len + sizes.length
        width = arch.hidden_size
        self.tokens = init_embedding(sizes.num_tokens, width)
        self.places = init_embedding(self.num_positions, width) if arch.pos_encodings == "learned" else None
        self.table = PuzzleTable(sizes.num_puzzles, arch.puzzle_width) if arch.puzzle_width else None
        self.blocks = nn.ModuleList(_block(arch, self.num_positions) for _ in range(arch.L_layers))
        self.to_tokens = init_linear(width, sizes.num_tokens)
        self.to_halt = nn.Linear(width, 2)
        nn.init.zeros_(self.to_halt.weight)
        nn.init.constant_(self.to_halt.bias, _HALT_BIAS)
        self.register_buffer("y0", truncated_normal_(torch.empty(width), deviation=1))
        self.register_buffer("z0", truncated_normal_(torch.empty(width), deviation=1))
        # Precompute the angles. Otherwise, compiled code would recompute them for every element in each of the 42
        # block applications of a step.
        angles = rotary_angles(torch.arange(self.num_positions), width // arch.num_heads)
        for name, table in zip(("cosines", "sines"), angles, strict=True):
            self.register_buffer(name, table, persistent=False)
        self.slots = Slots(
            num_slots,
            length=sizes.length,
            state_shape=(self.num_positions, width),
            max_steps=arch.halt_max_steps,
            exploration=arch.halt_exploration_prob,
            seed=seed,
        )

    def forward(
        self, inputs: Tensor, puzzles: Tensor, y: Tensor, z: Tensor, is_new: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the next y and z, (B, S, W), the token logits, and the halting logits, (B, 2).

        Only the first halting logit is used.
        """
        dtype = _compute_dtype(self.to_tokens.weight)
        x = self._embed(inputs, puzzles).to(dtype)
        y = torch.where(is_new[:, None, None], self.y0, y).to(dtype)
        z = torch.where(is_new[:, None, None], self.z0, z).to(dtype)
        args = self._attention_args()

        def net(state: Tensor, added: Tensor) -> Tensor:
            state = state + added
            for block in self.blocks:
                state = block(state, args)
            return state

        # Detach y and z below, so that gradients do not flow between supervision steps.
        y, z = refine(net, y, z, x, outer=self.arch.H_cycles, inner=self.arch.L_cycles)
        logits = self.to_tokens(y[:, self.arch.puzzle_emb_len :])
        return y.detach(), z.detach(), logits, self.to_halt(y[:, 0]).float()

    def initial_states(self, num_puzzles: int) -> tuple[Tensor, Tensor]:
        """Return the initial y and z, (B, S, W)."""
        shape = (num_puzzles, self.num_positions, self.arch.hidden_size)
        return self.y0.expand(shape), self.z0.expand(shape)

    def _embed(self, inputs: Tensor, puzzles: Tensor) -> Tensor:
        prefix, width = self.arch.puzzle_emb_len, self.arch.hidden_size
        x = self.tokens(inputs)
        if self.table is not None:
            vector = functional.pad(self.table(puzzles), (0, prefix * width - self.arch.puzzle_width))
            x = torch.cat((vector.view(-1, prefix, width), x), dim=1)
        if self.places is not None:
            # Both embeddings have the same standard deviation. Scale their sum to keep it.
            x = math.sqrt(0.5) * (x + self.places.weight)
        scaled: Tensor = math.sqrt(width) * x
        return scaled

    def _attention_args(self) -> AttentionArgs:
        if self.arch.pos_encodings != "rope" or self.arch.mlp_t:
            return AttentionArgs()
        return AttentionArgs(rotation=(self.cosines, self.sines))


class PuzzleTable(nn.Module):
    """One embedding per puzzle, without EMA. A step updates only the rows that it uses, by the sign of the gradient."""

    is_averaged = False
    is_table = True

    is_seen: Tensor

    def __init__(self, num_puzzles: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_puzzles, width))
        self.register_buffer("is_seen", torch.zeros(num_puzzles, dtype=torch.bool), persistent=False)

    def forward(self, puzzles: Tensor) -> Tensor:
        return functional.embedding(puzzles, self.weight)

    def mark_seen(self, puzzles: Tensor, *, is_first: bool) -> None:
        """Mark the rows of a micro-batch as seen. The first micro-batch of a step clears the previous marks."""
        if is_first:
            self.is_seen.zero_()
        self.is_seen.index_fill_(0, puzzles, True)

    def seen_rows(self) -> Tensor:
        """Return a mask of the rows that the current step uses, (num_puzzles,). The optimizer updates only these."""
        return self.is_seen


class MixerBlock(nn.Module):
    """A feed-forward layer across positions, which replaces attention, followed by one across features."""

    def __init__(self, width: int, *, num_positions: int, expansion: float) -> None:
        super().__init__()
        self.mix = SwiGLU(num_positions, expansion=expansion)
        self.feed_forward = SwiGLU(width, expansion=expansion)

    def forward(self, x: Tensor, args: AttentionArgs) -> Tensor:  # noqa: ARG002 (the signature of attention blocks)
        transposed = x.transpose(1, 2)
        x = rms_norm(transposed + self.mix(transposed)).transpose(1, 2)
        return rms_norm(x, self.feed_forward(x))


def _block(arch: PuzzleArch, num_positions: int) -> nn.Module:
    if arch.mlp_t:
        return MixerBlock(arch.hidden_size, num_positions=num_positions, expansion=arch.expansion)
    return PostNormBlock(arch.hidden_size, num_heads=arch.num_heads, expansion=arch.expansion)


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """Return the autocast dtype, or the dtype of the weight. States have it too, to avoid conversions."""
    device_type = weight.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype


# --- loss -------------------------------------------------------------------------------------------------------------


class PuzzleLosses(NamedTuple):
    """Losses of each puzzle, (B,)."""

    tokens: Tensor
    """Mean loss over the tokens of each puzzle."""
    halting: Tensor
    is_right: Tensor
    """Whether all tokens of each puzzle are correct."""


def puzzle_loss(model: PuzzleModel, micro: DictBatch) -> Tensor:
    """Return the mean loss over the slots of a micro-batch: the token loss plus the weighted halting loss.

    In training mode, the slots advance by one step. In evaluation mode, every puzzle starts from the initial state, and
    the slots do not change.
    """
    offered = slot_input(micro)
    batch = model.slots.load(offered) if model.training else new_batch(model, offered)
    y, z, logits, halting = model(batch.inputs, batch.puzzles, batch.y, batch.z, batch.is_new)
    losses = puzzle_losses(logits, halting[:, 0], batch.labels)
    if model.training:
        model.slots.store(offered.first, batch, y=y, z=z, halt=halting[:, 0])
        if model.table is not None:
            model.table.mark_seen(batch.puzzles, is_first=offered.first == 0)
    return (losses.tokens + _HALT_WEIGHT * losses.halting).mean()


def puzzle_losses(logits: Tensor, halt: Tensor, labels: Tensor) -> PuzzleLosses:
    """Return the losses of each puzzle. The target of `halt` is whether all tokens are correct."""
    is_counted = labels != IGNORED_LABEL
    num_counted = is_counted.sum(-1).clamp(min=1)
    # Ignored tokens count as correct, so that they do not affect `halt`.
    is_right = ((logits.argmax(-1) == labels) | ~is_counted).all(-1)
    halting = functional.binary_cross_entropy_with_logits(halt, is_right.to(halt.dtype), reduction="none")
    tokens = stablemax_loss(logits, labels).sum(-1) / num_counted
    return PuzzleLosses(tokens=tokens, halting=halting, is_right=is_right)


def stablemax_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the stablemax cross entropy of each label, (B, length). It is 0 where the label is ignored.

    Stablemax is p = s(v) / sum(s), where s(v) is v + 1 for v >= 0 and 1 / (1 - v) for v < 0. It is the loss of the
    official implementation (Prieto et al. 2025, "Grokking at the Edge of Numerical Stability").
    """
    wide = logits.to(widest_float(logits.device))
    # clamp keeps both branches finite. Otherwise, the gradient of the unused branch would be 0 times infinity, a NaN.
    sizes = torch.where(wide < 0, 1 / (1 - wide.clamp(max=0)), wide.clamp(min=0) + 1)
    is_counted = labels != IGNORED_LABEL
    chosen = sizes.gather(-1, torch.where(is_counted, labels, 0)[..., None]).squeeze(-1)
    return torch.where(is_counted, sizes.sum(-1).log() - chosen.log(), 0)


def slot_input(micro: DictBatch) -> SlotInput:
    """Convert a micro-batch to the input of consecutive slots. Raise WhetError if its samples are not consecutive."""
    if micro.first_index is None:
        raise WhetError(
            "the samples of a micro-batch must be consecutive in the global batch",
            got="samples sorted by length",
            try_="puzzles of one length",
        )
    return SlotInput(
        first=micro.first_index,
        inputs=micro.inputs.long(),
        labels=micro.labels.long(),
        puzzles=micro.puzzles.long(),
    )


def new_batch(model: PuzzleModel, offered: SlotInput) -> SlotBatch:
    """Return a batch in which all offered puzzles are new. Slots are not used."""
    y, z = model.initial_states(len(offered.inputs))
    return SlotBatch(
        inputs=offered.inputs,
        labels=offered.labels,
        puzzles=offered.puzzles,
        y=y,
        z=z,
        is_new=torch.ones_like(offered.puzzles, dtype=torch.bool),
        steps=torch.zeros_like(offered.puzzles),
    )


# --- names of the official implementation (SamsungSAILMontreal/TinyRecursiveModels) -----------------------------------

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


def official_name(name: str) -> str:
    """Return the name of a weight in the official implementation.

    >>> official_name("blocks.1.feed_forward.down.weight")
    'L_level.layers.1.mlp.down_proj.weight'
    """
    if name.startswith("blocks."):
        _, index, rest = name.split(".", 2)
        return f"L_level.layers.{index}.{_OFFICIAL_BLOCK_NAMES[rest]}"
    return _OFFICIAL_NAMES[name]
