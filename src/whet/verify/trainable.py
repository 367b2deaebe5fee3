"""A model with its loss, optimizer and example data, as used by every check in this package."""

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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.parameter import is_lazy
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

from whet.base.errors import UsageError
from whet.data.batch import MicroBatch
from whet.plan.workload import Workload
from whet.step.loss import MicroLoss
from whet.step.optimizers import OptimizerChoice

# Returns the outputs of a causal model, of shape (batch, length, ...). Each position may depend only on itself and
# earlier positions.
OutputFunction = Callable[[MicroBatch], Tensor]


def adapt_outputs(function: Callable[[Any], Any]) -> OutputFunction:
    """Wrap a user's `outputs` function, which takes the data of a micro-batch instead of the micro-batch."""
    return lambda micro: function(micro.data)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainable:
    """A model with its loss, its optimizer and example batches, ready for optimizer steps.

    Its tensors are fake if it was created in a fake tensor mode.
    """

    model: nn.Module
    loss: MicroLoss
    make_batch: Callable[[int], MicroBatch]
    """Function that returns a micro-batch with the given number of samples, on the CPU."""
    batch_size: int
    """Number of samples in a normal step."""
    is_scalable: bool = True
    """Whether `make_batch` accepts sizes other than `batch_size`."""
    optimizer: OptimizerChoice = field(default_factory=OptimizerChoice)
    outputs: OutputFunction | None = None
    """Function that returns the outputs of a causal model; None for other models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainableSpec:
    """The name of a trainable and a factory that creates it, with fake or real tensors, as often as a check needs."""

    name: str
    make: Callable[[], Trainable]
    workload: Workload | None = None
    """Workload of a recipe, from which a check can make a plan for a machine; None for other models."""


def make_trainable(made: Sequence[Any], *, name: str, is_causal: bool = False) -> Trainable:
    """Return a trainable from (model, example inputs) or (model, example inputs, loss).

    `loss` is called with the model and the inputs. Without it, the loss is the output of the model if it is a scalar,
    or its `loss` field, as in transformers. Otherwise, the loss is the sum of the mean squares of all floating-point
    outputs.
    """
    if len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise UsageError(
            f"{name} returns neither a recipe nor a model with inputs",
            got=f"a {type(made).__name__} of {len(made)}",
            try_="return model, (x, y); or a third value, loss(model, x, y)",
        )
    model, inputs = _copy_if_shared(made[0]), made[1]
    _check_trainable(model)
    own_loss = made[2] if len(made) == 3 else None
    if own_loss is not None and not callable(own_loss):
        raise UsageError("the loss is not callable", got=type(own_loss).__name__, try_="loss(model, x, y)")
    leaves, tree = tree_flatten_with_path(_as_mapping(inputs))
    tensors = {_tensor_name(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
    if not tensors:
        raise UsageError("the example inputs contain no tensor", got=type(inputs).__name__, try_="return model, (x,)")
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors.values()}
    batch_size = max(sizes)
    if batch_size == 0 and any(tensor.dim() for tensor in tensors.values()):
        raise UsageError("the example inputs contain no sample", got="a batch of 0", try_="inputs of a normal batch")

    def make_batch(size: int) -> MicroBatch:
        fields = {name: value if size == batch_size else _resized(value, size) for name, value in tensors.items()}
        return MicroBatch(fields=fields, ids=np.arange(size))

    def call(function: Callable[..., Any], first: tuple[Any, ...], batch: MicroBatch) -> Any:
        # Only tensors come from the batch. Strings, numbers and their containers are passed unchanged.
        values = [batch.fields.get(_tensor_name(path), leaf) for path, leaf in leaves]
        named: dict[str, Any] = tree_unflatten(values, tree)
        return function(*first, **named) if isinstance(inputs, Mapping) else function(*first, *named.values())

    def loss(batch: MicroBatch) -> Any:
        if own_loss is not None:
            return call(own_loss, (model,), batch)
        return _as_loss(call(model, (), batch))

    def outputs(batch: MicroBatch) -> Any:
        if own_loss is None or _accepts(model, inputs):
            return call(model, (), batch)
        # The model does not accept all inputs. Inputs after the first, such as labels, are for the loss.
        return model(next(iter(batch.fields.values())))

    return Trainable(
        model=model,
        loss=loss,
        make_batch=make_batch,
        batch_size=batch_size,
        is_scalable=len(sizes) == 1 and batch_size > 0,
        outputs=outputs if is_causal else None,
    )


# Models that a factory has returned before. A factory that returns the same model again holds a reference to it.
_SEEN_MODELS: WeakSet[nn.Module] = WeakSet()


def _copy_if_shared(model: nn.Module) -> nn.Module:
    """Return the model, or a copy if the factory holds a reference to it, because a check changes the model."""
    mode = detect_fake_mode()
    tensors = [*model.parameters(), *model.buffers()]
    real = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
    if mode is None and len(real) < len(tensors):
        raise UsageError(
            "the factory returned a model that it made in an earlier call, with fake tensors",
            got="a shared model",
            try_="a function that makes a new model in each call",
        )
    is_shared = bool(real) and (mode is not None or model in _SEEN_MODELS)
    _SEEN_MODELS.add(model)
    if not is_shared:
        return model
    # In a fake tensor mode the copy gets fake tensors, which take no memory.
    memo = {} if mode is None else {id(tensor): mode.from_tensor(tensor) for tensor in tensors}
    with unset_fake_temporarily():
        return copy.deepcopy(model, memo)


def use_fake_weights(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace all parameters and buffers of a model with fake tensors, in place. Shared tensors stay shared."""
    fakes: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not isinstance(tensor, FakeTensor):
                    fakes[tensor] = fakes.get(tensor, mode.from_tensor(tensor))
                    tensors[name] = fakes[tensor]  # type: ignore[assignment]


def _check_trainable(model: nn.Module) -> None:
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError(
            "the model has lazy layers whose shapes are not known yet",
            got=type(model).__name__,
            try_="call model(x) once before returning it",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            "the model has no trainable parameters", got="no trainable parameter", try_="a model with trainable weights"
        )


def _accepts(model: nn.Module, inputs: Any) -> bool:
    """Return whether the model can be called with all inputs."""
    try:
        if isinstance(inputs, Mapping):
            inspect.signature(model.forward).bind(**inputs)
        else:
            inspect.signature(model.forward).bind(*_as_mapping(inputs).values())
    except TypeError:
        return False
    return True


def _tensor_name(path: tuple[Any, ...]) -> str:
    """Return the name of an input tensor, such as "input0", or "input0['mask']" for a nested tensor."""
    return f"{path[0].key}{keystr(path[1:])}"


def _as_mapping(inputs: Any) -> dict[str, Any]:
    if isinstance(inputs, Mapping):
        return dict(inputs)
    values = inputs if isinstance(inputs, tuple | list) else (inputs,)
    return {f"input{index}": value for index, value in enumerate(values)}


def _resized(value: Tensor, size: int) -> Tensor:
    """Return the first `size` rows, repeating rows if there are fewer. A scalar is returned unchanged."""
    return value if value.dim() == 0 else value[torch.arange(size) % len(value)]


def _as_loss(output: Any) -> Tensor:
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    # Transformers models return their loss as a field of the output.
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not tensors:
        raise UsageError(
            "the model returns no floating-point tensor to train on",
            got=type(output).__name__,
            try_="a third value, loss(model, x, y)",
        )
    return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()
