"""The one door to devices: what was asked for, or a clear refusal; never a silent fall-back."""

from dataclasses import dataclass

import torch

from whet.base.errors import UsageError, WhetError
from whet.device import cuda, mps
from whet.device.abstract import AbstractDevice
from whet.device.cpu import Cpu
from whet.device.cuda import Cuda
from whet.device.fake import Fake
from whet.device.mps import Mps

_WHY_NOT = {"cuda": cuda.why_not, "mps": mps.why_not}


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A device, and why it is not the one that was asked for (None when it is)."""

    device: AbstractDevice
    fell_back: str | None = None


def open_device(name: str = "auto", *, on_failure: str = "stop", overlaps_copies: bool = False) -> Opened:
    """The named device: auto (cuda, else mps, else cpu), cuda, cuda:1, mps, cpu or fake."""
    kind, _, index = name.partition(":")
    if kind == "auto":
        kind = next((kind for kind, why_not in _WHY_NOT.items() if why_not() is None), "cpu")
    if kind not in ("cpu", "cuda", "mps", "fake") or (index and (kind != "cuda" or not index.isdecimal())):
        raise UsageError("no such device", got=name, try_="auto, mps, cuda, cuda:1 or cpu")
    try:
        return Opened(device=_open(kind, int(index or 0), overlaps_copies=overlaps_copies))
    except WhetError as error:
        if on_failure != "cpu":
            raise
        return Opened(device=Cpu(), fell_back=f"{error.what}: {error.got}")


def own_card(name: str, local_rank: int) -> str:
    """The device of one of several processes on a machine: each has the next GPU; they share where there are fewer."""
    if name != "cuda" or local_rank == 0:
        return name
    return f"cuda:{local_rank % max(1, torch.cuda.device_count())}"


def _open(kind: str, index: int, *, overlaps_copies: bool) -> AbstractDevice:
    if kind in _WHY_NOT:
        reason = _WHY_NOT[kind]()
        if reason is not None:
            raise WhetError(
                f"the device {kind} cannot be used", got=reason, try_="whet probe says more; --device cpu trains here"
            )
    if kind == "cuda":
        if index >= torch.cuda.device_count():
            raise WhetError(
                f"there is no cuda:{index}",
                got=f"{torch.cuda.device_count()} GPUs, counted from 0",
                try_="--device cuda",
            )
        return Cuda(index, overlaps_copies=overlaps_copies)
    return {"mps": Mps, "cpu": Cpu, "fake": Fake}[kind]()
