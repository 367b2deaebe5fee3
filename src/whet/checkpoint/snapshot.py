"""Snapshots of a run's state: named tensors, and plain JSON for everything else. Nothing is pickled."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import UsageError, WhetError
from whet.base.units import format_list
from whet.checkpoint.encoding import DTYPES
from whet.checkpoint.manifest import CheckpointInfo
from whet.checkpoint.model_state import (
    InitialState,
    encode_model,
    expanded_copy,
    fit_structure,
    is_plain,
    replace_buffer,
    restore_extra,
    restore_flags_and_attributes,
)
from whet.checkpoint.optimizer_state import OptimizerRestorer, encode_optimizer
from whet.checkpoint.shards import WantedRows
from whet.checkpoint.shared_memory import overlaps_itself
from whet.checkpoint.state_decoder import StateDecoder
from whet.checkpoint.state_encoder import NotEncodableError, StateEncoder
from whet.device.abstract import AbstractDevice
from whet.device.errors import is_out_of_memory
from whet.device.random_streams import RandomStreams
from whet.device.rng import preserve_rng
from whet.distributed.strategies import RowRange, local_rows, local_tensor
from whet.step.ema import Ema, named_tensors

MOVE_CHECKPOINT = "move the newest folder out of checkpoints/, and run the same command again"
"""What to try if the newest checkpoint cannot be restored: the run resumes from the one before it."""


class Stateful(Protocol):
    """An object that can save and restore its state."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state of a run. `facts` is plain JSON.

    A new snapshot refers to the tensors of the model and the optimizer. Copy or write them before the next step.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    info: CheckpointInfo = field(default_factory=CheckpointInfo)
    rows: dict[str, RowRange] = field(default_factory=dict)
    """The rows that this rank holds of each sharded tensor."""
    gaps: tuple[str, ...] = ()
    """State that a new snapshot lacks, so that a resume would not be exact."""

    @property
    def num_bytes(self) -> int:
        """Total bytes of the tensors on this rank."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def progress(self) -> dict[str, Any]:
        """The additional state of the caller."""
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
) -> Snapshot:
    """Return the state of everything that changes during training.

    `progress` is additional state of the caller, of any structure. Only the first `num_groups` parameter groups are
    saved, because groups that were added later do not belong to the run. `others` are further optimizers by name. With
    `has_gradients`, gradients are saved too, because the user's own code may accumulate them over several steps.
    `registered` are objects of the user by name. With `initial`, flags and attributes of modules and optimizers are
    saved too. Raises UsageError for state that has no encoding.
    """
    tensors = _model_tensors(model)
    encoder = StateEncoder(tensors)
    optimizers = {"": optimizer, **{name: other for name, (other, _) in (others or {}).items()}}
    if ema is not None:
        tensors |= {f"ema/{name}": _stored(tensor) for name, tensor in ema.average.items()}
    try:
        optimizer_facts = encode_optimizer(encoder, model, optimizer, num_groups=num_groups, prefix="optimizer/")
        other_facts: dict[str, Any] = {}
        for name, (other, other_scaler) in (others or {}).items():
            facts_of_other = encode_optimizer(encoder, model, other, prefix=f"optimizer/@{name}/")
            other_facts[name] = {"optimizer": facts_of_other, "scaler": other_scaler.state_dict()}
        registered_facts = {
            name: encoder.encode(owner.state_dict(), f"registered/{name}") for name, owner in (registered or {}).items()
        }
        progress_facts = encoder.encode(progress, "progress/")
        # Without steps of the user's own, training happens in train mode only.
        has_modes = model.training or has_gradients
        model_facts, gaps = encode_model(encoder, model, optimizers, initial, has_modes=has_modes)
        named = model.named_parameters() if has_gradients else ()
        gradients = {n: encoder.encode(p.grad, f"gradient/{n}") for n, p in named if p.grad is not None}
    except NotEncodableError as error:
        raise _state_error(error) from None
    rng_tensors, rng_facts = rng.capture()
    tensors |= encoder.finish() | rng_tensors
    # Read the row ranges first, because the local parts below no longer have them.
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
    return Snapshot(tensors=local, facts=facts, info=info, rows=rows, gaps=tuple(gaps))


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers by the names under which they are saved."""
    tensors = {f"model/{name}": _stored(tensor) for name, tensor in named_tensors(model) if is_plain(tensor)}
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            got = f"{name.removeprefix('model/')} has {tensor.dtype}"
            raise UsageError(
                "the model has a tensor that cannot be saved", got=got, try_="register_buffer(name, values.float())"
            )
    return tensors


