"""The system state while training: every reading is true or unknown, and programs run rarely. macOS is simulated."""

import ctypes
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machine_samples import answering, file_of, silent
from whet.machine import nvidia, pressure
from whet.machine.facts import SystemState
from whet.machine.nvidia import GpuState, SingleGpuReader
from whet.machine.pressure import PROGRAM_INTERVAL_SECONDS, MemoryStalls, SystemStateReader, ThrottleCounters

GB = 1024**3
CALM = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
SHORT = "some avg10=12.50 avg60=3.10 avg300=0.70 total=81\nfull avg10=1.02 avg60=0.00 avg300=0.00 total=9\n"
DIRE = "some avg10=61.00 avg60=3.10 avg300=0.70 total=81\nfull avg10=33.33 avg60=0.00 avg300=0.00 total=9\n"


class SimulatedMac:
    """The part of a Mac's C library that the sensors use, and its programs."""

    def __init__(self, *, thermal: int = 0, pressure: int = 1, swap: int = 0, has_sysctl: bool = True) -> None:
        self.thermal, self.pressure, self.swap, self.has_sysctl = thermal, pressure, swap, has_sysctl
        self.asked: list[str | None] = []
        self.tokens = 0

    def notify_register_check(self, key, token) -> int:
        assert key == b"com.apple.system.thermalpressurelevel"
        self.tokens += 1
        return 0

    def notify_get_state(self, token, state) -> int:
        state._obj.value = self.thermal
        return 0

    def notify_cancel(self, token) -> int:
        self.tokens -= 1
        return 0

    def sysctlbyname(self, name, value, size, new, new_size) -> int:
        if not self.has_sysctl:
            return -1
        raw = {
            b"kern.memorystatus_vm_pressure_level": self.pressure.to_bytes(4, "little"),
            b"vm.swapusage": b"".join(n.to_bytes(8, "little") for n in (4 * GB, 4 * GB - self.swap, self.swap))
            + bytes(8),
        }[name]
        assert size._obj.value >= len(raw), "the buffer is too small"
        ctypes.memmove(value, raw, len(raw))
        size._obj.value = len(raw)
        return 0

    def run(self, command, *, any_exit: bool = False) -> str | None:
        self.asked.append(file_of(command))
        return answering("m2-air")(command)


def test_a_mac_is_read_without_programs_most_of_the_time() -> None:
    mac, now = SimulatedMac(thermal=2, pressure=4, swap=3 * GB), [0.0]
    read = SystemStateReader(system="darwin", run=mac.run, libc=mac, clock=lambda: now[0])
    first = read()
    assert (first.thermal, first.memory_pressure, first.swap_used_bytes) == ("heavy", "critical", 3 * GB)
    assert first.power_source in ("mains", "battery")
    assert first.low_power_mode is not None
    assert sorted(mac.asked) == ["ioreg.plist", "pmset-batt.txt", "pmset.txt"]
    assert mac.tokens == 0, "every registration is released"
    mac.thermal, mac.pressure = 0, 1
    for _ in range(5):
        now[0] += PROGRAM_INTERVAL_SECONDS / 6
        again = read()
        assert (again.thermal, again.memory_pressure) == ("nominal", "normal")
        assert (again.power_source, again.low_power_mode) == (first.power_source, first.low_power_mode)
    assert len(mac.asked) == 3, "cached"
    now[0] += PROGRAM_INTERVAL_SECONDS / 6
    read()
    assert len(mac.asked) == 6, "read again"


def test_a_silent_mac_is_unknown() -> None:
    result = SystemStateReader(system="darwin", run=silent, libc=object())()
    assert result.model_copy(update={"memory_available_bytes": None}) == SystemState()
    half = SystemStateReader(system="darwin", run=silent, libc=SimulatedMac(thermal=9, has_sysctl=False))()
    assert (half.thermal, half.memory_pressure, half.swap_used_bytes) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "source", "is_low", "busy"),
    [("m2-air", "battery", True, 17.0), ("m5-pro", "mains", False, 0.0), ("intel", "mains", None, None)],
)
def test_what_programs_of_a_mac_report(name: str, source: str, is_low: bool | None, busy: float | None) -> None:
    now = SystemStateReader(system="darwin", run=answering(name), libc=object())()
    assert (now.power_source, now.low_power_mode, now.gpu_busy_percent) == (source, is_low, busy)


def test_another_system_is_unknown() -> None:
    assert SystemStateReader(system="win32")() == SystemState()


# --- Linux -----------------------------------------------------------------------------------------------------------


def a_linux(root: Path, *, stalls: str = CALM, left: int = 8 * GB, throttle: tuple[int, int] | None = None) -> Path:
    kilobytes = {"MemTotal": 16 * GB, "MemAvailable": left, "SwapTotal": 2 * GB, "SwapFree": GB}
    files = {
        "proc/meminfo": "".join(f"{name}:       {value // 1024} kB\n" for name, value in kilobytes.items()),
        "proc/pressure/memory": stalls,
    }
    if throttle is not None:
        folder = "sys/devices/system/cpu/cpu0/thermal_throttle"
        files[f"{folder}/core_throttle_count"] = f"{throttle[0]}\n"
        files[f"{folder}/package_throttle_total_time_ms"] = f"{throttle[1]}\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("stalls", "left", "level"),
    [
        (CALM, 8 * GB, "normal"),
        (SHORT, 8 * GB, "warn"),
        (DIRE, 8 * GB, "critical"),
        (CALM, GB, "warn"),
        (CALM, GB // 4, "critical"),
        ("", 8 * GB, "normal"),
    ],
)
def test_memory_pressure_on_linux(stalls: str, left: int, level: str, tmp_path: Path) -> None:
    result = SystemStateReader(system="linux", root=a_linux(tmp_path, stalls=stalls, left=left), card=GpuState)()
    assert result.memory_pressure == level
    assert (result.swap_used_bytes, result.memory_available_bytes) == (GB, left)
    assert result.thermal is None


