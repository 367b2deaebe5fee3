"""Snapshots of a run's state: named tensors, and plain JSON for everything else. Nothing is pickled."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import WhetError
from whet.checkpoint.manifest import CheckpointInfo
from whet.checkpoint.shards import WantedRows
from whet.checkpoint.state_json import decode_state, encode_state
from whet.device.abstract import AbstractDevice
from whet.device.rng import capture_rng, restore_rng
from whet.distributed.strategies import RowRange, local_rows, local_tensor
from whet.step.ema import Ema, named_tensors
from whet.step.model_contexts import align_state
from whet.step.optimizers import EXECUTION_KEYS, group_values, set_group_value

_PARAMETER_SHAPED_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta")
"""Optimizer state with the shape of its parameter. Fused kernels do not check it and would write out of bounds."""


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

    @property
    def num_bytes(self) -> int:
        """Total bytes of the tensors on this rank."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def take_snapshot(
    model: nn.Module,
    optimizer: Optimizer,
    device: AbstractDevice,
    *,
    scaler: torch.amp.GradScaler,
    ema: Ema | None,
    step: int,
    progress: dict[str, Any],
    info: CheckpointInfo,
    num_groups: int,
    others: Mapping[str, tuple[Optimizer, torch.amp.GradScaler]] | None = None,
    has_gradients: bool = False,
) -> Snapshot:
    """Return the state of everything that changes during training.

    `progress` is additional state of the caller, as JSON. Only the first `num_groups` parameter groups are saved,
    because groups that were added later do not belong to the run. `others` are further optimizers by name. With
    `has_gradients`, gradients are saved too, because the user's own code may accumulate them over several steps.
    """
    tensors = {f"model/{name}": tensor for name, tensor in named_tensors(model)}
    if ema is not None:
        tensors |= {f"ema/{name}": tensor for name, tensor in ema.average.items()}
    optimizer_tensors, optimizer_facts = _optimizer_state(model, optimizer, num_groups=num_groups)
    rng, rng_facts = capture_rng(device)
    tensors |= optimizer_tensors | rng
    other_facts: dict[str, Any] = {}
    for name, (other, other_scaler) in (others or {}).items():
        other_tensors, facts_of_other = _optimizer_state(model, other, prefix=f"optimizer/@{name}/")
        tensors |= other_tensors
        other_facts[name] = {"optimizer": facts_of_other, "scaler": other_scaler.state_dict()}
    if has_gradients:
        tensors |= {f"gradient/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    # Read the row ranges first, because the local parts below no longer have them.
    rows = {name: part for name, tensor in tensors.items() if (part := local_rows(tensor)) is not None}
    facts = {
        "step": step,
        "progress": progress,
        "optimizer": optimizer_facts,
        "scaler": scaler.state_dict(),
        "other_optimizers": other_facts,
        "rng": rng_facts,
        "device": device.kind,
    }
    local = {name: local_tensor(tensor.detach()) for name, tensor in tensors.items()}
    return Snapshot(tensors=local, facts=facts, info=info, rows=rows)


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


def restore_snapshot(
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: Optimizer,
    device: AbstractDevice,
    *,
    scaler: torch.amp.GradScaler,
    ema: Ema | None,
    others: Mapping[str, tuple[Optimizer, torch.amp.GradScaler]] | None = None,
) -> dict[str, Any]:
    """Restore the model, optimizer, scaler, moving average and generators, and return the caller's `progress`.

    Raises WhetError if the snapshot does not fit.
    """
    try:
        # Only trained parameters must be finite; buffers and masks may hold Inf.
        trained = {f"model/{name}" for group in snapshot.facts["optimizer"]["groups"] for name in group["parameters"]}
        check_finite({name.removeprefix("model/"): t for name, t in snapshot.tensors.items() if name in trained})
        restore_model(snapshot, model)
        if ema is not None:
            _copy_into(ema.average, snapshot, "ema")
        _restore_optimizer(snapshot, model, optimizer, snapshot.facts["optimizer"])
        if snapshot.facts["scaler"]:
            scaler.load_state_dict(snapshot.facts["scaler"])
        _restore_others(snapshot, model, others or {})
        for name, parameter in model.named_parameters():
            saved = snapshot.tensors.get(f"gradient/{name}")
            parameter.grad = None if saved is None else saved.to(parameter.device, copy=True)
        progress: dict[str, Any] = snapshot.facts["progress"]
        # Restore the generators last, because restoring the other parts may draw random numbers.
        restore_rng(snapshot.tensors, snapshot.facts["rng"], device)
        return progress
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        # The hashes match but the structure does not: another program wrote the checkpoint, or it was edited.
        what = f"{type(error).__name__} {error}"[:300]
        raise WhetError(
            "the checkpoint's state has an unknown structure", got=what, try_="an older checkpoint"
        ) from error


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


def restore_model(snapshot: Snapshot, model: nn.Module, *, use_average: bool = False, with_memory: bool = True) -> None:
    """Restore the weights of a model, or with `use_average` their moving average if the snapshot has one.

    Modules with `is_memory = True` carry state between the steps of one run. Pass `with_memory=False` to skip their
    buffers, for inference or for another run.
    """
    targets = dict(named_tensors(model))
    if not with_memory:
        memory = tuple(f"{name}." for name, module in model.named_modules() if getattr(module, "is_memory", False))
        targets = {name: tensor for name, tensor in targets.items() if not name.startswith(memory)}
        excluded = tuple(f"model/{name}" for name in memory)
        tensors = {name: tensor for name, tensor in snapshot.tensors.items() if not name.startswith(excluded)}
        snapshot = replace(snapshot, tensors=tensors)
    _copy_into(targets, snapshot, "model")
    averaged = {name: targets[name] for name in targets if f"ema/{name}" in snapshot.tensors}
    if use_average and averaged:
        _copy_into(averaged, snapshot, "ema")


def has_average(snapshot: Snapshot) -> bool:
    """Return whether the snapshot has a moving average of the weights."""
    return any(name.startswith("ema/") for name in snapshot.tensors)


def trained_weights(snapshot: Snapshot) -> dict[str, Tensor]:
    """Return the weights by name, averaged where the snapshot has an average."""
    named = {name.removeprefix("model/"): t for name, t in snapshot.tensors.items() if name.startswith("model/")}
    return {name: snapshot.tensors.get(f"ema/{name}", tensor).contiguous() for name, tensor in named.items()}


@torch.no_grad()
def _copy_into(targets: dict[str, Tensor], snapshot: Snapshot, role: str) -> None:
    saved = {name.removeprefix(f"{role}/"): t for name, t in snapshot.tensors.items() if name.startswith(f"{role}/")}
    missing, extra = sorted(targets.keys() - saved.keys()), sorted(saved.keys() - targets.keys())
    problems = []
    if missing:
        problems.append(f"the model has {_listed(missing)}, which the checkpoint lacks")
    if extra and role == "model":
        problems.append(f"the checkpoint has {_listed(extra)}, which the model lacks")
    differing = []
    for name, target in targets.items():
        before = name in saved and (_whole_shape(snapshot, f"{role}/{name}"), saved[name].dtype)
        now = tuple(target.shape), target.dtype
        if before and before != now:
            differing.append(f"{name} is {_form(*before)} in the checkpoint and {_form(*now)} in the model")
    problems += [_listed(differing)] if differing else []
    # All problems at once, and before anything is copied.
    if problems:
        raise WhetError(
            f"the checkpoint does not fit this {role}",
            got="; ".join(problems),
            try_="the model the run was started with",
        )
    for name, target in targets.items():
        local_tensor(target.detach()).copy_(_part_for(target, snapshot, f"{role}/{name}"))


def _listed(names: list[str], *, most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


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
    snapshot: Snapshot, model: nn.Module, others: Mapping[str, tuple[Optimizer, torch.amp.GradScaler]]
) -> None:
    saved = snapshot.facts["other_optimizers"]
    if saved.keys() != others.keys():
        raise WhetError(
            "the checkpoint was made with other optimizers",
            got=f"{', '.join(others) or 'one'}; the checkpoint has {', '.join(saved) or 'one'} besides the first",
            try_="the optimizers the run was started with, in their order",
        )
    for name, (other, scaler) in others.items():
        _restore_optimizer(snapshot, model, other, saved[name]["optimizer"], prefix=f"optimizer/@{name}/")
        if saved[name]["scaler"]:
            scaler.load_state_dict(saved[name]["scaler"])


def _optimizer_state(
    model: nn.Module, optimizer: Optimizer, *, num_groups: int | None = None, prefix: str = "optimizer/"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer state by parameter name, so that it does not depend on the order of parameters."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names[parameter]
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}{name}/{key}"] = value
            else:
                # Numbers stay as they are. Lists and dicts of tensors (LBFGS) refer to tensors by name.
                encoded = encode_state(value, path=f"{prefix}{name}/{key}", tensors=tensors)
                numbers.setdefault(name, {})[key] = encoded
    groups = [
        {
            "parameters": [names[p] for p in group["params"]],
            "values": group_values(group),
        }
        for group in optimizer.param_groups[:num_groups]
    ]
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}


