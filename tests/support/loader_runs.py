"""Runs that record which batches a loss sees, to compare them with the batches of a plain loop."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import whet
from whet.run.events import read_events
from whet.run.folder import open_run


@dataclass
class Seen:
    """What a run has computed with."""

    batches: list[Any] = field(default_factory=list)
    """The batches that the loss saw, one for each step."""
    ids: list[list[int]] = field(default_factory=list)
    weights: Tensor | None = None
    exactness: str | None = None
    """What the run says about its resume; None if it did not resume."""


class SimulatedKillError(Exception):
    """Raised inside a step: nothing is saved, as after a SIGKILL."""


def total(value: Any) -> Tensor:
    """Return one number that depends on every value and every type in a batch."""
    if isinstance(value, Tensor):
        numbers = value.detach().to(torch.float64).nan_to_num()
        places = torch.arange(1, numbers.numel() + 1, dtype=torch.float64)
        return (numbers.reshape(-1) * places.sqrt()).sum()
    if isinstance(value, np.ndarray):
        return total(torch.as_tensor(value))
    if isinstance(value, Mapping):
        return sum((total(item) for item in value.values()), torch.zeros(()))
    if isinstance(value, tuple | list):
        return sum((total(item) * (1 + 0.1 * place) for place, item in enumerate(value)), torch.zeros(()))
    if dataclasses.is_dataclass(value):
        return total([getattr(value, item.name) for item in dataclasses.fields(value)])
    return torch.tensor(float(len(str(value))))


def run_batches(
    data: Any,
    *,
    run: Path | None = None,
    epochs: int = 2,
    stop: int | None = None,
    kill: int | None = None,
    workers: int = 0,
    **options: Any,
) -> Seen:
    """Train on whole batches. `stop` leaves the loop after that many steps, `kill` fails inside that step."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = Seen()

    def loss(batch: Any) -> Tensor:
        seen.batches.append(copy.deepcopy(batch))
        # The draw shows whether reading data moves the random numbers of steps.
        number = (total(batch) * 1e-2).sin().float() + torch.randn(()) * 0.1
        return (model(number.reshape(1, 1)) - 1).square().mean()

    overrides = {"threads": 1, "workers": workers, "checkpoint_steps": 2, **options.pop("overrides", {})}
    defaults = {"device": "cpu", "split_batch": False, "epochs": epochs, "run": run, "overrides": overrides}
    with whet.Session(model, optimizer, data, **{**defaults, **options}) as session:
        for batch in session:
            seen.ids.append(batch.ids.tolist())
            if session.state.step + 1 == kill:
                raise_in_step(session, batch)
            session.step(loss, batch)
            if session.state.step == stop:
                break
    seen.weights = model.weight.detach().clone()
    if run is not None:
        resumed = [event.get("exactness") for event in read_events(open_run(run), kinds=("resume",))]
        seen.exactness = resumed[-1] if resumed else None
    return seen


def raise_in_step(session: whet.Session, batch: Any) -> None:
    def fail(_: Any) -> Tensor:
        raise SimulatedKillError

    session.step(fail, batch)


def resumed_batches(make: Callable[[], Any], folder: Path, *, kill: int, **options: Any) -> Seen:
    """Kill a run in a step, resume it with new objects, and return what the resumed part has computed with."""
    with contextlib.suppress(SimulatedKillError):
        run_batches(make(), run=folder, kill=kill, **options)
    return run_batches(make(), run=folder, **options)


def expected_batches(loader: DataLoader, ids: list[list[int]]) -> list[Any]:
    """Return what the loader makes of these samples."""
    return [loader.collate_fn([loader.dataset[index] for index in batch]) for batch in ids]


def differences(ours: Any, theirs: Any, where: str = "batch") -> str | None:
    """Return the first difference of two batches, in values or types; None if there is none."""
    if type(ours) is not type(theirs):
        return f"{where}: {type(ours).__name__} and {type(theirs).__name__}"
    if isinstance(ours, Tensor):
        is_same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        is_same = is_same and torch.equal(ours.nan_to_num(), theirs.nan_to_num())
        return None if is_same and torch.equal(ours.isnan(), theirs.isnan()) else f"{where}: {ours} and {theirs}"
    if isinstance(ours, np.ndarray):
        return None if ours.dtype == theirs.dtype and np.array_equal(ours, theirs) else f"{where}: arrays"
    if isinstance(ours, Mapping):
        if list(ours) != list(theirs):
            return f"{where}: {list(ours)} and {list(theirs)}"
        return _first(differences(ours[key], theirs[key], f"{where}[{key!r}]") for key in ours)
    if isinstance(ours, tuple | list):
        if len(ours) != len(theirs):
            return f"{where}: {len(ours)} and {len(theirs)} parts"
        pairs = enumerate(zip(ours, theirs, strict=True))
        return _first(differences(a, b, f"{where}[{number}]") for number, (a, b) in pairs)
    if dataclasses.is_dataclass(ours):
        names = [item.name for item in dataclasses.fields(ours)]
        return _first(differences(getattr(ours, name), getattr(theirs, name), f"{where}.{name}") for name in names)
    return None if ours == theirs else f"{where}: {ours!r} and {theirs!r}"


def _first(found: Any) -> str | None:
    return next((difference for difference in found if difference is not None), None)
