"""Session: events, failures, saving, resuming with the same objects."""

import dataclasses
import functools
import itertools
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import whet
from small_models import convnet, images
from small_training import sgd, train
from whet.base.errors import WhetError
from whet.data.batch import MicroBatch
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = pytest.mark.torch


def test_a_failure_in_your_code_passes_through_and_is_written_down(tmp_path: Path) -> None:
    def broken(micro):
        raise ZeroDivisionError("yours")

    with pytest.raises(ZeroDivisionError, match="yours"):
        train(convnet(), images(16, seed=0), loss=broken, run=tmp_path / "run")
    assert whet.summarize(tmp_path / "run").state == "failed"


def test_events_hold_every_step_unrounded(tmp_path: Path) -> None:
    model = convnet()
    train(model, images(30, seed=0), run=tmp_path / "run", epochs=2, clip=1.0)
    steps = list(read_events(open_run(tmp_path / "run"), kinds=("step",)))
    assert [event.step for event in steps] == list(range(1, 9))
    assert [event.get("samples") for event in steps] == [8, 16, 24, 30, 38, 46, 54, 60], "the tail is not dropped"
    assert [event.get("epoch") for event in steps] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert all(isinstance(event.get("loss"), float) and event.get("grad_norm") for event in steps)
    assert {"data", "forward", "backward", "optimizer"} <= set(steps[0].get("seconds"))
    (first, second) = read_events(open_run(tmp_path / "run"), kinds=("epoch",))
    assert (first.get("epoch"), second.get("epoch")) == (1, 2)
    assert first.get("memory")["allocated"] > 0


def test_init_from_starts_with_another_runs_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = convnet()
    train(first, images(16, seed=0), run=tmp_path / "first")
    second = convnet()
    with whet.Session(second, sgd(second), images(16, seed=0), global_batch_size=8, init_from=tmp_path / "first"):
        for mine, other in zip(second.parameters(), first.parameters(), strict=True):
            assert torch.equal(mine, other)


def test_no_checkpoint_is_vouched_for_that_was_removed(tmp_path: Path) -> None:
    model, calls = convnet(), itertools.count()

    def loss(micro: MicroBatch) -> torch.Tensor:
        if next(calls) == 4:
            shutil.rmtree(tmp_path / "run")
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    with pytest.raises(WhetError, match="after step 4, could not be saved") as refused:
        train(model, images(32, seed=0), loss=loss, run=tmp_path / "run")
    assert "checkpoints/step-000000000 is gone too; 4 steps are lost" in str(refused.value)


def test_an_interrupted_cell_can_be_run_again(tmp_path: Path) -> None:
    """As in a notebook: the interrupt reaches the process, the call returns, and the same call resumes."""
    import os
    import signal

    x, y = images(64, seed=0)
    seen: list[int] = []

    def cell(folder: str, interrupt_at: int):
        torch.manual_seed(0)
        model = convnet(dropout=0.3)

        def loss(micro):
            seen.append(len(micro.sample_ids))
            if len(seen) == interrupt_at:
                os.kill(os.getpid(), signal.SIGINT)
            return nn.functional.cross_entropy(model(micro.x), micro.y)

        result = train(model, (x, y), loss=loss, epochs=3, run=tmp_path / folder)
        return result, model.state_dict()

    whole, expected = cell("whole", 0)
    seen.clear()
    stopped, _ = cell("cut", 11)
    done, actual = cell("cut", 11)
    assert (stopped.state, stopped.exit_code) == ("stopped", 130)
    assert stopped.step < 24
    assert (done.state, done.step) == (whole.state, whole.step) == ("done", 24)
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name


def test_the_final_state_is_saved_although_its_folder_was_damaged(tmp_path: Path) -> None:
    from whet.checkpoint import store

    options = {"run": tmp_path / "run", "epochs": 2, "overrides": {"checkpoint_steps": 4}}
    train(convnet(), images(64, seed=0), **options)
    folder = open_run(tmp_path / "run").checkpoints
    (folder / store.checkpoint_name(16) / store.TENSORS).write_bytes(b"damaged")
    result = train(convnet(), images(64, seed=0), **options)
    assert result.step == 16
    actual = store.load_newest(folder)
    assert actual is not None
    assert (actual[0], actual[2]) == (16, [])


