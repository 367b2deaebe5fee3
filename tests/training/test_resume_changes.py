"""What differs from the call that started a run is refused by name, applied if it is allowed, or warned of."""

import importlib.util
import itertools
import linecache
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import whet
from whet.base.errors import UsageError
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.training.restore import CUSTOM_LOOP

pytestmark = pytest.mark.torch

Change = Callable[[nn.Module], Any]


def adamw(model: nn.Module, **values: Any) -> torch.optim.Optimizer:
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **{"lr": 0.1, **values})


def train(run: Path | None, optimizer: Change = adamw, *, stop: int | None = None, **options: Any) -> Any:
    """Train, and return the values of all groups in each step."""
    torch.manual_seed(0)
    model = options.pop("model", None) or nn.Linear(3, 1)
    chosen = optimizer(model)
    draw = torch.Generator().manual_seed(0)
    samples = torch.randn(32, 3, generator=draw), torch.randn(32, 1, generator=draw)
    seen: list[Any] = []
    loss = options.pop("loss", None) or (lambda model, x, y: nn.functional.mse_loss(model(x), y))
    overrides = {"threads": 1, "micro_batch": 8, "checkpoint_steps": 2}
    defaults = {"global_batch_size": 8, "epochs": 3, "device": "cpu", "overrides": overrides, "schedule": "linear"}
    with whet.Session(model, chosen, samples, run=run, **{**defaults, **options}) as session:
        step = loss if getattr(loss, "takes_micro", False) else lambda micro: loss(model, micro.x, micro.y)
        groups = session.run.stepper.optimizer.param_groups
        for batch in session:
            session.step(step, batch)
            seen.append([{k: v for k, v in group.items() if k != "params"} for group in groups])
            if session.state.step == stop:
                break
    return seen


def test_the_rates_of_a_resumed_run_are_those_of_the_whole_run(tmp_path: Path) -> None:
    seen = train(tmp_path / "run", stop=5) + train(tmp_path / "run")
    # Betas stay a tuple, as torch has them.
    assert seen == train(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"lr": 0.3}, r"the lr is not.*\n.*lr 0\.1 -> 0\.3 \(parameter group 1\)", marks=pytest.mark.slow),
        pytest.param(
            {"weight_decay": 0.5}, r"weight_decay 0\.01 -> 0\.5 \(parameter group 1\)", marks=pytest.mark.slow
        ),
        ({"betas": (0.9, 0.95)}, r"betas\.1 0\.999 -> 0\.95 \(parameter group 1\); betas\.1 .* \(parameter group 2\)"),
        pytest.param({"eps": 1e-6}, r"eps 1e-08 -> 1e-06", marks=pytest.mark.slow),
        ({"amsgrad": True}, "amsgrad False -> True"),
    ],
)
def test_a_changed_hyperparameter_is_refused_or_applied(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    def changed(model: nn.Module) -> torch.optim.Optimizer:
        return adamw(model, **change)

    train(tmp_path / "run", stop=5)
    with pytest.raises(UsageError, match=message):
        train(tmp_path / "run", changed)
    if "amsgrad" in change:
        return
    seen = train(tmp_path / "run", changed, allow=("lr",), stop=9)
    assert seen == train(None, changed)[5:9]
    # They are the run's own now: the old values are refused, and the new ones need no permission.
    with pytest.raises(UsageError, match="is not what the run was started with"):
        train(tmp_path / "run")
    assert seen + train(tmp_path / "run", changed) == train(None, changed)[5:]
    events = list(read_events(open_run(tmp_path / "run"), kinds=("resume",)))
    assert events[0].get("exact") is False
    assert next(iter(change)) in events[0].get("exactness")
    assert "not bit-exact since step 5" in events[1].get("exactness")


def test_kernels_of_an_optimizer_may_change(tmp_path: Path) -> None:
    train(tmp_path / "run", lambda model: adamw(model, foreach=True), stop=5)
    train(tmp_path / "run", lambda model: adamw(model, foreach=False))
    (event,) = read_events(open_run(tmp_path / "run"), kinds=("resume",))
    assert event.get("exactness").startswith(CUSTOM_LOOP)


@pytest.mark.parametrize("change", [{"lr": 0.3}, pytest.param({"weight_decay": 0.5}, marks=pytest.mark.slow)])
def test_a_changed_choice_is_refused_or_applied(change: dict[str, float], tmp_path: Path) -> None:
    def choice(_: nn.Module, **values: float) -> whet.OptimizerChoice:
        return whet.OptimizerChoice(**{"lr": 0.1, "weight_decay": 0.01, **values})

    def changed(model: nn.Module) -> whet.OptimizerChoice:
        return choice(model, **change)

    train(tmp_path / "run", choice, stop=5)
    with pytest.raises(UsageError, match=f"the {next(iter(change))} is not what the run was started with"):
        train(tmp_path / "run", changed)
    seen = train(tmp_path / "run", changed, allow=("lr",))
    assert seen[-1][0]["weight_decay"] == change.get("weight_decay", 0.01)
    rates = [event.get("lr") for event in read_events(open_run(tmp_path / "run"), kinds=("step",))]
    now = change.get("lr", 0.1)
    assert rates == pytest.approx([(0.1 if step < 5 else now) * (1 - step / 12) for step in range(12)])


def test_values_that_a_callback_moves_are_no_change_of_the_user(tmp_path: Path) -> None:
    """The same objects resume: what a session left in them is not what the user has changed."""

    class Decay(whet.Callback):
        def on_start(self, run: Any) -> None:
            self.groups = run.stepper.optimizer.param_groups

        def after_step(self, state, outcome) -> whet.Action:
            self.groups[0]["weight_decay"] = 0.01 + 0.001 * state.step
            return whet.Action.NONE

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = adamw(model)
    first = train(tmp_path / "run", lambda _: optimizer, model=model, stop=5, callbacks=[Decay()])
    rest = train(tmp_path / "run", lambda _: optimizer, model=model, callbacks=[Decay()])
    assert [groups[0]["weight_decay"] for groups in first + rest] == [0.01 + 0.001 * step for step in range(1, 13)]
    # A process that starts with the original values resumes too.
    train(tmp_path / "run", epochs=4)
    optimizer.param_groups[0]["weight_decay"] = 0.3
    with pytest.raises(UsageError, match=r"weight_decay 0\.01 -> 0\.3"):
        train(tmp_path / "run", lambda _: optimizer, model=model, epochs=5)


def test_numbers_of_a_schedule_function_are_compared(tmp_path: Path) -> None:
    def decay(rate: float) -> Callable[[int], float]:
        return lambda step: rate**step

    train(tmp_path / "run", schedule=decay(0.9), stop=5)
    with pytest.raises(UsageError, match=r"schedule\.rate 0\.9 -> 0\.8"):
        train(tmp_path / "run", schedule=decay(0.8))
    train(tmp_path / "run", schedule=decay(0.9))


# --- source code ------------------------------------------------------------------------------------------------------

_numbers = itertools.count()
CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x)

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        return 1.0 * self.linear(x)

