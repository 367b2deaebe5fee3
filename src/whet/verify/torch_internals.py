"""Objects of torch's compiler and of its registries of operators.

They change while they are used and hold no state of a training. Only the user's functions in them are compared.
"""

import types
from collections.abc import Iterator, Set
from typing import Any

from torch._library import custom_ops

from whet.base.origin import code_origin

_INTERNAL = (
    "torch._dynamo", "torch._functorch", "torch._higher_order_ops", "torch._inductor", "torch._library", "torch._ops",
    "torch.library",
)  # fmt: skip
"""Packages of torch whose objects are not entered."""
_FUNCTIONS = ("_init_fn", "_backward_fn", "_setup_context_fn", "_vmap_fn")
"""Attributes of an operator with the functions that its author has registered."""
_TABLES = ("_backend_fns", "_torch_dispatch_fns")
"""Attributes with such functions by device and by class."""


def is_compiler_mark(attribute: str) -> bool:
    """Return whether an attribute is one that the compiler sets on tensors and functions.

    >>> is_compiler_mark("_dynamo_static_input_type"), is_compiler_mark("__dynamo_disable"), is_compiler_mark("count")
    (True, True, False)
    """
    return isinstance(attribute, str) and attribute.startswith(("_dynamo", "__dynamo", "_torchdynamo"))


def is_torch_function(function: types.FunctionType) -> bool:
    """Return whether a function is defined in torch."""
    return code_origin(function.__code__.co_filename) == "torch"


def is_torch_internal(kind: Any) -> bool:
    """Return whether a class belongs to torch's compiler or to its registries of operators."""
    module = str(kind.__module__)
    return module.startswith("torch.") and ".".join(module.split(".")[:2]) in _INTERNAL


def operator_parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the user's functions behind an operator that `torch.library.custom_op` has made."""
    attributes = getattr(value, "__dict__", {})
    if type(value) is not getattr(custom_ops, "CustomOpDef", None):
        # `torch.ops.mine.noise`, or an overload of it.
        qualified = attributes.get("_qualified_op_name") or attributes.get("_name")
        value = _operators().get(qualified) if isinstance(qualified, str) else None
        attributes = getattr(value, "__dict__", {})
    yield from ((f"{name}.{key}", attributes[key]) for key in _FUNCTIONS if attributes.get(key) is not None)
    tables = ((key, attributes[key]) for key in _TABLES if isinstance(attributes.get(key), dict))
    yield from ((f"{name}.{key}[{index}]", item) for key, table in tables for index, item in enumerate(table.values()))


def named_operators(variable: str, names: Set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the operators made with `torch.library.custom_op` that code names, as in `torch.ops.mine.noise`.

    The attributes of `torch.ops` are not compared: torch adds one when an operator is first used.
    """
    for qualified, operator in [*_operators().items()]:
        if names >= {*qualified.split("::")}:
            yield f"{variable}.{qualified.replace('::', '.')}", operator


def _operators() -> Any:
    """Return torch's table of the operators that `torch.library.custom_op` has made, by their qualified names."""
    return getattr(custom_ops, "OPDEFS", {})
