"""The state of a model other than its weights: structure, flags, extra state, and plain attributes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import Optimizer

from whet.base.errors import WhetError
from whet.checkpoint import attributes
from whet.checkpoint.attributes import MAX_SHARE, MIN_TENSOR_BYTES, Encoded
from whet.checkpoint.late_modules import (
    Classes,
    describe_changes,
    describe_classes,
    describe_ties,
    match_modules,
    match_ties,
    names_inside,
)
from whet.checkpoint.reparametrization import (
    Described,
    describe_reparametrizations,
    match_reparametrizations,
    reparametrized_names,
)
from whet.checkpoint.state_decoder import StateDecoder
from whet.checkpoint.state_encoder import StateEncoder
from whet.checkpoint.state_format import ID, TAG
from whet.step.ema import named_tensors

Structure = dict[str, Any]
"""Maps the name of each parameter and buffer to [kind, shape, dtype], or to None for a buffer that is None."""


@dataclass(kw_only=True, slots=True)
class InitialState:
    """The model and the optimizers at the start of the session, before a checkpoint is restored."""

    structure: Structure
    classes: Classes
    """The class of each module."""
    ties: list[list[str]]
    """Groups of parameter names that refer to the same parameter."""
    reparametrized: Described
    """The parametrizations, weight_norm and spectral_norm hooks."""
    attributes: Encoded
    """The plain attributes of modules and optimizers, with hashes in place of tensors."""
    frozen: frozenset[str]
    """Names of the parameters with requires_grad=False."""
    in_eval: frozenset[str]
    """Names of the modules in eval mode."""
    last_in_eval: frozenset[str] = field(default_factory=frozenset)
    """Names of the modules in eval mode at the last save during training."""

    @classmethod
    def of(cls, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> "InitialState":
        """Record the current structure, flags and attributes of a model and its optimizers."""
        in_eval = _modules_in_eval(model)
        return cls(
            structure=describe_structure(model),
            classes=describe_classes(model),
            ties=describe_ties(model),
            reparametrized=describe_reparametrizations(model),
            attributes=attributes.fingerprint_attributes(model, optimizers, max_bytes=_max_bytes(model)),
            frozen=_frozen_parameters(model),
            in_eval=in_eval,
            last_in_eval=in_eval,
        )


def _max_bytes(model: nn.Module) -> int:
    """Return the maximum size in bytes of tensors in attributes that are saved."""
    return max(MIN_TENSOR_BYTES, int(MAX_SHARE * sum(t.nbytes for _, t in named_tensors(model) if is_plain(t))))


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is dense. Sparse tensors are stored in another form."""
    return tensor.layout is torch.strided


def _frozen_parameters(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)


def _modules_in_eval(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, module in model.named_modules() if not module.training)


# --- structure -------------------------------------------------------------------------------------------------------


def describe_structure(model: nn.Module) -> Structure:
    """Return the names, shapes and dtypes of all parameters and buffers, including buffers that are None."""
    structure: Structure = {name: _describe("parameter", tensor) for name, tensor in model.named_parameters()}
    structure |= {name: _describe("buffer", tensor) for name, tensor in model.named_buffers()}
    for prefix, module in model.named_modules():
        nones = (name for name, buffer in module._buffers.items() if buffer is None)
        structure |= {f"{prefix}.{name}" if prefix else name: None for name in nones}
    return structure


