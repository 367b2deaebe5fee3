"""Facts about a computer. None means unknown; no value is guessed.

`Machine` holds constant facts. `SystemState` holds values that change, such as free memory, power source and heat.
"""

import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from whet.base.model import FrozenModel

PositiveInt = Annotated[int, Field(gt=0, le=2**62)]
DeviceKind = Literal["mps", "cuda"]
Origin = Literal["probed", "captured", "composed"]
ThermalLevel = Literal["nominal", "moderate", "heavy", "trapping", "sleeping"]
PressureLevel = Literal["normal", "warn", "critical"]
Release = tuple[int, int]
"""Major and minor number of a version."""


def parse_release(version: str | None) -> Release | None:
    """Return the major and minor number of a version, or None if it is unknown.

    >>> [parse_release(version) for version in ("2.13.0+cpu", "2.15.0a0+git1", "26", "nightly", None)]
    [(2, 13), (2, 15), (26, 0), None, None]
    """
    match = re.match(r"(\d+)(?:\.(\d+))?", version or "")
    return None if match is None else (int(match[1]), int(match[2] or 0))


class OperatingSystem(FrozenModel):
    name: str | None = None
    """Name of the operating system: "macOS" or "Linux"."""
    version: str | None = None
    architecture: str | None = None
    """Processor architecture, such as "arm64" or "x86_64"."""


class CpuFacts(FrozenModel):
    name: str | None = None
    physical_cores: PositiveInt | None = None
    logical_cores: PositiveInt | None = None
    fast_cores: PositiveInt | None = None
    """Cores of the fastest cluster (performance, or "super" on M5 Pro and Max)."""
    slow_cores: NonNegativeInt | None = None
    """Cores of all other clusters together."""
    has_bf16: bool | None = None
    """Whether the cores have bf16 instructions. Without them, bf16 products were 60 to 100 times slower than fp32."""


class Accelerator(FrozenModel):
    kind: DeviceKind
    name: str | None = None
    num_cores: PositiveInt | None = None
    """GPU cores on Apple silicon, streaming multiprocessors on CUDA."""
    memory_bytes: PositiveInt | None = None
    """Memory of the card, or all memory of the machine if the GPU shares it."""
    usable_bytes: PositiveInt | None = None
    """Memory that a plan may use: Metal's recommended working set, or the memory of the card."""
    shares_memory: bool = False
    capability: str | None = None
    """CUDA compute capability ("9.0"), or Apple GPU family ("apple8")."""
    driver: str | None = None


class TorchFacts(FrozenModel):
    version: str | None = None
    """Version of torch, or None if torch is not installed or could not be queried."""
    cuda_build: str | None = None
    """CUDA version that torch was built for, or None for a build without CUDA."""
    mps_built: bool | None = None
    num_threads: PositiveInt | None = None
    error: str | None = None
    """Reason why torch could not be queried, in one line."""

    def is_before(self, major: int, minor: int) -> bool | None:
        """Return whether torch is older than a release, or None if its version is unknown.

        >>> [TorchFacts(version=version).is_before(2, 13) for version in ("2.13.0+cpu", "2.9.1", None)]
        [False, True, None]
        """
        release = parse_release(self.version)
        return None if release is None else release < (major, minor)


class MissingDevice(FrozenModel):
    """A device that torch cannot use on this machine, with the reason and a fix."""

    device: DeviceKind
    reason: str
    fix: str


class Machine(FrozenModel):
    name: str
    origin: Origin = "probed"
    sources: tuple[str, ...] = ()
    """Sources of the figures, for a machine that was not probed."""
    model: str | None = None
    """Model of a Mac, such as "MacBook Air (Mac14,2)", or None on other machines."""
    chip: str | None = None
    """Name of the chip, such as "Apple M2", or of the CPU or GPU on other machines."""
    is_fanless: bool | None = None
    os: OperatingSystem = OperatingSystem()
    cpu: CpuFacts = CpuFacts()
    memory_bytes: PositiveInt | None = None
    accelerators: tuple[Accelerator, ...] = ()
    absent: tuple[MissingDevice, ...] = ()
    torch: TorchFacts = TorchFacts()
    python: str | None = None

    def accelerator(self, kind: str) -> Accelerator | None:
        """Return the first accelerator of this kind, or None."""
        return next((a for a in self.accelerators if a.kind == kind), None)


class BusyProcess(FrozenModel):
    name: str
    pid: int
    memory_bytes: NonNegativeInt | None = None
    cpu_percent: float | None = None


class EnvironmentFacts(FrozenModel):
    """Settings that environment variables or torch's flags fix before a plan is made. None means not set."""

    mps_fallback: bool | None = None
    mps_high_watermark: float | None = None
    mps_low_watermark: float | None = None
    threads: PositiveInt | None = None
    threads_variable: str | None = None
    compile_disabled_by: str | None = None
    """The variable that turns torch.compile off."""
    malloc_variable: str | None = None
    """The variable with which the user configures glibc's malloc."""
    wait_variable: str | None = None
    """The user's setting for waiting OpenMP threads, such as "GOMP_SPINCOUNT=0"."""
    spins_long: bool = False
    """Whether torch was loaded before whet could limit how long threads spin."""
    is_deterministic: bool | None = None
    """Whether torch.use_deterministic_algorithms is on in this process, or None if torch was not queried."""


class SystemState(FrozenModel):
    """The current state of the machine and of this process, limited to values that affect a plan."""

    memory_available_bytes: int | None = None
    swap_used_bytes: int | None = None
    power_source: Literal["mains", "battery"] | None = None
    low_power_mode: bool | None = None
    thermal: ThermalLevel | None = None
    memory_pressure: PressureLevel | None = None
    gpu_busy_percent: float | None = None
    busy: tuple[BusyProcess, ...] = ()
    """Other processes that use about a whole core or at least a tenth of the memory."""
    environment: EnvironmentFacts = EnvironmentFacts()


class ProbeResult(FrozenModel):
    """The result of `whet probe`."""

    machine: Machine
    system_state: SystemState
