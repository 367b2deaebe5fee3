"""Loss functions: how they are called, what they may return, and how micro-batches are weighted in a step.

A mean over the samples of a micro-batch is weighted by the number of samples. A pair (sum, weight) provides its own
weight, such as the number of tokens for a language model. The loss of a step is the sum of all parts divided by the sum
of all weights, however the batch is split.
"""

import functools
import inspect
import itertools
import math
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from whet.base.errors import UsageError, WhetError
from whet.data.batch import MicroBatch
from whet.step.compilation import compiled_loss

_TINY = 1e-37

LossFunction = Callable[..., Any]
"""A loss from the user: `loss(micro)`, or a torch loss of (input, target) such as F.cross_entropy or nn.MSELoss()."""
MicroLoss = Callable[[MicroBatch], Any]
"""A loss in the form in which whet calls it."""


class BatchLoss:
    """A user's loss, called with the data of a micro-batch in the user's own batch type."""

    def __init__(self, function: LossFunction, model: nn.Module) -> None:
        self.function = function
        self.model = model
        self.is_observed = False
        """Whether the source code of the loss has been compared with the code that the run started with."""
        self._is_criterion = _is_criterion(function, model)
        self._has_tensors = (
            self._is_criterion
            and isinstance(function, nn.Module)
            and any(True for _ in itertools.chain(function.buffers(), function.parameters()))
        )

    def __call__(self, micro: MicroBatch) -> Any:
        data, compiled = micro.data, compiled_loss(self.model)
        if not self._is_criterion:
            return self.function(data) if compiled is None else compiled(micro, self.function, data)
        pair = _as_pair(data, self.function)
        return self._criterion_loss(*pair) if compiled is None else compiled(micro, self._criterion_loss, *pair)

    def _criterion_loss(self, inputs: Any, target: Any) -> Any:
        outputs = self.model(inputs)
        if self._has_tensors and isinstance(outputs, Tensor):
            self._move_criterion(outputs.device)
        return self.function(outputs, target)

    def _move_criterion(self, device: torch.device) -> None:
        """Move the tensors of a criterion, such as class weights, to the device on which the model computes."""
        held = next(itertools.chain(self.function.buffers(), self.function.parameters()))  # type: ignore[attr-defined]
        if held.device != device:
            self.function.to(device)  # type: ignore[attr-defined]


def adapt_loss(loss: Any, model: nn.Module) -> BatchLoss:
    """Wrap a user's loss in a BatchLoss. Raise UsageError if it cannot be called with a micro-batch."""
    if isinstance(loss, BatchLoss):
        return loss
    if not callable(loss):
        raise UsageError("the loss is not callable", got=type(loss).__name__, try_="loss=lambda batch: ...")
    return BatchLoss(loss, model)


_MAX_DEPTH, _MAX_PARTS = 4, 16
_CONSTANTS = (str, bool, type, types.BuiltinFunctionType, types.ModuleType)


def loss_code(loss: Any) -> Hashable:
    """Return a key that identifies a loss across steps: its code and that of the functions and modules it refers to.

    A loop may redefine a loss in each step, with different scalars and tensors. Its key remains the same, and does not
    keep any of those objects alive.
    """
    code: Hashable = _code(loss.function if isinstance(loss, BatchLoss) else loss, _MAX_DEPTH)
    return code


