"""The run folder: its files, and creating, opening and finding runs.

    run.json        format version, id, recipe, creation time, command, and the script that trained
    config.json     the resolved configuration
    plan.json       {"settings": {name: {value, reason, source, evidence}}}
    machine.json    the machine it was planned for
    versions.json   of Python and the libraries
    events.jsonl    the event log (see event); events.index: its index (see event_index)
    checkpoints/    step-NNNNNNNNN/ folders
    lock            the process that writes here now (see lock)
    recipe.json     what the recipe needs to use the model later
    proof.json      the result of `whet prove`, if it was run (see proof)

A folder with a `run.json` is a run. All files appear together, in one rename.
"""

import importlib.metadata
import os
import platform
import re
import secrets
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError, WhetError, closest_match
from whet.base.model import FrozenModel
from whet.base.units import format_list
from whet.base.version import VERSION
from whet.run import durable, strict_json
from whet.run.disk import read_regular_file
from whet.run.lock import LOCK_FILE, OTHER_FOLDER
from whet.run.proof import PROOF_FILE

FORMAT_VERSION = 1

RUN_FILE = "run.json"
EVENTS_FILE = "events.jsonl"
INDEX_FILE = "events.index"
CHECKPOINTS = "checkpoints"
# Data that the recipe needs to use the model later. A run of a custom training loop has none.
RECIPE_FILE = "recipe.json"
# The recipe of a run that was started from Python.
PYTHON_RECIPE = "session"
# Parts of a run that are stored in separate JSON files.
RUN_PARTS = ("config", "plan", "machine", "versions")

_OWN_FILES = frozenset(
    (
        *(RUN_FILE, EVENTS_FILE, INDEX_FILE, RECIPE_FILE, PROOF_FILE, CHECKPOINTS, LOCK_FILE),
        *(f"{part}.json" for part in RUN_PARTS),
    )
)

_LIBRARIES = ("torch", "numpy", "safetensors", "pydantic", "psutil", "tokenizers", "transformers", "optuna")
# The usual limit of a filesystem for the length of a name.
_MAX_NAME_BYTES = 255


class RunHeader(FrozenModel):
    """The content of run.json."""

    format_version: int
    id: str
    recipe: str
    created: float
    """Creation time in unix seconds."""
    whet: str
    """Version of whet that created the run."""
    command: tuple[str, ...]
    """Command line that created the run. Running it again resumes the run."""
    script: str | None = None
    """File and function that started the run from Python: `path.py:function`, or `path.py` outside a function."""

    @property
    def title(self) -> str:
        """The recipe, or the name of the file that started the run from Python."""
        return run_title(self.recipe, self.script)


class Run(FrozenModel):
    """The content of a run folder at the time of reading."""

    path: Path
    header: RunHeader
    config: dict[str, Any]
    plan: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str | None]

    @property
    def metadata(self) -> dict[str, Any]:
        """Data that the recipe needs to use the model later; empty if there is none."""
        path = self.path / RECIPE_FILE
        return _read_object(path) if path.exists() else {}

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS


