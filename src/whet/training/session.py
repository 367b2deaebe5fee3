"""Session: the public object for a run and its training loop.

with whet.Session(model, optimizer, data, global_batch_size=32, run="runs/mine") as session:
    for batch in session:
        session.step(loss, batch)
        if session.due("evaluate"):
            session.log(accuracy=...)
"""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import Any, Literal, Never, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import UsageError, WhetError
from whet.checkpoint import store
from whet.config.options import SchedulerObject
from whet.data.batch import GlobalBatch
from whet.device.errors import explain_gpu_failure
from whet.machine.pressure import ReadSystemState
from whet.plan.plan import Plan
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.step.loss import BatchLoss, LossFunction, adapt_loss
from whet.step.optimizers import OptimizerChoice
from whet.training import checks, intercept
from whet.training.batch_loop import BatchLoop
from whet.training.callback import Callback
from whet.training.callbacks.event_log import EventHandler
from whet.training.callbacks.progress_line import SessionPrinter
from whet.training.callbacks.progress_screen import is_notebook
from whet.training.end_reason import describe_end
from whet.training.evaluator import Evaluate, LossEvaluation, use_best_weights
from whet.training.failed_layer import note_failed_layer
from whet.training.keywords import SessionKeywords
from whet.training.metrics import normalize_metrics, scalar_metrics
from whet.training.progress import BestStep, Progress, State
from whet.training.run_config import RunConfig, make_run_config
from whet.training.run_context import RunContext
from whet.training.setup import setup

_MAX_LOSSES = 16
"""Maximum number of loss functions to remember. A loop may redefine its loss in each step."""


