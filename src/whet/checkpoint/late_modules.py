"""Modules that are added, replaced or removed during training, and parameters that are tied or untied.

A checkpoint stores the class names of such modules. A restore creates them before weights are copied, without calling
constructors, and restores their attributes like those of all other modules. Only classes that the program itself has
imported are used.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from whet.base.errors import WhetError
from whet.checkpoint.attributes import has_encoding, module_machinery
from whet.checkpoint.state_format import class_name, find_class

Classes = dict[str, str]
"""Maps module names to class names."""


def describe_classes(model: nn.Module) -> Classes:
    """Return the class of every module, except for modules inside parametrizations, which are described separately."""
    return {
        name: class_name(_own_class(module))
        for name, module in model.named_modules(remove_duplicate=False)
        if "parametrizations" not in name.split(".")
    }


def _own_class(module: nn.Module) -> type[nn.Module]:
    # torch gives each parametrized module a new class, derived from the user's class.
    cls = type(module)
    return cls.__bases__[0] if parametrize.is_parametrized(module) else cls


def describe_changes(model: nn.Module, initial: Mapping[str, str] | None) -> tuple[dict[str, Any], list[str]]:
    """Return the modules that differ from the initial model, and the names of those that cannot be recreated."""
    now = describe_classes(model)
    initial = now if initial is None else initial
    changed = {name: cls for name, cls in now.items() if initial.get(name) != cls}
    modules = dict(model.named_modules(remove_duplicate=False))
    lost = [name for name, cls in changed.items() if not _can_be_made(modules[name], cls)]
    # A list preserves the order, in which outer modules precede inner ones. The file sorts the keys of a dict.
    facts = {"changed": [[name, cls] for name, cls in changed.items()], "removed": sorted(initial.keys() - now.keys())}
    return facts, lost


def _can_be_made(module: nn.Module, cls: str) -> bool:
    plain = [value for name, value in vars(module).items() if name not in module_machinery()]
    has_hooks = any(module._forward_hooks) or any(module._forward_pre_hooks) or any(module._backward_hooks)
    return find_class(cls, nn.Module) is _own_class(module) and not has_hooks and all(map(has_encoding, plain))


def match_modules(
    model: nn.Module, saved: Mapping[str, Any], initial: Mapping[str, str] | None, structure: Mapping[str, Any]
) -> list[str]:
    """Add, replace and remove modules to match a saved model with the given structure.

    Return the names of added modules. `initial` maps the modules of this model at the start of the session to their
    classes. A rollback uses it to recreate modules that were replaced since.
    """
    made = []
    current = describe_classes(model)
    wanted = {**(initial or {}), **dict(saved["changed"])}
    for name in [name for name in current if name in saved["removed"] or (initial and name not in wanted)]:
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._modules.pop(last, None)
    for name, cls in wanted.items():
        if name and name not in saved["removed"] and current.get(name) != cls:
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner).add_module(last, make_module(cls, name, structure, _device(model)))
            made.append(name)
    return made


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def make_module(cls: str, path: str, structure: Mapping[str, Any], device: torch.device) -> nn.Module:
    """Return a new module of a class without calling its constructor. Parameters and buffers are uninitialized."""
    module_class = find_class(cls, nn.Module)
    if module_class is None:
        raise WhetError(
            "a module that was added during the run cannot be restored",
            got=f"{path} is a {cls.partition(':')[2]}, which is no class of an imported module",
            try_="a class at the top of a file; or the model with this module, made before the session",
        )
    module: nn.Module = module_class.__new__(module_class)
    nn.Module.__init__(module)
    for name, kind in structure.items():
        owner, _, last = name.rpartition(".")
        if owner != path:
            continue
        if kind is None:
            module.register_buffer(last, None)
            continue
        tensor = torch.empty(kind[1], dtype=getattr(torch, kind[2]), device=device)
        if kind[0] == "parameter":
            module.register_parameter(last, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
        else:
            module.register_buffer(last, tensor)
    return module


def names_inside(names: Collection[str], modules: Collection[str]) -> set[str]:
    """Return the names of the tensors that belong directly to one of the modules."""
    return {name for name in names if name.rpartition(".")[0] in modules}


# --- tied parameters -------------------------------------------------------------------------------------------------


def describe_ties(model: nn.Module) -> list[list[str]]:
    """Return groups of parameter names that refer to the same parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def match_ties(model: nn.Module, wanted: Sequence[Sequence[str]]) -> None:
    """Tie and untie the parameters of a model to match a saved model. Weights are copied afterward."""
    first_of = {name: names[0] for names in wanted for name in names}
    for names in describe_ties(model):
        for name in names[1:]:
            if first_of.get(name, name) != first_of.get(names[0], names[0]):
                parameter = model.get_parameter(name)
                _set_parameter(model, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
    known = dict(model.named_parameters(remove_duplicate=False))
    for name, first in first_of.items():
        if name in known and first in known:
            _set_parameter(model, name, known[first])


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    model.get_submodule(owner)._parameters[last] = parameter
