"""`whet train --nproc N` and whet under torchrun: validation, launch, restart."""

import contextlib
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from whet.base import env

_POLL_SECONDS = 1.0
_TORCH_BYTES = 200_000_000
"""What a process holds that has loaded torch and nothing else."""


def validate(what: str, words: Sequence[str], nproc: int, *, config: Path | None, device: str) -> None:
    """Refuses what several processes cannot do, before any of them is started and before torch is loaded."""
    from whet.base.errors import UsageError
    from whet.cli import console
    from whet.cli.multi_run import parse_seeds
    from whet.config.resolve import resolve_config
    from whet.distributed.ranks import check_not_mps, read_rank_info
    from whet.recipes.recipe import load_recipe

    world = read_rank_info()
    console.rank = world.rank
    if world.size > 1:
        # Before torch is loaded, which a recipe of yours may do: it warns of what DDP is told to do on purpose, past
        # Python's own warnings.
        env.set_defaults({"TORCH_CPP_LOG_LEVEL": "ERROR"})
    if world.size > 1 and nproc > 1:
        raise UsageError(
            "torchrun has started the processes already", got=f"--nproc {nproc} under torchrun", try_="no --nproc"
        )
    number = max(world.size, nproc)
    check_not_mps(number, device=device, is_mac=_is_mac(), command=f"whet train {what}")
    if number == 1:
        return
    if world.size > 1 and len(parse_seeds(words, config)) > 1:
        raise UsageError("torchrun trains one run", got="several seeds", try_=f"whet train ... --nproc {world.size}")
    recipe = load_recipe(what)
    why = recipe.single_process_reason
    if why is not None:
        raise UsageError(f"{what} trains in one process", got=f"{number} processes; {why}", try_="no --nproc")
    resolved = resolve_config(recipe.Config, words, file=config, can_measure=True)
    recipe.describe(resolved.config)
    if getattr(resolved.config, "selfplay", False):
        raise UsageError(
            "self-play trains in one process", got=f"selfplay=True, {number} processes", try_="no --nproc, no torchrun"
        )
    if resolved.is_batch_open:
        raise UsageError(
            "several processes need a global batch that is known",
            got="global_batch_size=auto",
            try_="whet plan ... global_batch_size=auto --measure in one process, then the number it finds",
        )
    _check_process_count(number, nproc, global_batch_size=resolved.config.global_batch_size)


def _check_process_count(number: int, nproc: int, *, global_batch_size: int) -> None:
    """Refuses processes that would have nothing to do, and more than the memory holds before one has a model."""
    import psutil

    from whet.base.errors import UsageError
    from whet.base.units import format_bytes

    if number > global_batch_size:
        raise UsageError(
            "there are more processes than samples in a global batch",
            got=f"{number} processes, global_batch_size={global_batch_size}",
            try_=f"{global_batch_size} processes at most, or a larger global batch",
        )
    total = psutil.virtual_memory().total
    if nproc * _TORCH_BYTES > total:
        raise UsageError(
            "so many processes do not fit into this machine's memory",
            got=f"--nproc {nproc}, {format_bytes(total)}; torch alone takes {format_bytes(_TORCH_BYTES)} in each",
            try_=f"--nproc {total // _TORCH_BYTES} at most",
        )


def is_distributed() -> bool:
    """Whether torchrun, or --nproc, has started this process as one of a group."""
    from whet.distributed.ranks import read_rank_info

    return not read_rank_info().is_alone


def nproc_options() -> list[str]:
    """What says that there are several processes, in a command that goes on; torchrun's own words on many machines."""
    from whet.distributed.ranks import read_rank_info

    world = read_rank_info()
    return ["--nproc", str(world.size)] if world.size > 1 and world.local_size == world.size else []


def launch(
    command: Callable[[Path | None], Sequence[str]],
    run: Path,
    *,
    num_processes: int,
    max_restarts: int,
    say: Callable[[str], None],
) -> int:
    """Starts the processes and waits for them; all start again when one of them was lost. The exit code."""
    from whet.distributed import launcher
    from whet.run.folder import RUN_FILE
    from whet.training.supervisor import KilledError, prepare_restart

    num_restarts = 0
    while True:
        ended = launcher.launch(command(run), num_processes=num_processes)
        if not ended.is_lost:
            return ended.code
        killer = launcher.signal_name(ended)
        got = f"rank {ended.rank} of {num_processes} by {killer}"
        if not (run / RUN_FILE).exists():
            raise KilledError(
                "a process was killed before the training began",
                got=got,
                try_="the same command again",
                code=ended.code,
            )
        if num_restarts == max_restarts:
            raise KilledError(
                "a process of the training was killed, and the others were ended",
                got=f"{got}, after {num_restarts} restarts; --max-restarts allows no more",
                try_=f"the same command with --run {run} goes on from the last checkpoint",
                code=ended.code,
            )
        num_restarts += 1
        said = prepare_restart(run, killer=killer, is_first=num_restarts == 1)
        say(f"rank {ended.rank} of {num_processes} was killed by {killer}, and the others were ended; {said}")


def check_run_named(run: Path | None) -> None:
    """Who is started again by torchrun must find the run that it began."""
    from whet.base import env
    from whet.base.errors import UsageError

    if run is None and is_distributed() and (env.read("TORCHELASTIC_MAX_RESTARTS") or "0") != "0":
        raise UsageError(
            "torchrun --max-restarts needs a folder to go on in",
            got="no --run-dir",
            try_="--run-dir DIR, the same each time; or whet train ... --nproc N, which names one",
        )


def report_lost_ranks() -> None:
    """Shows which of the other processes is lost, should one be."""
    from whet.cli import console
    from whet.distributed.group import current_group

    current_group().pulse.say = console.rank_lost


def broadcast_path(path: Path) -> Path:
    """The run folder that the first process would take."""
    if not is_distributed():
        return path
    from whet.distributed.group import current_group

    return Path(current_group().share(str(path)))


def broadcast_flag(answer: bool) -> bool:
    """What the first process says."""
    if not is_distributed():
        return answer
    from whet.distributed.group import current_group

    return bool(current_group().share(answer))


@contextlib.contextmanager
def on_rank_zero(doing: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """While the first process has entered, all go on; the others enter nothing."""
    if not is_distributed():
        with doing:
            yield
        return
    from whet.distributed.group import current_group

    with doing if current_group().is_first else contextlib.nullcontext():
        current_group().wait()
        yield


def stop_with_launcher() -> None:
    """Asks this process to save and stop when the one that has started it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="launcher").start()
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        # The terminal was closed: the launcher passes that on, and nobody must lose steps by it.
        signal.signal(signal.SIGHUP, lambda _number, _frame: os.kill(os.getpid(), signal.SIGTERM))


def _is_mac() -> bool:
    """Whether a training that names no device would take MPS; a virtual Mac lives in this process alone."""
    installing = sys.modules.get("whet.device.virtual_mac.install")
    is_virtual = installing is not None and installing.installed() is not None
    return is_virtual or (sys.platform == "darwin" and platform.machine() == "arm64")
