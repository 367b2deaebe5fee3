"""Hooks of the user on modules, parameters and optimizers, and whether they change during a run."""

import functools
import inspect
import sys
import types
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from whet.training.registered import REGISTERED_PREFIX
from whet.verify.code_references import is_library_class, is_users_function, part_name

if TYPE_CHECKING:
    from whet.training.run_context import RunContext

_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _MODULE_HOOKS)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_OPTIMIZER_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


class HookWatch:
    """Compares the hooks of the user with those that were there in the first step."""

    def __init__(self, run: "RunContext") -> None:
        self._run = run
        self._hooks: dict[int, tuple[weakref.ref[Any], Counter[str]]] = {}
        """The owners of hooks in the first step, by id, with the names of the user's hooks."""

    def accept(self) -> None:
        """Record the hooks, before the first step and after it: a first forward pass adds its own in each process."""
        self._hooks = {
            id(owner): (weakref.ref(owner), _users_hooks(hooks)) for _, owner, hooks in _hook_owners(self._run)
        }

    def changes(self) -> Iterator[str]:
        """Yield a description of each hook of the user that was added or removed since the first step."""
        for name, owner, hooks in _hook_owners(self._run):
            ref, before = self._hooks.get(id(owner), (None, None))
            now = _users_hooks(hooks)
            if ref is None or ref() is not owner or before is None:
                # The owner itself was added, and a parameter is restored without its hooks.
                before = Counter()
            if now == before:
                continue
            yield from (f"`{hook}`, a hook of {name}, was added" for hook in now - before)
            yield from (f"`{hook}`, a hook of {name}, was removed" for hook in before - now)


def _hook_owners(run: "RunContext") -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield the name of each object that may have hooks, the object, and its hooks."""
    owners: list[tuple[str, Any, tuple[str, ...]]] = []
    owners += [(name or "the model", module, _MODULE_HOOKS) for name, module in run.model.named_modules()]
    owners += [("all modules", nn.modules.module, _GLOBAL_HOOKS)]
    owners += [(name, parameter, _TENSOR_HOOKS) for name, parameter in run.model.named_parameters()]
    owners += [(type(s.optimizer).__name__, s.optimizer, _OPTIMIZER_HOOKS) for s in run.steppers.values()]
    owners += [("all optimizers", sys.modules[Optimizer.__module__], _GLOBAL_OPTIMIZER_HOOKS)]
    for name, obj in run.registered.objects.items():
        label = f"{REGISTERED_PREFIX}{name}"
        if isinstance(obj, nn.Module):
            owners += [(f"{label}.{n}".rstrip("."), module, _MODULE_HOOKS) for n, module in obj.named_modules()]
            owners += [(f"{label}.{n}", parameter, _TENSOR_HOOKS) for n, parameter in obj.named_parameters()]
        elif isinstance(obj, Optimizer):
            owners.append((label, obj, _OPTIMIZER_HOOKS))
        elif isinstance(obj, Tensor):
            owners.append((label, obj, _TENSOR_HOOKS))
    seen: set[int] = set()
    for name, owner, kinds in owners:
        if id(owner) in seen:
            # A registered object may be part of the model.
            continue
        seen.add(id(owner))
        yield name, owner, [hook for kind in kinds for hook in (getattr(owner, kind, None) or {}).values()]


def _users_hooks(hooks: list[Any]) -> Counter[str]:
    """Return the names of the hooks that are the user's. Libraries add their own again in the next process."""
    return Counter(part_name(hook) for hook in hooks if _is_users(hook)) if hooks else Counter()


def _is_users(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = inspect.unwrap(getattr(hook, "__func__", hook))
    return is_users_function(function) if isinstance(function, types.FunctionType) else not is_library_class(type(hook))


def hook_parts(run: "RunContext") -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Yield each owner of hooks, such as "a hook of the model", with its hooks by name."""
    seen: set[tuple[int, int]] = set()
    for name, _, hooks in _hook_owners(run):
        # The same method is often registered as a hook of every module; read what it refers to only once.
        keys = [(id(getattr(hook, "__self__", None)), id(getattr(hook, "__func__", hook))) for hook in hooks]
        new = [hook for hook, key in zip(hooks, keys, strict=True) if key not in seen]
        seen.update(keys)
        if new:
            yield f"a hook of {name}", [(part_name(hook), hook) for hook in new]
