"""User objects that are saved and restored with a run: `session.register(name, obj)`."""

import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whet.base.errors import UsageError, WhetError
from whet.checkpoint.attributes import load_attributes, saved_attributes
from whet.checkpoint.late_modules import Classes, describe_classes
from whet.checkpoint.model_state import Structure, describe_structure, encode_structure, match_structure
from whet.checkpoint.snapshot import Stateful
from whet.checkpoint.state_encoder import NotEncodableError
from whet.checkpoint.state_format import missing_children, seed_of_spawner, spawn

Restore = Callable[[str, Stateful], bool]
"""Restores an object from a checkpoint by name, and returns whether the checkpoint contains it."""

REGISTERED_PREFIX = "the registered "
"""Precedes the name of a registered object in messages about its state."""


class RegisteredObjects:
    """The registered objects by name, and a way to restore objects that are registered after the run was restored."""

    def __init__(self, objects: Mapping[str, Any] | None = None) -> None:
        self.objects: dict[str, Any] = {}
        self._begun: dict[str, tuple[Structure, Classes]] = {}
        """The structure and the classes of the registered modules when they were registered."""
        self._restore: Restore | None = None
        self._saved: set[str] = set()
        """Names in the checkpoint from which the run was restored."""
        for name, obj in (objects or {}).items():
            self.add(name, obj)

    @property
    def owners(self) -> dict[str, Stateful]:
        """The objects by name, each in a form that has state_dict and load_state_dict."""
        return {
            name: ModuleState(obj, self._begun[name]) if isinstance(obj, nn.Module) else _owner(obj)
            for name, obj in self.objects.items()
        }

    def add(self, name: str, obj: Any) -> None:
        """Register an object. If the run was restored from a checkpoint that has its state, load that state."""
        if not isinstance(name, str) or not name:
            raise UsageError(
                "a registered object needs a name", got=repr(name)[:80], try_='session.register("teacher", teacher)'
            )
        if name in self.objects:
            hint = f'session.register("{name}_2", object)'
            raise UsageError("two objects are registered by one name", got=repr(name), try_=hint)
        check_has_state(name, obj)
        self.objects[name] = obj
        if isinstance(obj, nn.Module):
            self._begun[name] = describe_structure(obj), describe_classes(obj)
        self._load(name)

    def restore(self, names: Mapping[str, Any], restore: Restore) -> None:
        """Load the states from a checkpoint. For objects that are not registered yet, `add` does so later."""
        self._restore, self._saved = restore, {*names}
        for name in self.objects:
            self._load(name)
        if self._saved <= self.objects.keys():
            # Nothing is left to restore, so the memory of the checkpoint can be freed.
            self._restore = None

    def begin(self, *, is_new: bool) -> list[str]:
        """Return the reasons why a resumed run is not exact: registered names that are missing or new.

        Call this before the first step. Objects that are added later are not restored.
        """
        missing, added = sorted(self._saved - self.objects.keys()), sorted(self.objects.keys() - self._saved)
        self._restore, self._saved = None, set()
        reasons = [f"{name!r} was registered and no longer is" for name in missing]
        return reasons + [f"{n!r} was not registered when the checkpoint was written" for n in added if not is_new]

    def _load(self, name: str) -> None:
        if self._restore is None:
            return
        try:
            self._restore(name, self.owners[name])
        except Exception as error:
            raise WhetError(
                f"the registered object {name!r} does not accept its saved state",
                got=f"{type(error).__name__}: {error}"[:300],
                try_="the object that the run was started with; its load_state_dict must accept its own state_dict",
            ) from error


def check_has_state(name: str, obj: Any) -> None:
    """Raise UsageError if the state of an object cannot be read and set."""
    if isinstance(obj, type) or not (_has_methods(obj) or isinstance(obj, _PLAIN)):
        raise UsageError(
            f"{name!r} has no state that could be saved",
            got=f"{type(obj).__name__} without state_dict and load_state_dict",
            try_="an object with both methods, or a list, dict, set, deque, tensor, array or random generator",
        )


def _has_methods(obj: Any) -> bool:
    return all(callable(getattr(obj, method, None)) for method in ("state_dict", "load_state_dict"))


_PLAIN = (
    list, dict, set, deque, Tensor, np.ndarray, torch.Generator, random.Random, np.random.Generator,
    np.random.RandomState,
)  # fmt: skip
"""Types of objects that have no state_dict and are changed in place."""


def _owner(obj: Any) -> Stateful:
    owner: Stateful = obj if _has_methods(obj) else PlainState(obj)
    return owner


class ModuleState:
    """The complete state of a module.

    It includes changes of its structure such as pruning, attributes, non-persistent buffers, and train and eval modes.
    """

    def __init__(self, module: nn.Module, begun: tuple[Structure, Classes]) -> None:
        """`begun` are the structure and the classes of the module when it was registered."""
        self._module, self._begun = module, begun

    def state_dict(self) -> dict[str, Any]:
        """Return the module's own state_dict and the state that it leaves out."""
        structure, lost = encode_structure(self._module, *self._begun)
        if lost:
            raise NotEncodableError(f"registered/{lost[0]}", self._module.get_submodule(lost[0]))
        own = self._module.state_dict()
        buffers = {name: tensor for name, tensor in self._module.named_buffers() if name not in own}
        modes = {name: module.training for name, module in self._module.named_modules()}
        attributes = saved_attributes(self._module)
        return {"own": own, "buffers": buffers, "modes": modes, "attributes": attributes, "structure": structure}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned."""
        if "structure" in state:
            match_structure(state["structure"], self._module, None)
        self._module.load_state_dict(state["own"])
        named = dict(self._module.named_modules())
        for name, buffer in state["buffers"].items():
            owner, _, key = name.rpartition(".")
            setattr(named[owner], key, buffer.clone())
        for name, mode in state["modes"].items():
            named[name].training = mode
        load_attributes(self._module, state["attributes"])


class PlainState:
    """An adapter with state_dict and load_state_dict for an object that is changed in place."""

    def __init__(self, obj: Any) -> None:
        self._obj = obj

    def state_dict(self) -> Any:
        """Return the object itself, or the state if it is a random generator."""
        obj = self._obj
        if isinstance(obj, np.random.Generator):
            return {**obj.bit_generator.state, "seed": seed_of_spawner(obj)}
        if isinstance(obj, torch.Generator | np.random.RandomState):
            return obj.get_state()
        return obj.getstate() if isinstance(obj, random.Random) else obj

    def load_state_dict(self, state: Any) -> None:
        """Replace the content of the object in place by the saved state."""
        obj = self._obj
        if isinstance(obj, np.random.Generator):
            # With a different seed, the resume is reported as not bit-exact, because the states are compared afterward.
            spawn(obj, missing_children(obj, state["seed"]) or 0)
            obj.bit_generator.state = state
        elif isinstance(obj, torch.Generator | np.random.RandomState):
            obj.set_state(state)
        elif isinstance(obj, random.Random):
            obj.setstate(state)
        elif isinstance(obj, Tensor):
            if (obj.shape, obj.dtype) != (state.shape, state.dtype):
                raise ValueError(f"{tuple(state.shape)} {state.dtype} for {tuple(obj.shape)} {obj.dtype}")
            with torch.no_grad():
                obj.copy_(state)
        elif isinstance(obj, np.ndarray):
            obj[...] = state
        elif isinstance(obj, list):
            obj[:] = state
        else:
            items = list(state.items()) if isinstance(obj, dict) else list(state)
            obj.clear()
            obj.extend(items) if isinstance(obj, deque) else obj.update(items)
