"""Apply a plan to a model and prepare its steps. During a measurement, steps of several plans alternate."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from whet.autotune.step_bench import FailureKind, LaunchFacts, ProbeFailedError
from whet.base.errors import WhetError
from whet.base.process import TimeLimitError, interrupt_after
from whet.data.batch import GlobalBatch, MicroBatch, micro_batch_shapes
from whet.data.source import AbstractSource
from whet.device.abstract import AbstractDevice
from whet.device.errors import is_out_of_memory
from whet.plan.plan import Plan
from whet.step.compilation import CompiledCalls
from whet.step.graphs import GraphedStepper
from whet.step.rollback import release_traceback
from whet.step.step import Stepper
from whet.training.model_check import run_check
from whet.training.schedule import set_learning_rate
from whet.training.start_checks import skip_reason
from whet.verify.start.compiled import compare_compiled_with_eager

if TYPE_CHECKING:
    from whet.training.step_bench import LocalStepBench

NUM_BATCHES = 8
"""Number of global batches that the steps cycle through.

This is enough to represent the lengths in the data, and few enough to run all of them once before timing starts. On an
H200, half-precision attention took an extra 85 ms in the first step of each new shape.
"""
WARMUP_STEPS = 2
"""Minimum number of warm-up steps."""
_WARM_REPLAYS = 6
"""Replays of a single shape before timing starts: 1, 2 and 4 are compared with eager steps, 3, 5 and 6 are timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltPlan:
    """A plan that has been applied to the model of a bench."""

    plan: Plan
    device: AbstractDevice
    source: AbstractSource
    stepper: Stepper
    base_rates: list[float]

    def first_samples(self, batch: GlobalBatch, size: int) -> MicroBatch:
        """Return the first samples of a batch, on the device."""
        size = min(size, len(batch))
        if self.plan.workload.split_obstacle is not None:
            size = len(batch)
        micro_batches = self.source.micro_batches(batch, micro_batch=size, length_mode=self.plan.lengths)
        return next(iter(micro_batches)).map_tensors(self.device.put)

    def split(self, batch: GlobalBatch) -> Iterator[MicroBatch]:
        return self.source.micro_batches(batch, micro_batch=self.plan.micro_batch, length_mode=self.plan.lengths)


