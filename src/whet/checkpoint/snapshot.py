"""Snapshots of the state of a run: named tensors, and plain JSON for everything else. Nothing is pickled."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import UsageError, WhetError
from whet.checkpoint.encoding import DTYPES
from whet.checkpoint.manifest import CheckpointInfo
from whet.checkpoint.model_state import (
    InitialState,
    encode_model,
    is_plain,
)
from whet.checkpoint.optimizer_state import encode_optimizer
from whet.checkpoint.shards import WantedRows
from whet.checkpoint.state_decoder import StateDecoder
from whet.checkpoint.state_encoder import NotEncodableError, StateEncoder
from whet.checkpoint.state_format import TAG
from whet.device.abstract import AbstractDevice
from whet.device.random_streams import RandomStreams
from whet.distributed.strategies import RowRange, local_rows, local_tensor
from whet.step.ema import Ema, named_tensors

REGISTERED = "the registered object"
"""Begins the names of registered objects in messages."""
OMITTED: dict[str, Any] = {TAG: "omitted"}
"""Stands for a registered object that is too large for a checkpoint, or whose state can no longer be encoded."""


class Stateful(Protocol):
    """An object that can save and restore its state."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state of a run. `facts` is plain JSON.

    A new snapshot refers to the tensors of the model and the optimizer. Copy or write it before the next step.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    info: CheckpointInfo = field(default_factory=CheckpointInfo)
    rows: dict[str, RowRange] = field(default_factory=dict)
    """The rows of each sharded tensor that this rank holds."""
    gaps: tuple[str, ...] = ()
    """Descriptions of state that the snapshot lacks, without which a resume is not exact."""

    @property
    def num_bytes(self) -> int:
        """Total bytes of the tensors on this rank."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def progress(self) -> dict[str, Any]:
        """The caller's own state, as passed to `take_snapshot`."""
        progress: dict[str, Any] = StateDecoder(self.tensors).decode(self.facts["progress"])
        return progress


