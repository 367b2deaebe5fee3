"""The example notebook runs in a real kernel, and an interrupted cell resumes when it is run again."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch

# Part of the extra dev, which an older environment may not have installed yet.
nbformat = pytest.importorskip("nbformat", reason="needs pip install nbclient ipykernel")
nbclient = pytest.importorskip("nbclient", reason="needs pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="needs pip install nbclient ipykernel")

NOTEBOOK = Path(__file__).parent.parent.parent / "examples" / "notebook.ipynb"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))
    # Settings and history of the user's own notebooks stay out.
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    return nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where)


def _code(client: Any) -> list[Any]:
    return [cell for cell in client.nb.cells if cell.cell_type == "code"]


def _output(cell: Any, kind: str) -> str:
    found = [output.data[kind] for output in cell.outputs if kind in output.get("data", {})]
    return found[-1] if found else ""


def test_the_notebook_is_stored_without_outputs() -> None:
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_all_cells_run(client: Any, tmp_path: Path) -> None:
    client.execute()
    _, _, train, plot, numbers, load = _code(client)
    assert "all 10 epochs done" in _output(train, "text/plain")
    assert "<svg" in _output(plot, "image/svg+xml")
    assert _output(numbers, "text/plain").startswith("(200")
    assert "accuracy 0.9" in load.outputs[-1].text
    assert (tmp_path / "runs" / "notebook" / "run.json").exists()


@pytest.mark.slow
def test_an_interrupted_cell_saves_and_resumes_when_it_is_run_again(client: Any, tmp_path: Path) -> None:
    setup, make, train, *_ = _code(client)
    # Two hundred steps of 50 ms: the interrupt comes long before the end.
    slow = nbformat.v4.new_code_cell(
        "import time\nfast = nn.functional.cross_entropy\n"
        "class Slow(nn.Module):\n"
        "    def forward(self, logits, labels):\n"
        "        time.sleep(0.05)\n"
        "        return fast(logits, labels)\n"
        "nn.functional.cross_entropy = Slow()"
    )
    quick = nbformat.v4.new_code_cell("nn.functional.cross_entropy = fast")
    events = tmp_path / "runs" / "notebook" / "events.jsonl"

    async def interrupt_when_training() -> None:
        while not events.exists() or '"kind":"step"' not in events.read_text():
            await asyncio.sleep(0.05)
        await client.km.interrupt_kernel()

    async def interrupted() -> None:
        client.nb.cells.insert(0, slow)
        async with client.async_setup_kernel():
            for cell in (setup, slow, make):
                await client.async_execute_cell(cell, client.nb.cells.index(cell))
            index = client.nb.cells.index(train)
            client.allow_errors = True
            await asyncio.gather(client.async_execute_cell(train, index), interrupt_when_training())
            (error,) = [output for output in train.outputs if output.output_type == "error"]
            assert error.ename == "KeyboardInterrupt"
            assert "run the cell again to resume" in error.evalue
            client.allow_errors = False
            client.nb.cells.append(quick)
            await client.async_execute_cell(quick, len(client.nb.cells) - 1)
            await client.async_execute_cell(train, index)

    asyncio.run(interrupted())
    assert "all 10 epochs done" in _output(train, "text/plain")
    kinds = [event["kind"] for event in map(json.loads, events.read_text().splitlines())]
    assert (kinds.count("start"), kinds.count("resume")) == (1, 1)
