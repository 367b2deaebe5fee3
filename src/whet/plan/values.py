"""The settings of a plan as typed attributes such as `plan.precision`, with their allowed values."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from whet.base.errors import WhetError
from whet.plan.setting import Scalar, Setting

Attention = Literal["torch", "cudnn", "flash", "efficient", "math", "whet"]
CausalMask = Literal["flag", "explicit"]
Compile = Literal["off", "blocks", "on"]
Copies = Literal["blocking", "overlapped"]
DataLocation = Literal["device", "host", "files"]
FreedMemory = Literal["returned", "kept"]
Graph = Literal["off", "on", "launch_bound"]
KeepAwake = Literal["on", "off", "unused"]
Layout = Literal["contiguous", "channels_last"]
Lengths = Literal["fixed", "unpadded", "sorted", "bucketed", "packed", "packed_bucketed"]
LossScaling = Literal["off", "dynamic"]
Norms = Literal["torch", "whet"]
OnDeviceFailure = Literal["stop", "cpu"]
OnHeat = Literal["warn", "slow_down", "pause"]
OnOff = Literal["off", "on"]
OptimizerKernels = Literal["fused", "foreach", "loop", "yours"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Sharding = Literal["off", "full", "unused"]
StartMethod = Literal["fork", "spawn"]
Verify = Literal["on", "off", "always"]

HALF_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """The allowed values of a setting: a description and a predicate."""

    text: str
    holds: Callable[[Scalar], bool]


def one_of(*values: Scalar) -> Constraint:
    """Return a constraint that allows only these values."""
    return Constraint(text=" or ".join(map(str, values)), holds=lambda value: value in values)


def integer(least: int, most: int = 2**53) -> Constraint:
    """Return the constraint that allows integers from `least` to `most`."""
    return Constraint(
        text=f"a whole number, {least} or more" if most == 2**53 else f"a whole number from {least} to {most}",
        holds=lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most,
    )


POSITIVE = Constraint(
    text="a number above 0",
    # bool is a subclass of int, but True is not a number here.
    holds=lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value > 0,
)
WATERMARK = Constraint(
    text="a number from 0 to 2",
    holds=lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 2,
)
DEVICE_NAME = Constraint(
    text="auto, mps, cuda, cuda:1 or cpu",
    holds=lambda value: isinstance(value, str) and re.fullmatch(r"mps|cpu|cuda(:\d+)?", value) is not None,
)


class SettingValue(Generic[T]):
    """Descriptor that reads the value of the setting with the same name as the attribute.

    The type argument is the type of the value. A Literal lists the allowed values. Other types need a constraint. If
    the type includes None, a rule may leave the setting undecided, so that torch or other settings determine it.
    """

    def __init__(self, constraint: Constraint | None = None) -> None:
        self._constraint = constraint

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: Any, owner: type | None = None) -> T:
        # Read from `settings`, because a setting also has a reason and evidence.
        setting = holder.settings.get(self._name)
        if setting is None:
            raise WhetError("the plan lacks a setting", got=f"no {self._name}", try_="another run folder, or --fresh")
        value: T = setting.value
        return value

    @property
    def constraint(self) -> Constraint:
        """The values that the user or a measurement may choose."""
        return self._constraint or one_of(*get_args(self._type))

    def allows(self, value: Scalar) -> bool:
        """Return whether this value is valid in a plan, including values that only rules choose."""
        is_nullable = get_origin(self._type) is not Literal and type(None) in get_args(self._type)
        return self.constraint.holds(value) or (value is None and is_nullable)

    @property
    def _type(self) -> Any:
        # typing sets __orig_class__ on instances of a subscripted generic class.
        return get_args(self.__orig_class__)[0]  # type: ignore[attr-defined]


class SettingValues:
    """The value of every setting as a typed attribute. `settings` also holds reasons, sources and evidence."""

    settings: Mapping[str, Setting]

    device = SettingValue[str](DEVICE_NAME)
    on_device_failure = SettingValue[OnDeviceFailure]()
    mps_fallback = SettingValue[OnOff]()
    keep_awake = SettingValue[KeepAwake]()
    precision = SettingValue[Precision]()
    loss_scaling = SettingValue[LossScaling]()
    optimizer_kernels = SettingValue[OptimizerKernels]()
    compile = SettingValue[Compile]()
    graph = SettingValue[Graph]()
    layout = SettingValue[Layout]()
    threads = SettingValue[int | None](integer(1, 1024))
    deterministic = SettingValue[OnOff]()
    memory_gb = SettingValue[float | None](POSITIVE)
    sharding = SettingValue[Sharding]()
    bucket_mb = SettingValue[int | None](integer(1, 4096))
    activation_checkpointing = SettingValue[OnOff]()
    micro_batch = SettingValue[int](integer(1))
    eval_batch = SettingValue[int](integer(1))
    lengths = SettingValue[Lengths]()
    high_watermark = SettingValue[float | None](WATERMARK)
    low_watermark = SettingValue[float | None](WATERMARK)
    empty_cache = SettingValue[OnOff]()
    freed_memory = SettingValue[FreedMemory]()
    attention = SettingValue[Attention]()
    norms = SettingValue[Norms]()
    data_location = SettingValue[DataLocation]()
    workers = SettingValue[int](integer(0, 1024))
    copies = SettingValue[Copies]()
    worker_start_method = SettingValue[StartMethod]()
    prefetch = SettingValue[int](integer(1, 1024))
    checkpoint_minutes = SettingValue[float](POSITIVE)
    checkpoint_steps = SettingValue[int | None](integer(1))
    checkpoint_epochs = SettingValue[int | None](integer(1))
    keep_checkpoints = SettingValue[int](integer(2))
    on_heat = SettingValue[OnHeat]()
    verify = SettingValue[Verify]()
    causal_mask = SettingValue[CausalMask]()


# All settings with their types and constraints, in the order in which rules decide them.
DECLARED: Mapping[str, SettingValue[Any]] = {
    name: value for name, value in vars(SettingValues).items() if isinstance(value, SettingValue)
}
SETTING_NAMES = tuple(DECLARED)