def _stored(tensor: Tensor) -> Tensor:
    # safetensors has no complex128.
    return torch.view_as_real(tensor.detach()) if tensor.dtype is torch.complex128 else tensor


@torch.no_grad()
def copy_model(model: nn.Module) -> Snapshot:
    """Return a copy of the model in host memory, which `restore_model` restores."""
    tensors = _model_tensors(model)
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


class RestoredState(NamedTuple):
    """The result of `restore_snapshot`."""

    progress: dict[str, Any]
    """The additional state of the caller."""
    changes: list[str]
    """Flags and attributes that the user has changed since the run was started. They stay as they are."""


def restore_snapshot(
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: Optimizer,
    device: AbstractDevice,
    *,
    rng: RandomStreams,
    scaler: torch.amp.GradScaler,
    ema: Ema | None,
    others: Mapping[str, tuple[Optimizer, torch.amp.GradScaler]] | None = None,
    registered: Mapping[str, Stateful] | None = None,
    initial: InitialState | None = None,
) -> RestoredState:
    """Restore the model, optimizers, moving average, registered objects and generators.

    With `initial`, which describes the model when this session began, flags and attributes are restored too. Objects
    that were saved but are not in `registered` are left out: `restore_registered` restores them later. Raises WhetError
    if the snapshot does not fit.
    """
    try:
        # Only trained parameters must be finite; buffers and masks may hold Inf.
        trained = {f"model/{name}" for group in snapshot.facts["optimizer"]["groups"] for name in group["parameters"]}
        check_finite({name.removeprefix("model/"): t for name, t in snapshot.tensors.items() if name in trained})
        restore_model(snapshot, model, initial=initial)
        structure = snapshot.facts["model"]["structure"]
        late = structure["now"].keys() ^ structure["initial"].keys()
        if ema is not None:
            _restore_average(ema, snapshot, late)
        decoder = _decoder(snapshot, model, device.torch_device)
        restorer = OptimizerRestorer(
            model,
            decoder,
            snapshot.tensors,
            snapshot.rows,
            lambda target, name: _part_for(target, snapshot, name),
            late=late,
        )
        restorer.restore(optimizer, snapshot.facts["optimizer"])
        if snapshot.facts["scaler"]:
            scaler.load_state_dict(snapshot.facts["scaler"])
        _restore_others(snapshot, restorer, others or {})
        for name, owner in (registered or {}).items():
            if name in snapshot.facts["registered"]:
                owner.load_state_dict(decoder.decode(snapshot.facts["registered"][name]))
        changes: list[str] = []
        if initial is not None:
            optimizers = {"": optimizer, **{name: other for name, (other, _) in (others or {}).items()}}
            model_facts = snapshot.facts["model"]
            changes = restore_flags_and_attributes(model_facts, model, optimizers, initial, decoder)
        for name, parameter in model.named_parameters():
            parameter.grad = decoder.decode(snapshot.facts["gradients"].get(name))
        progress: dict[str, Any] = decoder.decode(snapshot.facts["progress"])
        # Restore the generators last, because restoring the other parts may draw random numbers.
        rng.restore(snapshot.tensors, snapshot.facts["rng"])
        return RestoredState(progress, changes)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        if is_out_of_memory(error):
            raise
        # The hashes match but the structure does not: another program wrote the checkpoint, or it was edited.
        what = f"{type(error).__name__} {error}"[:300]
        raise WhetError("the checkpoint's state has an unknown structure", got=what, try_=MOVE_CHECKPOINT) from error


def _decoder(snapshot: Snapshot, model: nn.Module, device: torch.device) -> StateDecoder:
    was_on_host = snapshot.facts["device"] == "cpu"
    return StateDecoder(snapshot.tensors, live=_model_tensors(model), device=device, was_on_host=was_on_host)


