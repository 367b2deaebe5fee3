"""A run on one line while it trains: redrawn on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from whet.base.units import show_bytes, show_seconds
from whet.cli import screen
from whet.plan.plan import read_plan
from whet.plan.words import plan_lines
from whet.run.folder import open_run

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 10.0
_WINDOW = 20
"""Speed is taken over the last this many readings."""


class Progress:
    """Is told of every event of a run, and shows what a person wants to know."""

    def __init__(self, name: str, run: Path, *, epochs: int, has_terminal: bool | None = None) -> None:
        self._name = name
        self._run = run
        self._epochs = epochs
        self._has_terminal = sys.stderr.isatty() if has_terminal is None else has_terminal
        self._total: int | None = None
        self._metrics: dict[str, float] = {}
        self._memory = ""
        self._seen: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW)
        self._shown_at = 0.0
        self._is_open = False

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        if kind in ("start", "resume"):
            self._total = fields.get("total_steps")
            self._show_plan()
        if kind == "resume":
            self._say(f"{self._name}: goes on from step {fields['step']:,}")
            for problem in fields.get("refused") or ():
                self._say(f"{self._name}: refused a checkpoint: {problem}")
        elif kind == "plan":
            self._say(f"{self._name}: {fields['changed']}")
        elif kind == "eval":
            self._metrics = {name: value for name, value in fields.items() if name != "step"}
            shown = "  ".join(f"{name} {value:.4f}" for name, value in self._metrics.items())
            self._say(f"{self._name}  step {fields['step']:,}  {shown}")
        elif kind == "epoch":
            self._end_epoch(fields)
        elif kind == "step":
            self._step(fields)
        elif kind == "end":
            self._close()

    def _show_plan(self) -> None:
        plan = read_plan(open_run(self._run).plan, where=f"{self._run}/plan.json")
        screen.note("\n".join((f"run       {self._run}", *plan_lines(plan, width=screen.width()), "")))

    def _step(self, fields: dict[str, Any]) -> None:
        now = time.monotonic()
        self._seen.append((now, fields["step"], fields["samples"]))
        pause = _REDRAW_SECONDS if self._has_terminal else _LINE_SECONDS
        if screen.quiet or now - self._shown_at < pause:
            return
        self._shown_at = now
        line = self._line(fields)
        if self._has_terminal:
            sys.stderr.write(f"\r\x1b[2K{line[: screen.width() - 1]}")
            sys.stderr.flush()
            self._is_open = True
        else:
            screen.note(line)

    def _line(self, fields: dict[str, Any]) -> str:
        step = fields["step"]
        parts = [
            f"{self._name}  {step:,}" + (f"/{self._total:,}" if self._total else ""),
            f"epoch {fields['epoch'] + 1}/{self._epochs}",
            f"loss {fields['loss']:.4g}",
        ]
        first, last = self._seen[0], self._seen[-1]
        seconds = last[0] - first[0]
        if seconds > 0:
            parts.append(f"{(last[2] - first[2]) / seconds:.1f} samples/s")
            steps_per_second = (last[1] - first[1]) / seconds
            if self._total and step < self._total and steps_per_second > 0:
                parts.append(f"{show_seconds((self._total - step) / steps_per_second)} left")
        if self._memory:
            parts.append(self._memory)
        if self._has_terminal:
            parts.append("^C saves and stops")
        return "  ".join(parts)

    def _end_epoch(self, fields: dict[str, Any]) -> None:
        memory = fields.get("memory") or {}
        used, limit = memory.get("peak") or memory.get("allocated"), memory.get("limit")
        if used:
            self._memory = show_bytes(used) + (f" of {show_bytes(limit)}" if limit else "")
        took = show_seconds(fields["epoch_seconds"])
        self._say(f"{self._name}  epoch {fields['epoch']}/{self._epochs} took {took}  {self._memory}")

    def _say(self, line: str) -> None:
        self._close()
        screen.note(line)

    def _close(self) -> None:
        if self._is_open:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
            self._is_open = False
