"""What can be set for Hex, and what it means for a plan; no torch."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from whet.base.errors import UsageError
from whet.config.options import Auto, CommonConfig
from whet.plan.kernel_support import GROUP_NORM_ACTIVATION, supports_group_norm
from whet.plan.workload import Workload
from whet.recipes.hex.architecture import HexArch, activation_bytes, count_parameters, num_groups

DEFAULT_SIZE = 5
_BYTES_BESIDE_CELLS = 8 + 4
"""Of a position: its move and its result."""


class SelfPlayOptions(BaseModel):
    """How a self-play goes on, generation by generation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    generations: PositiveInt = Field(10, description="how often it plays, learns and is judged")
    games: Annotated[int, Field(ge=40, le=10**6)] = Field(500, description="games of the champion with itself")
    simulations: Annotated[int, Field(gt=0, le=10**5)] = Field(64, description="looks ahead for a move")
    free_moves: NonNegativeInt = Field(4, description="moves drawn by the looks at them; later the best is taken")
    window: PositiveInt = Field(5, description="generations whose games are learned from: the replay buffer")
    epochs: PositiveInt = Field(2, description="passes over those games")
    lr: PositiveFloat = Field(1e-3, description="learning rate of generations after the first")
    gate_games: Annotated[int, Field(ge=2, le=10**6)] = Field(200, description="games against the champion before it")
    gate_simulations: NonNegativeInt = Field(
        4, description="looks ahead in those games; few show what the net itself knows, with many 5x5 is played alike"
    )
    gate: Annotated[float, Field(ge=0, le=1)] = Field(0.52, description="win rate from which it is the champion")


class HexConfig(CommonConfig):
    """Hex: the common keys, the weights of the loss and the net's."""

    defaults: ClassVar[Mapping[str, Any]] = {"global_batch_size": 256, "lr": 2e-3, "dropout": 0.0}
    descriptions: ClassVar[Mapping[str, str]] = {"dropout": "share dropped before the value's last layer"}

    size: Annotated[int, Field(ge=2, le=26)] | Auto = Field("auto", description="of the board; the data's, else 5")
    games: Annotated[int, Field(ge=10, le=10**7)] = Field(
        6_000, description="how many games the two-distance player plays where no data is given; kept for the next time"
    )
    policy_weight: NonNegativeFloat = Field(1.0, description="what the cross entropy of the move counts in the loss")
    value_weight: NonNegativeFloat = Field(1.0, description="what the cross entropy of the result counts in the loss")
    uncertainty_weight: NonNegativeFloat = Field(
        0.1, description="what knowing how wrong the value is counts in the loss; it moves neither policy nor value"
    )
    augment: bool = Field(
        True, description="learn each position as it is and turned by 180 degrees: an epoch has twice the positions"
    )
    selfplay: bool = Field(False, description="play, learn and be judged, generation by generation (loop.*)")
    loop: SelfPlayOptions = SelfPlayOptions()
    arch: HexArch = HexArch()

    @model_validator(mode="after")
    def something_is_learned(self) -> "HexConfig":
        if self.policy_weight == 0 and self.value_weight == 0:
            raise UsageError(
                "nothing would be learned", got="policy_weight=0 value_weight=0", try_="one of them above 0"
            )
        if self.selfplay and self.data is not None:
            raise UsageError(
                "a self-play makes its own games", got="selfplay and data", try_="init_from=RUN, a run of that data"
            )
        return self

    @property
    def default_size(self) -> int:
        """The board's size where no data tells another."""
        return DEFAULT_SIZE if self.size == "auto" else self.size


def check_board_size(config: HexConfig, size: int) -> None:
    """Data has one size."""
    if config.size not in ("auto", size):
        raise UsageError("the data has boards of another size", got=f"size={config.size}", try_=f"size={size}, or none")


def check_data_path(config: HexConfig) -> None:
    """One folder of positions, or none."""
    if config.data_paths:
        raise UsageError("positions come from one folder", got="data_paths", try_="data=DIR that whet data hex made")
    if config.data is not None and not Path(config.data).is_dir():
        raise UsageError("the data is not there", got=f"data={config.data}", try_="a folder that whet data hex made")


def check_splits(num_train: int, num_dev: int, num_test: int) -> None:
    """A training needs positions to learn from and positions to be judged by; the test part may be empty."""
    if not (num_train and num_dev):
        raise UsageError(
            f"there are no positions {'to judge a training by' if num_train else 'to learn from'}",
            got=f"positions of train {num_train:,}, dev {num_dev:,}, test {num_test:,}",
            try_="more games, or whet data hex FILE --output-dir DIR with another --seed or --val-share",
        )


def describe_hex(config: HexConfig, *, size: int | None = None, num_samples: int | None = None) -> Workload:
    """The workload that a config stands for; what only the data knows is unknown until it was read."""
    size = size or config.default_size
    return Workload(
        recipe="hex",
        num_parameters=count_parameters(config.arch),
        global_batch_size=config.global_batch_size,
        num_samples=num_samples,
        num_steps=_num_steps(config, num_samples),
        # Convolutions are no matrix products with a row for each cell; attention's linear layers are.
        max_length=size * size if config.arch.num_attention_blocks else 1,
        sample_bytes=size * size + _BYTES_BESIDE_CELLS,
        activation_bytes=activation_bytes(config.arch, size=size),
        has_dropout=config.dropout > 0,
        has_batchnorm=config.arch.norm == "batch",
        layers=_layers(config.arch, num_cells=size * size),
    )


def _num_steps(config: HexConfig, num_samples: int | None) -> int | None:
    if num_samples is None:
        return config.max_steps
    steps = config.epochs * math.ceil(num_samples / config.global_batch_size)
    return min(steps, config.max_steps) if config.max_steps else steps


def _layers(arch: HexArch, *, num_cells: int) -> tuple[str, ...]:
    is_plain = arch.norm == "group" and arch.activation in ("silu", "relu")
    more = {
        "attention": arch.num_attention_blocks > 0,
        "gelu": arch.activation == "gelu",
        GROUP_NORM_ACTIVATION: is_plain and supports_group_norm(num_cells, arch.width, num_groups(arch.width)),
    }
    return tuple(sorted({"conv", "conv2d", "linear", *(name for name, is_there in more.items() if is_there)}))
