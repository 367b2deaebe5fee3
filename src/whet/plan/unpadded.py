"""Can a workload be attended without padding here? Then samples are packed, and a step has few shapes."""

from whet.machine.facts import Machine
from whet.plan.setting import Scalar
from whet.plan.workload import Workload

_FIRST_WITH_FLASH = 8.0
_FIRST_TORCH = 2, 10


def has_unpadded_attention(machine: Machine, workload: Workload, *, device: str, precision: Scalar) -> bool:
    """CUDA has a kernel for samples that lie one behind the other, in half precision (device/unpadded_attention.py)."""
    if not (workload.can_pack and workload.lengths_vary) or device != "cuda" or precision not in ("bf16", "fp16"):
        return False
    accelerator = machine.accelerator(device)
    try:
        capability = float((accelerator.capability if accelerator else None) or 0)
    except ValueError:
        return False
    return capability >= _FIRST_WITH_FLASH and machine.torch.is_before(*_FIRST_TORCH) is False
