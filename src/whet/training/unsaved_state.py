"""Detect state that checkpoints do not hold: optimizers outside the session, and variables of the user that change.

Each gap is reported in a warning, recorded in all later checkpoints and reported again when the run resumes.
"""

import functools
import inspect
import operator
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader

from whet.base.units import format_list
from whet.checkpoint.attributes import has_encoding, plain_names
from whet.checkpoint.optimizer_state import has_own_state, inner_optimizers
from whet.checkpoint.state_format import CHANGEABLE
from whet.data.samplers import copy_sampler
from whet.data.stream_reader import set_epoch
from whet.step.loss import loss_code
from whet.step.model_contexts import without_recomputation
from whet.step.optimizer_kernels import is_of_torch, watch_updates
from whet.training.callback import Callback
from whet.training.torch_schedule import schedule_functions
from whet.verify.code_references import (
    FUNCTIONS,
    class_references,
    frame_variables,
    is_library_class,
    is_users_function,
)
from whet.verify.hidden_state import (
    StateWalk,
    changed_names,
    module_attributes,
    new_cached,
    reachable,
    scripted_attributes,
)
from whet.verify.library_objects import object_parts
from whet.verify.process_settings import is_planned, process_settings, thread_settings
from whet.verify.saved_attributes import SavedAttributes

if TYPE_CHECKING:
    from whet.training.run_context import RunContext

