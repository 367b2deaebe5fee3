"""Verify a resume: repeat the steps between the last two checkpoints and compare the results with the record.

The run is restored from the second-newest checkpoint. Repeated steps are not logged again, and nothing is saved until
the newest checkpoint is reached. A run that is killed in the meantime therefore resumes as if nothing had been
verified.
"""

from typing import TYPE_CHECKING

from whet.base.errors import WhetError
from whet.base.units import format_list
from whet.checkpoint import store
from whet.run.events import History
from whet.run.folder import Run
from whet.training.callback import Action, Callback
from whet.training.progress import State
from whet.training.restore import RestoredRun, with_earlier_inexactness
from whet.training.state_check import restore_state, restored_differences

if TYPE_CHECKING:
    from whet.step.step import Outcome
    from whet.training.run_context import RunContext

# Code between steps may already have run further when the newest checkpoint was written.
_UNCOMPARED = ("the generator of ", "rng.", "progress.")


def find_earlier(folder: Run, newest: int) -> store.LoadedCheckpoint | None:
    """Load the second-newest checkpoint; None if it does not exist or cannot be read."""
    steps = [step for step in store.list_steps(folder.checkpoints) if step < newest]
    try:
        return store.load_newest(folder.checkpoints, run_id=folder.header.id, steps=steps)
    except WhetError:
        return None


class ResumeVerification(Callback):
    """A callback that repeats the steps up to the newest checkpoint, where the checkpointer calls `finish`."""

    def __init__(self, *, until: int) -> None:
        self.until = until
        """The step of the newest checkpoint."""

    def begin(self, run: "RunContext", restored: RestoredRun) -> None:
        """Announce the verification. The run has been restored from the earlier checkpoint."""
        assert run.folder is not None
        self._run, self._restored, self._first = run, restored, run.state.step + 1
        events = History(run.folder).events(kinds=("step",))
        self._losses = {e.step: e.number("loss") for e in events if self._first <= e.step <= self.until}
        run.log.repeat_until = self.until
        fields = {**restored.fields, "exactness": f"verifying: {self._steps} are repeated and compared"}
        run.log.notify("resume", step=run.state.step, total_steps=run.state.total_steps, **fields)

    def after_step(self, state: State, outcome: "Outcome") -> Action:  # noqa: ARG002
        """Request a save once the newest checkpoint's step is reached, which triggers the comparison."""
        return Action.SAVE if state.step == self.until and self._run.verification is self else Action.NONE

    def finish(self) -> None:
        """Compare losses and weights, and log the result. Afterward, the state is that of the newest checkpoint."""
        run = self._run
        run.verification = None
        run.log.read()
        repeated, run.log.repeat_until, run.log.repeated = run.log.repeated, -1, {}
        assert run.folder is not None
        newest = store.load_checkpoint(run.folder.checkpoints / store.checkpoint_name(self.until))
        names = [name for name in restored_differences(newest, run) if not name.startswith(_UNCOMPARED)]
        differences = _loss_difference(self._losses, repeated)
        differences += [format_list(names, separator="; ")] if names else []
        if not differences:
            exactness = f"verified: {self._steps} were repeated with the same losses and weights"
            earlier = with_earlier_inexactness({"exactness": ""}, run.folder)["exactness"]
            exactness = "; ".join(filter(None, (exactness, earlier, *self._restored.reasons, *self._restored.missing)))
            run.log_session("resume", {**self._restored.fields, "exactness": exactness})
            return
        restore_state(run, newest)
        run.executor.reset_rollback_snapshot()
        reason = f"{self._steps} were repeated, and differ: {'; '.join(differences)}"
        run.note_inexact(self.until, reason)
        fields = {"exactness": f"not bit-exact: {reason}", "exact": False, "reason": reason}
        run.log_session("resume", {**self._restored.fields, **fields})

    @property
    def _steps(self) -> str:
        return f"steps {self._first:,} to {self.until:,}" if self._first < self.until else f"step {self.until:,}"


def _loss_difference(recorded: dict[int, float | None], repeated: dict[int, float | None]) -> list[str]:
    """Return a description of the first loss that differs, as a list. Skipped steps have no loss."""
    for step in sorted(recorded.keys() | repeated.keys()):
        before, now = recorded.get(step), repeated.get(step)
        # Compare by repr: NaN then equals NaN, and -0.0 does not equal 0.0.
        if repr(before) != repr(now):
            return [f"the loss of step {step:,} was {before!r} and is {now!r}"]
    return []
