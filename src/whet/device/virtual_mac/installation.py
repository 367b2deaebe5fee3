"""Install and remove a virtual Apple GPU in this process, and read its counters."""

import atexit
import itertools
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from whet.base.errors import UsageError, WhetError
from whet.device.environment import has_fallback
from whet.device.operators import MAX_BUFFER_SHARE, mps_kernels, read_operators
from whet.device.virtual_mac import faults
from whet.device.virtual_mac.native import load_extension, native, state
from whet.machine.facts import Accelerator, Machine, TorchFacts
from whet.machine.known import load_machine

_OWN_KERNELS = frozenset(
    {
        # Implemented in kernels.cpp and computing.cpp, or composed by torch from other operators on any device.
        "empty.memory_format", "empty_strided", "resize_", "set_", "set_.source_Tensor", "set_.source_Storage",
        "set_.source_Storage_storage_offset", "copy_", "_copy_from", "_copy_from_and_resize", "_local_scalar_dense",
        "zero_", "as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex",
        "scaled_dot_product_attention", "linear", "max_pool2d", "mish_backward", "_fused_rms_norm",
        "bincount", "record_stream", "_convert_weight_to_int4pack", "_weight_int4pack_mm",
    }
)  # fmt: skip
_COMPUTED = {"convolution", "convolution_backward", "bincount", "_weight_int4pack_mm"}
_OWN_SPARSE_KERNELS = frozenset(
    {
        # Operators whose kernels sparse.cpp registers.
        "empty.memory_format", "_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors",
        "sparse_dim", "dense_dim", "_nnz", "is_coalesced", "_coalesced_", "_indices", "_values", "indices", "values",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackStats:
    """The cost of an operator that ran on the CPU because MPS has no kernel for it."""

    calls: int
    seconds: float
    """Seconds on this computer, including copies. On a Mac, the time differs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Counters of the virtual GPU since its installation or the last reset. Sizes are in bytes."""

    num_syncs: int
    """Number of synchronizations, such as `.item()`, copies to the CPU and `synchronize()`."""
    num_kernels: int
    num_allocations: int
    allocated: int
    """Memory of live tensors."""
    peak: int
    """Maximum of `allocated`."""
    reserved: int
    """Memory of the heaps that Metal would allocate."""
    graph_cache_entries: int
    """Number of graphs that MPSGraph would cache until `empty_cache()`.

    It caches one graph per combination of operator, shapes and dtypes.
    """
    graph_cache_bytes: int
    """Host memory of these graphs, by default 55 KB each. torch has no counter for it."""
    fallbacks: Mapping[str, FallbackStats]
    """Operators that ran on the CPU because MPS has no kernel for them, by name."""


def install(machine: str | Machine) -> Machine:
    """Install a virtual Mac in this process, and return the simulated machine. It replaces an installed one.

    `machine` is a machine or the name of one. Call this before any code asks torch for MPS, because torch caches the
    answer.
    """
    requested = machine if isinstance(machine, Machine) else load_machine(machine)
    gpu = _gpu_of(requested)
    if state.native is None:
        _check_torch_build()
        _load()
    if state.machine != requested:
        uninstall()
        _configure(state.native, requested, gpu)
        state.undo = _patch_torch(state.native, gpu)
        state.machine = requested
    simulated = installed()
    assert simulated is not None
    return simulated


def uninstall() -> None:
    """Remove the virtual Mac and its faults, so that torch reports no MPS. Tensors on the virtual GPU remain valid."""
    if state.native is None or state.undo is None:
        return
    faults.end_all()
    for undo in reversed(state.undo):
        undo()
    state.machine, state.undo = None, None


def installed() -> Machine | None:
    """Return the simulated machine, with "(virtual)" in its name, or None if no virtual Mac is installed."""
    if state.machine is None:
        return None
    import torch

    facts = TorchFacts(version=str(torch.__version__), mps_built=True, num_threads=torch.get_num_threads())
    return state.machine.model_copy(
        update={
            "name": f"{state.machine.name} (virtual)",
            "sources": (*state.machine.sources, "simulated on a Linux CPU by whet.device.virtual_mac; not a Mac"),
            "torch": facts,
        }
    )


def stats() -> Stats:
    """Read the counters of the virtual GPU."""
    counters = native().stats()
    fallbacks = {
        name: FallbackStats(calls=calls, seconds=seconds) for name, (calls, seconds) in counters["fallbacks"].items()
    }
    return Stats(**{**counters, "fallbacks": MappingProxyType(fallbacks)})


def reset_stats() -> None:
    """Reset the counters to zero, and the peak to the currently allocated bytes."""
    native().reset_stats()


def _gpu_of(machine: Machine) -> Accelerator:
    gpu = machine.accelerator("mps")
    if gpu is None or gpu.usable_bytes is None:
        why = "has no Apple GPU" if gpu is None else "does not specify the GPU's memory limit"
        raise UsageError(
            "this machine cannot be simulated as a Mac", got=f"{machine.name} {why}", try_="m2-air-8gb, or m3-max-64gb"
        )
    return gpu


def _check_torch_build() -> None:
    import torch

    reasons = {
        "this torch has a real MPS backend: use the Mac itself": torch.backends.mps.is_built(),
        f"the system is {sys.platform}": sys.platform != "linux",
    }
    for reason, applies in reasons.items():
        if applies:
            raise WhetError("a virtual Mac needs Linux", got=reason, try_="whet plan --machine, which needs no Mac")
    # torch supports only one kind of accelerator per process, and a real one may already be in use.
    for kind, hidden_by in (("cuda", "CUDA_VISIBLE_DEVICES="), ("xpu", "ZE_AFFINITY_MASK=")):
        num_devices = getattr(torch, kind).device_count()
        if num_devices:
            raise WhetError(
                "a virtual Mac cannot be installed beside a real accelerator",
                got=f"torch finds {num_devices} {kind} device{'s' if num_devices > 1 else ''}",
                try_=f"{hidden_by} in the environment, which hides them; or a CPU build of torch",
            )


_EXIT_SECONDS = 0.3
"""Delay at exit. torch's autograd thread may still be releasing a graph, and would abort if it were interrupted."""


def _load() -> None:
    """Load the extension, and register a kernel for every operator that has an MPS kernel in this version of torch."""
    import torch

    atexit.register(time.sleep, _EXIT_SECONDS)

    native = load_extension(str(torch.__version__))
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    listed = read_operators()
    with_kernel = mps_kernels(listed)
    dense = [
        operator.name
        for operator in with_kernel
        if operator.name not in _OWN_KERNELS
        # View operators need no kernel, because torch's implementation works on every device.
        and not operator.is_view
        and any(has_kernel(f"aten::{operator.name}", key) for key in ("CPU", "CompositeExplicitAutograd"))
    ]
    sparse = [
        operator.name
        for operator in listed.values()
        if "SparseMPS" in operator.backends
        and operator.name not in _OWN_SPARSE_KERNELS
        and has_kernel(f"aten::{operator.name}", "SparseCPU")
    ]
    native.set_native_operators([operator.name for operator in with_kernel])
    native.register_kernels(dense, is_sparse=False)
    native.register_kernels(sparse, is_sparse=True)
    state.kernels = frozenset(name.partition(".")[0] for name in dense) | _COMPUTED
    state.native = native


def _configure(native: Any, machine: Machine, gpu: Accelerator) -> None:
    import torch

    assert gpu.usable_bytes is not None
    version = [int(part) for part in (machine.os.version or "15.0").split(".") if part.isdecimal()]
    native.configure(
        recommended_bytes=gpu.usable_bytes,
        max_buffer_bytes=int(gpu.usable_bytes * MAX_BUFFER_SHARE),
        has_fallback=has_fallback(),
        macos_major=version[0] if version else 15,
        macos_minor=version[1] if len(version) > 1 else 0,
        torch_commit=torch.version.git_version or "unknown",
    )
    native.set_available(True)
    if not torch._C._mps_is_available() or not native.is_accelerator():
        native.set_available(False)
        raise WhetError(
            "the virtual Mac was installed too late",
            got="torch was asked for its accelerator before, and caches the answer",
            try_="install it right after `import torch`",
        )


def _patch_torch(native: Any, gpu: Accelerator) -> list[Callable[[], None]]:
    """Patch attributes that a Linux build of torch fixes at compile time. Return functions that undo the patches."""
    import torch

    name, cores = f"{gpu.name or 'Apple GPU'} (virtual)", gpu.num_cores or 0
    changes: list[tuple[Any, str, Any]] = [
        (torch._C, "_has_mps", True),
        (torch._C, "_mps_get_name", lambda: name),
        (torch._C, "_mps_get_core_count", lambda: cores),
        (torch._C, "_mps_host_alias_storage", lambda storage: _host_alias(native, storage)),
        (torch._C, "_mps_isCaptureEnabled", lambda: False),
        (torch._C, "_mps_isCapturing", lambda: False),
        *((torch._C, name, _no_metal) for name in _METAL_FUNCTIONS),
        *_stream_patches(),
        (torch.storage._StorageBase, "mps", _storage_to_mps),
        (torch.UntypedStorage, "mps", _storage_to_mps),
    ]
    undo: list[Callable[[], None]] = [torch.backends.mps.is_available.cache_clear, lambda: native.set_available(False)]
    for owner, attribute, value in changes:
        undo.append(_restore_attribute(owner, attribute))
        setattr(owner, attribute, value)
    torch.backends.mps.is_available.cache_clear()
    return undo


def _host_alias(native: Any, storage: Any) -> Any:
    """Return a CPU storage with the same memory as an MPS storage. Replaces `torch.mps._host_alias_storage`."""
    import torch

    if not isinstance(storage, torch.UntypedStorage):
        raise TypeError("_mps_host_alias_storage: expected a torch.UntypedStorage")
    if storage.device.type != "mps":
        raise ValueError("expected MPS storage")
    return native.cpu_alias(torch.empty(0, dtype=torch.uint8, device="mps").set_(storage)).untyped_storage()


_METAL_FUNCTIONS = ("_mps_compileShader", "_mps_loadMetalllib", "_mps_loadMetallibFromPath", "_mps_startCapture")


def _no_metal(*_args: Any) -> Any:
    raise WhetError("the virtual Mac cannot run Metal shaders", try_="a Mac, or an operator of torch in their place")


def _restore_attribute(owner: Any, attribute: str) -> Callable[[], None]:
    if attribute not in vars(owner):
        return lambda: delattr(owner, attribute)
    before = vars(owner)[attribute]
    return lambda: setattr(owner, attribute, before)


def _storage_to_mps(storage: Any) -> Any:
    """Return a copy of a storage on MPS. Replaces `storage.mps()`, which torch.load uses for `map_location="mps"`."""
    import torch

    if storage.device.type == "mps":
        return storage
    moved = torch.empty(storage.nbytes(), dtype=torch.uint8, device="mps")
    moved.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
    return moved.untyped_storage()


_NUM_POOLED = 32
"""Number of streams besides the default stream, which has the id 0 (MPSStream.h)."""


def _stream_patches() -> list[tuple[Any, str, Any]]:
    """Return the patches for torch.mps streams, as (owner, attribute, value).

    Linux builds have the stream classes without an implementation. Before torch 2.15, there are no streams to patch.
    """
    import torch

    base = getattr(torch._C, "_MPSStreamBase", None)
    if base is None:
        return []
    current, pool = [0], itertools.cycle(range(1, _NUM_POOLED + 1))

    def make(cls: type, *_args: object, stream_id: int | None = None, **_kwargs: object) -> Any:
        stream: Any = object.__new__(cls)
        # The attribute must not be named `stream_id`, because torch's class has a property of that name.
        stream.__dict__["_number"] = next(pool) if stream_id is None else stream_id
        return stream

    def is_same(stream: Any, other: object) -> bool:
        return isinstance(other, base) and stream._number == other._number

    def select(stream: Any) -> None:
        current[0] = stream._number

    return [
        (base, "__new__", staticmethod(make)),
        (base, "__init__", lambda *_args, **_kwargs: None),
        (base, "__eq__", is_same),
        (base, "__hash__", lambda stream: hash(stream._number)),
        (base, "stream_id", property(lambda stream: stream._number)),
        (base, "synchronize", lambda _stream: native().wait_for_gpu()),
        (torch._C, "_mps_getCurrentStream", lambda: base(stream_id=current[0])),
        (torch._C, "_mps_setStream", select),
    ]
