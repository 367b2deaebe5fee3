"""Which process works on a trial, and does it still live? On this machine that is known; elsewhere its beat tells."""

import os
import platform
import time
from functools import cache
from typing import Any

import psutil

from whet.base.errors import UsageError
from whet.base.record import Record

BEAT_SECONDS = 10.0
_SILENCE_SECONDS = 60.0
"""A worker on another machine that has not been heard of for so long is taken to be gone."""
_UNOWNED_SECONDS = 15.0
"""A trial that was taken from the queue has its owner written on it at once, unless that process died."""


class Owner(Record):
    """A process on a machine."""

    host: str
    pid: int
    started: float
    """When the process began: its number may be given to another one later."""

    @property
    def is_here(self) -> bool:
        return self.host == platform.node()

    def lives(self) -> bool:
        """Whether it is still there; only asked of this machine's."""
        try:
            process = psutil.Process(self.pid)
            return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - self.started) < 2.0
        except psutil.NoSuchProcess:
            return False


@cache
def _started(pid: int) -> float:
    return psutil.Process(pid).create_time()


def this_process() -> Owner:
    return Owner(host=platform.node(), pid=os.getpid(), started=_started(os.getpid()))


class Silence:
    """Remembers since when each trial has said nothing new, by our own clock: others' may be set differently."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[Any, float]] = {}

    def is_gone(self, number: int, attributes: dict[str, Any]) -> bool:
        """Whether nobody works on a running trial any longer."""
        try:
            owner = None if "owner" not in attributes else Owner.from_json(attributes["owner"], where="the trial")
        except UsageError:
            owner = None
        if owner is not None and owner.is_here:
            return not owner.lives()
        said = (attributes.get("owner"), attributes.get("beat"))
        now = time.monotonic()
        before, since = self._heard.setdefault(number, (said, now))
        if before != said:
            self._heard[number] = (said, now)
            return False
        return now - since > (_UNOWNED_SECONDS if owner is None else _SILENCE_SECONDS)