def restore_registered(
    snapshot: Snapshot, name: str, owner: Stateful, model: nn.Module, device: AbstractDevice
) -> bool:
    """Restore an object of the user that was registered after the run was restored. Return whether it was saved.

    No generator moves: the run has restored them already.
    """
    if name not in snapshot.facts["registered"]:
        return False
    with preserve_rng(device):
        owner.load_state_dict(_decoder(snapshot, model, device.torch_device).decode(snapshot.facts["registered"][name]))
    return True


def check_finite(parameters: dict[str, Tensor]) -> None:
    """Raise WhetError if a trained parameter has NaN or Inf.

    Do not pass frozen parameters, which may be masks with Inf.
    """
    # torch has no norms of 8-bit floats.
    floating = {n: p.detach() for n, p in parameters.items() if p.is_floating_point() and p.numel() and p.itemsize > 1}
    if not floating:
        return
    # The maximum norm of a tensor is NaN or Inf exactly if one of its elements is. One call computes all norms.
    norms = torch._foreach_norm(list(floating.values()), ord=float("inf"))
    is_finite = torch.stack([norm.isfinite() for norm in norms])
    if not bool(is_finite.all()):
        name = list(floating)[int(is_finite.logical_not().nonzero()[0])]
        raise WhetError(
            "the weights are NaN or Inf",
            got=f"{name} has NaN or Inf, although the loss had none",
            try_="a smaller lr, clip=1.0, or precision=fp32; the last checkpoint is from before that",
        )


def restore_model(
    snapshot: Snapshot,
    model: nn.Module,
    *,
    use_average: bool = False,
    with_memory: bool = True,
    initial: InitialState | None = None,
) -> None:
    """Restore the weights of a model, or with `use_average` their moving average if the snapshot has one.

    Modules with `is_memory = True` carry state between the steps of one run. Pass `with_memory=False` to skip their
    buffers, for inference or for another run. `initial` describes the model when the session began, which may have
    created or resized buffers since.
    """
    memory: tuple[str, ...] = ()
    if not with_memory:
        memory = tuple(f"{name}." for name, module in model.named_modules() if getattr(module, "is_memory", False))
    facts, made = snapshot.facts.get("model"), []
    if facts is not None:
        made = fit_structure(facts["structure"], model, initial, ignored=memory)
    targets = {name: tensor for name, tensor in named_tensors(model) if is_plain(tensor)}
    if memory:
        targets = {name: tensor for name, tensor in targets.items() if not name.startswith(memory)}
        excluded = tuple(f"model/{name}" for name in memory)
        tensors = {name: tensor for name, tensor in snapshot.tensors.items() if not name.startswith(excluded)}
        snapshot = replace(snapshot, tensors=tensors)
    for name, buffer in _copy_into(targets, snapshot, "model").items():
        replace_buffer(model, name, buffer)
    if facts is not None:
        place = next((tensor.device for tensor in targets.values()), torch.device("cpu"))
        restore_extra(facts, model, _decoder(snapshot, model, place), made=made)
    averaged = {name: targets[name] for name in targets if f"ema/{name}" in snapshot.tensors}
    if use_average and averaged:
        _copy_into(averaged, snapshot, "ema")


def _restore_average(ema: Ema, snapshot: Snapshot, late: Collection[str]) -> None:
    """Restore the average with the names that it had. `late` are tensors that were added or renamed during the run.

    A callback may have pruned the model just before the checkpoint. The average follows in the next step.
    """
    ema.follow_model()
    saved = {name.removeprefix("ema/"): t for name, t in snapshot.tensors.items() if name.startswith("ema/")}
    if saved and (saved.keys() ^ ema.average.keys()) <= {*late}:
        place = next(iter(ema.average.values())).device
        made = {name: torch.empty_like(t, device=place) for name, t in saved.items() if name not in ema.average}
        ema.average = {name: made[name] if name in made else ema.average[name] for name in saved}
    _copy_into(ema.average, snapshot, "ema")


