"""Input that a session refuses before the first step."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

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
    if "loss" not in options:
        assert not (tmp_path / "run").exists(), "nothing is half-written"
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_batch_that_is_not_stepped_is_an_error() -> None:
    model = convnet()
    with (
        pytest.raises(WhetError, match="every batch is one step"),
        whet.Session(model, sgd(model), images(16, seed=0), global_batch_size=8) as session,
    ):
        for _ in session:
            pass


def test_a_device_that_is_not_there_is_refused_or_said(tmp_path: Path) -> None:
    with pytest.raises(WhetError, match="mps"):
        train(convnet(), images(16, seed=0), device="mps")
    told: list[tuple[str, dict]] = []
    train(
        convnet(),
        images(16, seed=0),
        device="mps",
        overrides={"on_device_failure": "cpu"},
        on_event=lambda kind, fields: told.append((kind, fields)),
        run=tmp_path / "run",
    )
    (said,) = [fields for kind, fields in told if kind == "plan"]
    assert "mps is not available" in said["message"]
    (event,) = read_events(open_run(tmp_path / "run"), kinds=("plan",))
    assert event.get("exact") is False


def test_a_planned_device_that_cannot_be_opened_is_refused_or_said() -> None:
    from whet.machine.known import load_machine
    from whet.plan.plan import make_plan
    from whet.step.apply_plan import open_planned_device

    plan = make_plan(load_machine("m2-air-8gb"), small_workload(), overrides={"on_device_failure": "cpu", "threads": 1})
    replanned, device, fell_back = open_planned_device(plan)
    assert device.kind == replanned.device == "cpu"
    assert replanned.watermarks == "unused"
    assert "mps" in (fell_back or "")
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
    with pytest.raises(WhetError, match="belong together"):
        train(convnet(), images(16, seed=0), evaluate=lambda model, micro_batches: {})


def test_an_optimizer_over_other_parameters_is_refused() -> None:
    model = convnet()
    with pytest.raises(WhetError, match="not the model's"):
        train(model, images(16, seed=0), optimizer=sgd(convnet()))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"optimizer": "adamw"}, "must be one of torch's"),
        ({"clip": "1"}, "clip"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"mode": "maximum"}, "mode must be max or min"),
        ({"warmup_steps": 0.5}, "warmup_steps"),
    ],
)
def test_wrong_kinds_are_refused(options: dict, what: str) -> None:
    with pytest.raises(WhetError, match=what):
        train(convnet(), images(16, seed=0), **options)


def test_a_loss_that_reaches_nothing_is_refused() -> None:
    model, other = convnet(), convnet()
    with pytest.raises(WhetError, match="reaches no parameter"):
        train(model, images(16, seed=0), loss=lambda m: nn.functional.cross_entropy(other(m.x), m.y))


def test_a_scheduler_beside_ours_is_refused() -> None:
    model = convnet()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    with whet.Session(model, optimizer, images(32, seed=0), global_batch_size=8) as session:
        batches = iter(session)
        session.step(cross_entropy(model), next(batches))
        scheduler.step()
        second = next(batches)
        with pytest.raises(WhetError, match="something else changes the learning rate"):
            session.step(cross_entropy(model), second)


def test_a_batch_is_stepped_once_and_inside_the_session() -> None:
    model = convnet()
    session = whet.Session(model, sgd(model), images(32, seed=0), global_batch_size=8)
    with pytest.raises(WhetError, match="inside `with`"):
        next(iter(session))
    with session:
        batches = iter(session)
        first = next(batches)
        session.step(cross_entropy(model), first)
        with pytest.raises(WhetError, match="stepped once"):
            session.step(cross_entropy(model), first)
    with pytest.raises(WhetError, match="entered once"), session:
        pass


@pytest.mark.parametrize("name", ["ids", "fields", "map_tensors"])
def test_names_that_a_micro_batch_has_are_refused(name: str) -> None:
    with pytest.raises(WhetError, match="field name is reserved"):
        train(convnet(), {name: torch.randn(16, 1), "y": torch.zeros(16)})
