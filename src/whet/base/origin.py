"""The origin of a source file: the user, a library, a recipe, torch, Python or whet."""

import inspect
import sys
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException, extract_tb
from types import FrameType
from typing import Literal

CodeOrigin = Literal["you", "library", "recipe", "torch", "python", "whet"]

_WHET_FOLDER = Path(__file__).parents[1]
_LIBRARY_FOLDERS = ("site-packages", "dist-packages")
# Reports show at most 4,000 characters of a text.
_MAX_FRAMES, _MAX_TRACEBACK = 20, 3_900


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


def is_installed_file(file: str) -> bool:
    """Return whether a file belongs to torch, another library or Python, and not to the user or to whet."""
    return not file.startswith("<") and code_origin(file) in ("library", "torch", "python")


def user_frames(error: BaseException) -> list[FrameSummary]:
    """Return the frames of a traceback that are in the user's code, the innermost one last."""
    return [frame for frame in extract_tb(error.__traceback__) if code_origin(frame.filename) == "you"]


def failure_frames(error: BaseException) -> tuple[FrameSummary | None, FrameSummary | None]:
    """Return the innermost frame of the user's code in a traceback, and the innermost frame of code that it called.

    The second is in a library, a recipe or a public module of torch. It is None if the user's own line raised.
    Internal files of torch are skipped.
    """
    own = inner = None
    for frame in extract_tb(error.__traceback__):
        origin = code_origin(frame.filename)
        if origin == "you":
            own, inner = frame, None
        elif origin in ("library", "recipe") or (origin == "torch" and not _is_internal(frame.filename)):
            inner = frame
    return own, inner


def frame_name(frame: FrameSummary) -> str:
    """Return the location of a frame as "file.py:12 in function()"."""
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}()"


def format_traceback(error: BaseException) -> str:
    """Format the innermost frames of an exception's traceback, with shortened paths and without whet's own frames."""
    summary = TracebackException.from_exception(error, limit=-_MAX_FRAMES, lookup_lines=True)
    todo: list[TracebackException | None] = [summary]
    while todo:
        if (one := todo.pop()) is not None:
            todo += [one.__cause__, one.__context__]
            # whet's own frames do not help to find an error in other code. Keep them if whet itself raised.
            if one.stack and code_origin(one.stack[-1].filename) != "whet":
                one.stack = StackSummary.from_list([f for f in one.stack if code_origin(f.filename) != "whet"])
            for frame in one.stack:
                frame.filename = _short_file(frame.filename)
    return "".join(summary.format()).rstrip()[-_MAX_TRACEBACK:]


def _short_file(file: str) -> str:
    """Return a path relative to site-packages, whet, the working folder or the standard library, else the file name."""
    path = Path(file)
    libraries = [folder for folder in path.parents if folder.name in _LIBRARY_FOLDERS]
    for root in (*libraries, _WHET_FOLDER.parent, Path.cwd(), Path(sysconfig.get_path("stdlib"))):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return path.name


def _is_internal(file: str) -> bool:
    """Return whether a file of torch is private by its path, like torch/_ops.py or torch/utils/_python_dispatch.py."""
    path = Path(file)
    folders = [folder for folder in _torch_folders() if path.is_relative_to(folder)]
    return any(name.startswith("_") for folder in folders for name in path.relative_to(folder).parts)


def calling_script() -> str | None:
    """Return the location of the user's code that called whet, as `path.py:function` or `path.py`.

    The function is the innermost one that can be called again by name: it is defined at the top level of its file and
    has no required arguments. Return None in a notebook or an interactive session, where no file holds the code.
    """
    frame: FrameType | None = sys._getframe(1)
    script: str | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_globals.get("__name__") == "__main__" and "__file__" not in frame.f_globals:
            return None
        if file.endswith(".py") and code_origin(file) == "you":
            path = str(Path(file).absolute())
            # The last assignment keeps the outermost file, which is the script that was started.
            script = path
            if _is_callable_again(frame):
                return f"{path}:{frame.f_code.co_name}"
        frame = frame.f_back
    return script


def _is_callable_again(frame: FrameType) -> bool:
    code = frame.f_code
    function = frame.f_globals.get(code.co_name)
    if not callable(function) or getattr(function, "__code__", None) is not code:
        return False
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return all(p.default is not p.empty or p.kind in optional for p in parameters)


@cache
def _torch_folders() -> tuple[str, ...]:
    """Return the folders in which torch is installed, without importing it."""
    spec = find_spec("torch")
    return tuple(spec.submodule_search_locations or ()) if spec else ()