def _code(value: Any, depth: int) -> Any:
    if type(value) in weakref.ProxyTypes:
        # A proxy whose object no longer exists: isinstance would raise.
        return type(value)
    if value is None or isinstance(value, _CONSTANTS):
        return value
    if depth == 0:
        return type(value)

    def codes(values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple([_code(part, depth - 1) for part in values])

    if isinstance(value, functools.partial):
        return _code(value.func, depth - 1), codes(value.args), *value.keywords, codes(value.keywords.values())
    function = getattr(value, "__func__", value)
    if isinstance(code := getattr(function, "__code__", None), types.CodeType):
        cells = [_cell_contents(cell) for cell in function.__closure__ or ()]
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        return code, type(getattr(value, "__self__", None)), codes(cells), codes(defaults)
    if isinstance(value, tuple | list | dict):
        return type(value), codes(itertools.islice(value.values() if isinstance(value, dict) else value, _MAX_PARTS))
    if isinstance(value, nn.Module) and next(itertools.chain(value.parameters(), value.buffers()), None) is not None:
        # Weak references to the same object are equal, and keep neither the module nor its id in use.
        key: Any = weakref.ref(value) if type(value).__hash__ is nn.Module.__hash__ else type(value)
        return key
    # A criterion or another callable object: include its functions and flags, such as reduction="sum".
    return type(value), codes(vars(value).values() if callable(value) and hasattr(value, "__dict__") else ())


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # The variable is not bound yet, so its cell is empty.
        return None


def _is_criterion(loss: Any, model: nn.Module) -> bool:
    """Return whether a loss is called as loss(model(x), y) rather than loss(micro)."""
    if loss is model:
        raise UsageError(
            "the model is not its own loss", got="loss=model", try_="loss=lambda batch: model(**batch).loss"
        )
    num_required, num_accepted = _num_arguments(loss.forward if isinstance(loss, nn.Module) else loss)
    if num_required <= 1 <= num_accepted:
        return isinstance(loss, nn.modules.loss._Loss)
    # A partial such as partial(F.cross_entropy, label_smoothing=0.1).
    function = loss.func if isinstance(loss, functools.partial) else loss
    is_torch = isinstance(function, nn.Module) or str(getattr(function, "__module__", "")).startswith("torch.")
    if num_required == 2 and is_torch:
        return True
    name, arguments = _name(loss), {0: "", 2: f"model(batch[0]), batch[1]{_options(loss)}"}.get(num_required, "...")
    raise UsageError(
        "a loss function takes one argument, the micro-batch",
        got=f"{name} with {num_required} required arguments",
        try_=f"loss=lambda batch: {name}({arguments})",
    )


def _name(loss: Any) -> str:
    """Return the name of a loss as the user would type it; "loss_fn" for a lambda, which has no name."""
    name = getattr(loss.func if isinstance(loss, functools.partial) else loss, "__name__", type(loss).__name__)
    return str(name) if str(name).isidentifier() else "loss_fn"


def _options(loss: Any) -> str:
    """Return the keyword arguments of a partial as the user would type them."""
    given = loss.keywords if isinstance(loss, functools.partial) else {}
    return "".join(
        f", {name}={value!r}" if isinstance(value, str | float | int) else f", {name}=..."
        for name, value in given.items()
    )


def _num_arguments(function: Callable[..., Any]) -> tuple[int, float]:
    """Return how many positional arguments a function requires and how many it accepts; (1, 1) if unknown."""
    if (
        type(function) is types.FunctionType
        and not function.__dict__
        and not function.__code__.co_flags & inspect.CO_VARARGS
    ):
        # Read from the code: inspect.signature takes 20 us, and a loop may redefine its loss in each step.
        count = function.__code__.co_argcount
        return count - len(function.__defaults__ or ()), count
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1, 1
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    has_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return sum(p.default is p.empty for p in positional), math.inf if has_any else len(positional)


def _as_pair(data: Any, loss: Any) -> tuple[Any, Any]:
    if isinstance(data, tuple | list) and len(data) == 2:
        return data[0], data[1]
    name = _name(loss)
    got = f"a dict with {', '.join(map(str, data))}" if isinstance(data, Mapping) else f"a {type(data).__name__}"
    if isinstance(data, tuple | list):
        got = f"a {type(data).__name__} of {len(data)}"
    raise UsageError(
        f"{name} needs batches that are pairs (x, y)",
        got=got,
        try_=f"loss=lambda batch: {name}(model(...), ...{_options(loss)})",
    )


# --- return values of a loss -----------------------------------------------------------------------------------------


def parse_loss(returned: Any) -> tuple[Tensor, Tensor | float | None]:
    """Convert the return value of a loss to (mean, None) or (sum, weight). Raise WhetError for unsupported values.

    A loss may return a scalar, a pair (sum, weight), a dict with "loss", or an object with `.loss` (transformers).
    """
    weight: Any = None
    if isinstance(returned, Mapping) and "loss" in returned:
        total = returned["loss"]
    elif isinstance(returned, tuple | list) and len(returned) == 2 and not hasattr(returned, "_fields"):
        total, weight = returned
    elif not isinstance(returned, Tensor) and hasattr(returned, "loss"):
        total = returned.loss
    else:
        total = returned
    if not isinstance(total, Tensor):
        raise WhetError(
            "the loss must be a tensor",
            got=type(total).__name__,
            try_="return loss, not loss.item()"
            if isinstance(total, int | float)
            else 'return loss, (sum of losses, weight), {"loss": loss}, or an output with .loss',
        )
    if total.numel() != 1:
        raise WhetError(
            "the loss must be one number",
            got=f"a tensor of shape {tuple(total.shape)}",
            try_="loss.mean(), or the pair (loss.sum(), loss.numel())",
        )
    if total.is_complex():
        raise WhetError("the loss must be a real number", got=str(total.dtype), try_="loss.abs() or loss.real")
    if torch.is_grad_enabled() and not total.requires_grad:
        raise WhetError(
            "the loss does not depend on any parameter",
            got="a tensor without a gradient",
            try_="compute it from the model's output, without detach() or no_grad()",
        )
    _check_weight(weight)
    # Convert to the dtype of the loss: an integer weight would make the division use float32, even in a float64 model.
    weight = weight.detach().reshape(()).to(total.dtype) if isinstance(weight, Tensor) else weight
    return total if total.dim() == 0 else total.reshape(()), weight


def _check_weight(weight: Any) -> None:
    """Raise WhetError if the second value of a pair is not a valid weight."""
    hint = 'the pair (sum of losses, weight), or {"loss": loss, "name": metric} to log a metric'
    if weight is not None and not isinstance(weight, Tensor | SupportsFloat):
        raise WhetError("the loss's weight must be a number", got=f"a {type(weight).__name__}", try_=hint)
    if not isinstance(weight, Tensor):
        return
    if weight.numel() != 1:
        raise WhetError("the loss's weight must be one number", got=f"shape {tuple(weight.shape)}", try_="weight.sum()")
    if weight.is_complex():
        raise WhetError("the loss's weight must be a real number", got=str(weight.dtype), try_=hint)
    if weight.requires_grad:
        raise WhetError(
            "a pair of a loss is (sum of losses, weight), and a weight has no gradient",
            got="a second value that requires a gradient",
            try_=f"loss + other, if it is a loss; weight.detach(); {hint}",
        )


def loss_scalars(returned: Any) -> dict[str, Tensor]:
    """Return the scalars to log: all entries of a dict besides "loss". Complex numbers are left out."""
    if not isinstance(returned, Mapping) or hasattr(returned, "to_tuple"):
        return {}
    return {
        # Events receive their fields as keyword arguments of methods, so "self" is taken.
        "self_" if name == "self" else str(name): value.detach().reshape(())
        for name, value in returned.items()
        if name != "loss" and isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    }


def mean_loss(returned: Any) -> Tensor:
    """Return the mean loss of a micro-batch from what a loss returned."""
    total, weight = parse_loss(returned)
    return total if weight is None else total / clamp_weight(weight)


def clamp_weight(weight: Tensor | float) -> Tensor | float:
    """Clamp the weight to at least the smallest positive number, so that a batch without labels has loss 0, not NaN."""
    if isinstance(weight, Tensor):
        return weight.clamp(min=torch.finfo(weight.dtype).tiny)
    return max(float(weight), _TINY)
