"""whet compare: is what a model computes on this device right?"""

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from whet.verify.parity.compare import ParityResult
    from whet.verify.parity.locate import WrongOperator


def compare(
    what: Annotated[
        str, typer.Argument(metavar="MODEL|RECIPE", help="text, FILE.py with recipe() or model(), FILE.py:factory.")
    ],
    words: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="A recipe's settings.")] = None,
    devices: Annotated[str | None, typer.Option(help="cpu,mps or cpu,cuda; the best device here if not given.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of the trajectory.")] = 20,
    size: Annotated[int | None, typer.Option(help="Samples in the batch; 32 at most if not given.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp16, tf32 or several: must agree with fp32. bf16 is shown anyway.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "--config-name", metavar="FILE", help="Settings from TOML or YAML.")
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE.py", help="Where a program goes that shows a wrong operator.")
    ] = Path("whet_compare_repro.py"),
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Compare a device with the CPU: same weights, same batch.

    \b
    whet compare text
    whet compare my_model.py --devices cpu,mps
    whet compare my_recipe.py lr=1e-2 --steps 50 --precision bf16,fp16

    Loss, every gradient, the update, a number of steps; twice the same bits; lower precision. If something differs,
    every operator of a step is replayed on the CPU from its own inputs: the first wrong one is named, and a program
    that shows it, with torch alone, is written. Dropout is off. Exit code 1: something differs.
    """
    from whet.api.verify import load_subject
    from whet.cli import console
    from whet.verify.parity.compare import compare_devices, validate_compare_options

    names = _split(devices) or []
    precisions = _split(precision)
    validate_compare_options(devices=names, steps=steps, size=size, precisions=precisions, out=out)
    with console.user_output_to_stderr():
        found = compare_devices(
            load_subject(what, words or (), file=config),
            devices=names,
            steps=steps,
            size=size,
            precisions=precisions,
            out=out,
            progress=console.note,
        )
    if json:
        console.result_json(found.as_json())
    else:
        console.result("\n".join(_lines(found)))
    if not found.agrees:
        raise typer.Exit(1)


_NAMES = {
    "loss": "loss",
    "gradients": "gradients ({tensors})",
    "buffers": "buffers ({tensors})",
    "update": "update ({tensors})",
    "trajectory": "{steps} steps",
}


def _split(words: str | None) -> list[str] | None:
    return None if words is None else [word.strip() for word in words.split(",")]


def _lines(found: "ParityResult") -> list[str]:
    from whet.cli import console

    reference = found.reference.replace("cpu ", "the CPU in ")
    is_alone = found.device == "cpu"
    left = "float32 on the CPU" if is_alone else found.device + (" (SIMULATED)" if found.is_virtual else "")
    lines = [f"{found.name}: {left} against {reference}, {found.size} samples, dropout off"]
    if is_alone and found.rows:
        lines.append("no other device is compared: the CPU's rounding is; --devices cpu,mps or cpu,cuda compares one")
    lines += ["", console.table(("what", "error", "bound", "verdict"), _rows(found)), ""]
    lines += [f"note: {note}" for note in found.notes]
    located = found.located
    if located is not None and located.culprit is not None:
        lines.append(_culprit_line(located.culprit))
        others = [f"{name} ({count} calls)" for name, count in list(located.wrong.items())[1:6]]
        if others:
            lines.append(f"also wrong, each from its own inputs: {', '.join(others)}")
        if located.reproducer is not None:
            lines.append(f"reproduce: python {shlex.quote(str(located.reproducer))}")
    elif located is not None:
        lines.append(f"no single operator is wrong: {located.num_checked} were replayed on the CPU")
    if found.agrees and not found.rows:
        lines.append("nothing disagrees, but float32 itself was compared with nothing: no other device, no float64")
    else:
        lines.append("everything agrees" if found.agrees else "something differs")
    return lines


def _rows(found: "ParityResult") -> list[tuple[str, str, str, str]]:
    rows = []
    for row in found.rows:
        name = _NAMES[row.what].format(tensors=row.num_tensors, steps=found.steps)
        worst = f", most in {row.worst}" if row.worst and not row.agrees else ""
        own = "" if row.own_error is None else f" (the CPU's own: {row.own_error:.1e})"
        verdict = ("agrees" if row.agrees else f"DIFFERS{worst}") + own
        rows.append((name, _number(row.error), f"{row.bound:.1e}", verdict))
    twice = found.determinism
    if twice.is_same:
        verdict = f"the same bits in {twice.steps} steps"
    else:
        how = "by rounding, as sums on a GPU may" if twice.is_rounding else "DIFFERS"
        verdict = f"{how}: first {twice.first}, {twice.num_different} of {twice.num_tensors} tensors"
    rows.append(("run twice", _number(twice.error), "0", verdict))
    for one in found.precisions:
        verdict = "agrees with fp32" if one.agrees else f"too coarse, most in {one.worst}"
        loss = f"; loss {_number(one.loss_error)} of {one.loss_bound:.1e}"
        rows.append((f"{one.precision} gradients", _number(one.gradient_error), f"{one.bound:.1e}", verdict + loss))
    return rows


def _number(error: float) -> str:
    return f"{error:.1e}" if math.isfinite(error) else "not comparable"


def _culprit_line(culprit: "WrongOperator") -> str:
    place = "" if culprit.module is None else f" in {culprit.module or 'the model itself'}"
    place += f" ({culprit.line})" if culprit.line else ""
    what = f"first wrong operator: {culprit.operator}" if culprit.operator else "first wrong module:"
    phase = "" if culprit.phase == "forward" else f", {culprit.phase}"
    phase += f", step {culprit.step}" if culprit.step > 1 else ""
    return f"{what}{place}{phase}: largest relative error {_number(culprit.error)}; bound {culprit.bound:.1e}"
