"""The settings of Python, NumPy and torch that a program can change while it trains, and that no object holds."""

import decimal
import gc
import locale
import logging
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from whet.verify.code_references import is_library_class

_BACKENDS: dict[str, tuple[str, ...]] = {
    "cudnn": ("enabled", "benchmark", "benchmark_limit", "deterministic", "allow_tf32"),
    "cuda.matmul": (
        "allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ),
    "mkldnn": ("enabled", "deterministic", "allow_tf32"),
    "opt_einsum": ("enabled", "strategy"),
    "quantized": ("engine",),
}  # fmt: skip
_FUNCTIONS = (
    "get_default_dtype", "is_anomaly_enabled", "is_warn_always_enabled",
    "backends.cuda.flash_sdp_enabled", "backends.cuda.mem_efficient_sdp_enabled", "backends.cuda.math_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled", "autograd.is_multithreading_enabled",
)  # fmt: skip
_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")
_LOGGER_ATTRIBUTES = frozenset(vars(logging.Logger(""))) | {"manager"}
_COMPILER_RECURSION = 2_000
"""The recursion limit that torch.compile sets (torch/_inductor/compile_fx.py, torch 2.13). Lower ones are not compared.
"""
_WHETS_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGTSTP", "SIGCONT", "SIGQUIT", "SIGCHLD", "SIGWINCH")
"""Signals whose handlers whet or a terminal sets."""


def process_settings() -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each setting. Reading them changes nothing."""
    context = decimal.getcontext()
    for name in ("prec", "rounding", "Emin", "Emax", "capitals", "clamp"):
        yield f"decimal.getcontext().{name}", getattr(context, name)
    yield "decimal.getcontext().traps", sorted(kind.__name__ for kind, is_on in context.traps.items() if is_on)
    yield "sys.getrecursionlimit()", max(_COMPILER_RECURSION, sys.getrecursionlimit())
    yield "sys.getswitchinterval()", sys.getswitchinterval()
    yield "sys.get_int_max_str_digits()", sys.get_int_max_str_digits()
    yield "gc.get_threshold()", gc.get_threshold()
    yield "np.geterr()", sorted(np.geterr().items())
    yield "np.getbufsize()", np.getbufsize()
    yield "np.get_printoptions()", str(np.get_printoptions())
    yield "torch.get_printoptions()", str(getattr(torch._tensor_str, "PRINT_OPTS", ""))
    # Libraries add filters when they are imported. Only those that raise change what a program does.
    yield "warnings.filters", [str(one[1:]) for one in warnings.filters if one[0] == "error"]
    yield "locale.setlocale()", locale.setlocale(locale.LC_ALL)
    yield "time.tzname", time.tzname
    yield "os.getcwd()", _working_folder()
    yield from _limits()
    yield from _attached()
    for name in sorted(signal.Signals.__members__.keys() - {*_WHETS_SIGNALS}):
        handler = signal.getsignal(signal.Signals[name])
        yield f"signal.getsignal({name})", getattr(handler, "__qualname__", str(handler))
    for name, attributes in _BACKENDS.items():
        backend: Any = torch.backends
        for part in name.split("."):
            backend = getattr(backend, part, None)
        yield from ((f"torch.backends.{name}.{key}", _value(backend, key)) for key in attributes)
    for name in _FUNCTIONS:
        function: Any = torch
        for part in name.split("."):
            function = getattr(function, part, None)
        if function is not None:
            yield f"torch.{name}()", str(function())


def thread_settings() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Yield the settings of this thread that a `with` block may hold, by owner: those of autocast, and modes of torch.

    A block around a part of the loop holds at some checks only. Each owner is compared between the checks at which it
    occurs.
    """
    # torch has no function that reads the nesting without changing it.
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    yield "autocast" if nesting == 0 else f"autocast in {nesting} `with` blocks", list(_autocast())
    modes: dict[str, list[tuple[str, Any]]] = {}
    for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
        if not is_library_class(type(mode)):
            modes.setdefault(f"the mode {type(mode).__qualname__}", []).append(("self", mode))
    yield from modes.items()


def _autocast() -> Iterator[tuple[str, str]]:
    yield "torch.is_autocast_cache_enabled()", str(torch.is_autocast_cache_enabled())
    for device in _AUTOCAST_DEVICES:
        yield f"torch.is_autocast_enabled({device!r})", str(torch.is_autocast_enabled(device))
        yield f"torch.get_autocast_dtype({device!r})", str(torch.get_autocast_dtype(device))


def is_planned(name: str) -> bool:
    """Return whether the plan decides a setting, so that whet itself may change it.

    >>> is_planned("torch.backends.cudnn.allow_tf32"), is_planned("torch.backends.cudnn.benchmark")
    (True, False)
    """
    return name.endswith((".allow_tf32", "_sdp_enabled()"))


def _attached() -> Iterator[tuple[str, Any]]:
    """Yield attributes that code has attached to objects which any code can get by calling a function."""
    thread = threading.main_thread()
    yield from ((f"threading.main_thread().{k}", v) for k, v in vars(thread).items() if not k.startswith("_"))
    for name, logger in [*logging.root.manager.loggerDict.items()]:
        # torch keeps attributes of its own in its loggers, which it creates when they are needed.
        if isinstance(logger, logging.Logger) and not name.startswith("torch"):
            attached = (key for key in vars(logger) if key not in _LOGGER_ATTRIBUTES)
            yield from ((f"logging.getLogger({name!r}).{key}", vars(logger)[key]) for key in attached)


def _value(owner: Any, name: str) -> str:
    try:
        return str(getattr(owner, name, None))
    except RuntimeError:
        # This build of torch lacks the backend, or settings of two interfaces contradict each other.
        return ""


def _working_folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        # It was deleted.
        return ""


def _limits() -> Iterator[tuple[str, Any]]:
    try:
        import resource
    except ImportError:
        # Windows has none.
        return
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            yield f"resource.getrlimit({name})", resource.getrlimit(getattr(resource, name))
