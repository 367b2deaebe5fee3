"""Input that a session refuses before the first step."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import whet
from small_models import convnet, images
from small_training import cross_entropy, sgd, small_workload, train
from whet.base.errors import WhetError
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("data", "options", "what"),
    [
        ((torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.long)), {}, "the data is empty"),
        (images(5, seed=0), {}, "smaller than one global batch"),
        ((torch.full((9, 1, 8, 8), math.nan), torch.zeros(9, dtype=torch.long)), {}, "NaN or Inf"),
        ((torch.zeros(9, 1, 8, 8), torch.zeros(8, dtype=torch.long)), {}, "equal lengths"),
        (3, {}, "cannot train on this data"),
        (images(9, seed=0), {"global_batch_size": 0}, "global_batch_size"),
        (images(9, seed=0), {"epochs": -1}, "epochs"),
        (images(9, seed=0), {"epohcs": 1}, "unknown keyword"),
        (images(9, seed=0), {"clip": 0}, "clip"),
        (images(9, seed=0), {"schedule": "cosin"}, "schedule must be"),
        (images(9, seed=0), {"device": "cuda"}, "cuda"),
        (images(9, seed=0), {"device": "tpu"}, "tpu"),
        (images(9, seed=0), {"loss": lambda m: torch.zeros(3, requires_grad=True)}, "one number"),
        (images(9, seed=0), {"loss": lambda m: 0.5}, "a tensor"),
        (images(9, seed=0), {"loss": lambda m: torch.zeros(())}, "depend on any parameter"),
        (images(9, seed=0), {"overrides": {"micro_bach": 3}}, "no such setting"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_trained(data, options, what: str, tmp_path: Path) -> None:
    model = convnet()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(WhetError) as caught:
        train(model, data, run=tmp_path / "run", **options)
    assert what in str(caught.value)
    assert not list(tmp_path.iterdir()), "nothing is half-written"
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_batch_that_is_not_stepped_is_an_error() -> None:
    model = convnet()
    with (
        pytest.raises(WhetError, match="once for each batch"),
        whet.Session(model, sgd(model), images(16, seed=0), global_batch_size=8) as session,
    ):
        for _ in session:
            pass


def test_a_missing_device_is_an_error_or_a_reported_fallback(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match="mps"):
        train(convnet(), images(16, seed=0), device="mps")
    logged: list[tuple[str, dict]] = []
    train(
        convnet(),
        images(16, seed=0),
        device="mps",
        overrides={"on_device_failure": "cpu"},
        on_event=lambda kind, fields: logged.append((kind, fields)),
        run=tmp_path / "run",
    )
    (reported,) = [fields for kind, fields in logged if kind == "plan"]
    assert "mps is not available" in reported["message"]
    (event,) = read_events(open_run(tmp_path / "run"), kinds=("plan",))
    assert event.get("exact") is False


def test_an_unusable_planned_device_is_an_error_or_a_reported_fallback() -> None:
    from whet.machine.known import load_machine
    from whet.plan.plan import make_plan
    from whet.step.apply_plan import open_planned_device

    plan = make_plan(load_machine("m2-air-8gb"), small_workload(), overrides={"on_device_failure": "cpu", "threads": 1})
    replanned, device, fallback_reason = open_planned_device(plan)
    assert device.kind == replanned.device == "cpu"
    assert replanned.high_watermark is None
    assert "mps" in (fallback_reason or "")
    with pytest.raises(WhetError, match="mps"):
        open_planned_device(make_plan(load_machine("m2-air-8gb"), small_workload(), overrides={"threads": 1}))


def test_a_refusal_leaves_no_lock(tmp_path: Path) -> None:
    options = {"run": tmp_path / "run"}
    train(convnet(), images(16, seed=0), **options)
    with pytest.raises(WhetError) as refused:
        train(convnet(), images(16, seed=0), global_batch_size=4, **options)
    train(convnet(), images(16, seed=0), **options)
    assert "global_batch_size" in str(refused.value)


def test_evaluate_without_data_is_refused_at_once() -> None:
    with pytest.raises(WhetError, match="evaluate has no data"):
        train(convnet(), images(16, seed=0), evaluate=lambda model, micro_batches: {})


def test_an_optimizer_over_other_parameters_is_refused() -> None:
    model = convnet()
    with pytest.raises(WhetError, match="not the model's"):
        train(model, images(16, seed=0), optimizer=sgd(convnet()))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"optimizer": "adamw"}, "must be a torch.optim.Optimizer"),
        ({"clip": "1"}, "clip"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"mode": "maximum"}, "mode must be auto, min or max"),
        ({"warmup_steps": 0.5}, "warmup_steps"),
    ],
)
def test_wrong_kinds_are_refused(options: dict, what: str) -> None:
    with pytest.raises(WhetError, match=what):
        train(convnet(), images(16, seed=0), **options)


def test_a_loss_that_reaches_nothing_is_refused() -> None:
    model, other = convnet(), convnet()
    with pytest.raises(WhetError, match="does not depend on any parameter"):
        train(model, images(16, seed=0), loss=lambda m: nn.functional.cross_entropy(other(m.x), m.y))


def test_a_second_scheduler_is_refused() -> None:
    model = convnet()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    with whet.Session(model, optimizer, images(32, seed=0), global_batch_size=8) as session:
        batches = iter(session)
        session.step(cross_entropy(model), next(batches))
        scheduler.step()
        second = next(batches)
        with pytest.raises(WhetError, match="the learning rate was changed outside the session"):
            session.step(cross_entropy(model), second)


def test_a_batch_is_stepped_once_and_inside_the_session() -> None:
    model = convnet()
    session = whet.Session(model, sgd(model), images(32, seed=0), global_batch_size=8)
    with pytest.raises(WhetError, match="in a `with` statement"):
        next(iter(session))
    with session:
        batches = iter(session)
        first = next(batches)
        session.step(cross_entropy(model), first)
        with pytest.raises(WhetError, match="once, in order"):
            session.step(cross_entropy(model), first)
    with pytest.raises(WhetError, match="entered only once"), session:
        pass


@pytest.mark.parametrize("name", ["ids", "fields", "keys", "data"])
def test_fields_may_have_any_name(name: str) -> None:
    model = nn.Linear(1, 1)
    before = model.weight.detach().clone()
    data = {name: torch.randn(16, 1), "y": torch.zeros(16)}
    train(model, data, loss=lambda batch: model(batch[name]).square().mean())
    assert not torch.equal(model.weight, before)


def test_an_evaluation_must_not_leave_the_model_in_eval_mode(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    data = torch.randn(16, 3), torch.randn(16, 1)
    with whet.Session(model, sgd(model), data, global_batch_size=4, run=tmp_path / "run") as session:
        batches = iter(session)
        session.step(nn.functional.mse_loss, next(batches))
        model.eval()
        second = next(batches)
        with pytest.raises(WhetError, match=r"in eval mode(.|\n)*before step 2(.|\n)*model.train\(\)"):
            session.step(nn.functional.mse_loss, second)
        model.train()
        session.step(nn.functional.mse_loss, second)
    assert session.progress.step == 2


def test_a_wrapper_of_a_dataloader_is_refused() -> None:
    """Its batches would be taken for samples, and every step would train on several batches."""

    class Prefetching:
        def __init__(self, loader: DataLoader[Any]) -> None:
            self.loader = loader

        def __iter__(self) -> Iterator[Any]:
            return iter(self.loader)

        def __len__(self) -> int:
            return len(self.loader)

    model = nn.Linear(3, 1)
    loader = DataLoader(TensorDataset(torch.randn(16, 3), torch.randn(16, 1)), batch_size=4)
    for options in ({}, {"global_batch_size": 4}):
        with pytest.raises(WhetError, match=r"batches of a DataLoader(.|\n)*data.loader"):
            whet.train(model, Prefetching(loader), loss=nn.functional.mse_loss, optimizer=sgd(model), **options)