def test_rates_come_from_the_run_and_not_from_a_used_optimizer(tmp_path: Path) -> None:
    """The same objects, called twice in one process: the second call resumes with the schedule of the first."""
    model = convnet()
    optimizer = sgd(model, lr=0.1)
    rates: list[float] = []
    for max_steps in (4, 8):
        train(
            model,
            images(64, seed=0),
            optimizer=optimizer,
            schedule=lambda step: 1 / step,
            run=tmp_path / "run",
            max_steps=max_steps,
        )
    rates = [event.get("lr") for event in read_events(open_run(tmp_path / "run"), kinds=("step",))]
    assert rates == [0.1 * (1 / step) for step in range(1, 9)]


def test_overrides_of_a_run_are_kept(tmp_path: Path) -> None:
    options = {"run": tmp_path / "run", "epochs": 1}
    train(convnet(), images(64, seed=0), max_steps=2, overrides={"micro_batch": 4}, **options)
    with pytest.raises(WhetError, match="a different micro_batch"):
        train(convnet(), images(64, seed=0), max_steps=4, overrides={"micro_batch": 2}, **options)
    with pytest.raises(WhetError, match="max_steps may only be increased"):
        train(convnet(), images(64, seed=0), max_steps=1, overrides={"micro_batch": 4}, **options)


def test_the_average_starts_from_init_from(tmp_path: Path) -> None:
    train(convnet(), images(16, seed=0), run=tmp_path / "first")
    model = convnet()
    with whet.Session(
        model, sgd(model), images(16, seed=0), global_batch_size=8, ema=True, init_from=tmp_path / "first"
    ) as session:
        ema = session.run.stepper.ema
        assert ema is not None
        for name, parameter in model.named_parameters():
            assert torch.equal(ema.average[name], parameter)


def test_parts_in_eval_mode_stay_so() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].eval()
    data = (torch.randn(16, 3), torch.randint(0, 2, (16,)))
    train(model, data, evaluate=lambda model, micro_batches: {"n": len(list(micro_batches))}, val=data)
    assert (model.training, model[1].training) == (True, False)
    assert int(model[1].num_batches_tracked) == 0


def test_the_progress_line_shows_the_state(capsys: pytest.CaptureFixture[str]) -> None:
    train(convnet(), images(16, seed=0), epochs=2, on_event="line")
    logged = capsys.readouterr().err
    for line in ("machine   ", "workload  ", "plan      cpu, fp32", "time      ", "train  "):
        assert f"\n{line}" in f"\n{logged}"
    train(convnet(), images(16, seed=0), on_event=None)
    assert capsys.readouterr().err == ""


def test_a_loss_that_is_not_a_number_stops_the_run_and_spares_the_checkpoints(tmp_path: Path) -> None:
    model = convnet()
    seen: list[int] = []

    def loss(micro):
        seen.append(1)
        value = nn.functional.cross_entropy(model(micro.x), micro.y)
        return value * math.nan if len(seen) > 9 else value

    overrides = {"checkpoint_steps": 2, "micro_batch": 8}
    with pytest.raises(WhetError, match="the loss or a weight is NaN or Inf"):
        train(model, images(64, seed=0), loss=loss, epochs=4, run=tmp_path / "run", overrides=overrides)
    report = whet.summarize(tmp_path / "run")
    assert report.state == "failed"
    from whet.checkpoint import store

    actual = store.load_newest(open_run(tmp_path / "run").checkpoints)
    assert actual is not None
    assert all(t.isfinite().all() for name, t in actual[1].tensors.items() if name.startswith("model/"))


