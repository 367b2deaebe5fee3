"""The state of optimizers, of any structure, saved through their own state_dict() if they override it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import WhetError
from whet.checkpoint.state_decoder import StateDecoder
from whet.checkpoint.state_encoder import StateEncoder
from whet.distributed.strategies import RowRange, local_rows, local_tensor
from whet.step.model_contexts import align_state
from whet.step.optimizers import EXECUTION_KEYS

_PARAMETER_SHAPED_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta")
"""State with the shape of its parameter. Fused kernels do not check the shape and would write out of bounds."""

_GONE = "@gone"
"""Stands for a parameter that is no longer in the model, such as one replaced by weight_norm.

Its values, gradient and state are saved by its position in the parameter groups.
"""


def state_name(prefix: str, parameter: str, key: object) -> str:
    """Return the name under which a tensor in the state of a parameter is saved."""
    # Readers split this name at the last slash, so the key comes last.
    return f"{prefix}{parameter}/{str(key).replace('%', '%25').replace('/', '%2F')}"


def encode_optimizer(
    encoder: StateEncoder, model: nn.Module, optimizer: Optimizer, *, num_groups: int | None = None, prefix: str
) -> dict[str, Any]:
    """Return the state of an optimizer, keyed by parameter names so that it does not depend on the order of parameters.

    Only the first `num_groups` parameter groups are saved.
    """
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    facts: dict[str, Any] = {"class": type(optimizer).__name__}
    with encoder.one_state():
        facts |= _encode_parts(encoder, optimizer, names, num_groups=num_groups, prefix=prefix)
        for attribute, inner in inner_optimizers(optimizer):
            parts = _encode_parts(encoder, inner, names, prefix=f"{prefix}@{attribute}/")
            facts.setdefault("inner", {})[attribute] = {"class": type(inner).__name__, **parts}
        if has_own_state(optimizer):
            # Most of these tensors were encoded above, so they become references.
            facts["own"] = encoder.encode(optimizer.state_dict(), f"{prefix}@state_dict/")
    return facts


def _encode_parts(
    encoder: StateEncoder,
    optimizer: Optimizer,
    names: Mapping[Any, str],
    *,
    num_groups: int | None = None,
    prefix: str,
) -> dict[str, Any]:
    groups = [
        {
            "parameters": [names.get(p, _GONE) for p in group["params"]],
            "values": {
                key: encoder.encode(value, f"{prefix}@group/{number}.{key}")
                # Sort the items as the file does: they must be decoded in the order in which they were encoded.
                for key, value in sorted(group.items())
                # Functions are not saved, because the user's program creates them again.
                if key != "params" and not callable(value)
            },
        }
        for number, group in enumerate(optimizer.param_groups[:num_groups])
    ]
    state: list[Any] = []
    for owner, values in optimizer.state.items():
        if isinstance(owner, Tensor):
            if owner not in names:
                continue
            entry: dict[str, Any] = {"parameter": names[owner]}
            path = names[owner]
        else:
            # Some optimizers also store counters under string keys.
            entry, path = {"key": encoder.encode(owner, f"{prefix}@key")}, f"@{owner}"
        if isinstance(values, dict):
            entry["items"] = [
                [encoder.encode(key, prefix), encoder.encode(value, state_name(prefix, path, key))]
                for key, value in values.items()
            ]
        else:
            entry["value"] = encoder.encode(values, state_name(prefix, path, "value"))
        state.append(entry)
    orphans = _encode_orphans(encoder, optimizer, names, num_groups=num_groups, prefix=prefix)
    return {"groups": groups, "state": state, **({"orphans": orphans} if orphans else {})}


def _encode_orphans(
    encoder: StateEncoder, optimizer: Optimizer, names: Mapping[Any, str], *, num_groups: int | None, prefix: str
) -> list[dict[str, Any]]:
    """Return the parameters of the groups that are no longer in the model, with their gradients and states."""
    orphans: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups[:num_groups]):
        for index, parameter in enumerate(group["params"]):
            if parameter in names:
                continue
            path = f"{_GONE}/{number}.{index}"
            values = optimizer.state.get(parameter)
            orphan: dict[str, Any] = {
                "group": number,
                "index": index,
                "parameter": encoder.encode(parameter, state_name(prefix, path, "values")),
                # The user's loop may clear only the gradients of the model.
                "gradient": encoder.encode(parameter.grad, state_name(prefix, path, "gradient")),
            }
            if isinstance(values, dict):
                orphan["items"] = [
                    [encoder.encode(key, prefix), encoder.encode(value, state_name(prefix, path, key))]
                    for key, value in values.items()
                ]
            orphans.append(orphan)
    return orphans


def inner_optimizers(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Yield (name, optimizer) for the optimizers inside a wrapper such as Lookahead, sorted by name."""
    for name, value in sorted(vars(optimizer).items()):
        if isinstance(value, Optimizer) and value is not optimizer:
            yield name, value