def has_average(snapshot: Snapshot) -> bool:
    """Return whether the snapshot has a moving average of the weights."""
    return any(name.startswith("ema/") for name in snapshot.tensors)


def trained_weights(snapshot: Snapshot) -> dict[str, Tensor]:
    """Return the weights by name, averaged where the snapshot has an average."""
    named = {name.removeprefix("model/"): t for name, t in snapshot.tensors.items() if name.startswith("model/")}
    return {name: snapshot.tensors.get(f"ema/{name}", tensor).contiguous() for name, tensor in named.items()}


@torch.no_grad()
def _copy_into(targets: dict[str, Tensor], snapshot: Snapshot, role: str) -> dict[str, Tensor]:
    """Copy saved tensors. Return those that need another tensor, because the elements of the target share memory."""
    targets = {name: _stored(tensor) for name, tensor in targets.items()}
    saved = {name.removeprefix(f"{role}/"): t for name, t in snapshot.tensors.items() if name.startswith(f"{role}/")}
    missing, extra = sorted(targets.keys() - saved.keys()), sorted(saved.keys() - targets.keys())
    problems = []
    if missing:
        problems.append(f"the model has {format_list(missing, most=5)}, which the checkpoint lacks")
    if extra and role == "model":
        problems.append(f"the checkpoint has {format_list(extra, most=5)}, which the model lacks")
    differing = []
    for name, target in targets.items():
        before = name in saved and (_whole_shape(snapshot, f"{role}/{name}"), saved[name].dtype)
        now = tuple(target.shape), target.dtype
        if before and before != now:
            differing.append(f"{name} is {_form(*before)} in the checkpoint and {_form(*now)} in the model")
    problems += [format_list(differing, most=5)] if differing else []
    # All problems at once, and before anything is copied.
    if problems:
        raise WhetError(
            f"the checkpoint does not fit this {role}",
            got="; ".join(problems),
            try_="the model the run was started with",
        )
    replaced: dict[str, Tensor] = {}
    for name, target in targets.items():
        values = _part_for(target, snapshot, f"{role}/{name}")
        if 0 in target.stride() and overlaps_itself(target):
            replaced[name] = expanded_copy(target, values)
        else:
            local_tensor(target.detach()).copy_(values)
    return replaced


def _form(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} {str(dtype).removeprefix('torch.')}"


def _whole_shape(snapshot: Snapshot, name: str) -> tuple[int, ...]:
    shape, rows = tuple(snapshot.tensors[name].shape), snapshot.rows.get(name)
    return shape if rows is None else (rows.total, *shape[1:])


def _part_for(target: Tensor, snapshot: Snapshot, name: str) -> Tensor:
    """Return the saved rows for this rank's part of `target`. Raises WhetError if other rows were read."""
    read, needed = snapshot.rows.get(name), local_rows(target)
    if read != needed:
        got = f"{read or 'all rows'} of {name!r} were read; {needed or 'all rows'} are needed"
        raise WhetError("the checkpoint was loaded for another part of the model", got=got, try_="wanted_rows(model)")
    return snapshot.tensors[name]


def _restore_others(
    snapshot: Snapshot, restorer: OptimizerRestorer, others: Mapping[str, tuple[Optimizer, torch.amp.GradScaler]]
) -> None:
    saved = snapshot.facts["other_optimizers"]
    if saved.keys() != others.keys():
        raise WhetError(
            "the checkpoint was made with other optimizers",
            got=f"{', '.join(others) or 'one'}; the checkpoint has {', '.join(saved) or 'one'} besides the first",
            try_="the optimizers the run was started with, in their order",
        )
    for name, (other, scaler) in others.items():
        restorer.restore(other, saved[name]["optimizer"])
        if saved[name]["scaler"]:
            scaler.load_state_dict(saved[name]["scaler"])


def describe_names(model: nn.Module) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the names of all parameters in order, and groups of names that refer to the same tied tensor."""
    groups: dict[int, list[str]] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            groups.setdefault(id(tensor), []).append(name)
    tied = tuple(tuple(names) for names in groups.values() if len(names) > 1)
    return tuple(name for name, _ in model.named_parameters()), tied
