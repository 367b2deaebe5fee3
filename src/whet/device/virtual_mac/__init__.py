"""A Mac with Apple silicon, simulated on Linux: real `mps:0` tensors, computed by the CPU. Nothing here is a Mac.

    from whet.device import virtual_mac
    virtual_mac.install("m2-air-8gb")

Numbers and speed are the CPU's; limits, errors, autocast, loss scaling and generators take the paths that PyTorch
takes on a Mac. docs/apple.md says what is simulated and what is not.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.device.virtual_mac.installing import Stats as Stats
    from whet.device.virtual_mac.installing import hold_memory as hold_memory
    from whet.device.virtual_mac.installing import install as install
    from whet.device.virtual_mac.installing import installed as installed
    from whet.device.virtual_mac.installing import reset_stats as reset_stats
    from whet.device.virtual_mac.installing import stats as stats
    from whet.device.virtual_mac.installing import uninstall as uninstall

__all__ = ["Stats", "hold_memory", "install", "installed", "reset_stats", "stats", "uninstall"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: pytest imports this package for its plugin, also in projects that never ask for a Mac.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from whet.device.virtual_mac import installing

    return getattr(installing, name)


def __dir__() -> list[str]:
    return sorted(__all__)
