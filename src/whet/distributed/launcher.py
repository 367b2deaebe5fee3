"""Launch several ranks on this machine with torch's elastic launcher, the one of torchrun."""

import logging
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from whet.base.errors import LostRankError

_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SHUTDOWN_SECONDS = 120
"""Until ranks that were asked to stop are killed: they finish a step and save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchResult:
    """How the ranks ended."""

    code: int
    """0 if all succeeded; else the exit code of the rank that failed first, negative for a signal."""
    rank: int = 0
    """The rank that failed first."""
    stop_signal: int | None = None
    """The signal that asked to stop, and was forwarded to all ranks."""

    @property
    def is_lost(self) -> bool:
        """Whether a rank was killed or lost and none failed by itself, so that a restart may help."""
        return self.stop_signal is None and (self.code < 0 or self.code == LostRankError.exit_code)


def launch(arguments: Sequence[str], *, num_processes: int) -> LaunchResult:
    """Run `whet` with these arguments in several processes on this machine, until all have ended.

    If one fails, the others are ended too. SIGINT, SIGTERM and SIGHUP are forwarded to all.
    """
    # Under nohup SIGHUP is ignored, and torch would handle it nevertheless.
    handled = [number for number in _FORWARDED_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    # The launcher logs errors that we report ourselves.
    logging.disable(logging.ERROR)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        signals_to_handle=",".join(number.name for number in handled),
    )
    try:
        # -P: like the `whet` program itself, do not search the current folder for modules.
        elastic_launch(config, sys.executable)("-P", "-m", "whet", *arguments)
    except SignalException as stopped:
        return LaunchResult(code=128 + int(stopped.sigval), stop_signal=int(stopped.sigval))
    except ChildFailedError as failed:
        rank, code = first_failure({rank: failure.exitcode for rank, failure in failed.failures.items()})
        return LaunchResult(code=code, rank=rank)
    finally:
        logging.disable(logging.NOTSET)
    return LaunchResult(code=0)


def first_failure(codes: Mapping[int, int]) -> tuple[int, int]:
    """The rank that caused the end of all, and its exit code.

    A rank that failed by itself comes first; others were killed, lost a rank, or were asked to stop afterwards.

    >>> first_failure({0: 75, 1: -9, 2: 143}), first_failure({0: 75, 1: 1, 2: -9})
    ((1, -9), (1, 1))
    """
    stop_codes = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGTERM)

    def rate(rank: int) -> int:
        code = codes[rank]
        return 3 if code in stop_codes else 2 if code == LostRankError.exit_code else 1 if code < 0 else 0

    first = min(codes, key=lambda rank: (rate(rank), rank))
    return first, codes[first]


def signal_name(ended: LaunchResult) -> str:
    """The signal that killed the first rank, by name."""
    if ended.code >= 0:
        return "silence"
    try:
        return signal.Signals(-ended.code).name
    except ValueError:
        return f"signal {-ended.code}"
