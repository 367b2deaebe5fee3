"""Collectives between ranks, such as broadcast, all-reduce and barrier.

Small values are exchanged on the CPU with gloo, which does not wait for the device. They are encoded as JSON instead of
pickled. In a single process, collectives do nothing.
"""

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

from whet.base.errors import LostRankError, UsageError, first_line
from whet.device.abstract import AbstractDevice
from whet.distributed.heartbeat import Heartbeat, StallDetector
from whet.distributed.ranks import RankInfo, read_rank_info
from whet.distributed.store import RankStore, join_store

TIMEOUT_SECONDS = 1800.0
"""Maximum wait for another rank, for example while rank 0 evaluates alone."""
START_SECONDS = 300.0
"""Maximum wait for all ranks to start. Importing torch can take long on a busy machine."""
# torch raises a plain RuntimeError for most communication errors, so recognize them by words in the message.
_COMMUNICATION_ERRORS = ("connection", "timed out", "timeout", "socket", "peer", "store", "nccl")


class RankGroup:
    """The ranks of a training run, and the collectives between them."""

    def __init__(self, ranks: RankInfo) -> None:
        self.ranks = ranks
        # These are attributes instead of properties, because every step reads them.
        self.is_rank_zero: bool = ranks.is_rank_zero
        """Whether this is rank 0, which writes files and prints."""
        self.is_single_process: bool = ranks.is_single_process
        self.tensor_group: dist.ProcessGroup | None = None
        """The process group for device tensors, or None for the default group."""
        self.backend: str = "none"
        """The backend for device tensors: "nccl", "gloo", or "none" before `use_device` and in a single process."""
        self.stall_detector: StallDetector = StallDetector(is_single_process=ranks.is_single_process)

    @functools.cached_property
    def store(self) -> RankStore:
        """The store for messages outside collectives. Available only with several ranks."""
        return RankStore(self.ranks, timeout_seconds=TIMEOUT_SECONDS)

    @functools.cached_property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat of this rank, which also watches other ranks. Available only with several ranks."""
        return Heartbeat(self.store, self.stall_detector)

    def use_device(self, device: AbstractDevice) -> None:
        """Choose the backend for device tensors: NCCL if each rank has its own GPU, otherwise gloo."""
        if self.is_single_process or self.backend != "none":
            return
        if device.rank_backend is None:
            raise UsageError(
                f"several processes cannot train together on {device.kind.upper()}",
                got=f"device {device.kind}",
                try_="one process, or --device cpu",
            )
        index = device.torch_device.index if device.torch_device.index is not None else -1
        # NCCL does not support two ranks on the same GPU.
        places = self.all_gather(f"{platform.node()}:{index}")
        self.backend = device.rank_backend if len({*places}) == self.ranks.size else "gloo"
        if self.backend != "gloo":
            self.tensor_group = dist.new_group(backend=self.backend, timeout=dt.timedelta(seconds=TIMEOUT_SECONDS))

    # --- collectives -------------------------------------------------------------------------------------------------

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 on all ranks. The value must be JSON serializable."""
        return value if self.is_single_process else self._all_gather_json(value if self.is_rank_zero else None)[0]

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. The values must be JSON serializable."""
        return [value] if self.is_single_process else self._all_gather_json(value)

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        """Return the maximum of each number over all ranks. This is cheap enough to call every few steps."""
        if self.is_single_process:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64)
        with self._in_collective():
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return [float(number) for number in values.tolist()]

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.all_reduce_max([0.0])

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks in place, and return it."""
        if not self.is_single_process:
            with self._in_collective():
                dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.tensor_group)
        return tensor

    @torch.no_grad()
    def broadcast_model(self, model: nn.Module) -> None:
        """Copy the parameters and buffers of rank 0 to all ranks, in place."""
        if not self.is_single_process:
            with self._in_collective():
                for tensor in (*model.parameters(), *model.buffers()):
                    first = tensor.detach().contiguous()
                    dist.broadcast(first, src=0, group=self.tensor_group)
                    tensor.detach().copy_(first)

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Convert communication errors inside the `with` block to LostRankError."""
        try:
            yield
        except (RuntimeError, dist.DistBackendError) as error:
            if not any(word in str(error).lower() for word in _COMMUNICATION_ERRORS):
                raise
            # If the heartbeat knows which rank is lost, it raises a more specific error.
            self.heartbeat.check_lost()
            raise LostRankError(
                "another rank exited or does not respond",
                got=f"rank {self.ranks.rank} of {self.ranks.size}: {first_line(error)}",
                try_="check the output of the rank that failed first; run the same command again to resume",
            ) from error

    def _all_gather_json(self, value: Any) -> list[Any]:
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks.size)]
        # all_gather needs equal sizes, so first exchange the lengths, and then pad all texts to the longest one.
        with self._in_collective():
            dist.all_gather(lengths, torch.tensor([len(mine)]))
            longest = max(int(length) for length in lengths)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(mine)] = mine
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in lengths]
            dist.all_gather(texts, padded)
        pairs = zip(texts, lengths, strict=True)
        return [json.loads(bytes(text[: int(length)].numpy())) for text, length in pairs]

    @contextlib.contextmanager
    def _in_collective(self) -> Iterator[None]:
        with self.stall_detector.waiting(), self.translate_errors():
            yield


@functools.cache
def current_group() -> RankGroup:
    """Return the group of this process. The first call creates it from torchrun's environment variables."""
    ranks = read_rank_info()
    if not ranks.is_single_process and not dist.is_initialized():
        store = join_store(ranks, start_seconds=START_SECONDS, timeout_seconds=TIMEOUT_SECONDS)
        timeout = dt.timedelta(seconds=TIMEOUT_SECONDS)
        dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.size, timeout=timeout)
        atexit.register(_shut_down)
    group = RankGroup(ranks)
    if not ranks.is_single_process:
        # Creating a Heartbeat posts the first heartbeat. The barrier ensures that all ranks have posted theirs before
        # any rank reads them.
        heartbeat = group.heartbeat
        group.barrier()
        heartbeat.start()
    return group


def _shut_down() -> None:
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            current_group().heartbeat.leave()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
