"""Restore a model, its optimizers and everything else from a snapshot."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import WhetError
from whet.base.units import format_list
from whet.checkpoint.model_state import (
    InitialState,
    expanded_copy,
    is_plain,
    match_structure,
    replace_buffer,
    restore_extra,
    restore_flags_and_attributes,
)
from whet.checkpoint.optimizer_state import OptimizerRestorer
from whet.checkpoint.shared_memory import overlaps_itself
from whet.checkpoint.snapshot import OMITTED, Snapshot, Stateful, check_finite, model_tensors, stored_form
from whet.checkpoint.state_decoder import StateDecoder
from whet.device.abstract import AbstractDevice
from whet.device.errors import is_out_of_memory
from whet.device.random_streams import RandomStreams
from whet.device.rng import preserve_rng
from whet.distributed.strategies import local_rows, local_tensor
from whet.step.ema import Ema, named_tensors

MOVE_CHECKPOINT = "move the newest folder out of checkpoints/, and run the same command again"
"""Hint of the error if the newest checkpoint cannot be restored. Without it, the run resumes from the previous one."""


class RestoredState(NamedTuple):
    """The progress and the messages that `restore_snapshot` returns."""

    progress: dict[str, Any]
    """The caller's own state, as passed to `take_snapshot`."""
    changes: list[str]
    """Flags and attributes that the user has changed since the run was started. They keep their new values."""


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

    With `initial`, the description of the model at the start of this session, flags and attributes are restored too.
    Saved objects that are not in `registered` are skipped, and `restore_registered` can restore them later. Raise
    WhetError if the snapshot does not match.
    """
    try:
        # Only trained parameters must be finite, because buffers and masks may contain Inf.
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
            if snapshot.facts["registered"].get(name, OMITTED) != OMITTED:
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
        # The hashes match but the structure does not, so another program wrote or edited the checkpoint.
        what = f"{type(error).__name__} {error}"[:300]
        raise WhetError("the checkpoint's state has an unknown structure", got=what, try_=MOVE_CHECKPOINT) from error


def _decoder(snapshot: Snapshot, model: nn.Module, device: torch.device) -> StateDecoder:
    was_on_host = snapshot.facts["device"] == "cpu"
    return StateDecoder(snapshot.tensors, live=model_tensors(model), device=device, was_on_host=was_on_host)


def restore_registered(
    snapshot: Snapshot, name: str, owner: Stateful, model: nn.Module, device: AbstractDevice
) -> bool:
    """Restore a user's object that was registered after the run was restored.

    Return whether the checkpoint contains it.

    Random generators are not changed: the run has already restored them.
    """
    if name not in snapshot.facts["registered"]:
        return False
    if snapshot.facts["registered"][name] == OMITTED:
        # A gap of the checkpoint names the object.
        return True
    with preserve_rng(device):
        owner.load_state_dict(_decoder(snapshot, model, device.torch_device).decode(snapshot.facts["registered"][name]))
    return True


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
    buffers, for inference or for another run. `initial` describes the model at the start of the session, which may have
    created or resized buffers since.
    """
    memory: tuple[str, ...] = ()
    if not with_memory:
        memory = tuple(f"{name}." for name, module in model.named_modules() if getattr(module, "is_memory", False))
    facts, made = snapshot.facts.get("model"), []
    if facts is not None:
        made = match_structure(facts["structure"], model, initial, ignored=memory)
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
    """Restore the moving average under its saved names. `late` are tensors that were added or renamed during the run.

    A callback may have pruned the model just before the checkpoint was written. The average is updated accordingly in
    the next step.
    """
    ema.follow_model()
    saved = {name.removeprefix("ema/"): t for name, t in snapshot.tensors.items() if name.startswith("ema/")}
    if saved and (saved.keys() ^ ema.average.keys()) <= {*late}:
        place = next(iter(ema.average.values())).device
        made = {name: torch.empty_like(t, device=place) for name, t in saved.items() if name not in ema.average}
        ema.average = {name: made[name] if name in made else ema.average[name] for name in saved}
    _copy_into(ema.average, snapshot, "ema")


@torch.no_grad()
def _copy_into(targets: dict[str, Tensor], snapshot: Snapshot, role: str) -> dict[str, Tensor]:
    """Copy saved tensors into `targets`.

    Return new tensors for targets whose elements share memory, which the caller must replace.
    """
    targets = {name: stored_form(tensor) for name, tensor in targets.items()}
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
    # Report all problems at once, before anything is copied.
    if problems:
        raise WhetError(
            f"the checkpoint does not fit this {role}",
            got="; ".join(problems),
            try_=f"the {role} that the run was started with, or another run folder for this one",
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
    """Return the part of a saved tensor that this rank's shard of `target` needs.

    Raise WhetError if those rows were not read.
    """
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
            "the checkpoint was made with different optimizers",
            got=f"besides the first: {', '.join(others) or 'none'}; in the checkpoint: {', '.join(saved) or 'none'}",
            try_="the optimizers the run was started with, in their order",
        )
    for name, (other, scaler) in others.items():
        restorer.restore(other, saved[name]["optimizer"])
        if saved[name]["scaler"]:
            scaler.load_state_dict(saved[name]["scaler"])
