"""A custom loop measures its plan at its first step, when the loss is known."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import whet
from captured_steps import assert_same
from small_models import convnet, images
from whet.plan.setting import MeasuredSetting
from whet.run.events import History
from whet.training import tune
from whet.training.run_config import plan_from_rules

pytestmark = pytest.mark.torch

FOUND = {"layout": "channels_last", "precision": "bf16", "threads": 1}


@pytest.fixture
def measured(monkeypatch):
    """Simulated: a search that finds other settings, in place of timed steps. Returns the losses it was called with."""
    calls = []

    def find(config, loss, **_):
        calls.append(loss)
        plan, found = plan_from_rules(config), {**FOUND, "workers": 1}
        return whet.make_plan(
            plan.machine,
            plan.workload,
            overrides=config.overrides,
            system_state=plan.system_state,
            measured={
                name: MeasuredSetting(value=value, reason="faster", evidence={})
                for name, value in found.items()
                if name not in config.overrides
            },
        )

    monkeypatch.setattr(tune, "tuned_plan", find)
    return calls


def loop(path, *, optimizer=torch.optim.AdamW, stop=False, **options):
    torch.manual_seed(0)
    model = convnet(dropout=0.1)
    own = optimizer(model.parameters(), lr=1e-2)
    with whet.Session(
        model,
        own,
        images(64, seed=0),
        global_batch_size=16,
        run=path,
        device="cpu",
        **{"epochs": 4, **options},
    ) as session:
        for batch in session:
            session.step(functional.cross_entropy, batch)
            if stop:
                break
    return model, session


def test_the_measured_plan_trains_every_step_and_a_resume(measured, tmp_path):
    model, session = loop(tmp_path / "whole", ema=True)
    assert measured == [functional.cross_entropy]
    assert {name: session.plan.settings[name].value for name in FOUND} == FOUND
    assert session.plan.settings["workers"].source == "rule", "the data is open already"
    by_hand, _ = loop(tmp_path / "by hand", ema=True, overrides=FOUND)
    assert_same(model.state_dict(), by_hand.state_dict())
    loop(tmp_path / "twice", ema=True, max_steps=5)
    resumed, _ = loop(tmp_path / "twice", ema=True, max_steps=None)
    assert_same(model.state_dict(), resumed.state_dict())
    (event,) = History(whet.open_run(tmp_path / "twice")).events(kinds=("resume",))
    assert event.fields["exactness"].startswith("session state restored exactly")
    assert len(measured) == 3, "a resumed run has its plan"
    assert model[0].weight.is_contiguous(), "the layout is restored afterward"


def test_a_loop_that_is_not_measured_says_what_measuring_could_try(monkeypatch):
    lines: list[str] = []
    options = {"on_event": lambda kind, fields: lines.append(fields["message"]) if kind == "tuning" else None}
    loop(None, measure=False, epochs=10_000, max_steps=None, **options, stop=True)
    assert len(lines) == 1
    assert lines[0].startswith("not measured: measure=False; whet.tune could try bf16, channels_last and compile: up to")
    # A run of a minute is too short to be measured by itself.
    monkeypatch.setattr(tune, "_time_steps", lambda *_: (0.0, 61.0 / 160))
    loop(None, epochs=40, **options, stop=True)
    assert len(lines) == 2
    assert lines[1].startswith("not measured: about ")
    assert ", too short to measure which settings are fastest; whet.tune could try bf16" in lines[1]
    loop(None, measure=False, **options)
    assert len(lines) == 2, "16 steps are not worth a line"


def test_what_is_not_measured(measured, tmp_path):
    loop(None, measure=False)
    loop(None, plan=plan_from_rules(loop(None, measure=False)[1].config))
    assert measured == []
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizers = {"a": torch.optim.SGD(model.parameters(), lr=0.1), "b": torch.optim.SGD(other.parameters(), lr=0.1)}
    data = torch.randn(64, 4), torch.randint(0, 2, (64,))
    with whet.Session([model, other], optimizers, data, global_batch_size=8, run=tmp_path / "two") as session:
        for batch in session:
            session.step(lambda micro: functional.cross_entropy(model(micro[0]), micro[1]), batch, optimizer="a")
            session.step(lambda micro: functional.cross_entropy(other(micro[0]), micro[1]), batch, optimizer="b")
    assert measured == []
    messages = [e.fields.get("message", "") for e in History(whet.open_run(tmp_path / "two")).events(kinds=("plan",))]
    assert "not measured: only the steps of a single optimizer are" in messages


def test_a_loop_is_measured_for_real_and_trains_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "budget_seconds", lambda _: 2.0)
    monkeypatch.setattr(tune, "MIN_BUDGET_SECONDS", 1.0)
    monkeypatch.setattr(tune.cache, "load", lambda _: None)
    overrides = {"threads": 1, "precision": "fp32", "layout": "contiguous", "micro_batch": 16, "compile": "off"}
    plain, _ = loop(None, measure=False, overrides=overrides, epochs=30)
    lines = []
    measured, _ = loop(
        tmp_path / "run", overrides=overrides, epochs=30, on_event=lambda _, fields: lines.append(fields.get("message"))
    )
    assert any(str(line).startswith("measuring which plan is fastest") for line in lines)
    assert_same(measured.state_dict(), plain.state_dict())


def test_a_stop_ends_the_measurement_of_an_own_loop(monkeypatch, tmp_path):
    messages = []

    def measure(config, *_, **__):
        config.on_event("measuring", {"message": "one"})
        session.run.request(whet.Action.STOP("enough"))
        config.on_event("measuring", {"message": "two"})

    monkeypatch.setattr(tune, "_measure", measure)
    torch.manual_seed(0)
    model = convnet()
    session = whet.Session(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        images(64, seed=0),
        global_batch_size=16,
        epochs=50,
        on_event=lambda kind, fields: messages.append(fields.get("message")),
    )
    with session:
        for batch in session:
            session.step(functional.cross_entropy, batch)
    assert (session.state.step, session.end_reason) == (1, "stopped: enough")
    assert "one" in messages
    assert "two" not in messages
    assert "not measured: a stop was requested" in messages
