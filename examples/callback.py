"""A callback with state: it smooths the loss, asks for a stop once it is low enough, and survives a resume.

python examples/callback.py runs/callback
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import whet


class StopWhenSmooth(whet.Callback):
    """Averages the loss of every fifth step, and stops the run once the average is below a threshold."""

    def __init__(self, threshold):
        self.threshold = threshold
        self.average = None
        self.readings = 0

    def on_start(self, run):
        # A resumed run has called load_state_dict before.
        print(f"starting with {self.readings} readings")

    def after_step(self, state, outcome):
        if state.step % 5:
            # Reading a loss waits for the device, so not every step does it.
            return None
        loss = float(outcome.loss)
        self.average = loss if self.average is None else 0.8 * self.average + 0.2 * loss
        self.readings += 1
        if self.average < self.threshold:
            return whet.Action.STOP(f"the average loss is below {self.threshold}")
        return None

    def on_end(self, state, error):
        print(f"ending at step {state.step} with {self.readings} readings, average {self.average:.3f}")

    def state_dict(self):  # plain JSON, saved with every checkpoint
        return {"average": self.average, "readings": self.readings}

    def load_state_dict(self, state):  # called on a resume, and on a rollback
        self.average, self.readings = state["average"], state["readings"]


def train(run):
    x = torch.randn(800, 10, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] * x[:, 1] > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    return whet.train(
        model,
        DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True),
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        epochs=30,
        epochs_per_session=3,  # each call trains three epochs; without it, interrupt the program yourself
        run=run,
        callbacks=[StopWhenSmooth(threshold=0.3)],
        on_event=None,
    )


if __name__ == "__main__":
    run = sys.argv[1] if len(sys.argv) > 1 else "runs/callback"
    result = train(run)
    while "average loss" not in result.reason:
        result = train(run)
    print(result.reason)
