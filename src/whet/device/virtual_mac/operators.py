"""Which operators have an MPS kernel in the installed torch? Read from the list that torch itself is generated from.

The list (torchgen/packaged/ATen/native/native_functions.yaml) comes with every wheel, so the answer fits the version.
Its few keys are read line by line: a YAML parser would take seconds for what takes a twentieth of one here.
"""

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path

from whet.base.errors import WhetError

ALWAYS_ON_CPU = frozenset({"embedding_renorm_", "linalg_svd", "linalg_svd.U"})
"""Sent to the CPU with or without the fall-back (MPSFallback.mm of torch 2.13)."""

_FUNCTION = re.compile(r"- func: ([^\s(]+)\((.*)$")
_KEY = re.compile(r"  ([a-z_]+):\s*(.*)$")
_KERNEL = re.compile(r"    ([A-Za-z0-9_, ]+):\s*\S+")


@dataclass
class Operator:
    """One overload as the list describes it."""

    name: str
    returns: str
    backends: set[str] = field(default_factory=set)
    delegates_to: str | None = None

    @property
    def is_view(self) -> bool:
        """Whether it returns an alias of what it was given and writes nothing."""
        return "(a)" in self.returns


def read_operators(path: Path | None = None) -> dict[str, Operator]:
    """Every overload in torch's list, by name."""
    found: dict[str, Operator] = {}
    current, in_dispatch = None, False
    for raw in (path or _list_of_torch()).read_text(encoding="utf-8").splitlines():
        line = "" if raw.startswith("#") else raw.split(" #")[0].rstrip()
        if start := _FUNCTION.match(line):
            current, in_dispatch = Operator(start[1], returns=start[2].split("->")[-1]), False
            found[current.name] = current
        elif current and (key := _KEY.match(line)):
            in_dispatch = key[1] == "dispatch"
            if key[1] == "structured_delegate":
                current.delegates_to = key[2]
        elif current and in_dispatch and (kernel := _KERNEL.match(line)):
            current.backends.update(name.strip() for name in kernel[1].split(","))
    return found


def with_mps_kernel(operators: dict[str, Operator]) -> list[Operator]:
    """The overloads that MPS computes itself: by a kernel of their own, or by that of the `out=` form."""
    return [operator for operator in operators.values() if _has_kernel(operator, operators)]


def _has_kernel(operator: Operator, operators: dict[str, Operator]) -> bool:
    if operator.name in ALWAYS_ON_CPU:
        return False
    delegate = operators.get(operator.delegates_to or "")
    return "MPS" in operator.backends or (delegate is not None and "MPS" in delegate.backends)


def _list_of_torch() -> Path:
    found = importlib.util.find_spec("torchgen")
    if found is None or found.origin is None:
        raise WhetError(
            "torch's list of operators is missing", got="no module torchgen", try_="install torch from its wheel"
        )
    return Path(found.origin).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
