"""Distributed training with `whet train --nproc N` or under torchrun: validation, launch and restart."""

import contextlib
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from whet.base import env
from whet.base.errors import UsageError
from whet.base.process import watch_parent
from whet.base.units import format_bytes
from whet.cli import output

# Approximate memory of a process that has imported torch and nothing else.
_TORCH_BYTES = 200_000_000


def validate(target: str, settings: Sequence[str], nproc: int, *, config: Path | None, device: str) -> None:
    """Raise UsageError for options that several processes do not support.

    Call this before processes are started and torch is imported.
    """
    from whet.cli.multi_run import parse_seeds
    from whet.config.resolve import resolve_config
    from whet.distributed.ranks import check_not_mps, read_rank_info
    from whet.recipes.recipe import load_recipe

    ranks = read_rank_info()
    output.rank = ranks.rank
    if ranks.size > 1:
        # Set this before a user's recipe may import torch. torch's C++ code warns about DDP options that are intended,
        # and Python's warning filters do not apply to it.
        env.set_defaults({"TORCH_CPP_LOG_LEVEL": "ERROR"})
    if ranks.size > 1 and nproc > 1:
        raise UsageError(
            "torchrun has already started the processes", got=f"--nproc {nproc} under torchrun", try_="no --nproc"
        )
    number = max(ranks.size, nproc)
    check_not_mps(number, device=device, is_mac=_is_mac(), command=f"whet train {target}")
    if number == 1:
        return
    if ranks.size > 1 and len(parse_seeds(settings, config)) > 1:
        raise UsageError(
            "torchrun trains a single run", got="several seeds", try_=f"whet train ... --nproc {ranks.size}"
        )
    recipe = load_recipe(target)
    why = recipe.single_process_reason
    if why is not None:
        raise UsageError(f"{target} trains in one process only", got=f"{number} processes; {why}", try_="no --nproc")
    resolved = resolve_config(recipe.Config, settings, file=config, can_measure=True)
    recipe.describe(resolved.config)
    if getattr(resolved.config, "selfplay", False):
        raise UsageError(
            "self-play runs in one process only", got=f"selfplay=True, {number} processes", try_="no --nproc"
        )
    if resolved.is_batch_open:
        raise UsageError(
            "several processes need a fixed global batch size",
            got="global_batch_size=auto",
            try_="whet plan ... global_batch_size=auto --measure in one process, then the size it finds",
        )
    _check_process_count(number, nproc, global_batch_size=resolved.config.global_batch_size)


def _check_process_count(number: int, nproc: int, *, global_batch_size: int) -> None:
    """Raise UsageError for more processes than samples, or than fit into memory even without a model."""
    import psutil

    if number > global_batch_size:
        raise UsageError(
            "more processes than samples in a global batch",
            got=f"{number} processes, global_batch_size={global_batch_size}",
            try_=f"at most {global_batch_size} processes, or a larger global batch",
        )
    total = psutil.virtual_memory().total
    if nproc * _TORCH_BYTES > total:
        raise UsageError(
            "not enough memory for this many processes",
            got=f"--nproc {nproc}, {format_bytes(total)}; torch alone takes {format_bytes(_TORCH_BYTES)} in each",
            try_=f"--nproc {total // _TORCH_BYTES} at most",
        )


def is_distributed() -> bool:
    """Return whether this process is one of several that torchrun or --nproc started."""
    from whet.distributed.ranks import read_rank_info

    return not read_rank_info().is_single_process


def nproc_options() -> list[str]:
    """Return --nproc N for the command that resumes. Empty on several machines, where torchrun has this option."""
    from whet.distributed.ranks import read_rank_info

    ranks = read_rank_info()
    return ["--nproc", str(ranks.size)] if ranks.size > 1 and ranks.local_size == ranks.size else []


def launch(
    command: Callable[[Path | None], Sequence[str]],
    run: Path,
    *,
    num_processes: int,
    max_restarts: int,
    notify: Callable[[str], None],
) -> int:
    """Start the processes and wait for them. Restart all of them if one is killed. Return the exit code."""
    from whet.base.process import signal_name
    from whet.distributed import launcher
    from whet.run.folder import RUN_FILE
    from whet.training.supervisor import KilledError, prepare_restart

    num_restarts = 0
    while True:
        ended = launcher.launch(command(run), num_processes=num_processes)
        if not ended.is_lost:
            return ended.code
        killer = signal_name(-ended.code) if ended.code < 0 else "silence"
        got = f"rank {ended.rank} of {num_processes} by {killer}"
        if not (run / RUN_FILE).exists():
            raise KilledError(
                "a process was killed before training began",
                got=got,
                try_="run the same command again",
                code=ended.code,
            )
        if num_restarts == max_restarts:
            raise KilledError(
                "a training process was killed, and the others were stopped",
                got=f"{got}, after {num_restarts} restarts; --max-restarts allows no more",
                try_=f"run the same command with --run {run} to resume from the last checkpoint",
                code=ended.code,
            )
        num_restarts += 1
        action = prepare_restart(run, killer=killer, is_first=num_restarts == 1)
        notify(f"rank {ended.rank} of {num_processes} was killed by {killer}, the others were stopped; {action}")


def check_run_named(run: Path | None) -> None:
    """Raise UsageError for torchrun --max-restarts without a run folder: restarted processes must find the run."""
    if run is None and is_distributed() and (env.read("TORCHELASTIC_MAX_RESTARTS") or "0") != "0":
        raise UsageError(
            "torchrun --max-restarts needs a run folder",
            got="no --run-dir",
            try_="--run-dir DIR, the same each time; or whet train ... --nproc N, which chooses one",
        )


def report_lost_ranks() -> None:
    """Register a callback that prints a line when another rank is lost."""
    from whet.distributed.group import current_group

    current_group().heartbeat.notify = output.rank_lost


def broadcast_path(path: Path) -> Path:
    """Broadcast the path of rank 0 to all ranks, and return it."""
    if not is_distributed():
        return path
    from whet.distributed.group import current_group

    return Path(current_group().broadcast(str(path)))


def broadcast_flag(flag: bool) -> bool:
    """Broadcast the flag of rank 0 to all ranks, and return it."""
    if not is_distributed():
        return flag
    from whet.distributed.group import current_group

    return bool(current_group().broadcast(flag))


@contextlib.contextmanager
def on_rank_zero(context: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """Enter a context on rank 0 only. The other ranks wait until it is entered."""
    if not is_distributed():
        with context:
            yield
        return
    from whet.distributed.group import current_group

    with context if current_group().is_rank_zero else contextlib.nullcontext():
        current_group().barrier()
        yield


def stop_with_launcher() -> None:
    """Start a thread that makes this process save and stop when its parent process is gone."""
    watch_parent(os.getppid(), lambda: os.kill(os.getpid(), signal.SIGTERM))
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        # The launcher forwards SIGHUP when the terminal is closed. Treat it like SIGTERM, so that no steps are lost.
        signal.signal(signal.SIGHUP, lambda _number, _frame: os.kill(os.getpid(), signal.SIGTERM))


def has_virtual_mac() -> bool:
    """Return whether a simulated Mac is installed. It exists only in this process."""
    installing = sys.modules.get("whet.device.virtual_mac.installation")
    return installing is not None and installing.installed() is not None


def _is_mac() -> bool:
    """Return whether training without --device would use MPS."""
    return has_virtual_mac() or (sys.platform == "darwin" and platform.machine() == "arm64")
