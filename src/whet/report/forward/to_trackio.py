"""Trackio: its own folder on this machine, or where TRACKIO_SPACE_ID or TRACKIO_SERVER_URL lead."""

import time
from collections.abc import Sequence
from typing import Any

from whet.report.forward.target import About, Held, Row, UnreachableError, library

_LONGEST_WAIT_SECONDS = 30.0


class Trackio:
    """One run of Trackio; its name ends with a part of our id, so that it is found again."""

    most_rows = 1_000

    def __init__(self) -> None:
        self._trackio = library("trackio")
        self._run: Any = None
        self._where = ""
        self._logged = -1

    def open(self, about: About) -> Held:
        self._run = self._trackio.init(
            project=about.project,
            name=f"{about.name}-{about.id[:8]}",
            config=dict(about.parameters),
            resume="allow",
            embed=False,
            # They would tell of this process, and not of the training.
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._where = f"Trackio (project {about.project}); `trackio show --project {about.project}` shows it"
        # It counts on from the last step it has: one row a step, so that tells all.
        return Held(step=getattr(self._run, "_next_step", 0) - 1)

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.step <= self._logged:
                continue  # Given to it already, and not written in time.
            self._run.log(dict(row.values), step=row.step)
            self._logged = row.step
        # It keeps what is logged in memory, and writes twice a second.
        until = time.monotonic() + _LONGEST_WAIT_SECONDS
        while getattr(self._run, "_queued_logs", None) or getattr(self._run, "_sending_batch", None):
            if time.monotonic() > until:
                raise UnreachableError("Trackio has not written what it was given")
            time.sleep(0.05)

    def close(self, state: str | None) -> None:  # noqa: ARG002
        if self._run is not None:
            # By its own door: left open, it would end the run once more when the process ends, and print.
            self._trackio.finish()

    def where(self) -> str:
        return self._where
