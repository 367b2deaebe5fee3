"""Time optimizer steps of the user's model and data in this process, without a trace."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle, islice
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.autotune.candidates import has_attention_choice, plan_with, predicted_bytes
from whet.autotune.step_bench import FailureKind, ProbeFailedError, SettingsAgreement
from whet.base.errors import WhetError
from whet.base.process import gc_disabled
from whet.data.adapters import AbstractSource, TensorSource
from whet.data.batch import GlobalBatch, MicroBatch, Position
from whet.data.split import LengthMode
from whet.device.abstract import AbstractDevice
from whet.device.cpu import preserve_num_threads
from whet.device.errors import is_out_of_memory
from whet.device.open import open_device
from whet.device.rng import preserve_rng
from whet.plan.plan import Plan, make_plan
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.step.apply_plan import apply_kernels, apply_plan
from whet.step.ema import named_tensors
from whet.step.graphs import GraphedStepper
from whet.step.loss import LossFunction
from whet.step.model_contexts import CompiledCalls, WeightLayout, compile_obstacle
from whet.step.optimizers import OptimizerChoice, set_learning_rate
from whet.step.rollback import release_traceback
from whet.training.building import TrainingParts, build, open_source_for_plan
from whet.training.model_check import run_check
from whet.training.start_checks import skip_reason
from whet.training.training_config import TrainingConfig
from whet.training.workload import calls_attention, measure_activation_bytes
from whet.verify.isolation import preserve_model
from whet.verify.parity.compare import compare_precision
from whet.verify.start.compiled import compare_compiled_with_eager


@contextmanager
def preserve_state(model: nn.Module, optimizer: Optimizer | OptimizerChoice) -> Iterator[None]:
    """Whatever happens to them inside, model and optimizer are afterwards as they were."""
    put_back = _snapshot(vars(optimizer), _parameter_ids(optimizer)) if isinstance(optimizer, Optimizer) else None
    with preserve_model(model):
        try:
            yield
        finally:
            if put_back is not None:
                put_back()


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    """They belong to the model, which is put back by itself."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _snapshot(value: Any, leave: set[int]) -> Callable[[], Any]:
    """How to have this value again: the same object, since a scheduler of yours may hold on to it."""
    if id(value) in leave or not isinstance(value, Tensor | dict | list | tuple):
        return lambda: value
    if isinstance(value, Tensor):
        values = value.detach().clone()
        return lambda: _refill(value, values)
    if isinstance(value, dict):
        named = {name: _snapshot(part, leave) for name, part in value.items()}

        def refill() -> Any:
            parts = {name: part() for name, part in named.items()}
            value.clear()
            value.update(parts)
            return value

        return refill
    placed = [_snapshot(part, leave) for part in value]

    def replace() -> Any:
        parts = [part() for part in placed]
        if isinstance(value, list):
            value[:] = parts
        return value

    return replace


@torch.no_grad()
def _refill(tensor: Tensor, values: Tensor) -> Tensor:
    if tensor.device == values.device and tensor.shape == values.shape and tensor.dtype == values.dtype:
        tensor.copy_(values)
    else:
        tensor.data = values
    return tensor


NUM_BATCHES = 8
"""The global batches that are stepped on in turn: enough for the lengths of the data to show, and few enough that all
are met before time is taken. On an H200 half-precision attention took 85 ms more for each new shape, in one step."""
_WARMUP_STEPS, _WARMUP_SECONDS = 2, 2.0