def _describe(kind: str, tensor: Tensor) -> list[Any]:
    return [kind, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def late_changes(initial: Structure, now: Structure, *described: Described) -> list[str]:
    """Return the parameters that were added, removed or renamed since the session began.

    Parameters replaced by pruning or by a reparametrization in `described` are excluded, because a resume replaces
    them again.
    """
    started = {name for name, kind in initial.items() if kind is not None and kind[0] == "parameter"}
    current = {_unpruned(name, now) for name, kind in now.items() if kind is not None and kind[0] == "parameter"}
    known = [names for one in described for names in reparametrized_names(one)]
    late = started ^ current
    return sorted(n for n in late if not any(n == name or n.startswith(prefix) for name, prefix in known))


def _unpruned(name: str, structure: Structure) -> str:
    original = name.removesuffix("_orig")
    return original if original != name and f"{original}_mask" in structure else name


def match_structure(
    saved: Mapping[str, Any], model: nn.Module, initial: InitialState | None, *, ignored: tuple[str, ...] = ()
) -> list[str]:
    """Add the modules, buffers, parametrizations and pruning of a saved model to a model with a matching structure.

    The structure matches if each entry of its initial structure equals the saved model's initial or final entry. Names
    with a prefix in `ignored` are not compared. A model that does not match is left unchanged, and copying the weights
    reports the mismatch. Return the names of the added modules, which have no attributes yet.
    """
    first, last, current = saved["initial"], saved["now"], describe_structure(model)
    classes = None if initial is None else initial.classes
    if current == last:
        return match_modules(model, saved["modules"], classes, last)
    reference = current if initial is None else initial.structure
    for name in {**first, **last, **reference}:
        is_fixed = initial is not None or first.get(name, "") == last.get(name, "")
        fits = reference.get(name, "") in (first.get(name, ""), last.get(name, ""))
        if is_fixed and not fits and not name.startswith(ignored):
            return []
    made = match_modules(model, saved["modules"], classes, last)
    made += match_reparametrizations(model, saved["reparametrized"], last)
    match_ties(model, saved["ties"])
    _fit_pruning(model, last)
    current = describe_structure(model)
    for name in {**current, **last}:
        wanted, now = last.get(name, ""), current.get(name, "")
        if wanted == now or name.startswith(ignored):
            continue
        if "parameter" in (*(wanted or ()), *(now or ())):
            _fit_parameter(model, name, wanted, now)
        else:
            _fit_buffer(model, name, wanted, is_persistent=name not in saved["non_persistent"])
    return made


def _fit_pruning(model: nn.Module, last: Structure) -> None:
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for name in list(module._parameters):
            original = name.removesuffix("_orig")
            is_pruned = original != name and f"{original}_mask" in module._buffers
            if is_pruned and f"{start}{original}" in last:
                prune.remove(module, original)
            elif not is_pruned and {f"{start}{name}_orig", f"{start}{name}_mask"} <= last.keys():
                # Keep the same parameter object, because the optimizer refers to it.
                prune.custom_from_mask(module, name, torch.ones_like(module._parameters[name]))


@torch.no_grad()
def _fit_parameter(model: nn.Module, name: str, wanted: Any, now: Any) -> None:
    if wanted and now and wanted[0] == now[0]:
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.new_empty(wanted[1], dtype=getattr(torch, wanted[2]))


def _fit_buffer(model: nn.Module, name: str, wanted: Any, *, is_persistent: bool) -> None:
    prefix, _, attribute = name.rpartition(".")
    try:
        module = model.get_submodule(prefix)
    except AttributeError:
        return
    before = module._buffers.get(attribute)
    if wanted == "":
        del module._buffers[attribute]
        module._non_persistent_buffers_set.discard(attribute)
        return
    place = next((t.device for t in (before, *model.parameters(), *model.buffers()) if t is not None), None)
    made = None if wanted is None else torch.empty(wanted[1], dtype=getattr(torch, wanted[2]), device=place)
    if attribute not in module._buffers:
        # The attribute may already exist, for example as None until the first forward pass.
        vars(module).pop(attribute, None)
        module.register_buffer(attribute, made, persistent=is_persistent)
    else:
        module._buffers[attribute] = made


def expanded_copy(target: Tensor, values: Tensor) -> Tensor:
    """Return a copy of the values on the device of `target`, expanded like `target` if the values allow it."""
    kept = values
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            kept = kept.narrow(dim, 0, 1)
    if torch.equal(kept.expand(values.shape), values):
        return kept.to(target.device, copy=True).expand(values.shape)
    return values.to(target.device, copy=True)


def replace_buffer(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a buffer of a module with another tensor, under the same name."""
    prefix, _, attribute = name.rpartition(".")
    model.get_submodule(prefix)._buffers[attribute] = tensor


# --- saving and restoring --------------------------------------------------------------------------------------------


def encode_structure(
    model: nn.Module, initial: Structure | None, classes: Classes | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the structure of a model for `match_structure`, and the names of modules that cannot be made again.

    `initial` and `classes` describe the model at the start of the session.
    """
    now = describe_structure(model)
    modules, lost = describe_changes(model, classes)
    structure = {
        "now": now,
        "initial": now if initial is None else initial,
        "non_persistent": _non_persistent(model),
        "modules": modules,
        "ties": describe_ties(model),
        "reparametrized": describe_reparametrizations(model),
    }
    return structure, lost


def encode_model(
    encoder: StateEncoder,
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    initial: InitialState | None,
    *,
    has_modes: bool,
    omitted: Collection[tuple[str, str]] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Return the state of a model other than its weights, and a message for each part that is not saved.

    Without an initial state, only what inference needs is returned. Pass `has_modes=True` if the modules are in the
    modes used for training; after an evaluation, they may still be in eval mode. `omitted` are attributes that are not
    saved, as (owner, name).
    """
    structure, lost = encode_structure(
        model, None if initial is None else initial.structure, None if initial is None else initial.classes
    )
    now, modules = structure["now"], structure["modules"]
    ties, reparametrized = structure["ties"], structure["reparametrized"]
    facts: dict[str, Any] = {
        "structure": structure,
        "sparse": {
            name: encoder.encode(tensor, f"attribute/{name}")
            for name, tensor in named_tensors(model)
            if not is_plain(tensor)
        },
        "extra": {
            name: encoder.encode(module.get_extra_state(), join_extra(name))
            for name, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        },
    }
    if initial is None:
        return facts, []
    if has_modes:
        initial.last_in_eval = _modules_in_eval(model)
    facts["flags"] = {
        "frozen": {"now": sorted(_frozen_parameters(model)), "initial": sorted(initial.frozen)},
        "in_eval": {"now": sorted(initial.last_in_eval), "initial": sorted(initial.in_eval)},
    }
    facts["attributes"], gaps = attributes.encode_attributes(
        encoder, model, optimizers, initial.attributes, max_bytes=_max_bytes(model)
    )
    _leave_out(facts["attributes"]["now"], omitted)
    late = late_changes(initial.structure, now, initial.reparametrized, reparametrized)
    # A resume recreates these modules, so do not report their parameters.
    made = {name for name, _ in modules["changed"]} | {*modules["removed"]} - {*lost}
    tied = {
        name for group in (*ties, *initial.ties) if group not in ties or group not in initial.ties for name in group
    }
    if late := [*lost, *sorted({*late} - names_inside(late, made) - tied)]:
        gaps.append(
            f"modules or parameters were added or renamed during the run ({', '.join(late[:4])}): a resume needs a "
            "model with the same change, made before the session"
        )
    return facts, gaps


def _leave_out(now: dict[str, dict[str, Any]], omitted: Collection[tuple[str, str]]) -> None:
    """Remove the values of attributes from their encoding, and those of attributes that refer into them."""
    rest = [(owner, name) for owner, name in omitted if name in now.get(owner, {})]
    defined: set[str] = set()
    while rest:
        for owner, name in rest:
            defined |= _texts(now[owner][name], (ID, "name", "path", "value"))
            now[owner][name] = {TAG: "opaque"}
        rest = [
            (owner, name)
            for owner, attributes_of in now.items()
            for name, encoded in attributes_of.items()
            if _texts(encoded, ("of",)) & defined
        ]


def _texts(encoded: Any, keys: tuple[str, ...]) -> set[str]:
    """Return the strings under some keys of an encoded value, at any depth."""
    found, rest = set(), [encoded]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            found |= {value[key] for key in keys if isinstance(value.get(key), str)}
            rest += value.values()
        elif isinstance(value, list):
            rest += value
    return found


def join_extra(name: str) -> str:
    """Return the path under which the extra state of a module is saved."""
    return f"attribute/{name}.get_extra_state" if name else "attribute/get_extra_state"


def _non_persistent(model: nn.Module) -> list[str]:
    modules = model.named_modules()
    return [f"{p}.{n}" if p else n for p, m in modules for n in sorted(m._non_persistent_buffers_set)]


def restore_extra(saved: Mapping[str, Any], model: nn.Module, decoder: StateDecoder, *, made: Collection[str]) -> None:
    """Restore sparse tensors, the extra state of modules, and the attributes of modules added by `match_structure`."""
    if made and "attributes" in saved:
        values = attributes.decode_attributes(saved["attributes"], decoder)
        for name in made:
            vars(model.get_submodule(name)).update(values.get(name, {}))
    for name, encoded in saved["sparse"].items():
        tensor = decoder.decode(encoded)
        if name in dict(model.named_parameters()):
            model.get_parameter(name).data = tensor.detach()
        else:
            replace_buffer(model, name, tensor)
    modules = dict(model.named_modules())
    for name, encoded in saved["extra"].items():
        if name not in modules:
            raise WhetError(
                "the checkpoint does not fit this model",
                got=f"it has extra state of {name or 'the model'}, which is no module of this model",
                try_="the model the run was started with",
            )
        modules[name].set_extra_state(decoder.decode(encoded))


def restore_flags_and_attributes(
    saved: Mapping[str, Any],
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    initial: InitialState,
    decoder: StateDecoder,
) -> list[str]:
    """Restore the flags and attributes that training changed. Return a description of each change by the user."""
    changes = []
    flags = saved["flags"]
    frozen, in_eval = _Flag(flags["frozen"], initial.frozen), _Flag(flags["in_eval"], initial.in_eval)
    for name, parameter in model.named_parameters():
        if frozen.is_changed(name, not parameter.requires_grad):
            changes.append(f"requires_grad of {name} is {name not in initial.frozen}")
        elif frozen.was_set(name) == parameter.requires_grad:
            parameter.requires_grad_(not frozen.was_set(name))
    for name, module in model.named_modules():
        if in_eval.is_changed(name, not module.training):
            mode = "eval" if name in initial.in_eval else "train"
            changes.append(f"{name or 'the model'} is in {mode} mode")
        else:
            module.training = not in_eval.was_set(name)
    initial.last_in_eval = _modules_in_eval(model)
    return changes + attributes.restore_attributes(
        saved["attributes"], model, optimizers, initial.attributes, decoder, max_bytes=_max_bytes(model)
    )


class _Flag:
    """A boolean flag of parameters or modules, stored as the names for which it is set."""

    def __init__(self, saved: Mapping[str, Any], initial: Collection[str]) -> None:
        self._now, self._then, self._initial = frozenset(saved["now"]), frozenset(saved["initial"]), initial

    def was_set(self, name: str) -> bool:
        """Return whether the flag was set for this name when the checkpoint was saved."""
        return name in self._now

    def is_changed(self, name: str, is_set: bool) -> bool:
        """Return whether the user has changed the flag since the run was started."""
        return self.was_set(name) != is_set and (name in self._then) != (name in self._initial)
