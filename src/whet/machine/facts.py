"""What is known about a computer. None means unknown: nothing here is ever guessed.

`Machine` holds what stays the same from run to run; `Conditions` holds how the machine is at this moment.
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from whet.base.model import FrozenModel

PositiveInt = Annotated[int, Field(gt=0, le=2**62)]
DeviceKind = Literal["mps", "cuda"]
Origin = Literal["probed", "captured", "composed"]
ThermalLevel = Literal["nominal", "moderate", "heavy", "trapping", "sleeping"]
PressureLevel = Literal["normal", "warn", "critical"]


class OperatingSystem(FrozenModel):
    name: str | None = None
    """"macOS" or "Linux"."""
    version: str | None = None
    architecture: str | None = None
    """"arm64" or "x86_64"."""


class CpuFacts(FrozenModel):
    name: str | None = None
    physical_cores: PositiveInt | None = None
    logical_cores: PositiveInt | None = None
    fast_cores: PositiveInt | None = None
    """Cores of the fastest cluster (performance, or "super" on M5 Pro and Max)."""
    slow_cores: NonNegativeInt | None = None
    """Cores of the other clusters together."""
    has_bf16: bool | None = None
    """Whether the cores multiply bf16 natively; without it a bf16 product was measured 60 to 100 times slower."""


class Accelerator(FrozenModel):
    kind: DeviceKind
    name: str | None = None
    num_cores: PositiveInt | None = None
    """GPU cores on Apple silicon, multiprocessors on CUDA."""
    memory_bytes: PositiveInt | None = None
    """The card's memory, or all of the machine's where it is shared."""
    usable_bytes: PositiveInt | None = None
    """What may be planned for: Metal's recommended working set, or the card's memory."""
    shares_memory: bool = False
    capability: str | None = None
    """CUDA's compute capability ("9.0"), or Apple's GPU family ("apple8")."""
    driver: str | None = None


class TorchFacts(FrozenModel):
    version: str | None = None
    """None when torch is not installed or could not be asked."""
    cuda_build: str | None = None
    """The CUDA version torch was built for, None for a build without CUDA."""
    mps_built: bool | None = None
    num_threads: PositiveInt | None = None
    error: str | None = None
    """Why torch could not be asked, in one line."""

    def is_before(self, major: int, minor: int) -> bool | None:
        """Whether torch is older than that release; None when its version is unknown.

        >>> [Torch(version=version).is_before(2, 13) for version in ("2.13.0+cpu", "2.9.1", None)]
        [False, True, None]
        """
        parts = (self.version or "").split(".")
        if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
            return None
        return (int(parts[0]), int(parts[1])) < (major, minor)


class MissingDevice(FrozenModel):
    """A device that torch cannot use here: why, and what would help."""

    device: DeviceKind
    reason: str
    cure: str


class Machine(FrozenModel):
    name: str
    origin: Origin = "probed"
    sources: tuple[str, ...] = ()
    """Where the numbers of a composed machine come from."""
    model: str | None = None
    """"MacBook Air", "Mac14,2"; None where it means nothing."""
    chip: str | None = None
    """"Apple M2"; the CPU's or the GPU's name elsewhere."""
    is_fanless: bool | None = None
    os: OperatingSystem = OperatingSystem()
    cpu: CpuFacts = CpuFacts()
    memory_bytes: PositiveInt | None = None
    accelerators: tuple[Accelerator, ...] = ()
    absent: tuple[MissingDevice, ...] = ()
    torch: TorchFacts = TorchFacts()
    python: str | None = None

    def accelerator(self, kind: str) -> Accelerator | None:
        """The first accelerator of that kind, or None."""
        return next((a for a in self.accelerators if a.kind == kind), None)


class BusyProcess(FrozenModel):
    name: str
    pid: int
    memory_bytes: NonNegativeInt | None = None
    cpu_percent: float | None = None


class Conditions(FrozenModel):
    """How the machine is at this moment; what slows a run down although the machine could do better."""

    memory_available_bytes: int | None = None
    swap_used_bytes: int | None = None
    power_source: Literal["mains", "battery"] | None = None
    low_power_mode: bool | None = None
    thermal: ThermalLevel | None = None
    memory_pressure: PressureLevel | None = None
    gpu_busy_percent: float | None = None
    busy: tuple[BusyProcess, ...] = ()
    """Other processes that take a whole core or a tenth of the memory."""
    disk_bytes_per_second: float | None = None
    """Uncached read speed of the disk that holds the working folder."""


class ProbeResult(FrozenModel):
    """All that `whet probe` found."""

    machine: Machine
    conditions: Conditions
