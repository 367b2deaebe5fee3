"""What does a step ask of a device? Every operator is seen as the device would get it, with the line it comes from."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whet.device.mps_operators import ALWAYS_ON_CPU, Status, operators_of_torch, status_of
from whet.verify.answering import Answers
from whet.verify.lines import Line, line_at_work
from whet.verify.preflight.finding import Sighting
from whet.verify.preflight.host import ASKS, HostTensors
from whet.verify.preflight.notebook import Notebook
from whet.verify.preflight.recurrent import in_short, is_long_recurrence
from whet.verify.preflight.watcher import Call, Phase, Watcher

_OWN_WAY = frozenset(
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
_DEEPEST = 8
_KEYS = {
    name: getattr(torch._C.DispatchKey, name)
    for name in (
        "CompositeExplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
        "CompositeImplicitAutograd",
    )
}


class Recorder(TorchDispatchMode):
    """Tells watchers of every operator that a backend gets, and runs it; what fake tensors cannot say is answered."""

    def __init__(self, watchers: Sequence[Watcher], *, backend: str, answers: Answers) -> None:
        super().__init__()
        self.notebook = Notebook()
        self.phase: Phase = "making"
        self.num_calls = 0
        self.host = HostTensors()
        self.answers = answers
        self._watchers = watchers
        self.backend = backend
        self._statuses: dict[str, Status] = {}
        self._lines: dict[int, Line | None] = {}
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
        return _Functions(self)

    def note(self, sightings: Iterable[Sighting]) -> None:
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
        call = Call(func, name, args, kwargs, inputs, outputs, self.phase, is_backward)
        for watcher in self._watchers:
            self.note(watcher.operator(call))
        return result

    def _follow(self, func: Any, name: str, args: Any, kwargs: Any, inputs: list[Tensor]) -> tuple[Any, bool]:
        """Runs an operator that the backend runs in parts by those parts, so that they are seen."""
        status = self._statuses.get(name)
        if status is None:
            status = self._statuses[name] = status_of(name, operators_of_torch(), backend=self.backend)
        key = _KEYS.get(status.way)
        if key is None or name.partition(".")[0] in _OWN_WAY or self._depth >= _DEEPEST:
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
            self._lines[number] = line_at_work()

    def _line(self) -> tuple[Line | None, bool]:
        line = line_at_work()
        node = torch._C._current_autograd_node()
        if line is None and node is not None:
            return self._lines.get(node._sequence_nr()), True
        return line, False


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self._recorder
        if recorder.phase != "training" or recorder.is_paused:
            return func(*args, **kwargs)
        is_asked = func in ASKS and isinstance(args[0], Tensor)
        if is_asked and recorder.host.holds_all([args[0]]):
            return recorder.answers.value(func, args, kwargs)
        recorder.about_to_call(func, args, kwargs)
        if func in _ON_CPU and recorder.backend == "MPS":
            # MPS sends the whole call to the CPU; its parts are never asked of it.
            with recorder.paused():
                return func(*args, **kwargs)
        if is_asked and ASKS[func].is_asking(args, kwargs):
            with recorder.paused():
                result = recorder.answers.value(func, args, kwargs)
            recorder.host.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            return result
        if recorder.answers.are_fake and is_long_recurrence(func, args):
            return in_short(func, args, recorder.paused)
        result = func(*args, **kwargs)
        if func is torch.tensor and kwargs.get("device") is not None:
            recorder.host.remove(result)
        return result


def _last_node() -> int:
    """The number of the autograd node that was made last."""
    return int(torch._C._autograd._get_sequence_nr()) - 1
