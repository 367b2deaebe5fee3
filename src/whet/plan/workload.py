"""The workload: facts about a training run that a plan depends on. A plan never changes them."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from whet.base.model import FrozenModel

# Weights, gradients and optimizer state stay in float32 at every precision. Adam keeps two values per weight.
WEIGHT_BYTES = 4
GRADIENT_BYTES = 4
ADAM_STATE_BYTES = 8
OPTIMIZER_BYTES = {
    "adamw": ADAM_STATE_BYTES,
    "adam_atan2": ADAM_STATE_BYTES,
    # The momentum buffer.
    "sgd": 4,
    # Adafactor keeps one row and one column for each matrix, which is far less than a byte per parameter. Convolutions
    # and vectors take 4 bytes per parameter.
    "adafactor": 1,
}
"""Bytes of state per trainable parameter, by the name of the optimizers that whet builds."""

OPTIMIZER_KERNELS = {
    "adamw": ("fused", "foreach", "loop"),
    "sgd": ("fused", "foreach", "loop"),
    "adam_atan2": ("foreach", "loop"),
    "adafactor": ("foreach", "loop"),
}
"""Kernels of the optimizers that whet builds, by name."""

Scaling = Literal["linear", "square root"]


class BatchPoint(FrozenModel):
    """The measurement of one global batch size."""

    batch: PositiveInt
    samples_per_second: PositiveFloat | None = None
    """Measured rate, or None if no step could be measured."""
    low: PositiveFloat | None = None
    high: PositiveFloat | None = None
    confidence: float = 0.0
    """Probability that the true median lies between `low` and `high`."""
    steps: NonNegativeInt = 0
    micro_batch: PositiveInt | None = None
    peak_bytes: NonNegativeInt | None = None
    note: str = ""
    """Reason why there is no rate, or empty."""


class AutoBatch(FrozenModel):
    """The batch size chosen by measurement for global_batch_size=auto, and the learning rates scaled to it.

    It is measured once and stored with the run, so that a resumed run trains with the same batch size.
    """

    batch: PositiveInt
    base_batch: PositiveInt
    """Batch size that the given learning rate is meant for."""
    base_rates: tuple[NonNegativeFloat, ...] = Field(min_length=1)
    """Given learning rates, one per parameter group."""
    rates: tuple[NonNegativeFloat, ...] = Field(min_length=1)
    """Learning rates used in training."""
    factor: PositiveFloat
    """Ratio of `rates` to `base_rates`."""
    scaling: Scaling
    reason: str
    rate_reason: str
    points: tuple[BatchPoint, ...] = ()
    """All measured batch sizes, smallest first."""
    spent_seconds: NonNegativeFloat = 0.0

    @property
    def lines(self) -> tuple[str, ...]:
        """Two lines of text: the chosen batch size and the scaled learning rates, with reasons."""
        return f"global batch {self.reason}", self.rate_reason


class Workload(FrozenModel):
    """The sizes of a model, its data and its batches, which a plan depends on."""

    recipe: str
    num_parameters: PositiveInt
    """Trainable parameters."""
    num_frozen: NonNegativeInt = 0
    """Frozen parameters, which take memory but have neither gradient nor optimizer state."""
    global_batch_size: PositiveInt
    num_samples: PositiveInt | None = None
    """Samples per epoch, or None if the data has no length."""
    num_steps: PositiveInt | None = None
    """Optimizer steps of the whole run, or None if unknown."""
    max_length: PositiveInt = 1
    """Rows that one sample adds to a matrix product, at most: the number of tokens for text, 1 for a vector."""
    mean_length: float | None = None
    lengths_vary: bool = False
    sample_bytes: PositiveInt | None = None
    """Size of one sample on the device."""
    activation_bytes: PositiveInt | None = None
    """Bytes that one sample of the maximum length keeps for the backward pass, in float32."""
    flops_per_sample: PositiveFloat | None = None
    """FLOPs of one sample of full length, forward and backward. None means that each weight is used once per row."""
    moved_bytes: PositiveInt | None = None
    """Bytes of a sample's activations in float32, for time estimates if `activation_bytes` is measured by the run."""
    num_operators: PositiveInt | None = None
    """Approximate number of operators that a step with one micro-batch runs: forward, backward and update."""
    optimizer_bytes: int = ADAM_STATE_BYTES
    """Bytes of optimizer state per parameter: 8 for Adam, 4 for momentum, 0 for plain SGD."""
    optimizer: str | None = None
    """Class of the user's optimizer object, or None if whet builds the optimizer."""
    may_update_outside: bool = False
    """Whether a captured step may leave out the update of the user's optimizer, as with torch's own ones."""
    built_optimizer: str = "adamw"
    """Name of the optimizer that whet builds, if it does."""
    optimizer_obstacle: str | None = None
    """Reason why the user's optimizer keeps its own kernels, or None if the plan may select them."""
    can_pack: bool = False
    """Whether the model accepts packed samples: concatenated, without padding."""
    can_unpad: bool = False
    """Whether the blocks of the model may skip padding, which some Hugging Face Transformers models allow."""
    unpad_obstacle: str | None = None
    """Reason why the blocks of a Transformers model cannot skip padding, or None."""
    needs_decoding: bool = False
    """Whether samples must be decoded on the CPU, such as images or audio, so that workers may help."""
    has_dropout: bool = False
    has_batchnorm: bool = False
    split_obstacle: str | None = None
    """Reason other than BatchNorm why a global batch must not be split into micro-batches, or None."""
    is_causal: bool = False
    layers: tuple[str, ...] = ()
    """Detected layer kinds, by their names in plan/hazard_table.py and plan/kernel_support.py."""
    world_size: PositiveInt = 1
    """Number of processes that share each global batch."""
    local_size: PositiveInt = 1
    """Number of those processes on this machine."""
    batch: AutoBatch | None = None
    """Measurement for global_batch_size=auto, or None if the user has given the size."""

    @property
    def whole_batch_reason(self) -> str | None:
        """Reason why a global batch is not split into micro-batches, or None if it may be split."""
        return "BatchNorm's statistics depend on the whole batch" if self.has_batchnorm else self.split_obstacle

    @property
    def built_kernels(self) -> tuple[str, ...]:
        """Kernels of the optimizer that whet builds. Empty for the user's own optimizer object."""
        # An unknown name raises an error when the optimizer is built.
        return OPTIMIZER_KERNELS.get(self.built_optimizer, ()) if self.optimizer is None else ()

    @property
    def samples_per_rank(self) -> int:
        """Maximum number of samples of a global batch per process."""
        return -(-self.global_batch_size // self.world_size)

    @property
    def static_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state in float32, needed before the first sample."""
        return self.weight_bytes + self.num_parameters * (GRADIENT_BYTES + self.optimizer_bytes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in float32, including frozen ones."""
        return (self.num_parameters + self.num_frozen) * WEIGHT_BYTES

    @property
    def data_bytes(self) -> int | None:
        """Bytes of the whole dataset on the device, or None if unknown."""
        if self.num_samples is None or self.sample_bytes is None:
            return None
        return self.num_samples * self.sample_bytes
