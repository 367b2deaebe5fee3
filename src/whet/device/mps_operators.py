"""Which operators does MPS have in the installed torch? Read from the list that torch itself is generated from.

The list (torchgen/packaged/ATen/native/native_functions.yaml) comes with every wheel, so the answer fits the version.
Its few keys are read line by line: a YAML parser would take seconds for what takes a twentieth of one here.
"""

import importlib.util
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from whet.base.errors import WhetError

ALWAYS_ON_CPU = frozenset({"embedding_renorm_", "linalg_svd", "linalg_svd.U"})
"""Sent to the CPU with or without the fall-back (MPSFallback.mm of torch 2.13)."""

Kind = Literal["kernel", "parts", "on the CPU", "missing", "unknown"]

_FUNCTION = re.compile(r"- func: ([^\s(]+)\((.*)$")
_KEY = re.compile(r"  ([a-z_]+):\s*(.*)$")
_KERNEL = re.compile(r"    ([A-Za-z0-9_, ]+):\s*\S+")
_EXPLICIT, _NON_FUNCTIONAL = "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"
_IMPLICIT = "CompositeImplicitAutograd"


@dataclass
class Operator:
    """One overload as the list describes it."""

    name: str
    returns: str
    backends: set[str] = field(default_factory=set)
    delegates_to: str | None = None
    is_structured: bool = False
    is_dispatched: bool = False
    """Whether the list says which kernels it has, be it none."""
    is_generated: bool = False
    """Listed under `autogen`: torch writes it from another overload."""

    @property
    def is_view(self) -> bool:
        """Whether it returns an alias of what it was given and writes nothing."""
        return "(a)" in self.returns


@dataclass(frozen=True, slots=True)
class Status:
    """How a backend runs an operator."""

    kind: Kind
    """By a kernel; in parts, which must be there themselves; on the CPU, always; not at all; or nobody knows."""
    named: str
    """The overload that torch's error or warning names."""
    way: str = ""
    """The dispatch key through which it is run in parts."""


def read_operators(path: Path | None = None) -> dict[str, Operator]:
    """Every overload in torch's list, by name; those that torch generates too."""
    found: dict[str, Operator] = {}
    generated: list[str] = []
    current, in_dispatch = None, False
    for raw in (path or _list_of_torch()).read_text(encoding="utf-8").splitlines():
        line = "" if raw.startswith("#") else raw.split(" #")[0].rstrip()
        if start := _FUNCTION.match(line):
            current, in_dispatch = Operator(start[1], returns=start[2].split("->")[-1]), False
            found[current.name] = current
        elif current and (key := _KEY.match(line)):
            in_dispatch = key[1] == "dispatch"
            current.is_dispatched |= in_dispatch
            if key[1] == "structured_delegate":
                current.delegates_to = key[2]
            elif key[1] == "structured":
                current.is_structured = key[2] == "True"
            elif key[1] == "ufunc_inner_loop":
                # torch writes these two from the one loop.
                current.backends.update(("CPU", "CUDA"))
            elif key[1] == "autogen":
                generated += [name.strip() for name in key[2].split(",")]
        elif current and in_dispatch and (kernel := _KERNEL.match(line)):
            current.backends.update(name.strip() for name in kernel[1].split(","))
    for name in generated:
        found.setdefault(name, Operator(name, returns="", backends={_EXPLICIT}, is_generated=True))
    return found


def status_of(name: str, operators: dict[str, Operator], *, backend: str = "MPS") -> Status:
    """How a backend runs the overload `name` ("add.Tensor"), in the order in which torch's dispatcher looks."""
    if backend == "MPS" and name in ALWAYS_ON_CPU:
        return Status("on the CPU", name)
    operator = operators.get(name)
    if operator is None:
        return Status("unknown", name)
    out = operators.get(operator.delegates_to or "")
    if backend in operator.backends:
        return Status("kernel", name)
    if out is not None and backend in out.backends:
        return Status("kernel", out.name)
    for way in (_EXPLICIT, _NON_FUNCTIONAL):
        if way in operator.backends:
            return Status("parts", name, way)
    if out is not None:
        # torch writes a form of it that calls the out= overload, which has no kernel: that one is in the error.
        return Status("missing", out.name)
    if _IMPLICIT in operator.backends or not (operator.is_dispatched or operator.is_structured):
        return Status("parts", name, _IMPLICIT)
    return Status("missing", name)


@cache
def operators_of_torch() -> dict[str, Operator]:
    """The list of the installed torch, read once."""
    return read_operators()


def with_mps_kernel(operators: dict[str, Operator]) -> list[Operator]:
    """The overloads that MPS computes itself: by a kernel of their own, or by that of the `out=` form."""
    return [operator for operator in operators.values() if status_of(operator.name, operators).kind == "kernel"]


def _list_of_torch() -> Path:
    found = importlib.util.find_spec("torchgen")
    if found is None or found.origin is None:
        raise WhetError(
            "torch's list of operators is missing", got="no module torchgen", try_="install torch from its wheel"
        )
    return Path(found.origin).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
