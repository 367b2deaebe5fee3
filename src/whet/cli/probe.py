"""`whet probe`: show the properties of this machine or a known one."""

from typing import Annotated

import typer

from whet.cli import output


def probe(
    json: Annotated[bool, typer.Option("--json", help="Print all facts as JSON, which --machine can read.")] = False,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME|CHIP,memory=GB|FILE", help="Show a known machine instead of this one.")
    ] = None,
) -> None:
    """Show this machine, and why MPS or CUDA is missing.

    \b
    whet probe
    whet probe --json > my-mac.json
    whet probe --machine m2-air-8gb
    whet probe --machine m1-pro,memory=16
    """
    from whet.machine.known import load_machine, nearest_line
    from whet.machine.probe import probe as probe_machine
    from whet.machine.render import machine_lines, system_state_lines

    if machine is not None:
        known = load_machine(machine)
        if json:
            output.result_json(known.as_json())
        else:
            output.result("\n".join(machine_lines(known)))
        return
    probed = probe_machine()
    if json:
        output.result_json(probed.as_json())
    else:
        lines = [*machine_lines(probed.machine), *nearest_line(probed.machine)]
        output.result("\n".join([*lines, *system_state_lines(probed.system_state)]))
