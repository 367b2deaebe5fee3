"""Write, find and restore the checkpoints of a run."""

import contextlib
import errno
import gc
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from whet.base.errors import WhetError
from whet.checkpoint import store, writer
from whet.checkpoint.manifest import CheckpointInfo, DamagedCheckpointError
from whet.checkpoint.sharded_save import rank_part, save_sharded
from whet.checkpoint.snapshot import Snapshot, describe_names, take_snapshot, wanted_rows
from whet.checkpoint.writer import CheckpointWriter, PendingWrite, StagingBuffer
from whet.distributed.group import RankGroup
from whet.plan.plan import Plan
from whet.run import durable
from whet.run.folder import Run
from whet.training.building import TrainingParts
from whet.training.callback import State
from whet.training.callbacks.checkpoint_schedule import SaveDue, SaveInterval, StepTimes, WriteMode
from whet.training.callbacks.event_log import Recorder
from whet.training.checks import check_parameter_groups
from whet.training.restore import RestoredRun, restore_run, run_environment


def load_newest(folder: Path, model: nn.Module, group: RankGroup, *, run_id: str) -> store.LoadedCheckpoint | None:
    """The newest checkpoint that all can trust, as much of it as this model holds here."""
    if group.is_alone:
        return store.load_newest(folder, run_id=run_id)
    there = group.share(store.list_steps(folder) if group.is_first else None)
    return store.load_newest(
        folder, run_id=run_id, there=there, read=lambda path: load_on_all_ranks(path, model, group)
    )


def load_on_all_ranks(path: Path, model: nn.Module, group: RankGroup) -> Snapshot:
    """A checkpoint, as much of it as this model holds here. What one process cannot read, none uses."""
    if group.is_alone:
        return store.load_checkpoint(path)
    found: Snapshot | None = None
    told: list[Any] | None = None
    try:
        found = store.load_checkpoint(path, wanted=wanted_rows(model))
    except WhetError as error:
        told = [isinstance(error, DamagedCheckpointError), error.what, str(error.got), str(error.try_)]
    answers = group.gather(told)
    problems = [(rank, *answer) for rank, answer in enumerate(answers) if answer is not None]
    if not problems:
        assert found is not None
        return found
    # What is not the checkpoint's fault must not let it be passed over for an older one.
    rank, is_damage, what, got, hint = min(problems, key=lambda problem: bool(problem[1]))
    kind = DamagedCheckpointError if is_damage else WhetError
    raise kind(what, got=f"rank {rank}: {got}", try_=hint)


Urgency = Literal["due", "now", "last"]
"""Skipped while another is written; waits for that one; waits for its own end too, and a failure is an error."""


