"""Does the NVIDIA card run slower because of heat? Asks the driver's library, which answers in microseconds."""

import ctypes
from typing import Any, NamedTuple

from whet.machine.facts import ThermalLevel

_LIBRARY = "libnvidia-ml.so.1"
_THERMAL_REASONS = 0x20 | 0x40
"""nvml.h: software and hardware thermal slow-down."""


class CardState(NamedTuple):
    thermal: ThermalLevel | None = None
    busy_percent: float | None = None


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class OnlyCard:
    """The card of a machine that has exactly one: of several, nobody could say which one trains."""

    def __init__(self, *, library: Any = None) -> None:
        self._library = library
        self._card: ctypes.c_void_p | None = None
        self._is_open = False

    def __call__(self) -> CardState:
        """Whether the card is slowed by heat now and how busy it is; unknown without a driver."""
        try:
            if not self._is_open:
                self._is_open = True
                self._card = self._open()
            return CardState() if self._card is None else self._ask(self._card)
        except (AttributeError, OSError, ctypes.ArgumentError):
            return CardState()

    def _open(self) -> ctypes.c_void_p | None:
        nvml = self._library = self._library or ctypes.CDLL(_LIBRARY)
        count, card = ctypes.c_uint(), ctypes.c_void_p()
        if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0 or count.value != 1:
            return None
        return card if nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(card)) == 0 else None

    def _ask(self, card: ctypes.c_void_p) -> CardState:
        reasons, busy = ctypes.c_ulonglong(), _Utilization()
        nvml = self._library
        has_reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card, ctypes.byref(reasons)) == 0
        has_busy = nvml.nvmlDeviceGetUtilizationRates(card, ctypes.byref(busy)) == 0
        is_hot = bool(reasons.value & _THERMAL_REASONS)
        return CardState(
            thermal=("heavy" if is_hot else "nominal") if has_reasons else None,
            busy_percent=float(busy.gpu) if has_busy and busy.gpu <= 100 else None,
        )
