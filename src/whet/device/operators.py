"""Operators and limits of MPS in the installed torch and in other releases, read without importing torch.

Every wheel of torch contains its operator list (torchgen/packaged/ATen/native/native_functions.yaml), so the list
matches the installed version. Parsing it line by line takes 50 ms. A YAML parser would take seconds. For other
releases, `mps_operators.toml` lists the kernels that their macOS wheels register (tools/mps_operators.py).
"""

import importlib.metadata
import importlib.util
import re
import tomllib
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple

from whet.base.errors import UsageError, WhetError
from whet.machine.facts import Release

MAX_BUFFER_SHARE = 0.75
"""Assumed maximum size of a Metal buffer (maxBufferLength), as a share of the recommended memory.

It has not been measured on a Mac.
"""

MAX_DIMENSIONS = 16
MAX_DIMENSION_SIZE = 2**31 - 1
MAX_ELEMENTS = 2**32
MAX_CONV_CHANNELS = 65_536
"""Maximum number of output channels of a convolution."""


StatusKind = Literal["kernel", "parts", "on the CPU", "missing", "unknown"]

_FUNCTION = re.compile(r"- func: ([^\s(]+)\((.*)$")
_KEY = re.compile(r"  ([a-z_]+):\s*(.*)$")
_KERNEL = re.compile(r"    ([A-Za-z0-9_, ]+):\s*\S+")
_EXPLICIT, _NON_FUNCTIONAL = "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"
_IMPLICIT = "CompositeImplicitAutograd"


@dataclass
class OperatorEntry:
    """One overload in torch's operator list."""

    name: str
    returns: str
    backends: set[str] = field(default_factory=set)
    delegates_to: str | None = None
    is_structured: bool = False
    is_dispatched: bool = False
    """Whether the list has a dispatch table for the operator, even an empty one."""
    is_generated: bool = False
    """Whether torch generates the operator from another overload, which lists it under `autogen`."""
    is_on_cpu: bool = False
    """Whether MPS always runs the operator on the CPU, even if the fallback is disabled (MPSFallback.mm)."""

    @property
    def is_view(self) -> bool:
        """Whether the operator returns an alias of an argument and writes to nothing."""
        return "(a)" in self.returns


@dataclass(frozen=True, slots=True)
class OperatorStatus:
    """How a backend runs an operator, if at all."""

    kind: StatusKind
    """One of five cases.

    "kernel": the backend has a kernel. "parts": torch decomposes it into other operators, which need kernels. "on the
    CPU": it always runs on the CPU. "missing": it has no implementation. "unknown": it is not in the list.
    """
    named: str
    """The overload that torch names in an error or warning."""
    way: str = ""
    """Dispatch key of the decomposition, or "" for other kinds."""


def read_operators(path: Path | None = None) -> dict[str, OperatorEntry]:
    """Return all overloads in torch's operator list by name, including generated ones.

    `path` is the list to read, or None for that of the installed torch.
    """
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
                # torch generates kernels for both backends from the same inner loop.
                current.backends.update(("CPU", "CUDA"))
            elif key[1] == "autogen":
                generated += [name.strip() for name in key[2].split(",")]
        elif current and in_dispatch and (kernel := _KERNEL.match(line)):
            current.backends.update(name.strip() for name in kernel[1].split(","))
    for name in generated:
        operators.setdefault(name, OperatorEntry(name, returns="", backends={_EXPLICIT}, is_generated=True))
    return operators


def operator_status(name: str, operators: dict[str, OperatorEntry], *, backend: str = "MPS") -> OperatorStatus:
    """Return how a backend runs the overload `name`, such as "add.Tensor", following the dispatcher's lookup order."""
    operator = operators.get(name)
    if operator is None:
        return OperatorStatus("unknown", name)
    if backend == "MPS" and operator.is_on_cpu:
        return OperatorStatus("on the CPU", name)
    out = operators.get(operator.delegates_to or "")
    if backend in operator.backends:
        return OperatorStatus("kernel", name)
    if out is not None and backend in out.backends:
        return OperatorStatus("kernel", out.name)
    for way in (_EXPLICIT, _NON_FUNCTIONAL):
        if way in operator.backends:
            return OperatorStatus("parts", name, way)
    if out is not None:
        # The generated kernel calls the out= overload. That overload has no kernel, so torch names it in the error.
        return OperatorStatus("missing", out.name)
    if _IMPLICIT in operator.backends or not (operator.is_dispatched or operator.is_structured):
        return OperatorStatus("parts", name, _IMPLICIT)
    return OperatorStatus("missing", name)


