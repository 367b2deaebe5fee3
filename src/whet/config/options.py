"""The options of a training run, declared once with type, default and description.

The keywords of `whet.Session` and `whet.train` (written into their signatures by `tools/keywords.py`), the keys of the
command line and of config files, and `docs/keys.md` are all derived from these classes:

    TrainingOptions          options that decide what is trained
    +-- SessionOptions       options in Python, with the defaults of a plain loop
    +-- CommonConfig         options of all recipes, with data, optimizer and settings of the plan
        +-- Config           options of one recipe
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)
from pydantic.functional_validators import BeforeValidator

from whet.plan.values import (
    DECLARED,
    SETTING_NAMES,
    Attention,
    CausalMask,
    Compile,
    FreedMemory,
    Graph,
    Layout,
    Norms,
    OnDeviceFailure,
    OnHeat,
    OnOff,
    Precision,
    Verify,
)


def _parse_switch(value: Any) -> Any:
    """Convert true and false to "on" and "off", because YAML reads a bare `on` as true."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


@runtime_checkable
class SchedulerObject(Protocol):
    """A scheduler of `torch.optim.lr_scheduler`, as a protocol, because this package must not import torch."""

    optimizer: Any

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


Auto = Literal["auto"]
ScheduleName = Literal["constant", "linear", "cosine", "plateau"]
Switch = Annotated[OnOff, BeforeValidator(_parse_switch)]
BatchSize = Annotated[int, Field(gt=0, le=10**6)]

# Names of other tools for keys with the same meaning. Other names raise an error (config/foreign_keys.py).
ALIASES = {
    "forward_dtype": "precision",
    "arch.forward_dtype": "precision",
    "batch_size": "global_batch_size",
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "num_workers": "workers",
    "lr_warmup_steps": "warmup_steps",
    "max_grad_norm": "clip",
    "grad_clip_norm": "clip",
}
DTYPE_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}

# A larger value is rejected, because it is probably a seed and not a number of seeds.
MAX_SEEDS = 10_000


_SCHEDULE = "how the learning rate falls after the warm-up"


class OptionsModel(BaseModel):
    """A group of options. A subclass can change defaults and descriptions without declaring the options again.

    >>> class Config(CommonConfig):
    ...     defaults = {"epochs": 5}
    >>> Config().epochs
    5
    """

    # Coerce numbers to text, because the command line parses `name=2024` as a number.
    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False
    )

    defaults: ClassVar[Mapping[str, Any]] = {}
    descriptions: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        own, descriptions = cls.__dict__.get("defaults", {}), cls.__dict__.get("descriptions", {})
        for name in {**own, **descriptions}:
            # Copy the field, because it is shared with the base class.
            field = copy.copy(cls.model_fields[name])
            field.default = own.get(name, field.default)
            field.description = descriptions.get(name, field.description)
            cls.model_fields[name] = field
        # pydantic compiles one validator per class, which must be rebuilt to use the new defaults.
        if own:
            cls.model_rebuild(force=True)


class TrainingOptions(OptionsModel):
    """The options that decide what is trained. A plan never changes them."""

    global_batch_size: BatchSize = Field(description="samples per optimizer step; auto measures a size and scales lr")
    epochs: PositiveInt = Field(1, description="passes over the training data")
    max_steps: PositiveInt | None = Field(None, description="stop after this many optimizer steps, if earlier")
    schedule: ScheduleName | Callable[[int], float] | InstanceOf[SchedulerObject] | dict[str, Any] = Field(
        "constant",
        description=f"{_SCHEDULE}: a name, a function, a torch scheduler, or a dict of them for several optimizers",
    )
    warmup_steps: NonNegativeInt | Auto = Field(0, description="steps until the full learning rate")
    clip: PositiveFloat | None = Field(None, description="maximum gradient norm; not clipped if unset")
    ema: bool = Field(False, description="evaluate with an exponential moving average of the weights")
    verify_resume: bool = Field(
        False, description="when a run resumes, first repeat the steps between its last two checkpoints and compare"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="decides the order of samples, the initial weights and all random draws"
    )
    eval_every: PositiveInt | Auto = Field("auto", description="steps between evaluations; auto: once per epoch")
    patience: PositiveInt | None = Field(None, description="stop after this many evaluations without a better goal")
    epochs_per_session: PositiveInt | None = Field(
        None, description="stop after this many epochs; the same command resumes"
    )

    def total_steps(self, num_batches: int | None) -> int | None:
        """Return the number of optimizer steps of the whole run, or None if it is unknown and no limit is set.

        `num_batches` is the number of global batches per epoch, or None if the data has no length.
        """
        if num_batches is None:
            return self.max_steps
        steps = self.epochs * num_batches
        return steps if self.max_steps is None else min(steps, self.max_steps)


class SessionOptions(TrainingOptions):
    """The training keywords of `whet.Session` and `whet.train`."""

    # Validate strictly, because Python values have a type, and "3" instead of 3 is a mistake.
    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True)

    global_batch_size: BatchSize = Field(
        None,  # type: ignore[assignment]
        description="samples per optimizer step; taken from a DataLoader; auto measures a size and scales lr",
    )
    warmup_steps: NonNegativeInt = Field(0, description="steps until the full learning rate")
    schedule_interval: Literal["step", "epoch", "auto"] = Field(
        "auto",
        description="when a torch scheduler steps; auto only for OneCycleLR, CyclicLR and ReduceLROnPlateau",
    )
    shuffle: bool | Auto = Field(
        "auto", description="reshuffle the samples every epoch; auto: yes, or as the DataLoader does"
    )
    collate_fn: Callable[[Any], Any] | None = Field(
        None, description="makes a batch from a list of samples, as for a DataLoader; called once per global batch"
    )
    split_batch: bool | Auto = Field(
        "auto",
        description="whether the loss of a batch is the mean over its samples, so that it may be computed in parts; "
        "auto: tested before the first step; False: the loss needs the whole batch",
    )


