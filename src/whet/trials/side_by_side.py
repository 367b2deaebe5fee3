"""How many trials run at once, and where? One on each GPU, as many as you say on the CPU, else one after the other."""

import platform
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import psutil

from whet.base.units import show_bytes

Say = Callable[[str], None]


def devices_for(device: str, *, jobs: int, say: Say) -> list[str]:
    """On which device each worker's trials run: as many at once as the machine has devices, or CPUs for."""
    if jobs <= 1:
        return [device]
    from whet.machine.probe import machine_here

    cards = [] if device == "cpu" else list(machine_here().accelerators)
    if not cards:
        return [device] * jobs
    if device != "auto" and device != cards[0].kind:
        say(f"--device {device}: one device, so trials run one after the other")
        return [device]
    if cards[0].kind == "cuda" and len(cards) > 1:
        return [f"cuda:{number}" for number in range(min(jobs, len(cards)))]
    say(f"--jobs {jobs}: there is one {cards[0].name or cards[0].kind}, so trials run one after the other")
    return [device]


def together(each: list[Callable[[], None]], *, stop: threading.Event) -> None:
    """Side by side in threads, which only wait for processes; where one fails, the others stop and save."""
    with ThreadPoolExecutor(max_workers=len(each), thread_name_prefix="worker") as pool:
        futures: list[Future[None]] = [pool.submit(one) for one in each]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            stop.set()
    for future in futures:
        future.result()


def machine_name() -> str:
    """This machine, for who reads where a trial was infeasible."""
    return f"{platform.node()} ({show_bytes(psutil.virtual_memory().total)})"
