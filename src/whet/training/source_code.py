"""Hashes of the user's source code, which let a resumed run name code that has changed."""

import functools
import hashlib
import inspect
import sys
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from torch import nn

from whet.step.graph_safety import loss_dependencies
from whet.step.loss import loss_code
from whet.verify.code_references import is_installed
from whet.verify.hidden_state import module_attributes

_OPTIONS = "options "
"""Prefix of a hash of options, which distinguishes it from a hash of source code."""
_SCALARS = (type(None), bool, int, float, str)

Hashes = dict[str, list[str]]
"""Hashes by the name of a function or class. Two lambdas may have the same name."""


class SourceCode:
    """The code of a run: the classes of the model, the loss functions and the functions of the schedule."""

    def __init__(self) -> None:
        self._hashes: dict[str, Hashes] = {}
        self._known: set[Hashable] = set()
        self._saved: dict[str, Hashes] = {}
        """The hashes in the checkpoint with which this session began, by role."""
        self._restored: dict[str, set[str]] = {}
        """Names in that checkpoint by role, until the first code in that role is observed."""

    def observe(self, role: str, parts: Iterable[Any]) -> list[str]:
        """Record functions and classes used in a role such as "model". Return what has changed since the run began.

        Code whose source is unavailable is left out.
        """
        named = [source for part in parts if (source := hash_source(part) or hash_criterion(part)) is not None]
        saved = self._saved.get(role, {})
        for name, digest in named:
            digests = self._hashes.setdefault(role, {}).setdefault(name, [])
            if digest not in digests:
                digests.append(digest)
        # A loop may use several losses, so only the first one after a resume is expected to be known.
        restored = self._restored.pop(role, None) if named else None
        if restored and named[0][0] not in restored:
            return [f"{role} {named[0][0]} is used instead of {', '.join(sorted(restored))}"]
        # Several lambdas or criteria may have the same name, and some may not have been used before the checkpoint.
        is_first = restored is not None
        options = {name for name, digest in named if digest.startswith(_OPTIONS)}
        changed = [
            name
            for name, digest in named
            if digest not in saved.get(name, [digest])
            and (is_first or not (name in options or name.endswith("<lambda>")))
        ]
        return [
            f"the options of {role} {name} have changed"
            if name in options
            else f"the source code of {role} {name} has changed"
            for name in dict.fromkeys(changed)
        ]

    def observe_loss(self, loss: Any) -> list[str]:
        """Record the code of a loss and of the functions it refers to. Known code objects are skipped."""
        # Compare code objects, which is cheap: a loop may redefine its loss in every step.
        code = getattr(getattr(loss, "__func__", loss), "__code__", None)
        key = loss_code(loss) if code is None else code
        if key in self._known:
            return []
        self._known.add(key)
        model = self._hashes.get("model", {})
        used = [
            part
            for part in loss_dependencies(loss)
            if (inspect.isfunction(part) and not _is_installed(part)) or isinstance(part, nn.Module)
        ]
        # A loss usually refers to the model, whose classes have a separate role.
        return self.observe("loss", [loss, *(part for part in used if type(part).__qualname__ not in model)])

    def state_dict(self) -> dict[str, Hashes]:
        """Return the hashes of the code, by role such as "model" or "loss"."""
        # Return a copy, because the checkpoint is written in the background.
        return {role: {n: list(digests) for n, digests in hashes.items()} for role, hashes in self._hashes.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Iterable[str]]]) -> None:
        """Load the hashes of a checkpoint, in addition to those of this process."""
        if not self._known:
            self._saved = {str(role): {str(n): [*d] for n, d in hashes.items()} for role, hashes in state.items()}
            self._restored = {role: {*hashes} for role, hashes in self._saved.items()}
        for role, hashes in state.items():
            for name, digests in hashes.items():
                known = self._hashes.setdefault(str(role), {}).setdefault(str(name), [])
                known += [digest for digest in digests if digest not in known]


def model_classes(model: nn.Module) -> list[type]:
    """Return the classes of a model and its submodules, each once."""
    return list(dict.fromkeys(type(module) for module in model.modules()))


def hash_source(part: Any) -> tuple[str, str] | None:
    """Return the name of a function or class and the hash of its source.

    Return None if the source is unavailable or belongs to an installed package. For an instance, its class is used; for
    a partial, its function.
    """
    while isinstance(part, functools.partial):
        part = part.func
    if not (inspect.isroutine(part) or inspect.isclass(part)):
        part = type(part)
    return None if _is_installed(part) else _hash(part)


def hash_criterion(part: Any) -> tuple[str, str] | None:
    """Return the name of a torch loss and the hash of its options; None for anything else.

    >>> hash_criterion(nn.MSELoss()) == hash_criterion(nn.MSELoss(reduction="sum"))
    False
    """
    options: dict[str, Any] = {}
    while isinstance(part, functools.partial):
        options = {**part.keywords, **options}
        part = part.func
    if isinstance(part, nn.modules.loss._Loss):
        options |= dict(module_attributes(part))
        part = type(part)
    if not inspect.isroutine(part) and not options:
        return None
    text = repr(sorted((name, value) for name, value in options.items() if isinstance(value, _SCALARS)))
    name = getattr(part, "__qualname__", type(part).__qualname__)
    return name, _OPTIONS + hashlib.sha256(text.encode()).hexdigest()


def _hash(part: Any) -> tuple[str, str] | None:
    try:
        text = inspect.getsource(part)
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return part.__qualname__, hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _is_installed(part: Any) -> bool:
    # The versions of packages are recorded with the run, and reading the source of a large library takes long.
    module = getattr(part, "__module__", None) or ""
    return module.split(".")[0] in ("whet", "torch") or is_installed(sys.modules.get(module))
