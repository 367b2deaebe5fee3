"""global_batch_size="auto": measured once with real steps, saved with the run, with scaled learning rates."""

import io
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

import whet
from whet.base.errors import UsageError
from whet.plan.plan import read_plan
from whet.run.events import History
from whet.step.optimizers import OptimizerChoice
from whet.training import auto_batch_size
from whet.training.callbacks.progress_line import ProgressLine

pytestmark = pytest.mark.torch

AUTO = {"global_batch_size": "auto", "epochs": 2, "overrides": {"threads": 1}, "on_event": None}


@pytest.fixture(autouse=True)
def _a_home_and_little_time(monkeypatch, tmp_path):
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(auto_batch_size, "MAX_BATCH_SECONDS", 3.0)


def a_training(num_samples: int = 2_000):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
    data = (torch.randn(num_samples, 8), torch.randint(0, 2, (num_samples,)))
    calls = []

    def loss(micro):
        calls.append(len(micro.sample_ids))
        return functional.cross_entropy(model(micro.x), micro.y)

    return model, data, loss, calls


def plan_of(run):
    return read_plan(whet.open_run(run).plan, where="plan.json")


def test_auto_batch_size_is_measured_once_and_kept_on_resume(tmp_path):
    model, data, loss, calls = a_training()
    logged, made = [], {}

    def on_event(kind, fields):
        logged.append((kind, fields))
        if kind == "tuning" and not made:
            made.update(Counter(calls))

    result = whet.train(
        model, data, loss=loss, optimizer=OptimizerChoice(lr=1e-2), run=tmp_path / "run", epochs_per_session=1,
        **{**AUTO, "on_event": on_event},
    )  # fmt: skip
    assert result.state == "stopped"
    chosen = plan_of(tmp_path / "run").workload.batch
    assert whet.open_run(tmp_path / "run").config["global_batch_size"] == chosen.batch
    assert len(chosen.points) >= 2
    # Steps of so many samples were made: two at least for a first look, and all that are said to have been timed, which
    # are fewer than eight of each where a busy machine leaves no time.
    assert all(made[point.batch] >= 2 + point.steps for point in chosen.points if point.samples_per_second)
    assert ("tuning", {"message": chosen.lines[0]}) in logged
    assert any(kind == "measuring" and fields["doing"].startswith("global batch ") for kind, fields in logged)
    rates = {e.get("lr") for e in History(whet.open_run(tmp_path / "run")).events(kinds=("step",))}
    assert list(rates) == pytest.approx([1e-2 * (chosen.batch / 32) ** 0.5])

    model, data, loss, calls = a_training()
    result = whet.train(
        model, data, loss=loss, optimizer=OptimizerChoice(lr=1e-2), run=tmp_path / "run", measure=False,
        epochs_per_session=1, **AUTO,
    )  # fmt: skip
    assert result.state == "done"
    # The rest of the run, and what verifying before the first step takes.
    assert sum(size == chosen.batch for size in calls) <= 2_000 // chosen.batch + 1
    assert len(calls) < 2_000 // chosen.batch + 10
    assert plan_of(tmp_path / "run").workload.batch == chosen

    with pytest.raises(UsageError, match="was made with a different lr"):
        whet.train(model, data, loss=loss, optimizer=OptimizerChoice(lr=1e-3), run=tmp_path / "run", **AUTO)


def test_auto_batch_size_trains_like_the_same_numbers_given_by_hand(tmp_path):
    model, data, loss, _ = a_training()
    whet.train(model, data, loss=loss, optimizer=OptimizerChoice(lr=1e-2), run=tmp_path / "auto", **AUTO)
    chosen = plan_of(tmp_path / "auto").workload.batch
    model, data, loss, _ = a_training()
    by_hand = {**AUTO, "global_batch_size": chosen.batch, "measure": False}
    whet.train(model, data, loss=loss, optimizer=OptimizerChoice(lr=chosen.rates[0]), run=tmp_path / "hand", **by_hand)
    losses = [
        [e.get("loss") for e in History(whet.open_run(tmp_path / run)).events(kinds=("step",))]
        for run in ("auto", "hand")
    ]
    assert losses[0] == losses[1]
    assert losses[0]
    with pytest.raises(UsageError, match="has a fixed global batch"):
        whet.train(model, data, loss=loss, optimizer=OptimizerChoice(), run=tmp_path / "hand", **AUTO)


