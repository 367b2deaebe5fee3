"""`whet.check` and `whet.compare`: whether a model or recipe runs on a device, and whether its results are right."""

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError
from whet.base.process import gc_disabled
from whet.config.resolve import resolve_config
from whet.data.adapters import open_source
from whet.data.batch import MicroBatch, Position
from whet.device.cpu import CpuDevice
from whet.machine.facts import Machine
from whet.machine.known import load_machine
from whet.recipes.recipe import Recipe, load_factory, validate_recipe
from whet.verify.fake_tensors import fake_mode
from whet.verify.parity.compare import ParityResult, compare_devices
from whet.verify.preflight.check import CheckResult
from whet.verify.preflight.check import check_trainable as check_subject
from whet.verify.trainable import Trainable, TrainableSpec, make_trainable


def load_subject(
    word: str, words: Sequence[str] = (), *, file: Path | None = None, is_causal: bool = False
) -> TrainableSpec:
    """The recipe, or the model, behind a word; `words` are a recipe's settings."""
    factory = load_factory(word, default=("recipe", "model"))
    if _makes_recipe(factory):
        recipe = validate_recipe(factory(), word)
        if is_causal and not recipe.supports("outputs"):
            raise UsageError(
                "this recipe does not say what its model predicts",
                got=f"{word} and --causal",
                try_="a method outputs(self, model, micro) in the recipe; then it is asked without --causal",
            )
        return _recipe_subject(recipe, words, file=file)
    if words or file:
        raise UsageError("only a recipe has settings", got=" ".join(words) or str(file), try_=f"{word} alone")
    return TrainableSpec(name=word, make=partial(_factory_specimen, factory, word, is_causal=is_causal))


def _makes_recipe(factory: Callable[[], Any]) -> bool:
    """Whether it makes a recipe, whatever its name; a model is made among fake tensors, which takes no memory."""
    if getattr(factory, "__name__", "") == "recipe":
        return isinstance(factory(), Recipe)
    try:
        with fake_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return isinstance(factory(), Recipe)
    except Exception:
        # A model that needs real numbers to be made: whoever asks about it will see why.
        return False


def _factory_specimen(factory: Callable[[], Any], word: str, *, is_causal: bool) -> Trainable:
    made = factory()
    if not isinstance(made, tuple | list):
        raise UsageError(
            f"what {word} gives cannot be verified",
            got=type(made).__name__,
            try_="return model, (x, y); or a recipe",
        )
    return make_trainable(made, name=word, is_causal=is_causal)


def _recipe_subject(recipe: Recipe, words: Sequence[str], *, file: Path | None) -> TrainableSpec:
    config = resolve_config(recipe.Config, words, file=file).config
    workload = recipe.describe(config)
    data = recipe.data(config)

    def micro(size: int) -> MicroBatch:
        source = open_source(data.train, CpuDevice(), global_batch_size=size, seed=config.seed, is_resident=False)
        batch = next(iter(source.batches(Position())))
        return next(iter(source.micro_batches(batch, micro_batch=size, length_mode="fixed")))

    def make() -> Trainable:
        model = recipe.model(config, data)
        return Trainable(
            model=model,
            loss=partial(recipe.loss, model),
            make_batch=micro,
            batch_size=config.global_batch_size,
            optimizer=recipe.optimizer(config),
            outputs=partial(recipe.outputs, model) if recipe.supports("outputs") else None,
        )

    return TrainableSpec(name=recipe.name, make=make, workload=workload)


def check(
    what: str | Callable[[], Any],
    words: Sequence[str] = (),
    *,
    device: str | None = None,
    machine: str | Machine | None = None,
    config: Path | None = None,
    is_causal: bool = False,
) -> CheckResult:
    """Traces two steps of a model as a device would make them, and lists what would go wrong, with its lines.

    `what` is a word as for `whet check`, or a function that returns (model, inputs) or (model, inputs, loss).
    """
    from torch import nn

    if isinstance(what, nn.Module):
        raise UsageError(
            "a check makes the model itself, among fake tensors",
            got=f"a {type(what).__name__} that is made already",
            try_="a function that returns (model, inputs) or (model, inputs, loss)",
        )
    known = load_machine(machine) if isinstance(machine, str) else machine
    if known and device not in (None, "cpu", *(chip.kind for chip in known.accelerators)):
        raise UsageError(
            "that machine has no such device",
            got=f"--for {device} --machine {known.name}",
            try_=f"--for {_default_device(known)}, or another machine",
        )
    # Hundreds of thousands of small objects come and go: looking for garbage among them took a tenth of the time. A run
    # keeps the collector out of its steps too, so what is alive when is the same.
    with gc_disabled():
        if isinstance(what, str):
            subject = load_subject(what, words, file=config, is_causal=is_causal)
        else:
            name = getattr(what, "__name__", "the model")
            subject = TrainableSpec(name=name, make=partial(_make_specimen, what, name, is_causal=is_causal))
        return check_subject(subject, device=device or _default_device(known), machine=known)


def _make_specimen(factory: Callable[[], Any], name: str, *, is_causal: bool) -> Any:
    return make_trainable(factory(), name=name, is_causal=is_causal)


def _default_device(machine: Machine | None) -> str:
    """That of the machine; without one, the device on which most goes wrong."""
    if machine is None:
        return "mps"
    return machine.accelerators[0].kind if machine.accelerators else "cpu"


def compare(
    what: Any,
    inputs: Any = None,
    loss: Callable[..., Any] | None = None,
    *,
    words: Sequence[str] = (),
    devices: Sequence[str] = (),
    steps: int = 20,
    size: int | None = None,
    precisions: Sequence[str] | None = None,
    out: str | Path | None = None,
) -> ParityResult:
    """Compares a device with the CPU: loss, every gradient, the update, some steps, twice the same, lower precision.

    `what` is the name of a recipe (with settings in `words`), a file, or a model. A model comes with example `inputs`,
    a tuple or dict of tensors, and perhaps a `loss`, which is called with the model and the inputs; it stays as it is.
    `devices=["cpu", "mps"]` names the device; without it the best one here. A wrong operator is named in
    `result.located`, and a program that shows it is written to `out`.
    """
    if isinstance(what, str):
        if inputs is not None or loss is not None:
            raise UsageError("a recipe or a file has its own inputs", got="inputs for " + what, try_="words=[...]")
        subject = load_subject(what, words)
    elif isinstance(what, TrainableSpec):
        subject = what
    else:
        subject = model_subject(what, inputs, loss)
    return compare_devices(
        subject,
        devices=devices,
        steps=steps,
        size=size,
        precisions=precisions,
        out=None if out is None else Path(out),
    )


def model_subject(model: Any, inputs: Any, loss: Callable[..., Any] | None = None) -> TrainableSpec:
    """A model at hand; copies of it are verified."""
    name = type(model).__name__

    def make() -> Trainable:
        parts = (copy.deepcopy(model), inputs) if loss is None else (copy.deepcopy(model), inputs, loss)
        return make_trainable(parts, name=name)

    return TrainableSpec(name=name, make=make)
