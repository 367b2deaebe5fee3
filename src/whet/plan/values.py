"""Typed access to the values of settings: `plan.precision` instead of a lookup by name."""

from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar, cast

from whet.base.errors import WhetError
from whet.plan.setting import Setting

Attention = Literal["torch", "cudnn", "flash", "efficient", "math", "own"]
Compile = Literal["off", "blocks", "on"]
DataLocation = Literal["device", "host", "files"]
KeepAwake = Literal["on", "off", "unused"]
Layout = Literal["contiguous", "channels_last"]
Lengths = Literal["fixed", "sorted", "few shapes", "packed", "packed few"]
OnOff = Literal["off", "on"]
OptimizerKernels = Literal["fused", "foreach", "loop", "your optimizer"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Sharding = Literal["off", "full", "unused"]

T = TypeVar("T")


class _Value(Generic[T]):
    """The value of the setting that has the attribute's name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: Any, owner: type | None = None) -> T:
        settings: Mapping[str, Setting] = holder.settings
        if self._name not in settings:
            raise WhetError("the plan lacks a setting", got=f"no {self._name}", try_="another run folder, or --fresh")
        return cast("T", settings[self._name].value)


class SettingValues:
    """The value of every setting as a typed attribute. A subclass has `settings`, which also hold reason and evidence."""

    device = _Value[str]()
    on_device_failure = _Value[Literal["stop", "cpu"]]()
    mps_fallback = _Value[OnOff]()
    keep_awake = _Value[KeepAwake]()
    precision = _Value[Precision]()
    loss_scaling = _Value[Literal["off", "dynamic"]]()
    optimizer_kernels = _Value[OptimizerKernels]()
    compile = _Value[Compile]()
    graph = _Value[OnOff]()
    layout = _Value[Layout]()
    threads = _Value[int | None]()
    deterministic = _Value[OnOff]()
    attention = _Value[Attention]()
    norms = _Value[Literal["torch", "own"]]()
    memory_gb = _Value[float | None]()
    activation_checkpointing = _Value[OnOff]()
    micro_batch = _Value[int]()
    accumulation = _Value[int]()
    eval_batch = _Value[int]()
    lengths = _Value[Lengths]()
    watermarks = _Value[str]()
    empty_cache = _Value[Literal["never", "per epoch"]]()
    freed_memory = _Value[Literal["returned", "kept"]]()
    data_location = _Value[DataLocation]()
    workers = _Value[int]()
    pin_memory = _Value[OnOff]()
    copies = _Value[Literal["blocking", "overlapped"]]()
    worker_start_method = _Value[Literal["fork", "spawn"]]()
    prefetch = _Value[int]()
    sharding = _Value[Sharding]()
    bucket_mb = _Value[int | None]()
    on_heat = _Value[Literal["warn", "pace", "pause"]]()
    checkpoint_minutes = _Value[float]()
    checkpoint_steps = _Value[int | None]()
    checkpoint_epochs = _Value[int | None]()
    keep = _Value[int]()
    verify = _Value[Literal["on", "off", "always"]]()
    causal_mask = _Value[Literal["flag", "explicit"]]()
