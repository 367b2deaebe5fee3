"""Is what a model computes on a device right? Everything that is compared, and where it goes wrong first."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from whet.base.errors import UsageError, WhetError
from whet.base.record import Record
from whet.device import virtual_mac
from whet.device.abstract import AbstractDevice
from whet.device.open import open_device
from whet.verify.parity.determinism import Determinism, run_twice
from whet.verify.parity.locating import Located, locate
from whet.verify.parity.placing import Bench
from whet.verify.parity.precision_report import GRADIENT_BOUNDS, PrecisionAgreement, precision_agreement
from whet.verify.parity.reproducer import refuse_foreign
from whet.verify.parity.training import Compared, compare_training
from whet.verify.subject import Subject


class Comparison(Record):
    """A device against the CPU."""

    name: str
    device: str
    reference: str
    """cpu float64, or cpu float32 for a model that does not run in float64"""
    size: int
    """samples in the batch"""
    steps: int
    rows: tuple[Compared, ...]
    determinism: Determinism
    precisions: tuple[PrecisionAgreement, ...] = ()
    located: Located | None = None
    """Where it goes wrong; looked for only if something differs."""
    notes: tuple[str, ...] = ()
    is_virtual: bool = False
    """Whether the device is simulated."""
    asked_precision: bool = False

    @property
    def agrees(self) -> bool:
        """Whether nothing differs. A precision counts only if it was asked for."""
        is_coarse = self.asked_precision and not all(one.agrees for one in self.precisions)
        return all(row.agrees for row in self.rows) and self.determinism.agrees and not is_coarse

    def as_json(self) -> dict[str, Any]:
        return {"agrees": self.agrees, **super().as_json()}


def refuse_unusable(
    *,
    devices: Sequence[str],
    steps: int,
    size: int | None,
    precisions: Sequence[str] | None,
    out: Path | None,
) -> None:
    """What cannot be meant is refused before anything is loaded."""
    for word, number in (("--steps", steps), ("--size", 1 if size is None else size)):
        if number < 1:
            raise UsageError(f"{word} must be at least 1", got=str(number), try_=f"{word} 20")
    device = choose_device(devices)
    if "tf32" in choose_precisions(precisions) and device.kind != "cuda":
        raise UsageError("only CUDA rounds products to tf32", got=f"--precision tf32 on {device.kind}", try_="bf16")
    if out is not None:
        refuse_foreign(out)


def choose_device(names: Sequence[str]) -> AbstractDevice:
    """The device that is compared with the CPU; the CPU itself where there is no other."""
    if len(set(names)) < len(names):
        raise UsageError("a device is named twice", got=",".join(names), try_="--devices cpu,mps")
    others = [name for name in names if name != "cpu"]
    if len(others) > 1:
        raise UsageError("one device is compared with the CPU", got=",".join(names), try_=f"--devices cpu,{others[0]}")
    return open_device(others[0] if others else "cpu" if names else "auto").device


def choose_precisions(names: Sequence[str] | None) -> tuple[str, ...]:
    """Those that were asked for; bf16 where nobody asked."""
    for name in names or ():
        if name not in GRADIENT_BOUNDS:
            raise UsageError("no such precision to compare", got=name, try_=" or ".join(GRADIENT_BOUNDS))
    return ("bf16",) if names is None else tuple(dict.fromkeys(names))


def compare_subject(
    subject: Subject,
    *,
    devices: Sequence[str] = (),
    steps: int = 20,
    size: int | None = None,
    precisions: Sequence[str] | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """The same weights and the same batch on the CPU and on a device: see docs/compare.md."""
    refuse_unusable(devices=devices, steps=steps, size=size, precisions=precisions, out=out)
    wanted, device = choose_precisions(precisions), choose_device(devices)
    bench = Bench(subject, size=size)
    if device.kind == "cpu" and bench.number_formats - {torch.float32}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in bench.number_formats))
        raise UsageError(
            "on the CPU alone a model in float32 is compared with float64",
            got=f"weights in {names}",
            try_="--devices cpu,mps or cpu,cuda; or the model in float32",
        )
    parity = compare_training(bench, device, steps=steps, say=say)
    say(f"{device.kind}, the same steps twice ...")
    determinism = run_twice(bench, device)
    found, notes = _precisions(bench, device, wanted, is_asked=precisions is not None, say=say)
    located = None
    wrong = [row.what for row in parity.rows if not row.agrees]
    if wrong:
        say(f"{', '.join(wrong)} differ: looking at every operator on {device.kind} ...")
        # What is wrong in the first pass shows in its first step; the update of the check makes two.
        located = locate(bench, device, steps={"update": 2, "trajectory": steps}.get(wrong[0], 1), out=out)
    if parity.why_not_wide is not None:
        notes.append(f"the model does not run in float64: {parity.why_not_wide}")
    if located is not None and located.draws:
        notes.append(f"random numbers differ between devices: {', '.join(located.draws)} cannot be compared")
    if located is not None and located.unknown:
        notes.append(f"not judged, since the CPU has no such operator: {', '.join(located.unknown)}")
    return Comparison(
        name=subject.name,
        device=str(device.place),
        reference=parity.reference,
        size=bench.size,
        steps=steps,
        rows=parity.rows,
        determinism=determinism,
        precisions=found,
        located=located,
        notes=tuple(notes),
        is_virtual=device.kind == "mps" and virtual_mac.installed() is not None,
        asked_precision=precisions is not None,
    )


def _precisions(
    bench: Bench, device: AbstractDevice, wanted: Sequence[str], *, is_asked: bool, say: Callable[[str], None]
) -> tuple[tuple[PrecisionAgreement, ...], list[str]]:
    found, notes = [], []
    for precision in wanted:
        say(f"{precision} on {device.kind} ...")
        try:
            with bench.at(device) as placed:
                found.append(precision_agreement(placed.model, placed.specimen.loss, placed.micro, device, precision))
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if is_asked:
                got = str(error).splitlines()[0][:200]
                raise WhetError(f"the model does not run in {precision} on {device.kind}", got=got) from error
            notes.append(f"the model does not run in {precision} on {device.kind}")
    return tuple(found), notes
