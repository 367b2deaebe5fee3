"""Speed measurements: matrix products, bandwidth, copies, kernel launches and training steps.

Results are medians. Repeats are interleaved, so that thermal changes affect all measurements equally. Speeds depend
strongly on power and temperature, so the report has the state of both before and after the checks.
"""

import copy
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from whet.base.units import format_bytes, format_seconds
from whet.device.abstract import AbstractDevice
from whet.device.cpu import CpuDevice
from whet.doctor.check import Check, CheckFinding, DeviceUnderTest, Figure, differs, good, not_applicable
from whet.doctor.checks.compare import draw_integers
from whet.doctor.checks.models import VOCABULARY, ModelTask, SmallTransformer

REPEATS = 7
# Minimum seconds of a product to be timed. A faster one is timed at a larger size.
_MIN_SECONDS = 0.004
_MAX_SIZE = 8_192
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def time_interleaved(calls: Mapping[str, tuple[AbstractDevice, Callable[[], object]]]) -> dict[str, list[float]]:
    """Return `REPEATS` interleaved times of each call, in seconds. Synchronize before and after each call."""
    for device, call in calls.values():
        call()
        device.sync()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, (device, call) in calls.items():
            device.sync()
            start = time.perf_counter()
            call()
            device.sync()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _best_of_few(device: AbstractDevice, call: Callable[[], object]) -> float:
    """Return the time of the fastest of a few calls after warm-up. The minimum is least affected by other load."""
    call()
    seconds = []
    for _ in range(4):
        device.sync()
        start = time.perf_counter()
        call()
        device.sync()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _spread(seconds: list[float]) -> float:
    """Return half of the interquartile range relative to the median."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / 2 / middle


def show_speed(speed: float) -> str:
    """Format a speed with at least two significant digits, so that a very slow result is not shown as 0.

    >>> [show_speed(speed) for speed in (12_345.6, 9.98, 1.04, 0.0342)]
    ['12,346', '10', '1.0', '0.034']
    """
    return f"{speed:,.0f}" if speed >= 9.95 else f"{speed:#.2g}"


def _matmul(target: DeviceUnderTest) -> CheckFinding:
    device = target.device

    def product(size: int, dtype: torch.dtype) -> Callable[[], object]:
        a = torch.randn(size, size).to(dtype).to(device.torch_device)
        return lambda: a @ a

    sizes, calls = {}, {}
    for name, dtype in _DTYPES.items():
        # Choose a size per dtype, because a CPU without half-precision units can be 100 times slower in fp16 or bf16.
        size = 128
        while size < _MAX_SIZE and _best_of_few(device, product(size, dtype)) < _MIN_SECONDS:
            size *= 2
        sizes[name], calls[name] = size, (device, product(size, dtype))
    seconds = time_interleaved(calls)
    figures: dict[str, Figure] = {}
    shown = []
    for name, taken in seconds.items():
        # A matrix product has size**3 multiplications and as many additions.
        work = 2 * sizes[name] ** 3 / 1e9
        speed = work / statistics.median(taken)
        figures |= {f"{name}_gflops": speed, f"{name}_best_gflops": work / min(taken)}
        figures |= {f"{name}_size": sizes[name], f"{name}_spread": _spread(taken)}
        shown.append(f"{name} {show_speed(speed)}")
    return good(f"GFLOP/s: {', '.join(shown)}", **figures)


def _bandwidth(target: DeviceUnderTest) -> CheckFinding:
    device = target.device
    limit = device.memory.usage().limit or 2**33
    # Use a size that is much larger than the caches, but small enough for a device with little memory.
    num_bytes = min(2**28, limit // 32)
    source = torch.zeros(num_bytes // 4, device=device.torch_device)
    copied = torch.empty_like(source)
    seconds = time_interleaved({"copy": (device, lambda: copied.copy_(source))})["copy"]
    # A copy reads and writes every byte.
    speed = 2 * num_bytes / statistics.median(seconds)
    return good(
        f"{speed / 1e9:,.1f} GB/s read and written", gb_per_second=speed / 1e9, spread=_spread(seconds), bytes=num_bytes
    )


def _copies(target: DeviceUnderTest) -> CheckFinding:
    device = target.device
    if device.is_cpu:
        return not_applicable("nothing has to be copied")
    host = torch.zeros(2**24)
    there = device.put(host)
    seconds = time_interleaved({"to": (device, lambda: device.put(host)), "from": (device, there.cpu)})
    to, back = (2**26 / statistics.median(seconds[way]) / 1e9 for way in ("to", "from"))
    return good(f"{to:,.1f} GB/s to the device, {back:,.1f} back", to_gb_per_second=to, from_gb_per_second=back,
                to_spread=_spread(seconds["to"]), from_spread=_spread(seconds["from"]))  # fmt: skip


def _launches(target: DeviceUnderTest) -> CheckFinding:
    device, count = target.device, 500
    x = torch.zeros(16, device=device.torch_device)

    def launch() -> None:
        for _ in range(count):
            x.add_(1)

    def launch_and_wait() -> None:
        for _ in range(20):
            x.add_(1)
            device.sync()

    seconds = time_interleaved({"launch": (device, launch), "wait": (device, launch_and_wait)})
    launched, waited = statistics.median(seconds["launch"]) / count, statistics.median(seconds["wait"]) / 20
    return good(
        f"{launched * 1e6:.1f} us for a small operator, {waited * 1e6:.1f} us with a synchronization",
        launch_us=launched * 1e6, wait_us=waited * 1e6,
        launch_spread=_spread(seconds["launch"]), wait_spread=_spread(seconds["wait"]),
    )  # fmt: skip


def _stepper(device: AbstractDevice, *, width: int, batch: int) -> Callable[[], object]:
    torch.manual_seed(0)
    tokens = draw_integers(batch, 65, below=VOCABULARY)
    model = SmallTransformer(width=width, length=64).to(device.torch_device)
    task = ModelTask(
        copy.deepcopy(model), device.put(tokens[:, :-1].contiguous()), device.put(tokens[:, 1:].contiguous())
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        task.loss(model).backward()
        optimizer.step()

    return step


def _training(target: DeviceUnderTest, *, width: int, batch: int) -> CheckFinding:
    device = target.device
    calls = {target.device.kind: (device, _stepper(device, width=width, batch=batch))}
    if not device.is_cpu:
        calls["cpu"] = (CpuDevice(), _stepper(CpuDevice(), width=width, batch=batch))
    seconds = time_interleaved(calls)
    figures: dict[str, Figure] = {"tokens": batch * 64, "width": width}
    for name, taken in seconds.items():
        figures |= {f"{name}_seconds": statistics.median(taken), f"{name}_spread": _spread(taken)}
    what = f"{format_seconds(statistics.median(seconds[device.kind]))} a step"
    if not device.is_cpu:
        # Take the median of the ratios of consecutive pairs, so that drift between pairs cancels out.
        ratio = statistics.median(c / d for c, d in zip(seconds["cpu"], seconds[device.kind], strict=True))
        figures["times_the_cpu"] = ratio
        what += f", {ratio:.2f} times the speed of the CPU"
    return good(what, **figures)


def _memory(target: DeviceUnderTest) -> CheckFinding:
    device = target.device
    if device.is_cpu:
        return not_applicable("there is no cache to empty", limit_bytes=device.memory.usage().limit)
    seconds = []
    for _ in range(3):
        torch.zeros(2**24, device=device.torch_device)
        device.sync()
        start = time.perf_counter()
        device.memory.empty_cache()
        seconds.append(time.perf_counter() - start)
    limit = device.memory.usage().limit
    cost = statistics.median(seconds)
    recommended = format_bytes(limit) if limit else "unknown"
    what = f"emptying the cache takes {format_seconds(cost)}; recommended memory {recommended}"
    return good(what, empty_cache_seconds=cost, limit_bytes=limit)


# Explicit mantissa bits of a factor in each format.
_FACTOR_BITS = {"fp32": 23, "tf32": 10, "bf16": 7}


def _fp32_products(target: DeviceUnderTest) -> CheckFinding:
    """Measure how many mantissa bits of a float32 factor a product uses: 23, or 10 if it is computed as tf32.

    MLX computes float32 products as tf32 on M5 (ml-explore/mlx#3534). Small and large products may use different units,
    so test both.
    """
    exponents = torch.arange(1, 24, dtype=torch.float64)
    bits = {}
    for size in (32, 1_024):
        factors = (1 + 2**-exponents).float()[torch.arange(size) % len(exponents)].repeat(size, 1).T.contiguous()
        # Multiply by the identity, so that only the factors can be rounded.
        product = (target.put(factors) @ target.put(torch.eye(size))).cpu()
        is_kept = (product == factors).all(1)[: len(exponents)].tolist()
        bits[size] = is_kept.index(False) if False in is_kept else len(is_kept)
    precision = next((name for name, kept in _FACTOR_BITS.items() if min(bits.values()) >= kept), "less than bf16")
    figures: dict[str, Figure] = {f"bits_at_{size}": kept for size, kept in bits.items()}
    what = f"products of fp32 tensors are computed as {precision}"
    if precision == "fp32":
        return good(what, format=precision, **figures)
    return differs(f"{what}: {min(bits.values())} bits of a factor are used, not 23", format=precision, **figures)


CHECKS: list[Check] = [
    Check(name="matrix product", run=_matmul, is_quick=True),
    Check(name="precision of fp32 products", run=_fp32_products, is_quick=True),
    Check(name="memory bandwidth", run=_bandwidth),
    Check(name="copies from and to the host", run=_copies),
    Check(name="launching a kernel", run=_launches),
    Check(name="training step, small", run=lambda target: _training(target, width=64, batch=8), is_quick=True),
    Check(name="training step, larger", run=lambda target: _training(target, width=128, batch=32)),
    Check(name="memory", run=_memory),
]