def _restore_optimizer(
    snapshot: Snapshot, model: nn.Module, optimizer: Optimizer, facts: Mapping[str, Any], *, prefix: str = "optimizer/"
) -> None:
    if facts["class"] != type(optimizer).__name__:
        raise WhetError(
            "the checkpoint was made with another optimizer",
            got=f"{facts['class']}; this is {type(optimizer).__name__}",
            try_="the optimizer the run was started with",
        )
    by_name = dict(model.named_parameters())
    groups = optimizer.param_groups
    if len(facts["groups"]) != len(groups):
        got = f"{len(groups)} parameter groups; the checkpoint has {len(facts['groups'])}"
        raise WhetError("the checkpoint's parameter groups differ", got=got, try_="the same groups")
    for saved, group in zip(facts["groups"], groups, strict=True):
        order = [by_name[name] for name in saved["parameters"]]
        if {id(p) for p in order} != {id(p) for p in group["params"]}:
            raise WhetError(
                "the checkpoint's parameter groups differ", got=f"{len(order)} parameters", try_="the same groups"
            )
        for key, value in saved["values"].items():
            # The current plan selects kernels. It may differ from the plan of the saved run.
            if key not in EXECUTION_KEYS:
                set_group_value(group, key, value)
    optimizer.state.clear()
    used: dict[str, Tensor] = {}
    for name, numbers in facts["numbers"].items():
        parameter = by_name[name]
        moved = _MovedTensors(snapshot.tensors, parameter.device, used)
        optimizer.state[parameter].update({key: decode_state(value, tensors=moved) for key, value in numbers.items()})
    for full_name, tensor in snapshot.tensors.items():
        name, _, key = full_name.removeprefix(prefix).rpartition("/")
        # "@" begins the name of another optimizer.
        if full_name.startswith(prefix) and not name.startswith("@") and full_name not in used:
            parameter = by_name[name]
            whole = _whole_shape(snapshot, full_name)
            if key in _PARAMETER_SHAPED_STATE and whole != tuple(parameter.shape):
                raise WhetError(
                    f"the checkpoint's {key} does not fit {name!r}",
                    got=f"{whole}; the parameter has {tuple(parameter.shape)}",
                    try_="the model the run was started with",
                )
            if local_rows(parameter) is not None and whole == tuple(parameter.shape):
                # Shard the state like its parameter.
                sharded = torch.empty_like(parameter.detach(), dtype=tensor.dtype)
                local_tensor(sharded).copy_(_part_for(parameter, snapshot, full_name))
                optimizer.state[parameter][key] = sharded
                continue
            # torch keeps step counts on the CPU unless the optimizer is fused or capturable.
            device = parameter.device if key != "step" or _steps_on_device(optimizer) else torch.device("cpu")
            optimizer.state[parameter][key] = tensor.to(device, copy=True)
    for owner, state in optimizer.state.items():
        # Tensors on disk are contiguous, but fused kernels need the state in the memory layout of its parameter.
        align_state(owner, state)


class _MovedTensors(Mapping[str, Tensor]):
    """Copies of tensors on a device, made when they are looked up. `used` collects them."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device, used: dict[str, Tensor]) -> None:
        self._tensors, self._device, self._used = tensors, device, used

    def __getitem__(self, name: str) -> Tensor:
        self._used[name] = self._tensors[name].to(self._device, copy=True)
        return self._used[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _steps_on_device(optimizer: Optimizer) -> bool:
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def describe_names(model: nn.Module) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the names of all parameters in order, and groups of names that refer to the same tied tensor."""
    groups: dict[int, list[str]] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            groups.setdefault(id(tensor), []).append(name)
    tied = tuple(tuple(names) for names in groups.values() if len(names) > 1)
    return tuple(name for name, _ in model.named_parameters()), tied
