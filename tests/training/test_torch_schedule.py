"""A scheduler of torch gives the rates of a plain loop in every step, also after a stop, a kill and a rollback."""

import copy
import functools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

import whet
from whet.base.errors import UsageError
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.training.restore import CUSTOM_LOOP

pytestmark = pytest.mark.torch

STEPS_PER_EPOCH = 4
EPOCHS = 5
NUM_STEPS = STEPS_PER_EPOCH * EPOCHS

Make = Callable[[torch.optim.Optimizer], LRScheduler]


class Halving:
    """A callable object: its attributes are the state of a LambdaLR."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, step: int) -> float:
        self.num_calls += 1
        return 0.5 ** (self.num_calls // 3)


def sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [
        schedulers.ConstantLR(optimizer, 0.3, 2),
        schedulers.ExponentialLR(optimizer, 0.9),
        schedulers.CosineAnnealingLR(optimizer, T_max=5),
    ]
    return schedulers.SequentialLR(optimizer, parts, [3, 7])


def transformers_schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
    transformers = pytest.importorskip("transformers")
    return transformers.get_cosine_schedule_with_warmup(optimizer, 3, NUM_STEPS)


MAKERS: dict[str, Make] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "LambdaLR of an object": lambda o: schedulers.LambdaLR(o, Halving()),
    "LambdaLR of transformers": transformers_schedule,
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.97),
    "StepLR": lambda o: schedulers.StepLR(o, 3, gamma=0.7),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5, 5, 11], gamma=0.3),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, factor=0.3, total_iters=3),
    "LinearLR": lambda o: schedulers.LinearLR(o, start_factor=0.1, total_iters=9),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.93),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=13, power=1.7),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, T_max=6, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.001, 0.1, step_size_up=3, step_size_down=4),
    "CyclicLR exp_range": lambda o: schedulers.CyclicLR(o, 0.001, 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "CyclicLR of a function": lambda o: schedulers.CyclicLR(o, 0.001, 0.1, step_size_up=3, scale_fn=lambda x: 0.9**x),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=[0.2, 0.05], total_steps=NUM_STEPS),
    "OneCycleLR linear": lambda o: schedulers.OneCycleLR(
        o, max_lr=0.2, total_steps=NUM_STEPS + 9, three_phase=True, anneal_strategy="linear"
    ),
    "SequentialLR": sequence,
    "SequentialLR with OneCycleLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 3), schedulers.OneCycleLR(o, 0.2, total_steps=NUM_STEPS)], [4]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.ExponentialLR(o, 0.9)]
    ),
    "ChainedScheduler of sequences": lambda o: schedulers.ChainedScheduler(
        [sequence(o), schedulers.MultiplicativeLR(o, lambda step: 0.99)]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=4),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, cooldown=1, factor=0.3),
}
OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.85),
    "AdamW with a tensor": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.1), foreach=False),
}
# One loss per epoch, as a validation might give them.
METRICS = [1.0, 1.1, 0.9, 0.95, 0.95]
PER_STEP = ("OneCycleLR", "CyclicLR")


def test_every_class_of_torch_is_here() -> None:
    classes = {
        name
        for name in dir(schedulers)
        if isinstance(kind := getattr(schedulers, name), type) and issubclass(kind, LRScheduler)
    }
    assert classes - {"LRScheduler", "_LRScheduler"} <= {name.split(" ")[0] for name in MAKERS}


class Work:
    """A model, an optimizer with two groups, a scheduler, and the values of all groups in each step."""

    def __init__(self, make: Make, optimizer: str = "AdamW") -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        groups = [{"params": [self.model.weight]}, {"params": [self.model.bias], "lr": 0.02, "weight_decay": 0.0}]
        if "tensor" in optimizer:
            groups[1]["lr"] = torch.tensor(0.02)
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.scheduler = make(self.optimizer)
        self.seen: list[Any] = []
        self.data = torch.randn(8 * STEPS_PER_EPOCH, 3), torch.randn(8 * STEPS_PER_EPOCH, 1)

    def record(self) -> None:
        # The plan selects the kernels of the optimizer.
        left_out = ("params", "fused", "foreach")
        groups = self.optimizer.param_groups
        self.seen.append([{k: freeze(v) for k, v in g.items() if k not in left_out} for g in groups])

    def loss(self, micro: Any) -> torch.Tensor:
        self.record()
        return nn.functional.mse_loss(self.model(micro.x), micro.y)

    def options(self, interval: str | None, **more: Any) -> dict[str, Any]:
        if isinstance(self.scheduler, schedulers.ReduceLROnPlateau):
            more = {"goal": "val_loss", "mode": "min", **more}
        return {
            "device": "cpu",
            "global_batch_size": 8,
            "epochs": EPOCHS,
            "schedule": self.scheduler,
            "overrides": {"threads": 1, "micro_batch": 8, "checkpoint_steps": 3},
            **({"schedule_interval": interval} if interval else {}),
            **more,
        }

    def train(self, interval: str | None, *, until: int = NUM_STEPS, kill_at: int | None = None, **more: Any) -> None:
        with whet.Session(self.model, self.optimizer, self.data, **self.options(interval, **more)) as session:
            for batch in session:
                session.step(self.loss, batch)
                if session.due("evaluate"):
                    session.log(val_loss=METRICS[session.state.epoch - 1])
                if session.state.step == kill_at:
                    os._exit(9)
                if session.state.step == until:
                    break


def freeze(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def plain_loop(make: Make, interval: str, optimizer: str = "AdamW") -> list[Any]:
    work = Work(make, optimizer)
    for epoch in range(EPOCHS):
        for _ in range(STEPS_PER_EPOCH):
            work.optimizer.zero_grad()
            work.record()
            work.model(work.data[0]).sum().backward()
            work.optimizer.step()
            if interval == "step":
                work.scheduler.step()
        if interval == "epoch":
            work.scheduler.step()
        elif interval == "evaluation":
            work.scheduler.step(METRICS[epoch])
    return work.seen


def cases() -> list[Any]:
    for_each = []
    for name in MAKERS:
        if name == "ReduceLROnPlateau":
            for_each.append((name, "evaluation"))
        elif any(kind in name for kind in PER_STEP):
            for_each.append((name, "step"))
        else:
            for_each += [(name, "step"), (name, "epoch")]
    return for_each


def slow_but(made: list[Any], chosen: set[Any]) -> list[Any]:
    return [case if case in chosen else pytest.param(*case, marks=pytest.mark.slow) for case in made]


def rate_cases() -> list[Any]:
    """In the gate each scheduler once, with intervals and optimizers in turn."""
    made = [(*case, optimizer) for case in cases() for optimizer in OPTIMIZERS]
    chosen = set()
    for place, name in enumerate(MAKERS):
        intervals = [interval for case, interval in cases() if case == name]
        chosen.add((name, intervals[place % len(intervals)], [*OPTIMIZERS][place % 3]))
    return slow_but(made, chosen)


def stop_cases() -> list[Any]:
    """In the gate each scheduler once, with the other interval than above and stops in turn.

    6 is a step with a checkpoint of its own, 8 the end of an epoch.
    """
    made = [(*case, stop) for case in cases() for stop in (1, 6, 8)]
    chosen = set()
    for place, name in enumerate(MAKERS):
        intervals = [interval for case, interval in cases() if case == name]
        chosen.add((name, intervals[(place + 1) % len(intervals)], (6, 8)[place // 2 % 2]))
    return slow_but(made, chosen)


def asked(name: str, interval: str) -> str | None:
    is_decided = interval == "evaluation" or name.startswith(PER_STEP)
    return None if is_decided else interval


@pytest.mark.parametrize(("name", "interval", "optimizer"), rate_cases())
def test_rates_are_those_of_a_plain_loop(name: str, interval: str, optimizer: str) -> None:
    work = Work(MAKERS[name], optimizer)
    work.train(asked(name, interval))
    expected = plain_loop(MAKERS[name], interval, optimizer)
    assert work.seen == expected
    assert len({json.dumps(groups) for groups in expected}) > 1, "rates that never change show nothing"


@pytest.mark.parametrize(("name", "interval", "stop"), stop_cases())
def test_a_stopped_run_resumes_with_the_same_rates(name: str, interval: str, stop: int, memory_folder: Path) -> None:
    first, second = Work(MAKERS[name]), Work(MAKERS[name])
    first.train(asked(name, interval), until=stop, run=memory_folder / "run")
    second.train(asked(name, interval), run=memory_folder / "run")
    assert first.seen + second.seen == plain_loop(MAKERS[name], interval)
    (resumed,) = read_events(open_run(memory_folder / "run"), kinds=("resume",))
    assert resumed.get("exactness").startswith(CUSTOM_LOOP)
    rates = [event.get("lr") for event in read_events(open_run(memory_folder / "run"), kinds=("step",))]
    assert rates == [groups[0]["lr"] for groups in first.seen + second.seen]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("OneCycleLR", marks=pytest.mark.slow),
        pytest.param("SequentialLR", marks=pytest.mark.slow),
        "ReduceLROnPlateau",
        "LambdaLR of an object",
    ],
)
def test_a_killed_run_resumes_with_the_same_weights(name: str, tmp_path: Path) -> None:
    interval = asked(name, "evaluation" if name.startswith("Reduce") else "step")
    whole = Work(MAKERS[name])
    whole.train(interval, run=tmp_path / "whole")
    pid = os.fork()
    if pid == 0:
        Work(MAKERS[name]).train(interval, run=tmp_path / "killed", kill_at=11)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    again = Work(MAKERS[name])
    again.train(interval, run=tmp_path / "killed")
    # From the checkpoint after step 9.
    assert again.seen == whole.seen[-len(again.seen) :]
    assert 0 < len(again.seen) < NUM_STEPS
    for ours, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "name",
    [
        "SequentialLR",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("OneCycleLR", "LambdaLR of an object")),
    ],
)
def test_a_rollback_restores_the_scheduler(name: str, tmp_path: Path) -> None:
    interval = asked(name, "step")
    whole, bad = Work(MAKERS[name]), Work(MAKERS[name])
    whole.train(interval)

    class Back(whet.Callback):
        is_done = False

        def after_step(self, state, outcome) -> whet.Action:
            if state.step == 8 and not self.is_done:
                self.is_done = True
                return whet.Action.ROLLBACK("once")
            return whet.Action.NONE

    bad.train(interval, run=tmp_path / "run", callbacks=[Back()])
    # Steps 7 and 8 are repeated from the checkpoint after step 6.
    assert bad.seen == [*whole.seen[:8], *whole.seen[6:]]


def test_not_a_number_goes_back_with_the_scheduler(tmp_path: Path) -> None:
    whole, bad = Work(MAKERS["OneCycleLR"]), Work(MAKERS["OneCycleLR"])
    whole.train(None)
    left = 1

    def loss(micro: Any) -> torch.Tensor:
        nonlocal left
        is_bad = left > 0 and len(bad.seen) == 7
        left -= is_bad
        return Work.loss(bad, micro) * (math.nan if is_bad else 1.0)

    bad.loss = loss  # type: ignore[method-assign]
    bad.train(None, run=tmp_path / "run")
    rates = [event.get("lr") for event in read_events(open_run(tmp_path / "run"), kinds=("step",))]
    assert rates == [groups[0]["lr"] for groups in whole.seen]
    assert any(
        "rollback_reason" in event.fields for event in read_events(open_run(tmp_path / "run"), kinds=("resume",))
    )


def test_the_same_objects_resume_and_continue(tmp_path: Path) -> None:
    """A notebook calls again with the objects of the first call; without a run, the scheduler continues."""
    work = Work(MAKERS["CosineAnnealingLR"])
    work.train("step", until=7, run=tmp_path / "run")
    work.train("step", run=tmp_path / "run")
    assert work.seen == plain_loop(MAKERS["CosineAnnealingLR"], "step")
    chained = Work(MAKERS["CosineAnnealingLR"])
    chained.train("step", until=7)
    chained.train("step", until=NUM_STEPS - 7)
    assert chained.seen == work.seen


def test_a_scheduler_that_was_stepped_before_continues() -> None:
    work = Work(MAKERS["StepLR"])
    for _ in range(2):
        work.optimizer.step()
        work.scheduler.step()
    work.train("step", until=NUM_STEPS - 2)
    assert work.seen == plain_loop(MAKERS["StepLR"], "step")[2:]


def test_train_takes_a_scheduler(tmp_path: Path) -> None:
    work = Work(MAKERS["OneCycleLR"])
    options = work.options(None, run=tmp_path / "run")
    whet.train(work.model, work.data, loss=work.loss, optimizer=work.optimizer, on_event=None, measure=False, **options)
    assert work.seen == plain_loop(MAKERS["OneCycleLR"], "step")
    assert open_run(tmp_path / "run").config["schedule"] == "OneCycleLR"


def test_measuring_does_not_move_the_scheduler() -> None:
    """Measured steps are steps of the optimizer, but not of the scheduler."""
    num_steps = 120
    work, plain = (Work(lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=num_steps)) for _ in range(2))
    options = work.options(None, epochs=num_steps // STEPS_PER_EPOCH)
    rates: list[float] = []

    class Rates(whet.Callback):
        def after_step(self, state, outcome) -> whet.Action:
            rates.append(state.lr)
            return whet.Action.NONE

    whet.train(
        work.model,
        work.data,
        loss=work.loss,
        optimizer=work.optimizer,
        on_event=None,
        **options,
        callbacks=[Rates()],
    )
    expected = []
    for _ in range(num_steps):
        expected.append(plain.optimizer.param_groups[0]["lr"])
        plain.optimizer.step()
        plain.scheduler.step()
    assert rates == expected
    assert len(work.seen) > num_steps, "measured, or the test shows too little"


# --- refusals ---------------------------------------------------------------------------------------------------------


class Unsavable(schedulers.StepLR):
    """A scheduler whose state holds a function."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.hooks = {"on_step": print}
        super().__init__(optimizer, 3)


