"""Session: the live object of a run, and its training loop.

with whet.Session(model, optimizer, data, global_batch_size=32, run="runs/mine") as session:
    for batch in session:
        session.step(loss, batch)
        if session.due("evaluate"):
            session.log(accuracy=...)
"""

import contextlib
import gc
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from whet.base.errors import UsageError, WhetError
from whet.base.process import gc_disabled, stop_message
from whet.checkpoint import store
from whet.data.batch import GlobalBatch, MicroBatch
from whet.distributed.group import current_group
from whet.machine.desktop import NO_CAFFEINATE_MESSAGE, prevent_sleep
from whet.machine.pressure import ReadConditions
from whet.plan.plan import Plan
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.run.events import History
from whet.run.folder import Run, rewrite_parts
from whet.step.loss import LossFunction
from whet.step.optimizers import OptimizerChoice
from whet.training.callback import State
from whet.training.callbacks.event_log import EventHandler
from whet.training.callbacks.health import Health, held_memory
from whet.training.callbacks.stop_signals import StopSignals
from whet.training.callbacks.thermal import ThermalCare
from whet.training.checkpointer import Urgency
from whet.training.checks import (
    check_current_batch,
    check_entered,
    check_epoch_complete,
    check_metric_names,
    check_one_step,
    check_types,
)
from whet.training.evaluator import Evaluate, use_best_weights
from whet.training.executor import GuardedSteps, RollbackRequiredError
from whet.training.learning_rates import LearningRates
from whet.training.metrics import normalize_metrics, scalar_metrics
from whet.training.rank_sync import RankSync
from whet.training.restore import RestoredRun, with_earlier_inexactness
from whet.training.resume import run_exists
from whet.training.setup import make_run_config, setup
from whet.training.training_config import parse_training_config
from whet.training.tune import OpenStepBench, report_lines, tuned_plan
from whet.verify.trainable import OutputFunction


