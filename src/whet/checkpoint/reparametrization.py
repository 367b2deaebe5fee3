"""Parametrizations, weight_norm and spectral_norm that are added to or removed from a model during training.

A checkpoint describes them, and a restore applies them before weights are copied. The modules of a
parametrization are recreated from their classes if the program has imported these, and their attributes are restored
like those of all other modules.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from whet.checkpoint.late_modules import make_module
from whet.checkpoint.state_format import class_name, find_class

Described = dict[str, dict[str, Any]]
"""Maps module and tensor names to a reparametrization and its arguments."""


def describe_reparametrizations(model: nn.Module) -> Described:
    """Return the parametrizations, weight_norm hooks and spectral_norm hooks of a model."""
    modules: Described = {}
    for prefix, module in model.named_modules():
        described = dict(_hooks(module))
        if parametrize.is_parametrized(module):
            described |= {name: _describe_list(part) for name, part in module.parametrizations.items()}
        if described:
            modules[prefix] = described
    return modules


def _hooks(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            yield hook.name, {"kind": "weight_norm", "dim": hook.dim}
        elif isinstance(hook, SpectralNorm):
            options = {"n_power_iterations": hook.n_power_iterations, "eps": hook.eps, "dim": hook.dim}
            yield hook.name, {"kind": "spectral_norm", **options}


def _describe_list(parametrizations: Any) -> dict[str, Any]:
    classes = {name: class_name(type(part)) for name, part in parametrizations.named_modules() if name}
    num_tensors = 0 if parametrizations.is_tensor else int(parametrizations.ntensors)
    return {"kind": "parametrization", "classes": classes, "tensors": num_tensors, "unsafe": parametrizations.unsafe}


def reparametrized_names(described: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (name, prefix) of each reparametrized tensor that can be restored: its full name, and that of its parts."""
    for owner, names in described.items():
        start = f"{owner}." if owner else ""
        for name, how in names.items():
            if how["kind"] != "parametrization":
                yield f"{start}{name}", f"{start}{name}_"
            elif all(find_class(cls, nn.Module) for cls in how["classes"].values()):
                yield f"{start}{name}", f"{start}parametrizations.{name}."


def match_reparametrizations(
    model: nn.Module, wanted: Mapping[str, Mapping[str, Any]], structure: Mapping[str, Any]
) -> list[str]:
    """Add and remove reparametrizations so that a model matches the saved one.

    `wanted` and `structure` describe the saved model. Weights get arbitrary values and must be copied afterward.
    Return the names of the modules that were added, which have no attributes yet.
    """
    current = describe_reparametrizations(model)
    modules = dict(model.named_modules())
    made: list[str] = []
    for owner, present in current.items():
        for name, how in present.items():
            if wanted.get(owner, {}).get(name) != how:
                _remove(modules[owner], name, how["kind"])
    for owner, names in wanted.items():
        for name, how in names.items():
            if owner in modules and current.get(owner, {}).get(name) != how:
                path = f"{owner}.parametrizations.{name}" if owner else f"parametrizations.{name}"
                _add(modules[owner], name, how, path, structure)
                made += [f"{path}.{part}" for part in how.get("classes", ())]
    return made


def _remove(module: nn.Module, name: str, kind: str) -> None:
    if kind == "weight_norm":
        nn.utils.remove_weight_norm(module, name)
    elif kind == "spectral_norm":
        nn.utils.remove_spectral_norm(module, name)
    else:
        parametrize.remove_parametrizations(module, name, leave_parametrized=True)


def _add(module: nn.Module, name: str, how: Mapping[str, Any], path: str, structure: Mapping[str, Any]) -> None:
    options = {key: value for key, value in how.items() if key != "kind"}
    if how["kind"] == "parametrization":
        _add_parametrization(module, name, how, path, structure)
    elif how["kind"] == "spectral_norm":
        nn.utils.spectral_norm(module, name, **options)
    else:
        with warnings.catch_warnings():
            # weight_norm is deprecated, but the saved model uses it.
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.weight_norm(module, name, **options)


class _Placeholder(nn.Module):
    """Placeholder for the first module of a parametrization.

    It is registered in place of the user's module, so that no user code runs.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def right_inverse(self, value: Tensor) -> Any:
        return self._tensors or value

    def forward(self, first: Tensor, *_others: Tensor) -> Tensor:
        return first


def _add_parametrization(
    module: nn.Module, name: str, how: Mapping[str, Any], path: str, structure: Mapping[str, Any]
) -> None:
    original = getattr(module, name)
    kinds = [structure.get(f"{path}.original{number}") for number in range(how["tensors"])]
    tensors = [original.new_empty(kind[1], dtype=getattr(torch, kind[2])) for kind in kinds if kind is not None]
    parametrize.register_parametrization(module, name, _Placeholder([t.detach() for t in tensors]), unsafe=True)
    parametrizations: Any = module.parametrizations[name]  # type: ignore[index]
    del parametrizations[0]
    parametrizations.unsafe = how["unsafe"]
    # Create outer modules before inner ones.
    for part, cls in sorted(how["classes"].items(), key=lambda item: item[0].count(".")):
        owner, _, last = part.rpartition(".")
        place = parametrizations.get_submodule(owner) if owner else parametrizations
        place.add_module(last, make_module(cls, f"{path}.{part}", structure, original.device))
