"""Write, find and restore the checkpoints of a run."""

import contextlib
import errno
import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from whet.base.errors import UsageError, WhetError
from whet.checkpoint import store, writer
from whet.checkpoint.limits import Excess, StatePart, find_excess
from whet.checkpoint.manifest import CheckpointInfo, DamagedCheckpointError
from whet.checkpoint.model_state import InitialState
from whet.checkpoint.sharded_save import rank_part, save_sharded
from whet.checkpoint.snapshot import Snapshot, describe_names, take_snapshot, wanted_rows
from whet.checkpoint.writer import CheckpointWriter, PendingWrite, StagingBuffer
from whet.distributed.group import RankGroup
from whet.run import durable
from whet.run.folder import Run
from whet.training.callbacks.checkpoint_schedule import SaveInterval, StepTimes, WriteMode
from whet.training.restore import RestoredRun, restore_run, run_environment
from whet.training.schedule import check_parameter_groups

if TYPE_CHECKING:
    from whet.training.run_context import RunContext

Urgency = Literal["due", "now", "last"]
"""How urgent a save is.

due: skipped while another checkpoint is being written. now: waits for that checkpoint first. last: also waits until its
own write is done; a failure raises an error.
"""


def load_newest(folder: Path, model: nn.Module, group: RankGroup, *, run_id: str) -> store.LoadedCheckpoint | None:
    """Load the newest checkpoint that every rank can read. A rank of a sharded model loads only its own rows."""
    if group.is_single_process:
        return store.load_newest(folder, run_id=run_id)
    steps = group.broadcast(store.list_steps(folder) if group.is_rank_zero else None)
    return store.load_newest(
        folder, run_id=run_id, steps=steps, read=lambda path: load_on_all_ranks(path, model, group)
    )


def load_on_all_ranks(path: Path, model: nn.Module, group: RankGroup) -> Snapshot:
    """Load a checkpoint. If one rank cannot read it, every rank raises an error."""
    if group.is_single_process:
        return store.load_checkpoint(path)
    snapshot: Snapshot | None = None
    problem: list[Any] | None = None
    try:
        snapshot = store.load_checkpoint(path, wanted=wanted_rows(model))
    except WhetError as error:
        problem = [isinstance(error, DamagedCheckpointError), error.what, str(error.got), str(error.try_)]
    problems = [(rank, *parts) for rank, parts in enumerate(group.all_gather(problem)) if parts is not None]
    if not problems:
        assert snapshot is not None
        return snapshot
    # Damage makes the caller fall back to an older checkpoint. Other errors must not do so and take precedence.
    rank, is_damaged, what, got, hint = min(problems, key=lambda parts: bool(parts[1]))
    kind = DamagedCheckpointError if is_damaged else WhetError
    raise kind(what, got=f"rank {rank}: {got}", try_=hint)