def has_own_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer customizes its state dict through an override or a hook."""
    names = ("state_dict", "load_state_dict")
    overrides = any(getattr(getattr(optimizer, n), "__func__", None) is not getattr(Optimizer, n) for n in names)
    hooks = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    return overrides or any(getattr(optimizer, name, None) for name in hooks)


# --- restoring -------------------------------------------------------------------------------------------------------


class OptimizerRestorer:
    """Restores the state of one or more optimizers from a checkpoint."""

    def __init__(
        self,
        model: nn.Module,
        decoder: StateDecoder,
        tensors: Mapping[str, Tensor],
        rows: Mapping[str, RowRange],
        part_for: Callable[[Tensor, str], Tensor],
        *,
        late: Collection[str],
    ) -> None:
        """Restore into the parameters of `model`. `part_for` returns the rows of a saved tensor that a parameter needs.

        `late` names the parameters that the saved run added to the model, and possibly to its optimizer.
        """
        self._late = late
        self._by_name = dict(model.named_parameters())
        self._decoder, self._tensors, self._rows, self._part_for = decoder, tensors, rows, part_for

    def restore(self, optimizer: Optimizer, facts: Mapping[str, Any]) -> None:
        """Restore an optimizer. Raise WhetError if the checkpoint was made with a different optimizer."""
        if facts["class"] != type(optimizer).__name__:
            raise WhetError(
                "the checkpoint was made with a different optimizer",
                got=f"{facts['class']}; this is {type(optimizer).__name__}",
                try_="the optimizer the run was started with",
            )
        inner = dict(inner_optimizers(optimizer))
        if inner.keys() != facts.get("inner", {}).keys():
            raise WhetError(
                "the checkpoint was made with a different optimizer",
                got=f"one with {', '.join(facts.get('inner', {})) or 'no optimizer inside'}",
                try_="the optimizer the run was started with",
            )
        pairs = [
            ("", optimizer, facts),
            *((name, inner[name], saved) for name, saved in facts.get("inner", {}).items()),
        ]
        for _, one, saved in pairs:
            self._check_groups(one, saved)
        # Decode everything in the order of the encoding, because later parts refer to earlier ones.
        decoded = [(name, *self._decode_parts(one, saved)) for name, one, saved in pairs]
        if "own" in facts:
            _load_own(optimizer, self._decoder.decode(facts["own"]))
        # Set the state again without changes: torch's load_state_dict converts dtypes and copies shared tensors.
        for name, groups, state in decoded:
            one = dict(inner_optimizers(optimizer))[name] if name else optimizer
            for group, values in zip(one.param_groups, groups, strict=True):
                group.update(values)
            one.state.clear()
            one.state.update(state)

    def _check_groups(self, optimizer: Optimizer, facts: Mapping[str, Any]) -> None:
        groups = optimizer.param_groups
        if len(facts["groups"]) != len(groups):
            got = f"{len(groups)} parameter groups; the checkpoint has {len(facts['groups'])}"
            raise WhetError(
                "the checkpoint's parameter groups differ",
                got=got,
                try_="the parameter groups the run was started with",
            )
        for saved, group in zip(facts["groups"], groups, strict=True):
            order = self._in_saved_order(saved["parameters"], group["params"])
            if order is None:
                gone = " that are not parameters of this model" if _GONE in saved["parameters"] else ""
                got = f"{len(saved['parameters'])} parameters{gone}"
                raise WhetError(
                    "the checkpoint's parameter groups differ",
                    got=got,
                    try_="the parameter groups the run was started with",
                )
            if [*map(id, order)] != [*map(id, group["params"])]:
                # Assign a new list instead of reordering, so that the stepper detects the change.
                group["params"] = order

    def _in_saved_order(self, names: Sequence[str], now: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the parameters of a group in their saved order, or None if the group has different ones.

        weight_norm replaces a parameter during a run. The group keeps the old parameter unless the user adds the new
        ones to it, in which case the restored model has the new ones too.
        """
        in_model = {id(p) for p in self._by_name.values()}
        gone = [p for p in now if id(p) not in in_model]
        left = iter(gone)
        matched = [next(left, None) if name == _GONE else self._by_name.get(name) for name in names]
        order = [p for p in matched if p is not None]
        saved = {id(p) for p in order}
        is_same = saved == {id(p) for p in now}
        is_late = all(name in self._late for name in names if id(self._by_name.get(name)) not in {id(p) for p in now})
        is_replaced = (gone or is_late) and all(id(p) in saved or id(p) not in in_model for p in now)
        if len(order) == len(names) and (is_same or is_replaced):
            return order
        return self._with_orphans(names, now)

    def _with_orphans(self, names: Sequence[str], now: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the parameters of a group with a new one for each that the saved run has removed from the model.

        A module that is replaced by one of the same class does not change the structure of the model, so the group of
        a new session has the parameters of this module. The saved run no longer trained them.
        """
        named = [self._by_name.get(name) for name in names if name != _GONE]
        known = {id(p) for p in named}
        others = [p for p in now if id(p) not in known]
        is_known = all(p is not None and (id(p) in map(id, now)) for p in named)
        if not is_known or len(others) != names.count(_GONE):
            return None
        in_model = {id(p) for p in self._by_name.values()}
        made = (torch.nn.Parameter(p.detach().clone()) if id(p) in in_model else p for p in others)
        return [next(made) if name == _GONE else self._by_name[name] for name in names]

    def _decode_parts(
        self, optimizer: Optimizer, facts: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
        """Decode the hyperparameters of the parameter groups and the state of the parameters."""
        groups = [
            # The current plan selects the kernels. They may differ from those of the saved run.
            {k: self._group_value(group, k, v) for k, v in sorted(saved["values"].items()) if k not in EXECUTION_KEYS}
            for saved, group in zip(facts["groups"], optimizer.param_groups, strict=True)
        ]
        state: dict[Any, Any] = {}
        on_device = _keeps_steps_on_device(optimizer.param_groups)
        was_on_device = _keeps_steps_on_device([saved["values"] for saved in facts["groups"]])
        for entry in facts["state"]:
            if "parameter" not in entry:
                state[self._decoder.decode(entry["key"])] = self._values(entry)
                continue
            parameter = self._by_name[entry["parameter"]]
            for key, value in entry.get("items", ()):
                # ASGD and some user-defined optimizers always keep step counts on the device.
                is_own = isinstance(value, dict) and value.get("device", "cpu") != "cpu" and not was_on_device
                self._prepare(parameter, entry["parameter"], key, value, steps_on_device=on_device or is_own)
            state[parameter] = self._values(entry)
            if "items" in entry:
                # Tensors on disk are contiguous, but fused kernels need the state in the layout of its parameter.
                align_state(parameter, state[parameter])
        for orphan in facts.get("orphans", ()):
            parameter = optimizer.param_groups[orphan["group"]]["params"][orphan["index"]]
            saved = self._decoder.decode(orphan["parameter"])
            if orphan["parameter"].get("$") == "reference" and saved.shape == parameter.shape:
                # Keep the memory, because the user's code may hold views of it.
                local_tensor(parameter.detach()).copy_(saved.detach())
            else:
                parameter.data = saved.detach().to(parameter.device)
            parameter.requires_grad_(saved.requires_grad)
            parameter.grad = self._decoder.decode(orphan["gradient"])
            if "items" in orphan:
                state[parameter] = self._values(orphan)
                align_state(parameter, state[parameter])
        return groups, state

    def _values(self, entry: Mapping[str, Any]) -> Any:
        decode = self._decoder.decode
        if "items" not in entry:
            return decode(entry["value"])
        return {decode(key): decode(value) for key, value in entry["items"]}

    def _prepare(self, parameter: Tensor, name: str, key: Any, value: Any, *, steps_on_device: bool) -> None:
        """Check a state value of a parameter, shard it like the parameter, and move it to the right device."""
        if not isinstance(value, dict) or value.get("$") != "reference":
            return
        saved = self._tensors[value["name"]]
        rows = self._rows.get(value["name"])
        whole = tuple(saved.shape) if rows is None else (rows.total, *saved.shape[1:])
        if key in _PARAMETER_SHAPED_STATE and whole != tuple(parameter.shape):
            raise WhetError(
                f"the checkpoint's {key} does not fit {name!r}",
                got=f"{whole}; the parameter has {tuple(parameter.shape)}",
                try_="the model the run was started with",
            )
        if local_rows(parameter) is not None and whole == tuple(parameter.shape):
            # Shard the state like its parameter.
            sharded = torch.empty_like(parameter.detach(), dtype=saved.dtype)
            local_tensor(sharded).copy_(self._part_for(parameter, value["name"]))
            self._decoder.set_tensor(value["name"], sharded)
        elif key == "step" and saved.dim() == 0:
            # torch keeps step counts on the CPU unless the optimizer is fused or capturable.
            device = parameter.device if steps_on_device else torch.device("cpu")
            self._decoder.set_tensor(value["name"], saved.to(device, copy=True))

    @torch.no_grad()
    def _group_value(self, group: dict[str, Any], key: str, encoded: Any) -> Any:
        now = group.get(key)
        if isinstance(encoded, dict) and encoded.get("$") == "reference":
            # Read the tensor without decoding: a CPU value may have a dtype that this device does not support.
            saved = self._tensors[encoded["name"]]
            if isinstance(now, Tensor) and saved.shape == now.shape:
                # Copy into the existing tensor, because a captured graph may read it.
                now.copy_(saved)
                self._decoder.set_tensor(encoded["name"], now)
                return now
            if isinstance(now, float) and saved.dim() == 0:
                return float(saved)
        value = self._decoder.decode(encoded)
        if isinstance(now, Tensor) and not isinstance(value, Tensor):
            # The plan of this session keeps this value on the device.
            return now.fill_(value)
        return value


def _keeps_steps_on_device(groups: Iterable[Mapping[str, Any]]) -> bool:
    return any(group.get("fused") or group.get("capturable") for group in groups)


def _load_own(optimizer: Optimizer, state: Any) -> None:
    """Call the optimizer's own load_state_dict, and keep the parameter groups of a wrapper shared."""
    groups = [id(group) for group in optimizer.param_groups]
    shared = [name for name, one in inner_optimizers(optimizer) if [id(group) for group in one.param_groups] == groups]
    optimizer.load_state_dict(state)
    for name, inner in inner_optimizers(optimizer):
        # Some wrappers have a read-only property that returns the groups of the inner optimizer.
        if name in shared and optimizer.param_groups is not inner.param_groups:
            # A wrapper shares its groups with the inner optimizer, so that both use the same learning rate.
            optimizer.param_groups = inner.param_groups
