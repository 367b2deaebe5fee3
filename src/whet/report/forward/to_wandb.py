"""Weights & Biases: online, or offline with WANDB_MODE=offline and `wandb sync` later."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whet.report.forward.target import About, Held, Row, library
from whet.run import durable
from whet.run.plain_file import read_plain

_EXIT_CODES = {"done": 0, "stopped": 130, "failed": 1}


class Wandb:
    """One run of W&B that has our id. A row of theirs is a step, and none can be added behind."""

    most_rows = 1_000

    def __init__(self) -> None:
        self._wandb = library("wandb")
        self._run: Any = None
        self._note: Path | None = None

    def open(self, about: About) -> Held:
        self._run = self._wandb.init(
            project=about.project,
            id=about.id,
            name=about.name,
            config=dict(about.parameters),
            resume="allow",
            # What it collects by itself would tell of this process, and not of the training.
            settings=self._wandb.Settings(
                console="off", disable_git=True, disable_code=True, save_code=False, x_disable_stats=True, quiet=True
            ),
        )
        if not self._run.offline:
            return Held(step=self._run.starting_step - 1)
        # Offline nobody knows what was handed over before, so it is noted beside what wandb wrote.
        folder = Path(self._run.settings.wandb_dir)
        self._note = folder / f"whet-{about.id}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return Held(step=int(json.loads(read_plain(self._note))["step"]))
        return Held()

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            # _timestamp: when it happened, and not when it was forwarded.
            self._run.log({**row.values, "_timestamp": row.time}, step=row.step, commit=True)
        if self._note is not None and rows:
            # An answer from wandb's own process: it has all that was logged before the question.
            _ = self._run.step
            durable.write_file(self._note, data=json.dumps({"step": rows[-1].step}).encode())

    def close(self, state: str | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=_EXIT_CODES.get(state or "stopped", 0))

    def where(self) -> str:
        if self._run.offline:
            return f"W&B, offline; to send it on: wandb sync {Path(self._run.settings.sync_dir)}"
        return f"W&B, {self._run.url}"