_MAX_NAMES = 3
_SAMPLER, _DATASET, _LOADER, _PROCESS = "the sampler", "the dataset", "the loader", "the process"
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _MODULE_HOOKS)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_DATA_OWNERS = (_DATASET, _SAMPLER)
"""Compared only by their samples: data is large, and samples that change are noticed when they are read again."""
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_OPTIMIZER_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


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
        self._hooks: dict[int, tuple[weakref.ref[Any], Counter[str]]] = {}
        """The owners of hooks in the first step, by id, with the names of the user's hooks."""
        self._partial: dict[str, list[str]] = {}
        """Names of objects that cannot be compared completely, by owner."""
        self._reported: set[tuple[str, str]] = set()
        self._saved: dict[int, SavedAttributes] = {}
        """The saved attributes of each object with a user-defined `state_dict`, by the id of the object."""
        self._optimizers = _OptimizerWatch({stepper.optimizer for stepper in run.steppers.values()})
        run.exit_stack.callback(self._optimizers.close)

    def begin(self) -> None:
        """Take fingerprints before the first batch is read."""
        self._before = self._fingerprints(dict(self._roots()))
        self.accept_hooks()

    def accept_hooks(self) -> None:
        """Record the hooks, before the first step and after it: a first forward pass adds its own in each process."""
        self._hooks = {
            id(owner): (weakref.ref(owner), _users_hooks(hooks)) for _, owner, hooks in _hook_owners(self._run)
        }

    def follow_plan(self) -> None:
        """Take new fingerprints of the settings of the process that were changed for another plan."""
        if _PROCESS in self._before:
            now = self._fingerprints({_PROCESS: list(process_settings())})[_PROCESS]
            self._before[_PROCESS] |= {name: digest for name, digest in now.items() if is_planned(name)}

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
        self._before |= self._fingerprints({self._loss_label(key): [(_name_of(loss), loss)]})

    def check(self) -> None:
        """Compare fingerprints, and report each change that checkpoints do not save once."""
        if not self._before:
            # Nothing has been trained yet.
            return
        for gap in self._optimizers.unknown(self._run):
            self._run.record_unsaved_state(gap)
        for change in self._changed_hooks():
            self._run.record_unsaved_state(change, is_variable=True)
        roots = self._all_roots()
        expected = {self._loss_label(key): {*_rebound_names(self._losses[key])} for key in self._recreated}
        for owner, now in self._fingerprints(roots).items():
            before = self._before.setdefault(owner, now)
            names = changed_names(before, now)
            before |= new_cached(before, now)
            if names and owner == _SAMPLER:
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

    def _changed_hooks(self) -> Iterator[str]:
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

    def _unsaved(
        self, owner: str, names: list[str], parts: list[tuple[str, Any]], now: Mapping[str, bytes]
    ) -> list[str]:
        """Return the names that are not part of the state of any object of this owner."""
        for label, name, obj, read in self._stateful():
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
        losses = {self._loss_label(key): [(_name_of(loss), loss)] for key, loss in self._losses.items()}
        return {**dict(self._roots()), **losses}

    def _loss_label(self, key: Hashable) -> str:
        # Two losses may have the same name; they are numbered in the order of their first calls.
        position = [*self._losses].index(key)
        return "the loss" if position == 0 else f"the loss {_name_of(self._losses[key])}"

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
            entered = own.get(owner.removeprefix(_REGISTERED), {}) if owner.startswith(_REGISTERED) else {}
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
        return known | {id(saved): saved for saved in self._saved_objects()}

    def _saved_objects(self) -> Iterator[Any]:
        """Yield the other objects that checkpoints save and to which the loss may refer."""
        run, schedule = self._run, self._run.config.training.schedule
        registered = (obj for obj in run.registered.objects.values() if isinstance(obj, Optimizer))
        optimizers = [*(stepper.optimizer for stepper in run.steppers.values()), *registered]
        yield from optimizers
        # Values of a group, such as a learning rate on the device, are often the same objects as in `defaults`.
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        yield from (v for group in groups for v in group.values() if isinstance(v, (Tensor, *CHANGEABLE)))
        attributes = (value for module in run.model.modules() for _, value in module_attributes(module))
        # Code may refer to these objects by other names: modules may share a generator through a closure, for example.
        yield from (value for value in attributes if isinstance(value, torch.Generator) or _is_changeable(value))
        yield from (callback for callback in run.callbacks.users if _saves_state(callback))
        yield from _schedulers(schedule)
        data = run.config.data
        if hasattr(data, "state_dict") or isinstance(data, DataLoader):
            # Do not yield the sampler and the collate function too, because they are separate roots.
            yield data

    def _roots(self) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
        """Yield each owner, such as "the model", with its user-defined code and objects.

        The loss is added separately.
        """
        run = self._run
        yield "the model", list(_model_parts(run.model))
        for name, stepper in run.steppers.items():
            yield self._optimizer_label(name), list(_optimizer_parts(stepper.optimizer))
        yield from _hooks(run)
        schedule = run.config.training.schedule
        parts = [(_name_of(part), part) for part in schedule_functions(schedule)]
        for scheduler in _schedulers(schedule):
            parts += _attributes(scheduler) if _has_own_state(scheduler) else []
        yield "the schedule", parts
        yield from _data_parts(run.config.data, run.config.training.collate_fn)
        if run.config.evaluate is not None:
            yield "the evaluation", [(_name_of(run.config.evaluate), run.config.evaluate)]
        for callback in run.callbacks.users:
            yield _callback_label(callback), _attributes(callback) if _saves_state(callback) else [("self", callback)]
        for name, registered in run.registered.objects.items():
            parts = list(class_references(type(registered)))
            if isinstance(registered, nn.Module):
                parts = list(_model_parts(registered))
            elif isinstance(registered, Optimizer):
                parts = [*_optimizer_parts(registered), *_encoded_attributes(registered)]
            elif isinstance(registered, LRScheduler) and is_library_class(type(registered)):
                # Its state_dict contains the attributes of callable objects, but nothing of functions.
                functions = (part for part in schedule_functions(registered) if isinstance(part, FUNCTIONS))
                parts = [(_name_of(part), part) for part in functions]
            elif _has_own_state(registered):
                parts = _attributes(registered)
            yield f"{_REGISTERED}{name}", parts
        yield _PROCESS, list(process_settings())
        yield from thread_settings()

    def _stateful(self) -> Iterator[tuple[str, str, Any, Callable[[Any], Any]]]:
        """Yield (owner, name, object, function that reads its state) for each object with a user-defined state."""
        run = self._run
        for callback in run.callbacks.users:
            if _saves_state(callback):
                yield _callback_label(callback), "self", callback, _read_state
        for name, registered in run.registered.objects.items():
            if _has_own_state(registered):
                yield f"{_REGISTERED}{name}", "self", registered, _read_state
            elif isinstance(registered, Optimizer) and has_own_state(registered):
                yield f"{_REGISTERED}{name}", "", registered, _read_state
        for name, module in run.model.named_modules():
            if _has_extra_state(module):
                yield "the model", name, module, _read_extra_state
        for name, stepper in run.steppers.items():
            if has_own_state(stepper.optimizer):
                yield self._optimizer_label(name), "", stepper.optimizer, _read_state
        for owner, part in _stateful_data(run.config.data):
            yield owner, "self", part, _read_state
        for schedule in _schedulers(run.config.training.schedule):
            if _has_own_state(schedule):
                yield "the schedule", "self", schedule, _read_state

    def _optimizer_label(self, name: str) -> str:
        return "the optimizer" if len(self._run.steppers) == 1 else f"the optimizer {name}"


