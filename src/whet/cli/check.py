"""`whet check`: check whether a model can be trained on a device."""

from typing import Annotated, Literal

import typer

from whet.base.errors import UsageError
from whet.cli import output
from whet.cli.options import ConfigFile, Json, Settings


def check(
    target: Annotated[
        str,
        typer.Argument(metavar="MODEL|RECIPE", help="text, a Python file with model() or recipe(), or module:factory."),
    ],
    settings: Settings = None,
    device: Annotated[
        Literal["mps", "cuda", "cpu"] | None,
        typer.Option("--for", help="The device. Default: that of --machine, or mps."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="Consider the memory and known faults of a machine, such as m2-air-8gb."
        ),
    ] = None,
    torch: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="A torch version, such as 2.15. It need not be installed."),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Check that the model is causal.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 for warnings too.")] = False,
    config: ConfigFile = None,
    json: Json = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Print the findings as SARIF 2.1.0.")] = False,
) -> None:
    """Check whether a model can be trained on a device.

    \b
    whet check text --machine m2-air-8gb
    whet check my_model.py --for mps
    whet check package.models:make --for cuda --strict
    whet check my_model.py --torch 2.15

    The device itself is not needed. MODEL is a function that returns (model, inputs) or (model, inputs, loss), where
    loss is called with the model and the inputs. Two optimizer steps are traced with fake tensors, so that checking
    even a large model takes only seconds and almost no memory. The check reports missing operators, unsupported dtypes
    and shapes, calls that make Python wait for the device, code that requires CUDA, weights in a problematic layout,
    and known faults of the machine that affect the model. Each finding has a line number and a suggested fix.

    The exit code is 1 if something would stop the run, and with --strict also if something slows it down or may be
    wrong.
    """
    from whet.api.verify import check as check_model
    from whet.verify.preflight.render import render_sarif, render_text

    if json and sarif:
        raise UsageError("choose one output format", got="--json and --sarif", try_="one of them")
    with output.user_output_to_stderr():
        result = check_model(
            target, settings or (), device=device, machine=machine, config=config, is_causal=causal, torch=torch
        )
    if json:
        output.result_json(result.as_json())
    elif sarif:
        output.result_json(render_sarif(result))
    else:
        output.result("\n".join(render_text(result)))
    if not result.passes(is_strict=strict):
        raise typer.Exit(1)
