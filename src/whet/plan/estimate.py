"""Estimate how fast a plan trains on a machine, from published figures for its chip. Nothing is measured.

The time of a step is the sum of three parts:

    operations / (published peak x EFFICIENCY)      arithmetic
  + bytes      / (published bandwidth x 0.85)       weights, optimizer state and activations
  + operators  x seconds per operator               overhead of Python, the driver and small kernels

Each constant is the midpoint of the published values. Their sources, and a comparison with measured steps, are in
docs/bench/estimate-constants_h200-linux-2core_2026-11-18.md. No simple formula covers all models, so the result is a
range from half to twice the estimate.
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from whet.base.model import FrozenModel
from whet.base.units import format_seconds
from whet.machine.chips import find_chip
from whet.machine.device_figures import DEVICE_FIGURES
from whet.machine.facts import Accelerator, Machine
from whet.plan.plan import Plan
from whet.plan.setting import TuneTrial
from whet.plan.workload import Workload

SPREAD = 2.0
"""The range is from the estimate divided by this factor to the estimate multiplied by it."""

# Share of the peak for the convolutions of ResNet-50 on one core: 0.68 to 0.97 (uxlfoundation/oneDNN#1115, Xeon 8180).
_CPU_CONVOLUTIONS = 0.81
# Share of the published bandwidth for reading and writing long arrays: 0.79 (GPU of an M5) to 0.92 (H100).
_BANDWIDTH_SHARE = 0.85
# In a captured graph, only the kernel of an operator takes time (NVIDIA, "Getting started with CUDA graphs").
_CAPTURED_SECONDS = 3.4e-6
# Two 256-bit FMA units per core do 32 float32 operations per cycle. 3 GHz is usual for servers. One core reads and
# writes 6 to 20 GB/s (Xeon E5-2670 and E5-2690 v3, single-threaded copy and triad).
_CPU_FLOPS_PER_CORE, _CPU_BANDWIDTH_PER_CORE = 32 * 3.0e9, 11e9

# Bytes moved per parameter and step: weights are read twice and written once, gradients are written and read, and the
# two moments of Adam are read and written. Each number has 4 bytes.
_BYTES_PER_PARAMETER = 28
# Each activation is written and read, then read again in the backward pass, where its gradient is written and read.
_ACTIVATION_PASSES = 5
_UNKNOWN_OPERATORS = 500
_UNKNOWN_LENGTH_SHARE = 0.35
"""Assumed mean length as a share of the maximum, if the data was not read. docs/bench has 46 of 128 and 19 of 64."""
_HALF = ("bf16", "fp16")


class _Card(NamedTuple):
    """Published figures of a CUDA card: dense TFLOPS by precision, and memory bandwidth in GB/s."""

    half: float
    tf32: float
    fp32: float
    bandwidth: float


# Figures from NVIDIA's data sheets. The first key that the card's name contains applies.
_CARDS = {
    "H200": _Card(989, 494, 67, 4800),
    "H100": _Card(989, 494, 67, 3350),
    "A100": _Card(312, 156, 19.5, 1935),
    "RTX 4090": _Card(165, 82.6, 82.6, 1008),
    "RTX 3090": _Card(71, 35.6, 35.6, 936),
    "L40S": _Card(362, 183, 91.6, 864),
    "L4": _Card(121, 60, 30.3, 300),
    "A10": _Card(125, 62.5, 31.2, 600),
    "T4": _Card(65, 8.1, 8.1, 320),
}


class DeviceSpeed(NamedTuple):
    """Published figures of a device, in operations and bytes per second."""

    flops: float
    bandwidth: float
    source: str


class SpeedEstimate(FrozenModel):
    """The estimated range of the speed of a run, without evaluations. The lower bound comes first."""

    samples_per_second: tuple[float, float]
    step_seconds: tuple[float, float]
    total_seconds: tuple[float, float] | None = None
    """Seconds of all steps, or None if their number is unknown."""
    source: str
    """The published figures behind the estimate."""

    @property
    def line(self) -> str:
        """The estimate as one line of text."""
        low, high = self.samples_per_second
        text = f"speed     {_short(low)} to {_short(high)} samples/s"
        if self.total_seconds is not None:
            first, last = map(format_seconds, self.total_seconds)
            text += f", {first} to {last} for all steps"
        return f"{text}; estimated from {self.source}, never measured on such a machine"


def estimate_speed(plan: Plan) -> SpeedEstimate | None:
    """Estimate the speed of a plan. Return None if the tables have no figures for its device."""
    device = plan.device.partition(":")[0]
    speed = device_speed(plan.machine, device, precision=plan.precision, threads=plan.threads)
    if speed is None:
        return None
    workload, share = plan.workload, plan.workload.samples_per_rank
    # If the memory of a sample is unknown, the run measures it first, and usually does not split the batch.
    parts = 1 if workload.activation_bytes is None else math.ceil(share / plan.micro_batch)
    half = 0.5 if plan.precision in _HALF else 1.0
    length = _length_share(workload, plan.lengths)
    arithmetic = share * length * _sample_flops(workload) / (speed.flops * _efficiency(workload, device))
    sample_bytes = workload.activation_bytes or workload.moved_bytes or 0
    activations = share * length * sample_bytes * half * _ACTIVATION_PASSES
    weights = workload.num_parameters * _BYTES_PER_PARAMETER + workload.num_frozen * 4
    memory = (activations + weights) / (speed.bandwidth * _BANDWIDTH_SHARE)
    is_captured = device == "cuda" and plan.graph != "off"
    per_operator = _CAPTURED_SECONDS if is_captured else DEVICE_FIGURES[device].operator_seconds
    launches = parts * (workload.num_operators or _UNKNOWN_OPERATORS) * per_operator
    seconds = arithmetic + memory + launches
    fast, slow = seconds / SPREAD, seconds * SPREAD
    steps = workload.num_steps
    return SpeedEstimate(
        samples_per_second=(workload.global_batch_size / slow, workload.global_batch_size / fast),
        step_seconds=(fast, slow),
        total_seconds=None if steps is None else (steps * fast, steps * slow),
        source=speed.source,
    )


def measured_step_seconds(trials: Sequence[TuneTrial]) -> float | None:
    """Return the seconds per step of the chosen plan, as measured before the run, or None if nothing was measured."""
    plans = [trial for trial in trials if trial.setting == "plan" and trial.median_seconds]
    if plans:
        last = plans[-1]
        return last.median_seconds if last.verdict == "faster" else last.baseline_seconds
    winners = [trial for trial in trials if trial.verdict in ("faster", "likely") and trial.median_seconds]
    if winners:
        return winners[-1].median_seconds
    by_rules = [trial.baseline_seconds for trial in trials if not trial.against and trial.baseline_seconds]
    return median(by_rules) if by_rules else None


def device_speed(machine: Machine, device: str, *, precision: str, threads: int | str | None) -> DeviceSpeed | None:
    """Return the published figures of a machine's device, or None if it is not in the tables."""
    gpu = machine.accelerator(device)
    if device == "mps" and gpu is not None:
        return _apple_speed(machine, gpu)
    if device == "cuda" and gpu is not None:
        card = next((card for name, card in _CARDS.items() if name in (gpu.name or "")), None)
        if card is None:
            return None
        tflops = card.half if precision in _HALF else card.tf32 if precision == "tf32" else card.fp32
        source = f"{tflops:g} TFLOPS and {card.bandwidth:,.0f} GB/s of {gpu.name}"
        return DeviceSpeed(tflops * 1e12, card.bandwidth * 1e9, source)
    if device != "cpu":
        return None
    cores = threads if isinstance(threads, int) else machine.torch.num_threads or machine.cpu.physical_cores or 1
    source = f"{cores} cores with 32 operations per cycle at 3 GHz"
    return DeviceSpeed(cores * _CPU_FLOPS_PER_CORE, cores * _CPU_BANDWIDTH_PER_CORE, source)