_REGISTERED = "the registered "


def _callback_label(callback: Callback) -> str:
    return f"the callback {type(callback).__qualname__}"


def _attributes(obj: Any) -> list[tuple[str, Any]]:
    """Return the attributes and the classes of an object that saves its own state."""
    return [*object_parts(obj, "self"), *class_references(type(obj))]


def _read_state(obj: Any) -> Any:
    return obj.state_dict()


def _read_extra_state(module: nn.Module) -> Any:
    return module.get_extra_state()


def _has_own_state(obj: Any) -> bool:
    """Return whether an object of a user's class has a state_dict. That of a library is assumed to be complete."""
    return hasattr(obj, "state_dict") and not is_library_class(type(obj)) and not isinstance(obj, nn.Module | Optimizer)


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _schedulers(schedule: Any) -> list[Any]:
    schedules = schedule.values() if isinstance(schedule, Mapping) else (schedule,)
    return [one for one in schedules if isinstance(one, LRScheduler)]


def _stateful_data(data: Any) -> Iterator[tuple[str, Any]]:
    """Yield the stream and the sampler that save their own state, with their owners."""
    if isinstance(data, DataLoader) and not _has_own_state(data):
        yield from _stateful_data(data.dataset)
        if _has_own_state(_sampler_of(data)):
            yield _SAMPLER, _sampler_of(data)
    elif _has_own_state(data):
        yield _DATASET, data


def _is_changeable(value: Any) -> bool:
    return isinstance(value, list | dict | set | Tensor) and has_encoding(value)


def _saves_state(callback: Callback) -> bool:
    return type(callback).state_dict is not Callback.state_dict


def _model_parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        for key, attribute in module_attributes(module):
            value = (
                without_recomputation(attribute)
                if key == "forward" and isinstance(attribute, functools.partial)
                else attribute
            )
            if value is not attribute and getattr(value, "__self__", None) is module:
                # The method of the class, as before the plan let it be recomputed.
                continue
            if not has_encoding(value):
                yield f"{name}.{key}".removeprefix("."), value
        yield from ((f"{name}.{key}".removeprefix("."), value) for key, value in scripted_attributes(module))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        # Skip attributes that the compiler sets on parameters. It sets them again in the next process.
        yield from ((f"{name}.{key}", value) for key, value in vars(tensor).items() if not key.startswith("_dynamo"))
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        yield from class_references(kind)


