"""The event handlers that show a run: the progress line with its header, and the printer of a session."""

import io
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

from whet.base.units import GB, format_bytes, format_seconds
from whet.plan.summary import labelled, summary_lines
from whet.run.folder import shell_path
from whet.training.callbacks.event_messages import (
    event_message,
    heat_text,
    no_goal_message,
    resume_message,
    sample_answer,
)
from whet.training.callbacks.progress_screen import PlainScreen, open_screen

_WINDOW = 60
"""Number of readings over which the speed is averaged: about half a minute."""
_MIN_SECONDS = 2.0
"""Minimum seconds of readings before the remaining time is shown, because the first steps of a run are slow."""
_MAX_ROUTINE_LINES = 40
"""Number of lines about evaluations that are printed without rate limiting."""
_ROUTINE_SECONDS = 10.0
"""Minimum seconds between such lines after that: there may be thousands of evaluations."""
_SPIKE_SECONDS = 60.0
"""Minimum seconds between lines about loss spikes."""
_MAX_METRICS = 2
"""Maximum number of metrics in the progress line if there is no goal."""
_NOTABLE_SLOWDOWN = 1.5
"""Slowdowns below this factor appear in the report but are not printed, unless a sensor reports heat."""

_ATTENTION_KINDS = ("warning", "skip", "pressure")
"""Kinds of events that are printed even without a progress line."""


