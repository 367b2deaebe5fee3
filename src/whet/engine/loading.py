"""From which checkpoint do all processes go on? From the newest that every one of them can read."""

from pathlib import Path
from typing import Any

from torch import nn

from whet.base.errors import WhetError
from whet.checkpoint import store
from whet.checkpoint.manifest import DamagedCheckpointError
from whet.checkpoint.snapshot import Snapshot, wanted_rows
from whet.world.group import Group


def newest(folder: Path, model: nn.Module, group: Group, *, run_id: str) -> store.Found | None:
    """The newest checkpoint that all can trust, as much of it as this model holds here."""
    if group.is_alone:
        return store.newest(folder, run_id=run_id)
    there = group.share(store.steps(folder) if group.is_first else None)
    return store.newest(folder, run_id=run_id, there=there, read=lambda path: load(path, model, group))


def load(path: Path, model: nn.Module, group: Group) -> Snapshot:
    """A checkpoint, as much of it as this model holds here. What one process cannot read, none uses."""
    if group.is_alone:
        return store.load(path)
    found: Snapshot | None = None
    told: list[Any] | None = None
    try:
        found = store.load(path, wanted=wanted_rows(model))
    except WhetError as error:
        told = [isinstance(error, DamagedCheckpointError), error.what, str(error.got), str(error.try_)]
    answers = group.gather(told)
    problems = [(rank, *answer) for rank, answer in enumerate(answers) if answer is not None]
    if not problems:
        assert found is not None
        return found
    # What is not the checkpoint's fault must not let it be passed over for an older one.
    rank, is_damage, what, got, hint = min(problems, key=lambda problem: bool(problem[1]))
    kind = DamagedCheckpointError if is_damage else WhetError
    raise kind(what, got=f"rank {rank}: {got}", try_=hint)