def test_a_hostile_optimizer_state_does_not_reach_the_kernels(tmp_path: Path) -> None:
    from whet.checkpoint import store

    options = {"run": tmp_path / "run", "optimizer": whet.OptimizerChoice()}
    train(convnet(), images(32, seed=0), max_steps=2, **options)
    folder = open_run(tmp_path / "run").checkpoints
    step, snapshot, _ = store.load_newest(folder)  # type: ignore[misc]
    tensors = {n: t[:1].clone() if n.endswith("/exp_avg") else t for n, t in snapshot.tensors.items()}
    shutil.rmtree(folder / store.checkpoint_name(step))
    store.save_checkpoint(folder, dataclasses.replace(snapshot, tensors=tensors), step=step)
    with pytest.raises(WhetError, match="exp_avg does not fit"):
        train(convnet(), images(32, seed=0), max_steps=4, **options)


def test_the_same_objects_after_a_failure_start_from_the_first_weights(tmp_path: Path) -> None:
    """In a notebook: the loss fails in the middle of a step, and the cell is run again."""
    x, y = images(64, seed=0)

    def run(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, fail_at: int):
        seen: list[int] = []

        def loss(micro):
            seen.append(1)
            if len(seen) == fail_at:
                raise ArithmeticError
            return nn.functional.cross_entropy(model(micro.x), micro.y)

        options = {"epochs": 2, "schedule": "linear", "optimizer": optimizer, "run": tmp_path / folder}
        return train(model, (x, y), loss=loss, **options)

    finals = []
    for folder, fails in (("whole", (0,)), ("cut", (9, 0))):
        torch.manual_seed(0)
        model = convnet(dropout=0.2)
        optimizer = sgd(model)
        for fail_at in fails:
            if fail_at:
                with pytest.raises(ArithmeticError):
                    run(folder, model, optimizer, fail_at)
            else:
                assert run(folder, model, optimizer, 0).state == "done"
        finals.append(model.state_dict())
    for name, tensor in finals[0].items():
        assert torch.equal(tensor, finals[1][name]), name


def test_a_used_optimizer_has_its_rate_back() -> None:
    model = convnet()
    optimizer = sgd(model, lr=0.5)
    train(model, images(32, seed=0), optimizer=optimizer, schedule="linear")
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)

    def loss(micro):
        # The square root of zero has an infinite gradient: a finite loss without a finite gradient.
        return (model(micro) * 0).abs().sqrt().mean()

    with pytest.raises(WhetError, match="the gradient is not finite"):
        train(model, torch.randn(16, 1), loss=loss, run=tmp_path / "run", epochs=50)
    assert [checkpoint.step for checkpoint in whet.summarize(tmp_path / "run").checkpoints] == [0]


def test_a_loop_of_the_user_can_show_the_progress_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for epochs in (1, 2):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.ones(8, 3), torch.zeros(8, 1)
        with whet.Session(
            model,
            optimizer,
            data,
            global_batch_size=4,
            epochs=epochs,
            run=tmp_path / "run",
            device="cpu",
            on_event="line",
        ) as session:
            for batch in session:
                session.step(nn.functional.mse_loss, batch)
    assert "resumes from step 2, session state restored exactly" in capsys.readouterr().err


def test_a_loss_that_is_defined_anew_in_each_step_has_its_own_values(tmp_path: Path) -> None:
    model, factors = convnet(), [1.0, 2.0, 3.0, 4.0]

    def scaled(factor: float):
        return lambda micro, bias=factor: 0 * model(micro.x).sum() + bias * factor

    with whet.Session(model, sgd(model), images(32, seed=0), global_batch_size=8, run=tmp_path / "run") as session:
        for batch, factor in zip(session, factors, strict=True):
            session.step(scaled(factor), batch)
    steps = list(read_events(open_run(tmp_path / "run"), kinds=("step",)))
    assert [event.get("loss") for event in steps] == [1.0, 4.0, 9.0, 16.0]


def test_losses_with_the_same_decorator_keep_their_own_arguments() -> None:
    def decorated(function):
        @functools.wraps(function)
        def call(*arguments):
            return function(*arguments)

        return call

    model = convnet()
    losses = [decorated(nn.functional.cross_entropy), decorated(lambda micro: model(micro.x).square().mean())] * 2
    with whet.Session(model, sgd(model), images(32, seed=0), global_batch_size=8) as session:
        for batch, loss in zip(session, losses, strict=True):
            session.step(loss, batch)
    assert session.state.step == 4
