"""Record the random draws of a computation, and replay them for some of its samples or on another device.

Two computations of the same samples can be compared only if both use the same dropout masks and noise.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from whet.device.rng import get_host_rng, set_host_rng

_aten = torch.ops.aten
_IN_PLACE = {
    _aten.bernoulli_, _aten.normal_, _aten.uniform_, _aten.random_, _aten.exponential_, _aten.log_normal_,
    _aten.cauchy_, _aten.geometric_,
}  # fmt: skip
_LIKE = {_aten.rand_like, _aten.randn_like, _aten.randint_like}
_NEW = {
    *_LIKE, _aten.rand, _aten.randn, _aten.randint, _aten.randperm, _aten.bernoulli, _aten.normal, _aten.poisson,
    _aten.multinomial, _aten.binomial, _aten._standard_gamma, _aten._sample_dirichlet,
}  # fmt: skip
_DROPOUT = _aten.native_dropout
_DROPOUT_ARGUMENTS = ("dropout_p", "dropout")


class UnrepeatableDrawError(Exception):
    """Raised if random draws cannot be attributed to single samples or cannot be replayed."""


class RecordedDraws:
    """The random draws of a computation, in order, and the tensors they depend on, such as probabilities.

    With `num_samples`, every draw must have one row per sample, so that it can be replayed for some of the samples.
    """

    def __init__(self, num_samples: int | None = None) -> None:
        self.num_samples = num_samples
        self.drawn: list[tuple[Any, Tensor]] = []
        """Each operator and the values that it drew, in order."""
        self.parameters: dict[str, Tensor] = {}
        """Tensors that the draws of the last computation depended on.

        Compare them like results: replaying the recorded values would otherwise hide a wrong probability.
        """
        self._host: Any = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record all random draws inside the `with` block."""
        self.drawn, self.parameters, self._host = [], {}, get_host_rng()
        with _Recorder(self):
            yield

    @contextmanager
    def repeat(self, rows: slice = slice(None)) -> Iterator[None]:
        """Replay the recorded draws of these samples inside the `with` block."""
        self.parameters = {}
        replayer = _Replayer(self, rows)
        with replayer:
            yield
        if replayer.number != len(self.drawn):
            raise UnrepeatableDrawError(f"{replayer.number} random draws, and {len(self.drawn)} before")

    @contextmanager
    def record_or_repeat(self) -> Iterator[None]:
        """Record the draws of the first computation, and replay them in later ones.

        Later computations start with the same state of the generators of Python and NumPy.
        """
        if self._host is None:
            with self.record():
                yield
            return
        set_host_rng(self._host)
        with self.repeat():
            yield

    def add_parameters(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, number: int) -> None:
        """Store copies of the floating-point tensors that a draw depends on."""
        packet = func.overloadpacket
        given = args[1:] if packet in _IN_PLACE else args
        if packet in _LIKE or packet is _DROPOUT:
            return
        for index, leaf in enumerate((*given, *kwargs.values())):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.parameters[f"{packet}, draw {number + 1}, {index}"] = leaf.detach().cpu().clone()


def _is_random(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    packet = operator.overloadpacket
    # torch 2.13 has no tag for random_, binomial and _sample_dirichlet.
    if torch.Tag.nondeterministic_seeded not in operator.tags and packet not in _IN_PLACE | _NEW:
        return False
    # Attention and recurrent kernels draw only if their dropout probability is not zero.
    for number, argument in enumerate(operator._schema.arguments):
        if argument.name in _DROPOUT_ARGUMENTS:
            given = args[number] if number < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return True


def _kind(operator: Any) -> Any:
    """Return the operator without its overload, and bernoulli_ for native_dropout.

    Dropout is one operator on CUDA, and a mask drawn with bernoulli_ on other devices.
    """
    return _aten.bernoulli_ if operator.overloadpacket is _DROPOUT else operator.overloadpacket


class _DrawMode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here. Returning True would make torch import its compiler, which takes seconds.
        return False


class _Recorder(_DrawMode):
    def __init__(self, draws: RecordedDraws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, draws = kwargs or {}, self._draws
        if not _is_random(func, args, kwargs):
            return func(*args, **kwargs)
        draws.add_parameters(func, args, kwargs, number=len(draws.drawn))
        result = func(*args, **kwargs)
        # native_dropout returns its output and the mask. The mask is the draw.
        drawn = result[1] if func.overloadpacket is _DROPOUT else result
        if not isinstance(drawn, Tensor) or func.overloadpacket not in _IN_PLACE | _NEW | {_DROPOUT}:
            raise UnrepeatableDrawError(f"{func.overloadpacket} draws inside a kernel")
        if draws.num_samples is not None and (drawn.dim() == 0 or drawn.shape[0] != draws.num_samples):
            raise UnrepeatableDrawError(f"random numbers of shape {tuple(drawn.shape)} for the whole batch")
        # Store masks as bool, which takes a quarter of the memory.
        is_mask = _kind(func) is _aten.bernoulli_
        draws.drawn.append((_kind(func), drawn.bool() if is_mask and drawn.dtype != torch.bool else drawn.clone()))
        return result


class _Replayer(_DrawMode):
    def __init__(self, draws: RecordedDraws, rows: slice) -> None:
        super().__init__()
        self._draws, self._rows = draws, rows
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, draws = kwargs or {}, self._draws
        if not _is_random(func, args, kwargs):
            return func(*args, **kwargs)
        if self.number >= len(draws.drawn) or draws.drawn[self.number][0] is not _kind(func):
            raise UnrepeatableDrawError(f"random draw {self.number + 1}, {func.overloadpacket}, was not made before")
        draws.add_parameters(func, args, kwargs, number=self.number)
        values = draws.drawn[self.number][1]
        values = values if self._rows == slice(None) else values[self._rows]
        self.number += 1
        # Run the operator anyway: it determines the shape, dtype and device of the result.
        result = func(*args, **kwargs)
        is_dropout = func.overloadpacket is _DROPOUT
        target = result[1] if is_dropout else result
        if target.shape != values.shape:
            shapes = f"{tuple(target.shape)}, and {tuple(values.shape)} before"
            raise UnrepeatableDrawError(f"random draw {self.number}, {func.overloadpacket}, has shape {shapes}")
        # Copy first and convert later, because MPS gives wrong results for copies that also convert.
        target.copy_(values.to(target.device).to(target.dtype))
        if is_dropout:
            share = args[1]
            return args[0] * target / (1 - share) if share < 1 else torch.zeros_like(args[0]), target
        return result