class ProgressLine:
    """An event handler that shows the plan, a progress line and messages above it, by default on standard error."""

    def __init__(self, name: str = "train", *, epochs: int | None = None, stream: TextIO | None = None) -> None:
        self._name = name
        self._epochs = epochs
        # sys.stderr is None in a process that was started without a standard error stream.
        self._screen = open_screen(stream, sys.stderr or io.StringIO())
        self._total: int | None = None
        self._goal: str | None = None
        self._has_folder = True
        self._asks_for_goal = False
        """Whether the next evaluation is the first one of a run that could keep its best weights."""
        self._optimizers: list[str] = []
        self._metrics: dict[str, float] = {}
        self._estimate: str | None = None
        self._memory = ""
        self._heat = ""
        self._readings: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW)
        self._shown_at = 0.0
        self._num_routine = 0
        self._routine_at = 0.0
        self._withheld: dict[str, str] = {}
        self._num_spikes = 0
        self._spike_at = -math.inf
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "data": lambda fields: self._print_labelled("data", *fields["notes"]),
            "tuning": lambda fields: self._print_labelled("tuning", fields["message"]),
            "estimate": self._on_estimate,
            "settings": self._on_settings,
            "start": self._on_start,
            "resume": self._on_resume,
            "step": self._on_step,
            "eval": self._on_evaluation,
            "epoch": self._note_memory,
            "health": self._note_memory,
            "sensors": self._on_sensors,
            "throttle": self._on_throttle,
            "spike": self._on_spike,
            "measuring": lambda fields: self._draw(lambda: f"{self._name}  {fields['message']}"),
            "end": self._on_end,
        }

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        """Show an event: update the progress line, or print a message."""
        if kind in self._handlers:
            self._handlers[kind](fields)
        elif (message := event_message(kind, fields)) is not None:
            self.print_line(f"{self._name}: {message}")

    def _on_estimate(self, fields: dict[str, Any]) -> None:
        self._estimate = fields["message"]

    def _on_settings(self, fields: dict[str, Any]) -> None:
        """Print the header: machine, workload, plan and estimated time."""
        path = fields.get("path")
        self._asks_for_goal = self._has_folder = path is not None
        lines = summary_lines(
            fields["plan"],
            width=self._screen.width,
            name=fields.get("name"),
            run=None if path is None else shell_path(path),
            num_done=fields["step"],
            estimate=self._estimate,
        )
        self.print_line("\n".join((*lines, "")))

    def _on_start(self, fields: dict[str, Any]) -> None:
        self._total, self._goal = fields.get("total_steps"), fields.get("goal")
        self._optimizers = fields.get("optimizers") or []

    def _on_resume(self, fields: dict[str, Any]) -> None:
        self._on_start(fields)
        self.print_line(f"{self._name}: {resume_message(fields, total=self._total)}")
        for problem in fields.get("rejected") or ():
            self.print_line(f"{self._name}: rejected a checkpoint: {problem}")
        if fields.get("lost_steps"):
            self.print_line(f"{self._name}: {fields['lost_steps']:,} steps are lost and repeated")

    def _on_evaluation(self, fields: dict[str, Any]) -> None:
        """Keep the metrics for the progress line.

        Print them if lines stay visible; print sample outputs on any screen.
        """
        self._metrics = {n: v for n, v in fields.items() if n != "step" and isinstance(v, int | float)}
        if self._asks_for_goal and self._goal is None and (message := no_goal_message(fields)) is not None:
            self.print_line(f"{self._name}: {message}")
        self._asks_for_goal = False
        answer = sample_answer(fields)
        if self._screen.is_lasting:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in self._metrics.items())
            line = f"{self._name}  step {fields['step']:,}  {shown}"
            if answer:
                self._withheld["eval"] = line
            else:
                self._print_routine("eval", line)
        if answer:
            self._print_routine("answer", f"{self._name}  for example  {answer}")

    def _on_sensors(self, fields: dict[str, Any]) -> None:
        self._heat = fields["heat"]

    def _on_throttle(self, fields: dict[str, Any]) -> None:
        is_heat = fields.get("cause") == "heat"
        is_notable = not is_heat or "thermal" in fields or fields.get("factor", 0.0) >= _NOTABLE_SLOWDOWN
        if is_notable:
            self.print_line(f"{self._name}: {fields['reason']}")
        if is_heat:
            self._heat = heat_text(fields) if is_notable else ""

    def _on_spike(self, fields: dict[str, Any]) -> None:
        """Print at most one loss spike per minute, and count the others: a noisy loss has many."""
        now = time.monotonic()
        if now - self._spike_at < _SPIKE_SECONDS:
            self._num_spikes += 1
            return
        self._print_spike_count()
        self._spike_at = now
        self.print_line(f"{self._name}: {event_message('spike', fields)}")

    def _print_spike_count(self) -> None:
        if self._num_spikes:
            self.print_line(f"{self._name}: {self._num_spikes:,} more loss spikes since then")
            self._num_spikes = 0

    def _on_end(self, fields: dict[str, Any]) -> None:
        self._print_spike_count()
        self.close()
        if fields["state"] == "stopped":
            resumes = "; the same call resumes" if self._has_folder else ""
            self.print_line(f"{self._name}: {fields['reason']}, at step {fields['step']:,}{resumes}")

    def print_line(self, line: str) -> None:
        """Print a line that stays visible above the progress line."""
        self._screen.print_line(line)

    def _print_labelled(self, label: str, *texts: str) -> None:
        for text in texts:
            self.print_line("\n".join(labelled(label, text, width=self._screen.width)))

    def _print_routine(self, kind: str, line: str) -> None:
        """Print a permanent line. After many such lines, print only the newest one every few seconds."""
        now = time.monotonic()
        self._withheld[kind] = line
        self._num_routine += 1
        if self._num_routine <= _MAX_ROUTINE_LINES or now - self._routine_at > _ROUTINE_SECONDS:
            self._routine_at = now
            self._print_withheld()

    def _print_withheld(self) -> None:
        for line in self._withheld.values():
            self.print_line(line)
        self._withheld.clear()

    def _on_step(self, fields: dict[str, Any]) -> None:
        self._readings.append((time.monotonic(), fields["step"], fields["samples"]))
        share = min(1.0, fields["step"] / self._total) if self._total else None
        self._draw(lambda: self._line(fields), share=share)

    def _draw(self, make: Callable[[], str], *, share: float | None = None) -> None:
        """Draw the progress line if enough time has passed since the last redraw. Only then is `make` called."""
        now = time.monotonic()
        if now - self._shown_at >= self._screen.redraw_seconds:
            self._shown_at = now
            self._screen.draw(make(), share=share)

    def _line(self, fields: dict[str, Any]) -> str:
        step = fields["step"]
        speed, left = self._speed(step)
        parts = {
            "step": f"{self._name}  {step:,}" + (f"/{self._total:,}" if self._total else ""),
            "epoch": f"epoch {fields['epoch'] + 1}" + (f"/{self._epochs}" if self._epochs else ""),
            "loss": self._losses(fields),
            "metrics": self._shown_metrics(),
            "speed": speed,
            "memory": self._memory,
            "heat": self._heat,
            "left": left,
            "hint": self._screen.hint,
        }
        # If the line is too long, leave out the least important parts.
        for name in ("", "hint", "memory", "epoch", "heat", "metrics"):
            parts.pop(name, None)
            line = "  ".join(part for part in parts.values() if part)
            if len(line) <= self._screen.width:
                break
        return line

    def _losses(self, fields: dict[str, Any]) -> str:
        names = [f"loss_{name}" for name in self._optimizers if f"loss_{name}" in fields] or ["loss"]
        return "  ".join(f"{name} {fields[name]:.4g}" for name in names if name in fields)

    def _shown_metrics(self) -> str:
        names = [self._goal] if self._goal in self._metrics else list(self._metrics)[:_MAX_METRICS]
        return "  ".join(f"{name} {self._metrics[name]:.4g}" for name in names if name is not None)

    def _speed(self, step: int) -> tuple[str, str]:
        """Return the samples per second and the remaining time as text; each is empty as long as it is unknown."""
        first, last = self._readings[0], self._readings[-1]
        seconds = last[0] - first[0]
        if seconds <= 0:
            return "", ""
        rate = (last[2] - first[2]) / seconds
        speed = f"{rate:,.0f} samples/s" if rate >= 100 else f"{rate:.1f} samples/s"
        steps_per_second = (last[1] - first[1]) / seconds
        if not self._total or step >= self._total or steps_per_second <= 0 or seconds < _MIN_SECONDS:
            return speed, ""
        return speed, f"{format_seconds((self._total - step) / steps_per_second)} left"

    def _note_memory(self, fields: dict[str, Any]) -> None:
        memory = fields.get("memory") or {}
        used, limit = memory.get("peak") or memory.get("allocated"), memory.get("limit")
        if used:
            self._memory = f"{used / GB:.1f}/{limit / GB:.1f} GB" if limit else format_bytes(used)

    def close(self) -> None:
        """Print the lines that were withheld and clear the progress line, so that other output can follow."""
        self._print_withheld()
        self._screen.close()


