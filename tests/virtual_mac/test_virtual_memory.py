"""Memory runs out at the virtual Mac's watermark: a smaller micro-batch, and the run continues."""

import pytest
from conftest import Start

from virtual_process import INSTALL

pytestmark = [pytest.mark.torch, pytest.mark.virtual_mac]

TRAIN = (
    INSTALL
    + """
import sys, torch, whet
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))

generator = torch.Generator().manual_seed(1)
x, y = torch.randn(768, 64, generator=generator), torch.randint(0, 4, (768,), generator=generator)

def train(name, device):
    model, seen, shown = make(), {}, []
    with whet.Session(
        model, whet.OptimizerChoice(lr=1e-3), (x, y), run=name, device=device, global_batch_size=256, epochs=2,
        on_event=lambda kind, fields: shown.append((kind, fields)), overrides={"threads": 1, "micro_batch": 256},
    ) as session:
        for batch in session:
            if device == "mps" and session.state.step == 2:
                torch.mps.empty_cache()
                free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
                virtual_mac.hold_memory(free - int(sys.argv[1]) * 2**20)
            def loss(micro):
                # The size of a large model's activations.
                torch.empty(len(micro.sample_ids) * int(sys.argv[2]) * 2**20, dtype=torch.uint8, device=micro.x.device)
                return nn.functional.cross_entropy(model(micro.x), micro.y)
            session.step(loss, batch)
            seen[session.state.step] = batch.ids.tolist()
        micro = session.plan.micro_batch
    return model.cpu(), seen, shown, micro
"""
)


def test_out_of_memory_at_the_watermark_halves_the_micro_batch(python: Start) -> None:
    code = (
        TRAIN
        + """
ours, seen, shown, micro = train("mps", "mps")
virtual_mac.hold_memory(0)
theirs, seen_by_cpu, _, _ = train("cpu", "cpu")
assert micro < 256, micro
assert seen == seen_by_cpu
assert max(seen) == 6
ran_out = [fields for kind, fields in shown if kind == "oom"]
assert "MPS backend out of memory" in ran_out[0]["reason"], ran_out
for a, b in zip(ours.parameters(), theirs.parameters()):
    assert (a - b).norm() <= 1e-5 * b.norm(), (a - b).norm() / b.norm()
print("micro", micro, "events", len(ran_out), [f["action"] for f in ran_out])
"""
    )
    done = python(code, 900, 4)
    assert done.returncode == 0, done.stderr
    assert "micro 128 events 2" in done.stdout, done.stdout
    assert "micro-batch 128 instead of 256" in done.stdout


def test_a_model_that_cannot_fit_is_reported(python: Start) -> None:
    code = TRAIN + "\ntrain('mps', 'mps')\n"
    done = python(code, 600, 700)
    assert done.returncode == 1
    assert "a step of this model needs more memory than is available" in done.stderr
    assert "memory ran out while it was tested" in done.stderr
