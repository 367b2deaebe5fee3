"""Open a device by name, and describe the machine that this process runs on."""

from dataclasses import dataclass

import torch

from whet.base.errors import UsageError, WhetError
from whet.device.abstract import AbstractDevice
from whet.device.cpu import CpuDevice
from whet.device.cuda import CudaDevice, cuda_unavailable_reason
from whet.device.environment import configure_mps_memory
from whet.device.fake import FakeDevice
from whet.device.mps import MpsDevice, mps_unavailable_reason
from whet.device.virtual_mac.faults import system_state as simulated_state
from whet.device.virtual_mac.installation import installed as installed_virtual_mac
from whet.machine.environment import read_environment
from whet.machine.facts import Machine, SystemState
from whet.machine.pressure import read_system_state
from whet.machine.probe import assemble_machine, read_system
from whet.machine.torch_info import CudaInfo, TorchInfo

# "auto" tries these devices in order.
UNAVAILABLE_REASONS = {"cuda": cuda_unavailable_reason, "mps": mps_unavailable_reason}


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectedDevice:
    """An opened device, and the reason if it replaces the requested one."""

    device: AbstractDevice
    fallback_reason: str | None = None
    """Why the CPU was opened instead of the requested device, or None if it was not."""


def open_device(name: str = "auto", *, on_failure: str = "stop", overlaps_copies: bool = False) -> SelectedDevice:
    """Open a device by name: auto (cuda, else mps, else cpu), cuda, cuda:1, mps, cpu or fake.

    Raise WhetError if the device cannot be used. With on_failure="cpu", it opens the CPU instead. `overlaps_copies`
    makes copies from the host to a CUDA device asynchronous.
    """
    kind, _, index = name.partition(":")
    if kind == "auto":
        kind = next((kind for kind, reason in UNAVAILABLE_REASONS.items() if reason() is None), "cpu")
    if kind not in ("cpu", "cuda", "mps", "fake") or (index and (kind != "cuda" or not index.isdecimal())):
        raise UsageError("no such device", got=name, try_="auto, mps, cuda, cuda:1 or cpu")
    try:
        return SelectedDevice(device=_open(kind, int(index or 0), overlaps_copies=overlaps_copies))
    except WhetError as error:
        if on_failure != "cpu":
            raise
        return SelectedDevice(device=CpuDevice(), fallback_reason=f"{error.what}: {error.got}")


def rank_device(name: str, local_rank: int) -> str:
    """Return the device name for a rank. Each rank on a machine gets its own GPU, unless there are too few GPUs."""
    if name != "cuda" or local_rank == 0:
        return name
    return f"cuda:{local_rank % max(1, torch.cuda.device_count())}"


def _open(kind: str, index: int, *, overlaps_copies: bool) -> AbstractDevice:
    if kind in UNAVAILABLE_REASONS:
        reason = UNAVAILABLE_REASONS[kind]()
        if reason is not None:
            raise WhetError(
                f"the device {kind} cannot be used",
                got=reason,
                try_="whet probe for details; --device cpu to use the CPU",
            )
    if kind == "cuda":
        if index >= torch.cuda.device_count():
            raise WhetError(
                f"there is no cuda:{index}",
                got=f"{torch.cuda.device_count()} GPUs, counted from 0",
                try_="--device cuda",
            )
        return CudaDevice(index, overlaps_copies=overlaps_copies)
    # `open_device` has checked that the kind is one of these.
    return {"mps": MpsDevice, "cpu": CpuDevice, "fake": FakeDevice}[kind]()


# --- facts about this machine ----------------------------------------------------------------------------------------


def current_machine() -> tuple[Machine, SystemState]:
    """Return the facts about this machine and its current state, which `whet probe` also reports.

    This takes milliseconds, because torch is already loaded. If a virtual Mac is installed, it returns the simulated
    machine, and the state of this computer with the simulated readings.
    """
    machine = installed_virtual_mac() or assemble_machine(read_system(), torch=_torch_facts())
    environment = read_environment(is_deterministic=torch.are_deterministic_algorithms_enabled())
    return machine, with_simulated_state(read_system_state().model_copy(update={"environment": environment}))


def with_simulated_state(system_state: SystemState) -> SystemState:
    """Return `system_state`, with the readings that a virtual Mac simulates in place of the real ones."""
    simulated = simulated_state()
    if simulated is None:
        return system_state
    return system_state.model_copy(update={name: getattr(simulated, name) for name in simulated.model_fields_set})


def _torch_facts() -> TorchInfo:
    has_mps = mps_unavailable_reason() is None
    if has_mps:
        # MPS reads the watermarks at the first memory query, which is the call of recommended_max_memory below.
        configure_mps_memory()
    return TorchInfo(
        version=str(torch.__version__),
        num_threads=torch.get_num_threads(),
        cuda_build=torch.version.cuda,
        cuda_available=cuda_unavailable_reason() is None,
        cuda_devices=_cuda_devices(),
        mps_built=torch.backends.mps.is_built(),
        mps_available=has_mps,
        mps_recommended_bytes=torch.mps.recommended_max_memory() if has_mps else None,
        mps_num_cores=torch.backends.mps.get_core_count() if has_mps else None,
    )


def _cuda_devices() -> tuple[CudaInfo, ...]:
    if cuda_unavailable_reason() is not None:
        return ()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(
        CudaInfo(
            name=gpu.name,
            memory_bytes=gpu.total_memory,
            capability=f"{gpu.major}.{gpu.minor}",
            num_multiprocessors=gpu.multi_processor_count,
        )
        for gpu in properties
    )
