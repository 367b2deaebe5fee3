"""The outputs for progress: a single display in a notebook, lines in a file."""

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from many_epochs import EPOCHS, send_many_epochs
from whet.training.callbacks.progress_line import ProgressLine
from whet.training.callbacks.progress_screen import NotebookScreen, PlainScreen, open_screen


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
    send_many_epochs(ProgressLine("<script>\x1b[2J", epochs=EPOCHS))
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
