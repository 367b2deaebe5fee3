"""Query the NVIDIA driver: nvidia-smi for facts about GPUs, and NVML for their current state."""

import ctypes
import re
from typing import Any, Literal, NamedTuple

from whet.machine.facts import ThermalLevel
from whet.machine.programs import ProgramRunner, clean_name, complete_lines, positive_number, run_program

DriverState = Literal["missing", "not running", "no card", "working"]

_QUERY_FIELDS = ("name", "memory.total", "driver_version", "compute_cap")
# Drivers before 510 reject compute_cap.
_QUERY_FIELDS_BEFORE_510 = ("name", "memory.total", "driver_version")


class NvidiaCard(NamedTuple):
    name: str | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    capability: str | None = None


class NvidiaCards(NamedTuple):
    driver: DriverState
    cards: tuple[NvidiaCard, ...] = ()


NO_DRIVER = NvidiaCards("missing")


def query_driver(*, run: ProgramRunner = run_program) -> NvidiaCards:
    """Query nvidia-smi. Drivers before 510 do not support compute_cap, so they are queried again without it."""
    cards = parse_cards(run(_query_command(_QUERY_FIELDS), any_exit=True), fields=_QUERY_FIELDS)
    # An old driver rejects the whole query if it does not support one field.
    if cards.driver == "not running":
        again = parse_cards(
            run(_query_command(_QUERY_FIELDS_BEFORE_510), any_exit=True), fields=_QUERY_FIELDS_BEFORE_510
        )
        if again.driver == "working":
            return again
    return cards


def _query_command(fields: tuple[str, ...]) -> tuple[str, ...]:
    return ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")


def parse_cards(text: str | None, *, fields: tuple[str, ...] = _QUERY_FIELDS) -> NvidiaCards:
    """Parse one line per card. None means that no driver is installed, and text without cards that the driver fails.

    >>> parse_cards("NVIDIA H200, 143771, 580.65.06, 9.0\\n").cards[0].capability
    '9.0'
    >>> parse_cards("No devices were found\\n").driver, parse_cards(None).driver
    ('no card', 'missing')
    """
    if text is None:
        return NO_DRIVER
    lines = [line for line in complete_lines(text) if line.strip()]
    if any("No devices were found" in line for line in lines):
        return NvidiaCards("no card")
    cards = [card for card in (_parse_card(line, fields) for line in lines) if card is not None]
    return NvidiaCards("working", tuple(cards)) if cards else NvidiaCards("not running")


def _parse_card(line: str, fields: tuple[str, ...]) -> NvidiaCard | None:
    # Split from the right, because only the name of a card may contain a comma.
    parts = [part.strip() for part in line.rsplit(",", len(fields) - 1)]
    if len(parts) != len(fields):
        return None
    values = dict(zip(fields, parts, strict=True))
    name, driver = clean_name(values["name"]), values["driver_version"]
    # A version number in the third column distinguishes a table row from an error message.
    if name is None or not re.fullmatch(r"\d{1,5}(\.\d{1,5}){1,3}", driver, re.ASCII):
        return None
    megabytes = positive_number(values["memory.total"])
    capability = values.get("compute_cap", "")
    return NvidiaCard(
        name=name,
        memory_bytes=megabytes * 1024**2 if megabytes else None,
        driver=driver,
        capability=capability if re.fullmatch(r"\d{1,2}\.\d", capability, re.ASCII) else None,
    )


_NVML_LIBRARY = "libnvidia-ml.so.1"
# Bits for software and hardware thermal slowdown, from nvml.h.
_THERMAL_REASONS = 0x20 | 0x40


class GpuState(NamedTuple):
    thermal: ThermalLevel | None = None
    busy_percent: float | None = None


class _NvmlUtilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class SingleGpuReader:
    """Reads the state of the GPU if the machine has exactly one. With several, it is unknown which one is training."""

    def __init__(self, *, library: Any = None) -> None:
        self._library = library
        self._card: ctypes.c_void_p | None = None
        self._is_open = False

    def __call__(self) -> GpuState:
        """Return the utilization of the GPU and whether heat throttles it. Both are unknown without a driver."""
        try:
            if not self._is_open:
                self._is_open = True
                self._card = self._open()
            return GpuState() if self._card is None else self._query(self._card)
        except (AttributeError, OSError, ctypes.ArgumentError):
            return GpuState()

    def _open(self) -> ctypes.c_void_p | None:
        nvml = self._library = self._library or ctypes.CDLL(_NVML_LIBRARY)
        count, card = ctypes.c_uint(), ctypes.c_void_p()
        if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0 or count.value != 1:
            return None
        return card if nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(card)) == 0 else None

    def _query(self, card: ctypes.c_void_p) -> GpuState:
        reasons, busy = ctypes.c_ulonglong(), _NvmlUtilization()
        nvml = self._library
        has_reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card, ctypes.byref(reasons)) == 0
        has_busy = nvml.nvmlDeviceGetUtilizationRates(card, ctypes.byref(busy)) == 0
        is_hot = bool(reasons.value & _THERMAL_REASONS)
        return GpuState(
            thermal=("heavy" if is_hot else "nominal") if has_reasons else None,
            busy_percent=float(busy.gpu) if has_busy and busy.gpu <= 100 else None,
        )
