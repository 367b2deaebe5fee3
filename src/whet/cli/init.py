"""`whet init`: write a commented example recipe."""

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from whet.base.errors import UsageError
from whet.cli import output


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The Python file to create.")],
) -> None:
    """Write a commented recipe as a starting point.

    \b
    whet init my_recipe.py
    whet train my_recipe.py
    """
    from whet.run.durable import write_file

    if file.suffix != ".py":
        raise UsageError("a recipe is a Python file", got=str(file), try_=f"whet init {file}.py")
    if file.exists():
        raise UsageError("the file already exists", got=str(file), try_="another name")
    write_file(file, data=resources.files("whet.recipes").joinpath("starter.py").read_bytes())
    output.note(f"{file} is a complete recipe; to try it:\n  whet train {file}")
