"""How far is a measurement? Told to whoever asked to be told; nothing is printed here."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from whet.measure.budget import Budget


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One moment of a measurement."""

    doing: str
    """What is tried now, as in "precision bf16"."""
    spent_seconds: float
    budget_seconds: float

    @property
    def words(self) -> str:
        """One line.

        >>> Progress(doing="precision bf16", spent_seconds=12.3, budget_seconds=60).words
        'measuring: precision bf16, 12 of 60 s'
        """
        return f"measuring: {self.doing}, {self.spent_seconds:.0f} of {self.budget_seconds:.0f} s"

    def as_event(self) -> dict[str, object]:
        """For those who are told of events by kind and fields."""
        return {"words": self.words, **asdict(self)}


Watch = Callable[[Progress], None]
"""Is told how far a measurement is, some times a second at most; what it does takes from the budget."""

_LEAST_SECONDS = 0.25


class Watched:
    """Tells a watch what is being done, at once, and then that it goes on, now and then."""

    def __init__(self, watch: Watch | None, budget: Budget) -> None:
        self._watch = watch
        self._budget = budget
        self._doing = ""
        self._told_at = float("-inf")

    def begin(self, doing: str) -> None:
        """Something else is tried from now on."""
        self._doing = doing
        self._tell()

    def again(self) -> None:
        """The same goes on; told of if the last time is a while ago."""
        if self._budget.clock() - self._told_at >= _LEAST_SECONDS:
            self._tell()

    def _tell(self) -> None:
        if self._watch is None or not self._doing:
            return
        self._told_at = self._budget.clock()
        spent = min(self._budget.spent, self._budget.seconds)
        self._watch(Progress(doing=self._doing, spent_seconds=spent, budget_seconds=self._budget.seconds))
