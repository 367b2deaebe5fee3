"""Find the layer or the batch that caused an exception, from its traceback."""

from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from whet.data.batch import MicroBatch
from whet.training.evaluator import Evaluator

_MAX_TENSORS = 4
_LOOP = "whet.training.loop"
_CLASSIFICATION_LOSSES = ("cross_entropy", "nll_loss")


def note_failed_layer(error: BaseException | None, model: nn.Module) -> None:
    """Add a note to an exception that names the innermost layer or torch.nn.functional function and its arguments.

    If a key or index is missing outside a layer, the note names the fields of the batch instead. Nothing is computed:
    the frames of the traceback still hold the arguments. Another note names the data of a failed evaluation.
    """
    if error is None:
        return
    description = _describe_layer(error, model) or _describe_function(error) or _describe_batch(error)
    for note in (description, _describe_evaluation(error)):
        if note is not None and f"whet: {note}" not in getattr(error, "__notes__", ()):
            error.add_note(f"whet: {note}")


def _describe_layer(error: BaseException, model: nn.Module) -> str | None:
    names = {id(module): name for name, module in model.named_modules()}
    description = None
    for frame in _frames(error):
        module = frame.f_locals.get("self")
        is_forward = frame.f_code.co_name == "forward" and isinstance(module, nn.Module) and id(module) in names
        if is_forward and (got := _tensor_arguments(frame)):
            description = f"{_layer_name(names[id(module)], module)}, got {got}"
    return description


def _layer_name(name: str, module: Any) -> str:
    kind = type(module).__name__
    # The repr of a container is too long.
    what = kind if any(True for _ in module.children()) else f"{kind}({module.extra_repr()})"
    return f"layer {name}, {what}" if name else f"model {kind}"


def _describe_function(error: BaseException) -> str | None:
    """Describe the innermost torch.nn.functional function in the traceback, such as a loss; None if there is none."""
    description = None
    for frame in _frames(error):
        is_functional = frame.f_globals.get("__name__") == "torch.nn.functional"
        if is_functional and (got := _tensor_arguments(frame)):
            description = f"{frame.f_code.co_name} got {got}{_label_hint(frame)}"
    return description


def _label_hint(frame: FrameType) -> str:
    """Return a suggestion if a classification loss got labels of a wrong type, which torch's error does not explain."""
    logits, target = (frame.f_locals.get(name) for name in ("input", "target"))
    if frame.f_code.co_name not in _CLASSIFICATION_LOSSES or not (
        isinstance(logits, Tensor) and isinstance(target, Tensor)
    ):
        return ""
    # A float target of the same shape holds probabilities. torch also accepts uint8 labels.
    is_wrong = target.dim() == logits.dim() - 1 and target.dtype not in (torch.int64, torch.uint8)
    return "; class labels are int64: use y.long() for the target" if is_wrong else ""


def _describe_batch(error: BaseException) -> str | None:
    """Describe the batch passed to a loss, if the loss tried to read a field that the batch lacks; otherwise None."""
    if not isinstance(error, LookupError):
        return None
    for frame in _frames(error):
        micro = frame.f_locals.get("micro")
        if not isinstance(micro, MicroBatch):
            continue
        if isinstance(micro.data, Mapping):
            return f"the batch has {', '.join(map(repr, micro.data))}"
        if isinstance(micro.data, tuple | list):
            return f"the batch has {len(micro.data)} fields"
    return None


def _describe_evaluation(error: BaseException) -> str | None:
    """Name the data whose evaluation raised the exception, with the fields of its batches; otherwise None."""
    frames = list(_frames(error))
    evaluated = next((f.f_locals.get("data") for f in frames if _is_call_of(f, Evaluator.run)), None)
    if evaluated is None:
        return None
    # `whet.train` holds its evaluation data in variables of these names. In a custom loop, the data has no name.
    given = [(f.f_locals, name) for f in frames if f.f_globals.get("__name__") == _LOOP for name in ("val", "test")]
    name = next((name for values, name in given if values.get(name) is evaluated), "evaluation data")
    micro = next((m for f in frames if isinstance(m := f.f_locals.get("micro"), MicroBatch)), None)
    note = f"raised on {name}, not on the training data"
    if micro is None or not isinstance(error, AttributeError | LookupError | ValueError):
        return note
    # The loss could probably not read the batch.
    return f"{note}: its batches have {', '.join(micro.fields)}; give {name} the fields of the training data"


def _is_call_of(frame: FrameType, function: Callable[..., Any]) -> bool:
    return frame.f_code is function.__code__


def _frames(error: BaseException) -> Iterator[FrameType]:
    entry = error.__traceback__
    while entry is not None:
        yield entry.tb_frame
        entry = entry.tb_next


def _tensor_arguments(frame: FrameType) -> str:
    code, values = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    known = {name: values[name] for name in names if name in values}
    # forward(self, *args, **kwargs) holds its tensors in args and kwargs.
    for value in (v for k, v in values.items() if k in ("args", "kwargs", "inputs")):
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, tuple) else ()
        known |= {str(key): item for key, item in items}
    tensors = {name: value for name, value in known.items() if isinstance(value, Tensor)}
    shown = [
        f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}" for name, value in tensors.items()
    ]
    return ", ".join(shown[:_MAX_TENSORS])