class Checkpointer:
    """Writes the checkpoints of one run at the times the plan says, and restores from them."""

    def __init__(
        self, run: Run, parts: TrainingParts, recorder: Recorder, *, global_batch_size: int, allow: Collection[str] = ()
    ) -> None:
        self._folder = run.checkpoints
        self._parts = parts
        self._recorder = recorder
        self._global_batch_size = global_batch_size
        self._allow = allow
        keep = parts.plan.keep
        assert isinstance(keep, int)
        self._keep = keep
        self._pace = SaveInterval(parts.plan)
        self._times = StepTimes()
        self._ways = WriteMode()
        self._staging = StagingBuffer(parts.device)
        self._writer = CheckpointWriter()
        self._about = CheckpointInfo(run_id=run.header.id)
        self._stall = 0.0
        """Seconds that the training stood still for the write that is under way."""
        self._saved_step: int | None = None
        """The newest step that is safe; what is being written is not."""
        self._refused: set[int] = set()
        """Steps whose checkpoints were damaged when the run went on."""
        self._last_bytes = 0
        self._num_failures = 0
        if parts.group.is_first:
            with contextlib.suppress(WhetError, OSError):
                durable.remove_leftovers(self._folder)

    # --- saving ------------------------------------------------------------------------------------------------------

    def is_due(self, step: int, *, epochs_done: int | None) -> SaveDue:
        """Whether a checkpoint should be written after this step. Call it after each one: it also collects the last."""
        self._times.tick(is_busy=self._writer.is_busy, aside=self._recorder.aside_seconds)
        self._collect(wait=False)
        return self._pace.is_due(step, epochs_done=epochs_done)

    def save(self, progress: State, *, base_rates: list[float], plan: Plan, urgency: Urgency) -> None:
        """Copies the state after the newest step and has it written, unless it is safe already.

        Of several processes that all have the whole model the first one writes; of those that share it, all do.
        """
        if not (self._parts.group.is_first or self._is_shared):
            return
        start = time.perf_counter()
        if self._agreed(urgency == "due" and self._writer.is_busy):
            self._pace.began()
            return
        if urgency == "last" or self._writer.step != progress.step:
            self._collect(wait=True)
        if self._agreed(progress.step not in (self._saved_step, self._writer.step)):
            # A GPU that failed without an error has left garbage.
            self._parts.device.monitor.check(wait=True)
            snapshot = self._take(progress, base_rates=base_rates, plan=plan)
            self._begin(snapshot, progress, urgency=urgency, start=start)
            if urgency != "last":
                # The collector is kept out of the steps: here it may look at what is new.
                gc.collect()
        stall = self._stall = time.perf_counter() - start
        if not self._writer.is_busy:
            self._collect(wait=True, is_last=urgency == "last")
        self._recorder.spent("save", stall)

    def close(self) -> None:
        """Waits for the write that is under way. Every way out of a session leads through here."""
        # What is wrong with the run is told already; what is safe is safe.
        with contextlib.suppress(WhetError):
            self._collect(wait=True)

    def note_inexact(self, step: int, reason: str) -> None:
        """From `step` on this run is not bit-exact; all later checkpoints say so."""
        said = f"since step {step}: {reason}"
        if said not in self._about.reasons:
            self._about = self._about.model_copy(update={"exactness": (*self._about.reasons, said)})

    def _take(self, progress: State, *, base_rates: list[float], plan: Plan) -> Snapshot:
        parts = self._parts
        if len(parts.stepper.optimizer.param_groups) < len(base_rates):
            # Nobody could go on without a group that is gone; one that came later is left out.
            check_parameter_groups(parts.stepper.optimizer, base_rates)
        parameters, tied = describe_names(parts.stepper.model)
        position = progress.as_json()["position"]
        about = self._about.model_copy(
            update={
                "created": time.time(),
                "parameters": parameters,
                "tied": tied,
                "circumstances": run_environment(plan, parts.device, world_size=parts.group.world.size),
                "data": {**self._data_facts(), "position": position},
            }
        )
        return take_snapshot(
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
            },
            about=about,
            num_groups=len(base_rates),
        )

    def _begin(self, snapshot: Snapshot, progress: State, *, urgency: Urgency, start: float) -> None:
        step, best, total_steps = progress.step, progress.best_step, self._parts.total_steps
        folder, keep, group = self._folder, self._keep, self._parts.group
        if self._is_shared:
            snapshot = rank_part(snapshot, rank=group.world.rank)
        in_background = urgency != "last" and self._ways.is_background and self._staging.has_room(snapshot.num_bytes)
        held = self._staging.copy(snapshot) if in_background else snapshot
        turn = group.exchange.next_turn() if self._is_shared else 0

        def check() -> None:
            self._refuse_full_disk(held.num_bytes * (group.world.size if self._is_shared else 1), best=best)

        def job(write: PendingWrite) -> None:
            self._recorder.settle()
            if self._is_shared:
                write.num_bytes = save_sharded(folder, held, step=step, exchange=group.exchange, turn=turn, check=check)
            else:
                check()
                write.num_bytes = store.save_checkpoint(folder, held, step=step)
            if not group.is_first:
                return
            try:
                self._refused.discard(step)
                writer.apply_retention(
                    folder, acknowledged=step, keep=keep, best=best, total_steps=total_steps, refused=self._refused
                )
            except WhetError as error:
                write.cleanup_error = error

        self._recorder.flush()
        self._pace.began()
        self._writer.begin(step, job, in_background=in_background, start=start)

    @property
    def _is_shared(self) -> bool:
        """Whether each process holds a part of the model only."""
        return not self._parts.stepper.strategy.holds_all

    def _agreed(self, answer: bool) -> bool:
        """What the first process says, where all must do the same."""
        return bool(self._parts.group.share(answer)) if self._is_shared else answer

    def _refuse_full_disk(self, num_bytes: int, *, best: int | None) -> None:
        needed = max(num_bytes, self._last_bytes)
        writer.free_disk_space(self._folder, num_bytes=needed, keep=self._keep, best=best, refused=self._refused)
        free = durable.free_bytes(self._folder)
        if free is not None and free < 1.05 * needed:
            with durable.disk_errors("write", self._folder):
                raise OSError(errno.ENOSPC, "no room")

    # --- how it ended ------------------------------------------------------------------------------------------------

    def _collect(self, *, wait: bool, is_last: bool = False) -> None:
        start = time.perf_counter()
        write = self._writer.collect(wait=wait)
        if write is None:
            return
        slowed, stall = self._times.slowed(), self._stall + time.perf_counter() - start
        if write.error is not None:
            self._tell_failure(write, is_last=is_last)
            return
        self._saved_step, self._last_bytes = write.step, write.num_bytes
        seconds = max(write.seconds, stall)
        self._pace.learn(stall + slowed)
        self._ways.learn(
            is_background=write.is_background, cost=stall + slowed, seconds=seconds, num_bytes=write.num_bytes
        )
        again = {"failures_before": self._num_failures} if self._num_failures else {}
        self._num_failures = 0
        self._recorder.event(
            "checkpoint",
            step=write.step,
            name=store.checkpoint_name(write.step),
            bytes=write.num_bytes,
            seconds=seconds,
            stall_seconds=stall,
            slowed_seconds=slowed,
            background=write.is_background,
            **again,
        )
        if write.cleanup_error is not None:
            what = "old checkpoints could not be removed"
            self._recorder.warn(
                write.step, what, write.cleanup_error, path=self._folder, retry="with the next checkpoint"
            )

    def _tell_failure(self, write: PendingWrite, *, is_last: bool) -> None:
        error = write.error
        assert error is not None
        if not (isinstance(error, WhetError) and isinstance(error.__cause__, OSError)):
            raise error
        again = self._pace.failed(write.step)
        self._num_failures += 1
        if self._num_failures == 1:
            self._recorder.warn(
                write.step, f"the state after step {write.step:,} is not saved", error, path=self._folder, retry=again
            )
        if is_last:
            safe, kept = self._saved_step, "no checkpoint of this sitting"
            if safe is not None:
                path = self._folder / store.checkpoint_name(safe)
                safe, kept = (safe, f"{path} is whole") if path.is_dir() else (None, f"{path} is gone too")
            lost = write.step - (safe or 0)
            raise WhetError(
                f"the last state, after step {write.step:,}, could not be saved",
                got=f"{error.what}: {error.got}; {kept}; {lost:,} steps are lost when this process ends",
                try_=f"{error.try_}; then the same command goes on from step {safe or 0:,}",
            ) from error

    # --- going on ----------------------------------------------------------------------------------------------------

    def best(self, progress: State) -> Snapshot | None:
        """The checkpoint of the best step; None where that is the newest step, or where it cannot be read."""
        step = progress.best_step
        if step is None or step == progress.step:
            return None
        self._collect(wait=True)
        path = self._folder / store.checkpoint_name(step)
        try:
            return load_on_all_ranks(path, self._parts.stepper.model, self._parts.group)
        except WhetError as error:
            again = f"with the newest weights, after step {progress.step:,}"
            what = f"the best weights, after step {step:,}, cannot be read"
            self._recorder.warn(progress.step, what, error, path=path, retry=again)
            return None

    def newest(self) -> store.LoadedCheckpoint | None:
        """The newest checkpoint, that which is being written included."""
        self.close()
        group = self._parts.group
        # Not before the first process has written what it was writing.
        group.wait()
        return load_newest(self._folder, self._parts.stepper.model, group, run_id=self._about.run_id)

    def restore(self, found: store.LoadedCheckpoint, *, plan: Plan) -> RestoredRun:
        """Puts everything back as it was."""
        step, snapshot, refused = found
        put = restore_run(snapshot, self._parts, step=step, plan=plan, data=self._data_facts(), allow=self._allow)
        self._saved_step = step
        there = store.list_steps(self._folder)
        self._refused = {number for number in there if number > step}
        before = snapshot.about
        self._about = self._about.model_copy(
            update={"attempt": before.attempt + 1, "parent": store.checkpoint_name(step), "exactness": before.exactness}
        )
        for reason in put.reasons:
            self.note_inexact(step, reason)
        told = {**put.told, "rejected": refused}
        if refused:
            told["lost_steps"] = max(there) - step
        return replace(put, told=told)

    def _data_facts(self) -> dict[str, Any]:
        source = self._parts.source
        return {
            "num_samples": source.num_samples,
            "fingerprint": source.fingerprint(),
            "global_batch_size": self._global_batch_size,
        }
