"""This machine's facts, with torch asked in this process: for a process that trains anyway."""

import torch

from whet.device import cuda, mps
from whet.device.environment import before_first_allocation
from whet.device.virtual_mac.faults import conditions as simulated_conditions
from whet.device.virtual_mac.installing import installed as installed_virtual_mac
from whet.machine.facts import Conditions, Machine
from whet.machine.probe import ask_system, assemble
from whet.machine.torch_child import CudaDevice, TorchAnswer


def machine_here() -> tuple[Machine, Conditions]:
    """What `whet probe` would say about the machine, in milliseconds, since torch is loaded already.

    In a process with a virtual Mac that is the simulated machine; how busy it is, is this computer's answer where
    nothing else is simulated.
    """
    system = ask_system()
    return installed_virtual_mac() or assemble(system, torch=_answer()), as_simulated(system.conditions)


def as_simulated(conditions: Conditions) -> Conditions:
    """What the sensors said, with what a virtual Mac simulates in its place; as it is without one."""
    simulated = simulated_conditions()
    if simulated is None:
        return conditions
    return conditions.model_copy(update={name: getattr(simulated, name) for name in simulated.model_fields_set})


def _answer() -> TorchAnswer:
    has_mps = mps.why_not() is None
    if has_mps:
        # MPS reads the watermarks when it is first asked about memory, which is below.
        before_first_allocation()
    return TorchAnswer(
        version=str(torch.__version__),
        num_threads=torch.get_num_threads(),
        cuda_build=torch.version.cuda,
        cuda_available=cuda.why_not() is None,
        cuda_devices=_cards(),
        mps_built=torch.backends.mps.is_built(),
        mps_available=has_mps,
        mps_recommended_bytes=torch.mps.recommended_max_memory() if has_mps else None,
        mps_num_cores=torch.backends.mps.get_core_count() if has_mps else None,
    )


def _cards() -> tuple[CudaDevice, ...]:
    if cuda.why_not() is not None:
        return ()
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(
        CudaDevice(
            name=card.name,
            memory_bytes=card.total_memory,
            capability=f"{card.major}.{card.minor}",
            num_multiprocessors=card.multi_processor_count,
        )
        for card in found
    )