def installed_versions() -> dict[str, str | None]:
    """Return the versions of libraries that a run depends on, without importing them; None for missing libraries."""
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "whet": VERSION,
    }
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def next_run_path(root: Path, *, recipe: str) -> Path:
    """Return the next free path `RECIPE-NNN` in `root`.

    Two processes may get the same path. `create_run` then fails in the slower one, which must ask for another path.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(recipe).stem).strip("-.") or "run"
    pattern = re.compile(re.escape(name) + r"-(\d{3,})")
    taken = [int(match[1]) for path in _children(root) if (match := pattern.fullmatch(path.name))]
    return root / f"{name}-{max(taken, default=0) + 1:03d}"


def create_run(
    path: Path,
    *,
    recipe: str,
    config: Mapping[str, Any],
    plan: Mapping[str, Any],
    machine: Mapping[str, Any],
    versions: Mapping[str, str | None],
    command: list[str],
    script: str | None = None,
) -> Run:
    """Create a run folder atomically."""
    path = path.expanduser().absolute()
    check_run_path(path)
    durable.check_writable(path)
    header = RunHeader(
        format_version=FORMAT_VERSION,
        id=secrets.token_hex(8),
        recipe=recipe,
        created=time.time(),
        whet=VERSION,
        command=tuple(command),
        script=script,
    )
    parts = {"config": config, "plan": plan, "machine": machine, "versions": versions}
    files = {RUN_FILE: _file_bytes(header.as_json())} | {f"{k}.json": _file_bytes(v) for k, v in parts.items()}

    def fill(draft: Path) -> None:
        for name, data in files.items():
            durable.write_draft(draft / name, data=data)
        durable.make_directory(draft / CHECKPOINTS)
        durable.write_draft(draft / EVENTS_FILE, data=b"", is_last=True)

    # All files become visible with one rename: a crash leaves either no run or a complete one.
    made = durable.make_directory(path.parent)
    try:
        durable.publish_directory(path, fill=fill)
    except BaseException:
        durable.remove_empty(made)
        raise
    return open_run(path)


def open_run(path: Path | str) -> Run:
    """Open the run in a folder. All of its parts are read and validated."""
    path = Path(path).expanduser().absolute()
    header = read_header(path)
    parts = {name: _read_object(path / f"{name}.json") for name in RUN_PARTS}
    return Run.from_json({"path": path, "header": header, **parts}, where=path)


def locate_checkpoint(run: Path | None, checkpoint: str) -> tuple[Path, str]:
    """Return a run folder and which of its checkpoints to use: last, best or a step.

    `checkpoint` may also be the path of a checkpoint folder or of a run. In that case, `run` is not needed.
    """
    path = Path(checkpoint).expanduser()
    if checkpoint in ("last", "best") or checkpoint.isdecimal():
        if run is None:
            got = f"no RUN, and --checkpoint {checkpoint}"
            raise UsageError("a run folder is missing", got=got, try_="a folder that `whet runs` lists")
        # This raises an error before a command imports torch.
        read_header(run.expanduser().absolute())
        return run, checkpoint
    if path.is_file():
        # Only `whet import` reads files of unknown origin.
        raise UsageError("a checkpoint is a folder", got=checkpoint, try_=f"whet import {checkpoint} --out DIR")
    step = re.fullmatch(r"step-0*(\d+)", path.name)
    owner, which = (path.absolute().parent.parent, step[1]) if step else (path, "best")
    if not path.is_dir():
        hint = "last, best, a step, or the path of a checkpoint folder"
        raise UsageError("no such checkpoint", got=f"--checkpoint {checkpoint}", try_=hint)
    if run is not None and run.expanduser().resolve() != owner.resolve():
        raise UsageError(
            "the checkpoint belongs to a different run", got=f"{run} and {checkpoint}", try_=f"{owner} alone"
        )
    return owner, which


def read_header(path: Path) -> RunHeader:
    """Read run.json. Raise an error if the folder is not a run or if this version cannot read it."""
    if not (path / RUN_FILE).is_file():
        raise _not_a_run(path)
    data = _read_object(path / RUN_FILE)
    version = data.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise WhetError(
            f"the run {path} was made by a newer whet",
            got=f"format {version} (whet {data.get('whet', 'unknown')}); this is {FORMAT_VERSION} (whet {VERSION})",
            try_="upgrade: pip install --upgrade whet",
        )
    return RunHeader.from_json(data, where=path / RUN_FILE)


def rewrite_parts(run: Run, **parts: Mapping[str, Any]) -> Run:
    """Replace the config, plan, machine or versions of a run, for example to add `epochs`, and return the new run."""
    for name, value in parts.items():
        if name not in RUN_PARTS:
            raise ValueError(f"no such part of a run: {name!r}")
        durable.write_file(run.path / f"{name}.json", data=_file_bytes(value))
    return open_run(run.path)


def resume_command(run: Run) -> str:
    """Return the command that resumes a run: the original command with the run folder and without `--fresh`."""
    words = [word for word in run.header.command if word != "--fresh"]
    path = short_path(run.path)
    if not words:
        code = f"{short_script(run.header.script)} again" if run.header.script else "the same Python code again"
        return f"{code}, with run={path!r}"
    if not any(word == "--run" or word.startswith("--run=") for word in words):
        words += ["--run", path]
    return shlex.join(words)


def short_path(path: Path) -> str:
    """Return a path for use in a command, relative to the working folder if inside it.

    It never looks like an option.
    """
    shown = str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    return f"./{shown}" if shown.startswith("-") else shown


def shell_path(path: Path) -> str:
    """Return `short_path(path)`, quoted for a shell.

    >>> shell_path(Path("-my run"))
    "'./-my run'"
    """
    return shlex.quote(short_path(path))


def short_script(script: str) -> str:
    """Return `path.py:function` with the path relative to the working folder if it is inside it."""
    place, colon, function = script.partition(":")
    return f"{short_path(Path(place))}{colon}{function}"


def run_title(recipe: str, script: str | None) -> str:
    """Return the name of a recipe, or of the file that started the run from Python.

    >>> run_title("text", None), run_title(PYTHON_RECIPE, "/home/me/train.py:main"), run_title(PYTHON_RECIPE, None)
    ('text', 'train.py', 'Python')
    """
    if recipe != PYTHON_RECIPE:
        return recipe
    return "Python" if script is None else Path(script.partition(":")[0]).name


def run_folder(run: Run | Path) -> Path:
    """Return the folder of a run, or the given path."""
    return run.path if isinstance(run, Run) else run


def run_folders(root: Path) -> list[Path]:
    """Return the run folders in `root`, sorted by name, including damaged ones. Unreadable folders are skipped."""
    return [p for p in _children(root) if _is_there(p / RUN_FILE) or _is_there(p / EVENTS_FILE)]


def foreign_files(path: Path) -> list[str]:
    """Return the files in a run folder that whet did not write."""
    return sorted(c.name for c in path.iterdir() if c.name not in _OWN_FILES and not durable.is_leftover(c))


def run_groups(root: Path) -> dict[Path, int]:
    """Return the folders in `root` that contain runs, such as runs with several seeds, with the number of runs."""
    runs = set(run_folders(root))
    counts = {path: len(run_folders(path)) for path in _children(root) if path not in runs}
    return {path: number for path, number in counts.items() if number}


def _children(root: Path) -> list[Path]:
    """Return the folders in `root` that are neither links nor hidden; empty if `root` cannot be read."""
    try:
        return sorted(p for p in root.iterdir() if not p.name.startswith(".") and p.is_dir() and not p.is_symlink())
    except OSError:
        return []


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # No permission to read the folder.
        return False


def _file_bytes(value: Mapping[str, Any]) -> bytes:
    return (strict_json.encode(value, pretty=True) + "\n").encode()


def _read_object(path: Path) -> dict[str, Any]:
    hint = "restore this file from a copy; the checkpoints of the run are not affected"
    if path.exists() and not path.is_file():
        raise WhetError(f"the run file {path} is damaged", got="not a regular file", try_=hint)
    try:
        return strict_json.decode(read_regular_file(path))
    except FileNotFoundError:
        raise WhetError(f"the run file {path} is missing", got=f"no {path.name}", try_=hint) from None
    except OSError as error:
        raise durable.explain_os_error(error, doing="read", path=path) from error
    except ValueError as error:
        raise WhetError(f"the run file {path} is damaged", got=str(error), try_=hint) from None


def check_run_name(path: Path) -> None:
    """Raise UsageError unless all names in a path are short and printable.

    A line break could fake a row of `whet runs`.
    """
    for name in path.parts:
        if not name.isprintable():
            raise UsageError(
                "a run folder needs a name without line breaks and control characters",
                got=repr(name[:100]),
                try_="--run runs/NAME (run='runs/NAME' in Python), or rename the folder",
            )
        if len(os.fsencode(name)) > _MAX_NAME_BYTES:
            raise UsageError(
                "the name of the run folder is too long",
                got=f"{len(os.fsencode(name)):,} bytes: {name[:40]}...",
                try_=f"--run runs/NAME (run='runs/NAME' in Python), with at most {_MAX_NAME_BYTES} bytes",
            )


def check_run_path(path: Path) -> None:
    """Raise an error unless a run can be created at a path."""
    check_run_name(path)
    with durable.disk_errors("create", path):
        if path.is_symlink() and not path.exists():
            raise UsageError(f"cannot create a run at {path}", got="a dangling symbolic link", try_=OTHER_FOLDER)
        if not path.exists():
            return
        if not path.is_dir():
            raise UsageError(f"cannot create a run at {path}", got="a file of that name", try_=OTHER_FOLDER)
        if (path / RUN_FILE).exists():
            raise UsageError(
                f"{path} is already a run",
                got=RUN_FILE,
                try_=f"the command that created it, to resume it; or {OTHER_FOLDER}",
            )
        names = sorted(child.name for child in path.iterdir())
        if names:
            got = format_list(names)
            raise UsageError(f"{path} is not a run, and not empty", got=got, try_=OTHER_FOLDER)
        if path.samefile(Path.cwd()):
            # Creating the run replaces an empty folder. A shell inside it would be left in a deleted folder.
            raise UsageError(
                "cannot create a run in the current folder",
                got=path,
                try_=f"--run {path.name}/run, or run='{path.name}/run' in Python",
            )


def _not_a_run(path: Path) -> UsageError:
    got = f"no {RUN_FILE} in it" if path.is_dir() else "a file" if path.exists() else "no such folder"
    inside = [p for p in _children(path) if (p / RUN_FILE).is_file()]
    above = next((p for p in path.parents if (p / RUN_FILE).is_file()), None)
    if above is not None:
        hint = str(above)
    elif inside:
        hint = f"one of the {len(inside)} in it, such as {inside[-1]}; `whet runs {path}` lists them"
    else:
        siblings = [p.name for p in _children(path.parent) if (p / RUN_FILE).is_file()]
        meant = closest_match(path.name, siblings)
        hint = f"{path.parent / meant}" if meant else "`whet runs` lists the runs"
    return UsageError(f"{path} is not a run", got=got, try_=hint)