class Checkpointer:
    """Writes the checkpoints of one run, in the background if that is faster, and restores the run from them."""

    def __init__(self, run: "RunContext", folder: Run) -> None:
        self._run = run
        self._folder = folder.checkpoints
        self.interval = SaveInterval(run.plan)
        self.step_times = StepTimes()
        """Measures how much the current write slows training down."""
        self.is_writing = False
        """Whether a write has begun whose result has not been collected yet."""
        self._write_mode = WriteMode()
        self._staging = StagingBuffer(run.device)
        self._writer = CheckpointWriter()
        self._info = CheckpointInfo(run_id=folder.header.id)
        optimizers = {"": run.stepper.optimizer, **{name: other for name, (other, _) in run.other_optimizers.items()}}
        self.initial = InitialState.of(run.stepper.model, optimizers)
        """The model and the optimizers before anything was restored or trained."""
        self._stall = 0.0
        """Number of seconds that training has waited for the current write."""
        self._saved_step: int | None = None
        """The newest step on disk. A step that is still being written does not count."""
        self._rejected: set[int] = set()
        """Steps whose checkpoints were rejected when the run resumed."""
        self._last_bytes = 0
        self._omitted: set[StatePart] = set()
        """Parts of the state that are too large for a checkpoint."""
        self._num_failures = 0

    def remove_leftovers(self) -> None:
        """Remove leftovers of an unfinished checkpoint of a killed process."""
        with contextlib.suppress(WhetError, OSError):
            durable.remove_leftovers(self._folder)
            durable.remove_leftovers(self._folder.parent)

    # --- saving ------------------------------------------------------------------------------------------------------

    def save(self, urgency: Urgency) -> None:
        """Write the state after the newest step, unless it is already on disk.

        If every rank has the whole model, only rank 0 writes. If the model is sharded, each rank writes its shard.
        """
        run, step = self._run, self._run.state.step
        if not (run.group.is_rank_zero or self._is_sharded):
            return
        start = time.perf_counter()
        if run.verification is not None:
            # This state is not newer than the newest checkpoint, so nothing is written.
            if step == run.verification.until:
                run.verification.finish()
                self._saved_step = step
            return
        if self._as_rank_zero(urgency == "due" and self._writer.is_busy):
            self.interval.restart()
            return
        if urgency == "last" or self._writer.step != step:
            self.collect(wait=True)
        if self._as_rank_zero(step not in (self._saved_step, self._writer.step)):
            # A GPU can fail without raising an error. Check first, so that corrupt memory is not saved.
            run.device.monitor.check(wait=True)
            self._begin_write(self.take_snapshot(), urgency=urgency, start=start)
            if urgency != "last":
                # Automatic garbage collection is off during training. Compared with a save, a collection costs little.
                gc.collect()
        stall = self._stall = time.perf_counter() - start
        if not self._writer.is_busy:
            self.collect(wait=True, is_last=urgency == "last")
        run.log.add_seconds("save", stall)

    def close(self) -> None:
        """Wait for the current write. Every exit from a session calls this."""
        # Suppress errors: the error that ends the session is reported elsewhere, and earlier checkpoints remain valid.
        with contextlib.suppress(WhetError):
            self.collect(wait=True)

    def note_inexact(self, step: int, reason: str) -> None:
        """Record in all later checkpoints that the run has not been bit-exact since `step`."""
        note = f"since step {step}: {reason}"
        if note not in self._info.reasons:
            self._info = self._info.model_copy(update={"exactness": (*self._info.reasons, note)})

    def record_unsaved_state(self, gap: str, *, is_variable: bool = False) -> bool:
        """Record in all later checkpoints that some state is not saved. Return whether this is the first such note."""
        name = "unregistered" if is_variable else "gaps"
        noted: tuple[str, ...] = getattr(self._info, name)
        if gap in noted:
            return False
        self._info = self._info.model_copy(update={name: (*noted, gap)})
        return True

    def note_interruption(self, what: str) -> None:
        """Record in all later checkpoints that an error ended the user's code in the middle of a batch."""
        self._info = self._info.model_copy(update={"interruption": what})

    def save_initial_again(self) -> None:
        """Write the initial state again, including objects that were registered after it was first written."""
        if self._run.state.step == 0 and self._info.attempt == 1:
            self._saved_step = None
            self.save("last")

    def take_snapshot(self, *, finds_unsaved_state: bool = True) -> Snapshot:
        """Return the state of the run. Its tensors are the live ones, not copies."""
        run, state, stepper = self._run, self._run.state, self._run.stepper
        if run.unsaved_state is not None and finds_unsaved_state:
            run.unsaved_state.check()
        base_rates = run.rates.base
        if len(stepper.optimizer.param_groups) < len(base_rates):
            # A removed parameter group would make a resume impossible, so this raises an error.
            check_parameter_groups(stepper.optimizer, base_rates)
        elif len(stepper.optimizer.param_groups) > len(base_rates):
            # The next step refuses it, and the same command then resumes without it.
            run.record_unsaved_state("a parameter group that was added to the optimizer")
        parameters, tied = describe_names(stepper.model)
        progress = state.state_dict()
        info = self._info.model_copy(
            update={
                "created": time.time(),
                "parameters": parameters,
                "tied": tied,
                "environment": run_environment(run.plan, run.device, world_size=run.group.ranks.size),
                "data": {**self._data_facts(), "position": progress["position"]},
            }
        )
        snapshot = self._encode_state(info)
        while (excess := find_excess(snapshot)) is not None:
            self._omit(excess)
            snapshot = self._encode_state(info)
        for gap in snapshot.gaps:
            run.record_unsaved_state(gap)
        return replace(snapshot, info=snapshot.info.model_copy(update={"gaps": self._info.gaps}))

    def _omit(self, excess: Excess) -> None:
        """Leave the largest part of the state out of all later checkpoints. Raise UsageError before the first step."""
        part, is_new = excess.part, self._run.state.step == 0
        if part is None or is_new:
            whole = f"{excess.got}; at most {excess.limit}"
            raise UsageError(
                "the state of this run is too large for a checkpoint",
                got=whole if part is None else f"{part} has {excess.got_part}; the state has {whole}",
                try_="one tensor or NumPy array instead of many, or of a long list; or run=None",
            )
        self._omitted.add(part)
        gap = f"{part} is not saved: with it, a checkpoint would have more than {excess.limit}"
        self._run.record_unsaved_state(gap)

    def _encode_state(self, info: CheckpointInfo) -> Snapshot:
        run, state, stepper = self._run, self._run.state, self._run.stepper
        omitted = {(part.kind, part.name) for part in self._omitted}
        callbacks = run.callbacks.state_dict()
        return take_snapshot(
            stepper.model,
            stepper.optimizer,
            run.device,
            rng=run.rng,
            scaler=stepper.scaler,
            ema=stepper.ema,
            step=state.step,
            progress={
                "progress": state.state_dict(),
                "schedule": run.rates.state_dict(),
                "source": run.source.state(run.state.position),
                "initial": run.rates.initial,
                "code": run.sources.state_dict(),
                "callbacks": {name: saved for name, saved in callbacks.items() if ("callback", name) not in omitted},
            },
            info=info,
            num_groups=len(run.rates.base),
            others=run.other_optimizers,
            has_gradients=run.has_users_gradients,
            registered=run.registered.owners,
            initial=self.initial,
            omitted={part.name for part in self._omitted if part.kind == "registered"},
            omitted_attributes={(part.owner, part.name) for part in self._omitted if part.kind == "attribute"},
            # State that appears later is named, and the run goes on.
            omits_opaque=state.step > 0,
        )

    def _begin_write(self, snapshot: Snapshot, *, urgency: Urgency, start: float) -> None:
        run, group, folder = self._run, self._run.group, self._folder
        step, best, total_steps = run.state.step, run.state.best_step, run.state.total_steps
        if self._is_sharded:
            snapshot = rank_part(snapshot, rank=group.ranks.rank)
        has_capacity = self._staging.has_capacity(snapshot.num_bytes)
        in_background = urgency != "last" and self._write_mode.is_background and has_capacity
        # A background write needs a copy, because the next step changes the tensors.
        held = self._staging.copy(snapshot) if in_background else snapshot
        turn = group.store.next_turn() if self._is_sharded else 0

        def check() -> None:
            self._check_disk_space(held.num_bytes * (group.ranks.size if self._is_sharded else 1), best=best)

        def job(write: PendingWrite) -> None:
            # The events of the saved steps must reach the disk before the checkpoint does.
            run.log.fsync()
            if self._is_sharded:
                write.num_bytes = save_sharded(folder, held, step=step, exchange=group.store, turn=turn, check=check)
            else:
                check()
                write.num_bytes = store.save_checkpoint(folder, held, step=step)
            if not group.is_rank_zero:
                return
            try:
                self._rejected.discard(step)
                writer.apply_retention(
                    folder,
                    acknowledged=step,
                    keep=run.plan.keep_checkpoints,
                    best=best,
                    total_steps=total_steps,
                    rejected=self._rejected,
                )
            except WhetError as error:
                write.cleanup_error = error

        run.log.flush()
        self.interval.restart()
        self.is_writing = True
        self._writer.begin(step, job, in_background=in_background, start=start)

    @property
    def _is_sharded(self) -> bool:
        return not self._run.stepper.strategy.has_full_model

    def _as_rank_zero(self, answer: bool) -> bool:
        """Return rank 0's value of `answer` if the model is sharded: all ranks must then make the same decision."""
        return bool(self._run.group.broadcast(answer)) if self._is_sharded else answer

    def _check_disk_space(self, num_bytes: int, *, best: int | None) -> None:
        needed, keep = max(num_bytes, self._last_bytes), self._run.plan.keep_checkpoints
        writer.free_disk_space(self._folder, num_bytes=needed, keep=keep, best=best, rejected=self._rejected)
        free = durable.free_bytes(self._folder)
        # Allow 5 % for file system overhead.
        if free is not None and free < 1.05 * needed:
            with durable.disk_errors("write", self._folder):
                raise OSError(errno.ENOSPC, "not enough disk space")

    # --- completed writes --------------------------------------------------------------------------------------------

    def collect(self, *, wait: bool, is_last: bool = False) -> None:
        """Log the current write if it has ended. With `wait`, wait until it has."""
        start = time.perf_counter()
        write = self._writer.collect(wait=wait)
        if write is None:
            return
        self.is_writing = False
        slowed, stall = self.step_times.slowed(), self._stall + time.perf_counter() - start
        if write.error is not None:
            self._handle_failure(write, is_last=is_last)
            return
        self._saved_step, self._last_bytes = write.step, write.num_bytes
        seconds, cost = max(write.seconds, stall), stall + slowed
        self.interval.learn(cost)
        self._write_mode.learn(is_background=write.is_background, cost=cost, seconds=seconds, num_bytes=write.num_bytes)
        failures = {"failures_before": self._num_failures} if self._num_failures else {}
        self._num_failures = 0
        self._run.log.event(
            "checkpoint",
            step=write.step,
            name=store.checkpoint_name(write.step),
            bytes=write.num_bytes,
            seconds=seconds,
            stall_seconds=stall,
            slowed_seconds=slowed,
            background=write.is_background,
            **failures,
        )
        if write.cleanup_error is not None:
            what = "old checkpoints could not be removed"
            self._run.log.warn(
                write.step, what, write.cleanup_error, path=self._folder, retry="with the next checkpoint"
            )

    def _handle_failure(self, write: PendingWrite, *, is_last: bool) -> None:
        """Log a failed write and schedule another attempt. Raise the error if it was the last write of the session."""
        error = write.error
        assert error is not None
        # Only disk errors are worth another attempt. Any other error indicates a bug or invalid state.
        if not (isinstance(error, WhetError) and isinstance(error.__cause__, OSError)):
            raise error
        again = self.interval.retry_after(write.step)
        self._num_failures += 1
        if self._num_failures == 1:
            self._run.log.warn(
                write.step, f"the state after step {write.step:,} is not saved", error, path=self._folder, retry=again
            )
        if is_last:
            safe, kept = self._saved_step, "no checkpoint of this session"
            if safe is not None:
                path = self._folder / store.checkpoint_name(safe)
                safe, kept = (safe, f"{path} is complete") if path.is_dir() else (None, f"{path} is gone too")
            lost = write.step - (safe or 0)
            raise WhetError(
                f"the last state, after step {write.step:,}, could not be saved",
                got=f"{error.what}: {error.got}; {kept}; {lost:,} steps are lost when this process ends",
                try_=f"{error.try_}; then the same command resumes from step {safe or 0:,}",
            ) from error

    # --- restoring ---------------------------------------------------------------------------------------------------

    def best(self) -> Snapshot | None:
        """Load the checkpoint of the best step; None if that is the newest step, or if it cannot be read."""
        run, step = self._run, self._run.state.best_step
        if step is None or step == run.state.step:
            return None
        self.collect(wait=True)
        path = self._folder / store.checkpoint_name(step)
        try:
            return load_on_all_ranks(path, run.model, run.group)
        except WhetError as error:
            again = f"with the newest weights, after step {run.state.step:,}"
            what = f"the best weights, after step {step:,}, cannot be read"
            run.log.warn(run.state.step, what, error, path=path, retry=again)
            return None

    def newest(self) -> store.LoadedCheckpoint | None:
        """Load the newest checkpoint, after waiting for the current write."""
        self.close()
        # The other ranks must not read before rank 0 has finished writing.
        self._run.group.barrier()
        return load_newest(self._folder, self._run.model, self._run.group, run_id=self._info.run_id)

    def restore(self, checkpoint: store.LoadedCheckpoint) -> RestoredRun:
        """Restore model, optimizers, data position and progress from a loaded checkpoint."""
        step, snapshot, rejected = checkpoint
        verified = None if self._run.verification is None else self._run.verification.until
        restored = restore_run(snapshot, self._run, step=step, data=self._data_facts(), initial_state=self.initial)
        self._saved_step = step
        steps = store.list_steps(self._folder)
        self._rejected = {number for number in steps if number > step and number != verified}
        before = snapshot.info
        self._info = self._info.model_copy(
            update={
                "attempt": before.attempt + 1,
                "parent": store.checkpoint_name(step),
                "exactness": before.exactness,
                "gaps": before.gaps,
                "unregistered": before.unregistered,
                "interruption": before.interruption,
            }
        )
        for reason in restored.reasons:
            self.note_inexact(step, reason)
        fields = {**restored.fields, "rejected": rejected}
        if rejected:
            fields["lost_steps"] = max(steps) - step
        return replace(restored, fields=fields)

    def _data_facts(self) -> dict[str, Any]:
        source = self._run.source
        return {
            "num_samples": source.num_samples,
            "fingerprint": source.fingerprint(),
            "global_batch_size": self._run.config.training.global_batch_size,
        }
