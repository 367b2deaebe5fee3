"""Render a machine and its state as lines of text."""

from collections.abc import Iterator

from whet.base.units import format_bytes
from whet.machine.facts import Accelerator, Machine, SystemState

_UNKNOWN = "unknown"


def machine_line(machine: Machine) -> str:
    """Return a one-line description of a machine, for the head of a plan or report."""
    parts = [machine.chip or machine.cpu.name or "unknown chip", _cores_text(machine)]
    parts += [_accelerator_text(accelerator) for accelerator in machine.accelerators]
    parts.append(f"{_bytes_text(machine.memory_bytes)} memory")
    parts.append(" ".join(filter(None, (machine.os.name, machine.os.version))) or "unknown system")
    parts.append(f"torch {machine.torch.version or _UNKNOWN}")
    name = "" if machine.origin == "probed" else f"{machine.name} ({machine.origin}): "
    return name + ", ".join(parts)


def machine_lines(machine: Machine) -> Iterator[str]:
    """Yield all facts about a machine as lines."""
    yield f"machine   {machine_line(machine)}"
    if machine.model:
        cooling = {True: ", no fan", False: ", with a fan", None: ""}[machine.is_fanless]
        yield f"model     {machine.model}{cooling}"
    for accelerator in machine.accelerators:
        details = [f"may use {_bytes_text(accelerator.usable_bytes)}"]
        if accelerator.capability:
            details.append(f"capability {accelerator.capability}")
        if accelerator.driver:
            details.append(f"driver {accelerator.driver}")
        yield f"{accelerator.kind:<9} {accelerator.name or _UNKNOWN}, " + ", ".join(details)
    for absent in machine.absent:
        yield f"no {absent.device:<6} {absent.reason}"
        yield f"          try: {absent.fix}"
    if machine.torch.error:
        yield f"torch     {machine.torch.error}"
    for source in machine.sources:
        yield f"source    {source}"


def system_state_lines(system_state: SystemState) -> Iterator[str]:
    """Yield lines that describe the current state of a machine."""
    now = [f"{_bytes_text(system_state.memory_available_bytes)} free"]
    if system_state.swap_used_bytes:
        now.append(f"{format_bytes(system_state.swap_used_bytes)} swapped")
    if system_state.power_source:
        now.append(f"on {system_state.power_source}")
    if system_state.low_power_mode:
        now.append("low power mode: the GPU is throttled")
    if system_state.thermal and system_state.thermal != "nominal":
        now.append(f"thermal pressure {system_state.thermal}")
    if system_state.memory_pressure and system_state.memory_pressure != "normal":
        now.append(f"memory pressure {system_state.memory_pressure}")
    if system_state.gpu_busy_percent is not None:
        now.append(f"GPU {system_state.gpu_busy_percent:.0f} % busy")
    yield "now       " + ", ".join(now)
    for process in system_state.busy:
        yield f"busy      {process.name} (pid {process.pid}): {_load_text(process.cpu_percent, process.memory_bytes)}"


def _cores_text(machine: Machine) -> str:
    cpu = machine.cpu
    # Apple's notation for performance and efficiency cores, such as "4+4".
    if cpu.fast_cores is not None and cpu.slow_cores is not None:
        return f"{cpu.fast_cores}+{cpu.slow_cores} cores"
    count = cpu.physical_cores or cpu.logical_cores
    return f"{count} core{'s' if count != 1 else ''}" if count else "unknown cores"


def _accelerator_text(accelerator: Accelerator) -> str:
    if accelerator.kind == "mps":
        cores = f"{accelerator.num_cores}-core GPU" if accelerator.num_cores else "GPU"
        return f"{cores} (may use {_bytes_text(accelerator.usable_bytes)})"
    return f"{accelerator.name or 'CUDA GPU'} {_bytes_text(accelerator.memory_bytes)}"


def _bytes_text(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else format_bytes(num_bytes)


def _load_text(cpu_percent: float | None, memory_bytes: int | None) -> str:
    parts = [
        f"{cpu_percent:.0f} % of a core" if cpu_percent else "",
        format_bytes(memory_bytes) if memory_bytes else "",
    ]
    return ", ".join(part for part in parts if part)
