"""Launch several ranks on this machine with torchrun's elastic launcher."""

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
"""Seconds between a stop request and SIGKILL, in which the ranks finish a step and save a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchResult:
    """The outcome of a launch: the exit code, and the rank that failed first."""

    code: int
    """The exit code of the rank that failed first (negative signal number if killed), or 0 if all ranks succeeded.

    After a stop signal, it is 128 plus the signal number.
    """
    rank: int = 0
    """The rank that failed first, or 0 if none failed."""
    stop_signal: int | None = None
    """The signal that was forwarded to all ranks to stop them, or None if there was none."""

    @property
    def is_lost(self) -> bool:
        """Whether a rank was killed or lost, and no rank raised an error. In that case, a restart may help."""
        return self.stop_signal is None and (self.code < 0 or self.code == LostRankError.exit_code)


def launch(arguments: Sequence[str], *, num_processes: int) -> LaunchResult:
    """Run `whet` with these arguments in several processes on this machine, and wait for all of them.

    If one process fails, the launcher stops the others. It forwards SIGINT, SIGTERM, SIGHUP and SIGQUIT to all.
    """
    # Leave out ignored signals, because torch would install a handler for them. For example, nohup ignores SIGHUP.
    handled = [number for number in _FORWARDED_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    # Hide errors that the launcher logs, because whet reports them too.
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
        # -P keeps the current folder off sys.path, as in the `whet` command.
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
    """Return the rank that most likely failed first, and its exit code.

    Ranks that raised an error take precedence over ranks that were killed, then over those that lost another rank, and
    last over those that the launcher stopped. The later cases are usually consequences of another failure.

    >>> first_failure({0: 75, 1: -9, 2: 143}), first_failure({0: 75, 1: 1, 2: -9})
    ((1, -9), (1, 1))
    """
    stop_codes = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGTERM)

    def rate(rank: int) -> int:
        code = codes[rank]
        return 3 if code in stop_codes else 2 if code == LostRankError.exit_code else 1 if code < 0 else 0

    first = min(codes, key=lambda rank: (rate(rank), rank))
    return first, codes[first]
