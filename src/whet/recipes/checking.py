"""Will a model or a recipe train on a device? The short call behind `whet check`."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError
from whet.base.garbage import no_garbage_collection
from whet.machine.facts import Machine
from whet.machine.known import load_machine
from whet.recipes.subject import load_subject
from whet.verify.preflight.check import Checked
from whet.verify.preflight.check import check as check_subject
from whet.verify.subject import Subject, specimen_of


def check(
    what: str | Callable[[], Any],
    words: Sequence[str] = (),
    *,
    device: str | None = None,
    machine: str | Machine | None = None,
    config: Path | None = None,
    is_causal: bool = False,
) -> Checked:
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
            try_=f"--for {_device_of(known)}, or another machine",
        )
    # Hundreds of thousands of small objects come and go: looking for garbage among them took a tenth of the time. A run
    # keeps the collector out of its steps too, so what is alive when is the same.
    with no_garbage_collection():
        if isinstance(what, str):
            subject = load_subject(what, words, file=config, is_causal=is_causal)
        else:
            name = getattr(what, "__name__", "the model")
            subject = Subject(name=name, make=partial(_made, what, name, is_causal=is_causal))
        return check_subject(subject, device=device or _device_of(known), machine=known)


def _made(factory: Callable[[], Any], name: str, *, is_causal: bool) -> Any:
    return specimen_of(factory(), word=name, is_causal=is_causal)


def _device_of(machine: Machine | None) -> str:
    """That of the machine; without one, the device on which most goes wrong."""
    if machine is None:
        return "mps"
    return machine.accelerators[0].kind if machine.accelerators else "cpu"