class Foreign:
    """A scheduler of another library."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step_update(self, num_updates: int) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (MAKERS["StepLR"], {}, 'schedule_interval="step" or schedule_interval="epoch"'),
        (MAKERS["SequentialLR"], {}, "SequentialLR needs a schedule_interval"),
        (MAKERS["StepLR"], {"schedule_interval": "batch"}, "schedule_interval must be"),
        (MAKERS["OneCycleLR"], {"schedule_interval": "epoch"}, "OneCycleLR is stepped after each step"),
        (MAKERS["SequentialLR with OneCycleLR"], {"schedule_interval": "epoch"}, "OneCycleLR is stepped after each"),
        (MAKERS["ReduceLROnPlateau"], {"schedule_interval": "epoch"}, "stepped at each evaluation"),
        (MAKERS["ReduceLROnPlateau"], {"mode": "max"}, "disagree"),
        (MAKERS["ReduceLROnPlateau"], {"goal": None}, "no goal"),
        (MAKERS["StepLR"], {"schedule_interval": "step", "warmup_steps": 2}, "warmup_steps does not change"),
        (Unsavable, {"schedule_interval": "step"}, "hooks.on_step is a builtin"),
        (Foreign, {"schedule_interval": "step"}, "no scheduler of torch"),
        (MAKERS["OneCycleLR"], {"epochs": EPOCHS + 1}, "OneCycleLR ends before the run"),
        (lambda _: "cosine", {"schedule_interval": "step"}, "schedule_interval is for torch schedulers"),
        (lambda o: schedulers.StepLR(copy.deepcopy(o), 3), {"schedule_interval": "step"}, "a different optimizer"),
    ],
)
def test_refused_before_anything_is_written(make: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    work = Work(make)
    with pytest.raises(UsageError, match=message):
        work.train(None, run=tmp_path / "run", **options)
    assert not list(tmp_path.iterdir())


def test_a_choice_has_no_optimizer_yet() -> None:
    work = Work(MAKERS["OneCycleLR"])
    with pytest.raises(UsageError, match="an OptimizerChoice is built later"):
        whet.Session(work.model, whet.OptimizerChoice(lr=0.1), work.data, **work.options(None))


def test_a_measured_batch_size_is_refused() -> None:
    work = Work(MAKERS["OneCycleLR"])
    options = {**work.options(None), "global_batch_size": "auto"}
    with pytest.raises(UsageError, match="cannot be scaled"):
        whet.train(work.model, work.data, loss=work.loss, optimizer=work.optimizer, on_event=None, **options)


def train_and_step(work: Work, options: dict[str, Any]) -> None:
    """A custom loop that steps the scheduler by hand."""
    with whet.Session(work.model, work.optimizer, work.data, **options) as session:
        for batch in session:
            session.step(work.loss, batch)
            work.scheduler.step()


@pytest.mark.parametrize("name", ["OneCycleLR", "StepLR"])
def test_a_scheduler_that_is_also_stepped_by_hand_is_refused(name: str) -> None:
    work = Work(MAKERS[name])
    with pytest.raises(UsageError, match="steps the scheduler"):
        train_and_step(work, work.options(asked(name, "step")))
    assert len(work.seen) == 1


def test_a_scheduler_beside_a_constant_schedule_is_refused_with_the_keyword() -> None:
    work = Work(MAKERS["OneCycleLR"])
    options = {**work.options(None), "schedule": "constant"}
    with pytest.raises(UsageError, match="schedule=scheduler"):
        train_and_step(work, options)


# --- other schedulers on resume ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (MAKERS["StepLR"], lambda o: schedulers.StepLR(o, 3, gamma=0.5), r"gamma 0\.7 -> 0\.5"),
        (MAKERS["StepLR"], MAKERS["ExponentialLR"], "started with a different schedule"),
        (MAKERS["MultiStepLR"], lambda o: schedulers.MultiStepLR(o, [2, 5, 5, 12], gamma=0.3), "milestones"),
        (MAKERS["SequentialLR"], lambda o: sequence(_scaled(o, 2.0)), r"lr 0\.03 -> 0\.06"),
        (
            lambda o: schedulers.LambdaLR(o, functools.partial(power, base=0.9)),
            lambda o: schedulers.LambdaLR(o, functools.partial(power, base=0.8)),
            r"base 0\.9 -> 0\.8",
        ),
    ],
)
def test_another_scheduler_on_resume_is_refused_by_name(before: Make, now: Make, message: str, tmp_path: Path) -> None:
    Work(before).train("step", until=5, run=tmp_path / "run")
    with pytest.raises(UsageError, match=message):
        Work(now).train("step", run=tmp_path / "run")


def test_an_allowed_scheduler_continues_as_if_it_had_run_from_the_beginning(tmp_path: Path) -> None:
    def other(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return schedulers.StepLR(optimizer, 3, gamma=0.5)

    Work(MAKERS["StepLR"]).train("step", until=5, run=tmp_path / "run")
    work = Work(other)
    work.train("step", until=9, run=tmp_path / "run", allow="lr")
    assert work.seen == plain_loop(other, "step")[5:9]
    # The new values are the run's from now on.
    again = Work(other)
    again.train("step", run=tmp_path / "run")
    assert again.seen == plain_loop(other, "step")[9:]
    events = list(read_events(open_run(tmp_path / "run"), kinds=("resume",)))
    assert "gamma 0.7 -> 0.5" in events[0].get("exactness")
    assert "not bit-exact since step 5" in events[1].get("exactness")


def test_an_allowed_lr_of_a_plateau_keeps_its_reductions(tmp_path: Path) -> None:
    Work(MAKERS["ReduceLROnPlateau"]).train(None, until=10, run=tmp_path / "run")
    work = Work(lambda o: schedulers.ReduceLROnPlateau(_scaled(o, 2.0), patience=0, cooldown=1, factor=0.3))
    work.train(None, run=tmp_path / "run", allow="lr")
    expected = [groups[0]["lr"] for groups in plain_loop(MAKERS["ReduceLROnPlateau"], "evaluation")][10:]
    assert [groups[0]["lr"] for groups in work.seen] == pytest.approx([2 * rate for rate in expected])
    assert work.seen[0][0]["lr"] != 0.2, "reduced already, or the test shows too little"


def power(step: int, *, base: float) -> float:
    return base**step


def _scaled(optimizer: torch.optim.Optimizer, factor: float) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return optimizer
