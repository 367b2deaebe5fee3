"""Small callbacks: early stopping, garbage collection, keeping the machine awake, and contention for cores."""

import contextlib
import gc
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from whet.base import env
from whet.base.process import gc_disabled
from whet.device.contention import watch_contention
from whet.step.step import Outcome
from whet.training.callback import Action, Callback
from whet.training.progress import State

if TYPE_CHECKING:
    from whet.training.run_context import RunContext

_NO_CAFFEINATE = "no caffeinate here, so the machine may fall asleep while it trains"


class EarlyStopping(Callback):
    """A callback that ends the run after `patience` evaluations without a better goal metric."""

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def on_evaluate(self, state: State, metrics: Mapping[str, float]) -> Action:  # noqa: ARG002
        # The result is stored in the state, so a resumed run stays finished. All ranks have the same score and agree.
        state.ended_early = state.num_worse >= self.patience
        return Action.NONE


class GarbageCollection(Callback):
    """A callback that disables the garbage collector during training: a full collection takes longer than a step."""

    def on_start(self, run: "RunContext") -> None:
        self._run = run
        run.exit_stack.enter_context(gc_disabled())

    def on_epoch_end(self, state: State) -> Action:  # noqa: ARG002
        gc.collect()
        if self._run.plan.empty_cache == "on":
            self._run.device.memory.empty_cache()
        return Action.NONE


class KeepAwake(Callback):
    """A callback that prevents the machine from sleeping during training if the plan has keep_awake=on."""

    def on_start(self, run: "RunContext") -> None:
        is_wanted = run.plan.keep_awake == "on"
        if run.exit_stack.enter_context(prevent_sleep(is_wanted)) != is_wanted:
            run.log.event("plan", step=run.state.step, message=_NO_CAFFEINATE)


class CoreContention(Callback):
    """A callback that starts the contention watch, and logs which variable to export if torch was loaded too early."""

    every_seconds = 1.0

    def __init__(self) -> None:
        self._may_report = False

    def on_start(self, run: "RunContext") -> None:
        self._run = run
        if run.device.is_cpu and run.plan.threads != 1:
            self._watch = run.exit_stack.enter_context(watch_contention())
            self._may_report = env.spins_long()

    def after_step(self, state: State, outcome: Outcome) -> Action:  # noqa: ARG002
        if self._may_report and self._watch.was_contended:
            self._may_report = False
            message = "other programs use the cores, so threads now sleep while they wait; to start that way"
            self._run.log.event("plan", step=state.step, message=f"{message}: {env.brief_spin_export()}")
        return Action.NONE


@contextlib.contextmanager
def prevent_sleep(is_wanted: bool = True) -> Iterator[bool]:
    """Prevent idle sleep inside the `with` block, and yield whether that was possible.

    caffeinate waits for this process (-w), so that it does not keep the machine awake forever if the run is killed.
    """
    program = shutil.which("caffeinate") if is_wanted else None
    if program is None:
        yield False
        return
    try:
        # Start caffeinate in its own session: after Ctrl-C the run still saves, so the machine must stay awake.
        helper = subprocess.Popen(
            [program, "-i", "-w", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        helper.terminate()
        helper.wait()
