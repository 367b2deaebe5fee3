"""The rank of this process, from torchrun's environment variables. This module does not import torch."""

from dataclasses import dataclass

from whet.base import env
from whet.base.errors import UsageError

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_VARIABLES = (*_REQUIRED, "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """The rank of this process, and the number of ranks."""

    rank: int = 0
    size: int = 1
    """The world size: the number of ranks on all machines."""
    local_rank: int = 0
    """The rank among the processes on this machine."""
    local_size: int = 1
    """The number of ranks on this machine."""

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        """Whether there is only one rank, which needs no process group, even under torchrun."""
        return self.size == 1


def read_rank_info() -> RankInfo:
    """Return the rank from torchrun's environment variables, or a single rank if they are not set."""
    values = {name: env.read(name) for name in _VARIABLES}
    if values["RANK"] in (None, "0") and values["WORLD_SIZE"] in (None, "1"):
        return RankInfo()
    missing = [name for name in _REQUIRED if not values[name]]
    if missing:
        # Raise an error, because otherwise each process would silently train its own run.
        given = " ".join(f"{name}={values[name]}" for name in _REQUIRED if values[name])
        raise _environment_error("torchrun's variables are incomplete", got=f"{given}, but no {' '.join(missing)}")
    size = _parse_int("WORLD_SIZE", values["WORLD_SIZE"] or "", least=1)
    rank = _parse_int("RANK", values["RANK"] or "", most=size - 1)
    _parse_int("MASTER_PORT", values["MASTER_PORT"] or "", least=1, most=65_535)
    local_size = _parse_int("LOCAL_WORLD_SIZE", values["LOCAL_WORLD_SIZE"] or "1", least=1)
    local_rank = _parse_int("LOCAL_RANK", values["LOCAL_RANK"] or "0")
    return RankInfo(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def _parse_int(name: str, text: str, *, least: int = 0, most: int = 2**31) -> int:
    value = int(text) if text.strip().isdecimal() else -1
    if not least <= value <= most:
        raise _environment_error("torchrun's variables contradict each other", got=f"{name}={text}")
    return value


def _environment_error(what: str, *, got: str) -> UsageError:
    hint = "torchrun --nproc-per-node N -m whet train ..., or unset " + " ".join(_VARIABLES)
    return UsageError(what, got=got, try_=hint)


def check_not_mps(num_processes: int, *, device: str, is_mac: bool, command: str = "whet train ...") -> None:
    """Raise UsageError if several processes would use MPS. Does not import torch.

    `is_mac` is whether "auto" selects MPS on this machine. `command` appears in the hint of the error.
    """
    if num_processes == 1 or not (device == "mps" or (device == "auto" and is_mac)):
        return
    device_option = "--device mps" if device == "mps" else "no --device, which is MPS on this machine"
    raise UsageError(
        "several processes cannot train together on MPS",
        got=f"{num_processes} processes, {device_option}; torch has no collective for MPS tensors: "
        "gloo and NCCL refuse them",
        try_=f"one process ({command} --device mps), or --device cpu, where they communicate through gloo; "
        "a torch whose c10d operators support MPS would lift this (pytorch#160732, #189853)",
    )
