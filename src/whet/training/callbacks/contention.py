"""Watch for core contention during a training run on the CPU."""

from typing import TYPE_CHECKING

from whet.base import env
from whet.device.contention import watch_contention
from whet.step.step import Outcome
from whet.training.callback import Action, Callback, State

if TYPE_CHECKING:
    from whet.training.run_context import RunContext


class CoreContention(Callback):
    """A callback that starts the contention watch and logs, once, what to export if torch was loaded before whet."""

    every_seconds = 1.0

    def __init__(self) -> None:
        self._may_report = False

    def on_start(self, run: "RunContext") -> None:
        self._run = run
        if run.device.kind == "cpu" and run.plan.threads != 1:
            self._watch = run.exit_stack.enter_context(watch_contention())
            self._may_report = env.spins_long()

    def after_step(self, state: State, outcome: Outcome) -> Action:  # noqa: ARG002
        if self._may_report and self._watch.was_contended:
            self._may_report = False
            message = "other programs use the cores, so threads now sleep while they wait; to start that way"
            self._run.log.event("plan", step=state.step, message=f"{message}: {env.brief_spin_export()}")
        return Action.NONE
