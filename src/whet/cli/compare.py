"""`whet compare`: compare training on a device with the CPU."""

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli import output
from whet.cli.options import ConfigFile, Json, Settings

if TYPE_CHECKING:
    from whet.verify.parity.compare import ParityResult
    from whet.verify.parity.locate import WrongOperator


def compare(
    target: Annotated[
        str, typer.Argument(metavar="MODEL|RECIPE", help="text, FILE.py with recipe() or model(), FILE.py:factory.")
    ],
    settings: Settings = None,
    devices: Annotated[
        str | None, typer.Option(help="cpu,mps or cpu,cuda. Default: the best device of this machine.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of the compared training.")] = 20,
    size: Annotated[int | None, typer.Option(help="Samples in the batch. Default: at most 32.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Precisions that must agree with fp32: bf16, fp16, tf32 or several. bf16 is always reported."
        ),
    ] = None,
    config: ConfigFile = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE.py", help="Where to write a program that reproduces a wrong operator.")
    ] = Path("whet_compare_repro.py"),
    json: Json = False,
) -> None:
    """Compare a device with the CPU, with the same weights and batch.

    \b
    whet compare text
    whet compare my_model.py --devices cpu,mps
    whet compare my_recipe.py lr=1e-2 --steps 50 --precision bf16,fp16

    Compares the loss, every gradient, the update and a number of steps, checks that the steps are deterministic, and
    tries lower precision. If something differs, every operator of a step is replayed on the CPU with the inputs that it
    had on the device, to find the first wrong operator, and a program that reproduces the error with torch alone is
    written. Random numbers are drawn on the CPU and reused on the device. The exit code is 1 if something differs, and
    3 if the devices cannot be compared.
    """
    from whet.api.verify import load_spec
    from whet.verify.parity.compare import compare_devices, validate_compare_options

    names = _split(devices) or []
    precisions = _split(precision)
    validate_compare_options(devices=names, steps=steps, size=size, precisions=precisions, out=out)
    # Redirect the output of user code, so that stdout contains only the result.
    with output.user_output_to_stderr():
        result = compare_devices(
            load_spec(target, settings or (), file=config),
            devices=names,
            steps=steps,
            size=size,
            precisions=precisions,
            out=out,
            progress=output.note,
        )
    if json:
        output.result_json(result.as_json())
    else:
        output.result("\n".join(render_comparison(result)))
    if not result.agrees:
        raise typer.Exit(1 if result.verdict == "differs" else CANNOT_JUDGE_EXIT_CODE)


CANNOT_JUDGE_EXIT_CODE = 3
_ROW_NAMES = {
    "loss": "loss",
    "gradients": "gradients ({tensors})",
    "draws": "parameters of draws ({tensors})",
    "buffers": "buffers ({tensors})",
    "update": "update ({tensors})",
    "trajectory": "{steps} steps",
}


def _split(names: str | None) -> list[str] | None:
    return None if names is None else [name.strip() for name in names.split(",")]


def render_comparison(result: "ParityResult") -> list[str]:
    """Return the lines of a comparison: a table, notes, and a conclusion."""
    reference = result.reference.replace("cpu ", "the CPU in ")
    is_cpu_only = result.device == "cpu"
    name = "float32 on the CPU" if is_cpu_only else result.device + (" (SIMULATED)" if result.is_virtual else "")
    lines = [f"{result.name}: {name} against {reference}, {result.size} samples"]
    if result.num_draws:
        lines[0] += f", the same {result.num_draws} random draws on both sides"
    if is_cpu_only and result.rows:
        lines.append("only the CPU's rounding is compared; --devices cpu,mps or cpu,cuda compares a device")
    lines += ["", output.table(("what", "error", "bound", "verdict"), _rows(result)), ""]
    lines += [f"note: {note}" for note in result.notes]
    located = result.located
    if located is not None and located.culprit is not None:
        lines.append(_culprit_line(located.culprit))
        others = [f"{name} ({count} calls)" for name, count in list(located.wrong.items())[1:6]]
        if others:
            lines.append(f"also wrong, each from its own inputs: {', '.join(others)}")
        if located.reproducer is not None:
            lines.append(f"reproduce: python {shlex.quote(str(located.reproducer))}")
    elif located is not None:
        lines.append(f"no single operator is wrong: {located.num_checked} were replayed on the CPU")
    if result.verdict == "cannot judge":
        lines += [f"cannot be judged: {obstacle}" for obstacle in result.obstacles]
    else:
        lines.append("everything agrees" if result.agrees else "something differs")
    return lines


def _rows(result: "ParityResult") -> list[tuple[str, str, str, str]]:
    rows = []
    for row in result.rows:
        steps = f"{row.steps} of {result.steps}" if row.steps not in (None, result.steps) else result.steps
        name = _ROW_NAMES[row.what].format(tensors=row.num_tensors, steps=steps)
        worst = f", most in {row.worst}" if row.worst and not row.agrees else ""
        own = "" if row.own_error is None else f" (the CPU's own error: {row.own_error:.1e})"
        verdict = {"agrees": "agrees", "differs": f"DIFFERS{worst}", "cannot judge": "cannot be judged"}[row.verdict]
        verdict += own
        rows.append((name, _number(row.error), f"{row.bound:.1e}", verdict))
    repeated = result.determinism
    if repeated.is_same:
        verdict = f"the same bits in {repeated.steps} steps"
    else:
        how = "differs by rounding, as sums on a GPU may" if repeated.is_rounding else "DIFFERS"
        verdict = f"{how}: first {repeated.first}, {repeated.num_different} of {repeated.num_tensors} tensors"
    rows.append(("run twice", _number(repeated.error), "0", verdict))
    for one in result.precisions:
        verdict = "agrees with fp32" if one.agrees else f"too inaccurate, most in {one.worst}"
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
