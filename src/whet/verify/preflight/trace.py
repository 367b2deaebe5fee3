"""Trace two optimizer steps and record every operator that the device would execute."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whet.data.batch import MicroBatch
from whet.device.operators import OperatorEntry, OperatorStatus, operator_status, torch_operators
from whet.device.tracing import StandInDevice, trace_as
from whet.machine.device_figures import DEVICE_FIGURES
from whet.step.optimizers import build_optimizer
from whet.step.step import Stepper
from whet.verify.fake_tensors import FakeExecutor, fake_mode
from whet.verify.isolation import force_eager
from whet.verify.preflight.detectors import SVD
from whet.verify.preflight.findings import (
    Detection,
    DetectionLog,
    Detector,
    FunctionCall,
    OperatorCall,
    SourceLine,
    TracePhase,
    user_line,
)
from whet.verify.preflight.host_sync import HOST_READS, HostTensors
from whet.verify.trainable import Trainable, TrainableSpec

_FEW_SAMPLES = 2
# Number of operator calls. If the first step has more, only the update is traced a second time.
_LONG_STEP = 3_000
_FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceResult:
    """The result of a trace. `trainable` and `micro` are None if an error occurred before they were created."""

    recorder: "OperatorRecorder"
    trainable: Trainable | None
    micro: MicroBatch | None
    is_fake: bool
    error: Exception | None = None
    """The error that ended the trace, or None if the trace is complete."""

    @property
    def num_parameters(self) -> int:
        return 0 if self.trainable is None else sum(p.numel() for p in self.trainable.model.parameters())


def trace_steps(
    spec: TrainableSpec,
    detectors: Sequence[Detector],
    *,
    device: str,
    batch_size: int | None = None,
    is_fake: bool = True,
    condition: bool = False,
    operators: dict[str, OperatorEntry] | None = None,
) -> TraceResult:
    """Create the model and trace two optimizer steps as the device would execute them.

    The micro-batch has `batch_size` samples, or as many as a normal step if that is None. Conditions on fake values
    evaluate to `condition`. `operators` is the operator table of the torch version to trace for, by default the
    installed one.
    """
    mode = fake_mode() if is_fake else None
    executor = FakeExecutor(mode, condition=condition)
    recorder = OperatorRecorder(detectors, backend=DEVICE_FIGURES[device].title, executor=executor, operators=operators)
    trainable, micro, error = None, None, None
    with trace_environment():
        try:
            with mode or contextlib.nullcontext(), recorder:
                trainable = spec.make()
            # The data of a recipe is real, so read it outside the fake mode and convert it to fake tensors.
            size = batch_size if batch_size is not None and trainable.is_scalable else trainable.batch_size
            size = size if is_fake or not trainable.is_scalable else min(size, _FEW_SAMPLES)
            # Clone real inputs, because a model may write to them.
            micro = trainable.make_batch(size).map_tensors(torch.clone if mode is None else mode.from_tensor)
            with mode or contextlib.nullcontext(), trace_as(device):
                _train(trainable, micro, recorder, device=device)
        except Exception as raised:
            error = raised
    return TraceResult(recorder=recorder, trainable=trainable, micro=micro, is_fake=is_fake, error=error)


def _train(trainable: Trainable, micro: MicroBatch, recorder: "OperatorRecorder", *, device: str) -> None:
    """Run two optimizer steps. The second one differs, because the optimizer state exists."""
    place = StandInDevice(device)
    model: nn.Module = trainable.model.train()
    optimizer = build_optimizer(trainable.optimizer, model, place)
    stepper = Stepper(model, optimizer, place)

    def enter_update(*_: object) -> None:
        recorder.phase = "updating"

    def enter_training(*_: object) -> None:
        recorder.phase = "training"

    optimizer.register_step_pre_hook(enter_update)
    optimizer.register_step_post_hook(enter_training)
    with recorder.function_mode(), recorder:
        enter_training()
        stepper(trainable.loss, [micro], num_samples=len(micro), step=1)
        is_long = recorder.num_calls > _LONG_STEP
        recorder.log.step = 1
        if is_long:
            optimizer.step()
        else:
            stepper(trainable.loss, [micro], num_samples=len(micro), step=2)


@contextlib.contextmanager
def trace_environment() -> Iterator[None]:
    """Restore torch's random generator on exit, suppress warnings of the trace, and run compiled code eagerly."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _silenced(_FAKE_TENSOR_LOG), force_eager():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


@contextlib.contextmanager
def _silenced(log: logging.Logger) -> Iterator[None]:
    """Disable a logger in the context.

    torch logs a traceback for every operator that fake tensors do not support, although the trace handles these.
    """
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


