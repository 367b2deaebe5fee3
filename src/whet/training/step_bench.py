"""Time optimizer steps of the user's model and data in this process.

Weights, buffers, modes, optimizer state, random generators and the number of threads are restored afterward.
`training/shipped_bench.py` runs the same code in a separate process, where a compilation can be killed. In the user's
process, an alarm interrupts it instead.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import cycle, islice, pairwise
from statistics import median
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from whet.autotune.candidates import device_kind, has_attention_choice, plan_with, predicted_bytes
from whet.autotune.step_bench import ProbeFailedError, SettingsAgreement
from whet.base.process import gc_disabled, interrupt_obstacle
from whet.data.adapters import check_dataset_size
from whet.data.batch import GlobalBatch, Position
from whet.data.recorded import RecordedBatches
from whet.data.source import AbstractSource
from whet.device.abstract import AbstractDevice
from whet.device.contention import watch_contention
from whet.device.cpu import preserve_num_threads
from whet.device.environment import compiler_settings
from whet.device.open import open_device
from whet.device.rng import preserve_rng, seed_everything
from whet.plan.plan import Plan, make_plan_again
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.step.apply_plan import (
    apply_kernels,
    apply_plan,
    build_stepper,
    open_planned_device,
    open_planned_source,
    place_model,
)
from whet.step.compilation import CompiledCalls, compile_obstacle, num_graphs
from whet.step.ema import named_tensors
from whet.step.loss import LossFunction, adapt_loss, mean_loss
from whet.step.model_contexts import WeightLayout
from whet.step.optimizer_kernels import replicate
from whet.step.optimizers import OptimizerChoice
from whet.training.prepared_step import (
    NUM_BATCHES,
    WARMUP_STEPS,
    BuiltPlan,
    LocalPreparedStep,
    compile_limit,
    probe_errors,
)
from whet.training.training_config import TrainingConfig
from whet.training.workload import calls_attention, count_flops, measure_activation_bytes, pad_token_id
from whet.verify.isolation import preserve_model, preserve_state
from whet.verify.parity.precision import compare_precision
from whet.verify.start.splitting import loss_split_obstacle

# Warm-up steps beyond the minimum run only within this time.
_WARMUP_SECONDS = 2.0
# Steps slower than this need few of them to be warm, if no batch brings another shape.
_SLOW_STEP_SECONDS, _SLOW_WARMUP_STEPS = 0.1, WARMUP_STEPS + 1
# With less time, do not try to compile in the user's process: small models took 10 to 40 s on two cores, and 5 to 9 s
# for a GPU.
_MIN_COMPILE_SECONDS, _MIN_COMPILE_SECONDS_GPU = 10.0, 5.0
# torch compiles the first shape, then once more with dynamic sizes if shapes differ. If it still compiles for several
# batches after that, it compiles for every new shape.
_NUM_WARM, _MAX_LATE_GRAPHS = 3, 3
# Sending large batches of images would take longer than computing with them.
_MAX_RECORDED_BYTES = 512 << 20


class LocalStepBench:
    """Times one training run on this machine. Enter it, prepare settings, and run their steps in any order."""

    recovery_seconds = 0.0
    """Seconds needed to recover from a stopped probe; 0, because a probe in this process is never stopped."""

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
        """Set `may_compile` only in a separate process, which can be killed; otherwise, an alarm limits compilation."""
        self.may_compile = may_compile
        self.ends_at: float | None = None
        self.tick: Callable[[], None] | None = None
        self.about = evidence_key(plan, model)
        """The key for cached measurements: the training run as requested, without values that are measured later."""
        self._requested_plan = plan
        self.plan = plan
        """The plan from rules alone. Entering the bench adds the measured memory per sample."""
        self.model = model
        self.loss = adapt_loss(loss, model)
        self._optimizer = optimizer
        self._data = data
        self.training = training
        self._exit_stack = ExitStack()
        self._sources: dict[tuple[Scalar, ...], AbstractSource] = {}
        self._batches: list[GlobalBatch] = []
        self._model_device: torch.device | None = None
        self._floors: dict[torch.device, int] = {}

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self._exit_stack.close)
            self._exit_stack.enter_context(preserve_state(self.model, self._optimizer))
            self.layout = WeightLayout(self.model, keep_addresses=True)
            self._exit_stack.callback(self.layout.use, "contiguous", self._users_optimizer)
            self._exit_stack.enter_context(preserve_num_threads())
            # As in training: without it, a step on a busy machine could take a hundred times as long.
            self._exit_stack.enter_context(watch_contention())
            # Disabled, as in training: a collection would be counted as part of a step.
            self._exit_stack.enter_context(gc_disabled())
            device = open_device(self.plan.device).device
            self._exit_stack.enter_context(preserve_rng(device))
            if self.plan.freed_memory == "kept":
                self._exit_stack.enter_context(device.memory.keep_freed())
            self._learn_workload()
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close_sources()
        self._exit_stack.close()
        for device in self._floors:
            open_device(str(device)).device.memory.empty_cache()

    # --- interface for a search --------------------------------------------------------------------------------------

    def clock(self) -> float:
        return time.perf_counter()

    def plan_with(self, settings: Mapping[str, Scalar]) -> Plan:
        """Return the plan with these settings. Settings that depend on them are decided again."""
        return plan_with(self.plan, settings)

    def use_batch(self, size: int) -> None:
        """Switch to a different global batch size and make a new plan for it."""
        self._close_sources()
        self.training = self.training.model_copy(update={"global_batch_size": size})
        num_samples = self.plan.workload.num_samples
        num_steps = self.training.total_steps(None if num_samples is None else -(-num_samples // size))
        changed = {"global_batch_size": size, "num_steps": num_steps or None}
        self._use_workload(self.plan.workload.model_copy(update=changed))
        workload = self._requested_plan.workload.model_copy(update=changed)
        self.about = evidence_key(self._requested_plan.model_copy(update={"workload": workload}), self.model)

    def predicted_bytes(self, settings: Mapping[str, Scalar]) -> int | None:
        return predicted_bytes(self.plan, settings)

    def agreement(self, settings: Mapping[str, Scalar], *, seconds: float) -> SettingsAgreement:  # noqa: ARG002
        """Compare a precision with fp32 on the same device, using a few samples of the data."""
        with probe_errors():
            built = self._build(self.plan_with(settings))
            plan, device = built.plan, built.device
            self.move_to(device)
            micro = built.first_samples(self.batch(0), 8)
            with apply_kernels(plan, self.model, device):
                result = compare_precision(self.model, self.loss, micro, device, plan.precision)
        return SettingsAgreement(
            loss_error=result.loss_error,
            gradient_error=result.gradient_error,
            bound=result.bound,
            agrees=result.agrees,
        )

    def prepare(self, settings: Mapping[str, Scalar], *, seconds: float) -> "LocalPreparedStep":
        """Apply the settings and run warm-up steps.

        The limit of `seconds` is enforced by a separate process or, in this process, by an alarm during compilation.
        """
        start = time.perf_counter()
        plan = self.plan_with(settings)
        is_compiled = plan.compile != "off"
        if is_compiled:
            obstacle = compile_obstacle(self.model, plan) or self._limit_obstacle(seconds)
            if obstacle is not None:
                raise ProbeFailedError(obstacle, kind="unsupported")
        # The garbage collector is disabled inside the bench, so free the previous candidate explicitly.
        gc.collect()
        with probe_errors(), compile_limit(seconds) if is_compiled and not self.may_compile else nullcontext():
            prepared = LocalPreparedStep(self, self._build(plan))
            graphs = [num_graphs()]
            for index in range(NUM_BATCHES):
                prepared.step_seconds = prepared.step(index)
                graphs.append(num_graphs())
                # Compiling for another shape counts as preparation, not as part of the timed steps.
                is_warm = index + 1 >= WARMUP_STEPS and graphs[-1] == graphs[-2]
                is_slow = prepared.has_one_shape and prepared.step_seconds > _SLOW_STEP_SECONDS
                if is_warm and is_slow and index + 1 >= _SLOW_WARMUP_STEPS:
                    break
                if time.perf_counter() - start > (min(seconds, _WARMUP_SECONDS) if is_warm else seconds):
                    break
        num_late = sum(after > before for before, after in pairwise(graphs[_NUM_WARM:]))
        if num_late >= _MAX_LATE_GRAPHS:
            raise ProbeFailedError("it is compiled again for every new shape of a batch", kind="error")
        prepared.preparation_seconds = time.perf_counter() - start
        if plan.graph != "off":
            prepared.capture(seconds=seconds - prepared.preparation_seconds)
        return prepared

    # --- interface for a bench in another process --------------------------------------------------------------------

    def first_loss(self) -> float:
        """Return the loss of the first micro-batch under the plan from rules, without compiling or updating.

        Another process with the same training run computes the same loss.
        """
        with probe_errors(), preserve_model(self.model):
            built = self._build(self.plan)
            device, micro = built.device, next(built.split(self.batch(0)))
            # Reading the data may have drawn random numbers.
            seed_everything(self.training.seed)
            with (
                self.applied(built),
                device.compute_context(),
                torch.enable_grad(),
                device.autocast(built.plan.precision),
            ):
                returned = self.loss(micro.map_tensors(device.put))
            return float(mean_loss(returned).detach())

    def record(self) -> tuple[RecordedBatches, float]:
        """Return the batches that the timed steps cycle through, and the seconds for reading one batch."""
        source, seconds = self._source(self.plan), []
        workload, num_batches = self.plan.workload, NUM_BATCHES
        if workload.sample_bytes:
            batch_bytes = workload.sample_bytes * workload.global_batch_size
            num_batches = max(WARMUP_STEPS, min(NUM_BATCHES, _MAX_RECORDED_BYTES // batch_bytes))
        batches, before = [], time.perf_counter()
        for batch in islice(source.batches(Position()), num_batches):
            batches.append(batch)
            seconds.append(time.perf_counter() - before)
            before = time.perf_counter()
        return source.record(batches), 0.0 if source.is_in_memory else median(seconds)

    # --- interface for prepared steps --------------------------------------------------------------------------------

    def batch(self, index: int) -> GlobalBatch:
        return self._batches[index % len(self._batches)]

    def move_to(self, device: AbstractDevice) -> None:
        if device.torch_device != self._model_device:
            device.put_model(self.model, self._users_optimizer)
            self._model_device = device.torch_device

    @contextmanager
    def applied(self, built: BuiltPlan, compiled: CompiledCalls | None = None) -> Iterator[None]:
        """Apply a plan to the process and the model for the duration of one step."""
        self.move_to(built.device)
        with apply_plan(
            built.plan,
            self.model,
            built.device,
            layout=self.layout,
            optimizer=built.stepper.optimizer,
            compiled=compiled,
        ):
            yield

    def floor(self, device: AbstractDevice) -> int:
        """Return the bytes that were in use on a device before the model was moved to it."""
        place = device.torch_device
        if place not in self._floors:
            own = sum(tensor.nbytes for _, tensor in named_tensors(self.model) if tensor.device.type == place.type)
            self._floors[place] = max(0, (device.memory.usage().allocated or 0) - own)
        return self._floors[place]

    def read_batches(self, source: AbstractSource) -> Iterator[GlobalBatch] | None:
        """Return an endless iterator over the batches; None if all data is in memory and does not have to be read."""
        return None if source.is_in_memory else _repeat_epochs(source)

    # --- helpers -----------------------------------------------------------------------------------------------------

    @property
    def _users_optimizer(self) -> Optimizer | None:
        return self._optimizer if isinstance(self._optimizer, Optimizer) else None

    def _limit_obstacle(self, seconds: float) -> str | None:
        """Return why this process cannot compile within `seconds`; None if it can."""
        if self.may_compile:
            return None
        if seconds < (_MIN_COMPILE_SECONDS if device_kind(self.plan) == "cpu" else _MIN_COMPILE_SECONDS_GPU):
            return f"{seconds:.0f} s are too few to compile in"
        obstacle = interrupt_obstacle()
        return None if obstacle is None else f"compiling cannot be interrupted in this process: {obstacle}"

    def _build(self, plan: Plan) -> BuiltPlan:
        """Apply a plan to the model, in the same order as a training run does."""
        self._model_device = None
        self.floor(open_device(plan.device).device)
        source, training = self._source(plan), self.training
        plan, device, _ = open_planned_device(plan)
        seed_everything(training.seed)
        check_dataset_size(source, training.global_batch_size)
        place_model(plan, self.model, device, optimizer=self._users_optimizer, layout=self.layout)
        optimizer = self._optimizer
        if isinstance(optimizer, Optimizer):
            optimizer = replicate(optimizer)
        stepper, base_rates = build_stepper(
            plan, self.model, optimizer, device, clip=training.clip, has_ema=training.ema
        )
        return BuiltPlan(plan=plan, device=device, source=source, stepper=stepper, base_rates=base_rates)

    def _source(self, plan: Plan) -> AbstractSource:
        """Return the data source for a plan. Plans that read data in the same way share a source."""
        key = (plan.device, plan.data_location, plan.workers, plan.prefetch, plan.worker_start_method, plan.copies)
        if key not in self._sources:
            device = open_device(plan.device, overlaps_copies=plan.copies == "overlapped").device
            training = self.training
            source = self._sources[key] = open_planned_source(
                self._data,
                device,
                plan,
                global_batch_size=training.global_batch_size,
                seed=training.seed,
                shuffle=training.shuffle is not False,
                collate_fn=training.collate_fn,
                pad_token_id=pad_token_id(self.model),
            )
            if not self._batches:
                # A dataset is read during the timed steps. Here, a single batch is enough to determine the shapes.
                num_ready = NUM_BATCHES if source.is_in_memory else 1
                self._batches = list(islice(source.batches(Position()), num_ready))
        return self._sources[key]

    def _learn_workload(self) -> None:
        """Detect whether the model calls attention, and measure the memory per sample."""
        built = self._build(self.plan)
        if has_attention_choice(self.plan) and "sdpa" not in self.plan.workload.layers:
            self._learn_attention(built)
        self._learn_splitting(built)
        workload = self.plan.workload
        if workload.activation_bytes is not None or len(self.batch(0)) < 4 or workload.split_obstacle is not None:
            return
        try:
            small, large = (built.first_samples(self.batch(0), size) for size in (2, 4))
            needed = measure_activation_bytes(self.model, self.loss, small, large, device=built.device)
        except Exception:
            # The loss may need more samples than this. The memory per sample then remains unknown.
            return
        self._use_workload(workload.model_copy(update={"activation_bytes": needed}))

    def workload_for_other_machines(self) -> Workload:
        """Return the workload with FLOPs per sample, which is used to estimate the speed of other machines."""
        built, workload = self._build(self.plan), self.plan.workload
        try:
            flops = count_flops(self.model, self.loss, built.first_samples(self.batch(0), 2), device=built.device)
        except Exception:
            return workload
        return workload.model_copy(update={"flops_per_sample": flops or None})

    def _learn_splitting(self, built: BuiltPlan) -> None:
        """Determine whether micro-batches smaller than the batch may be tried."""
        workload, batch = self.plan.workload, self.batch(0)
        if self.training.split_batch != "auto" or workload.whole_batch_reason is not None:
            return
        obstacle = built.source.split_obstacle(batch)
        if obstacle is None:
            obstacle = loss_split_obstacle(
                self.model,
                self.loss,
                batch,
                lambda few, size: built.source.micro_batches(few, micro_batch=size, length_mode="fixed"),
                built.device,
            )
        if obstacle is not None:
            self._use_workload(workload.model_copy(update={"split_obstacle": obstacle}))

    def _learn_attention(self, built: BuiltPlan) -> None:
        try:
            micro = built.first_samples(self.batch(0), 2)
            is_called = calls_attention(self.model, self.loss, micro, device=built.device)
        except Exception:
            # The loss may need more than two samples. In that case, attention kernels are not tried.
            return
        if is_called:
            workload = self.plan.workload
            self._use_workload(workload.model_copy(update={"layers": (*workload.layers, "sdpa")}))

    def _use_workload(self, workload: Workload) -> None:
        self.plan = make_plan_again(self.plan, workload=workload, measured={}, trials=())

    def _close_sources(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()
        self._batches.clear()


def _repeat_epochs(source: AbstractSource) -> Iterator[GlobalBatch]:
    for _ in cycle((None,)):
        yield from source.batches(Position())


def evidence_key(plan: Plan, model: nn.Module) -> dict[str, Any]:
    """Return the cache key of measurements: machine, software, workload, overrides, parameters and module types.

    It contains the options of torch's compiler too, because compiling is one of the candidates.
    """
    # The name of the workload differs between `whet plan train.py:main --measure` and `python train.py`.
    unnamed = plan.workload.model_copy(update={"batch": None, "recipe": ""})
    return {
        "machine": plan.machine.as_json(),
        "workload": unnamed.as_json(),
        "overrides": dict(plan.overrides),
        "compiler": compiler_settings(),
        "model": [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in named_tensors(model)],
        "modules": sorted({type(module).__name__ for module in model.modules()}),
    }
