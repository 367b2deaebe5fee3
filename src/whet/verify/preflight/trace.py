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
from whet.device.operators import ALWAYS_ON_CPU, OperatorStatus, operator_status, torch_operators
from whet.device.tracing import StandInDevice, trace_as
from whet.step.optimizers import build_optimizer
from whet.step.step import Stepper
from whet.verify.fake_tensors import FakeExecutor, fake_mode
from whet.verify.isolation import force_eager
from whet.verify.preflight.findings import (
    Detection,
    DetectionLog,
    Detector,
    OperatorCall,
    SourceLine,
    TracePhase,
    user_line,
)
from whet.verify.preflight.host_sync import HOST_READS, HostTensors
from whet.verify.trainable import Trainable, TrainableSpec

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_TRACED_STEPS = 2
_BATCH_FIRST = 8
"""Where the arguments say so; packed sequences have another order and are traced as they are."""


def is_long_rnn(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether this is a recurrent layer over more places than need to be seen."""
    if getattr(function, "__name__", "") not in _LAYERS or len(args) != _BATCH_FIRST + 1:
        return False
    sequence = args[0]
    return (
        sequence.dim() == 3
        and isinstance(args[1], Tensor | tuple | list)
        and sequence.shape[_time(args)] > _TRACED_STEPS
    )


def trace_shortened_rnn(
    function: Callable[..., Any], args: tuple[Any, ...], unseen: Callable[[], AbstractContextManager[None]]
) -> tuple[Any, ...]:
    """What the layer gives, from its first places; the rest of the output is a copy, which belongs to no device."""
    time, sequence = _time(args), args[0]
    with unseen():
        start = sequence.narrow(time, 0, _TRACED_STEPS)
    output, *state = function(start, *args[1:])
    with unseen():
        rest = output.narrow(time, 0, 1)
        shape = [sequence.shape[time] - _TRACED_STEPS if axis == time else -1 for axis in range(3)]
        output = torch.cat((output, rest.expand(shape)), dim=time)
    return (output, *state)


def _time(args: tuple[Any, ...]) -> int:
    return 1 if args[_BATCH_FIRST] else 0


_DEVICE_DEPENDENT = frozenset(
    {
        # Written for every device at once, with a branch for each: entered on the CPU, they would go the CPU's way.
        "convolution", "convolution_backward", "convolution_overrideable", "_convolution", "_to_copy", "copy_", "copy",
        "clone", "empty_like", "new_empty", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
        "_fused_sdp_choice", "native_dropout", "native_dropout_backward", "new_zeros", "new_ones", "new_full", "zeros",
        "ones", "full", "arange", "scalar_tensor", "empty", "lift_fresh", "detach", "alias", "_pin_memory",
        "is_pinned", "_unsafe_view", "randn", "rand", "randint",
    }
)  # fmt: skip
_ON_CPU = {torch.linalg.svd, torch.svd, Tensor.svd} if "linalg_svd" in ALWAYS_ON_CPU else set()
_DEVICE = torch.ops.prim.device.default
_MAX_DEPTH = 8
_KEYS = {
    name: getattr(torch._C.DispatchKey, name)
    for name in (
        "CompositeExplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
        "CompositeImplicitAutograd",
    )
}


class OperatorRecorder(TorchDispatchMode):
    """Tells watchers of every operator that a backend gets, and runs it; what fake tensors cannot say is answered."""

    def __init__(self, watchers: Sequence[Detector], *, backend: str, answers: FakeExecutor) -> None:
        super().__init__()
        self.notebook = DetectionLog()
        self.phase: TracePhase = "making"
        self.num_calls = 0
        self.host = HostTensors()
        self.answers = answers
        self._watchers = watchers
        self.backend = backend
        self._statuses: dict[str, OperatorStatus] = {}
        self._lines: dict[int, SourceLine | None] = {}
        """Lines of forward calls, by the number of the autograd node that each of them made."""
        self._host_nodes: set[int] = set()
        self._followed: set[Any] = set()
        """Calls in parts that had nothing to be said about; the like need not be looked into again."""
        self._depth = 0
        self._paused = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here; torch would wrap every call to say so.
        return False

    @property
    def is_paused(self) -> bool:
        return self._paused > 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it operators run unseen."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def function_mode(self) -> TorchFunctionMode:
        """Sees functions of torch before they are taken apart; entered together with the recorder."""
        return _FunctionRecorder(self)

    def note(self, sightings: Iterable[Detection]) -> None:
        """Writes down what was seen in the call that is at work."""
        for seen in sightings:
            line, is_backward = self._line()
            self.notebook.write(seen, line, is_backward=is_backward, phase=self.phase)

    def about_to_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for watcher in self._watchers:
            self.note(watcher.function(function, args, kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            # Most calls are this one; torch would take ten times as long to say the same.
            return args[0].fake_device
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # Tensors made of tensors, as nested ones are: a device gets what they do with their parts.
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
        result, was_followed = None, False
        if not is_on_host and self.phase != "making" and func.namespace == "aten":
            result, was_followed = self._follow(func, name, args, kwargs, inputs)
        if not was_followed:
            result = self.answers.call(func, args, kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if is_on_host:
            self.host.add(outputs)
            self._host_nodes.add(_last_node())
            return result
        is_backward = torch._C._current_autograd_node() is not None
        call = OperatorCall(func, name, args, kwargs, inputs, outputs, self.phase, is_backward)
        for watcher in self._watchers:
            self.note(watcher.operator(call))
        return result

    def _follow(self, func: Any, name: str, args: Any, kwargs: Any, inputs: list[Tensor]) -> tuple[Any, bool]:
        """Runs an operator that the backend runs in parts by those parts, so that they are seen."""
        status = self._statuses.get(name)
        if status is None:
            status = self._statuses[name] = operator_status(name, torch_operators(), backend=self.backend)
        key = _KEYS.get(status.way)
        if key is None or name.partition(".")[0] in _DEVICE_DEPENDENT or self._depth >= _MAX_DEPTH:
            return None, False
        alike = (name, *((tensor.dtype, tensor.dim()) for tensor in inputs))
        if alike in self._followed or not func.has_kernel_for_dispatch_key(key):
            return None, False
        before = {key: dict(count) for key, count in self.notebook.counts.items()}
        self._depth += 1
        try:
            with self:
                result = func._op_dk(key, *args, **kwargs)
        except Exception:
            # Its parts need real numbers: it is run as a whole, and they stay unseen.
            self.notebook.counts = before
            return None, False
        finally:
            self._depth -= 1
        if self.notebook.counts == before:
            self._followed.add(alike)
        return result, True

    def _is_on_host(self, name: str, inputs: list[Tensor]) -> bool:
        node = torch._C._current_autograd_node()
        if node is not None and node._sequence_nr() in self._host_nodes:
            return True
        # What a Python number is made into has not been on the device.
        return name == "lift_fresh" or self.host.holds_all(inputs)

    def _remember_line(self) -> None:
        # The node of this call was made just before it came here, so its number is the last one.
        number = _last_node()
        if number not in self._lines and torch._C._current_autograd_node() is None:
            self._lines[number] = user_line()

    def _line(self) -> tuple[SourceLine | None, bool]:
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
        is_asked = func in HOST_READS and isinstance(args[0], Tensor)
        if is_asked and recorder.host.holds_all([args[0]]):
            return recorder.answers.value(func, args, kwargs)
        recorder.about_to_call(func, args, kwargs)
        if func in _ON_CPU and recorder.backend == "MPS":
            # MPS sends the whole call to the CPU; its parts are never asked of it.
            with recorder.paused():
                return func(*args, **kwargs)
        if is_asked and HOST_READS[func].is_asking(args, kwargs):
            with recorder.paused():
                result = recorder.answers.value(func, args, kwargs)
            recorder.host.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            return result
        if recorder.answers.are_fake and is_long_rnn(func, args):
            return trace_shortened_rnn(func, args, recorder.paused)
        result = func(*args, **kwargs)
        if func is torch.tensor and kwargs.get("device") is not None:
            recorder.host.remove(result)
        return result


def _last_node() -> int:
    """The number of the autograd node that was made last."""
    return int(torch._C._autograd._get_sequence_nr()) - 1


BACKENDS = {"mps": "MPS", "cuda": "CUDA", "cpu": "CPU"}
_FEW_SAMPLES = 2
_LONG_STEP = 3_000
"""Operators; after a longer step only the update is made a second time."""
_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceResult:
    """What was run, and how far it came."""

    recorder: OperatorRecorder
    specimen: Trainable | None
    micro: MicroBatch | None
    is_fake: bool
    error: Exception | None = None
    """What stopped it."""

    @property
    def num_weights(self) -> int:
        return 0 if self.specimen is None else sum(p.numel() for p in self.specimen.model.parameters())


def trace_steps(
    subject: TrainableSpec,
    watchers: Sequence[Detector],
    *,
    device: str,
    size: int | None = None,
    is_fake: bool = True,
    truth: bool = False,
) -> TraceResult:
    """Makes the model anew and two optimizer steps with it, as the device would; `truth` answers conditions.

    `size` samples go through at once, or as many as a usual step has.
    """
    mode = fake_mode() if is_fake else None
    recorder = OperatorRecorder(watchers, backend=BACKENDS[device], answers=FakeExecutor(mode, truth=truth))
    specimen, micro, error = None, None, None
    with trace_environment():
        try:
            with mode or contextlib.nullcontext(), recorder:
                specimen = subject.make()
            # Data of a recipe is real: it is read among real tensors, and turned into fake ones then.
            usual = size if size is not None and specimen.is_scalable else specimen.size
            few = usual if is_fake or not specimen.is_scalable else min(usual, _FEW_SAMPLES)
            micro = specimen.micro(few)
            # Real ones are copied: a model may write to its inputs.
            micro = micro.moved(torch.clone if mode is None else mode.from_tensor)
            with mode or contextlib.nullcontext(), trace_as(device):
                _train(specimen, micro, recorder, device=device)
        except Exception as raised:
            error = raised
    return TraceResult(recorder=recorder, specimen=specimen, micro=micro, is_fake=is_fake, error=error)


def _train(specimen: Trainable, micro: MicroBatch, recorder: OperatorRecorder, *, device: str) -> None:
    """Two optimizer steps: what an optimizer keeps is there only from the second one on."""
    place = StandInDevice(device)
    model: nn.Module = specimen.model.train()
    optimizer = build_optimizer(specimen.optimizer, model, place)
    stepper = Stepper(model, optimizer, place)

    def updating(*_: object) -> None:
        recorder.phase = "updating"

    def training(*_: object) -> None:
        recorder.phase = "training"

    optimizer.register_step_pre_hook(updating)
    optimizer.register_step_post_hook(training)
    with recorder.function_mode(), recorder:
        training()
        stepper(specimen.loss, [micro], num_samples=len(micro), step=1)
        is_long = recorder.num_calls > _LONG_STEP
        recorder.notebook.step = 1
        if is_long:
            optimizer.step()
        else:
            stepper(specimen.loss, [micro], num_samples=len(micro), step=2)


@contextlib.contextmanager
def trace_environment() -> Iterator[None]:
    """Torch's generator is left as it was, and warnings of the trace itself are not the user's.

    What is compiled runs as it is written: the compiler would compile the trace.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _silent(_FAKE_LOG), force_eager():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


@contextlib.contextmanager
def _silent(log: logging.Logger) -> Iterator[None]:
    """Where fake tensors cannot go on torch prints a traceback; it is not the last word."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
