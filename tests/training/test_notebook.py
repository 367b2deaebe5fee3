"""Notebooks: memory that earlier cells hold is named, and an interrupt saves, stops the cell and resumes."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import whet
from fake_device import FakeDevice
from small_training import train
from whet.base.errors import InsufficientMemoryError
from whet.device.cpu import CpuDevice
from whet.training.callbacks.progress_screen import is_notebook
from whet.training.notebook import held_by_cells, name_held_memory

pytestmark = pytest.mark.torch


class SimulatedNotebook:
    """The parts of an IPython shell that whet uses."""

    kernel = True

    def __init__(self) -> None:
        self.user_ns: dict[str, object] = {}
        self.display_pub = SimpleNamespace(publish=lambda *_, **__: None)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> SimulatedNotebook:
    shell = SimulatedNotebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    return shell


def test_simulated_cells_that_hold_memory_are_named(notebook: SimulatedNotebook) -> None:
    model, data = nn.Linear(2000, 2000), torch.zeros(4_000_000)
    notebook.user_ns |= {
        "model": model,
        "data": data,
        "old": nn.Linear(3000, 3000),
        "alias": model,
        "batches": [{"x": torch.zeros(4_000_000)}],
        "small": torch.zeros(3),
        "_5": torch.zeros(9_000_000),
        "Out": {5: torch.zeros(9_000_000)},
        "number": 3,
    }
    held = held_by_cells((model, data), device=CpuDevice())
    assert {**held} == {"old": 36_012_000, "Out[5]": 36_000_000, "batches": 16_000_000}
    error = name_held_memory(
        InsufficientMemoryError("it does not fit", got="out of memory", try_="a smaller model"),
        (model, data),
        device=CpuDevice(),
    )
    assert "earlier cells hold old (34.3 MB), Out[5] (34.3 MB), batches (15.3 MB)" in str(error)
    assert "del old, batches, and run the cell again; or a smaller model" in str(error)
    assert held_by_cells((model, data), device=FakeDevice()) == {}, "these tensors are not on that device"


def test_tensors_of_the_training_data_are_not_named(notebook: SimulatedNotebook) -> None:
    x, y = torch.zeros(4_000_000, 1), torch.zeros(4_000_000, 1)
    old = DataLoader(TensorDataset(torch.zeros(5_000_000, 1)))
    data = DataLoader(Subset(TensorDataset(x, y), range(100)))
    notebook.user_ns |= {"x": x, "y": y, "data": data, "old": old}
    assert held_by_cells((data,), device=CpuDevice()) == {"old": 20_000_000}


def test_outside_of_a_notebook_nothing_is_named() -> None:
    error = InsufficientMemoryError("it does not fit", got="out of memory", try_="a smaller model")
    assert name_held_memory(error, (), device=CpuDevice()) is error


def test_simulated_shortage_of_memory_names_the_cells(notebook: SimulatedNotebook, tmp_path: Path) -> None:
    notebook.user_ns["forgotten"] = torch.zeros(4_000_000)
    model = nn.Linear(4, 3)
    events = []

    def loss(micro):
        raise torch.OutOfMemoryError("simulated: out of memory")

    with pytest.raises(InsufficientMemoryError, match=r"earlier cells hold forgotten \(15\.3 MB\)"):
        train(
            model,
            (torch.rand(16, 4), torch.randint(0, 3, (16,))),
            loss,
            run=tmp_path / "run",
            on_event=lambda kind, fields: events.append((kind, fields)),
        )
    assert any("earlier cells hold forgotten" in fields["action"] for kind, fields in events if kind == "oom")


def test_simulated_interrupt_stops_the_cell_after_saving(notebook: SimulatedNotebook, tmp_path: Path) -> None:
    import os
    import signal

    def interrupted(at: int):
        model = nn.Linear(4, 3)
        loss = nn.functional.cross_entropy
        calls = [0]

        def step_loss(micro):
            calls[0] += 1
            if calls[0] == at:
                os.kill(os.getpid(), signal.SIGINT)
            return loss(model(micro.x), micro.y)

        data = (torch.arange(256.0).view(64, 4) / 256, torch.arange(64) % 3)
        return train(model, data, step_loss, run=tmp_path / "run", measure=False, epochs=4)

    with pytest.raises(KeyboardInterrupt, match=r"saved at step \d+; run the cell again to resume"):
        interrupted(at=12)
    saved = whet.open_run(tmp_path / "run").summary()
    assert 0 < saved.step < 32
    assert interrupted(at=10**9).step == 32, "the same cell resumes"


@pytest.mark.slow
def test_a_real_kernel_is_interrupted_and_resumes(tmp_path: Path) -> None:
    manager = pytest.importorskip("jupyter_client.manager", reason="jupyter_client is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    kernel = manager.KernelManager(kernel_name="python3")
    kernel.start_kernel(cwd=str(tmp_path))
    client = kernel.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=300)
    cell = (
        "import torch, whet\n"
        "torch.manual_seed(0)\n"
        "x, y = torch.randn(4000, 8), torch.randint(0, 3, (4000,))\n"
        "model = torch.nn.Linear(8, 3)\n"
        "result = whet.train(model, (x, y), loss=lambda m: torch.nn.functional.cross_entropy(model(m.x), m.y),\n"
        "    optimizer=torch.optim.SGD(model.parameters(), lr=0.1), global_batch_size=8, epochs=20, run='run',\n"
        "    overrides={'threads': 1}, measure=False)\n"
        "print('went on', result.step)\n"
    )

    def execute(*, is_interrupted: bool) -> tuple[set[str], str, list[str]]:
        sent, displays, shown, others = client.execute(cell), set(), "", []
        while True:
            message = client.get_iopub_msg(timeout=300)
            if message["parent_header"].get("msg_id") != sent:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind in ("display_data", "update_display_data"):
                displays.add(content["transient"]["display_id"])
                shown = content["data"]["text/plain"]
                if is_interrupted and "  loss " in shown:
                    is_interrupted = False
                    time.sleep(0.2)
                    kernel.interrupt_kernel()
            elif kind == "stream":
                others.append(content["text"])
            elif kind == "error":
                others.append(f"{content['ename']}: {content['evalue']}")
            elif kind == "status" and content["execution_state"] == "idle":
                return displays, shown, others

    try:
        displays, shown, others = execute(is_interrupted=True)
        assert len(displays) == 1, "one display, updated in place"
        assert "\r" not in shown
        assert "the same call resumes" in shown
        assert others[-1].startswith("KeyboardInterrupt: saved at step")
        displays, shown, others = execute(is_interrupted=False)
        assert others == ["went on 10000\n"]
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


def test_a_terminal_is_no_notebook() -> None:
    assert not is_notebook()
