"""Broadcast, max-reduce and barrier between ranks."""

import atexit
import contextlib
import datetime as dt
import functools
import json
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from whet.base.errors import LostRankError, UsageError
from whet.device.abstract import AbstractDevice
from whet.distributed.heartbeat import Heartbeat, StallDetector
from whet.distributed.ranks import RankInfo, read_rank_info
from whet.distributed.store import RankStore, join_store

TIMEOUT_SECONDS = 1800.0
"""What one process may wait for another: while the first one evaluates by itself, say."""
START_SECONDS = 300.0
"""Until all must be there: loading torch takes its time on a busy machine."""


class RankGroup:
    """This process among the others."""

    def __init__(self, ranks: RankInfo) -> None:
        self.ranks = ranks
        self._tensors: dist.ProcessGroup | None = None
        self.backend = "none"
        """What carries tensors of the device: nccl or gloo."""
        self.stall_detector = StallDetector(is_alone=ranks.is_alone)
        """What this process says of itself to the others."""

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and speaks for all."""
        return self.ranks.is_first

    @property
    def is_alone(self) -> bool:
        return self.ranks.is_alone

    @property
    def tensors(self) -> dist.ProcessGroup | None:
        """What carries tensors; None for the default group."""
        return self._tensors

    @functools.cached_property
    def exchange(self) -> RankStore:
        """For what is told beside the training; not for a process alone."""
        return RankStore(self.ranks, longest_seconds=TIMEOUT_SECONDS)

    @functools.cached_property
    def heartbeat(self) -> Heartbeat:
        """Watches over the others; not for a process alone."""
        return Heartbeat(self.exchange, self.stall_detector)

    def use_device(self, device: AbstractDevice) -> None:
        """Once the device is known: NCCL between GPUs, gloo between CPUs and where processes share a GPU."""
        if self.is_alone or self.backend != "none":
            return
        if device.kind == "mps":
            raise UsageError(
                "several processes cannot train together on MPS", got="device mps", try_="one process, or --device cpu"
            )
        index = device.torch_device.index if device.torch_device.index is not None else -1
        # The same GPU of the same machine twice: NCCL would refuse it.
        mine = f"{platform.node()}:{index}"
        all_of_them = self.gather(mine)
        self.backend = "nccl" if device.kind == "cuda" and len({*all_of_them}) == self.ranks.size else "gloo"
        if self.backend == "nccl":
            self._tensors = dist.new_group(backend="nccl", timeout=dt.timedelta(seconds=TIMEOUT_SECONDS))

    def share(self, value: Any) -> Any:
        """What the first process says, for all; plain JSON."""
        return value if self.is_alone else self._exchange(value if self.is_first else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """What each process says, by rank, for all; plain JSON."""
        return [value] if self.is_alone else self._exchange(value)

    def most(self, numbers: Sequence[float]) -> list[float]:
        """For each place the greatest number that any process has; cheap enough for every few steps."""
        if self.is_alone:
            return list(numbers)
        told = torch.tensor(numbers, dtype=torch.float64)
        with self._waiting():
            dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return [float(number) for number in told.tolist()]

    def wait(self) -> None:
        """Until all are here."""
        self.most([0.0])

    def sum(self, tensor: Tensor) -> Tensor:
        """The same tensor, which then holds the sum over all processes."""
        if not self.is_alone:
            with self._waiting():
                dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._tensors)
        return tensor

    @torch.no_grad()
    def same(self, model: nn.Module) -> None:
        """Gives all processes the weights and buffers of the first one."""
        if not self.is_alone:
            with self._waiting():
                for tensor in (*model.parameters(), *model.buffers()):
                    first = tensor.detach().contiguous()
                    dist.broadcast(first, src=0, group=self._tensors)
                    tensor.detach().copy_(first)

    def _exchange(self, value: Any) -> list[Any]:
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks.size)]
        with self._waiting():
            dist.all_gather(lengths, torch.tensor([len(mine)]))
            longest = max(int(length) for length in lengths)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(mine)] = mine
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in lengths]
            dist.all_gather(texts, padded)
        pairs = zip(texts, lengths, strict=True)
        return [json.loads(bytes(text[: int(length)].numpy())) for text, length in pairs]

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        with self.stall_detector.waiting(), self.told():
            yield

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Failures of a collective, told as what they mean."""
        try:
            yield
        except (RuntimeError, dist.DistBackendError) as error:
            if not _is_communication_error(error):
                raise
            self.heartbeat.refuse_lost()
            raise LostRankError(
                "another process of this training is gone, or does not answer",
                got=f"rank {self.ranks.rank} of {self.ranks.size}: {(str(error).splitlines() or [''])[0][:200]}",
                try_="what the process that failed first said; the same command goes on from the last checkpoint",
            ) from error


@functools.cache
def current_group() -> RankGroup:
    """This process's group, from torchrun's variables; made when it is first asked for."""
    ranks = read_rank_info()
    if not ranks.is_alone and not dist.is_initialized():
        store = join_store(ranks, start_seconds=START_SECONDS, longest_seconds=TIMEOUT_SECONDS)
        longest = dt.timedelta(seconds=TIMEOUT_SECONDS)
        dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.size, timeout=longest)
        atexit.register(_shut_down)
    group = RankGroup(ranks)
    if not ranks.is_alone:
        heartbeat = group.heartbeat
        group.wait()
        heartbeat.start()
    return group


def _shut_down() -> None:
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            current_group().heartbeat.leave()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _is_communication_error(error: BaseException) -> bool:
    said = str(error).lower()
    return any(word in said for word in ("connection", "timed out", "timeout", "socket", "peer", "store", "nccl"))
