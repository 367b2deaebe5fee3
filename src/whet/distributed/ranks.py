"""The rank of this process, read from the variables of torchrun. Imports no torch."""

from dataclasses import dataclass

from whet.base import env
from whet.base.errors import UsageError

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_VARIABLES = (*_REQUIRED, "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """The processes that share each global batch, and the place of this one among them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among the processes on this machine."""
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and speaks for all."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """One process needs no group, also where torchrun has started it."""
        return self.size == 1


def read_rank_info() -> RankInfo:
    """From torchrun's variables; a world of one process without them."""
    found = {name: env.read(name) for name in _VARIABLES}
    if found["RANK"] in (None, "0") and found["WORLD_SIZE"] in (None, "1"):
        return RankInfo()
    missing = [name for name in _REQUIRED if not found[name]]
    if missing:
        # Alone it would train a run of its own, and so would each of the others.
        said = " ".join(f"{name}={found[name]}" for name in _REQUIRED if found[name])
        raise _environment_error("torchrun's variables are there in part", got=f"{said}, but no {' '.join(missing)}")
    size = _parse_int("WORLD_SIZE", found["WORLD_SIZE"] or "", least=1)
    rank = _parse_int("RANK", found["RANK"] or "", most=size - 1)
    _parse_int("MASTER_PORT", found["MASTER_PORT"] or "", least=1, most=65_535)
    local_size = _parse_int("LOCAL_WORLD_SIZE", found["LOCAL_WORLD_SIZE"] or "1", least=1)
    local_rank = _parse_int("LOCAL_RANK", found["LOCAL_RANK"] or "0")
    return RankInfo(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def _parse_int(name: str, said: str, *, least: int = 0, most: int = 2**31) -> int:
    value = int(said) if said.strip().isdecimal() else -1
    if not least <= value <= most:
        raise _environment_error("torchrun's variables contradict each other", got=f"{name}={said}")
    return value


def _environment_error(what: str, *, got: str) -> UsageError:
    hint = "torchrun --nproc-per-node N -m whet train ..., or unset " + " ".join(_VARIABLES)
    return UsageError(what, got=got, try_=hint)


def check_not_mps(num_processes: int, *, device: str, is_mac: bool, command: str = "whet train ...") -> None:
    """Refuses several processes on Apple's GPU, before any is started and before torch is loaded.

    `is_mac` says whether the device is MPS where nobody has named one.
    """
    if num_processes == 1 or not (device == "mps" or (device == "auto" and is_mac)):
        return
    asked = "--device mps" if device == "mps" else "no --device, which is MPS on this machine"
    raise UsageError(
        "several processes cannot train together on MPS",
        got=f"{num_processes} processes, {asked}; torch has no collective for MPS tensors: gloo and NCCL refuse them",
        try_=f"one process ({command} --device mps), or --device cpu, where they talk through gloo; "
        "a torch whose c10d operators know MPS would lift this (pytorch#160732, #189853)",
    )