def loss(model, x, y):
    return 1.0 * nn.functional.mse_loss(model(x), y)

class Loss(nn.Module):
    takes_micro = True

    def __init__(self, model):
        super().__init__()
        self.model = [model]

    def forward(self, micro):
        return 1.0 * (self.model[0](micro.x) - micro.y).square().mean()

def rate(step):
    return 1.0 / step
"""


def load(folder: Path, code: str) -> ModuleType:
    """Import code from a file of its own, as another process would."""
    path = folder / "mine.py"
    path.write_text(code)
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(f"mine_{next(_numbers)}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def train_module(run: Path, module: ModuleType, *, use_object: bool = False, **options: Any) -> None:
    torch.manual_seed(0)
    model = module.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = module.Loss(model) if use_object else module.loss
    if not use_object:

        def bound(micro: Any) -> torch.Tensor:
            return loss(model, micro.x, micro.y)
    else:
        bound = loss
    samples = torch.randn(32, 3), torch.randn(32, 1)
    stop = options.pop("stop", None)
    overrides = {"threads": 1, "micro_batch": 8}
    with whet.Session(
        model,
        optimizer,
        samples,
        run=run,
        global_batch_size=8,
        epochs=3,
        device="cpu",
        schedule=module.rate,
        overrides=overrides,
        **options,
    ) as session:
        for batch in session:
            session.step(bound, batch)
            if session.state.step == stop:
                break


def warnings_of(run: Path) -> list[str]:
    return [event.get("reason") for event in read_events(open_run(run), kinds=("warning",))]


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("return 1.0 * self.linear", "return 2.0 * self.linear", "model Inner"),
        pytest.param("self.inner = Inner()", "self.inner = Inner()  # as before", "model Net", marks=pytest.mark.slow),
        ("return 1.0 * (self.model", "return 2.0 * (self.model", "loss Loss"),
        pytest.param("return 1.0 / step", "return 1.0 / (1 + step)", "schedule rate", marks=pytest.mark.slow),
    ],
)
def test_changed_source_code_is_warned_of_by_name(old: str, new: str, named: str, tmp_path: Path) -> None:
    run, messages = tmp_path / "run", []
    train_module(run, load(tmp_path, CODE), use_object=True, stop=5)

    def note(kind: str, fields: dict[str, Any]) -> None:
        if kind == "warning":
            messages.append(fields["reason"])

    train_module(run, load(tmp_path, CODE.replace(old, new)), use_object=True, on_event=note, stop=8)
    (warning,) = warnings_of(run)
    assert f"the source code of {named} has changed" in warning
    assert messages == [warning]
    (resumed,) = read_events(open_run(run), kinds=("resume",))
    # The loss is not known yet when the run resumes.
    assert (named in resumed.get("exactness")) == (not named.startswith("loss"))
    # Said once. From then on the new code is the run's, and the run is not called bit-exact.
    train_module(run, load(tmp_path, CODE.replace(old, new)), use_object=True)
    assert len(warnings_of(run)) == 1
    *_, last = read_events(open_run(run), kinds=("resume",))
    assert "not bit-exact since step" in last.get("exactness")


def test_the_same_source_code_is_not_warned_of(tmp_path: Path) -> None:
    train_module(tmp_path / "run", load(tmp_path, CODE), use_object=True, stop=5)
    train_module(tmp_path / "run", load(tmp_path, f"# moved\n{CODE}"), use_object=True)
    assert warnings_of(tmp_path / "run") == []
    (event,) = read_events(open_run(tmp_path / "run"), kinds=("resume",))
    assert event.get("exactness").startswith(CUSTOM_LOOP)


def test_a_function_that_the_loss_calls_is_compared_too(tmp_path: Path) -> None:
    """The loss is usually a lambda around the user's function."""
    train_module(tmp_path / "run", load(tmp_path, CODE), stop=5)
    changed = CODE.replace("return 1.0 * nn.functional", "return 2.0 * nn.functional")
    train_module(tmp_path / "run", load(tmp_path, changed))
    (warning,) = warnings_of(tmp_path / "run")
    assert "loss loss has changed" in warning


