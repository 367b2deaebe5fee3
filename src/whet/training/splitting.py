"""Split global batches into micro-batches, and check that this does not change the loss."""

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from whet.base.errors import UsageError, WhetError
from whet.data.batch import GlobalBatch, MicroBatch, Shapes, micro_batch_shapes
from whet.data.split import LengthMode, RankShare
from whet.device.errors import is_out_of_memory
from whet.plan.plan import Plan
from whet.step.loss import MicroLoss, loss_code
from whet.step.rollback import release_traceback
from whet.training.workload import pad_token_id, preserve_loss_modules
from whet.verify.start.splitting import loss_split_obstacle

if TYPE_CHECKING:
    from whet.training.run_context import RunContext

_RECHECK_STEPS = 1024
"""Number of split steps after which the loss is checked again, in addition to steps 2, 4, 8 and so on."""
_MAX_SHAPES = 1000
"""Maximum number of distinct shapes to remember, because packed batches have a new shape each time."""


class _BatchSizes(NamedTuple):
    """The batch sizes of a plan, cached for one plan object."""

    plan: Plan
    micro_batch: int
    global_batch: int
    length_mode: LengthMode
    is_whole: bool


class BatchSplitting:
    """The rules by which the global batches of one run are split into micro-batches."""

    def __init__(self, run: "RunContext") -> None:
        self._run = run
        self.shapes: set[Shapes] = set()
        """The distinct shapes of all micro-batches so far."""
        self._sizes: _BatchSizes | None = None
        self._split_steps: dict[tuple[str, Hashable], int] = {}
        """Number of split steps per optimizer and loss, for those that have been checked."""
        self.unlogged: tuple[int, str] | None = None
        """The step and the reason of the last decision not to split, until a step has succeeded; None otherwise."""

    def micro_batches(self, batch: GlobalBatch) -> Iterator[MicroBatch]:
        """Yield the micro-batches into which the plan splits a global batch."""
        sizes = self._batch_sizes()
        # A sampler may yield batches that are larger than the global batch size.
        size = max(sizes.micro_batch, len(batch.ids)) if sizes.is_whole else sizes.micro_batch
        for micro in self._run.source.micro_batches(batch, micro_batch=size, length_mode=sizes.length_mode):
            self.count_shapes(micro)
            yield micro

    def count_shapes(self, micro: MicroBatch) -> None:
        """Record the shapes of a micro-batch, to count distinct shapes."""
        if len(self.shapes) < _MAX_SHAPES:
            self.shapes.add(micro_batch_shapes(micro))

    def _batch_sizes(self) -> "_BatchSizes":
        """Return the sizes into which the plan splits batches.

        They are cached per plan, because every step needs them.
        """
        run, plan = self._run, self._run.plan
        if self._sizes is None or self._sizes.plan is not plan:
            # With BatchNorm, a user's micro_batch is allowed only together with a declaration that batches may be
            # split.
            is_whole = plan.workload.whole_batch_reason is not None and run.group.is_single_process
            is_whole = is_whole and "micro_batch" not in plan.overrides
            size = plan.workload.global_batch_size
            self._sizes = _BatchSizes(plan, plan.micro_batch, size, plan.lengths, is_whole)
        return self._sizes

    def use_whole_batches(self, reason: str) -> None:
        """Switch to a plan with whole batches if the current one splits them."""
        if self._run.plan.micro_batch < self._run.plan.workload.global_batch_size:
            self.keep_whole(reason)

    def check(self, loss: MicroLoss, batch: GlobalBatch) -> None:
        """Switch to a plan with whole batches if the current one splits them and this loss does not allow that."""
        if self.is_split(batch) and (reason := self.obstacle(loss, batch)) is not None:
            self.keep_whole(reason)

    def is_split(self, batch: GlobalBatch) -> bool:
        """Return whether the plan splits this batch or a later one, or several ranks share it."""
        sizes = self._batch_sizes()
        # The size of this batch is not enough: a sampler may yield larger ones later.
        largest = max(len(batch.ids), sizes.global_batch)
        return sizes.micro_batch < largest or not self._run.group.is_single_process

    def _check_again(self, loss: MicroLoss, batch: GlobalBatch, *, number: int) -> None:
        """Raise if the loss is no longer a mean over samples, for example because a term was switched on."""
        run, plan = self._run, self._run.plan
        is_known = run.config.training.split_batch is True or plan.workload.whole_batch_reason is not None
        if is_known or plan.workload.has_batchnorm or (plan.sharding == "full" and plan.workload.world_size > 1):
            return
        reason = self.obstacle(loss, batch, is_repeated=True)
        # The check restores buffers, which changes the model outside a step.
        run.executor.reset_rollback_snapshot()
        if reason is not None:
            raise WhetError(
                f"the loss has changed since the start: at step {number:,} the batch may not be split",
                got=reason,
                try_="split_batch=False; split_batch=True if the loss is a mean over samples; "
                "or return (sum of losses, weight)",
            )

    def obstacle(self, loss: MicroLoss, batch: GlobalBatch, *, is_repeated: bool = False) -> str | None:
        """Return why the batch must not be split; None if it may be.

        The reason is split_batch=False, or that the loss of a few samples differs when they are split in two.
        """
        run = self._run
        if run.config.training.split_batch is True or run.plan.workload.has_batchnorm:
            return None
        if run.plan.workload.split_obstacle is not None:
            return run.plan.workload.split_obstacle

        def split(few: GlobalBatch, size: int) -> Iterator[MicroBatch]:
            # Do not use only this rank's share: the check needs several samples.
            return iter(run.source.split(few, RankShare(), micro_batch=size, length_mode="fixed"))

        own = run.source.own_samples(batch)
        try:
            with preserve_loss_modules(loss, run.model):
                reason = loss_split_obstacle(
                    run.model,
                    loss,
                    own,
                    split,
                    run.device,
                    pad_token=pad_token_id(run.model),
                    is_repeated=is_repeated,
                    # Several losses are computed here; a slow one must not look like a stalled rank.
                    on_progress=run.group.stall_detector.progress,
                )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            release_traceback(error)
            reason = "memory ran out while it was tested whether the loss is a mean over samples"
            # The first check has passed, so its result remains valid.
            reason = None if is_repeated else reason
        is_anywhere = any(run.group.all_reduce_max([float(reason is not None)]))
        return reason or (
            "it was not shown on another rank that the loss is a mean over samples" if is_anywhere else None
        )

    def keep_whole(self, reason: str) -> None:
        """Make a new plan that does not split the batch. Raise UsageError if it must be split."""
        run, plan = self._run, self._run.plan
        hint = "split_batch=True if the loss is a mean over samples; or return (sum of losses, weight)"
        if not run.group.is_single_process:
            raise UsageError(
                "several processes would change what is trained: they split every batch", got=reason, try_=hint
            )
        micro = plan.overrides.get("micro_batch")
        if isinstance(micro, int) and micro < plan.workload.global_batch_size:
            raise UsageError(f"micro_batch={micro} would change what is trained", got=reason, try_=hint)
        if plan.workload.split_obstacle != reason:
            run.plan_again(split_obstacle=reason)
            self.unlogged = run.state.step, reason

    def log_decision(self) -> None:
        """Log why batches are not split.

        Call this after a successful step: the whole batch may fail in the same way.
        """
        if self.unlogged is not None:
            step, reason = self.unlogged
            self.unlogged = None
            self._run.log.event("plan", step=step, message=f"the batch is not split: {reason}")

    def check_step(self, loss: MicroLoss, batch: GlobalBatch, *, number: int, optimizer: str, is_first: bool) -> None:
        """Check the loss before the first split step of each optimizer and loss, and occasionally afterward."""
        key = optimizer, loss_code(loss)
        if not is_first and key not in self._split_steps:
            self.check(loss, batch)
            # The check restores buffers, which changes the model outside a step.
            self._run.executor.reset_rollback_snapshot()
        count = self._split_steps[key] = self._split_steps.get(key, 0) + 1
        # Check again at powers of two, because a loss may change during a run.
        if count > 1 and (count.bit_count() == 1 or count % _RECHECK_STEPS == 0):
            self._check_again(loss, batch, number=number)