def _optimizer_parts(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    for prefix, one in (("", optimizer), *((f"{name}.", inner) for name, inner in inner_optimizers(optimizer))):
        if not is_library_class(type(one)):
            yield f"{prefix}defaults", one.defaults
        elif is_of_torch(one):
            # Optimizers from other libraries change their defaults in the first step. A tensor is usually the learning
            # rate, which each group has too.
            yield f"{prefix}defaults", {key: v for key, v in one.defaults.items() if not isinstance(v, Tensor)}
        if not prefix or not has_own_state(one):
            names = (name for name in plain_names(one) if not has_encoding(vars(one)[name]))
            yield from ((f"{prefix}{name}", vars(one)[name]) for name in names)
        yield from class_references(type(one))


def _encoded_attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the plain attributes of a registered optimizer. Its state_dict leaves them out, unless it is the user's."""
    values = vars(optimizer)
    yield from ((name, values[name]) for name in plain_names(optimizer) if has_encoding(values[name]))


def _hook_owners(run: "RunContext") -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield the name of each object that may have hooks, the object, and its hooks."""
    owners: list[tuple[str, Any, tuple[str, ...]]] = []
    owners += [(name or "the model", module, _MODULE_HOOKS) for name, module in run.model.named_modules()]
    owners += [("all modules", nn.modules.module, _GLOBAL_HOOKS)]
    owners += [(name, parameter, _TENSOR_HOOKS) for name, parameter in run.model.named_parameters()]
    owners += [(type(s.optimizer).__name__, s.optimizer, _OPTIMIZER_HOOKS) for s in run.steppers.values()]
    owners += [("all optimizers", sys.modules[Optimizer.__module__], _GLOBAL_OPTIMIZER_HOOKS)]
    for name, obj in run.registered.objects.items():
        label = f"{_REGISTERED}{name}"
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
    return Counter(_name_of(hook) for hook in hooks if _is_users(hook)) if hooks else Counter()


def _is_users(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = inspect.unwrap(getattr(hook, "__func__", hook))
    return is_users_function(function) if isinstance(function, types.FunctionType) else not is_library_class(type(hook))


def _hooks(run: "RunContext") -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    seen: set[tuple[int, int]] = set()
    for name, _, hooks in _hook_owners(run):
        # The same method is often registered as a hook of every module; read what it refers to only once.
        keys = [(id(getattr(hook, "__self__", None)), id(getattr(hook, "__func__", hook))) for hook in hooks]
        new = [hook for hook, key in zip(hooks, keys, strict=True) if key not in seen]
        seen.update(keys)
        if new:
            yield f"a hook of {name}", [(_name_of(hook), hook) for hook in new]


def _data_parts(data: Any, collate_fn: Any) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    if hasattr(data, "state_dict"):
        # This stream or loader saves its own state.
        yield _DATASET, _attributes(data) if _has_own_state(data) else list(class_references(type(data)))
        yield "the collate function", [(_name_of(collate_fn), collate_fn)]
        return
    if isinstance(data, DataLoader):
        sampler = _sampler_of(data)
        yield from _data_parts(data.dataset, data.collate_fn)
        if type(sampler).__module__.startswith("torch."):
            yield _SAMPLER, list(_torch_sampler_parts(sampler, "self"))
        else:
            yield _SAMPLER, _attributes(sampler) if _has_own_state(sampler) else [("self", sampler)]
        own = ((key, value) for key, value in vars(data).items() if key not in _loader_machinery())
        yield _LOADER, [(f"self.{key}", value) for key, value in own]
        yield "worker_init_fn", [("worker_init_fn", data.worker_init_fn)]
        return
    yield _DATASET, [("self", data)]
    yield "the collate function", [(_name_of(collate_fn), collate_fn)]


def _torch_sampler_parts(sampler: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what the user may change in a sampler of torch, such as the weights of a WeightedRandomSampler."""
    for key, value in vars(sampler).items():
        inner = f"{name}.{key}"
        if isinstance(value, BatchSampler) or (key == "sampler" and type(value).__module__.startswith("torch.")):
            yield from _torch_sampler_parts(value, inner)
        elif key not in ("data_source", "dataset", "generator"):
            # The dataset has its own fingerprints. Each epoch seeds the generator.
            yield inner, value


@functools.cache
def _loader_machinery() -> frozenset[str]:
    """Return the names of the attributes that torch manages in every DataLoader."""
    return frozenset(vars(DataLoader([0])))  # type: ignore[arg-type]


def _sampler_of(loader: DataLoader[Any]) -> Any:
    return loader.batch_sampler if loader.batch_size is None else loader.sampler


def _names_set_by_epoch(loader: DataLoader[Any]) -> set[str]:
    """Return the names of the attributes that `set_epoch` changes in a sampler.

    A resumed run calls it too, so none of this is lost.
    """
    copied = copy_sampler(_sampler_of(loader))
    epochs = []
    for epoch in (1, 2):
        set_epoch(copied, epoch)
        walk = StateWalk(follows_code=False)
        walk.walk(copied, "self")
        epochs.append(walk.digests)
    return set(changed_names(*epochs))


def _name_of(part: Any) -> str:
    name = getattr(part, "__qualname__", None)
    return "self" if name is None else str(name).rpartition(".")[2]


def _rebound_names(loss: Any) -> Iterator[str]:
    """Yield the names of values bound where a loss is defined: closure cells, defaults, arguments of a partial."""
    name = _name_of(loss)
    while isinstance(loss, functools.partial):
        yield from (f"{name}.{key}" for key in loss.keywords)
        yield from (f"{name}.args[{index}]" for index in range(len(loss.args)))
        loss = loss.func
    code = getattr(getattr(loss, "__func__", loss), "__code__", None)
    if code is not None:
        yield from code.co_freevars
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        yield from (f"{name}({argument}=)" for argument in arguments)


# --- optimizers ------------------------------------------------------------------------------------------------------

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
