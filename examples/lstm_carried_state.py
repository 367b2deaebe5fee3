"""An LSTM whose hidden state is carried from batch to batch, stopped in the middle and resumed exactly.

A long sequence is divided into parallel streams, and each batch continues the streams of the batch before it. Three
things make that exact:

1. The loader is sequential, and row r of every batch belongs to stream r.
2. `split_batch=False`: the whole batch is computed at once, so that row r meets state r.
3. The state is kept in buffers of the model, so that it is saved, restored and rolled back with the weights.

python examples/lstm_carried_state.py runs/lstm
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import whet

STREAMS, LENGTH, TOKENS, WIDTH = 16, 20, 12, 48


class CarriedLstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.register_buffer("hidden", torch.zeros(1, STREAMS, WIDTH))
        self.register_buffer("cell", torch.zeros(1, STREAMS, WIDTH))

    def forward(self, tokens, is_start):
        # is_start has a 1 where a stream begins again, with each epoch.
        keep = 1 - is_start[None, :, None]
        outputs, (hidden, cell) = self.lstm(self.embed(tokens), (self.hidden * keep, self.cell * keep))
        if self.training:
            # In place and detached: the buffers stay the same tensors, and gradients end at the start of the batch.
            self.hidden.copy_(hidden.detach())
            self.cell.copy_(cell.detach())
        return self.head(outputs)


def make_loader():
    """Return batches whose rows continue those of the batch before."""
    draw = torch.Generator().manual_seed(0)
    pattern = torch.randint(0, TOKENS, (70,), generator=draw)  # longer than a batch: only the state remembers it
    streams = pattern.repeat(STREAMS * 10).reshape(STREAMS, -1)[:, : 30 * LENGTH + 1]
    chunks = streams[:, :-1].reshape(STREAMS, -1, LENGTH).transpose(0, 1).flatten(0, 1)
    targets = streams[:, 1:].reshape(STREAMS, -1, LENGTH).transpose(0, 1).flatten(0, 1)
    is_start = (torch.arange(len(chunks)) < STREAMS).float()
    return DataLoader(TensorDataset(chunks, is_start, targets), batch_size=STREAMS, shuffle=False, drop_last=True)


class StopAt(whet.Callback):
    """Stops a run after a step, as Ctrl-C would."""

    def __init__(self, step):
        self.step = step

    def after_step(self, state, outcome):
        return whet.Action.STOP("half of it") if state.step == self.step else None


def train(run, callbacks=()):
    torch.manual_seed(0)
    model = CarriedLstm()

    def loss(batch):
        tokens, is_start, targets = batch
        return nn.functional.cross_entropy(model(tokens, is_start).flatten(0, 1), targets.flatten())

    result = whet.train(
        model,
        make_loader(),
        loss=loss,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        split_batch=False,
        epochs=2,
        run=run,
        callbacks=callbacks,
        on_event=None,
    )
    return model, result


if __name__ == "__main__":
    run = sys.argv[1] if len(sys.argv) > 1 else "runs/lstm"
    _, stopped = train(run, callbacks=[StopAt(25)])
    print(f"{stopped.reason} at step {stopped.step}")
    resumed, result = train(run)
    print(f"{result.reason}: {result.step} steps, loss {whet.summarize(run).loss:.3f}")
    uninterrupted, _ = train(None)
    states = zip(resumed.state_dict().values(), uninterrupted.state_dict().values(), strict=True)
    print("the same weights and the same state as without a stop:", all(torch.equal(a, b) for a, b in states))