class CommonConfig(TrainingOptions):
    """The options of every recipe. "auto" lets the plan decide a setting."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "global_batch_size": 32,
        "epochs": 3,
        "warmup_steps": "auto",
        "clip": 1.0,
    }
    # Unlike SessionOptions, a recipe clips by default, so the description differs: null disables clipping.
    descriptions: ClassVar[Mapping[str, str]] = {"clip": "maximum gradient norm; null: not clipped"}
    group_aliases: ClassVar[dict[str, str]] = {}
    """Short forms of keys in groups. {"arch": "arch.kind"} accepts arch=gpt for arch.kind=gpt."""
    named_configs: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The keys of built-in configs by name, for --config-name NAME."""

    data: str | None = Field(None, description="file or folder with the data; the recipe's embedded data if not given")
    data_paths: tuple[str, ...] = Field((), description="several files or folders, read one after the other")
    init_from: str | None = Field(None, description="run folder whose weights a new run starts from")

    # Unlike SessionOptions, a recipe accepts only the names of schedules: a command line cannot pass objects.
    schedule: ScheduleName = Field("linear", description=_SCHEDULE)
    optimizer: Literal["adamw", "adafactor", "sgd", "adam_atan2"] = Field(
        "adamw", description="optimizer that updates the weights"
    )
    lr: PositiveFloat = Field(3e-4, description="learning rate after the warm-up")
    weight_decay: NonNegativeFloat = Field(
        0.01, description="weight decay; biases and norms are excluded, except with adam_atan2"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="dropout probability")
    seeds: Annotated[int, Field(gt=0, le=MAX_SEEDS)] = Field(
        1, description="train this many times, with seed, seed + 1, ..., and report mean and spread (whet train)"
    )

    # Settings of the plan, whose ranges are declared in plan/values.py. A rule or measurement never changes a setting
    # that the user has given.
    micro_batch: int | Auto = Field("auto", description="samples that go through the model at once")
    eval_batch: int | Auto = Field("auto", description="samples evaluated at once")
    precision: Precision | Auto = Field("auto", description="number format of matrix products")
    compile: Annotated[Compile, BeforeValidator(_parse_switch)] | Auto = Field(
        "auto", description="torch.compile the model, or its repeated blocks"
    )
    graph: Annotated[Graph, BeforeValidator(_parse_switch)] | Auto = Field(
        "auto", description="capture whole steps and replay them (CUDA); launch_bound: if the first steps show a gain"
    )
    activation_checkpointing: Switch | Auto = Field(
        "auto", description="recompute activations in the backward pass to save memory"
    )
    layout: Layout | Auto = Field("auto", description="memory layout of the weights of convolutions")
    attention: Attention | Auto = Field("auto", description="which attention kernel is preferred")
    norms: Norms | Auto = Field("auto", description="torch's kernels for norms, or whet's (CUDA)")
    freed_memory: FreedMemory | Auto = Field(
        "auto", description="whether the C library keeps memory that a step on a CPU has freed for the next step"
    )
    deterministic: Switch | Auto = Field("auto", description="use only deterministic kernels")
    sharding: Literal["off", "full"] | Auto = Field(
        "auto",
        description="shard weights, gradients and optimizer state over the processes, or keep a full copy in each",
    )
    bucket_mb: int | Auto = Field("auto", description="bucket size of the gradient all-reduce, in MB")
    checkpoint_steps: int | Auto = Field("auto", description="steps between checkpoints")
    checkpoint_minutes: float | Auto = Field("auto", description="minutes between checkpoints")
    checkpoint_epochs: int | Auto = Field("auto", description="epochs between checkpoints")
    keep_checkpoints: int | Auto = Field("auto", description="number of latest checkpoints to keep")
    workers: int | Auto = Field("auto", description="number of processes that load data ahead")
    threads: int | Auto = Field("auto", description="CPU threads")
    memory_gb: float | Auto = Field("auto", description="memory that the plan may use")
    on_device_failure: OnDeviceFailure | Auto = Field("auto", description="what to do if the device cannot be used")
    mps_fallback: Switch | Auto = Field("auto", description="run operators that MPS lacks on the CPU")
    on_heat: OnHeat | Auto = Field("auto", description="what to do when heat throttles the machine")
    keep_awake: Switch | Auto = Field("auto", description="prevent a Mac from sleeping during training")
    verify: Annotated[Verify, BeforeValidator(_parse_switch)] | Auto = Field(
        "auto", description="before the first step, compare the device with the CPU, and check causal models"
    )
    causal_mask: CausalMask | Auto = Field("auto", description="causal attention by the flag is_causal, or by a mask")

    @field_validator(*SETTING_NAMES, check_fields=False)
    @classmethod
    def _check_range(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        constraint = DECLARED[info.field_name].constraint
        if value != "auto" and not constraint.holds(value):
            raise ValueError(constraint.text)
        return value

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files and folders in `data` and `data_paths`."""
        return tuple(Path(path) for path in (self.data, *self.data_paths) if path is not None)

    def count_steps(self, num_samples: int | None) -> int | None:
        """Return the number of optimizer steps, or None if the number of samples is unknown and no limit is set."""
        return self.total_steps(None if num_samples is None else -(-num_samples // self.global_batch_size))

    @classmethod
    def plan_keys(cls) -> tuple[str, ...]:
        """Return the option keys that are also settings of the plan."""
        return tuple(name for name in cls.model_fields if name in SETTING_NAMES)
