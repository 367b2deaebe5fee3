"""How much memory does a training hold between steps, and for what? Counted from the tensors that are there."""

from collections.abc import Iterable

from torch import Tensor

from whet.step.ema import named_tensors
from whet.step.step import Stepper


def held_memory(stepper: Stepper) -> dict[str, int]:
    """Bytes of weights, gradients, optimizer state and average, after a step; what is frozen has weights alone.

    Of a model in parts, what lies in this process.
    """

    def count(tensors: Iterable[Tensor]) -> int:
        here = (stepper.joining.local(tensor) for tensor in tensors)
        return sum(tensor.numel() * tensor.element_size() for tensor in here)

    state = (value for slot in stepper.optimizer.state.values() for value in slot.values() if isinstance(value, Tensor))
    gradients = (parameter.grad for parameter in stepper.model.parameters() if parameter.grad is not None)
    held = {
        "weights": count(tensor for _, tensor in named_tensors(stepper.model)),
        "gradients": count(gradients),
        "optimizer": count(state),
    }
    return held if stepper.ema is None else {**held, "average": count(stepper.ema.average.values())}
