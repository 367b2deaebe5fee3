"""The options that every recipe has, declared once: type, default and meaning."""

import copy
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.functional_validators import BeforeValidator


def _parse_switch(value: Any) -> Any:
    """YAML reads a bare `on` as true: both spellings mean the switch."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


Auto = Literal["auto"]
Switch = Annotated[Literal["off", "on"], BeforeValidator(_parse_switch)]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]

ALIASES = {"forward_dtype": "precision", "batch_size": "global_batch_size"}
"""Names that others use for our keys."""

MAX_SEEDS = 10_000

DTYPE_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


class CommonConfig(BaseModel):
    """Training that is yours (batch, steps, optimizer) and execution that a plan decides unless you do ("auto")."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)

    plan_keys: ClassVar[tuple[str, ...]] = (
        "micro_batch",
        "eval_batch",
        "precision",
        "compile",
        "graph",
        "activation_checkpointing",
        "layout",
        "attention",
        "norms",
        "freed_memory",
        "deterministic",
        "sharding",
        "bucket_mb",
        "checkpoint_steps",
        "checkpoint_minutes",
        "checkpoint_epochs",
        "keep",
        "workers",
        "threads",
        "memory_gb",
        "on_device_failure",
        "mps_fallback",
        "on_heat",
        "keep_awake",
        "verify",
        "causal_mask",
    )
    """Keys that are settings of the plan: when you give one, no rule and no measurement overrides it."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Other defaults than those of the base class, by key: {"epochs": 5}."""
    group_aliases: ClassVar[dict[str, str]] = {}
    """Groups of keys whose name alone means one of them: arch=gpt for arch.kind=gpt."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        own = cls.__dict__.get("defaults", {})
        for name, default in own.items():
            # A copy: the field is shared with the base class.
            field = copy.copy(cls.model_fields[name])
            field.default = default
            cls.model_fields[name] = field
        if own:
            cls.model_rebuild(force=True)

    data: str | None = Field(
        None, description="file or folder with the data; the recipe's embedded default if not given"
    )
    data_paths: tuple[str, ...] = Field((), description="several files or folders, read one after the other")
    init_from: str | None = Field(None, description="run folder whose weights a new run starts from")

    global_batch_size: Annotated[int, Field(gt=0, le=10**6)] = Field(
        32, description="samples of one optimizer step; auto measures which, and scales lr"
    )
    epochs: PositiveInt = Field(3, description="passes over the training data")
    max_steps: PositiveInt | None = Field(None, description="stop after this many optimizer steps, if earlier")
    optimizer: Literal["adamw", "adafactor", "sgd", "adam_atan2"] = Field(
        "adamw", description="how weights are updated"
    )
    lr: PositiveFloat = Field(3e-4, description="learning rate after the warm-up")
    weight_decay: NonNegativeFloat = Field(
        0.01, description="decay of weights; biases and norms are left out, but for adam_atan2"
    )
    schedule: Literal["constant", "linear", "cosine", "plateau"] = Field(
        "linear", description="how the learning rate falls after the warm-up"
    )
    warmup_steps: NonNegativeInt | Auto = Field("auto", description="steps until the full learning rate")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="share of activations dropped in training")
    ema: bool = Field(False, description="evaluate with an exponential moving average of the weights")
    clip: PositiveFloat | None = Field(1.0, description="largest norm of the gradient; null for none")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="decides the order of samples, the first weights and all draws"
    )
    seeds: Annotated[int, Field(gt=0, le=MAX_SEEDS)] = Field(
        1, description="trains so many times, with seed, seed + 1, ..., and tells mean and spread (whet train)"
    )
    eval_every: PositiveInt | Auto = Field("auto", description="steps between evaluations; auto: once an epoch")
    patience: PositiveInt | None = Field(None, description="stop after this many evaluations without a better goal")
    epochs_per_session: PositiveInt | None = Field(None, description="stop after this many epochs, to go on later")

    micro_batch: Annotated[int, Field(gt=0, le=10**6)] | Auto = Field(
        "auto", description="samples that go through the model at once"
    )
    eval_batch: PositiveInt | Auto = Field("auto", description="samples evaluated at once")
    precision: Precision | Auto = Field("auto", description="number format of matrix products")
    compile: Annotated[Literal["off", "blocks", "on"], BeforeValidator(_parse_switch)] | Auto = Field(
        "auto", description="torch.compile the model, or its repeated blocks"
    )
    graph: Switch | Auto = Field("auto", description="capture whole steps and replay them (CUDA)")
    activation_checkpointing: Switch | Auto = Field("auto", description="compute activations again in backward")
    layout: Literal["contiguous", "channels_last"] | Auto = Field(
        "auto", description="how the weights of convolutions lie in memory"
    )
    attention: Literal["torch", "cudnn", "flash", "efficient", "math", "own"] | Auto = Field(
        "auto", description="which kernel torch's attention takes first"
    )
    norms: Literal["torch", "own"] | Auto = Field("auto", description="whose kernels compute norms (own: CUDA)")
    freed_memory: Literal["kept", "returned"] | Auto = Field(
        "auto", description="whether the C library keeps what a step on a CPU has freed for the next one"
    )
    deterministic: Switch | Auto = Field("auto", description="only kernels that give the same bits each time")
    sharding: Literal["off", "full"] | Auto = Field(
        "auto", description="several processes each keep the whole model, or a part of every weight"
    )
    bucket_mb: Annotated[int, Field(gt=0, le=4096)] | Auto = Field(
        "auto", description="megabytes of gradients that several processes sum at once"
    )
    checkpoint_steps: PositiveInt | Auto = Field("auto", description="steps between checkpoints")
    checkpoint_minutes: PositiveFloat | Auto = Field("auto", description="minutes between checkpoints")
    checkpoint_epochs: PositiveInt | Auto = Field("auto", description="epochs between checkpoints")
    keep: Annotated[int, Field(ge=2)] | Auto = Field("auto", description="how many of the last checkpoints are kept")
    workers: NonNegativeInt | Auto = Field("auto", description="processes that read data ahead")
    threads: Annotated[int, Field(gt=0, le=1024)] | Auto = Field("auto", description="threads of the CPU")
    memory_gb: Annotated[float, Field(gt=0, le=10**6)] | Auto = Field("auto", description="memory the run may plan for")
    on_device_failure: Literal["stop", "cpu"] | Auto = Field("auto", description="when the device cannot be used")
    mps_fallback: Switch | Auto = Field("auto", description="run operators that MPS lacks on the CPU")
    on_heat: Literal["warn", "pace", "pause"] | Auto = Field("auto", description="when the machine gets hot and slow")
    keep_awake: Switch | Auto = Field("auto", description="keep a Mac from falling asleep while it trains")
    verify: Annotated[Literal["on", "off", "always"], BeforeValidator(_parse_switch)] | Auto = Field(
        "auto", description="compare the device with the CPU before the first step, and try whether a model is causal"
    )
    causal_mask: Literal["flag", "explicit"] | Auto = Field(
        "auto", description="causal attention by the flag is_causal, or by a mask"
    )
