"""whet init: a commented recipe to start from."""

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The Python file to write; it must not exist.")],
) -> None:
    """Write a commented recipe of your own.

    \b
    whet init my_recipe.py
    whet train my_recipe.py
    """
    from whet.base.errors import UsageError
    from whet.cli import console
    from whet.run.durable import write_file

    if file.suffix != ".py":
        raise UsageError("a recipe is a Python file", got=str(file), try_=f"whet init {file}.py")
    if file.exists():
        raise UsageError("the file is there already", got=str(file), try_="another name")
    write_file(file, data=resources.files("whet.recipes").joinpath("starter.py").read_bytes())
    console.note(f"{file} is a recipe that trains as it is; to try it:\n  whet train {file}")
