"""Options of the puzzle recipe, and the workload that they describe. Does not import torch."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from whet.base.errors import UsageError
from whet.config.options import Auto, CommonConfig
from whet.plan.kernel_support import ADD_NORM, SHORT_ROTARY_ATTENTION, supports_add_norm, supports_short_attention
from whet.plan.workload import OPTIMIZER_BYTES, Workload

TRAIN_GRIDS_4X4 = 200
PUZZLES_PER_GRID = 32
NUM_HELD_OUT = 256
"""Number of generated puzzles in the val split, and in the test split."""

_SMALL_ARCH = {
    "hidden_size": 64,
    "num_heads": 4,
    "H_cycles": 2,
    "L_cycles": 3,
    "halt_max_steps": 8,
    "puzzle_emb_len": 1,
}
_SMALL = {"global_batch_size": 64, "lr": 1e-3, "warmup_steps": 100, "weight_decay": 0.1, "epochs": 6, "blanks": 10}
"""Defaults for 4x4 Sudokus. Training takes minutes on a CPU."""
_LARGE = {"global_batch_size": 768, "lr": 1e-4, "warmup_steps": 2000, "weight_decay": 1.0, "epochs": 60, "blanks": 50}
"""Defaults for 9x9 Sudokus and given data: the settings of the official implementation for Sudokus."""


class PuzzleArch(BaseModel):
    """Architecture options of the recursive model, with the names of the official implementation."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    hidden_size: Annotated[int, Field(gt=0, le=65_536)] = Field(512, description="width; 64 for generated 4x4")
    num_heads: Annotated[int, Field(gt=0, le=65_536)] = Field(
        8, description="attention heads, each of an even width; 4 for generated 4x4"
    )
    expansion: Annotated[float, Field(gt=0, le=64)] = Field(4, description="expansion of feed-forward layers")
    L_layers: Annotated[int, Field(gt=0, le=1_000)] = Field(2, description="blocks of the network")
    H_cycles: Annotated[int, Field(gt=0, le=1_000)] = Field(
        3, description="updates of the answer per step, the last with gradients; 2 for generated 4x4"
    )
    L_cycles: Annotated[int, Field(gt=0, le=1_000)] = Field(
        6, description="updates of the latent before each update of the answer; 3 for generated 4x4"
    )
    halt_max_steps: Annotated[int, Field(gt=0, le=1_000)] = Field(
        16, description="maximum supervision steps per puzzle; 8 for generated 4x4"
    )
    halt_exploration_prob: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="probability that a puzzle continues although the model halts it"
    )
    pos_encodings: Literal["rope", "learned", "none"] = Field("rope", description="position encoding of attention")
    mlp_t: bool = Field(True, description="mix positions by a feed-forward layer instead of attention")
    puzzle_emb_len: Annotated[int, Field(ge=0, le=4_096)] = Field(
        16, description="positions in front that hold the puzzle's embedding; 1 for generated 4x4"
    )
    puzzle_emb_ndim: Annotated[int, Field(ge=0, le=10**7)] | Auto = Field(
        "auto", description="size of that embedding; auto: hidden_size, or 0 without positions for it"
    )

    @model_validator(mode="after")
    def check_sizes(self) -> "PuzzleArch":
        if not self.mlp_t and self.hidden_size % (2 * self.num_heads):
            raise UsageError(
                "the width of a head must be an even number",
                got=f"arch.hidden_size={self.hidden_size} arch.num_heads={self.num_heads}",
                try_=f"arch.hidden_size={2 * self.num_heads * max(1, round(self.hidden_size / 2 / self.num_heads))}",
            )
        if (self.puzzle_width == 0) != (
            self.puzzle_emb_len == 0
        ) or self.puzzle_width > self.puzzle_emb_len * self.hidden_size:
            raise UsageError(
                "the puzzle's embedding does not fit its positions",
                got=f"arch.puzzle_emb_ndim={self.puzzle_emb_ndim} arch.puzzle_emb_len={self.puzzle_emb_len}",
                try_=f"arch.puzzle_emb_len={math.ceil(self.puzzle_width / self.hidden_size)}",
            )
        return self

    @property
    def puzzle_width(self) -> int:
        """Size of the embedding of a puzzle. 0 if puzzles have none."""
        if self.puzzle_emb_ndim != "auto":
            return self.puzzle_emb_ndim
        return self.hidden_size if self.puzzle_emb_len else 0


