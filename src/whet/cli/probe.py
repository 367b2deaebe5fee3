"""whet probe: what this machine is, and why MPS or CUDA is not available."""

from typing import Annotated

import typer


def probe(
    json: Annotated[bool, typer.Option("--json", help="Print all facts as JSON; --machine reads this back.")] = False,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Show a known machine instead of this one.")
    ] = None,
) -> None:
    """What this machine is, and why a device is missing.

    \b
    whet probe
    whet probe --json > my-mac.json
    whet probe --machine m2-air-8gb
    """
    from whet.cli import console
    from whet.machine.known import load_machine
    from whet.machine.probe import probe as probe_here
    from whet.machine.render import conditions_lines, machine_lines

    if machine is not None:
        known = load_machine(machine)
        if json:
            console.result_json(known.as_json())
        else:
            console.result("\n".join(machine_lines(known)))
        return
    found = probe_here()
    if json:
        console.result_json(found.as_json())
    else:
        console.result("\n".join([*machine_lines(found.machine), *conditions_lines(found.conditions)]))
