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

ANY_TEXT = "{name}={value}"
_NO_VALUE: Any = object()


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
    """Descriptor that reads the value of the setting with the same name as the attribute, and declares the setting.

    The type argument is the type of the value. A Literal lists the allowed values. Other types need a constraint. If
    the type includes None, a rule may leave the setting undecided, so that torch or other settings determine it.
    """

    def __init__(
        self,
        constraint: Constraint | None = None,
        *,
        plain: Scalar = _NO_VALUE,
        text: str | Mapping[str, str] = ANY_TEXT,
        is_rounding: bool = False,
        is_data: bool = False,
        is_memory: bool = False,
        depends_on_samples: bool = False,
        is_final: bool = False,
        may_change: bool = False,
    ) -> None:
        self._constraint = constraint
        self.plain = plain
        """The value of a plain PyTorch loop. The first lines of a run show the setting if it has another one.

        Without it, they show the setting if the user or the environment has set it.
        """
        self.text = text
        """How the first lines of a run show a value: a format, or texts by value."""
        self.is_rounding = is_rounding
        """Whether the value affects rounding or the order of sums, and therefore the last bits of the result."""
        self.is_data = is_data
        """Whether the setting decides how data is read. It is fixed once the first batch has been read."""
        self.is_memory = is_memory
        """Whether an explanation of the setting shows the predicted memory of a step."""
        self.depends_on_samples = depends_on_samples
        """Whether the setting is decided again when the memory of a sample has been measured."""
        self.is_final = is_final
        """Whether its environment variable may be read before the plan is made, so that no override can change it."""
        self.may_change = may_change
        """Whether a resumed run takes the setting from the new call rather than from the saved plan."""

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

    @property
    def has_plain_value(self) -> bool:
        return self.plain is not _NO_VALUE

    def allows(self, value: Scalar) -> bool:
        """Return whether this value is valid in a plan, including values that only rules choose."""
        is_nullable = get_origin(self._type) is not Literal and type(None) in get_args(self._type)
        return self.constraint.holds(value) or (value is None and is_nullable)

    @property
    def _type(self) -> Any:
        # typing sets __orig_class__ on instances of a subscripted generic class.
        return get_args(self.__orig_class__)[0]  # type: ignore[attr-defined]


class SettingValues:
    """The value of every setting as a typed attribute. `settings` also holds reasons, sources and evidence.

    Everything that is known about a setting is declared here. Rules decide the settings in this order.
    """

    settings: Mapping[str, Setting]

    device = SettingValue[str](DEVICE_NAME)
    on_device_failure = SettingValue[OnDeviceFailure]()
    mps_fallback = SettingValue[OnOff](plain="off", text={"on": "missing operators on the CPU"}, is_final=True)
    keep_awake = SettingValue[KeepAwake]()
    precision = SettingValue[Precision](is_rounding=True)
    loss_scaling = SettingValue[LossScaling](plain="off", text={"dynamic": "loss scaling"}, is_rounding=True)
    optimizer_kernels = SettingValue[OptimizerKernels](
        plain="loop", text={"fused": "fused optimizer", "foreach": "foreach optimizer"}, is_rounding=True
    )
    compile = SettingValue[Compile](
        plain="off", text={"on": "compiled", "blocks": "compiled blocks"}, is_rounding=True, is_final=True
    )
    graph = SettingValue[Graph](plain="off", text={"on": "captured steps"}, is_rounding=True)
    layout = SettingValue[Layout](plain="contiguous", text={"channels_last": "channels_last"}, is_rounding=True)
    threads = SettingValue[int | None](integer(1, 1024))
    deterministic = SettingValue[OnOff](plain="off", text={"on": "deterministic"})
    memory_gb = SettingValue[float | None](POSITIVE, is_memory=True)
    sharding = SettingValue[Sharding](plain="off", text={"full": "sharded"})
    bucket_mb = SettingValue[int | None](integer(1, 4096))
    activation_checkpointing = SettingValue[OnOff](
        plain="off", text={"on": "activation checkpointing"}, is_memory=True, depends_on_samples=True
    )
    micro_batch = SettingValue[int](integer(1), is_rounding=True, is_memory=True, depends_on_samples=True)
    eval_batch = SettingValue[int](integer(1), depends_on_samples=True)
    lengths = SettingValue[Lengths](plain="fixed", text="{value} lengths", is_rounding=True, depends_on_samples=True)
    high_watermark = SettingValue[float | None](WATERMARK, is_final=True)
    low_watermark = SettingValue[float | None](WATERMARK, is_final=True)
    empty_cache = SettingValue[OnOff]()
    freed_memory = SettingValue[FreedMemory](is_final=True, may_change=True)
    attention = SettingValue[Attention](plain="torch", text="{value} attention", is_rounding=True)
    norms = SettingValue[Norms](plain="torch", text="{value} norms", is_rounding=True)
    data_location = SettingValue[DataLocation](is_data=True)
    workers = SettingValue[int](integer(0, 1024), plain=0, text="{value} worker{s}", is_data=True)
    copies = SettingValue[Copies]()
    worker_start_method = SettingValue[StartMethod](is_data=True)
    prefetch = SettingValue[int](integer(1, 1024), is_data=True)
    checkpoint_minutes = SettingValue[float](POSITIVE)
    checkpoint_steps = SettingValue[int | None](integer(1))
    checkpoint_epochs = SettingValue[int | None](integer(1))
    keep_checkpoints = SettingValue[int](integer(2))
    on_heat = SettingValue[OnHeat](plain="warn", may_change=True)
    verify = SettingValue[Verify](may_change=True)
    causal_mask = SettingValue[CausalMask](is_rounding=True)


# All settings with their types and constraints, in the order in which rules decide them.
DECLARED: Mapping[str, SettingValue[Any]] = {
    name: value for name, value in vars(SettingValues).items() if isinstance(value, SettingValue)
}
SETTING_NAMES = tuple(DECLARED)


def names_of(is_meant: Callable[[SettingValue[Any]], bool]) -> tuple[str, ...]:
    """Return the names of the settings whose declaration fulfills a condition.

    >>> names_of(lambda setting: setting.may_change)
    ('freed_memory', 'on_heat', 'verify')
    """
    return tuple(name for name, declared in DECLARED.items() if is_meant(declared))