def test_users_optimizer_gets_scaled_rates_and_keeps_its_own_afterwards(monkeypatch):
    model, data, loss, _ = a_training()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(groups)
    seen = []
    # The way up always gains, so that the largest batch is taken.
    monkeypatch.setattr(
        auto_batch_size, "measure_batch_size", with_batch_of(64, find=auto_batch_size.measure_batch_size)
    )
    whet.train(
        model, data, loss=loss, optimizer=optimizer,
        evaluate=lambda *_: seen.append([group["lr"] for group in optimizer.param_groups]) or {}, val=data, **AUTO,
    )  # fmt: skip
    assert seen[0] == pytest.approx([0.2, 0.4])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def with_batch_of(size, *, find):
    def actual(bench, optimizer, **how):
        chosen = find(bench, optimizer, **how)
        bench.use_batch(size)
        rates = tuple(rate * size / 32 for rate in chosen.base_rates)
        return chosen.model_copy(update={"batch": size, "factor": size / 32, "rates": rates})

    return actual


def test_tune_finds_the_batch_size_and_train_takes_it_from_the_plan(tmp_path):
    model, data, loss, calls = a_training()
    how = {key: value for key, value in AUTO.items() if key != "overrides"}
    plan = whet.tune(model, data, loss=loss, optimizer=OptimizerChoice(lr=1e-2), budget=5, lr_batch=64, **AUTO)
    chosen = plan.workload.batch
    assert (chosen.base_batch, plan.workload.global_batch_size) == (64, chosen.batch)
    calls.clear()
    whet.train(model, data, loss=loss, optimizer=OptimizerChoice(lr=1e-2), plan=plan, run=tmp_path / "run", **how)
    assert max(calls) == chosen.batch
    assert plan_of(tmp_path / "run").workload.batch == chosen


def test_auto_batch_size_is_an_error_without_measuring():
    model, data, loss, _ = a_training()
    with pytest.raises(UsageError, match="has to be measured"):
        whet.train(model, data, loss=loss, optimizer=OptimizerChoice(), measure=False, **AUTO)
    stream = ({"x": torch.randn(8), "y": torch.tensor(0)} for _ in range(1000))
    with pytest.raises(UsageError, match="an iterable dataset cannot be used for measuring"):
        whet.train(model, stream, loss=loss, optimizer=OptimizerChoice(), **AUTO)
    with pytest.raises(UsageError, match="a session needs a fixed global batch size"):
        whet.Session(model, OptimizerChoice(), data, global_batch_size="auto")
    few = tuple(column[:200] for column in data)
    with pytest.raises(UsageError, match="too few samples"):
        whet.train(model, few, loss=loss, optimizer=OptimizerChoice(), **AUTO)


def test_measuring_redraws_one_line_in_a_terminal_and_prints_lines_elsewhere():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    event = {"message": "measuring: precision bf16, 12 of 60 s"}
    terminal, plain = Terminal(), io.StringIO()
    for stream in (terminal, plain):
        line = ProgressLine("tune", stream=stream)
        line("measuring", event)
        line("measuring", event)
        line("plan", {"message": "12 trials in 40 s"})
        line.close()
    shown = "tune  measuring: precision bf16, 12 of 60 s"
    assert terminal.getvalue() == f"\r\x1b[2K{shown}\r\x1b[2Ktune: 12 trials in 40 s\n"
    assert plain.getvalue() == f"{shown}\ntune: 12 trials in 40 s\n"
