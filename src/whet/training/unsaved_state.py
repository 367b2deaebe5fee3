"""Detect state that checkpoints do not hold: optimizers outside the session, and variables of the user that change.

Each gap is reported in a warning, recorded in all later checkpoints and reported again when the run resumes.
"""

import functools
import operator
import types
import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from whet.base.units import format_list
from whet.data.samplers import copy_sampler
from whet.data.stream_reader import set_epoch
from whet.step.loss import loss_code
from whet.step.optimizer_kernels import watch_updates
from whet.training.registered import REGISTERED_PREFIX
from whet.training.user_hooks import HookWatch
from whet.training.user_objects import (
    DATASET,
    PROCESS,
    SAMPLER,
    objects_with_state,
    sampler_of,
    saved_objects,
    user_objects,
)
from whet.verify.code_references import frame_variables, part_name
from whet.verify.hidden_state import StateWalk, changed_names, new_cached, reachable
from whet.verify.process_settings import is_planned, process_settings
from whet.verify.saved_attributes import SavedAttributes

if TYPE_CHECKING:
    from whet.training.run_context import RunContext

_MAX_NAMES = 3
_DATA_OWNERS = (DATASET, SAMPLER)
"""Compared only by their samples: data is large, and samples that change are noticed when they are read again."""


class UnsavedStateDetector:
    """Compares the state that the user's code can reach with fingerprints from before the first step.

    The comparison runs after the first step and at every save; other steps take no extra time.
    """

    def __init__(self, run: "RunContext") -> None:
        self._run = run
        self._losses: dict[Hashable, Any] = {}
        """The latest loss function for each code object; a loop may redefine its loss in every step."""
        self._recreated: set[Hashable] = set()
        """Code objects whose function is redefined during the run. Their closure variables belong to the loop."""
        self._before: dict[str, dict[str, bytes]] = {}
        """Hashes of the values before the first step, by owner and name."""
        self._hooks = HookWatch(run)
        self._partial: dict[str, list[str]] = {}
        """Names of objects that cannot be compared completely, by owner."""
        self._reported: set[tuple[str, str]] = set()
        self._saved: dict[int, SavedAttributes] = {}
        """The saved attributes of each object with a user-defined `state_dict`, by the id of the object."""
        self._optimizers = _OptimizerWatch({stepper.optimizer for stepper in run.steppers.values()})
        run.exit_stack.callback(self._optimizers.close)

    def begin(self) -> None:
        """Take fingerprints before the first batch is read."""
        self._before = self._fingerprints(dict(user_objects(self._run)))
        self.accept_hooks()

    def accept_hooks(self) -> None:
        """Record the hooks, before the first step and after it: a first forward pass adds its own in each process."""
        self._hooks.accept()

    def follow_plan(self) -> None:
        """Take new fingerprints of the settings of the process that were changed for another plan."""
        if PROCESS in self._before:
            now = self._fingerprints({PROCESS: list(process_settings())})[PROCESS]
            self._before[PROCESS] |= {name: digest for name, digest in now.items() if is_planned(name)}

    def add_loss(self, loss: Any) -> None:
        """Take fingerprints of the objects that a loss refers to, before its first call.

        Known code objects are skipped.
        """
        code = getattr(getattr(loss, "__func__", loss), "__code__", None)
        # A partial or an object with __call__ may also be recreated in each step.
        key = loss_code(loss) if code is None else code
        if key in self._losses:
            if self._losses[key] is not loss:
                self._losses[key] = loss
                self._recreated.add(key)
            return
        self._losses[key] = loss
        self._before |= self._fingerprints({self._loss_label(key): [(part_name(loss), loss)]})

    def check(self) -> None:
        """Compare fingerprints, and report each change that checkpoints do not save once."""
        if not self._before:
            # Nothing has been trained yet.
            return
        for gap in self._optimizers.unknown(self._run):
            self._run.record_unsaved_state(gap)
        for change in self._hooks.changes():
            self._run.record_unsaved_state(change, is_variable=True)
        roots = self._all_roots()
        expected = {self._loss_label(key): {*_rebound_names(self._losses[key])} for key in self._recreated}
        for owner, now in self._fingerprints(roots).items():
            before = self._before.setdefault(owner, now)
            names = changed_names(before, now)
            before |= new_cached(before, now)
            if names and owner == SAMPLER:
                expected[owner] = _names_set_by_epoch(self._run.config.data)
            names = [n for n in names if (owner, n) not in self._reported and n not in expected.get(owner, ())]
            names = self._unsaved(owner, names, roots[owner], now) if names else names
            self._reported |= {(owner, name) for name in names}
            if names:
                listed = format_list([f"`{name}`" for name in names])
                self._run.record_unsaved_state(f"{listed} of {owner} changed", is_variable=True)
        for owner, names in self._partial.items():
            listed = format_list([f"`{name}`" for name in names])
            self._run.record_unsaved_state(f"{listed} of {owner} cannot be compared as a whole", is_variable=True)

    def _unsaved(
        self, owner: str, names: list[str], parts: list[tuple[str, Any]], now: Mapping[str, bytes]
    ) -> list[str]:
        """Return the names that are not part of the state of any object of this owner."""
        for label, name, obj, read in objects_with_state(self._run):
            if label != owner or not names:
                continue
            if id(obj) not in self._saved:
                self._saved[id(obj)] = SavedAttributes(obj, read, prefix=name, known=self._known_parts())
            names = self._saved[id(obj)].unsaved(names)
            if names:
                # A variable may refer to a value that the state contains. Its hash is then left out.
                without = self._fingerprints({owner: parts}, known=reachable([read(obj)]))[owner]
                names = [n for n in names if all(without.get(k) == now.get(k) for k in (n, f"len({n})"))]
        return names

    def variables(self, frame: types.FrameType | None) -> dict[str, str]:
        """Return hashes of the user's variables by name, including local variables of the functions that are running.

        Names and hashes are the same in every process. `frame` is the frame that called the session.
        """
        roots = self._all_roots() | dict(frame_variables(frame))
        fingerprints = self._fingerprints(roots)
        return {
            f"`{name}` of {owner}": d.hex() for owner, digests in fingerprints.items() for name, d in digests.items()
        }

    def _all_roots(self) -> dict[str, list[tuple[str, Any]]]:
        losses = {self._loss_label(key): [(part_name(loss), loss)] for key, loss in self._losses.items()}
        return {**dict(user_objects(self._run)), **losses}

    def _loss_label(self, key: Hashable) -> str:
        # Two losses may have the same name; they are numbered in the order of their first calls.
        position = [*self._losses].index(key)
        return "the loss" if position == 0 else f"the loss {part_name(self._losses[key])}"

    def _fingerprints(
        self, roots: Mapping[str, list[tuple[str, Any]]], *, known: Mapping[int, Any] | None = None
    ) -> dict[str, dict[str, bytes]]:
        run = self._run
        own = {name: reachable([obj]) for name, obj in run.registered.objects.items()}
        of_run = self._known_parts()
        saved = functools.reduce(operator.or_, own.values(), of_run)
        named = (*run.model.named_modules(), *run.model.named_parameters(), *run.model.named_buffers())
        labels = {id(part): name for name, part in named}
        fingerprints = {}
        for owner, parts in roots.items():
            # Use one walk per owner, so that names do not depend on which owner reaches an object first.
            # The attributes of a registered object are compared with what its own state_dict contains. It may refer to
            # the model, which checkpoints save anyway.
            entered = own.get(owner.removeprefix(REGISTERED_PREFIX), {}) if owner.startswith(REGISTERED_PREFIX) else {}
            others = {key: part for key, part in saved.items() if key not in entered} | of_run if entered else saved
            walk = StateWalk(
                known={**others, **known} if known else others, labels=labels, is_sample=owner in _DATA_OWNERS
            )
            for name, value in parts:
                walk.walk(value, name)
            fingerprints[owner] = walk.finish()
            if walk.partial and not walk.is_sample:
                self._partial[owner] = list(walk.partial)
        return fingerprints

    def _known_parts(self) -> dict[int, Any]:
        run = self._run
        known = {id(part): part for part in (run, run.config, *run.model.modules())}
        known |= {id(tensor): tensor for tensor in (*run.model.parameters(), *run.model.buffers())}
        # Include these objects only, not those they refer to: from an optimizer hook, any object may be reachable.
        return known | {id(saved): saved for saved in saved_objects(self._run)}


