"""A Mac with Apple silicon, simulated on Linux: real `mps:0` tensors, computed by the CPU. Nothing here is a Mac.

    from whet.device import virtual_mac
    virtual_mac.install("m2-air-8gb")

Numbers and speed are the CPU's; limits, errors, autocast, loss scaling and generators take the paths that PyTorch
takes on a Mac. docs/apple.md says what is simulated and what is not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.device.virtual_mac.faults import GpuFailure as GpuFailure
    from whet.device.virtual_mac.faults import GraphCache as GraphCache
    from whet.device.virtual_mac.faults import Heat as Heat
    from whet.device.virtual_mac.faults import HeldMemory as HeldMemory
    from whet.device.virtual_mac.faults import KilledByPressure as KilledByPressure
    from whet.device.virtual_mac.faults import Miscompute as Miscompute
    from whet.device.virtual_mac.faults import Simulation as Simulation
    from whet.device.virtual_mac.faults import conditions as conditions
    from whet.device.virtual_mac.faults import has_strided_weight as has_strided_weight
    from whet.device.virtual_mac.faults import hold_memory as hold_memory
    from whet.device.virtual_mac.faults import reduces_over as reduces_over
    from whet.device.virtual_mac.faults import simulate as simulate
    from whet.device.virtual_mac.install import FallbackStats as FallbackStats
    from whet.device.virtual_mac.install import Stats as Stats
    from whet.device.virtual_mac.install import install as install
    from whet.device.virtual_mac.install import installed as installed
    from whet.device.virtual_mac.install import reset_stats as reset_stats
    from whet.device.virtual_mac.install import stats as stats
    from whet.device.virtual_mac.install import uninstall as uninstall
    from whet.machine.facts import Conditions as Conditions

_PLACES = {
    "install": ("FallbackStats", "Stats", "install", "installed", "reset_stats", "stats", "uninstall"),
    "faults": (
        "Conditions", "GpuFailure", "GraphCache", "Heat", "HeldMemory", "KilledByPressure", "Miscompute", "Simulation",
        "conditions", "has_strided_weight", "hold_memory", "reduces_over", "simulate",
    ),
}  # fmt: skip
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    # Loaded on first use: pytest imports this package for its plugin, also in projects that never ask for a Mac.
    if name not in _PLACE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_PLACE_OF)
