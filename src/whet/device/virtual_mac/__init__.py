"""A simulated Mac with Apple silicon on Linux. Its tensors are real `mps:0` tensors, and the CPU computes them.

    from whet.device import virtual_mac
    virtual_mac.install("m2-air-8gb")

Results and speed are those of the CPU. Limits, errors, autocast, loss scaling and random generators follow the code
paths of PyTorch on a Mac. docs/apple.md lists what is simulated and what is not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.device.virtual_mac.faults import DriverGrowth as DriverGrowth
    from whet.device.virtual_mac.faults import GpuFailure as GpuFailure
    from whet.device.virtual_mac.faults import GraphCache as GraphCache
    from whet.device.virtual_mac.faults import Heat as Heat
    from whet.device.virtual_mac.faults import HeldMemory as HeldMemory
    from whet.device.virtual_mac.faults import KilledByPressure as KilledByPressure
    from whet.device.virtual_mac.faults import Miscompute as Miscompute
    from whet.device.virtual_mac.faults import Simulation as Simulation
    from whet.device.virtual_mac.faults import has_strided_weight as has_strided_weight
    from whet.device.virtual_mac.faults import hold_memory as hold_memory
    from whet.device.virtual_mac.faults import reduces_over as reduces_over
    from whet.device.virtual_mac.faults import simulate as simulate
    from whet.device.virtual_mac.faults import system_state as system_state
    from whet.device.virtual_mac.installation import FallbackStats as FallbackStats
    from whet.device.virtual_mac.installation import Stats as Stats
    from whet.device.virtual_mac.installation import install as install
    from whet.device.virtual_mac.installation import installed as installed
    from whet.device.virtual_mac.installation import reset_stats as reset_stats
    from whet.device.virtual_mac.installation import stats as stats
    from whet.device.virtual_mac.installation import uninstall as uninstall
    from whet.machine.facts import SystemState as SystemState

_MODULES = {
    "installation": ("FallbackStats", "Stats", "install", "installed", "reset_stats", "stats", "uninstall"),
    "faults": (
        "DriverGrowth", "GpuFailure", "GraphCache", "Heat", "HeldMemory", "KilledByPressure", "Miscompute",
        "Simulation", "SystemState", "has_strided_weight", "hold_memory", "reduces_over", "simulate", "system_state",
    ),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    # Import on first use, because pytest imports this package for its plugin, even in projects that do not use it.
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULE_OF)
