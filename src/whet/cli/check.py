"""whet check: will this model train on that device?"""

from pathlib import Path
from typing import Annotated, Literal

import typer


def check(
    what: Annotated[
        str,
        typer.Argument(metavar="MODEL|RECIPE", help="text, a Python file with model() or recipe(), or module:factory."),
    ],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings of a recipe, such as arch.layers=4.")
    ] = None,
    device: Annotated[
        Literal["mps", "cuda", "cpu"] | None,
        typer.Option("--for", help="The device; that of the machine if not given, or mps."),
    ] = None,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="With its memory and its known faults: m2-air-8gb.")
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="The model is said to be causal: see whether it is.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 for warnings too.")] = False,
    config: Annotated[
        Path | None, typer.Option("--config", "--config-name", metavar="FILE", help="Settings from TOML or YAML.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON.")] = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Print them as SARIF 2.1.0.")] = False,
    github: Annotated[bool, typer.Option("--github", help="Print them as annotations of GitHub.")] = False,
) -> None:
    """Find out on any computer whether a model will train on a device.

    \b
    whet check text --machine m2-air-8gb
    whet check my_model.py --for mps
    whet check package.models:make --for cuda --strict

    A model is a function that returns (model, inputs) or (model, inputs, loss); loss is called with the model and the
    inputs. Two optimizer steps are traced among fake tensors, so that a large model takes seconds and no memory. Told
    are operators that are missing, number formats and shapes that are refused, places where Python waits for the
    device, weights in a form that goes wrong, and the known faults of the machine that the model meets: each with the
    line it comes from and what to try.

    Exit code 1: something would stop the training; with --strict, also something that slows it or may be wrong.
    """
    from whet.api.verify import check as find_out
    from whet.base.errors import UsageError
    from whet.cli import console
    from whet.verify.preflight.render import render_github, render_sarif, render_text

    if json + sarif + github > 1:
        raise UsageError("one form at a time", got="several of --json, --sarif and --github", try_="one of them")
    with console.user_output_to_stderr():
        found = find_out(what, words or (), device=device, machine=machine, config=config, is_causal=causal)
    if json:
        console.result_json(found.as_json())
    elif sarif:
        console.result_json(render_sarif(found))
    elif github:
        console.result("\n".join(render_github(found)))
    else:
        console.result("\n".join(render_text(found)))
    if not found.passes(is_strict=strict):
        raise typer.Exit(1)
