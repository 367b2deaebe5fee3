"""The progress line: few lines for any number of epochs, and one line that fits a terminal."""

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from many_epochs import EPOCHS, send_many_epochs
from whet.base.units import GB
from whet.training.callbacks import progress_line
from whet.training.callbacks.progress_line import ProgressLine


def test_thousands_of_short_epochs_are_few_plain_lines() -> None:
    stream = io.StringIO()
    send_many_epochs(ProgressLine("text", epochs=EPOCHS, stream=stream))
    lines = stream.getvalue().splitlines()
    assert len(lines) < 60
    assert lines[:3] == ["text  1/3,000  epoch 1/3000  loss 1", "text  step 1  accuracy 0.5000", *lines[2:3]]
    assert "text: the disk is full; tried again soon; training continues" in lines
    assert lines[-2].startswith("text  step 3,000")
    assert lines[-1] == "text: stopped by Ctrl-C, at step 3,000; the same call resumes"


def test_an_immediate_stop_reports_that_nothing_more_was_saved() -> None:
    stream = io.StringIO()
    ProgressLine("text", stream=stream)(
        "end", {"step": 3, "state": "stopped", "reason": "stopped by Ctrl-C, and nothing more was saved"}
    )
    logged = "text: stopped by Ctrl-C, and nothing more was saved, at step 3; the same call resumes\n"
    assert stream.getvalue() == logged


def test_an_answer_that_is_written_is_shown_and_a_class_is_not() -> None:
    stream = io.StringIO()
    line = ProgressLine("chat", stream=stream)
    sample = {"input": "x" * 80 + "eat?", "expected": "No.", "predicted": "Yes,\nI \x1b" + "y" * 200}
    line("eval", {"step": 3, "perplexity": 2.0, "samples": [sample]})
    line("eval", {"step": 4, "accuracy": 0.5, "samples": [sample], "classes": {"labels": ["a"]}})
    first, second, third = stream.getvalue().splitlines()
    assert first == "chat  step 3  perplexity 2.0000"
    assert second == "chat  for example  ... " + "x" * 66 + "eat?  ->  Yes, I  " + "y" * 92 + " ..."
    assert third == "chat  step 4  accuracy 0.5000"


def test_after_many_lines_there_is_one_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress_line, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stream = io.StringIO()
    line = ProgressLine("text", stream=stream)
    for epoch in range(1, 201):
        now[0] += 1
        line("eval", {"step": epoch, "accuracy": 0.5})
    logged = [int(reported.split()[2]) for reported in stream.getvalue().splitlines()]
    assert logged == [*range(1, 41), *range(51, 201, 11)]


class SimulatedTerminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


STEP = {"step": 412, "samples": 13_184, "epoch": 1, "loss": 0.413}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[ProgressLine, SimulatedTerminal]]:
    """Makes a progress line on a simulated terminal of a width, which has made some steps."""
    now = [0.0]
    monkeypatch.setattr(progress_line, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def make(columns: int) -> tuple[ProgressLine, SimulatedTerminal]:
        monkeypatch.setenv("COLUMNS", str(columns))
        stream = SimulatedTerminal()
        line = ProgressLine("text", epochs=3, stream=stream)
        line("start", {"step": 0, "total_steps": 687, "goal": "accuracy"})
        line("health", {"memory": {"allocated": 3.9 * GB, "limit": 5.3 * GB}})
        line("eval", {"step": 400, "val_loss": 0.5, "accuracy": 0.842})
        for step in (392, 402, 412):
            now[0] += 11.8
            line("step", {**STEP, "step": step, "samples": 32 * step})
        return line, stream

    return make


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (
            130,
            "text  412/687  epoch 2/3  loss 0.413  accuracy 0.842  27.1 samples/s  3.9/5.3 GB  5 min left"
            "  Ctrl-C saves and stops",
        ),
        (100, "text  412/687  epoch 2/3  loss 0.413  accuracy 0.842  27.1 samples/s  3.9/5.3 GB  5 min left"),
        (80, "text  412/687  loss 0.413  accuracy 0.842  27.1 samples/s  5 min left"),
        (60, "text  412/687  loss 0.413  27.1 samples/s  5 min left"),
    ],
)
def test_a_simulated_terminal_has_one_line_that_fits(
    terminal: Callable[[int], tuple[ProgressLine, SimulatedTerminal]], columns: int, shown: str
) -> None:
    _, stream = terminal(columns)
    drawn = stream.getvalue().split("\r\x1b[2K")
    assert drawn[-1] == shown
    assert "\n" not in stream.getvalue(), "evaluations are in the line"


def test_each_optimizer_has_its_loss_in_the_line(
    terminal: Callable[[int], tuple[ProgressLine, SimulatedTerminal]],
) -> None:
    line, stream = terminal(120)
    line("start", {"step": 0, "total_steps": 687, "optimizers": ["d", "g"]})
    line._shown_at = -1.0
    line("step", {**STEP, "loss": 3.0, "loss_d": 1.0, "loss_g": 2.0})
    assert "  loss_d 1  loss_g 2  " in stream.getvalue()
    assert "loss 3" not in stream.getvalue()


@pytest.mark.parametrize(
    ("fields", "is_printed"),
    [({"factor": 1.2}, False), ({"factor": 2.0}, True), ({"factor": 1.2, "thermal": "heavy"}, True)],
)
def test_a_small_slowdown_without_a_sensor_is_no_message(fields: dict[str, Any], is_printed: bool) -> None:
    stream = io.StringIO()
    line = ProgressLine("text", stream=stream)
    line("throttle", {"cause": "heat", "state": "hot", "reason": "slower", **fields})
    assert stream.getvalue() == ("text: slower\n" if is_printed else "")
