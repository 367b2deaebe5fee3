"""What did saving cost a run, by its own account?"""

from whet.base.record import Record
from whet.run.events import History


class Saving(Record):
    """The checkpoints that were acknowledged, and the training time they took."""

    count: int = 0
    stall_seconds: float = 0.0
    """The training stood still."""
    slowed_seconds: float = 0.0
    """Steps took longer while a checkpoint was written beside them."""

    @property
    def cost_seconds(self) -> float:
        """Both together."""
        return self.stall_seconds + self.slowed_seconds


def saving_cost(history: History) -> Saving:
    """From the checkpoint events; those of an older whet say only how long a save took."""
    events = list(history.events(kinds=("checkpoint",)))
    stalls = (event.number("stall_seconds") or event.number("seconds") or 0.0 for event in events)
    slowed = (event.number("slowed_seconds") or 0.0 for event in events)
    return Saving(count=len(events), stall_seconds=sum(stalls), slowed_seconds=sum(slowed))