class LocalPreparedStep:
    """A plan that is ready to run steps on the model of a bench. Steps of different plans may alternate."""

    preparation_seconds = 0.0
    """Seconds from the call of `prepare` to the end of its warm-up, plus the time for captures."""
    step_seconds = 0.0
    """Seconds of the last warm-up step."""

    def __init__(self, bench: "LocalStepBench", built: BuiltPlan) -> None:
        self.plan = built.plan
        self._bench = bench
        self._built = built
        self._reading = bench.read_batches(built.source)
        self._compiled = self._compile() if built.plan.compile != "off" else None
        self._number = self._replays_in_a_row = 0
        self._launches_at_end: LaunchFacts | None = None
        self._shapes: set[Any] = set()
        # A learning rate of 0 preserves the arithmetic of the update but not its effect: repeated steps on the
        # same batches could produce denormal numbers, which are slow to compute with.
        set_learning_rate(built.stepper.optimizer, 0.0, built.base_rates)

    def _compile(self) -> CompiledCalls:
        bench, built = self._bench, self._built
        calls = CompiledCalls(bench.model, built.plan)
        with bench.applied(built):
            micro = next(built.split(bench.batch(0)))
            calls.settle_loss(bench.loss, micro, built.device, precision=built.plan.precision)
        return calls

    @property
    def has_one_shape(self) -> bool:
        """Whether all batches so far were split into micro-batches of the same shapes."""
        return len(self._shapes) == 1

    @property
    def launches(self) -> LaunchFacts:
        return self._launches_at_end or self._current_launches()

    def _current_launches(self) -> LaunchFacts:
        stepper = self._built.stepper
        obstacle, num_captured = stepper.graph_obstacle, getattr(stepper, "num_captured", 0)
        is_captured = False if obstacle is not None else (num_captured > 0 or None)
        return LaunchFacts(is_captured=is_captured, share=stepper.launch_share, obstacle=obstacle)

    def check(self, *, seconds: float) -> None:
        """Raise ProbeFailedError if the compiled model differs from eager execution, or was not compiled at all.

        The limit of `seconds` is enforced by a separate process or, in this process, by an alarm.
        """
        if self._compiled is None or skip_reason(self.plan) is not None:
            return
        model, loss, device = self._bench.model, self._bench.loss, self._built.device
        may_slice = self.plan.workload.whole_batch_reason is None
        limit = nullcontext() if self._bench.may_compile else compile_limit(seconds)
        with probe_errors(), limit, self._applied():
            micro = next(self._built.split(self._bench.batch(0)))
            parity, _ = run_check(
                lambda: compare_compiled_with_eager(
                    model, device, loss, micro, precision=self.plan.precision, may_slice=may_slice
                ),
                device,
                failed="",
            )
        if parity is not None and not parity.is_usable:
            raise ProbeFailedError(str(parity), kind="error")

    def step(self, index: int) -> float:
        """Run one optimizer step. Return its duration in seconds, including reading data and waiting for the device."""
        device, stepper = self._built.device, self._built.stepper
        self._number += 1
        with probe_errors(), self._applied():
            # The first steps allocate optimizer state and workspaces, so the peak is measured after them.
            if self._number == WARMUP_STEPS:
                device.memory.reset_peak()
            start, num_replays, shapes = time.perf_counter(), _num_replays(stepper), []

            def micro_batches(batch: GlobalBatch) -> Iterator[MicroBatch]:
                for micro in self._built.split(batch):
                    shapes.append(micro_batch_shapes(micro))
                    yield micro

            batch = next(self._reading) if self._reading is not None else self._bench.batch(index)
            stepper(self._bench.loss, micro_batches(batch), num_samples=len(batch), step=self._number)
            device.sync()
            seconds = time.perf_counter() - start
            self._shapes.add(tuple(shapes))
            self._replays_in_a_row = self._replays_in_a_row + 1 if _num_replays(stepper) > num_replays else 0
            if stepper.graph_obstacle is not None and self.plan.graph == "on":
                raise ProbeFailedError(stepper.graph_obstacle, kind="unsupported")
            return seconds

    def capture(self, *, seconds: float) -> None:
        """Run batches until all shapes are replayed, or until the steps turn out not to be captured.

        At most, all batches run twice: the first pass captures repeated shapes, the second one warms up the replays.
        """
        stepper = self._built.stepper
        if not isinstance(stepper, GraphedStepper):
            return
        start, captured_before = time.perf_counter(), stepper.capture_seconds
        for index in range(2 * NUM_BATCHES):
            is_warm = self._replays_in_a_row >= (_WARM_REPLAYS if self.has_one_shape else NUM_BATCHES)
            if is_warm or stepper.graph_obstacle is not None or time.perf_counter() - start > seconds:
                break
            self.step_seconds = self.step(index)
        # Comparisons become rare in a run. Timed steps would have many of them.
        stepper.checks_replays = False
        # Only captures count as a cost, because a run executes the steps anyway. Those of earlier steps are counted.
        self.preparation_seconds += stepper.capture_seconds - captured_before
        if self.plan.graph == "on" and stepper.graph_obstacle is None and not stepper.num_captured:
            raise ProbeFailedError("no two batches had the same shapes", kind="unsupported")

    def peak_bytes(self) -> int | None:
        peak = self._built.device.memory.usage().peak
        return None if peak is None else max(0, peak - self._bench.floor(self._built.device))

    def close(self) -> None:
        stepper, self._launches_at_end = self._built.stepper, self.launches
        stepper.abort()
        stepper.release_graphs("the measurement is over")
        stepper.optimizer.state.clear()

    def _applied(self) -> AbstractContextManager[None]:
        return self._bench.applied(self._built, self._compiled)


def _num_replays(stepper: Stepper) -> int:
    return stepper.num_replays if isinstance(stepper, GraphedStepper) else 0


@contextmanager
def compile_limit(seconds: float) -> Iterator[None]:
    """Interrupt a compilation in this process after `seconds` and reset the state of the compiler."""
    try:
        with interrupt_after(seconds):
            yield
    except TimeLimitError:
        torch.compiler.reset()
        raise ProbeFailedError(f"interrupted after {seconds:.1f} s", kind="timeout") from None


@contextmanager
def probe_errors() -> Iterator[None]:
    """Convert errors of the user's model, loss or data to ProbeFailedError, which ends one probe but not the search."""
    try:
        yield
    except ProbeFailedError:
        raise
    except WhetError as error:
        raise ProbeFailedError(f"{error.what}: {error.got}", kind="error") from error
    except Exception as error:
        kind: FailureKind = "oom" if is_out_of_memory(error) else "error"
        raise ProbeFailedError(f"{type(error).__name__}: {release_traceback(error)}", kind=kind) from None
