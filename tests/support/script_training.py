"""A script as users write it: functions that train with whet, for tests of the commands that take them."""

import sys
from pathlib import Path

import torch
from torch import nn

import whet


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(256, 8, generator=generator), torch.randint(0, 3, (256,), generator=generator)


def fit(model: nn.Module, data, loss, run: str) -> None:
    whet.train(
        model,
        data,
        loss=loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        global_batch_size=16,
        epochs=2,
        ema=True,
        run=run,
        overrides={"threads": 1},
        on_event=None,
    )


def cross_entropy(model: nn.Module):
    return lambda micro: nn.functional.cross_entropy(model(micro.x), micro.y)


def main(run: str = "runs/mine") -> None:
    """Trains. The weights are not seeded, as in most scripts."""
    model = make_model()
    fit(model, make_data(), cross_entropy(model), run)
    # What follows the training is no part of a proof or a measurement.
    print("the script goes on", file=sys.stdout)
    Path("after.txt").write_text("written after the training")


def own_loop() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = whet.Session(
        model, optimizer, make_data(), global_batch_size=16, run="runs/own", overrides={"threads": 1}
    )
    with session:
        for batch in session:
            session.step(cross_entropy(model), batch)


_CALLS = [0]


def with_hidden_state() -> None:
    """A mistake: the loss counts its calls, and no checkpoint knows the count."""
    model = make_model()

    def loss(micro) -> torch.Tensor:
        _CALLS[0] += 1
        return cross_entropy(model)(micro) * (1 + _CALLS[0] / 100)

    fit(model, make_data(), loss, "runs/hidden")


def with_hidden_loop_state() -> None:
    """A mistake: a variable of the loop carries state from step to step."""
    model, carried, seen = make_model(), None, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"global_batch_size": 16, "run": "runs/carried", "overrides": {"threads": 1}}
    with whet.Session(model, optimizer, make_data(), **options) as session:
        for batch in session:
            with session.manual(batch) as (x, y):
                output = model(x)
                carried = output.detach().mean(0) if carried is None else 0.9 * carried + 0.1 * output.detach().mean(0)
                optimizer.zero_grad()
                nn.functional.cross_entropy(output - carried, y).backward()
                optimizer.step()
                seen += len(x)


def with_unseeded_data() -> None:
    """A mistake: each process draws other data."""
    model = make_model()
    fit(model, (torch.randn(256, 8), torch.randint(0, 3, (256,))), cross_entropy(model), "runs/unseeded")


def returns_nothing() -> None:
    pass


def needs_arguments(rate: float, run: str = "runs/x") -> None:
    raise AssertionError("cannot be called")
