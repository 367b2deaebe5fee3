"""A run on one line while it trains: redrawn on a terminal, a plain line now and then elsewhere."""

import io
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

from whet.base.units import printable, show_bytes, show_seconds

_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 10.0
_WINDOW = 20
"""Speed is taken over the last this many readings."""


class ProgressLine:
    """Is told of every event of a run, and shows what a person wants to know; on standard error unless told."""

    def __init__(self, name: str = "train", *, epochs: int | None = None, stream: TextIO | None = None) -> None:
        self._name = name
        self._epochs = epochs
        # A process may have been started without standard error.
        self._stream = stream or sys.stderr or io.StringIO()
        self._has_terminal = self._stream.isatty()
        self._total: int | None = None
        self._memory = ""
        self._heat = ""
        self._seen: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW)
        self._shown_at = 0.0
        self._is_open = False

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        if kind in ("start", "resume"):
            self._total = fields.get("total_steps")
        if kind == "resume":
            holds = f", {fields['exactness']}" if fields.get("exactness") else ""
            if fields.get("went_back"):
                self.say(f"{self._name}: goes back to step {fields['step']:,}: {fields['went_back']}")
            elif self._total is not None and fields["step"] >= self._total:
                self.say(f"{self._name}: all {self._total:,} steps are done")
            else:
                self.say(f"{self._name}: goes on from step {fields['step']:,}{holds}")
            for problem in fields.get("refused") or ():
                self.say(f"{self._name}: refused a checkpoint: {problem}")
            if fields.get("lost_steps"):
                self.say(f"{self._name}: {fields['lost_steps']:,} steps are lost and made again")
        elif kind == "warning":
            self.say(f"{self._name}: {fields['reason']}; tried again {fields['again']}; the training goes on")
        elif kind == "oom":
            self.say(f"{self._name}: out of memory at step {fields['step']:,}; {fields['cure']}")
        elif kind in ("skip", "spike"):
            left_out = " is left out" if fields.get("verdict") == "reproducible" else ""
            samples = f" (samples {', '.join(map(str, fields['samples'][:8]))} ...)" if fields.get("samples") else ""
            self.say(f"{self._name}: step {fields['step']:,}{left_out}: {fields['reason']}{samples}")
        elif kind in ("plan", "fallback"):
            self.say(f"{self._name}: {fields.get('changed') or fields['reason']}")
        elif kind == "eval":
            shown = "  ".join(f"{name} {value:.4f}" for name, value in fields.items() if name != "step")
            self.say(f"{self._name}  step {fields['step']:,}  {shown}")
        elif kind in ("throttle", "pressure"):
            self.say(f"{self._name}: {fields['reason']}")
            self._heat = _heat_words(fields) if fields.get("about") == "heat" else self._heat
        elif kind == "vitals":
            self._heat = fields["heat"]
        elif kind == "epoch":
            self._end_epoch(fields)
        elif kind == "step":
            self._step(fields)
        elif kind == "measuring":
            self._draw(lambda: f"{self._name}  {fields['words']}")
        elif kind == "end":
            self.close()
            if fields["state"] == "stopped":
                self.say(f"{self._name}: stopped after step {fields['step']:,}; the same call goes on")

    def say(self, line: str) -> None:
        """A line that stays."""
        self.close()
        self._stream.write(printable(line) + "\n")
        self._stream.flush()

    def _step(self, fields: dict[str, Any]) -> None:
        now = time.monotonic()
        self._seen.append((now, fields["step"], fields["samples"]))
        self._draw(lambda: self._line(fields))

    def _draw(self, make: Callable[[], str]) -> None:
        """A line that the next one takes the place of, on a terminal; elsewhere one that stays, now and then."""
        now = time.monotonic()
        if now - self._shown_at < (_REDRAW_SECONDS if self._has_terminal else _LINE_SECONDS):
            return
        self._shown_at = now
        line = make()
        if self._has_terminal:
            columns = shutil.get_terminal_size((120, 40)).columns
            self._stream.write(f"\r\x1b[2K{printable(line)[: columns - 1]}")
            self._stream.flush()
            self._is_open = True
        else:
            self.say(line)

    def _line(self, fields: dict[str, Any]) -> str:
        step = fields["step"]
        parts = [
            f"{self._name}  {step:,}" + (f"/{self._total:,}" if self._total else ""),
            f"epoch {fields['epoch'] + 1}" + (f"/{self._epochs}" if self._epochs else ""),
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
        if self._heat:
            parts.append(self._heat)
        if self._has_terminal:
            parts.append("^C saves and stops")
        return "  ".join(parts)

    def _end_epoch(self, fields: dict[str, Any]) -> None:
        memory = fields.get("memory") or {}
        used, limit = memory.get("peak") or memory.get("allocated"), memory.get("limit")
        if used:
            self._memory = show_bytes(used) + (f" of {show_bytes(limit)}" if limit else "")
        of_all = f"/{self._epochs}" if self._epochs else ""
        took = show_seconds(fields["epoch_seconds"])
        self.say(f"{self._name}  epoch {fields['epoch']}{of_all} took {took}  {self._memory}".rstrip())

    def close(self) -> None:
        """Clears a line that was to be redrawn, so that others can write."""
        if self._is_open:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._is_open = False


def _heat_words(fields: dict[str, Any]) -> str:
    """ "cool", "hot", "hot 1.3x slower"; without a sensor only "1.3x slower", or nothing."""
    state = fields["state"]
    words = [state] if state != "slow" and "thermal" in fields else []
    if state != "cool" and "factor" in fields:
        words.append(f"{fields['factor']:.1f}x slower")
    return " ".join(words)
