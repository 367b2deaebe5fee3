"""The progress line: one line that is redrawn on a terminal, a display in a notebook, plain lines elsewhere."""

import io
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from html import escape
from typing import Any, Protocol, TextIO

from whet.base.units import format_bytes, format_seconds, printable


class ProgressScreen(Protocol):
    """One place that shows how a run is going."""

    redraw_seconds: float
    """The line is drawn no more often."""
    hint: str
    """What the reader can do here."""

    def draw(self, line: str, *, share: float | None) -> None:
        """Shows how far the run has come, `share` of all; the next time replaces it."""

    def say(self, line: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """Takes the drawn line away, and shows all that was said."""


def open_screen(stream: TextIO | None, fallback: TextIO) -> ProgressScreen:
    """The screen of this process; of `stream` if one is given."""
    if stream is None and (shell := _notebook_shell()) is not None:
        return NotebookScreen(shell)
    chosen = stream or fallback
    return TerminalScreen(chosen) if chosen.isatty() else PlainScreen(chosen)


class PlainScreen:
    """A file or a pipe."""

    redraw_seconds = 10.0
    hint = ""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def draw(self, line: str, *, share: float | None) -> None:  # noqa: ARG002
        self.say(line)

    def say(self, line: str) -> None:
        self._stream.write(printable(line) + "\n")
        self._stream.flush()

    def close(self) -> None:
        pass


class TerminalScreen:
    """A terminal: the line is drawn over the one before."""

    redraw_seconds = 0.1
    hint = "^C saves and stops"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_open = False

    def draw(self, line: str, *, share: float | None) -> None:  # noqa: ARG002
        columns = shutil.get_terminal_size((120, 40)).columns
        self._stream.write(f"\r\x1b[2K{printable(line)[: columns - 1]}")
        self._stream.flush()
        self._is_open = True

    def say(self, line: str) -> None:
        self.close()
        self._stream.write(printable(line) + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._is_open:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._is_open = False


class NotebookScreen:
    """A notebook: one display that is updated, however long the run is."""

    redraw_seconds = 0.5
    hint = "interrupt the kernel to save and stop"
    _most_lines = 12

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._lines: deque[str] = deque(maxlen=self._most_lines)
        self._left_out = 0
        self._line = ""
        self._share: float | None = None
        self._id: str | None = None
        self._updated_at = 0.0
        self._is_closed = False

    def draw(self, line: str, *, share: float | None) -> None:
        self._line, self._share, self._is_closed = printable(line), share, False
        self._update()

    def say(self, line: str) -> None:
        for part in printable(line).split("\n"):
            self._left_out += len(self._lines) == self._most_lines
            self._lines.append(part)
        # Many lines in one second are one message to the browser; the next drawing or the end brings the rest.
        if self._is_closed or time.monotonic() - self._updated_at > self.redraw_seconds:
            self._update()

    def close(self) -> None:
        self._is_closed, self._line, self._share = True, "", None
        if self._id is not None or self._lines:
            self._update()

    def _update(self) -> None:
        self._updated_at = time.monotonic()
        lines = [f"({self._left_out:,} lines before)"] if self._left_out else []
        lines += self._lines
        plain = "\n".join([*lines, self._line]).rstrip()
        bar = "" if self._share is None else f'<progress value="{self._share:.4f}" max="1"></progress> '
        drawn = f"{bar}<code>{escape(self._line)}</code>" if self._line else ""
        html = f'<pre style="margin:0">{escape(chr(10).join(lines))}</pre>{drawn}'
        is_new = self._id is None
        self._id = self._id or f"whet-{id(self):x}-{time.monotonic_ns():x}"
        self._shell.display_pub.publish(
            {"text/plain": plain, "text/html": html}, transient={"display_id": self._id}, update=not is_new
        )


def _notebook_shell() -> Any:
    """The shell of the notebook that runs us; None elsewhere. IPython is not loaded for it: it is there already."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return shell if hasattr(shell, "kernel") else None


_WINDOW = 20
"""Speed is taken over the last this many readings."""
_MAX_ROUTINE_LINES = 40
_ROUTINE_SECONDS = 10.0
"""After so many lines about epochs and evaluations there is one in so many seconds: short epochs may be thousands."""

_MAX_QUESTION, _MAX_ANSWER = 70, 100
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
            if fields.get("rollback_reason"):
                self.say(f"{self._name}: goes back to step {fields['step']:,}: {fields['rollback_reason']}")
            elif self._total is not None and fields["step"] >= self._total:
                self.say(f"{self._name}: all {self._total:,} steps are done")
            else:
                self.say(f"{self._name}: goes on from step {fields['step']:,}{holds}")
            for problem in fields.get("rejected") or ():
                self.say(f"{self._name}: refused a checkpoint: {problem}")
            if fields.get("lost_steps"):
                self.say(f"{self._name}: {fields['lost_steps']:,} steps are lost and made again")
        elif kind == "warning":
            self.say(f"{self._name}: {fields['reason']}; tried again {fields['retry']}; the training goes on")
        elif kind == "oom":
            self.say(f"{self._name}: out of memory at step {fields['step']:,}; {fields['action']}")
        elif kind in ("skip", "spike"):
            left_out = " is left out" if fields.get("verdict") == "reproducible" else ""
            samples = f" (samples {', '.join(map(str, fields['samples'][:8]))} ...)" if fields.get("samples") else ""
            self.say(f"{self._name}: step {fields['step']:,}{left_out}: {fields['reason']}{samples}")
        elif kind == "stopping":
            self.say(f"{self._name}: {fields['words']}")
        elif kind in ("plan", "fallback"):
            self.say(f"{self._name}: {fields.get('message') or fields['reason']}")
        elif kind == "eval":
            metrics = {n: v for n, v in fields.items() if n != "step" and isinstance(v, int | float)}
            shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            line = f"{self._name}  step {fields['step']:,}  {shown}"
            if answer := _sample_answer(fields):
                self._withheld[kind] = line
                self._routine("answer", f"{self._name}  for example  {answer}")
            else:
                self._routine(kind, line)
        elif kind in ("throttle", "pressure"):
            self.say(f"{self._name}: {fields['reason']}")
            self._heat = _heat_text(fields) if fields.get("cause") == "heat" else self._heat
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
        if self._num_routine <= _MAX_ROUTINE_LINES or now - self._routine_at > _ROUTINE_SECONDS:
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
                parts.append(f"{format_seconds((self._total - step) / steps_per_second)} left")
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
            self._memory = format_bytes(used) + (f" of {format_bytes(limit)}" if limit else "")

    def _end_epoch(self, fields: dict[str, Any]) -> None:
        self._note_memory(fields)
        of_all = f"/{self._epochs}" if self._epochs else ""
        took = format_seconds(fields["epoch_seconds"])
        self._routine("epoch", f"{self._name}  epoch {fields['epoch']}{of_all} took {took}  {self._memory}".rstrip())

    def close(self) -> None:
        """Clears a line that was to be redrawn, so that others can write."""
        self._screen.close()


def _heat_text(fields: dict[str, Any]) -> str:
    """ "cool", "hot", "hot 1.3x slower"; without a sensor only "1.3x slower", or nothing."""
    state = fields["state"]
    words = [state] if state != "slow" and "thermal" in fields else []
    if state != "cool" and "factor" in fields:
        words.append(f"{fields['factor']:.1f}x slower")
    return " ".join(words)


def _sample_answer(fields: dict[str, Any]) -> str:
    """The first sample of an evaluation where answers are written, not chosen among classes; in one line."""
    samples = fields.get("samples")
    if not samples or "classes" in fields or "confusion" in fields or not isinstance(samples[0].get("predicted"), str):
        return ""
    asked, said = (" ".join(str(samples[0].get(name, "")).split()) for name in ("input", "predicted"))
    asked = asked if len(asked) <= _MAX_QUESTION else f"... {asked[-_MAX_QUESTION:]}"
    line = f"{asked}  ->  {said[:_MAX_ANSWER]}{' ...' if len(said) > _MAX_ANSWER else ''}"
    return "".join(sign if sign.isprintable() else "?" for sign in line)