# --- releases ---------------------------------------------------------------------------------------------------------


class MpsOperators(NamedTuple):
    """The operators of MPS in one release of torch, read from its macOS wheel."""

    kernels: frozenset[str]
    """Overloads for which the wheel registers a kernel."""
    on_cpu: frozenset[str]
    """Overloads that always run on the CPU."""
    gone: frozenset[str]
    """Overloads that had a kernel in an earlier release, and no longer exist in torch."""


@cache
def torch_operators(release: Release | None = None) -> dict[str, OperatorEntry]:
    """Return the operator list of the installed torch, with the MPS kernels of `release`.

    None means the installed release. Steps are traced with the installed torch, so its decompositions are used for
    other releases too. Between torch 2.11 and 2.15, this affects the status of at most 3 of 3,100 common overloads.
    """
    operators = read_operators()
    installed = _installed_release()
    releases = mps_releases()
    # If the installed release is newer than the table, use its own list of kernels, and assume that the same operators
    # run on the CPU as in the newest release of the table.
    mps = releases.get(release or installed) or releases[max(releases)]
    for name in mps.on_cpu & operators.keys():
        operators[name] = replace(operators[name], is_on_cpu=True)
    if release is None or release == installed:
        return operators
    for name in mps.gone:
        operators.pop(name, None)
    for name, operator in operators.items():
        operator.backends.discard("MPS")
        if name in mps.kernels:
            operator.backends.add("MPS")
    for name in mps.kernels - operators.keys():
        operators[name] = OperatorEntry(name, returns="", backends={"MPS"}, is_dispatched=True)
    return operators


@cache
def mps_releases() -> dict[Release, MpsOperators]:
    """Return the operators of MPS for each release of torch in the table, oldest first.

    >>> [name for name, mps in mps_releases().items() if "_ctc_loss" in mps.kernels]
    [(2, 14), (2, 15)]
    """
    table = resources.files("whet.device").joinpath("mps_operators.toml").read_text(encoding="utf-8")
    result: dict[Release, MpsOperators] = {}
    kernels, gone = frozenset[str](), frozenset[str]()
    for entry in tomllib.loads(table)["release"]:
        # Each entry lists only the changes since the previous release.
        kernels = (kernels | set(entry["added"].split())) - set(entry["removed"].split())
        gone = gone | frozenset(entry["gone"].split())
        result[parse_release(entry["torch"])] = MpsOperators(kernels, frozenset(entry["on_cpu"].split()), gone)
    return result


def parse_release(text: str) -> Release:
    """Return the major and minor number of a torch version. They are the same for "2.15", "2.15.0" and "2.15.0+cpu".

    >>> parse_release("2.15.0+cpu")
    (2, 15)
    """
    match = re.match(r"(\d+)\.(\d+)(?:[.+]|$)", text)
    if match is None:
        raise UsageError("this is not a version of torch", got=text, try_="--torch 2.15")
    return int(match[1]), int(match[2])


def known_release(text: str) -> Release:
    """Parse a torch version. Raise UsageError unless that release is installed or in the table."""
    release = parse_release(text)
    known = sorted({*mps_releases(), _installed_release()})
    if release not in known:
        names = ", ".join(f"{major}.{minor}" for major, minor in known)
        raise UsageError("the operators of this torch are not known", got=f"torch {text}", try_=f"one of {names}")
    return release


def _installed_release() -> Release:
    return parse_release(importlib.metadata.version("torch"))


def mps_kernels(operators: dict[str, OperatorEntry]) -> list[OperatorEntry]:
    """Return the overloads that have an MPS kernel, directly or through their `out=` overload."""
    return [operator for operator in operators.values() if operator_status(operator.name, operators).kind == "kernel"]


def _native_functions_file() -> Path:
    spec = importlib.util.find_spec("torchgen")
    if spec is None or spec.origin is None:
        raise WhetError(
            "torch's list of operators is missing", got="no module torchgen", try_="install torch from its wheel"
        )
    return Path(spec.origin).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
