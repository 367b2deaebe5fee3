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
    """Return the origin of the code in a file, derived from its path."""
    path = Path(file)
    if file.startswith("<"):
        return "python"
    if path.is_relative_to(_WHET_FOLDER):
        return "recipe" if path.is_relative_to(_WHET_FOLDER / "recipes") else "whet"
    # Check torch before libraries, because torch is usually installed in site-packages too.
    if any(path.is_relative_to(folder) for folder in _torch_folders()):
        return "torch"
    if any(name in path.parts for name in _LIBRARY_FOLDERS):
        return "library"
    return "python" if path.is_relative_to(sysconfig.get_path("stdlib")) else "you"


@cache
def _torch_folders() -> tuple[str, ...]:
    """Return the folders in which torch is installed, without importing it."""
    spec = find_spec("torch")
    return tuple(spec.submodule_search_locations or ()) if spec else ()
