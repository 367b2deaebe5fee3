"""Whose is a source file: yours, a library's, a recipe's, torch's, Python's or whet's own?"""

import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Author = Literal["you", "library", "recipe", "torch", "python", "whet"]

WHET = Path(__file__).parents[1]
_LIBRARIES = ("site-packages", "dist-packages")


@cache
def author_of(file: str) -> Author:
    """Who wrote what is in this file, by its place."""
    path = Path(file)
    if file.startswith("<"):
        return "python"
    if path.is_relative_to(WHET):
        return "recipe" if path.is_relative_to(WHET / "recipes") else "whet"
    if any(path.is_relative_to(place) for place in _torch_places()):
        return "torch"
    if any(name in path.parts for name in _LIBRARIES):
        return "library"
    return "python" if path.is_relative_to(sysconfig.get_path("stdlib")) else "you"


@cache
def _torch_places() -> tuple[str, ...]:
    """Where torch lies, found without importing it."""
    found = find_spec("torch")
    return tuple(found.submodule_search_locations or ()) if found else ()