def take_snapshot(
    model: nn.Module,
    optimizer: Optimizer,
    device: AbstractDevice,
    *,
    rng: RandomStreams,
    scaler: torch.amp.GradScaler,
    ema: Ema | None,
    step: int,
    progress: dict[str, Any],
    info: CheckpointInfo,
    num_groups: int,
    others: Mapping[str, tuple[Optimizer, torch.amp.GradScaler]] | None = None,
    has_gradients: bool = False,
    registered: Mapping[str, Stateful] | None = None,
    initial: InitialState | None = None,
    omitted: Collection[str] = (),
    omitted_attributes: Collection[tuple[str, str]] = (),
    omits_opaque: bool = False,
) -> Snapshot:
    """Return the state of everything that changes during training.

    `progress` is the caller's own state and may have any structure. Only the first `num_groups` parameter groups are
    saved, because groups added later do not belong to the run. `others` maps names to additional optimizers and their
    scalers. With `has_gradients`, gradients are saved too, because user code may accumulate them over several steps.
    `registered` maps names to user objects. With `initial`, flags and attributes of modules and optimizers are also
    saved. The registered objects in `omitted` and the attributes in `omitted_attributes`, as (owner, name), are not
    saved. Raise UsageError for state that cannot be encoded; with `omits_opaque`, registered objects that cannot be
    encoded are omitted too.
    """
    tensors = model_tensors(model)
    encoder = StateEncoder(tensors)
    optimizers = {"": optimizer, **{name: other for name, (other, _) in (others or {}).items()}}
    if ema is not None:
        tensors |= {f"ema/{name}": stored_form(tensor) for name, tensor in ema.average.items()}
    try:
        optimizer_facts = encode_optimizer(encoder, model, optimizer, num_groups=num_groups, prefix="optimizer/")
        other_facts: dict[str, Any] = {}
        for name, (other, other_scaler) in (others or {}).items():
            facts_of_other = encode_optimizer(encoder, model, other, prefix=f"optimizer/@{name}/")
            other_facts[name] = {"optimizer": facts_of_other, "scaler": other_scaler.state_dict()}
        registered_facts: dict[str, Any] = {}
        gaps: list[str] = []
        for name, owner in (registered or {}).items():
            registered_facts[name] = OMITTED
            if name in omitted:
                continue
            try:
                registered_facts[name] = encoder.encode(owner.state_dict(), f"registered/{name}")
            except NotEncodableError as error:
                if not omits_opaque:
                    raise
                gaps.append(f"{REGISTERED} {name!r} is not saved: it holds a {error.kind}, which has no encoding")
        progress_facts = encoder.encode(progress, "progress/")
        # Unless the user's own code runs the steps, training happens only in train mode.
        has_modes = model.training or has_gradients
        model_facts, model_gaps = encode_model(
            encoder, model, optimizers, initial, has_modes=has_modes, omitted=omitted_attributes
        )
        named = model.named_parameters() if has_gradients else ()
        gradients = {n: encoder.encode(p.grad, f"gradient/{n}") for n, p in named if p.grad is not None}
    except NotEncodableError as error:
        raise _state_error(error) from None
    rng_tensors, rng_facts = rng.capture()
    tensors |= encoder.finish() | rng_tensors
    # Get the row ranges first, because the local parts below no longer have them.
    rows = {name: part for name, tensor in tensors.items() if (part := local_rows(tensor)) is not None}
    facts = {
        "step": step,
        "progress": progress_facts,
        "registered": registered_facts,
        "model": model_facts,
        "gradients": gradients,
        "optimizer": optimizer_facts,
        "scaler": scaler.state_dict(),
        "other_optimizers": other_facts,
        "rng": rng_facts,
        "device": device.kind,
    }
    local = {name: local_tensor(tensor.detach()) for name, tensor in tensors.items()}
    return Snapshot(tensors=local, facts=facts, info=info, rows=rows, gaps=(*gaps, *model_gaps))


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by the names under which they are saved."""
    tensors = {f"model/{name}": stored_form(tensor) for name, tensor in named_tensors(model) if is_plain(tensor)}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            got = f"{name.removeprefix('model/')} has {tensor.dtype}"
            raise UsageError(
                "the model has a tensor that cannot be saved", got=got, try_="register_buffer(name, values.float())"
            )
    return tensors


def stored_form(tensor: Tensor) -> Tensor:
    """Return the tensor in a dtype that safetensors can store."""
    # safetensors has no complex128.
    return torch.view_as_real(tensor.detach()) if tensor.dtype is torch.complex128 else tensor


@torch.no_grad()
def copy_model(model: nn.Module) -> Snapshot:
    """Return a copy of the model in host memory, for `restore_model`."""
    tensors = model_tensors(model)
    rows = {name: part for name, tensor in tensors.items() if (part := local_rows(tensor)) is not None}
    encoder = StateEncoder(tensors)
    facts, _ = encode_model(encoder, model, {}, None, has_modes=False)
    tensors |= encoder.finish()
    copies = {name: local_tensor(tensor.detach()).to("cpu", copy=True) for name, tensor in tensors.items()}
    return Snapshot(tensors=copies, facts={"model": facts, "device": ""}, rows=rows)


def check_encodable(state: Any) -> None:
    """Raise UsageError for additional state that cannot be saved."""
    try:
        StateEncoder().encode(state, "progress/")
    except NotEncodableError as error:
        raise _state_error(error) from None


def _state_error(error: NotEncodableError) -> UsageError:
    role, _, _rest = error.path.partition("/")
    owners = {"optimizer": "the optimizer", "registered": "a registered object", "attribute": "the model"}
    owner = owners.get(role, "the data or a callback")
    return UsageError(
        f"the state of {owner} cannot be saved without pickle",
        got=str(error).removeprefix(f"{role}/"),
        try_="a state_dict() of numbers, strings, tensors, NumPy arrays, generators, and lists, dicts and sets of them",
    )


def wanted_rows(model: nn.Module) -> WantedRows:
    """Return a function that selects the rows of a saved tensor that this rank needs for the model."""
    held = {name: (local_rows(tensor), tuple(tensor.shape)) for name, tensor in named_tensors(model)}

    def wanted(name: str, shape: tuple[int, ...]) -> RowRange | None:
        role, _, rest = name.partition("/")
        owner = rest.rpartition("/")[0] if role == "optimizer" else rest
        rows, whole = held.get(owner, (None, ()))
        # Optimizer state with another shape, such as a step count, is not sharded.
        return rows if shape == whole else None

    return wanted


def check_finite(parameters: dict[str, Tensor]) -> None:
    """Raise WhetError if a trained parameter contains NaN or Inf.

    Frozen parameters must not be passed, because they may be masks with Inf.
    """
    # torch cannot compute norms of 8-bit floats.
    floating = {n: p.detach() for n, p in parameters.items() if p.is_floating_point() and p.numel() and p.itemsize > 1}
    if not floating:
        return
    # The maximum norm of a tensor is NaN or Inf if and only if one of its elements is. One call computes all norms.
    norms = torch._foreach_norm(list(floating.values()), ord=float("inf"))
    is_finite = torch.stack([norm.isfinite() for norm in norms])
    if not bool(is_finite.all()):
        name = list(floating)[int(is_finite.logical_not().nonzero()[0])]
        raise WhetError(
            "the weights are NaN or Inf",
            got=f"{name} has NaN or Inf, although the loss had none",
            try_="a smaller lr, clip=1.0, or precision=fp32; the last checkpoint is from before that",
        )


def has_average(snapshot: Snapshot) -> bool:
    """Return whether the snapshot contains a moving average of the weights."""
    return any(name.startswith("ema/") for name in snapshot.tensors)


def trained_weights(snapshot: Snapshot) -> dict[str, Tensor]:
    """Return the weights by name, replaced by their moving average if the snapshot has one."""
    named = {name.removeprefix("model/"): t for name, t in snapshot.tensors.items() if name.startswith("model/")}
    return {name: snapshot.tensors.get(f"ema/{name}", tensor).contiguous() for name, tensor in named.items()}


def describe_names(model: nn.Module) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the names of all parameters in order, and groups of names that refer to the same tensor."""
    groups: dict[int, list[str]] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            groups.setdefault(id(tensor), []).append(name)
    tied = tuple(tuple(names) for names in groups.values() if len(names) > 1)
    return tuple(name for name, _ in model.named_parameters()), tied
