"""Lives of one training in one scratch folder, judged against the run that nobody interrupted."""

import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.errors import UsageError, WhetError
from whet.prove.births import Births, Life
from whet.prove.life import Order
from whet.run.proof import Difference

if TYPE_CHECKING:
    from whet.prove.result import Result

LONGEST_SECONDS = 3600.0
"""For a life of which nothing is known yet."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is proved: a function as module:function that trains in a run folder, and what it is told.

    Of its arguments the proof sets `steps`, how many it makes at most, and `every`, the steps between checkpoints. A
    function `rehearse(arguments)` beside it may load what the training will import.
    """

    target: str
    arguments: dict[str, Any] = field(default_factory=dict)


class Broken(Exception):  # noqa: N818 - a finding, not an error
    """Something was not as it should be after a kill."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.what)
        self.difference = difference


class Bench:
    """Starts lives of the same piece of a training."""

    def __init__(self, training: Training, births: Births, scratch: Path, *, steps: int, every: int) -> None:
        self.births = births
        self.scratch = scratch
        self.limit_seconds = LONGEST_SECONDS
        self.expected: Result | None = None
        self.left_out: set[str] = set()
        self.num_compared = 0
        self._target = training.target
        self._arguments = {**training.arguments, "steps": steps, "every": every}
        self._numbers = itertools.count()

    def begin(self, run: Path, *, births: Births | None = None, **last: int) -> Life:
        """A life that begins in a run folder or goes on there; `last` says which disk call it ends at (see Order)."""
        number = next(self._numbers)
        order = Order(
            target=self._target,
            arguments=self._arguments,
            run=run,
            diary=self.scratch / f"diary-{number}",
            errors=self.scratch / f"errors-{number}",
            **last,
        )
        return (births or self.births).start(order)

    def finish_undisturbed(self, run: Path, *, births: Births | None = None) -> Life:
        """A whole run that nobody interrupts; a training that fails by itself is an error of its own."""
        life = self.begin(run, births=births)
        code = life.wait(self.limit_seconds)
        if code == 0:
            return life
        for told in life.told("failed"):
            kind = UsageError if told.get("is_usage") else WhetError
            raise kind(told["what"], got=told.get("got"), try_=told.get("try_") or "whet train fails alike: mend that")
        how = "it did not end" if code is None else f"exit code {code}: {life.last_words()}"
        raise WhetError("the training fails by itself, before any kill", got=how, try_="whet train first")

    def finish(self, run: Path, *, kills: str) -> Life:
        """One more life, which must reach the end."""
        life = self.begin(run)
        code = life.wait(self.limit_seconds)
        if code is None:
            raise Broken(Difference(what=f"a resumed life did not end in {self.limit_seconds:.0f} s", kills=kills))
        if code != 0:
            raise Broken(Difference(what=f"a resumed life failed: {life.last_words()}", kills=kills))
        return life

    def judge(self, run: Path, *, kills: str) -> None:
        """Compares a finished run with the one that nobody interrupted; it is removed when all is the same."""
        from whet.prove.result import first_difference, read_result

        assert self.expected is not None
        found = first_difference(self.expected, read_result(run), left_out=self.left_out)
        if found is not None:
            raise Broken(found.model_copy(update={"kills": kills}))
        self.num_compared += 1
        shutil.rmtree(run)
