"""`whet.check` and `whet.compare`: check that a model or recipe runs on a device and computes correct results."""

import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from whet.api.target import MODEL_NAMES, TRAINING_NAMES, ScriptTraining, call_function, load_function
from whet.base.errors import UsageError
from whet.base.process import gc_disabled
from whet.config.resolve import resolve_config
from whet.data.adapters import open_source
from whet.data.batch import MicroBatch, Position
from whet.device.cpu import CpuDevice
from whet.machine.facts import Machine
from whet.machine.known import load_machine
from whet.recipes.recipe import Recipe, validate_recipe
from whet.step.loss import adapt_loss
from whet.step.optimizers import OptimizerChoice
from whet.verify.fake_tensors import fake_mode
from whet.verify.parity.compare import ParityResult, compare_devices
from whet.verify.preflight.check import PreflightResult, check_trainable
from whet.verify.trainable import Trainable, TrainableSpec, adapt_outputs, make_trainable, use_fake_weights


def check(
    what: str | Callable[[], Any],
    args: Sequence[str] = (),
    *,
    device: str | None = None,
    machine: str | Machine | None = None,
    config: Path | None = None,
    is_causal: bool = False,
    torch: str | None = None,
) -> PreflightResult:
    """Trace two training steps of a model as a device would run them, and list the problems with their source lines.

    Args:
        what: A recipe, a file or a module as for `whet check`, or a function that returns (model, inputs) or
            (model, inputs, loss).
        args: Options of a recipe, such as "lr=1e-4".
        device: "mps", "cuda" or "cpu"; by default that of `machine`, else "mps".
        machine: The name of a known machine, a machine file, or a `Machine`. Its memory and versions are used.
        config: A config file for a recipe.
        is_causal: Whether the model must be causal.
        torch: A torch version such as "2.15", which need not be installed; by default that of the machine if it has
            MPS, else the installed one.

    >>> whet.check("text", device="mps").findings  # doctest: +SKIP
    ()
    """
    from torch import nn

    if isinstance(what, nn.Module):
        raise UsageError(
            "a check must build the model itself, with fake tensors",
            got=f"a {type(what).__name__} that is already built",
            try_="a function that returns (model, inputs) or (model, inputs, loss)",
        )
    known = load_machine(machine) if isinstance(machine, str) else machine
    if known and device not in (None, "cpu", *(chip.kind for chip in known.accelerators)):
        raise UsageError(
            "the machine has no such device",
            got=f"--for {device} --machine {known.name}",
            try_=f"--for {_default_device(known)}, or another machine",
        )
    # Tracing creates hundreds of thousands of small objects; collecting them took 10 % of the time. Training disables
    # the collector too, so object lifetimes match.
    with gc_disabled():
        if isinstance(what, str):
            spec = load_spec(what, args, file=config, is_causal=is_causal)
        else:
            name = getattr(what, "__name__", "the model")
            spec = TrainableSpec(name=name, make=partial(_call_factory, what, name, is_causal=is_causal))
        return check_trainable(spec, device=device or _default_device(known), machine=known, torch_version=torch)


def compare(
    what: Any,
    inputs: Any = None,
    loss: Callable[..., Any] | None = None,
    *,
    args: Sequence[str] = (),
    devices: Sequence[str] = (),
    steps: int = 20,
    size: int | None = None,
    precisions: Sequence[str] | None = None,
    out: str | Path | None = None,
) -> ParityResult:
    """Compare a device with the CPU: loss, gradients, update, several steps, repeatability and lower precision.

    Args:
        what: A recipe, a file, or a model. Copies of the model are used; the model itself is not changed.
        inputs: Example inputs for a model: a tuple or dict of tensors.
        loss: Called with the model and the inputs; by default the model's output is used.
        args: Options of a recipe, such as "lr=1e-4".
        devices: For example ["cpu", "mps"]; by default the best device of this machine.
        steps: Number of training steps to compare.
        size: Samples per batch.
        precisions: Lower precisions to compare.
        out: File for a program that reproduces a wrong operator. `result.located` names the operator.

    >>> whet.compare(model, (x,), devices=["cpu", "mps"]).agrees  # doctest: +SKIP
    True
    """
    if isinstance(what, str):
        if inputs is not None or loss is not None:
            raise UsageError(
                "args cannot be combined with a recipe or a file", got="inputs for " + what, try_="args=[...]"
            )
        spec = load_spec(what, args)
    elif isinstance(what, TrainableSpec):
        spec = what
    else:
        spec = model_spec(what, inputs, loss)
    return compare_devices(
        spec,
        devices=devices,
        steps=steps,
        size=size,
        precisions=precisions,
        out=None if out is None else Path(out),
    )


def load_spec(
    what: str, args: Sequence[str] = (), *, file: Path | None = None, is_causal: bool = False
) -> TrainableSpec:
    """Load a recipe with its options, or a model from a function that returns it."""
    factory = load_function(what, default=MODEL_NAMES)
    kind = _returned_kind(factory, what)
    if kind is Recipe:
        recipe = validate_recipe(factory(), what)
        if is_causal and not recipe.supports("outputs"):
            raise UsageError(
                "this recipe does not return the outputs of its model",
                got=f"{what} and --causal",
                try_="a method outputs(self, model, micro) in the recipe; then --causal is not needed",
            )
        return _recipe_spec(recipe, args, file=file)
    if args or file:
        raise UsageError("options need a recipe", got=" ".join(args) or str(file), try_=f"{what} alone")
    if kind is ScriptTraining:
        return TrainableSpec(name=what, make=partial(_call_training, factory, what))
    return TrainableSpec(name=what, make=partial(_call_factory, factory, what, is_causal=is_causal))