class Session:
    """A run with a custom training loop: optimizer steps, logging, checkpoints and resume.

    Enter it with `with`, iterate over it to get batches, and call `step` on each. A resumed run keeps its original
    options. If a training option, an override or the dataset has changed, an error names it. The learning rates come
    from the checkpoint.

    Keywords:
        global_batch_size: Samples per optimizer step; taken from a DataLoader; auto measures a size and scales lr.
        epochs: Passes over the training data. Default: 1.
        max_steps: Stop after this many optimizer steps, if earlier.
        schedule: How the learning rate falls after the warm-up: a name, a function, a torch scheduler, or a dict of
            them for several optimizers. Default: "constant".
        warmup_steps: Steps until the full learning rate. Default: 0.
        clip: Maximum gradient norm; not clipped if unset.
        ema: Evaluate with an exponential moving average of the weights. Default: False.
        verify_resume: When a run resumes, first repeat the steps between its last two checkpoints and compare. Default:
            False.
        seed: Decides the order of samples, the initial weights and all random draws. Default: 0.
        eval_every: Steps between evaluations; auto: once per epoch. Default: "auto".
        patience: Stop after this many evaluations without a better goal.
        epochs_per_session: Stop after this many epochs; the same command resumes.
        schedule_interval: When a torch scheduler steps; auto only for OneCycleLR, CyclicLR and ReduceLROnPlateau.
            Default: "auto".
        shuffle: Reshuffle the samples every epoch; auto: yes, or as the DataLoader does. Default: "auto".
        collate_fn: Makes a batch from a list of samples, as for a DataLoader; called once per global batch.
        split_batch: Whether the loss of a batch is the mean over its samples, so that it may be computed in parts;
            auto: tested before the first step; False: the loss needs the whole batch. Default: "auto".
        run: Run folder; without one, nothing is written. The same call with the same folder resumes.
        device: auto, mps, cuda, cuda:1 or cpu. Default: "auto".
        overrides: Settings of the plan that you fix: {"micro_batch": 8, "precision": "bf16"} (docs/rules).
        measure: Whether a run that is long enough measures which plan is fastest, at its first step (docs/measure.md).
            Default: True.
        plan: Plan of a new run, made by `whet.tune` or `whet.make_plan`.
        workload: Description of the training run for the plan; by default it is derived from the model and the data.
        goal: Metric that selects the best checkpoint and drives early stopping.
        mode: Whether a lower ("min") or a higher ("max") goal is better; "auto" follows from its name. Default: "auto".
        init_from: Run or import whose weights a new run starts with.
        allow: What may differ from the original run when it resumes: "data", "batch" or "lr".
        callbacks: Instances of `whet.Callback` (docs/callbacks.md).
        register: Your own objects with state, by name, which are saved and restored with the run (docs/own-loops.md).
        on_event: Called with the kind and the fields of every event; "line" draws a progress line on standard error.
        read_sensors: Function that reads heat, power and memory pressure; by default from the sensors of this machine.
        outputs: For causal models: a function from a micro-batch to outputs (batch, length, ...), to verify causality.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
        optimizer: Optimizer | OptimizerChoice | Mapping[str, Optimizer],
        data: Any,
        *,
        # begin generated keywords (tools/keywords.py)
        global_batch_size: int | None = None,
        epochs: int = 1,
        max_steps: int | None = None,
        schedule: Literal["constant", "linear", "cosine", "plateau"]
        | Callable[[int], float]
        | SchedulerObject
        | dict[str, Any] = "constant",
        warmup_steps: int = 0,
        clip: float | None = None,
        ema: bool = False,
        verify_resume: bool = False,
        seed: int = 0,
        eval_every: int | Literal["auto"] = "auto",
        patience: int | None = None,
        epochs_per_session: int | None = None,
        schedule_interval: Literal["step", "epoch", "auto"] = "auto",
        shuffle: bool | Literal["auto"] = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        split_batch: bool | Literal["auto"] = "auto",
        run: str | Path | None = None,
        device: str = "auto",
        overrides: Mapping[str, Scalar] | None = None,
        measure: bool = True,
        plan: Plan | None = None,
        workload: Workload | None = None,
        goal: str | None = None,
        mode: Literal["auto", "min", "max"] = "auto",
        init_from: str | Path | None = None,
        allow: Collection[str] = (),
        callbacks: Sequence[Callback] = (),
        register: Mapping[str, Any] | None = None,
        on_event: EventHandler | Literal["line"] | None = None,
        read_sensors: ReadSystemState | None = None,
        outputs: Callable[[Any], Any] | None = None,
        # end generated keywords
        **unknown: Never,
    ) -> None:
        keywords = SessionKeywords.from_call(locals())
        hint = 'goal="val_loss" and session.log(val_loss=...)'
        checks.check_goal_is_evaluated(keywords.training, goal=goal, hint=hint)
        config = make_run_config(model, optimizer, data, keywords)
        self._use_config(replace(config, is_custom_loop=True, on_event=config.on_event or SessionPrinter()))

    @classmethod
    def from_config(cls, config: RunConfig) -> Self:
        """Return a session for a config that has already been validated."""
        session = cls.__new__(cls)
        session._use_config(config)
        return session

    def _use_config(self, config: RunConfig) -> None:
        self._interception = intercept.active()
        self.config = config = config if self._interception is None else self._interception.redirect(config)
        self.training = config.training
        self.model = config.model
        self.state = State(
            epochs=self.training.epochs,
            max_steps=self.training.max_steps,
            goal=None if config.goal is None else f"{config.goal} ({config.mode})",
        )
        self._exit_stack = contextlib.ExitStack()
        self._phase = "new"
        self._losses: dict[CodeType | int, BatchLoss] = {}
        self._end_reason: str | None = None

    # --- __enter__ and __exit__ --------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Set up the run. Invalid input raises before a new run folder is created."""
        if self._phase != "new":
            raise UsageError(
                "a session can be entered only once", got="a second `with`", try_="a new Session with the same run"
            )
        with contextlib.ExitStack() as undo:
            undo.callback(self._exit_stack.close)
            self.run = setup(self.config, self.state, self._exit_stack)
            self._loop = BatchLoop(self.run)
            self.run.watch_for_stalls()
            with self._logs_failure():
                self.run.callbacks.on_start(self.run)
            self._loop.log_pending_events()
            if not self.model.training:
                # Skip this if the model is already in training mode: train() would also switch submodules that the user
                # deliberately keeps in eval mode, such as a frozen BatchNorm.
                self.model.train()
            undo.pop_all()
        self._phase = "entered"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # torch reports a failed GPU wherever something next waits for it, which may be the user's own code.
        explained = explain_gpu_failure(error)
        if explained is not None:
            explained.__cause__ = error
        elif isinstance(error, Exception) and not isinstance(error, WhetError):
            note_failed_layer(error, self.model)
        try:
            failure = self._loop.final_save(error) or self.run.callbacks.error
            # on_end runs after the final save, so that a failing callback cannot cost the last checkpoint.
            try:
                self.run.callbacks.on_end(self.state, error or failure)
            except Exception as raised:
                failure = failure or raised
            error_to_log = explained or error or failure
            with contextlib.suppress(Exception) if error_to_log is not None else contextlib.nullcontext():
                self._end_reason = describe_end(self.state, self.config, error_to_log)
                self.run.log.end(self.state, error_to_log, reason=self._end_reason)
            if error is None and failure is not None:
                raise failure
        finally:
            self._phase = "left"
            is_failing = error is not None or sys.exc_info()[0] is not None
            # If the session is already failing, suppress errors of the cleanup: the first error is the one to report.
            with contextlib.suppress(WhetError) if is_failing else contextlib.nullcontext():
                self._exit_stack.close()
        if explained is not None:
            raise explained from error
        if error is None and self._interception is not None:
            self._interception.after_session(self.config)
        if error is None and not self.is_finished and self.run.stop_signals.signal == signal.SIGINT and is_notebook():
            # "Run all" must not continue with cells that use a half-trained model.
            raise KeyboardInterrupt(f"saved at step {self.state.step:,}; run the cell again to resume")

    @contextlib.contextmanager
    def _logs_failure(self) -> Iterator[None]:
        """Log the end of a session that fails before its loop, so that the corrected program can start over."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):
                self.run.log.end(self.state, error, reason=describe_end(self.state, self.config, error))
            raise

    # --- the training loop -------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[GlobalBatch]:
        """Yield the remaining global batches, and carry out the requests of callbacks in between."""
        self._entered_run()
        return self._loop.batches()

    def register(self, name: str, obj: Any) -> Any:
        """Save and restore one of your objects with the run, and return it. Call this before the first batch.

        The object must have `state_dict` and `load_state_dict`, or be a list, dict, set, deque, tensor, array or random
        generator that you change in place. If the run resumes, the saved state is loaded into it here.
        """
        self._entered_run()
        if self._loop.has_begun:
            hint = f"session.register({name!r}, ...) before `for batch in session`"
            raise UsageError("an object is registered too late", got="the first batch has been read", try_=hint)
        self.run.registered.add(name, obj)
        return obj

    def step(self, loss: LossFunction, batch: GlobalBatch, *, optimizer: str | None = None, every: int = 1) -> None:
        """Run one optimizer step on a global batch: split, forward, backward, clip, update, EMA, log.

        `optimizer` selects one of several optimizers by name; only its parameters get gradients and are updated. With
        `every=5`, it steps on every fifth batch.
        """
        self._entered_run()
        if self._interception is not None:
            self._interception.before_step(self.config, loss, run=self.run)
        self._loop.step(self._adapted(loss), batch, optimizer=optimizer, every=every)

    def manual(self, batch: GlobalBatch) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that yields the data of a batch, for your own backward pass and optimizer steps.

            with session.manual(batch) as data:
                loss = loss_fn(model(data.x), data.y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.log_loss(loss)

        The batch is not split. The step is not captured, checked for NaN, or repeated after running out of memory.
        If you have set `precision` to bf16, the block runs under autocast.
        """
        self._entered_run()
        if self._interception is not None:
            self._interception.before_step(self.config, checks.manual_loss, run=self.run)
        return self._loop.manual(batch)

    def log_loss(self, loss: Tensor) -> None:
        """Log the loss of a manual step, inside its `with` block. It is read later, so nothing waits for the device."""
        self._entered_run()
        self._loop.log_loss(loss)

    def due(self, what: str) -> bool:
        """Return whether an evaluation is due: every `eval_every` steps or after each epoch, and after the last step.

        `what` is "evaluate". An evaluation that was due when the run stopped is due again after a resume.
        """
        if what != "evaluate":
            raise UsageError("only an evaluation can be due", got=what, try_='session.due("evaluate")')
        if self._phase == "entered":
            self._loop.finish_batch()
        state, every = self.state, self.training.eval_every
        if state.step in (0, state.evaluated_step) or (self.is_finished and self.run.has_logged("")):
            return False
        is_time = state.position.samples == 0 if every == "auto" else state.step % every == 0
        return is_time or self.is_finished

    # --- evaluating and logging --------------------------------------------------------------------------------------

    def evaluate(self, evaluate: Evaluate, data: Any, *, prefix: str = "", use_best: bool = False) -> dict[str, float]:
        """Evaluate on `data`, log the metrics and return them. The training state is unchanged afterward.

        If `ema` is on, the averaged weights are used. With `use_best`, the checkpoint with the best goal metric is
        used.
        """
        run, start, goal = self._entered_run(), time.perf_counter(), self.config.goal
        self._loop.finish_batch()
        fields: dict[str, Any] = {}
        if use_best:
            with use_best_weights(run) as best_step:
                returned = run.executor.evaluate(evaluate, data)
            # Loading and restoring weights invalidates the executor's record of the tensors that a step changes.
            run.executor.reset_rollback_snapshot()
            fields["weights"] = store.checkpoint_name(best_step)
        else:
            returned = run.executor.evaluate(evaluate, data)
        values = {f"{prefix}{name}": value for name, value in returned.items()}
        metrics = scalar_metrics(values)
        run.log.add_seconds("evaluate", time.perf_counter() - start)
        if goal is not None and prefix in ("", "val_") and goal not in metrics:
            raise UsageError("the goal is not among the metrics", got=goal, try_=" or ".join(metrics))
        self._log(values, **fields)
        return metrics

    def evaluate_loss(
        self, loss: LossFunction, data: Any, *, prefix: str = "val_", use_best: bool = False
    ) -> dict[str, float]:
        """Evaluate the loss function on `data` in eval mode and the planned precision, and log it as `val_loss`.

        The result is the mean over all samples or, if the loss returns pairs (sum, weight), the total sum divided by
        the total weight.
        """
        run = self._entered_run()
        evaluation = LossEvaluation(self._adapted(loss), partial(run.device.autocast, run.plan.precision))
        return self.evaluate(evaluation, data, prefix=prefix, use_best=use_best)

    def batches(self, data: Any) -> Iterator[Any]:
        """Yield micro-batches of `data` on the device, in original order and with the planned evaluation batch size."""
        return self.run.executor.batches(data)

    def log(self, **values: Any) -> None:
        """Log metrics. The goal metric selects the best checkpoint and drives early stopping and the plateau schedule.

        `confusion` ({"labels": [...], "counts": [[...]]}) and `samples` (a list of dicts) are kept for the report.
        """
        self._log(values)

    @property
    def progress(self) -> Progress:
        """The progress of the run: step, epoch, samples and total_steps. Read-only and always current."""
        return Progress(self.state)

    @property
    def best(self) -> BestStep | None:
        """The best evaluation of the goal so far; None without a goal or before its first evaluation."""
        state, goal = self.state, self.config.goal
        if goal is None or state.best_step is None or state.best_score is None:
            return None
        value = state.best_score if self.config.mode == "max" else -state.best_score
        return BestStep(step=state.best_step, metric=goal, value=value)

    @property
    def end_reason(self) -> str | None:
        """Why the session ended, such as "all 3 epochs done" or "stopped by Ctrl-C"; None while it is running."""
        return self._end_reason

    @property
    def plan(self) -> Plan:
        """The plan of the run. It may change during the run, for example after an out-of-memory error."""
        return self.run.plan

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done or early stopping has ended the run."""
        return self.state.is_finished

    @property
    def exit_code(self) -> int:
        """The exit code for the process: 0, or 128 plus the number of the signal that stopped the run."""
        return 0 if self.is_finished else self.run.stop_signals.exit_code

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _entered_run(self) -> RunContext:
        """Return the live run. Raise UsageError outside `with`, where the session has no device, data or lock."""
        if self._phase != "entered":
            got = f"a session that is {self._phase}"
            raise UsageError(
                "a session must be used in a `with` statement", got=got, try_="with whet.Session(...) as session:"
            )
        return self.run

    def _adapted(self, loss: LossFunction) -> BatchLoss:
        # Most loops pass the same functions in every step, or define them anew from the same code, so inspect their
        # signatures only once. A decorated function may have the signature of another one, and has attributes.
        is_plain = type(loss) is FunctionType and not loss.__dict__
        key = loss.__code__ if is_plain else id(loss)
        known = self._losses.get(key)
        if known is None:
            if len(self._losses) >= _MAX_LOSSES:
                self._losses.clear()
            # The stored object keeps a reference to the function, so its id is not reused.
            known = self._losses[key] = adapt_loss(loss, self.model)
        elif known.function is not loss:
            known.function, known.is_observed = loss, False
        return known

    def _log(self, values: Mapping[str, Any], **fields: Any) -> None:
        checks.check_metric_names({*values})
        run, state, goal = self._entered_run(), self.state, self.config.goal
        self._loop.finish_batch()
        values = normalize_metrics(values)
        metrics = scalar_metrics(values)
        state.evaluated_step = state.step
        run.log.event("eval", step=state.step, **fields, **values)
        if goal is not None and goal in metrics:
            # Scores are maximized everywhere below this point, so negate "min" metrics here.
            score = metrics[goal] if self.config.mode == "max" else -metrics[goal]
            state.record_score(score)
            run.rates.observe(score)
        run.pending |= run.callbacks.on_evaluate(state, metrics)
