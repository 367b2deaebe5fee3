"""What is to be trained, as far as a plan needs to know. The user owns every number here; a plan changes none."""

from pydantic import NonNegativeInt, PositiveInt

from whet.base.record import Record
from whet.plan.chosen_batch import ChosenBatch

WEIGHT_BYTES = 4
GRADIENT_BYTES = 4
ADAM_STATE_BYTES = 8


class Workload(Record):
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
    """Kinds of layers that known wrong results speak of (`plan/known_hazards.py`), as far as they were seen."""
    world_size: PositiveInt = 1
    """Processes that share each global batch."""
    local_size: PositiveInt = 1
    """Those of them on this machine."""
    batch: ChosenBatch | None = None
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
