"""What keeps a run's state safe: when a checkpoint is written, what it holds, and how a run goes on from one."""

import gc
import time
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError
from whet.checkpoint import store
from whet.checkpoint.snapshot import Snapshot, restore, take
from whet.engine.building import Parts
from whet.engine.progress import Progress
from whet.engine.recorder import Recorder


class Keeper:
    """Writes the checkpoints of one run at the times the plan says, and restores from them."""

    def __init__(self, folder: Path, parts: Parts, recorder: Recorder) -> None:
        self._folder = folder
        self._parts = parts
        self._recorder = recorder
        self._minutes = parts.plan.value("checkpoint_minutes")
        self._steps = parts.plan.value("checkpoint_steps")
        self._epochs = parts.plan.value("checkpoint_epochs")
        self._keep = parts.plan.value("keep")
        self._saved_at = time.monotonic()
        self._saved_step: int | None = None

    def is_due(self, step: int, *, epochs_done: int | None) -> bool:
        """Whether a checkpoint should be written after this step; `epochs_done` counts if the step ended an epoch."""
        if isinstance(self._steps, int) and step % self._steps == 0:
            return True
        if isinstance(self._epochs, int) and epochs_done is not None and epochs_done % self._epochs == 0:
            return True
        waited = time.monotonic() - self._saved_at
        return isinstance(self._minutes, int | float) and waited >= self._minutes * 60

    def save(self, progress: Progress, *, base_rates: list[float]) -> None:
        """Writes the state after the newest step, unless it is safe already; then removes old checkpoints."""
        if progress.step == self._saved_step:
            return
        start = time.perf_counter()
        parts = self._parts
        snapshot = take(
            parts.stepper.model,
            parts.stepper.optimizer,
            parts.device,
            scaler=parts.stepper.scaler,
            ema=parts.stepper.ema,
            step=progress.step,
            progress={
                "progress": progress.as_json(),
                "schedule": parts.schedule.state(),
                "source": parts.source.state(),
                "base_rates": base_rates,
                "data": self._data_facts(),
            },
        )
        # A folder of this step can only be one that could not be trusted: the run went on from before it.
        store.discard(self._folder, step=progress.step)
        path = store.save(self._folder, snapshot, step=progress.step)
        self._saved_at, self._saved_step = time.monotonic(), progress.step
        assert isinstance(self._keep, int)
        store.retain(self._folder, keep=self._keep, best=progress.best_step)
        seconds = time.perf_counter() - start
        self._recorder.spent("save", seconds)
        self._recorder.event("checkpoint", step=progress.step, name=path.name, seconds=seconds)
        self._recorder.sync()
        gc.collect()

    def restore(self, step: int, snapshot: Snapshot) -> tuple[Progress, list[float]]:
        """Puts everything back as it was after that step; how far the run was, and its learning rates."""
        parts = self._parts
        # Newer ones could not be trusted: they must not count among those that are kept.
        for newer in [there for there in store.steps(self._folder) if there > step]:
            store.discard(self._folder, step=newer)
        saved = restore(
            snapshot,
            parts.stepper.model,
            parts.stepper.optimizer,
            parts.device,
            scaler=parts.stepper.scaler,
            ema=parts.stepper.ema,
        )
        if saved["data"] != self._data_facts():
            raise UsageError(
                "the data is not what the run was started with",
                got=f"{parts.source.num_samples} samples; the run has {saved['data']['num_samples']}",
                try_="the same data, or another run folder for a new run",
            )
        parts.schedule.load_state(saved["schedule"])
        parts.source.load_state(saved["source"])
        self._saved_step = step
        return Progress.from_json(saved["progress"]), saved["base_rates"]

    def _data_facts(self) -> dict[str, Any]:
        source = self._parts.source
        return {"num_samples": source.num_samples, "fingerprint": source.fingerprint()}
