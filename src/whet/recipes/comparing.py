"""`whet.compare`: is what a model computes on a device right? For a recipe, a file, or a model at hand."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError
from whet.recipes.subject import load_subject
from whet.verify.parity.comparing import Comparison, compare_subject
from whet.verify.subject import Specimen, Subject, specimen_of


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
) -> Comparison:
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
    elif isinstance(what, Subject):
        subject = what
    else:
        subject = subject_of(what, inputs, loss)
    return compare_subject(
        subject,
        devices=devices,
        steps=steps,
        size=size,
        precisions=precisions,
        out=None if out is None else Path(out),
    )


def subject_of(model: Any, inputs: Any, loss: Callable[..., Any] | None = None) -> Subject:
    """A model at hand; copies of it are verified."""
    name = type(model).__name__

    def make() -> Specimen:
        parts = (copy.deepcopy(model), inputs) if loss is None else (copy.deepcopy(model), inputs, loss)
        return specimen_of(parts, word=name)

    return Subject(name=name, make=make)
