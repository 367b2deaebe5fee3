"""Progress output: few lines for any number of epochs, and a single display in a notebook."""

import io
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from whet.base.units import GB
from whet.training.callbacks import progress_line
from whet.training.callbacks.progress_line import NotebookScreen, PlainScreen, ProgressLine, open_screen

EPOCHS = 3_000


def live(line: ProgressLine) -> None:
    """A run of many short epochs."""
    line("start", {"step": 0, "total_steps": EPOCHS})
    for epoch in range(1, EPOCHS + 1):
        line("step", {"step": epoch, "samples": 32 * epoch, "epoch": epoch - 1, "loss": 1 / epoch})
        line("eval", {"step": epoch, "accuracy": 0.5, "confusion": {"labels": ["a"]}})
        line("epoch", {"epoch": epoch, "epoch_seconds": 0.01})
        if epoch == EPOCHS // 2:
            line("warning", {"reason": "the disk is full", "retry": "soon"})
    line("end", {"step": EPOCHS, "state": "stopped", "reason": "stopped by Ctrl-C"})


def test_thousands_of_short_epochs_are_few_plain_lines() -> None:
    stream = io.StringIO()
    live(ProgressLine("text", epochs=EPOCHS, stream=stream))
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


class SimulatedShell:
    """A simulated notebook shell that records published displays."""

    kernel = True

    def __init__(self) -> None:
        self.published: list[tuple[dict[str, str], str, bool]] = []
        self.display_pub = self

    def publish(self, data: dict[str, str], *, transient: dict[str, Any], update: bool) -> None:
        self.published.append((data, transient["display_id"], update))


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> SimulatedShell:
    shell = SimulatedShell()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    return shell


def test_in_a_simulated_notebook_there_is_one_display(shell: SimulatedShell) -> None:
    live(ProgressLine("<script>\x1b[2J", epochs=EPOCHS))
    assert [update for _, _, update in shell.published] == [False, *[True] * (len(shell.published) - 1)]
    assert len({display for _, display, _ in shell.published}) == 1
    assert len(shell.published) < 30
    last = shell.published[-1][0]
    assert last["text/plain"].splitlines()[-1].endswith("stopped by Ctrl-C, at step 3,000; the same call resumes")
    assert len(last["text/plain"].splitlines()) == 2, "the warning and the end; metrics are in the progress line"
    assert "<script>" not in last["text/html"]
    assert "\x1b" not in last["text/plain"] + last["text/html"]
    assert any("<progress" in data["text/html"] for data, _, _ in shell.published)


def test_a_custom_stream_is_not_a_notebook(shell: SimulatedShell) -> None:
    assert isinstance(open_screen(None, io.StringIO()), NotebookScreen)
    assert isinstance(open_screen(io.StringIO(), io.StringIO()), PlainScreen)
    del SimulatedShell.kernel  # IPython in a terminal has none.
    try:
        assert isinstance(open_screen(None, io.StringIO()), PlainScreen)
    finally:
        SimulatedShell.kernel = True


def test_in_a_real_kernel_there_is_one_display() -> None:
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    code = (
        "from whet.training.callbacks.progress_line import ProgressLine\n"
        "line = ProgressLine('text', epochs=900)\n"
        "line('start', {'step': 0, 'total_steps': 900})\n"
        "for epoch in range(1, 901):\n"
        "    line('step', {'step': epoch, 'samples': epoch, 'epoch': epoch - 1, 'loss': 0.5})\n"
        "    line('epoch', {'epoch': epoch, 'epoch_seconds': 0.01})\n"
        "line('end', {'step': 900, 'state': 'stopped', 'reason': 'stopped by Ctrl-C'})\n"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, timeout=600).execute()
    (output,) = notebook.cells[0].outputs
    assert output.output_type == "display_data"
    assert output.data["text/plain"].splitlines()[-1].startswith("text: stopped by Ctrl-C")