class SessionPrinter:
    """The event handler for a session that has none: prints a few lines, and no progress line.

    A line that is redrawn would mix with what the user's loop prints. There is one line each for the start or the
    resume, for a missing goal, for the end, and for the first problem of each kind.
    """

    def __init__(self) -> None:
        self._printed: set[str] = set()
        self._where = ""
        self._has_goal = self._has_folder = False

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "step":
            return
        line, topic = self._line(kind, fields), "rollback" if fields.get("rollback_reason") else kind
        if line is not None and topic not in self._printed and sys.stderr is not None:
            self._printed.add(topic)
            PlainScreen(sys.stderr).print_line(f"whet: {line}")

    def _line(self, kind: str, fields: dict[str, Any]) -> str | None:
        if kind == "settings":
            path = fields.get("path")
            self._has_folder = path is not None
            self._where = "" if path is None else f"; whet report {shell_path(path)} shows the run"
        elif kind in ("start", "resume"):
            self._has_goal = fields.get("goal") is not None
            total = fields.get("total_steps")
            if kind == "resume":
                # The line about the end says that all steps are done.
                is_done = total is not None and fields["step"] >= total
                return None if is_done else resume_message(fields, total=total)
            steps = "starts" if total is None else f"starts, {total:,} steps"
            return f'{steps}; on_event="line" shows the plan and a progress line'
        elif kind == "eval" and not self._has_goal and self._has_folder:
            return no_goal_message(fields)
        elif kind == "end":
            if fields["state"] == "stopped":
                resumes = "; the same program resumes" if self._has_folder else ""
                return f"{fields['reason']}, at step {fields['step']:,}{resumes}"
            return f"{fields['reason']} at step {fields['step']:,}{self._where}" if fields["state"] == "done" else None
        elif kind in (*_ATTENTION_KINDS, "oom"):
            return f'{event_message(kind, fields)} (on_event="line" prints more)'
        return None
