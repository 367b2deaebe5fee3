"""The origin of a source file: the user, a library, a recipe, torch, Python or whet."""

import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

CodeOrigin = Literal["you", "library", "recipe", "torch", "python", "whet"]

_WHET_FOLDER = Path(__file__).parents[1]
_LIBRARY_FOLDERS = ("site-packages", "dist-packages")


@cache
def code_origin(file: str) -> CodeOrigin:
    """Who wrote what is in this file, by its place."""
    path = Path(file)
    if file.startswith("<"):
        return "python"
    if path.is_relative_to(_WHET_FOLDER):
        return "recipe" if path.is_relative_to(_WHET_FOLDER / "recipes") else "whet"
    if any(path.is_relative_to(place) for place in _torch_folders()):
        return "torch"
    if any(name in path.parts for name in _LIBRARY_FOLDERS):
        return "library"
    return "python" if path.is_relative_to(sysconfig.get_path("stdlib")) else "you"


@cache
def _torch_folders() -> tuple[str, ...]:
    """Where torch lies, found without importing it."""
    found = find_spec("torch")
    return tuple(found.submodule_search_locations or ()) if found else ()
