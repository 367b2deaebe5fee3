"""A run on one line while it trains: what a person wants to know of each event, in words."""

import io
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

from whet.base.units import show_bytes, show_seconds
from whet.engine.progress_screen import open_screen

_WINDOW = 20
"""Speed is taken over the last this many readings."""
_MOST_ROUTINE = 40
_ROUTINE_SECONDS = 10.0
"""After so many lines about epochs and evaluations there is one in so many seconds: short epochs may be thousands."""

_ASKED, _SAID = 70, 100
"""Characters of a question and an answer that are shown."""


class ProgressLine:
    """Is told of every event of a run, and shows what a person wants to know; on standard error unless told."""

    def __init__(self, name: str = "train", *, epochs: int | None = None, stream: TextIO | None = None) -> None:
        self._name = name
        self._epochs = epochs
        # A process may have been started without standard error.
        self._screen = open_screen(stream, sys.stderr or io.StringIO())
        self._total: int | None = None
        self._memory = ""
        self._heat = ""
        self._seen: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW)
        self._shown_at = 0.0
        self._num_routine = 0
        self._routine_at = 0.0
        self._withheld: dict[str, str] = {}

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
        elif kind == "stopping":
            self.say(f"{self._name}: {fields['words']}")
        elif kind in ("plan", "fallback"):
            self.say(f"{self._name}: {fields.get('changed') or fields['reason']}")
        elif kind == "eval":
            metrics = {n: v for n, v in fields.items() if n != "step" and isinstance(v, int | float)}
            shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            line = f"{self._name}  step {fields['step']:,}  {shown}"
            if answer := _free_answer(fields):
                self._withheld[kind] = line
                self._routine("answer", f"{self._name}  for example  {answer}")
            else:
                self._routine(kind, line)
        elif kind in ("throttle", "pressure"):
            self.say(f"{self._name}: {fields['reason']}")
            self._heat = _heat_words(fields) if fields.get("about") == "heat" else self._heat
        elif kind == "vitals":
            self._heat = fields["heat"]
        elif kind == "health":
            self._note_memory(fields)
        elif kind == "epoch":
            self._end_epoch(fields)
        elif kind == "step":
            self._step(fields)
        elif kind == "measuring":
            self._draw(lambda: f"{self._name}  {fields['words']}")
        elif kind == "end":
            self._say_withheld()
            if fields["state"] == "stopped":
                # A reason is given where it was left in the middle of something.
                at_once = ", and nothing more was saved; the same call goes on from the last checkpoint"
                how = at_once if "reason" in fields else "; the same call goes on"
                self.say(f"{self._name}: stopped after step {fields['step']:,}{how}")
            self.close()

    def say(self, line: str) -> None:
        """A line that stays."""
        self._screen.say(line)

    def _routine(self, kind: str, line: str) -> None:
        """A line that stays, unless there were many like it: then only the newest, now and then."""
        now = time.monotonic()
        self._withheld[kind] = line
        self._num_routine += 1
        if self._num_routine <= _MOST_ROUTINE or now - self._routine_at > _ROUTINE_SECONDS:
            self._routine_at = now
            self._say_withheld()

    def _say_withheld(self) -> None:
        for line in self._withheld.values():
            self.say(line)
        self._withheld.clear()

    def _step(self, fields: dict[str, Any]) -> None:
        self._seen.append((time.monotonic(), fields["step"], fields["samples"]))
        share = min(1.0, fields["step"] / self._total) if self._total else None
        self._draw(lambda: self._line(fields), share=share)

    def _draw(self, make: Callable[[], str], *, share: float | None = None) -> None:
        """A line that the next one takes the place of; where that cannot be, one that stays, now and then."""
        now = time.monotonic()
        if now - self._shown_at >= self._screen.redraw_seconds:
            self._shown_at = now
            self._screen.draw(make(), share=share)

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
        if self._screen.hint:
            parts.append(self._screen.hint)
        return "  ".join(parts)

    def _note_memory(self, fields: dict[str, Any]) -> None:
        memory = fields.get("memory") or {}
        used, limit = memory.get("peak") or memory.get("allocated"), memory.get("limit")
        if used:
            self._memory = show_bytes(used) + (f" of {show_bytes(limit)}" if limit else "")

    def _end_epoch(self, fields: dict[str, Any]) -> None:
        self._note_memory(fields)
        of_all = f"/{self._epochs}" if self._epochs else ""
        took = show_seconds(fields["epoch_seconds"])
        self._routine("epoch", f"{self._name}  epoch {fields['epoch']}{of_all} took {took}  {self._memory}".rstrip())

    def close(self) -> None:
        """Clears a line that was to be redrawn, so that others can write."""
        self._screen.close()


def _heat_words(fields: dict[str, Any]) -> str:
    """ "cool", "hot", "hot 1.3x slower"; without a sensor only "1.3x slower", or nothing."""
    state = fields["state"]
    words = [state] if state != "slow" and "thermal" in fields else []
    if state != "cool" and "factor" in fields:
        words.append(f"{fields['factor']:.1f}x slower")
    return " ".join(words)


def _free_answer(fields: dict[str, Any]) -> str:
    """The first sample of an evaluation where answers are written, not chosen among classes; in one line."""
    samples = fields.get("samples")
    if not samples or "classes" in fields or "confusion" in fields or not isinstance(samples[0].get("predicted"), str):
        return ""
    asked, said = (" ".join(str(samples[0].get(name, "")).split()) for name in ("input", "predicted"))
    asked = asked if len(asked) <= _ASKED else f"... {asked[-_ASKED:]}"
    line = f"{asked}  ->  {said[:_SAID]}{' ...' if len(said) > _SAID else ''}"
    return "".join(sign if sign.isprintable() else "?" for sign in line)
