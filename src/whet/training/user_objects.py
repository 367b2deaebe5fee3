"""The objects of a run that belong to the user, by owner, such as "the model" or "the sampler".

`unsaved_state.py` compares those that checkpoints do not save.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader

from whet.checkpoint.attributes import has_encoding, plain_names
from whet.checkpoint.optimizer_state import has_own_state, inner_optimizers
from whet.checkpoint.state_format import CHANGEABLE
from whet.step.model_contexts import without_recomputation
from whet.step.optimizer_kernels import is_of_torch
from whet.training.callback import Callback
from whet.training.registered import REGISTERED_PREFIX
from whet.training.torch_schedule import schedule_functions
from whet.training.user_hooks import hook_parts
from whet.verify.code_references import FUNCTIONS, class_references, is_library_class, part_name
from whet.verify.hidden_state import module_attributes, scripted_attributes
from whet.verify.library_objects import object_parts
from whet.verify.process_settings import process_settings, thread_settings

if TYPE_CHECKING:
    from whet.training.run_context import RunContext

SAMPLER, DATASET, PROCESS = "the sampler", "the dataset", "the process"
"""Names of owners."""
_LOADER = "the loader"


def user_objects(run: "RunContext") -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Yield each owner, such as "the model", with its user-defined code and objects.

    The loss is added separately.
    """
    yield "the model", list(_model_parts(run.model))
    for name, stepper in run.steppers.items():
        yield _optimizer_label(run, name), list(_optimizer_parts(stepper.optimizer))
    yield from hook_parts(run)
    schedule = run.config.training.schedule
    parts = [(part_name(part), part) for part in schedule_functions(schedule)]
    for scheduler in _schedulers(schedule):
        parts += _attributes(scheduler) if _has_own_state(scheduler) else []
    yield "the schedule", parts
    yield from _data_parts(run.config.data, run.config.training.collate_fn)
    if run.config.evaluate is not None:
        yield "the evaluation", [(part_name(run.config.evaluate), run.config.evaluate)]
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
            parts = [(part_name(part), part) for part in functions]
        elif _has_own_state(registered):
            parts = _attributes(registered)
        yield f"{REGISTERED_PREFIX}{name}", parts
    yield PROCESS, list(process_settings())
    yield from thread_settings()


def objects_with_state(run: "RunContext") -> Iterator[tuple[str, str, Any, Callable[[Any], Any]]]:
    """Yield (owner, name, object, function that reads its state) for each object with a user-defined state."""
    for callback in run.callbacks.users:
        if _saves_state(callback):
            yield _callback_label(callback), "self", callback, _read_state
    for name, registered in run.registered.objects.items():
        if _has_own_state(registered):
            yield f"{REGISTERED_PREFIX}{name}", "self", registered, _read_state
        elif isinstance(registered, Optimizer) and has_own_state(registered):
            yield f"{REGISTERED_PREFIX}{name}", "", registered, _read_state
    for name, module in run.model.named_modules():
        if _has_extra_state(module):
            yield "the model", name, module, _read_extra_state
    for name, stepper in run.steppers.items():
        if has_own_state(stepper.optimizer):
            yield _optimizer_label(run, name), "", stepper.optimizer, _read_state
    for owner, part in _stateful_data(run.config.data):
        yield owner, "self", part, _read_state
    for schedule in _schedulers(run.config.training.schedule):
        if _has_own_state(schedule):
            yield "the schedule", "self", schedule, _read_state


def saved_objects(run: "RunContext") -> Iterator[Any]:
    """Yield the other objects that checkpoints save and to which the loss may refer."""
    schedule = run.config.training.schedule
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


def _optimizer_label(run: "RunContext", name: str) -> str:
    return "the optimizer" if len(run.steppers) == 1 else f"the optimizer {name}"


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
        if _has_own_state(sampler_of(data)):
            yield SAMPLER, sampler_of(data)
    elif _has_own_state(data):
        yield DATASET, data


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


def _data_parts(data: Any, collate_fn: Any) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    if hasattr(data, "state_dict"):
        # This stream or loader saves its own state.
        yield DATASET, _attributes(data) if _has_own_state(data) else list(class_references(type(data)))
        yield "the collate function", [(part_name(collate_fn), collate_fn)]
        return
    if isinstance(data, DataLoader):
        sampler = sampler_of(data)
        yield from _data_parts(data.dataset, data.collate_fn)
        if type(sampler).__module__.startswith("torch."):
            yield SAMPLER, list(_torch_sampler_parts(sampler, "self"))
        else:
            yield SAMPLER, _attributes(sampler) if _has_own_state(sampler) else [("self", sampler)]
        own = ((key, value) for key, value in vars(data).items() if key not in _loader_machinery())
        yield _LOADER, [(f"self.{key}", value) for key, value in own]
        yield "worker_init_fn", [("worker_init_fn", data.worker_init_fn)]
        return
    yield DATASET, [("self", data)]
    yield "the collate function", [(part_name(collate_fn), collate_fn)]


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


def sampler_of(loader: DataLoader[Any]) -> Any:
    return loader.batch_sampler if loader.batch_size is None else loader.sampler
