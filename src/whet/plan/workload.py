"""Workload: what is trained, as far as a plan needs to know. A plan changes nothing here."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from whet.base.model import FrozenModel

Scaling = Literal["linear", "square root"]


class BatchPoint(FrozenModel):
    """One global batch that was tried."""

    batch: PositiveInt
    samples_per_second: PositiveFloat | None = None
    """None where no step could be measured."""
    low: PositiveFloat | None = None
    high: PositiveFloat | None = None
    confidence: float = 0.0
    """That the true median lies between the two."""
    steps: NonNegativeInt = 0
    micro_batch: PositiveInt | None = None
    peak_bytes: NonNegativeInt | None = None
    words: str = ""
    """Why there is no number."""


class AutoBatch(FrozenModel):
    """The global batch at the knee, and the learning rates that go with it."""

    batch: PositiveInt
    base_batch: PositiveInt
    """The one that the learning rate was meant for."""
    base_rates: tuple[NonNegativeFloat, ...] = Field(min_length=1)
    """As they were given, one for each group of parameters."""
    rates: tuple[NonNegativeFloat, ...] = Field(min_length=1)
    """What is trained with."""
    factor: PositiveFloat
    """What each was multiplied by."""
    scaling: Scaling
    reason: str
    rate_reason: str
    points: tuple[BatchPoint, ...] = ()
    """All that were tried, the smallest first."""
    spent_seconds: NonNegativeFloat = 0.0

    @property
    def lines(self) -> tuple[str, ...]:
        """What to tell whoever asked for it."""
        return f"global batch {self.reason}", self.rate_reason


WEIGHT_BYTES = 4
GRADIENT_BYTES = 4
ADAM_STATE_BYTES = 8


class Workload(FrozenModel):
    recipe: str
    num_parameters: PositiveInt
    """Those that are trained."""
    num_frozen: NonNegativeInt = 0
    """Those that stay as they are: they take memory, and have neither gradient nor optimizer state."""
    global_batch_size: PositiveInt
    num_samples: PositiveInt | None = None
    """Samples of one epoch; None when the data has no length."""
    num_steps: PositiveInt | None = None
    """Optimizer steps of the whole run."""
    max_length: PositiveInt = 1
    """Rows that one sample puts through a matrix product: tokens for text, 1 for a vector."""
    mean_length: float | None = None
    lengths_vary: bool = False
    sample_bytes: PositiveInt | None = None
    """One sample as it lies on the device."""
    activation_bytes: PositiveInt | None = None
    """What one sample of the greatest length keeps alive for the backward pass, in float32."""
    optimizer_bytes: int = ADAM_STATE_BYTES
    """Optimizer state per parameter: 8 for Adam, 4 for momentum, 0 for plain SGD."""
    can_pack: bool = False
    """The model takes samples one after the other, without padding."""
    needs_decoding: bool = False
    """Samples must be read or decoded on the CPU (images, audio), so workers may pay."""
    has_dropout: bool = False
    has_batchnorm: bool = False
    is_causal: bool = False
    layers: tuple[str, ...] = ()
    """Kinds of layers that known wrong results speak of (`plan/hazard_table.py`), as far as they were seen."""
    world_size: PositiveInt = 1
    """Processes that share each global batch."""
    local_size: PositiveInt = 1
    """Those of them on this machine."""
    batch: AutoBatch | None = None
    """How the global batch came about where the user left it open (global_batch_size=auto)."""

    @property
    def share(self) -> int:
        """Samples of a global batch that fall to one process, at most."""
        return -(-self.global_batch_size // self.world_size)

    @property
    def static_bytes(self) -> int:
        """Weights, gradients and optimizer state in float32: what a run needs before the first sample."""
        return self.weight_bytes + self.num_parameters * (GRADIENT_BYTES + self.optimizer_bytes)

    @property
    def weight_bytes(self) -> int:
        """All weights in float32, the frozen ones too."""
        return (self.num_parameters + self.num_frozen) * WEIGHT_BYTES

    @property
    def data_bytes(self) -> int | None:
        """The whole data set as it would lie on the device."""
        if self.num_samples is None or self.sample_bytes is None:
            return None
        return self.num_samples * self.sample_bytes