class PuzzleConfig(CommonConfig):
    """Options of the puzzle recipe: the common options, and options of the data and the model."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "global_batch_size": 64,
        "epochs": 6,
        "optimizer": "adam_atan2",
        "lr": 1e-3,
        "weight_decay": 0.1,
        "schedule": "constant",
        "warmup_steps": 100,
        "ema": True,
        "clip": None,
    }
    descriptions: ClassVar[Mapping[str, str]] = {
        "global_batch_size": "puzzles worked on at once, each in its own slot; 768 for 9x9 and given data",
        "epochs": "passes over the training data; 60 for 9x9 and given data",
        "lr": "learning rate after the warm-up; 1e-4 for 9x9 and given data",
        "weight_decay": "weight decay; 1.0 for 9x9 and given data",
        "warmup_steps": "steps until the full learning rate; 2,000 for 9x9 and given data",
    }

    size: Literal[4, 9] = Field(4, description="side of the generated Sudokus; unused with data")
    puzzles: Annotated[int, Field(gt=0, le=10**7)] | Auto = Field(
        "auto", description="Sudokus to train on; auto: 6,400 of 4x4, 1,000 of 9x9, all of given data"
    )
    blanks: Annotated[int, Field(gt=0, le=64)] = Field(
        10, description="blank cells of a generated Sudoku, fewer if it needs more digits to be unique; 50 for 9x9"
    )
    augment: Annotated[int, Field(ge=0, le=10**5)] = Field(
        0, description="augmented copies of each 9x9 training Sudoku; the official data has 1000"
    )
    eval_puzzles: PositiveInt = Field(
        2_000, description="maximum number of given puzzles for validation, and for the test"
    )

    puzzle_emb_lr: PositiveFloat | None = Field(None, description="learning rate of puzzle embeddings; null: lr")
    puzzle_emb_weight_decay: NonNegativeFloat | None = Field(
        None, description="weight decay of puzzle embeddings; null: weight_decay"
    )
    dropout: Annotated[float, Field(ge=0, le=0)] = Field(0.0, description="the model has none")
    arch: PuzzleArch = PuzzleArch()

    group_aliases: ClassVar[dict[str, str]] = {"attention_heads": "arch.num_heads"}

    @model_validator(mode="before")
    @classmethod
    def fill_dependent_defaults(cls, given: Any) -> Any:
        """Apply the defaults for small or large puzzles. Explicit values take precedence."""
        if not isinstance(given, dict):
            return given
        is_small = str(given.get("size", 4)) == "4" and not given.get("data") and not given.get("data_paths")
        filled = {**(_SMALL if is_small else _LARGE), **given}
        arch = filled.get("arch", {})
        return {**filled, "arch": {**_SMALL_ARCH, **arch}} if is_small and isinstance(arch, dict) else filled

    @model_validator(mode="after")
    def check_augmentation(self) -> "PuzzleConfig":
        if self.is_generated and self.size == 4 and self.augment:
            raise UsageError(
                "augmented 4x4 grids would include held-out ones: there are only 288",
                got=f"augment={self.augment}",
                try_="augment=0, or size=9",
            )
        return self

    @property
    def is_generated(self) -> bool:
        """Whether Sudokus are generated because no data is given."""
        return not self.paths

    @property
    def num_generated(self) -> int:
        """Number of generated training Sudokus, without augmented copies."""
        if self.puzzles != "auto":
            return self.puzzles
        return TRAIN_GRIDS_4X4 * PUZZLES_PER_GRID if self.size == 4 else 1_000


class Sizes(BaseModel):
    """Sizes of a model that are determined by the data."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True)

    num_tokens: int
    """Vocabulary size."""
    length: int
    """Number of tokens of a puzzle."""
    num_puzzles: int
    """Number of puzzle embeddings."""