class LocalStepBench:
    """One training on this machine; enter it, prepare settings, and make their steps in any order."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | OptimizerChoice,
        data: Any,
        training: TrainingConfig,
        *,
        loss: LossFunction,
        plan: Plan,
        may_compile: bool = False,
    ) -> None:
        """`may_compile` is for a process of its own: compiling cannot be cut short in this one."""
        self.may_compile = may_compile
        self.ends_at: float | None = None
        self.tick: Callable[[], None] | None = None
        self.about = evidence_key(plan, model)
        """What is measured here, as evidence is kept by: as it was asked for, without what is learnt on the way."""
        self._asked = plan
        self.plan = plan
        """The plan by rules alone; what a sample needs is known in it once the rig is entered."""
        self.model = model
        self.loss = loss
        self._optimizer = optimizer
        self._data = data
        self._training = training
        self._closing = ExitStack()
        self._sources: dict[tuple[Scalar, ...], AbstractSource] = {}
        self._batches: list[GlobalBatch] = []
        self._is_on: torch.device | None = None
        self._floors: dict[torch.device, int] = {}

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self._closing.close)
            self._closing.enter_context(preserve_state(self.model, self._optimizer))
            self.layout = WeightLayout(self.model, keep_addresses=True)
            own = self._optimizer if isinstance(self._optimizer, Optimizer) else None
            self._closing.callback(self.layout.use, "contiguous", own)
            self._closing.enter_context(preserve_num_threads())
            # As in a training: a pass of the collector would be counted as some step's time.
            self._closing.enter_context(gc_disabled())
            device = open_device(self.plan.device).device
            self._closing.enter_context(preserve_rng(device))
            if self.plan.freed_memory == "kept":
                self._closing.enter_context(device.memory.keep_freed())
            self._learn_what_a_sample_needs()
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close_sources()
        self._closing.close()
        for place in self._floors:
            open_device(str(place)).device.memory.empty_cache()

    # --- what a search asks ------------------------------------------------------------------------------------------

    recovery_seconds = 0.0
    """Nothing is stopped in this process."""

    def clock(self) -> float:
        return time.perf_counter()

    def plan_with(self, settings: Mapping[str, Scalar]) -> Plan:
        """The plan as it would be with these settings; what depends on them is decided again."""
        return plan_with(self.plan, settings)

    def use_batch(self, size: int) -> None:
        """From here on a step has so many samples, and the rules plan for it anew."""
        self._close_sources()
        self._training = replace(self._training, global_batch_size=size)
        num_steps = self._training.total_steps(self.plan.workload.num_samples)
        changed = {"global_batch_size": size, "num_steps": num_steps or None}
        self._use_workload(self.plan.workload.model_copy(update=changed))
        asked = self._asked.workload.model_copy(update=changed)
        self.about = evidence_key(self._asked.model_copy(update={"workload": asked}), self.model)

    def predicted_bytes(self, settings: Mapping[str, Scalar]) -> int | None:
        return predicted_bytes(self.plan, settings)

    def agreement(self, settings: Mapping[str, Scalar], *, seconds: float) -> SettingsAgreement:  # noqa: ARG002
        """Whether a precision computes the same as fp32 on the same device, on a few samples of the data."""
        with _probe_errors():
            parts = self._built(self.plan_with(settings))
            plan, device = parts.plan, parts.device
            self.move_to(device)
            micro = self.few_samples(parts, at_most=8).map_tensors(device.put)
            with apply_kernels(plan, device):
                found = compare_precision(self.model, self.loss, micro, device, plan.precision)
        return SettingsAgreement(
            loss_error=found.loss_error, gradient_error=found.gradient_error, bound=found.bound, agrees=found.agrees
        )

    def prepare(self, settings: Mapping[str, Scalar], *, seconds: float) -> "LocalPreparedStep":
        """Builds and makes the first steps; a process of its own is needed to hold `seconds` at all costs."""
        start = time.perf_counter()
        plan = self.plan_with(settings)
        if plan.compile != "off" and not self.may_compile:
            raise ProbeFailedError("compiling cannot be cut short in this process", kind="refused")
        why_not = compile_obstacle(self.model, plan) if plan.compile != "off" else None
        if why_not is not None:
            raise ProbeFailedError(why_not, kind="refused")
        gc.collect()
        with _probe_errors():
            prepared = LocalPreparedStep(self, self._built(plan))
            prepared.refuse_wrong()
            for index in range(NUM_BATCHES):
                prepared.step_seconds = prepared.step(index)
                limit = seconds if index + 1 < _WARMUP_STEPS else min(seconds, _WARMUP_SECONDS)
                if time.perf_counter() - start > limit:
                    break
        prepared.preparation_seconds = time.perf_counter() - start
        if plan.graph == "on":
            prepared.capture(seconds=seconds - prepared.preparation_seconds)
        return prepared

    # --- for prepared steps ------------------------------------------------------------------------------------------

    def batch(self, index: int) -> GlobalBatch:
        return self._batches[index % len(self._batches)]

    def move_to(self, device: AbstractDevice) -> None:
        if device.torch_device != self._is_on:
            device.put_model(self.model, self._optimizer if isinstance(self._optimizer, Optimizer) else None)
            self._is_on = device.torch_device

    def few_samples(self, parts: TrainingParts, *, at_most: int) -> MicroBatch:
        length_mode: LengthMode = parts.plan.lengths
        batch = self.batch(0)
        return next(
            iter(parts.source.micro_batches(batch, micro_batch=min(at_most, len(batch)), length_mode=length_mode))
        )

    def floor(self, device: AbstractDevice) -> int:
        """What was taken on a device, or by this process, before any model was there."""
        if device.torch_device not in self._floors:
            own = sum(t.nbytes for _, t in named_tensors(self.model) if t.device.type == device.torch_device.type)
            self._floors[device.torch_device] = max(0, (device.memory.usage().allocated or 0) - own)
        return self._floors[device.torch_device]

    def batches_of(self, source: AbstractSource) -> Iterator[GlobalBatch] | None:
        """Batches that have to be read, from the first one on and again; None where all lie ready."""
        return None if isinstance(source, TensorSource) else _repeat_epochs(source)

    # --- the parts ---------------------------------------------------------------------------------------------------

    def _built(self, plan: Plan) -> TrainingParts:
        self._is_on = None
        self.floor(open_device(plan.device).device)
        source = self._source(plan)
        return build(self.model, self._optimizer, self._data, self._training, plan, source=source, layout=self.layout)

    def _source(self, plan: Plan) -> AbstractSource:
        names = ("device", "data_location", "workers", "prefetch", "worker_start_method", "copies")
        key = tuple(plan.settings[name].value for name in names)
        if key not in self._sources:
            device = open_device(plan.device, overlaps_copies=plan.copies == "overlapped").device
            source = open_source_for_plan(
                self._data,
                device,
                plan,
                global_batch_size=self._training.global_batch_size,
                seed=self._training.seed,
                shuffle=self._training.shuffle,
            )
            self._sources[key] = source
            if not self._batches:
                # What must be read is read in the steps: here it would take time that nobody has given.
                ready = NUM_BATCHES if isinstance(source, TensorSource) else 1
                self._batches = list(islice(source.batches(Position()), ready))
        return self._sources[key]

    def _learn_what_a_sample_needs(self) -> None:
        plan = self.plan
        parts = self._built(plan)
        if has_attention_choice(plan):
            self._learn_about_attention(parts)
            plan = self.plan
        if plan.workload.activation_bytes is not None or len(self.batch(0)) < 4:
            return
        try:
            small, large = (self.few_samples(parts, at_most=size).map_tensors(parts.device.put) for size in (2, 4))
            needed = measure_activation_bytes(self.model, self.loss, small, large, device=parts.device)
        except Exception:
            # A loss may insist on more samples: then nobody knows what one of them needs.
            return
        self._use_workload(plan.workload.model_copy(update={"activation_bytes": needed}))

    def _learn_about_attention(self, parts: TrainingParts) -> None:
        micro = self.few_samples(parts, at_most=2).map_tensors(parts.device.put)
        try:
            is_called = calls_attention(self.model, self.loss, micro, device=parts.device)
        except Exception:
            # Where two samples are too few nobody knows, and no kernel is tried.
            return
        if is_called:
            workload = self.plan.workload
            self._use_workload(workload.model_copy(update={"layers": (*workload.layers, "sdpa")}))

    def _use_workload(self, workload: Workload) -> None:
        plan = self.plan
        self.plan = make_plan(plan.machine, workload, overrides=plan.overrides, conditions=plan.conditions)

    def _close_sources(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()
        self._batches.clear()


class LocalPreparedStep:
    """One plan, ready to make steps on the rig's model; others may make theirs in between."""

    preparation_seconds = 0.0
    step_seconds = 0.0

    def __init__(self, rig: LocalStepBench, parts: TrainingParts) -> None:
        self.plan = parts.plan
        self._rig = rig
        self._parts = parts
        self._reading = rig.batches_of(parts.source)
        self._compiled = CompiledCalls(rig.model, parts.plan) if parts.plan.compile != "off" else None
        self._number = 0
        # The arithmetic of an update without its effect: weights that wander off could become numbers that are slow.
        set_learning_rate(parts.stepper.optimizer, 0.0, parts.base_rates)

    def refuse_wrong(self) -> None:
        """A compiled model that computes something else than its code, or is not compiled at all, wins nothing."""
        if self._compiled is None or skip_reason(self.plan) is not None:
            return
        device, micro = self._parts.device, next(self._cut(self._rig.batch(0)))
        with self._in_force():
            found, _ = run_check(
                lambda: compare_compiled_with_eager(
                    self._rig.model, device, self._rig.loss, micro, precision=self.plan.precision
                ),
                device,
                unanswered="",
            )
        if found is not None and not found.is_usable:
            raise ProbeFailedError(str(found), kind="error")

    def step(self, index: int) -> float:
        """The seconds of one optimizer step until the device is done, reading its data included."""
        parts = self._parts
        self._number += 1
        with _probe_errors(), self._in_force():
            if self._number == _WARMUP_STEPS:
                parts.device.memory.reset_peak()
            start = time.perf_counter()
            batch = next(self._reading) if self._reading is not None else self._rig.batch(index)
            parts.stepper(self._rig.loss, self._cut(batch), num_samples=len(batch), step=self._number)
            parts.device.sync()
            seconds = time.perf_counter() - start
            if parts.stepper.graph_obstacle is not None:
                raise ProbeFailedError(parts.stepper.graph_obstacle, kind="error")
            return seconds

    def capture(self, *, seconds: float) -> None:
        """The batches once more, for what comes twice to be captured, and again, for replays to be warm."""
        start = time.perf_counter()
        for index in range(2 * NUM_BATCHES):
            self.step_seconds = self.step(index)
            if time.perf_counter() - start > seconds:
                break
        stepper = self._parts.stepper
        if isinstance(stepper, GraphedStepper):
            # The steps themselves are no cost: a run makes them anyway.
            self.preparation_seconds += stepper.capture_seconds
            if stepper.graph_obstacle is None and not stepper.num_captured:
                raise ProbeFailedError("no two batches had the same shapes", kind="error")

    def peak_bytes(self) -> int | None:
        peak = self._parts.device.memory.usage().peak
        return None if peak is None else max(0, peak - self._rig.floor(self._parts.device))

    def close(self) -> None:
        self._parts.stepper.abort()
        self._parts.stepper.release_graphs("the measurement is over")
        self._parts.stepper.optimizer.state.clear()

    def _cut(self, batch: GlobalBatch) -> Iterator[MicroBatch]:
        plan = self._parts.plan
        micro_batch, length_mode = plan.micro_batch, plan.lengths
        assert isinstance(micro_batch, int)
        return self._parts.source.micro_batches(batch, micro_batch=micro_batch, length_mode=length_mode)

    @contextmanager
    def _in_force(self) -> Iterator[None]:
        """What holds for the whole process or the whole model, only while this plan steps."""
        plan, device = self._parts.plan, self._parts.device
        self._rig.move_to(device)
        with apply_plan(
            plan,
            self._rig.model,
            device,
            layout=self._rig.layout,
            optimizer=self._parts.stepper.optimizer,
            compiled=self._compiled,
        ):
            yield


@contextmanager
def _probe_errors() -> Iterator[None]:
    """Whatever your model, loss or data raise under some settings is the end of one probe, not of the training."""
    try:
        yield
    except ProbeFailedError:
        raise
    except WhetError as error:
        raise ProbeFailedError(f"{error.what}: {error.got}", kind="error") from error
    except Exception as error:
        kind: FailureKind = "oom" if is_out_of_memory(error) else "error"
        raise ProbeFailedError(f"{type(error).__name__}: {release_traceback(error)}", kind=kind) from None


def _repeat_epochs(source: AbstractSource) -> Iterator[GlobalBatch]:
    for _ in cycle((None,)):
        yield from source.batches(Position())


def evidence_key(plan: Plan, model: nn.Module) -> dict[str, Any]:
    """What evidence holds for: this machine and software, this model, data of these shapes, these wishes."""
    return {
        "machine": plan.machine.as_json(),
        "workload": plan.workload.model_copy(update={"batch": None}).as_json(),
        "wishes": dict(plan.overrides),
        "model": [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in named_tensors(model)],
        "modules": sorted({type(module).__name__ for module in model.modules()}),
    }
