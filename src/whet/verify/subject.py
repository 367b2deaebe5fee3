"""What is verified: a model, its loss and some of its data, made anew as often as a question needs it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from whet.base.errors import UsageError
from whet.data.batch import Micro
from whet.plan.workload import Workload
from whet.step.loss import LossFunction
from whet.step.optimizer import OptimizerChoice

Outputs = Callable[[Micro], Tensor]
"""What a causal model gives, of shape (batch, length, ...): each place may depend on itself and earlier ones only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Specimen:
    """One model with all that a step needs; its tensors are fake where it was made among fake ones."""

    model: nn.Module
    loss: LossFunction
    micro: Callable[[int], Micro]
    """A micro-batch of so many samples, on the CPU."""
    size: int
    """How many samples a usual step has."""
    is_scalable: bool = True
    """Whether `micro` can give another number of samples than `size`."""
    optimizer: OptimizerChoice = field(default_factory=OptimizerChoice)
    outputs: Outputs | None = None
    """Given for a causal model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A name, and how to make the model behind it: among fake tensors for a trace, for real to compute."""

    name: str
    make: Callable[[], Specimen]
    workload: Workload | None = None
    """What a plan must know of it, where a recipe tells."""


def specimen_of(made: Sequence[Any], *, word: str, is_causal: bool = False) -> Specimen:
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
    model, inputs = made[0], made[1]
    own_loss = made[2] if len(made) == 3 else None
    named = _named(inputs)
    tensors = [leaf for leaf in tree_leaves(named) if isinstance(leaf, Tensor)]
    if not tensors:
        raise UsageError("the example inputs hold no tensor", got=type(inputs).__name__, try_="return model, (x,)")
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    size = max(sizes)
    is_scalable = len(sizes) == 1 and size > 0

    def micro(wanted: int) -> Micro:
        fields = named if wanted == size else tree_map(lambda value: _resized(value, wanted), named)
        return Micro(fields=fields, ids=np.arange(wanted))

    def call(function: Callable[..., Any], first: tuple[Any, ...], given: Micro) -> Any:
        if isinstance(inputs, Mapping):
            return function(*first, **given.fields)
        return function(*first, *given.fields.values())

    def loss(given: Micro) -> Any:
        if own_loss is not None:
            return call(own_loss, (model,), given)
        return _as_loss(call(model, (), given))

    return Specimen(
        model=model,
        loss=loss,
        micro=micro,
        size=size,
        is_scalable=is_scalable,
        outputs=(lambda given: call(model, (), given)) if is_causal else None,
    )


def _named(inputs: Any) -> dict[str, Any]:
    if isinstance(inputs, Mapping):
        return dict(inputs)
    values = inputs if isinstance(inputs, tuple | list) else (inputs,)
    return {f"input{index}": value for index, value in enumerate(values)}


def _resized(value: Any, wanted: int) -> Any:
    """The first rows; repeated where there are too few."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return value[torch.arange(wanted) % len(value)]


def _as_loss(output: Any) -> Tensor:
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    # A library's output may carry its own loss.
    own = output.get("loss") if isinstance(output, Mapping) else None
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
