"""Which checkpoints are kept? The last few, the best one, and some from long before, for a run that has gone wrong."""

from collections.abc import Container
from pathlib import Path

from whet.base.errors import WhetError
from whet.checkpoint import store
from whet.checkpoint.manifest import DamagedCheckpointError
from whet.run import durable

MILESTONE_SHARE = 0.1
"""A milestone is the first checkpoint of every tenth of the run."""
MOST_MILESTONES = 2
"""The newest of them are kept: with the last two and the best that is at most five checkpoints on the disk."""
LEAST_MILESTONE_STEPS = 100
"""A shorter run is begun anew sooner than it goes back."""


def milestones(steps: list[int], *, total_steps: int | None) -> list[int]:
    """The newest milestones among steps; a run without a known end has none.

    >>> milestones([0, 40, 110, 150, 210, 350, 390], total_steps=1000)
    [210, 350]
    """
    if total_steps is None or total_steps < LEAST_MILESTONE_STEPS:
        return []
    first: dict[int, int] = {}
    for step in sorted(steps):
        first.setdefault(int(step / (total_steps * MILESTONE_SHARE)), step)
    return [step for tenth, step in first.items() if tenth > 0][-MOST_MILESTONES:]


def retain(
    folder: Path,
    *,
    acknowledged: int,
    keep: int,
    best: int | None,
    total_steps: int | None,
    refused: Container[int] = (),
) -> list[int]:
    """Removes what is not kept; the steps removed. `acknowledged` was written by this process a moment ago.

    Nothing goes unless that one is whole, so the only good checkpoint never does. Damaged folders do not count
    among the last `keep`, nor do those that were `refused` when they were read, whose sizes may be right; and newer
    ones than `acknowledged` can only be damaged: the run went on from before them.
    """
    try:
        store.check_sizes(folder / store.name_of(acknowledged))
    except WhetError:
        return []
    there = store.steps(folder)
    whole = [s for s in there if s <= acknowledged and s not in refused and _is_whole(folder, s)]
    kept = {*whole[-keep:], *milestones(whole, total_steps=total_steps), best, acknowledged}
    doomed = [step for step in there if step not in kept]
    for step in doomed:
        durable.remove(folder / store.name_of(step))
    return doomed


def make_room(folder: Path, *, num_bytes: int, keep: int, best: int | None, refused: Container[int] = ()) -> None:
    """Before a write: without free space for two more checkpoints and 5 %, milestones go first."""
    free = durable.free_bytes(folder)
    if free is None or free >= 2 * num_bytes * 1.05:
        return
    whole = [step for step in store.steps(folder) if step not in refused and _is_whole(folder, step)]
    for step in whole[:-keep]:
        if step != best:
            durable.remove(folder / store.name_of(step))


def _is_whole(folder: Path, step: int) -> bool:
    try:
        store.check_sizes(folder / store.name_of(step))
    except DamagedCheckpointError:
        return False
    except WhetError:
        return True  # Another format, or a disk that does not answer: not ours to remove.
    return True
