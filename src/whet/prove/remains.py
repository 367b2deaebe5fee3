"""What lies in a run folder after a kill: whole checkpoints, torn ones, and what a cut left behind."""

from dataclasses import dataclass
from pathlib import Path

from whet.base.errors import WhetError
from whet.checkpoint import store
from whet.run import durable
from whet.run.events import read_events
from whet.run.folder import CHECKPOINTS, RUN_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class Remains:
    """A run folder as a killed life left it."""

    whole: tuple[int, ...] = ()
    """Steps of the checkpoints whose manifest vouches for what is there."""
    torn: tuple[int, ...] = ()
    """Steps of those that have their name and are not whole."""
    drafts: frozenset[str] = frozenset()
    """Unfinished folders of checkpoints, being written or removed."""
    lost: str | None = None
    """Which checkpoint that was said to be safe is not there."""

    def was_cut_since(self, before: "Remains") -> bool:
        """Whether the writing or removal of a checkpoint was cut short by the newest kill."""
        return bool(self.drafts - before.drafts) or bool(set(self.torn) - set(before.torn))


def look(run: Path) -> Remains:
    """What is there now; nothing before the run folder has its name."""
    if not (run / RUN_FILE).exists():
        return Remains()
    checkpoints = run / CHECKPOINTS
    whole, torn = [], []
    for step in store.steps(checkpoints):
        try:
            store.check_sizes(checkpoints / store.name_of(step))
            whole.append(step)
        except WhetError:
            torn.append(step)
    drafts = {path.name for path in checkpoints.iterdir() if durable.is_leftover(path)} if checkpoints.exists() else ()
    return Remains(whole=tuple(whole), torn=tuple(torn), drafts=frozenset(drafts), lost=_lost(run, whole))


def _lost(run: Path, whole: list[int]) -> str | None:
    """A checkpoint event says that it is safe: then it is there, or a newer one; and two, once there were two."""
    safe = {event.step for event in read_events(run, kinds=("checkpoint",))}
    if safe and max(whole, default=-1) < max(safe):
        return f"the checkpoint of step {max(safe)} was said to be safe and is not there"
    if len(whole) < min(2, len(safe)):
        return f"{len(whole)} whole checkpoint is left although {len(safe)} were said to be safe"
    return None
