"""Load the weights of a run or an import into a model."""

from pathlib import Path

from torch import nn

from whet.base.errors import UsageError, WhetError
from whet.checkpoint import importer, store
from whet.checkpoint.snapshot import Snapshot
from whet.checkpoint.snapshot_restore import restore_model
from whet.run.folder import open_run


def load_weights(run: str | Path, model: nn.Module, *, checkpoint: str = "last", use_average: bool = True) -> int:
    """Load the weights of a run into a model and return the step they belong to.

    `checkpoint` is "last", "best" or a step. With `use_average`, averaged weights are preferred if the run has them.
    `run` may also be a folder created by `whet import`, whose step is 0.
    """
    folder = Path(run).expanduser()
    if importer.is_import(folder):
        tensors = importer.read_import(folder)
        broken = next((name for name, t in tensors.items() if t.is_floating_point() and bool(t.isnan().any())), None)
        if broken is not None:
            raise WhetError("the imported weights contain NaN", got=broken, try_="another copy of the file")
        importer.load_imported(model, tensors, where=folder)
        return 0
    _check_folder(folder)
    snapshot, step = read_checkpoint(run, checkpoint=checkpoint)
    restore_model(snapshot, model, use_average=use_average, with_memory=False)
    return step


def read_checkpoint(run: str | Path, *, checkpoint: str = "last") -> tuple[Snapshot, int]:
    """Read a checkpoint of a run. Return the snapshot and its step."""
    folder = open_run(run).checkpoints
    loaded = store.load_newest(folder)
    if loaded is None:
        raise WhetError("the run has no checkpoint yet", got=str(run), try_="train it first")
    newest_step, newest, rejected = loaded
    if rejected and checkpoint in ("last", "best"):
        # A training run resumes from an older checkpoint. Here, the caller wants the last or the best one, so silently
        # returning an older one would be wrong.
        raise WhetError(
            "the run's newest checkpoint is damaged",
            got=rejected[0][:300],
            try_=f"checkpoint {newest_step}, which is complete; or remove the damaged folder",
        )
    if checkpoint == "last":
        return newest, newest_step
    if checkpoint == "best":
        best = newest.facts["progress"]["progress"]["best_step"]
        wanted = newest_step if best is None else best
    elif checkpoint.isdecimal():
        wanted = int(checkpoint)
    else:
        raise UsageError("unknown checkpoint", got=checkpoint, try_="last, best or a step")
    saved_steps = store.list_steps(folder)
    if wanted not in saved_steps:
        raise UsageError(
            "the run does not have this checkpoint", got=checkpoint, try_=f"last, best or one of {saved_steps}"
        )
    return store.load_checkpoint(folder / store.checkpoint_name(wanted)), wanted


def _check_folder(path: Path) -> None:
    """Raise UsageError if the path is a file: only `whet import` reads files of unknown origin."""
    if path.is_file():
        raise UsageError(
            "weights are loaded from a folder", got=str(path), try_=f"whet import {path} --out DIR, then DIR"
        )
