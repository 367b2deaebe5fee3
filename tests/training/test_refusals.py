"""A call that is refused writes nothing: the run folder keeps every byte, and a new run gets no folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import whet
from whet.base.errors import UsageError, WhetError
from whet.run import durable, lock
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = pytest.mark.torch

NUM_SAMPLES = 32


def data(*, num_samples: int = NUM_SAMPLES, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(num_samples, 3, generator=draw), torch.randn(num_samples, 1, generator=draw)


def net(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def sgd(model: nn.Module, **values: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **values})


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1, momentum=0.9, weight_decay=0.01)


class Listener(whet.Callback):
    """A callback whose state has no encoding."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": print}


def call(
    run: Path | None,
    *,
    model: Callable[[], nn.Module] = net,
    optimizer: Callable[[nn.Module], Any] = sgd,
    samples: Any = None,
    loss: Callable[..., Any] | None = None,
    stop: int | None = None,
    scheduler: Callable[[Any], Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Train with the options of the run, except for those that are given."""
    made = model()
    chosen = optimizer(made)
    if scheduler is not None:
        options["schedule"] = scheduler(chosen)
    overrides = {"threads": 1, "micro_batch": 8, "checkpoint_steps": 2, **options.pop("overrides", {})}
    defaults = {"global_batch_size": 8, "epochs": 3, "device": "cpu", "on_event": None, "measure": False}

    class Stop(whet.Callback):
        def after_step(self, state, outcome) -> whet.Action:
            return whet.Action.STOP("enough") if state.step == stop else whet.Action.NONE

    whet.train(
        made,
        data() if samples is None else samples,
        loss=loss or (lambda micro: nn.functional.mse_loss(made(micro.x), micro.y)),
        optimizer=chosen,
        run=run,
        overrides=overrides,
        **{"callbacks": [Stop()], **defaults, **options},
    )
    return made


def contents(folder: Path) -> dict[str, Any]:
    """All files with their bytes and times. The lock is taken to read the folder, so its time changes."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        time = None if name == lock.LOCK_FILE else path.stat().st_mtime_ns
        found[name] = (time, path.read_bytes() if path.is_file() else None)
    return found


NEVER = [
    # Refused in a new run too.
    ({"samples": (torch.zeros(0, 3), torch.zeros(0, 1))}, "the data is empty"),
    ({"samples": data(num_samples=5)}, "smaller than one global batch"),
    ({"samples": (torch.full((32, 3), float("nan")), torch.zeros(32, 1))}, "NaN or Inf"),
    ({"samples": 3}, "cannot train on this data"),
    ({"epohcs": 1}, "unknown keyword"),
    ({"clip": 0}, "clip"),
    ({"schedule": "cosin"}, "schedule must be"),
    ({"scheduler": lambda o: StepLR(o, 3)}, "schedule_interval="),
    ({"scheduler": lambda o: OneCycleLR(o, 0.1, total_steps=7)}, "OneCycleLR ends before|a different schedule"),
    ({"device": "tpu"}, "tpu"),
    ({"device": "cuda"}, "cuda"),
    ({"overrides": {"micro_bach": 3}}, "no such setting"),
    ({"overrides": {"attention": "own"}}, "attention|a different"),
    ({"overrides": {"attention": "whet"}}, "cpu has no such attention kernel|a different attention"),
    ({"overrides": {"norms": "whet"}}, "whet has no norm kernels for cpu|a different norms"),
    ({"overrides": {"layout": "channels_last"}}, "channels_last|a different"),
    ({"micro_batch": 4}, "setting of the plan"),
    ({"model": normalized, "overrides": {"micro_batch": 4}}, "micro_batch=4 would change what is trained|a different"),
    ({"global_batch_size": "auto"}, "measured|fixed"),
    ({"mode": "up"}, "mode must be"),
    ({"goal": "loss", "evaluate": lambda model, batches: {}}, "no data to evaluate"),
    ({"allow": ("weights",)}, "unknown value for --allow"),
    ({"callbacks": [print]}, "instance of whet.Callback"),
    ({"callbacks": [Listener()]}, "cannot be saved without pickle"),
    ({"model": lambda: "a model", "optimizer": lambda _: None}, "no such recipe"),
    ({"optimizer": lambda _: sgd(net())}, "not the model's"),
    ({"optimizer": lambda _: "adam"}, "torch.optim.Optimizer"),
    ({"optimizer": lambda m: torch.optim.LBFGS(m.parameters())}, "LBFGS"),
    ({"optimizer": lambda _: whet.OptimizerChoice(name="adan")}, "no such optimizer|a different optimizer"),
]
ON_RESUME = [
    ({"samples": data(seed=1)}, "the data is not what the run was started with"),
    ({"samples": data(num_samples=40)}, "40 samples; the run has 32"),
    ({"global_batch_size": 4}, "a different global_batch_size"),
    ({"global_batch_size": 4, "allow": ("data",)}, "a different global_batch_size"),
    ({"epochs": 5, "samples": data(seed=1)}, "the data is not"),
    ({"epochs": 5, "optimizer": lambda m: sgd(m, lr=0.2)}, r"lr 0\.1 -> 0\.2"),
    ({"epochs": 5, "model": lambda: net(5)}, "does not fit"),
    ({"epochs": 2}, "epochs may only be increased"),
    ({"max_steps": 9}, "max_steps may only be increased"),
    ({"seed": 1}, "a different seed"),
    ({"shuffle": False}, "a different shuffle"),
    ({"schedule": "linear"}, "a different schedule"),
    ({"warmup_steps": 2}, "a different warmup_steps"),
    ({"clip": 1.0}, "a different clip"),
    ({"ema": True}, "a different ema"),
    ({"eval_every": 2}, "a different eval_every"),
    ({"patience": 2}, "needs a goal metric"),
    ({"overrides": {"micro_batch": 4}}, "a different micro_batch"),
    ({"overrides": {"keep_checkpoints": 3}}, "a different keep_checkpoints"),
    ({"scheduler": lambda o: OneCycleLR(o, 0.1, total_steps=12)}, "a different schedule"),
    ({"optimizer": lambda m: sgd(m, lr=0.2)}, r"lr 0\.1 -> 0\.2"),
    ({"optimizer": lambda m: sgd(m, momentum=0.8)}, r"momentum 0\.9 -> 0\.8"),
    ({"optimizer": lambda m: sgd(m, weight_decay=0.0)}, r"weight_decay 0\.01 -> 0\.0"),
    ({"optimizer": lambda m: sgd(m, nesterov=True)}, "nesterov False -> True"),
    ({"optimizer": two_groups}, "parameter groups differ"),
    ({"optimizer": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, weight_decay=0.01)}, "a different optimizer"),
    ({"optimizer": lambda _: whet.OptimizerChoice(name="sgd", lr=0.1)}, "a different|decay|parameter groups differ"),
    ({"model": lambda: net(5)}, "does not fit"),
    ({"model": lambda: nn.Sequential(nn.Linear(3, 1))}, "does not fit"),
]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after 5 of 12 steps, then killed in the middle of a write."""
    run = tmp_path_factory.mktemp("runs") / "run"
    call(run, stop=5)
    with (run / "events.jsonl").open("ab") as log:
        log.write(b'{"kind": "step", "ti')
    draft = durable.leftover_name(run / "checkpoints" / "step-000000006")
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"half")
    return run


@pytest.mark.parametrize(("options", "message"), [*NEVER, *ON_RESUME])
def test_a_refused_resume_changes_no_byte(options: dict[str, Any], message: str, stopped: Path) -> None:
    before = contents(stopped)
    with pytest.raises(WhetError, match=message):
        call(stopped, **options)
    assert contents(stopped) == before
    assert lock.holder(stopped) is None


def test_the_original_call_still_resumes(stopped: Path, tmp_path: Path) -> None:
    for options in ({"epochs": 5, "samples": data(seed=1)}, {"optimizer": lambda m: sgd(m, lr=0.2)}):
        with pytest.raises(WhetError):
            call(stopped, **options)
    resumed, whole = call(stopped), call(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))
    assert not [path for path in open_run(stopped).checkpoints.iterdir() if durable.is_leftover(path)]
    (event,) = read_events(open_run(stopped), kinds=("resume",))
    assert (event.step, event.get("exactness")) == (5, "bit-exact")


@pytest.mark.parametrize(("options", "message"), NEVER)
def test_a_refused_new_run_gets_no_folder(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(WhetError, match=message):
        call(tmp_path / "run", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda micro: 0.5, "a tensor"),
        (lambda micro: torch.zeros(3, requires_grad=True), "one number"),
        (lambda micro: torch.zeros(()), "depend on any parameter"),
    ],
)
def test_a_loss_that_is_refused_in_the_first_step_leaves_no_folder(
    loss: Callable[..., Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(WhetError, match=message):
        call(tmp_path / "run", loss=loss)
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_refused_in_the_first_step_of_a_resume_changes_no_byte(tmp_path: Path) -> None:
    run = tmp_path / "run"
    call(run, stop=5)
    before = {name: data for name, (_, data) in contents(run).items()}
    with pytest.raises(WhetError, match="a tensor"):
        call(run, loss=lambda micro: 0.5, epochs=9)
    assert {name: data for name, (_, data) in contents(run).items()} == before
    call(run)
    (event,) = read_events(open_run(run), kinds=("resume",))
    assert (event.step, event.get("exactness")) == (5, "bit-exact")


def test_other_initial_weights_are_refused_when_a_run_resumes(tmp_path: Path) -> None:
    for name in ("first", "second"):
        call(tmp_path / name)
    call(tmp_path / "run", stop=5, init_from=tmp_path / "first")
    with pytest.raises(UsageError, match="a different init_from"):
        call(tmp_path / "run", init_from=tmp_path / "second")
    call(tmp_path / "run", init_from=tmp_path / "first")


def test_a_loss_of_the_user_that_raises_keeps_the_folder(tmp_path: Path) -> None:
    """It is no refusal: the same call resumes when the code is corrected."""

    def broken(micro: Any) -> torch.Tensor:
        raise KeyError("label")

    with pytest.raises(KeyError):
        call(tmp_path / "run", loss=broken)
    call(tmp_path / "run")
    assert open_run(tmp_path / "run").header.recipe == "session"


def test_a_refusal_after_the_first_step_keeps_the_run(tmp_path: Path) -> None:
    class Wrong(whet.Callback):
        def after_step(self, state, outcome) -> Any:
            return "stop" if state.step == 3 else whet.Action.NONE

    with pytest.raises(WhetError, match="other than an Action"):
        call(tmp_path / "run", callbacks=[Wrong()])
    assert list(open_run(tmp_path / "run").checkpoints.iterdir())


@pytest.mark.parametrize("kind", ["a file", "a folder with files"])
def test_a_path_that_is_no_run_is_left_alone(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    (path if kind == "a file" else tmp_path / "run" / "notes.txt").parent.mkdir(exist_ok=True)
    (path if kind == "a file" else path / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(WhetError, match=r"cannot create a run|not a run"):
        call(path)
    assert contents(tmp_path) == before
