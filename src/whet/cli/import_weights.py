"""`whet import`: convert weights of other tools to safetensors."""

from pathlib import Path
from typing import Annotated

import typer


def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .pt, .pth, .bin, .ckpt or .safetensors file.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The new folder; it must not exist.")],
    key: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where in the file the weights lie, such as model or ema.shadow.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print what was taken and left out, as JSON.")] = False,
) -> None:
    """Weights from elsewhere as safetensors, for files you trust.

    \b
    whet import model.pt --out imported/model
    whet train my_recipe.py init_from=imported/model

    A torch file is read by a process of its own, with limits, and only tensors are taken; one that asks for anything
    else is refused. That is a fence, no proof: import files that you trust. Nothing else in whet reads such files.
    """
    from whet.base.units import format_bytes
    from whet.checkpoint.importer import import_weights
    from whet.cli import console

    made = import_weights(file, out, key=key)
    if json:
        console.result_json(made.as_json())
        return
    place = f" from {made.key!r}" if made.key else ""
    lines = [f"taken     {len(made.taken):,} tensors, {format_bytes(made.size)}{place}"]
    if made.wrapper:
        lines.append(f"names     without {made.wrapper!r}, which each began with")
    if made.left_out:
        names = ", ".join(f"{name} ({why})" for name, why in list(made.left_out.items())[:5])
        more = f" and {len(made.left_out) - 5:,} more" if len(made.left_out) > 5 else ""
        lines.append(f"left out  {names}{more}")
    lines.append(f"folder    {out}; init_from={out} starts a run with these weights")
    console.result("\n".join(lines))