def _apple_speed(machine: Machine, gpu: Accelerator) -> DeviceSpeed | None:
    chip = find_chip(machine.chip)
    if chip is None:
        return None
    share = (gpu.num_cores or chip.gpu_cores[-1]) / chip.gpu_cores[-1]
    # Half precision runs at the rate of float32, except in the matrix units, which training is not known to use.
    tflops = share * sum(chip.fp32_tflops) / 2
    bandwidth = chip.bandwidth[-1] if gpu.num_cores == chip.gpu_cores[-1] else chip.bandwidth[0]
    return DeviceSpeed(tflops * 1e12, bandwidth * 1e9, f"{tflops:.1f} TFLOPS and {bandwidth} GB/s of {chip.name}")


def _efficiency(workload: Workload, device: str) -> float:
    is_convolutional = "conv" in workload.layers and "attention" not in workload.layers
    return _CPU_CONVOLUTIONS if device == "cpu" and is_convolutional else DEVICE_FIGURES[device].efficiency


def _sample_flops(workload: Workload) -> float:
    """Return the operations of a sample of full length, as given by the workload, or as if each weight is used once."""
    if workload.flops_per_sample is not None:
        return workload.flops_per_sample
    # Two operations per weight in the forward pass and four in the backward pass. Frozen weights have no gradient,
    # so they take only two in the backward pass.
    return (6.0 * workload.num_parameters + 4.0 * workload.num_frozen) * workload.max_length


def _length_share(workload: Workload, lengths: str) -> float:
    """Return the share of a full-length sample that is computed. With fixed lengths, padding is computed too."""
    if not workload.lengths_vary or lengths == "fixed":
        return 1.0
    if workload.mean_length is None:
        return _UNKNOWN_LENGTH_SHARE
    return workload.mean_length / workload.max_length


def _short(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
