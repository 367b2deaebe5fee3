"""Operators and limits of MPS in the installed torch, read without importing torch.

Every wheel of torch contains its operator list (torchgen/packaged/ATen/native/native_functions.yaml), so the list
matches the installed version. It is parsed line by line in 50 ms. A YAML parser would take seconds.
"""

import importlib.util
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from whet.base.errors import WhetError

MAX_BUFFER_SHARE = 0.75
"""Assumed share of the recommended memory that one Metal buffer may use (maxBufferLength). Not measured on a Mac."""

MAX_DIMENSIONS = 16
MAX_DIMENSION_SIZE = 2**31 - 1
MAX_ELEMENTS = 2**32
MAX_CONV_CHANNELS = 65_536
"""Maximum output channels of a convolution."""

ALWAYS_ON_CPU = frozenset({"embedding_renorm_", "linalg_svd", "linalg_svd.U"})
"""Operators that run on the CPU with or without the fallback (MPSFallback.mm of torch 2.13)."""

StatusKind = Literal["kernel", "parts", "on the CPU", "missing", "unknown"]

_FUNCTION = re.compile(r"- func: ([^\s(]+)\((.*)$")
_KEY = re.compile(r"  ([a-z_]+):\s*(.*)$")
_KERNEL = re.compile(r"    ([A-Za-z0-9_, ]+):\s*\S+")
_EXPLICIT, _NON_FUNCTIONAL = "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"
_IMPLICIT = "CompositeImplicitAutograd"


@dataclass
class OperatorEntry:
    """One operator overload in the list."""

    name: str
    returns: str
    backends: set[str] = field(default_factory=set)
    delegates_to: str | None = None
    is_structured: bool = False
    is_dispatched: bool = False
    """Whether the list has a dispatch table for the operator, even an empty one."""
    is_generated: bool = False
    """Whether the operator is listed under `autogen`: torch generates it from another overload."""

    @property
    def is_view(self) -> bool:
        """Whether the operator returns an alias of an argument and writes nothing."""
        return "(a)" in self.returns


@dataclass(frozen=True, slots=True)
class OperatorStatus:
    """How a backend runs an operator."""

    kind: StatusKind
    """How the operator runs.

    "kernel": the backend has a kernel. "parts": it is decomposed into operators, which need kernels. "on the CPU": it
    always runs on the CPU. "missing": it cannot run. "unknown": it is not in the list.
    """
    named: str
    """Overload that appears in torch's error or warning."""
    way: str = ""
    """Dispatch key of the decomposition."""


def read_operators(path: Path | None = None) -> dict[str, OperatorEntry]:
    """Return all overloads of torch's operator list by name, including generated ones."""
    operators: dict[str, OperatorEntry] = {}
    generated: list[str] = []
    current, in_dispatch = None, False
    for raw in (path or _native_functions_file()).read_text(encoding="utf-8").splitlines():
        line = "" if raw.startswith("#") else raw.split(" #")[0].rstrip()
        if start := _FUNCTION.match(line):
            current, in_dispatch = OperatorEntry(start[1], returns=start[2].split("->")[-1]), False
            operators[current.name] = current
        elif current and (key := _KEY.match(line)):
            in_dispatch = key[1] == "dispatch"
            current.is_dispatched |= in_dispatch
            if key[1] == "structured_delegate":
                current.delegates_to = key[2]
            elif key[1] == "structured":
                current.is_structured = key[2] == "True"
            elif key[1] == "ufunc_inner_loop":
                # torch generates the kernels of both backends from the same loop.
                current.backends.update(("CPU", "CUDA"))
            elif key[1] == "autogen":
                generated += [name.strip() for name in key[2].split(",")]
        elif current and in_dispatch and (kernel := _KERNEL.match(line)):
            current.backends.update(name.strip() for name in kernel[1].split(","))
    for name in generated:
        operators.setdefault(name, OperatorEntry(name, returns="", backends={_EXPLICIT}, is_generated=True))
    return operators


def operator_status(name: str, operators: dict[str, OperatorEntry], *, backend: str = "MPS") -> OperatorStatus:
    """Return how a backend runs the overload `name`, such as "add.Tensor", in the lookup order of the dispatcher."""
    if backend == "MPS" and name in ALWAYS_ON_CPU:
        return OperatorStatus("on the CPU", name)
    operator = operators.get(name)
    if operator is None:
        return OperatorStatus("unknown", name)
    out = operators.get(operator.delegates_to or "")
    if backend in operator.backends:
        return OperatorStatus("kernel", name)
    if out is not None and backend in out.backends:
        return OperatorStatus("kernel", out.name)
    for way in (_EXPLICIT, _NON_FUNCTIONAL):
        if way in operator.backends:
            return OperatorStatus("parts", name, way)
    if out is not None:
        # The generated form calls the out= overload. That overload has no kernel and appears in the error.
        return OperatorStatus("missing", out.name)
    if _IMPLICIT in operator.backends or not (operator.is_dispatched or operator.is_structured):
        return OperatorStatus("parts", name, _IMPLICIT)
    return OperatorStatus("missing", name)


@cache
def torch_operators() -> dict[str, OperatorEntry]:
    """Return the operator list of the installed torch. The list is parsed once."""
    return read_operators()


def mps_kernels(operators: dict[str, OperatorEntry]) -> list[OperatorEntry]:
    """Return the overloads that have an MPS kernel, directly or through their `out=` form."""
    return [operator for operator in operators.values() if operator_status(operator.name, operators).kind == "kernel"]


def _native_functions_file() -> Path:
    spec = importlib.util.find_spec("torchgen")
    if spec is None or spec.origin is None:
        raise WhetError(
            "torch's list of operators is missing", got="no module torchgen", try_="install torch from its wheel"
        )
    return Path(spec.origin).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
