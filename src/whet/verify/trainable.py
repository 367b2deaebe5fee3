"""A model with its loss, optimizer and example data: the object of every check in this package."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.parameter import is_lazy
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

from whet.base.errors import UsageError
from whet.data.batch import MicroBatch
from whet.plan.workload import Workload
from whet.step.loss import LossFunction
from whet.step.optimizers import OptimizerChoice

OutputFunction = Callable[[MicroBatch], Tensor]
"""What a causal model gives, of shape (batch, length, ...): each place may depend on itself and earlier ones only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainable:
    """One model with all that a step needs; its tensors are fake where it was made among fake ones."""

    model: nn.Module
    loss: LossFunction
    micro: Callable[[int], MicroBatch]
    """A micro-batch of so many samples, on the CPU."""
    size: int
    """How many samples a usual step has."""
    is_scalable: bool = True
    """Whether `micro` can give another number of samples than `size`."""
    optimizer: OptimizerChoice = field(default_factory=OptimizerChoice)
    outputs: OutputFunction | None = None
    """Given for a causal model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainableSpec:
    """A name, and how to make the model behind it: among fake tensors for a trace, for real to compute."""

    name: str
    make: Callable[[], Trainable]
    workload: Workload | None = None
    """What a plan must know of it, where a recipe tells."""


def make_trainable(made: Sequence[Any], *, word: str, is_causal: bool = False) -> Trainable:
    """A specimen from (model, example inputs) or (model, example inputs, loss).

    `loss` is called with the model and the inputs. Without one, the model's output is the loss if it is one number,
    else the mean square of all that it returns.
    """
    if len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise UsageError(
            f"what {word} gives is neither a recipe nor a model with inputs",
            got=f"a {type(made).__name__} of {len(made)}",
            try_="return model, (x, y); or a third value, loss(model, x, y)",
        )
    model, inputs = _copy_if_shared(made[0]), made[1]
    _check_trainable(model)
    own_loss = made[2] if len(made) == 3 else None
    if own_loss is not None and not callable(own_loss):
        raise UsageError("the loss cannot be called", got=type(own_loss).__name__, try_="loss(model, x, y)")
    leaves, tree = tree_flatten_with_path(_as_mapping(inputs))
    tensors = {_tensor_name(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
    if not tensors:
        raise UsageError("the example inputs hold no tensor", got=type(inputs).__name__, try_="return model, (x,)")
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors.values()}
    size = max(sizes)
    if size == 0 and any(tensor.dim() for tensor in tensors.values()):
        raise UsageError("the example inputs hold no sample", got="a batch of 0", try_="inputs of a usual batch")
    is_scalable = len(sizes) == 1 and size > 0

    def micro(wanted: int) -> MicroBatch:
        fields = {name: value if wanted == size else _resized(value, wanted) for name, value in tensors.items()}
        return MicroBatch(fields=fields, ids=np.arange(wanted))

    def call(function: Callable[..., Any], first: tuple[Any, ...], given: MicroBatch) -> Any:
        # Only tensors are moved; words, numbers and what holds them are as they were.
        values = [given.fields.get(_tensor_name(path), leaf) for path, leaf in leaves]
        named: dict[str, Any] = tree_unflatten(values, tree)
        return function(*first, **named) if isinstance(inputs, Mapping) else function(*first, *named.values())

    def loss(given: MicroBatch) -> Any:
        if own_loss is not None:
            return call(own_loss, (model,), given)
        return _as_loss(call(model, (), given))

    def outputs(given: MicroBatch) -> Any:
        if own_loss is None or _accepts(model, inputs):
            return call(model, (), given)
        # What comes behind the first input is the loss's, as labels are.
        return model(next(iter(given.fields.values())))

    return Trainable(
        model=model,
        loss=loss,
        micro=micro,
        size=size,
        is_scalable=is_scalable,
        outputs=outputs if is_causal else None,
    )


_SEEN_MODELS: WeakSet[nn.Module] = WeakSet()
"""Models that were given before: whoever gives one again keeps it."""
_BUILD_IN_CALL = "a function that makes the model anew in each call"


def _copy_if_shared(model: nn.Module) -> nn.Module:
    """The model, or a copy of one that lives elsewhere: it is trained, and its owner must not notice."""
    mode = detect_fake_mode()
    tensors = [*model.parameters(), *model.buffers()]
    real = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
    if mode is None and len(real) < len(tensors):
        raise UsageError(
            "the model is one that was made before, without numbers", got="a kept model", try_=_BUILD_IN_CALL
        )
    is_kept = bool(real) and (mode is not None or model in _SEEN_MODELS)
    _SEEN_MODELS.add(model)
    if not is_kept:
        return model
    # Among fake tensors a copy has fake ones, which take no memory.
    known = {} if mode is None else {id(tensor): mode.from_tensor(tensor) for tensor in tensors}
    with unset_fake_temporarily():
        return copy.deepcopy(model, known)


def _check_trainable(model: nn.Module) -> None:
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError(
            "the model has lazy layers whose shapes are not known yet",
            got=type(model).__name__,
            try_="call model(x) once before it is returned",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("the model has nothing to train", got="no parameter", try_="a model with weights")


def _accepts(model: nn.Module, inputs: Any) -> bool:
    """Whether the model itself can be called with all inputs."""
    try:
        if isinstance(inputs, Mapping):
            inspect.signature(model.forward).bind(**inputs)
        else:
            inspect.signature(model.forward).bind(*_as_mapping(inputs).values())
    except TypeError:
        return False
    return True


def _tensor_name(path: tuple[Any, ...]) -> str:
    """input0, or input0['mask'] for a tensor that lies deeper."""
    return f"{path[0].key}{keystr(path[1:])}"


def _as_mapping(inputs: Any) -> dict[str, Any]:
    if isinstance(inputs, Mapping):
        return dict(inputs)
    values = inputs if isinstance(inputs, tuple | list) else (inputs,)
    return {f"input{index}": value for index, value in enumerate(values)}


def _resized(value: Tensor, wanted: int) -> Tensor:
    """The first rows; repeated where there are too few."""
    return value if value.dim() == 0 else value[torch.arange(wanted) % len(value)]


def _as_loss(output: Any) -> Tensor:
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    # A library's output may carry its own loss.
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    numbers = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not numbers:
        raise UsageError(
            "the model returns no number to train on",
            got=type(output).__name__,
            try_="a third value, loss(model, x, y)",
        )
    return torch.stack([number.float().square().mean() for number in numbers]).sum()
