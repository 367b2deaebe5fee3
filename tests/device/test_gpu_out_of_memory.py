"""On a real GPU that runs out of memory: a smaller micro-batch, the same training."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whet
from whet.device import cuda, virtual_mac

pytestmark = [pytest.mark.gpu("cuda"), pytest.mark.torch]

LIMIT = 2 * 2**30


@pytest.fixture
def small_gpu() -> Any:
    """A CUDA card on which this process may use two gigabytes, beside what earlier tests still hold."""
    if cuda.cuda_unavailable_reason() is not None or virtual_mac.installed():
        pytest.skip(f"no cuda: {cuda.cuda_unavailable_reason()}")
    gc.collect()
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + LIMIT
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    yield "cuda"
    torch.cuda.set_per_process_memory_fraction(1.0)


def train(run: Path, *, device: str, megabytes: int) -> tuple[nn.Module, whet.Session, list[dict[str, Any]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 4))
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(1024, 64, generator=draw), torch.randint(0, 4, (1024,), generator=draw)
    logged: list[dict[str, Any]] = []

    def loss(micro: Any) -> torch.Tensor:
        # The size of a large model's activations.
        torch.empty(len(micro.sample_ids) * megabytes * 2**20, dtype=torch.uint8, device=micro.x.device)
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    with whet.Session(
        model, whet.OptimizerChoice(lr=1e-3), (x, y), run=run, device=device, global_batch_size=256, epochs=2,
        overrides={"micro_batch": 256, "precision": "fp32"},
        on_event=lambda kind, fields: logged.append(fields) if kind == "oom" else None,
    ) as session:  # fmt: skip
        for batch in session:
            session.step(loss, batch)
    return model.cpu(), session, logged


def test_out_of_memory_halves_the_micro_batch_and_the_run_continues(small_gpu: str, tmp_path: Path) -> None:
    ours, session, logged = train(tmp_path / "gpu", device=small_gpu, megabytes=20)
    theirs, _, _ = train(tmp_path / "cpu", device="cpu", megabytes=0)
    assert session.state.step == 8
    assert session.plan.micro_batch in (16, 32, 64)
    assert "CUDA out of memory" in logged[0]["reason"]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