class Session:
    """Makes optimizer steps, writes them down, saves and resumes. Enter it, iterate over it, step.

    `run` is the folder; without one nothing is written. `device` is auto, mps, cuda, cuda:1 or cpu. `overrides` are
    settings of the plan that you decide (micro_batch, precision, threads, ...; see docs/rules). `plan` is one that
    `whet.tune` or `whet.make_plan` made for this training, for a new run. `goal` names the metric
    that decides the best checkpoint, and `mode` whether it should be "max" or "min". `init_from` is a run whose
    weights a new one starts with. `allow` names what may be other than it was when a run goes on: "data", "batch".
    `show` is told of every event. `vitals` reads the machine while it trains; its own sensors if not given. `outputs`
    is given for a causal model: from a micro-batch to what it gives, (batch, length, ...); before the first step it is
    tried whether that is causal. All other keywords are fields of `Training`:
    global_batch_size, epochs, max_steps, seed, shuffle, schedule, warmup_steps, clip, ema, eval_every, patience,
    epochs_per_sitting.

    A run that goes on keeps what it was started with: changed training, wishes or data are refused by name, and the
    learning rates are the checkpoint's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | OptimizerChoice,
        data: Any,
        *,
        run: str | Path | None = None,
        device: str = "auto",
        overrides: Mapping[str, Scalar] | None = None,
        plan: Plan | None = None,
        workload: Workload | None = None,
        goal: str | None = None,
        mode: str = "max",
        recipe: str = "session",
        config: Mapping[str, Any] | None = None,
        command: list[str] | None = None,
        init_from: str | Path | None = None,
        allow: Collection[str] = (),
        attach: Mapping[str, bytes] | None = None,
        show: EventHandler | None = None,
        vitals: ReadConditions | None = None,
        outputs: OutputFunction | None = None,
        **training: Any,
    ) -> None:
        check_types(model, optimizer, mode)
        self.training = parse_training_config(training)
        self.model = model
        self.progress = State()
        self.run: Run | None = None
        self._request = make_run_config(
            model,
            optimizer,
            data,
            self.training,
            run=run,
            device=device,
            overrides=overrides,
            plan=plan,
            workload=workload,
            recipe=recipe,
            config=config,
            allow=allow,
            command=command or [],
            init_from=init_from,
            attach=attach or {},
            outputs=outputs,
        )
        self._goal, self._mode = goal, mode
        self._show, self._vitals = show, vitals
        self._stop = StopSignals()
        self._closing = contextlib.ExitStack()
        self._state = "new"
        self._current: GlobalBatch | None = None
        self._is_in_step = False
        self._is_best_unsaved = False
        self._went_back = False

    def tune(self, loss: LossFunction, *, open_bench: OpenStepBench | None = None) -> None:
        """Before entering: measures what is fastest here, if this is a new run that is long enough to earn it back."""
        if not current_group().is_alone:
            if current_group().is_first:
                report_lines(self._show, "not measured: the steps of several processes are planned by rules")
        elif self._request.plan is None and not run_exists(self._request.path):
            plan = tuned_plan(self._request, loss, open_bench=open_bench, show=self._show)
            self._request = replace(self._request, plan=plan)

    # --- entering and leaving ----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Makes everything ready. What can be wrong is refused before a new run folder appears."""
        if self._state != "new":
            raise UsageError("a session is entered once", got="a second `with`", try_="a new Session with the same run")
        with contextlib.ExitStack() as undo:
            undo.callback(self._closing.close)
            self._enter()
            undo.pop_all()
        self._state = "entered"
        return self

    def _enter(self) -> None:
        opened = setup(self._request, show=self._show, closing=self._closing)
        parts = opened.parts
        self.run, self.device, self.source, self.total_steps = opened.run, parts.device, parts.source, parts.total_steps
        self._stepper, self._schedule = parts.stepper, parts.schedule
        self._rates = LearningRates(parts.stepper.optimizer, parts.schedule, parts.base_rates)
        self._closing.callback(self._rates.put_back)
        self._soundness, self._recorder = opened.soundness, opened.recorder
        self._execution, self._keeper = opened.execution, opened.keeper
        self._group, self._meeting = parts.group, RankSync(parts.group, opened.keeper)
        self._group.headway.is_compiled = self.plan.compile != "off"
        self._steps = GuardedSteps(self._execution, self._stepper, self._soundness, self._recorder)
        self._closing.enter_context(gc_disabled())
        if self.run is not None and not opened.is_new and self._group.is_first:
            self.run = rewrite_parts(self.run, plan=self.plan.as_json(), config=self._request.config)
        if opened.found is not None and self._keeper is not None:
            restored = self._keeper.restore(opened.found, plan=self.plan)
            self._go_on_from(restored)
            self._execution.moved_from = restored.told.get("moved_from")
            self._tell("resume", with_earlier_inexactness(restored.told, self.run))
        else:
            # A run that was killed before its first checkpoint begins again, and its steps count no more.
            self._tell("start" if opened.is_new else "resume", {})
            # The very first state too: who calls again with the same objects must not start from trained weights.
            self._save("last")
        for reason in opened.changes:
            self._recorder.event("plan", step=self.progress.step, message=reason, exact=False, reason=reason)
        wants_awake = self.plan.keep_awake == "on"
        if self._closing.enter_context(prevent_sleep(wants_awake)) != wants_awake:
            self._recorder.event("plan", step=self.progress.step, message=NO_CAFFEINATE_MESSAGE)
        self._tell_news()
        self._first_epoch = self.progress.position.epoch
        self._epoch_began = time.monotonic()
        self._stop.say = self._tell_stopping
        self._closing.enter_context(self._stop)
        self._governor = ThermalCare(self.plan, self._recorder, self.device, reader=self._vitals)
        self._governor.save = self._save_if_sound if self._group.is_alone else self._meeting.ask_to_save
        self._governor.should_stop = lambda: self._stop.signal is not None or self.is_finished
        self._closing.enter_context(self._governor)
        machine = self.plan.machine
        self._health = Health(self._recorder, self.device, self._governor, memory_bytes=machine.memory_bytes)
        if not self.model.training:
            # Otherwise it is left as it is: a part may be in eval mode on purpose.
            self.model.train()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            # In the middle of a step the last checkpoint is what counts; and who stops twice wants no more waiting.
            # Who holds a part of the model only can save nothing alone.
            is_whole = kind is None or (issubclass(kind, Exception) and not self._is_in_step and self._holds_all)
            unsaved: Exception | None = None
            try:
                if is_whole and self._is_sound(looks_closely=True):
                    self._save("last")
                elif is_whole and kind is None:
                    self._soundness.refuse()
            except Exception as failure:
                unsaved = failure
            if self._keeper is not None:
                self._keeper.close()
            if kind is None and unsaved is not None:
                kind, error = type(unsaved), unsaved
            with contextlib.suppress(Exception) if kind is not None else contextlib.nullcontext():
                state = "done" if self.is_finished else "stopped"
                if kind is not None and issubclass(kind, Exception):
                    state = "failed"
                reason = {} if kind is None else {"reason": f"{kind.__name__}: {error}"}
                self._recorder.end(step=self.progress.step, state=state, **reason)
            if unsaved is not None and error is unsaved:
                raise unsaved
        finally:
            self._state = "left"
            is_failing = kind is not None or sys.exc_info()[0] is not None
            # What went wrong first is what is told.
            with contextlib.suppress(WhetError) if is_failing else contextlib.nullcontext():
                self._closing.close()

    # --- the run -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[GlobalBatch]:
        """The global batches that are left, from where the run stands."""
        check_entered(self._state)
        while not self.is_finished:
            before = self.progress.step
            read = self._group.headway.reading(self.source.batches(self.progress.position))
            for batch in self._recorder.timed(read):
                self._current = batch
                yield batch
                epochs_done = batch.after.epoch if batch.is_last_of_epoch else None
                is_last = self.is_finished or self._has_sat(epochs_done)
                due = self._meeting.due_here(before + 1, epochs_done=epochs_done)
                # What is a pure function of the step is known to all processes; the rest is told when they meet.
                must_meet = is_last or epochs_done is not None or self._is_best_unsaved or due == "asked"
                must_meet = must_meet or self._went_back
                if not must_meet and not self._meeting.is_due(before + 1):
                    check_one_step(self.progress.step - before)
                    before += 1
                    continue
                agreed = self._meeting.meet(
                    before + 1, signal=self._stop.signal, due=due, is_broken=self._soundness.broken is not None
                )
                due, self._stop.signal = agreed.due, self._stop.signal or agreed.signal
                is_last = is_last or agreed.signal is not None
                is_due = due != "no" or self._is_best_unsaved
                if not self._went_back and not self._steps.are_sound(
                    self.progress.step,
                    looks_closely=is_due or is_last or (agreed.is_broken and not self._group.is_alone),
                ):
                    # What is pending belongs to steps that will be made again.
                    self._recorder.read()
                    self._go_back(self._soundness.go_back())
                if self._went_back:
                    self._went_back = False
                    break
                check_one_step(self.progress.step - before)
                before += 1
                if is_due:
                    # The best state must be this one; a place that was asked for is kept. Only the clock may be late.
                    self._save("due" if due == "time" and not self._is_best_unsaved else "now")
                if epochs_done is not None:
                    self._end_epoch(epochs_done)
                self._governor.between_steps(before)
                self._health.between_steps(self.progress)
                if is_last or (self._stop.signal is not None and self._group.is_alone):
                    return
            else:
                check_epoch_complete(self.progress.position)

    def step(self, loss: LossFunction, batch: GlobalBatch) -> None:
        """Makes one optimizer step from a global batch: cut, forward, backward, weigh, clip, update, average, log."""
        check_entered(self._state)
        check_current_batch(batch, current=self._current, position=self.progress.position)
        progress = self.progress
        number = progress.step + 1
        lr = self._rates.set_for(number)
        # Not before: what was refused so far has changed nothing, and the steps before it are saved.
        self._is_in_step = True
        try:
            with self._group.headway.working(f"step {number:,}"):
                outcome = self._steps.make(loss, batch, number=number)
        except RollbackRequiredError as error:
            self._go_back(str(error))
            self._is_in_step = False
            return
        self._is_in_step = False
        progress.step = number
        progress.position = batch.after
        progress.samples += len(batch)
        if outcome is None:
            return
        # Reads losses of earlier steps, and so may wait for the device.
        with self._group.headway.working(f"step {number:,}"):
            self._recorder.step(
                outcome,
                ids=batch.ids,
                step=number,
                epoch=batch.after.epoch - batch.is_last_of_epoch,
                samples=progress.samples,
                lr=lr,
            )
            self._tell_news()

    def due(self, what: str) -> bool:
        """Whether it is time to "evaluate": every `eval_every` steps or at the end of an epoch, and at the very end.

        Also when a run goes on that was stopped before an evaluation that was due.
        """
        if what != "evaluate":
            raise UsageError("only an evaluation can be due", got=what, try_='session.due("evaluate")')
        every = self.training.eval_every
        progress = self.progress
        if progress.step in (0, progress.evaluated_step) or (self.is_finished and self.has_logged("")):
            return False
        is_time = progress.position.samples == 0 if every is None else progress.step % every == 0
        return is_time or self.is_finished

    def evaluate(self, evaluate: Evaluate, data: Any, *, prefix: str = "", use_best: bool = False) -> dict[str, float]:
        """Evaluates on `data` with the averaged weights if there are any, logs the metrics, and disturbs nothing.

        With `use_best` the weights are those of the best step by the goal, from its checkpoint.
        """
        start = time.perf_counter()
        told: dict[str, Any] = {}
        if use_best:
            with use_best_weights(self._stepper, self._keeper, self.progress) as best_step:
                given = self._execution.evaluate(evaluate, data, step=self.progress.step)
            self._execution.expect_changes()
            told["weights"] = store.checkpoint_name(best_step)
        else:
            given = self._execution.evaluate(evaluate, data, step=self.progress.step)
        found = {f"{prefix}{name}": value for name, value in given.items()}
        metrics = scalar_metrics(found)
        self._recorder.spent("evaluate", time.perf_counter() - start)
        if self._goal is not None and not prefix and self._goal not in metrics:
            raise UsageError("the goal is not among the metrics", got=self._goal, try_=" or ".join(metrics))
        self._log(found, **told)
        return metrics

    def batches(self, data: Any) -> Iterator[MicroBatch]:
        """Data in its own order, on the device, as much at once as the plan evaluates."""
        return self._execution.batches(data)

    def log(self, **found: Any) -> None:
        """Writes metrics down; the goal among them decides the best checkpoint, plateau and early stop.

        A `confusion` ({"labels": [...], "counts": [[...]]}) and `samples` (a list of maps) are kept for the report.
        """
        self._log(found)

    def _log(self, found: Mapping[str, Any], **told: Any) -> None:
        check_metric_names({*found})
        found = normalize_metrics(found)
        metrics = scalar_metrics(found)
        self.progress.evaluated_step = self.progress.step
        self._recorder.event("eval", step=self.progress.step, **told, **found)
        if self._goal is None or self._goal not in metrics:
            return
        score = metrics[self._goal] if self._mode == "max" else -metrics[self._goal]
        self._is_best_unsaved = self.progress.judge(score)
        self._schedule.observe(score)

    @property
    def plan(self) -> Plan:
        """How the run is executed; it may change while the run learns what fits."""
        return self._execution.plan

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done, or nothing got better for as long as `patience` says."""
        progress, training = self.progress, self.training
        is_over = progress.position.epoch >= training.epochs or progress.step >= (training.max_steps or float("inf"))
        return is_over or (training.patience is not None and progress.num_worse >= training.patience)

    def has_logged(self, prefix: str) -> bool:
        """Whether the run folder holds a metric of that kind for the newest step."""
        if self.run is None:
            return False
        # What the first process has written down others may see a little later.
        return bool(self._group.share(self._has_logged(prefix, self.run) if self._group.is_first else None))

    def _has_logged(self, prefix: str, run: Run) -> bool:
        newest = (e for e in History(run).backwards(kinds=("eval",)) if e.step == self.progress.step)
        return any(name.startswith(prefix) for event in newest for name in event.fields)

    @property
    def exit_code(self) -> int:
        """0, or what a shell expects of a process that was asked to stop and did."""
        return 0 if self.is_finished else self._stop.exit_code

    # --- the parts ---------------------------------------------------------------------------------------------------

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Begins a sitting in the log."""
        goal = {"goal": self._goal, "mode": self._mode}
        self._recorder.event(kind, step=self.progress.step, total_steps=self.total_steps, **goal, **fields)

    def _tell_news(self) -> None:
        """What device and data have to say; a device that has failed without an error stops the run here."""
        for kind, fields in (*self.device.monitor.events(), *self.source.events()):
            self._recorder.event(kind, step=self.progress.step, **fields)
        self.device.monitor.check()

    def _tell_stopping(self, number: int) -> None:
        """From a signal handler, in the middle of whatever it is."""
        when = "after this step" if self._group.is_alone else "after the next step at which all processes meet"
        when = "once all is evaluated and saved" if self.is_finished else when
        self._recorder.interject("stopping", step=self.progress.step, words=stop_message(number, when=when))

    def _save(self, urgency: Urgency) -> None:
        if self._keeper is not None:
            self._keeper.save(self.progress, base_rates=self._rates.base, plan=self.plan, urgency=urgency)
            self._is_best_unsaved = False

    def _save_if_sound(self) -> None:
        if self._is_sound(looks_closely=True):
            self._save("now")

    def _end_epoch(self, epochs_done: int) -> None:
        """Once an epoch: what would cost too much in every step."""
        now, memory = time.monotonic(), self.device.memory.usage()
        self._recorder.event(
            "epoch",
            step=self.progress.step,
            epoch=epochs_done,
            epoch_seconds=now - self._epoch_began,
            memory=asdict(memory),
            state_bytes=held_memory(self._stepper),
            num_shapes=len(self._execution.shapes),
        )
        self._epoch_began = now
        gc.collect()
        if self.plan.empty_cache == "per epoch":
            self.device.memory.empty_cache()

    def _has_sat(self, epochs_done: int | None) -> bool:
        sitting = self.training.epochs_per_session
        return epochs_done is not None and sitting is not None and epochs_done - self._first_epoch >= sitting

    @property
    def _holds_all(self) -> bool:
        return self._stepper.strategy.holds_all

    def _is_sound(self, *, looks_closely: bool) -> bool:
        return self._steps.are_sound(self.progress.step, looks_closely=looks_closely)

    def _go_on_from(self, restored: RestoredRun) -> None:
        self.progress = restored.progress
        self._rates.go_on_with(restored.base_rates)

    def _go_back(self, reason: str) -> None:
        """Puts the run back to its newest checkpoint; the batches since then come again."""
        found = None if self._keeper is None else self._keeper.newest()
        if found is None or self._keeper is None:
            raise WhetError(
                "the run cannot go back: it has no checkpoint", got=reason, try_="run=DIR, so that there is one"
            )
        restored = self._keeper.restore(found, plan=self.plan)
        self._go_on_from(restored)
        self._execution.expect_changes()
        self._went_back = True
        self._tell("resume", {**restored.told, "rollback_reason": reason})
        # Whatever was read of the abandoned steps since is void with them.
        self._soundness.broken = None