def generated_sizes(config: PuzzleConfig) -> Sizes:
    """Return the sizes for generated Sudokus. Tokens are padding, blank and digits. All puzzles share one embedding."""
    return Sizes(num_tokens=config.size + 2, length=config.size**2, num_puzzles=1)


def describe(config: PuzzleConfig, sizes: Sizes | None = None, num_samples: int | None = None) -> Workload:
    """Return the workload of a config. For user data, `sizes` and `num_samples` are None until the data is read."""
    for path in config.paths:
        if not path.exists():
            raise UsageError("the data does not exist", got=f"data={path}", try_="a file or folder that exists")
    if config.is_generated:
        num_samples = config.num_generated * (config.augment + 1)
    sizes = sizes or generated_sizes(config)
    return Workload(
        recipe="puzzle",
        num_parameters=count_parameters(config.arch, sizes),
        global_batch_size=config.global_batch_size,
        optimizer_bytes=OPTIMIZER_BYTES[config.optimizer],
        built_optimizer=config.optimizer,
        num_samples=num_samples,
        num_steps=config.count_steps(num_samples),
        max_length=sizes.length + config.arch.puzzle_emb_len,
        sample_bytes=4 * sizes.length + 8,
        **_cost(config.arch, sizes),
        layers=_layers(config.arch, num_positions=sizes.length + config.arch.puzzle_emb_len),
    )


def _cost(arch: PuzzleArch, sizes: Sizes) -> dict[str, float | int]:
    """Return the FLOPs per sample, moved bytes and operators of a step. Only the last cycle has a backward pass."""
    width, positions = arch.hidden_size, arch.puzzle_emb_len + sizes.length
    if arch.mlp_t:
        mixer = 2 * _feed_forward(positions, arch) * width
    else:
        mixer = 2 * 4 * width**2 * positions + 4 * positions**2 * width
    block = mixer + 2 * _feed_forward(width, arch) * positions
    with_gradient = arch.L_layers * (arch.L_cycles + 1)
    applications = arch.H_cycles * with_gradient
    return {
        "flops_per_sample": float(block * (applications + 2 * with_gradient)),
        # As for the chat model: float32 values of 16 times the width and 5 times the inner width per block.
        "moved_bytes": 4 * positions * with_gradient * (16 * width + 5 * _feed_forward(width, arch) // (3 * width)),
        "num_operators": 20 * applications + 40 * with_gradient + 100,
    }


def _layers(arch: PuzzleArch, *, num_positions: int) -> tuple[str, ...]:
    has_rotary = not arch.mlp_t and arch.pos_encodings == "rope"
    optional = {
        "attention": not arch.mlp_t,
        SHORT_ROTARY_ATTENTION: has_rotary
        and supports_short_attention(num_positions, arch.hidden_size // arch.num_heads),
        ADD_NORM: supports_add_norm(arch.hidden_size),
    }
    return ("linear", *(name for name, is_used in optional.items() if is_used))


def count_parameters(arch: PuzzleArch, sizes: Sizes) -> int:
    """Return the number of parameters of the embeddings, blocks and heads."""
    width, positions = arch.hidden_size, arch.puzzle_emb_len + sizes.length
    mixer = _feed_forward(positions, arch) if arch.mlp_t else 4 * width**2
    embeddings = (2 * sizes.num_tokens + (positions if arch.pos_encodings == "learned" else 0)) * width
    blocks = arch.L_layers * (mixer + _feed_forward(width, arch))
    return embeddings + sizes.num_puzzles * arch.puzzle_width + blocks + 2 * (width + 1)


def _feed_forward(width: int, arch: PuzzleArch) -> int:
    return 3 * width * 256 * math.ceil(round(arch.expansion * width * 2 / 3) / 256)
