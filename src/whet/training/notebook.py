"""Find notebook variables that hold memory, so that an out-of-memory message can name them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from whet.base.errors import InsufficientMemoryError
from whet.base.units import format_bytes
from whet.device.abstract import AbstractDevice
from whet.training.callbacks.progress_screen import notebook_shell

_MIN_BYTES = 10 * 1024**2
"""Variables smaller than this are not listed."""
_MAX_NAMES = 4
_MAX_DEPTH = 3
"""Maximum depth to which lists, dicts and datasets are searched for tensors."""


def held_by_cells(used: Iterable[Any], *, device: AbstractDevice) -> dict[str, int]:
    """Return the bytes of device memory that each notebook variable holds, largest first; empty outside notebooks.

    Tensors in `used`, which training needs, are not counted. On devices that share the host's memory, tensors of every
    device count. Cached cell results are named Out[N].
    """
    shell = notebook_shell()
    if shell is None:
        return {}
    seen = {_key(tensor) for value in used for tensor in _tensors(value)}
    sizes: dict[str, int] = {}
    shares_memory = device.is_cpu or device.memory.is_shared_with_host
    names = {name: value for name, value in shell.user_ns.items() if not name.startswith("_")}
    names |= {f"Out[{number}]": value for number, value in dict(shell.user_ns.get("Out", {})).items()}
    for name, value in names.items():
        if name in ("In", "Out"):
            continue
        held = 0
        for tensor in _tensors(value):
            is_there = shares_memory or tensor.device.type == device.kind
            if is_there and _key(tensor) not in seen:
                seen.add(_key(tensor))
                held += tensor.untyped_storage().nbytes()
        if held >= _MIN_BYTES:
            sizes[name] = held
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def describe_held_memory(used: Iterable[Any], *, device: AbstractDevice) -> str:
    """Return a sentence such as "earlier cells hold old_model (1.2 GB)"; empty if they hold nothing."""
    held = held_by_cells(used, device=device)
    shown = ", ".join(f"{name} ({format_bytes(size)})" for name, size in list(held.items())[:_MAX_NAMES])
    return f"earlier cells hold {shown}" if held else ""


def name_held_memory(
    error: InsufficientMemoryError, used: Iterable[Any], *, device: AbstractDevice
) -> InsufficientMemoryError:
    """Return the error extended by variables of earlier cells that hold memory; unchanged if there are none."""
    used = tuple(used)
    held = held_by_cells(used, device=device)
    if not held:
        return error
    own = [name for name in held if "[" not in name][:_MAX_NAMES]
    way = f"del {', '.join(own)}" if own else "%reset -f out"
    got = f"{error.got}; {describe_held_memory(used, device=device)}"
    return InsufficientMemoryError(error.what, got=got, try_=f"{way}, and run the cell again; or {error.try_}")


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        # A tensor subclass (fake, sharded) may have no storage.
        if type(value) in (Tensor, nn.Parameter):
            yield value
            if value.grad is not None:
                yield value.grad
    elif isinstance(value, nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            yield from _tensors(tensor)
    elif isinstance(value, Optimizer):
        yield from _tensors(value.state, depth)
    elif isinstance(value, DataLoader):
        yield from _tensors(value.dataset, depth)
    elif depth < _MAX_DEPTH:
        value = list(vars(value).values()) if isinstance(value, Dataset) else value
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        for item in list(inner):
            yield from _tensors(item, depth + 1)
