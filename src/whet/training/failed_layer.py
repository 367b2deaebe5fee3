"""Find the layer or the batch that caused an exception, from its traceback."""

from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn

from whet.data.batch import MicroBatch

_MAX_TENSORS = 4


def note_failed_layer(error: BaseException | None, model: nn.Module) -> None:
    """Add a note to an exception that names the innermost layer or torch.nn.functional function and its arguments.

    If a key or index is missing outside a layer, the note names the fields of the batch instead. Nothing is computed:
    the frames of the traceback still hold the arguments.
    """
    if error is None:
        return
    description = _describe_layer(error, model) or _describe_function(error) or _describe_batch(error)
    if description is None:
        return
    note = f"whet: {description}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


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
            description = f"{frame.f_code.co_name} got {got}"
    return description


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