def test_the_pressure_of_our_own_control_group_counts_first(tmp_path: Path) -> None:
    a_linux(tmp_path)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/mine\n")
    (tmp_path / "sys/fs/cgroup/jobs/mine").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/jobs/mine/memory.pressure").write_text(DIRE)
    assert SystemStateReader(system="linux", root=tmp_path, card=GpuState)().memory_pressure == "critical"


def test_throttling_shows_in_counters_that_rise(tmp_path: Path) -> None:
    now = [0.0]
    read = SystemStateReader(
        system="linux", root=a_linux(tmp_path, throttle=(7, 900)), card=GpuState, clock=lambda: now[0]
    )
    reported = [read().thermal]
    for counters in ((7, 900), (8, 950), (20, 3000), (20, 3000)):
        now[0] += 5
        a_linux(tmp_path, throttle=counters)
        reported.append(read().thermal)
    assert reported == [None, "nominal", "moderate", "heavy", "nominal"]
    old_kernel = pressure.thermal_level_between(ThrottleCounters(1, None), ThrottleCounters(2, None), seconds=5)
    assert old_kernel == "moderate"


def test_a_hot_card_counts_too(tmp_path: Path) -> None:
    read = SystemStateReader(system="linux", root=a_linux(tmp_path), card=lambda: GpuState("heavy", 97.0))
    assert (read().thermal, read().gpu_busy_percent) == ("heavy", 97.0)
    assert pressure.hottest("nominal", "heavy") == pressure.hottest("heavy", None) == "heavy"
    assert pressure.hottest(None, None) is None


@pytest.mark.parametrize("text", [CALM, SHORT, DIRE])
def test_truncated_stall_files_are_correct_or_unknown(text: str) -> None:
    truth = pressure.parse_memory_stalls(text)
    for end in range(len(text)):
        for value, true in zip(pressure.parse_memory_stalls(text[:end]), truth, strict=True):
            assert value in (None, true)


@given(text=st.text() | st.sampled_from([CALM, DIRE]).flatmap(lambda t: st.permutations(t[:60])).map("".join))
def test_any_text_in_place_of_stalls_never_crashes(text: str) -> None:
    assert all(value is None or 0 <= value <= 100 for value in pressure.parse_memory_stalls(text))


def test_unknown_pressure_is_not_normal() -> None:
    assert pressure.memory_pressure_level(MemoryStalls(), available=None, total=None) is None
    assert pressure.memory_pressure_level(MemoryStalls(), available=5, total=None) is None


def test_this_machine_can_be_read_from_a_thread() -> None:
    result: list[SystemState] = []
    thread = threading.Thread(target=lambda: result.append(pressure.read_system_state()))
    thread.start()
    thread.join()
    assert result[0].memory_available_bytes is None or result[0].memory_available_bytes > 0


# --- NVIDIA ----------------------------------------------------------------------------------------------------------


class SimulatedDriver:
    def __init__(self, *, cards: int = 1, reasons: int = 0, init: int = 0) -> None:
        self.cards, self.reasons, self.init, self.opened = cards, reasons, init, 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.opened += 1
        return self.init

    def nvmlDeviceGetCount_v2(self, count) -> int:  # noqa: N802
        count._obj.value = self.cards
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, card) -> int:  # noqa: N802
        card._obj.value = 4096
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card, reasons) -> int:  # noqa: N802
        assert card.value == 4096
        reasons._obj.value = self.reasons
        return 0

    def nvmlDeviceGetUtilizationRates(self, card, rates) -> int:  # noqa: N802
        rates._obj.gpu = 55
        return 0


@pytest.mark.parametrize(("reasons", "level"), [(0, "nominal"), (0x4, "nominal"), (0x20, "heavy"), (0x41, "heavy")])
def test_thermal_throttling_differs_from_a_power_cap(reasons: int, level: str) -> None:
    driver = SimulatedDriver(reasons=reasons)
    card = SingleGpuReader(library=driver)
    assert card() == card() == GpuState(level, 55.0)
    assert driver.opened == 1


@pytest.mark.parametrize(
    "library", [object(), SimulatedDriver(cards=2), SimulatedDriver(cards=0), SimulatedDriver(init=9)]
)
def test_no_card_or_several_or_no_driver_is_unknown(library) -> None:
    assert SingleGpuReader(library=library)() == GpuState()


def test_a_machine_without_the_library_is_unknown(monkeypatch) -> None:
    monkeypatch.setattr(nvidia, "_NVML_LIBRARY", "libwhet-is-not-there.so")
    card = SingleGpuReader()
    assert card() == card() == GpuState()