# --- recorder ---------------------------------------------------------------------------------------------------------

_DEVICE_DEPENDENT = frozenset(
    {
        # Kernels with a branch per device. If they were decomposed here, they would take the branch of the CPU.
        "convolution", "convolution_backward", "convolution_overrideable", "_convolution", "_to_copy", "copy_", "copy",
        "clone", "empty_like", "new_empty", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
        "_fused_sdp_choice", "native_dropout", "native_dropout_backward", "new_zeros", "new_ones", "new_full", "zeros",
        "ones", "full", "arange", "scalar_tensor", "empty", "lift_fresh", "detach", "alias", "_pin_memory",
        "is_pinned", "_unsafe_view", "randn", "rand", "randint",
    }
)  # fmt: skip
_DEVICE = torch.ops.prim.device.default
_MAX_DEPTH = 8
_COMPOSITE_KEYS = {
    name: getattr(torch._C.DispatchKey, name)
    for name in (
        "CompositeExplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
        "CompositeImplicitAutograd",
    )
}


class OperatorRecorder(TorchDispatchMode):
    """A dispatch mode that passes every operator that a backend would execute to the detectors.

    Problems that they report are logged with the source line.
    """

    def __init__(
        self,
        detectors: Sequence[Detector],
        *,
        backend: str,
        executor: FakeExecutor,
        operators: dict[str, OperatorEntry] | None = None,
    ) -> None:
        super().__init__()
        self.log = DetectionLog()
        self.phase: TracePhase = "init"
        self.num_calls = 0
        self.host = HostTensors()
        self.executor = executor
        self.backend = backend
        self._operators = operators if operators is not None else torch_operators()
        self._detectors = detectors
        self._statuses: dict[str, OperatorStatus] = {}
        self._lines: dict[int, SourceLine | None] = {}
        """Lines of forward calls, by the sequence number of the autograd node that the call created."""
        self._host_nodes: set[int] = set()
        self._clean_decompositions: set[Any] = set()
        """Signatures of decomposed calls without detections. Calls with the same signature are not decomposed again."""
        self._depth = 0
        self._paused = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled in this mode. If this returned True, torch would wrap every call to disable its compiler.
        return False

    @property
    def is_paused(self) -> bool:
        return self._paused > 0

    @property
    def is_svd_on_cpu(self) -> bool:
        return self.backend == "MPS" and self._operators["linalg_svd"].is_on_cpu

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop recording operators inside the `with` block."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def function_mode(self) -> TorchFunctionMode:
        """Return a mode that records torch functions before decomposition, to be entered together with the recorder."""
        return _FunctionRecorder(self)

    def record(self, detections: Iterable[Detection]) -> None:
        """Log detections for the current call."""
        for detection in detections:
            line, is_backward = self._current_line()
            self.log.add(detection, line, is_backward=is_backward, phase=self.phase)

    def inspect_function(self, call: FunctionCall) -> None:
        for detector in self._detectors:
            self.record(detector.function(call))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            # This is the most frequent call, and torch's implementation takes ten times as long.
            return args[0].fake_device
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # For wrapper subclasses such as nested tensors, the device runs the operators on the inner tensors.
            return NotImplemented
        if func.namespace in ("prim", "profiler", "prims"):
            return func(*args, **kwargs)
        self._remember_line()
        if self._paused:
            return func(*args, **kwargs)
        self.num_calls += 1
        name = func._schema.name.partition("::")[2]
        name = f"{name}.{func._schema.overload_name}" if func._schema.overload_name else name
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_on_host = self.phase == "training" and self._is_on_host(name, inputs)
        result, was_decomposed = None, False
        if not is_on_host and self.phase != "init" and func.namespace == "aten":
            result, was_decomposed = self._decompose(func, name, args, kwargs, inputs)
        if not was_decomposed:
            result = self.executor.run_operator(func, args, kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if is_on_host:
            self.host.add(outputs)
            self._host_nodes.add(_last_node())
            return result
        is_backward = torch._C._current_autograd_node() is not None
        call = OperatorCall(func, name, args, kwargs, inputs, outputs, self.phase, is_backward)
        for detector in self._detectors:
            self.record(detector.operator(call))
        return result

    def _decompose(self, func: Any, name: str, args: Any, kwargs: Any, inputs: list[Tensor]) -> tuple[Any, bool]:
        """Decompose a composite operator like the backend does, so that its parts are recorded.

        Return the result, and whether the operator was decomposed.
        """
        status = self._statuses.get(name)
        if status is None:
            status = self._statuses[name] = operator_status(name, self._operators, backend=self.backend)
        key = _COMPOSITE_KEYS.get(status.way)
        if key is None or name.partition(".")[0] in _DEVICE_DEPENDENT or self._depth >= _MAX_DEPTH:
            return None, False
        signature = (name, *((tensor.dtype, tensor.dim()) for tensor in inputs))
        if signature in self._clean_decompositions or not func.has_kernel_for_dispatch_key(key):
            return None, False
        before = {key: dict(count) for key, count in self.log.counts.items()}
        self._depth += 1
        try:
            with self:
                result = func._op_dk(key, *args, **kwargs)
        except Exception:
            # The parts may need real values. The caller then runs the operator as a whole, without recording its parts.
            self.log.counts = before
            return None, False
        finally:
            self._depth -= 1
        if self.log.counts == before:
            self._clean_decompositions.add(signature)
        return result, True

    def _is_on_host(self, name: str, inputs: list[Tensor]) -> bool:
        node = torch._C._current_autograd_node()
        if node is not None and node._sequence_nr() in self._host_nodes:
            return True
        # lift_fresh wraps a Python number, which is on the host.
        return name == "lift_fresh" or self.host.contains_all(inputs)

    def _remember_line(self) -> None:
        # The autograd node of this call was created just before, so it has the last sequence number.
        number = _last_node()
        if number not in self._lines and torch._C._current_autograd_node() is None:
            self._lines[number] = user_line()

    def _current_line(self) -> tuple[SourceLine | None, bool]:
        """Return the line of the current call, and whether the call is in the backward pass of that line."""
        line = user_line()
        node = torch._C._current_autograd_node()
        if line is None and node is not None:
            return self._lines.get(node._sequence_nr()), True
        return line, False


class _FunctionRecorder(TorchFunctionMode):
    def __init__(self, recorder: OperatorRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self._recorder
        if recorder.phase != "training" or recorder.is_paused:
            return func(*args, **kwargs)
        is_read = func in HOST_READS and isinstance(args[0], Tensor)
        if is_read and recorder.host.contains_all([args[0]]):
            return recorder.executor.read_value(func, args, kwargs)
        recorder.inspect_function(FunctionCall(func, args, kwargs))
        if func is Tensor.pin_memory:
            # torch cannot pin memory on a machine without an accelerator.
            return args[0]
        if func in SVD and recorder.is_svd_on_cpu:
            # MPS runs the whole function on the CPU, so its inner operators are not recorded.
            with recorder.paused():
                return func(*args, **kwargs)
        if is_read and HOST_READS[func].reads(args, kwargs):
            with recorder.paused():
                result = recorder.executor.read_value(func, args, kwargs)
            recorder.host.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            return result
        if recorder.executor.is_fake and is_long_rnn(func, args):
            return trace_shortened_rnn(func, args, recorder.paused)
        result = func(*args, **kwargs)
        if func is torch.tensor and kwargs.get("device") is not None:
            recorder.host.remove(result)
        return result


def _last_node() -> int:
    """Return the sequence number of the latest autograd node."""
    return int(torch._C._autograd._get_sequence_nr()) - 1


# --- recurrent layers -------------------------------------------------------------------------------------------------

_RNN_FUNCTIONS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_TRACED_STEPS = 2
# Position of the argument batch_first. Calls with packed sequences have other arguments, and are traced completely.
_BATCH_FIRST = 8


def is_long_rnn(function: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the call is a recurrent layer with more time steps than need to be traced."""
    if getattr(function, "__name__", "") not in _RNN_FUNCTIONS or len(args) != _BATCH_FIRST + 1:
        return False
    sequence = args[0]
    is_padded = sequence.dim() == 3 and isinstance(args[1], Tensor | tuple | list)
    return is_padded and sequence.shape[_time_axis(args)] > _TRACED_STEPS


def trace_shortened_rnn(
    function: Callable[..., Any], args: tuple[Any, ...], paused: Callable[[], AbstractContextManager[None]]
) -> tuple[Any, ...]:
    """Run a recurrent layer only on its first time steps, because later steps execute the same operators.

    The rest of the output repeats the first time step, and the operators that create it are not recorded.
    """
    axis, sequence = _time_axis(args), args[0]
    with paused():
        start = sequence.narrow(axis, 0, _TRACED_STEPS)
    output, *state = function(start, *args[1:])
    with paused():
        rest = output.narrow(axis, 0, 1)
        shape = [sequence.shape[axis] - _TRACED_STEPS if dim == axis else -1 for dim in range(3)]
        output = torch.cat((output, rest.expand(shape)), dim=axis)
    return (output, *state)


def _time_axis(args: tuple[Any, ...]) -> int:
    return 1 if args[_BATCH_FIRST] else 0
