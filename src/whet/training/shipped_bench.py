"""Time a training run started from Python in a separate process, where a compilation may crash or hang.

The model, the optimizer, the loss and a few batches are sent in a single message, so that references between them are
preserved, for example from the loss to the model. The message is a pickle, which executes code when it is read. This is
safe here: this process writes it, the child process that it starts reads it from a pipe, and nothing is stored
(docs/choices/0020). Results of the child count only if its first loss is the same.
"""

import io
import math
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.autotune.process_bench import EarlyProcess, ProcessStepBench
from whet.base import env
from whet.base.errors import WhetError
from whet.base.origin import code_origin
from whet.base.units import format_bytes, format_seconds
from whet.data.recorded import RecordedBatches
from whet.device.open import open_device
from whet.machine.pressure import read_system_state
from whet.plan.plan import Plan, override, read_plan
from whet.plan.values import names_of
from whet.step.loss import LossFunction
from whet.step.optimizers import OptimizerChoice
from whet.training.step_bench import LocalStepBench
from whet.training.training_config import TrainingConfig
from whet.verify.start.device_parity import PARITY_BOUNDS

_TARGET = "whet.training.shipped_bench:open_shipped"
_MEMORY_FACTOR = 2.5
"""Free memory that a second copy requires, as a multiple of the weights, gradients and optimizer state."""
_MAX_MEMORY_SHARE = 0.9
"""Fraction of the free host memory at which the process is killed, before the kernel kills another one."""
_MAX_READ_SHARE = 0.5
"""If reading takes a larger fraction of a step, the data settings matter most, and only this process can try them."""


class NotShippedError(WhetError):
    """Raised if the training run cannot be measured in another process. `reason` explains why."""

    def __init__(self, reason: str) -> None:
        super().__init__("the run cannot be sent to another process", got=reason, try_="measure=False")
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class ShippedTraining:
    """The content of the message. It is a single object, so that references between its parts are preserved."""

    model: nn.Module
    optimizer: Optimizer | OptimizerChoice
    loss: LossFunction
    batches: RecordedBatches
    training: TrainingConfig
    default_dtype: torch.dtype


def shipped_bench(
    model: nn.Module,
    optimizer: Optimizer | OptimizerChoice,
    data: Any,
    training: TrainingConfig,
    *,
    loss: LossFunction,
    plan: Plan,
    step_seconds: float | None = None,
    early: EarlyProcess | None = None,
) -> ProcessStepBench:
    """Return a bench that times this training run in a separate process. Entering it starts the process.

    `plan` is the plan of a LocalStepBench that has measured the workload, and `step_seconds` is its step time.
    The model is not moved. `early` is a process that was started before. Raise NotShippedError if the training run
    cannot be sent.
    """
    free = read_system_state().memory_available_bytes
    _check_memory(plan, free)
    training = _shippable(training, plan)
    with LocalStepBench(model, optimizer, data, training, loss=loss, plan=plan) as bench:
        batches, read_seconds = bench.record()
        first_loss = bench.first_loss()
    if step_seconds is not None and read_seconds > _MAX_READ_SHARE * step_seconds:
        took = f"reading a batch takes {format_seconds(read_seconds)} of a step of {format_seconds(step_seconds)}"
        raise NotShippedError(f"{took}, and only this process can try other settings for data")
    shipped = ShippedTraining(
        model=model,
        optimizer=optimizer,
        loss=loss,
        batches=batches,
        training=training,
        default_dtype=torch.get_default_dtype(),
    )
    # The child process has a few batches rather than the data.
    fixed = {name: plan.settings[name].value for name in names_of(lambda setting: setting.is_data)}
    return ProcessStepBench(
        _TARGET,
        {"plan": override(plan, fixed).as_json(), "first_loss": first_loss.hex()},
        environment=env.child_environment(),
        max_bytes=_max_bytes(free),
        early=early,
        payload=pack(shipped, max_bytes=None if free is None else int(free / _MEMORY_FACTOR)),
    )


def start_early(model: nn.Module) -> EarlyProcess:
    """Start the process of a bench, and let it import the modules that every bench needs."""
    modules = {type(part).__module__ for part in model.modules()}
    # A module of the user may do more than define a model, so it is imported only if the model is sent.
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in modules}
    installed = sorted(name for name, file in files.items() if file and code_origin(file) == "library")
    free = read_system_state().memory_available_bytes
    return EarlyProcess([__name__, *installed], environment=env.child_environment(), max_bytes=_max_bytes(free))


def _max_bytes(free: int | None) -> int | None:
    return None if free is None else int(_MAX_MEMORY_SHARE * free)


@contextmanager
def open_shipped(arguments: Mapping[str, Any], stream: IO[bytes]) -> Iterator[LocalStepBench]:
    """Open the training run that the parent process has sent. Called in the child process."""
    with stream:
        try:
            shipped: ShippedTraining = pickle.load(stream)
        except Exception as error:
            raise NotShippedError(f"{type(error).__name__}: {error}"[:300]) from error
    plan = read_plan(arguments["plan"], where="the plan of the training process")
    torch.set_default_dtype(shipped.default_dtype)
    with LocalStepBench(
        shipped.model,
        shipped.optimizer,
        shipped.batches,
        shipped.training,
        loss=shipped.loss,
        plan=plan,
        may_compile=True,
    ) as bench:
        _check_first_loss(bench, float.fromhex(arguments["first_loss"]))
        yield bench