def _names_set_by_epoch(loader: DataLoader[Any]) -> set[str]:
    """Return the names of the attributes that `set_epoch` changes in a sampler.

    A resumed run calls it too, so none of this is lost.
    """
    copied = copy_sampler(sampler_of(loader))
    epochs = []
    for epoch in (1, 2):
        set_epoch(copied, epoch)
        walk = StateWalk(follows_code=False)
        walk.walk(copied, "self")
        epochs.append(walk.digests)
    return set(changed_names(*epochs))


def _rebound_names(loss: Any) -> Iterator[str]:
    """Yield the names of values bound where a loss is defined: closure cells, defaults, arguments of a partial."""
    name = part_name(loss)
    while isinstance(loss, functools.partial):
        yield from (f"{name}.{key}" for key in loss.keywords)
        yield from (f"{name}.args[{index}]" for index in range(len(loss.args)))
        loss = loss.func
    code = getattr(getattr(loss, "__func__", loss), "__code__", None)
    if code is not None:
        yield from code.co_freevars
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        yield from (f"{name}({argument}=)" for argument in arguments)


_session_optimizers: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
"""The optimizers of all sessions in this process. Each session saves its own."""


class _OptimizerWatch:
    """Records optimizers that step during a session without being part of one."""

    def __init__(self, own: set[Optimizer]) -> None:
        self._own = own
        _session_optimizers.update(own)
        self._seen = {id(optimizer) for optimizer in own}
        self._others: dict[int, weakref.ref[Optimizer]] = {}
        self._hook = watch_updates(self._after_step)

    def close(self) -> None:
        self._hook.remove()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) not in self._seen and optimizer not in _session_optimizers:
            key = id(optimizer)
            self._seen.add(key)
            # Hold a weak reference: an optimizer that no longer exists, such as that of a linear probe, has no state to
            # lose.
            self._others[key] = weakref.ref(optimizer, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        # Python may reuse the id.
        self._seen.discard(key)
        self._others.pop(key, None)

    def unknown(self, run: "RunContext") -> Iterator[str]:
        """Yield a gap for each live optimizer that no known optimizer or registered object contains."""
        alive = [optimizer for ref in [*self._others.values()] if (optimizer := ref()) is not None]
        if not alive:
            return
        known = [*self._own, *run.registered.objects.values()]
        # A wrapper such as Lookahead saves the optimizer that it wraps.
        parts = {id(part) for owner in known for part in (owner, *getattr(owner, "__dict__", {}).values())}
        names = {parameter: name for name, parameter in run.model.named_parameters()}
        for optimizer in alive:
            if id(optimizer) not in parts:
                held = [names.get(p, "outside the model") for g in optimizer.param_groups for p in g["params"]]
                of = ", ".join(dict.fromkeys(held[:_MAX_NAMES]))
                yield f"the session does not know an optimizer that steps: {type(optimizer).__name__} ({of})"
