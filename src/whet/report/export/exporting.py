"""How do the numbers of a run become files? All of them in a new folder, or none."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from whet.base.errors import UsageError, nearest
from whet.base.record import Record
from whet.report.export.csv_files import csv_files
from whet.report.export.parquet_files import parquet_files
from whet.report.export.tensorboard_files import tensorboard_files
from whet.run import durable
from whet.run.events import History
from whet.run.folder import Run, open_run

Files = Callable[[History], Iterator[tuple[str, Iterable[bytes]]]]

FORMATS: dict[str, Files] = {"csv": csv_files, "parquet": parquet_files, "tensorboard": tensorboard_files}
MODEL_FORMATS = ("transformers", "onnx")
"""Of the model itself: `whet.recipes.exporting` writes those."""
_OURS = ("steps.", "evaluations.", "health.", "events.out.tfevents.")
"""How the names begin of what is written: a folder with anything else is never replaced."""


class Exported(Record):
    """What was written."""

    folder: Path
    files: dict[str, int]
    """Bytes by name."""


def export(run: Run | Path | str, *, to: str, out: Path | str | None = None, force: bool = False) -> Exported:
    """Writes the numbers of a run as files of a format into a new folder; NAME-FORMAT where you are, if not told.

    Steps that were made again after a resume are there once. A folder that is there already is refused, or replaced
    with `force` if an export made it.
    """
    if to not in FORMATS:
        known = (*FORMATS, *MODEL_FORMATS)
        meant = nearest(to, known)
        raise UsageError("no such format", got=to, try_=f"--to {meant}" if meant else " or ".join(known))
    run = run if isinstance(run, Run) else open_run(run)
    folder = Path(out if out is not None else f"{run.path.name}-{to}").expanduser().absolute()
    history = History(run)

    def fill(draft: Path) -> list[str]:
        names = []
        for name, pieces in FORMATS[to](history):
            durable.write_draft(draft / name, data=pieces)
            names.append(name)
        return names

    return publish(run, folder, fill=fill, is_ours=lambda name: name.startswith(_OURS), force=force)


def publish(
    run: Run, folder: Path, *, fill: Callable[[Path], Iterable[str]], is_ours: Callable[[str], bool], force: bool
) -> Exported:
    """A new folder with the files that `fill` writes into a draft of it, and names: all of them, or none.

    A folder that is there already is replaced only with `force`, and only where every file in it `is_ours`.
    """
    _refuse(folder, run=run, is_ours=is_ours, force=force)
    files: dict[str, int] = {}
    old: list[Path] = []

    def fill_and_make_room(draft: Path) -> None:
        files.update((name, (draft / name).stat().st_size) for name in fill(draft))
        if folder.exists() and any(folder.iterdir()):
            # Only now that the new one is complete.
            old.append(durable.set_aside(folder))

    made = durable.make_directory(folder.parent)
    try:
        durable.publish_directory(folder, fill=fill_and_make_room)
    except BaseException:
        for aside in old:
            aside.rename(folder)
        durable.remove_empty(made)
        raise
    for aside in old:
        durable.remove(aside)
    return Exported(folder=folder, files=files)


def _refuse(folder: Path, *, run: Run, is_ours: Callable[[str], bool], force: bool) -> None:
    if folder.resolve().is_relative_to(run.path.resolve()):
        raise UsageError("an export does not belong into the run", got=folder, try_="--out DIR outside of it")
    with durable.told("write", folder):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise UsageError("there is something else of that name", got=folder, try_="another --out DIR")
        inside = sorted(child.name for child in folder.iterdir()) if folder.exists() else []
    foreign = [name for name in inside if not is_ours(name)]
    if foreign:
        shown = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise UsageError(f"{folder} holds files that no export made", got=shown, try_="another --out DIR")
    if inside and not force:
        raise UsageError(f"{folder} is there already", got=", ".join(inside), try_="--force, or another --out DIR")
