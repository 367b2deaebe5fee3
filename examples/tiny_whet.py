"""The idea of whet in 100 lines of plain PyTorch: probe, plan, train, report. It uses torch only.

python examples/tiny_whet.py
"""

import json
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import nn


def probe():
    """Return facts about this machine."""
    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    return {"device": device, "cores": os.cpu_count(), "torch": torch.__version__}


def make_plan(machine, global_batch):
    """Return settings with value and reason. The user chooses the global batch, the plan chooses the micro-batch."""
    return {
        "device": (machine["device"], "the first available of cuda, mps, cpu"),
        "micro_batch": (min(global_batch, 16), "small enough for any machine; the optimizer step stays the same"),
        "fused": (True, "the same update with fewer kernels"),
        "save_every": (20, "steps between checkpoints"),
    }


def epoch_order(seed, epoch, count):
    """Return the order of samples, a pure function: there is no loader state to save."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))


def step(model, optimizer, micro_batches, num_samples):
    """Make one optimizer step. Micro-batches are weighted by their size, so any split gives the same gradient."""
    optimizer.zero_grad()
    total = 0.0
    for x, y in micro_batches:
        loss = nn.functional.cross_entropy(model(x), y) * (len(x) / num_samples)
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


def save(folder, state):
    """Write a temporary file, then rename it: a crash leaves the old checkpoint or the new one, never half of one."""
    temporary = folder / "temporary.pt"
    torch.save(state, temporary)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(folder / "checkpoint.pt")


def train(model, x, y, plan, folder, *, global_batch, epochs, seed):
    """Train, resuming if there is a checkpoint: weights, optimizer, random state and step."""
    device = plan["device"][0]
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=plan["fused"][0])
    done = 0
    if (folder / "checkpoint.pt").exists():
        state = torch.load(folder / "checkpoint.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        done = state["step"]
    per_epoch = -(-len(x) // global_batch)
    with (folder / "events.jsonl").open("a") as log:
        for number in range(done + 1, epochs * per_epoch + 1):
            epoch, index = divmod(number - 1, per_epoch)
            rows = epoch_order(seed, epoch, len(x))[index * global_batch : (index + 1) * global_batch]
            micro_batches = [(x[r].to(device), y[r].to(device)) for r in rows.split(plan["micro_batch"][0])]
            loss = step(model, optimizer, micro_batches, len(rows))
            log.write(json.dumps({"step": number, "time": time.time(), "loss": float(loss)}) + "\n")
            if number % plan["save_every"][0] == 0:
                parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(folder, {**parts, "random": torch.get_rng_state(), "step": number})


def report(folder):
    """Print a summary. It only reads the run folder, so a bug here cannot affect the training."""
    losses = [json.loads(line)["loss"] for line in (folder / "events.jsonl").read_text().splitlines()]
    print(f"{len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(500, 10)
    y = (x[:, 0] > 0).long()
    plan = make_plan(probe(), global_batch=48)
    for name, (value, reason) in plan.items():
        print(f"{name:12} {value!s:6} {reason}")
    with tempfile.TemporaryDirectory() as folder:
        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
        train(model, x, y, plan, Path(folder), global_batch=48, epochs=5, seed=0)
        report(Path(folder))