@pytest.mark.parametrize(
    ("first", "second", "warning"),
    [
        (nn.functional.mse_loss, nn.L1Loss(), "loss L1Loss is used instead of mse_loss"),
        pytest.param(
            nn.HuberLoss(),
            nn.HuberLoss(delta=0.5),
            "the options of loss HuberLoss have changed",
            marks=pytest.mark.slow,
        ),
        (
            partial(nn.functional.huber_loss, delta=1.0),
            partial(nn.functional.huber_loss, delta=0.5),
            "the options of loss huber_loss have",
        ),
        (nn.HuberLoss(), nn.HuberLoss(), None),
    ],
)
def test_another_loss_of_torch_is_warned_of(first: Any, second: Any, warning: str | None, tmp_path: Path) -> None:
    for loss, epochs in ((first, 1), (second, 2)):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.ones(8, 3), torch.zeros(8, 1)
        whet.train(
            model,
            data,
            loss=loss,
            optimizer=optimizer,
            global_batch_size=4,
            epochs=epochs,
            run=tmp_path / "run",
            device="cpu",
            on_event=None,
            measure=False,
        )
    warnings = warnings_of(tmp_path / "run")
    assert warnings == [] if warning is None else warning in "".join(warnings), warnings
    (resumed,) = read_events(open_run(tmp_path / "run"), kinds=("resume",))
    assert resumed.get("exactness").startswith("bit-exact" if warning is None else f"not bit-exact: {warning}")


def test_code_without_source_is_not_spoken_of(tmp_path: Path) -> None:
    for text in ("1.0", "2.0"):
        module = ModuleType("typed")
        exec(CODE.replace("1.0 *", f"{text} *"), module.__dict__)
        train_module(tmp_path / "run", module, use_object=True, stop=5)
    assert warnings_of(tmp_path / "run") == []


def test_several_lambdas_of_one_function_are_no_change(tmp_path: Path) -> None:
    """The second loss of a loop is not the first one with other code, also if it is first used after a resume."""
    for stop in (3, None):
        torch.manual_seed(0)
        nets = nn.ModuleDict({"d": nn.Linear(4, 1), "g": nn.Linear(2, 4)})
        optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.01) for name, net in nets.items()}
        options: dict[str, Any] = {"global_batch_size": 4, "overrides": {"threads": 1}, "split_batch": False}
        with whet.Session(nets, optimizers, torch.ones(32, 4), run=tmp_path / "run", **options) as session:
            for batch in session:
                session.step(lambda x, nets=nets: nets["d"](x).mean(), batch, optimizer="d")
                session.step(lambda x, nets=nets: nets["d"](nets["g"](x[:, :2])).mean(), batch, optimizer="g", every=5)
                if session.state.step == stop:
                    break
    assert warnings_of(tmp_path / "run") == []
    (event,) = read_events(open_run(tmp_path / "run"), kinds=("resume",))
    assert event.get("exactness").startswith(CUSTOM_LOOP)