def model_spec(model: Any, inputs: Any, loss: Callable[..., Any] | None = None) -> TrainableSpec:
    """Describe an existing model for verification. Copies of the model are verified, not the model itself."""
    name = type(model).__name__

    def make() -> Trainable:
        parts = (copy.deepcopy(model), inputs) if loss is None else (copy.deepcopy(model), inputs, loss)
        return make_trainable(parts, name=name)

    return TrainableSpec(name=name, make=make)


def _returned_kind(factory: Callable[[], Any], word: str) -> type:
    """Return Recipe, ScriptTraining, or object for a model. The model has fake tensors, which use no memory."""
    if getattr(factory, "__name__", "") == "recipe":
        return Recipe if isinstance(factory(), Recipe) else object
    if getattr(factory, "__name__", "") in TRAINING_NAMES:
        return ScriptTraining
    try:
        with fake_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = call_function(factory, word)
    except Exception:
        # The function cannot run with fake tensors. If its file uses whet, it probably trains; otherwise the check
        # reports the error.
        module = vars(sys.modules.get(getattr(factory, "__module__", "")) or object)
        uses_whet = any(getattr(value, "__name__", "").partition(".")[0] == "whet" for value in module.values())
        return ScriptTraining if uses_whet else object
    return next((kind for kind in (Recipe, ScriptTraining) if isinstance(made, kind)), object)


def _call_training(function: Callable[[], Any], name: str) -> Trainable:
    """Return the model, loss and data that a training function passed to `whet.train`."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    mode = detect_fake_mode()
    # The function reads data and may open a device, so it runs on real tensors.
    with unset_fake_temporarily():
        training = call_function(function, name)
    if not isinstance(training, ScriptTraining):
        raise UsageError(
            f"what {name} returns cannot be verified",
            got=type(training).__name__,
            try_="call whet.train(...) in it, or return model, (x, y)",
        )
    config = training.config
    if mode is not None:
        # Replace the weights in place, because the loss function refers to this model.
        use_fake_weights(config.model, mode)

    def make_batch(size: int) -> MicroBatch:
        with unset_fake_temporarily():
            return _first_micro_batch(config.data, size, seed=config.training.seed)

    own = config.optimizer
    return Trainable(
        model=config.model,
        loss=adapt_loss(training.loss, config.model),
        make_batch=make_batch,
        batch_size=config.training.global_batch_size,
        optimizer=own if isinstance(own, OptimizerChoice) else _closest_choice(own),
        outputs=config.outputs,
    )


def _closest_choice(optimizer: Any) -> OptimizerChoice:
    """Return the optimizer that a check builds: the counterpart of the user's if whet has one, else AdamW."""
    name = type(optimizer).__name__.lower()
    group = optimizer.param_groups[0]
    if name not in ("adamw", "sgd", "adafactor"):
        return OptimizerChoice()
    return OptimizerChoice(name=name, lr=float(group["lr"]), weight_decay=float(group.get("weight_decay") or 0.0))


def _first_micro_batch(data: Any, size: int, *, seed: int) -> MicroBatch:
    source = open_source(data, CpuDevice(), global_batch_size=size, seed=seed, is_resident=False)
    batch = next(iter(source.batches(Position())))
    return next(iter(source.micro_batches(batch, micro_batch=size, length_mode="fixed")))


def _call_factory(factory: Callable[[], Any], name: str, *, is_causal: bool) -> Trainable:
    made = factory()
    if not isinstance(made, tuple | list):
        raise UsageError(
            f"cannot verify the return value of {name}",
            got=type(made).__name__,
            try_="return model, (x, y); or call whet.train(...); or return a recipe",
        )
    return make_trainable(made, name=name, is_causal=is_causal)


def _recipe_spec(recipe: Recipe, args: Sequence[str], *, file: Path | None) -> TrainableSpec:
    config = resolve_config(recipe.Config, args, file=file).config
    workload = recipe.describe(config)
    data = recipe.data(config)

    def make_batch(size: int) -> MicroBatch:
        return _first_micro_batch(data.train, size, seed=config.seed)

    def make() -> Trainable:
        model = recipe.model(config, data)
        return Trainable(
            model=model,
            loss=adapt_loss(partial(recipe.loss, model), model),
            make_batch=make_batch,
            batch_size=config.global_batch_size,
            optimizer=recipe.optimizer(config),
            outputs=adapt_outputs(partial(recipe.outputs, model)) if recipe.supports("outputs") else None,
        )

    return TrainableSpec(name=recipe.name, make=make, workload=workload)


def _default_device(machine: Machine | None) -> str:
    """Return the device of the machine. Without a machine, return MPS, which has the most limitations."""
    if machine is None:
        return "mps"
    return machine.accelerators[0].kind if machine.accelerators else "cpu"
