"""When a checkpoint is written, and which ones are kept."""

import time
from pathlib import Path

from whet.checkpoint import store
from whet.checkpoint.snapshot import Snapshot
from whet.plan.plan import Plan


class Saver:
    """Writes checkpoints of one run into its folder, at the times the plan says."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._minutes = plan.value("checkpoint_minutes")
        self._steps = plan.value("checkpoint_steps")
        self._epochs = plan.value("checkpoint_epochs")
        self._keep = plan.value("keep")
        self._saved_at = time.monotonic()
        self.last_step = 0
        """The step whose state is safe on the disk; a resume sets it."""

    def is_due(self, step: int, *, epochs_done: int | None) -> bool:
        """Whether a checkpoint should be written after this step; `epochs_done` counts if the step ended an epoch."""
        if step == self.last_step:
            return False
        if isinstance(self._steps, int) and step % self._steps == 0:
            return True
        if isinstance(self._epochs, int) and epochs_done is not None and epochs_done % self._epochs == 0:
            return True
        waited = time.monotonic() - self._saved_at
        return isinstance(self._minutes, int | float) and waited >= self._minutes * 60

    def save(self, snapshot: Snapshot, *, step: int, best: int | None) -> Path:
        """Writes the checkpoint of a step, then removes old ones."""
        # A folder of this step can only be one that could not be trusted: the run went on from before it.
        store.discard(self._folder, step=step)
        path = store.save(self._folder, snapshot, step=step)
        self._saved_at, self.last_step = time.monotonic(), step
        assert isinstance(self._keep, int)
        store.retain(self._folder, keep=self._keep, best=best)
        return path