def _check_first_loss(bench: LocalStepBench, expected: float) -> None:
    """Raise NotShippedError if the first loss differs from the parent's: the child would measure something else."""
    actual, plan = bench.first_loss(), bench.plan
    # GPU kernels may sum in any order. CPU kernels sum in a fixed order for a given number of threads.
    bound = 0.0 if plan.device == "cpu" else PARITY_BOUNDS[plan.precision][0]
    if not math.isclose(actual, expected, rel_tol=bound):
        raise NotShippedError(f"its first loss is {actual:.9g} there and {expected:.9g} here")


def _check_memory(plan: Plan, free_on_host: int | None) -> None:
    needed = int(_MEMORY_FACTOR * plan.workload.static_bytes)
    free, where = open_device(plan.device).device.memory.free_bytes(), f"on {plan.device}"
    if free is None:
        free, where = free_on_host, "in this computer"
    if free is not None and free < needed:
        state = format_bytes(plan.workload.static_bytes)
        reason = f"a second copy of its {state} of weights, gradients and optimizer state needs {format_bytes(needed)}"
        raise NotShippedError(f"{reason}, and {format_bytes(free)} are free {where}")


def _shippable(training: TrainingConfig, plan: Plan) -> TrainingConfig:
    """Return the options without functions that a measurement does not call, and with what is known about splitting."""
    changes: dict[str, Any] = {"schedule": "constant", "collate_fn": None}
    if plan.workload.whole_batch_reason is None:
        changes["split_batch"] = True
    return training.model_copy(update=changes)


# --- serialization ----------------------------------------------------------------------------------------------------


def pack(shipped: ShippedTraining, *, max_bytes: int | None = None) -> list[bytes]:
    """Return the message in chunks. Raise NotShippedError, naming the part, if a part cannot be pickled."""
    try:
        return _dump(shipped, max_bytes)
    except NotShippedError:
        raise
    except Exception as error:
        # Pickling each part again shows which one is the cause.
        for name in ("model", "optimizer", "loss", "batches"):
            _dump_part(name, getattr(shipped, name), max_bytes)
        raise NotShippedError(f"{type(error).__name__}: {error}"[:300]) from None


def _dump_part(name: str, part: Any, max_bytes: int | None) -> None:
    what = {"batches": "a sample of the data"}.get(name, f"the {name}")
    try:
        _dump(part, max_bytes)
    except NotShippedError:
        raise
    except Exception as error:
        raise NotShippedError(f"{what} cannot be pickled ({type(error).__name__}: {error})"[:300]) from None


def _dump(value: Any, max_bytes: int | None) -> list[bytes]:
    sink = _Chunks(max_bytes)
    _Pickler(sink, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return sink.chunks


class _Chunks(io.RawIOBase):
    """A stream that collects data in chunks, up to a limit, without copying large ones."""

    def __init__(self, max_bytes: int | None) -> None:
        self.chunks: list[bytes] = []
        self._left = math.inf if max_bytes is None else max_bytes

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        chunk = bytes(data)
        self._left -= len(chunk)
        if self._left < 0:
            raise NotShippedError("a message with it, and with what its loss refers to, takes too much memory")
        self.chunks.append(chunk)
        return len(chunk)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that sends tensors by value through the host and puts them back on their device.

    torch's own pickling would copy the memory of two parameters that share it twice, and would send a whole dataset for
    a sample that is a view of it.
    """

    def __init__(self, file: Any, protocol: int) -> None:
        super().__init__(file, protocol=protocol)
        self._memory: dict[tuple[torch.device, int], tuple[_Memory, Tensor]] = {}

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.is_quantized:
            return super().reducer_override(value)
        if value.is_meta or value.is_conj() or value.is_neg():
            return super().reducer_override(value)
        if value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None):
            raise pickle.PicklingError("hooks of a tensor cannot be sent")
        data = value.detach()
        storage = data.untyped_storage()
        if type(value) is Tensor and data.numel() * data.element_size() < storage.nbytes():
            # The tensor is a view of a larger one. preserve_format keeps channels_last, for which kernels may round
            # differently.
            data = data.clone(memory_format=torch.preserve_format)
        place = data.dtype, data.storage_offset(), tuple(data.shape), data.stride()
        kind = type(value), value.requires_grad, dict(vars(value))
        return _make_tensor, (self._memory_of(data), str(value.device), place, kind)

    def _memory_of(self, data: Tensor) -> "_Memory":
        storage = data.untyped_storage()
        key = data.device, storage.data_ptr()
        if not storage.nbytes() or key not in self._memory:
            flat = torch.empty(0, dtype=torch.uint8, device=data.device).set_(storage)
            # Keep the tensor, so that its address is not reused for another one.
            self._memory[key] = _Memory(flat.cpu().numpy().tobytes()), data
        return self._memory[key][0]


class _Memory:
    """The memory of one or more tensors. Unpickling turns it into a tensor of bytes."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __reduce__(self) -> Any:
        return _make_memory, (self._content,)


def _make_memory(content: bytes) -> Tensor:
    # Memory allocated by torch is aligned as in the parent. With a different alignment, kernels may round differently.
    memory = torch.empty(len(content), dtype=torch.uint8)
    if content:
        memory.numpy()[:] = memoryview(content)
    return memory


def _make_tensor(memory: Tensor, device: str, place: tuple[Any, ...], kind: tuple[Any, ...]) -> Tensor:
    dtype, offset, shape, stride = place
    is_type, requires_grad, attributes = kind
    made = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, shape, stride)
    if device != "cpu":
        made = made.to(device)
    tensor: Tensor = (
        nn.Parameter(made, requires_grad) if is_type is nn.Parameter else made.requires_grad_(requires_grad)
    )
    vars(tensor).update(attributes)
    return tensor
