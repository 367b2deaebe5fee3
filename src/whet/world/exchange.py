"""How do processes leave each other short texts, at any moment and from any thread? In torch's store, under names.

Collectives need all processes at the same place, and one thread in each. What is written beside the training has
neither.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d

from whet.base.errors import LostRankError
from whet.world.world import World

_SOONEST_SECONDS, _LATEST_SECONDS = 0.005, 0.2


class Exchange:
    """Short texts between the processes of a training, each under a name that is used once."""

    def __init__(self, world: World, *, longest_seconds: float) -> None:
        self._world = world
        self._longest = longest_seconds
        shared: Any = distributed_c10d._get_default_store()
        # A connection of its own: a wait on one that is shared would hold up the others.
        self._store = distributed_c10d.PrefixStore("whet", shared.clone())
        self._lock = threading.Lock()
        self._turn = 0
        self.refuse_lost: Callable[[], None] = lambda: None
        """Raises where the one who is waited for is known to be gone."""

    @property
    def rank(self) -> int:
        """Which of the processes this is, counted from 0."""
        return self._world.rank

    @property
    def size(self) -> int:
        """How many they are."""
        return self._world.size

    def next_turn(self) -> int:
        """A number that was not used before; the same in all processes that ask equally often."""
        self._turn += 1
        return self._turn

    def post(self, name: str, text: str) -> None:
        """Leaves a text for who waits for it."""
        with self._lock:
            self._store.set(name, text)

    def find(self, name: str) -> str | None:
        """The text, if it is there."""
        with self._lock:
            return self._store.get(name).decode() if self._store.check([name]) else None

    def find_all(self, names: list[str]) -> list[str]:
        """Texts that are there, at once."""
        with self._lock:
            return [text.decode() for text in self._store.multi_get(names)]

    def wait(self, name: str) -> str:
        """The text, as soon as it is there."""
        deadline, pause = time.monotonic() + self._longest, _SOONEST_SECONDS
        while True:
            found = self.find(name)
            if found is not None:
                return found
            self.refuse_lost()
            if time.monotonic() > deadline:
                raise LostRankError(
                    "another process of this training does not answer",
                    got=f"rank {self.rank} of {self.size} waits for {name} since {self._longest:.0f} s",
                    try_="the same command, which goes on from the last checkpoint",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LATEST_SECONDS)

    def drop(self, name: str) -> None:
        """Forgets a text that everybody has read."""
        with self._lock:
            self._store.delete_key(name)
