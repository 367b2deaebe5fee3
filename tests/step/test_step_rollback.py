"""Out of memory at any operator of a step: the step is rolled back and repeated, and nothing else changes.

Simulated: the error is raised in place of an operator; tests/virtual_mac has real out-of-memory errors.
"""

import gc
import random
import traceback
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import whet
from paths import ReportCount
from small_models import TokenModel, convnet, images, ragged_tokens
from whet.base.errors import WhetError
from whet.device.open import open_device
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.step.rollback import StepRollback

pytestmark = pytest.mark.torch

OUT_OF_MEMORY = "MPS backend out of memory (MPS allocated: 5.30 GiB, other allocations: 0 bytes, max allowed: 5.33 GiB)"


INSPECTIONS = {"_learn_changes", "check_first_step"}
"""Functions that inspect a step after its update. Running out of memory there must not repeat the step."""


class RunsOut(TorchDispatchMode):
    """Counts the operators of a step, and raises at one of them."""

    is_inspecting = False
    """Whether the last one raised in an inspection."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.copy_.default):  # in place: allocates nothing
            return func(*args, **(kwargs or {}))
        self.count += 1
        if self.count == self.at:
            names = {frame.f_code.co_name for frame, _ in traceback.walk_stack(None)}
            RunsOut.is_inspecting = not names.isdisjoint(INSPECTIONS)
            raise RuntimeError(OUT_OF_MEMORY)
        return func(*args, **(kwargs or {}))


def batchnorm_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(6 * 6 * 6, 4)
    )


def train_once(
    run: Path | None,
    *,
    fails_in_step: int = 0,
    at: int | None = None,
    loss_fails: int = 0,
    make_model: Any = batchnorm_net,
    make_optimizer: Any = None,
    max_steps: int = 4,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], int, dict[int, list[int]]]:
    """Train a little. Return weights, other persistent state, the operators of the chosen step, and the samples."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = make_model()
    optimizer = make_optimizer(model) if make_optimizer else whet.OptimizerChoice(lr=1e-2)
    x, y = images(64, seed=0)
    seen: dict[int, list[int]] = {}
    count = 0
    options = {"global_batch_size": 16, "epochs": 9, "max_steps": max_steps, "ema": True, "clip": 1.0, **options}
    with whet.Session(model, optimizer, (x, y), run=run, device="cpu", **options) as session:

        def loss(micro: Any) -> torch.Tensor:
            nonlocal loss_fails
            if session.state.step + 1 == fails_in_step and loss_fails > 0:
                loss_fails -= 1
                raise RuntimeError(OUT_OF_MEMORY)
            # Draws from every generator: each must be restored.
            noise = 1 + 1e-3 * (random.random() + float(np.random.rand()))
            return nn.functional.cross_entropy(model(micro.x * noise), micro.y)

        for batch in session:
            number = session.state.step + 1
            if number == fails_in_step and not count:
                with RunsOut(at) as mode:
                    session.step(loss, batch)
                count = mode.count
            else:
                session.step(loss, batch)
            if session.state.step == number:
                seen[number] = batch.ids.tolist()
        state = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
        ema = session.run.stepper.ema
        state |= {f"ema/{name}": tensor for name, tensor in ema.average.items()} if ema else {}
        for index, kept in enumerate(session.run.stepper.optimizer.state.values()):
            state |= {f"optimizer/{index}/{name}": value for name, value in kept.items() if torch.is_tensor(value)}
        state["generator"] = torch.get_rng_state()
        state["numpy"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))
    return {name: tensor.clone() for name, tensor in state.items()}, count, seen


def loop_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False, fused=False)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


STEPS = {"first": 1, "second": 2, "last": 4}
OPTIMIZERS = {"fused": None, "loop": loop_adamw, "adafactor": adafactor}
CUTS = {"whole": 16, "cut": 4}
IN_GATE = {("first", "loop", "whole"), ("second", "adafactor", "whole"), ("last", "fused", "cut")}
"""Each step, optimizer and split, at some operators."""


@pytest.mark.parametrize(
    ("step", "make_optimizer", "micro_batch", "every"),
    [
        pytest.param(
            STEPS[step],
            OPTIMIZERS[optimizer],
            CUTS[cut],
            every,
            id=f"{step}-{optimizer}-{cut}-{'some' if every > 1 else 'all'}",
            marks=[] if every > 1 and (step, optimizer, cut) in IN_GATE else [pytest.mark.slow],
        )
        for every in (59, 1)
        for step in STEPS
        for optimizer in OPTIMIZERS
        for cut in CUTS
    ],
)
def test_a_step_that_ran_out_of_memory_anywhere_simulated_is_repeated_exactly(
    memory_folder: Path, report_count: ReportCount, step: int, make_optimizer: Any, micro_batch: int, every: int
) -> None:
    overrides = {"micro_batch": micro_batch, "threads": 1}
    options = {"make_optimizer": make_optimizer, "fails_in_step": step, "overrides": overrides, "split_batch": True}
    whole, count, samples = train_once(memory_folder / "whole", **options)
    points = range(1 + step % every, count + 1, every)
    for at in points:
        state, _, seen = train_once(memory_folder / f"at-{at}", at=at, **options)
        assert seen == samples, f"at operator {at}"
        different = [name for name in whole if not torch.equal(whole[name], state[name])]
        assert state.keys() == whole.keys()
        assert not different, f"at operator {at} of {count}: {different}"
        logged = [event.step for event in read_events(open_run(memory_folder / f"at-{at}"), kinds=("oom",))]
        assert logged in ([step], [] if RunsOut.is_inspecting else [step]), f"at operator {at}"
    report_count(f"out of memory at {len(points)} of {count} operators")


def test_the_comparison_can_fail_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rollback, the repeated step draws other numbers."""
    from whet.step.rollback import StepRollback

    options = {"fails_in_step": 2, "overrides": {"micro_batch": 16, "threads": 1}}
    whole, count, _ = train_once(tmp_path / "whole", **options)
    monkeypatch.setattr(StepRollback, "restore", lambda self: True)
    state, _, _ = train_once(tmp_path / "cut", at=count // 4, **options)
    assert any(not torch.equal(whole[name], state[name]) for name in whole)


@pytest.mark.parametrize("name", [pytest.param("convnet", marks=pytest.mark.slow), "tokens"])
def test_half_the_micro_batch_is_the_same_training_simulated(tmp_path: Path, name: str) -> None:
    """Out of memory twice in one step: a smaller micro-batch, the same samples, equal weights to rounding."""
    finals, seen = [], []
    for fails in (False, True):
        torch.manual_seed(1)
        model = convnet().double() if name == "convnet" else TokenModel().double()
        if name == "convnet":
            x, y = images(128, seed=0)
            data: Any = {"x": x.double(), "y": y}

            def loss(micro: Any, model: nn.Module = model) -> Any:
                return nn.functional.cross_entropy(model(micro.x), micro.y)
        else:
            data = {"tokens": ragged_tokens(128, longest=12, seed=0)}
            loss = model.loss
        options = {"global_batch_size": 32, "epochs": 100, "max_steps": 200, "overrides": {"threads": 1}}
        ids = []
        with whet.Session(
            model, whet.OptimizerChoice(lr=1e-3), data, run=tmp_path / f"{name}-{fails}", device="cpu", **options
        ) as session:
            for batch in session:
                failures = [RuntimeError(OUT_OF_MEMORY)] * 2 if fails and session.state.step == 3 else []

                def failing(micro: Any, loss: Any = loss, failures: list[RuntimeError] = failures) -> Any:
                    if failures:
                        raise failures.pop()
                    return loss(micro)

                session.step(failing, batch)
                ids.append(batch.ids.tolist())
            assert session.plan.micro_batch == (16 if fails else 32)
            assert session.plan.settings["micro_batch"].source == ("measured" if fails else "rule")
        finals.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        seen.append(ids)
    assert seen[0] == seen[1]
    assert (finals[0] - finals[1]).norm() <= 1e-6 * finals[0].norm()


def test_the_smaller_micro_batch_stays_on_resume_simulated(tmp_path: Path) -> None:
    options = {"make_model": convnet, "overrides": {"micro_batch": 16}, "split_batch": True}
    train_once(tmp_path / "run", fails_in_step=2, loss_fails=2, max_steps=3, **options)
    model = convnet()
    x, y = images(64, seed=0)
    settings: dict[str, Any] = {"global_batch_size": 16, "epochs": 9, "max_steps": 6, "ema": True, "clip": 1.0}
    settings["split_batch"] = True
    with whet.Session(
        model,
        whet.OptimizerChoice(lr=1e-2),
        (x, y),
        run=tmp_path / "run",
        device="cpu",
        overrides={"micro_batch": 16},
        **settings,
    ) as session:
        assert session.plan.micro_batch == 8
        assert session.plan.accumulation == 2
        assert "ran out of memory at step 2" in session.plan.settings["micro_batch"].reason


def test_a_model_with_batchnorm_is_not_split_simulated(tmp_path: Path) -> None:
    """Activations are recomputed instead, and the weights stay the same. If that is not enough, an error is raised."""
    options = {"fails_in_step": 2, "overrides": {"threads": 1}, "ema": False}
    whole, _, _ = train_once(None, **options)
    state, _, _ = train_once(tmp_path / "twice", loss_fails=2, **options)
    for name in whole:
        assert torch.allclose(whole[name].double(), state[name].double(), rtol=1e-5, atol=1e-7), name
    with pytest.raises(WhetError, match="needs more memory than is available"):
        train_once(tmp_path / "thrice", loss_fails=100, **options)


def test_errors_other_than_out_of_memory_are_raised(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="CUDA is out of luck"):
        train_with_error(tmp_path / "run", RuntimeError("CUDA is out of luck"))


def train_with_error(run: Path, error: Exception) -> None:
    model = convnet()

    def loss(micro: Any) -> torch.Tensor:
        raise error

    x, y = images(32, seed=0)
    whet.train(model, (x, y), loss=loss, optimizer=whet.OptimizerChoice(), global_batch_size=16, run=run, on_event=None)


def test_without_a_folder_an_update_cannot_be_undone_simulated() -> None:
    options = {"fails_in_step": 2, "overrides": {"micro_batch": 16, "threads": 1}, "make_optimizer": loop_adamw}
    _, count, _ = train_once(None, **options)
    with pytest.raises(WhetError, match="cannot be rolled back"):
        train_once(None, at=count - 3, **options)


def test_nothing_is_kept_alive_by_the_traceback_simulated(tmp_path: Path) -> None:
    model = convnet()
    x, y = images(64, seed=0)
    alive: list[weakref.ref[torch.Tensor]] = []
    left: list[int] = []

    def loss(micro: Any) -> torch.Tensor:
        gc.disable()
        left.append(sum(ref() is not None for ref in alive))
        activations = model[0](micro.x)
        alive.append(weakref.ref(activations))
        if len(alive) == 3:
            raise RuntimeError(OUT_OF_MEMORY)
        return nn.functional.cross_entropy(model[1:](activations), micro.y)

    options = {"global_batch_size": 16, "max_steps": 4, "run": tmp_path / "run", "overrides": {"micro_batch": 16}}
    whet.train(model, (x, y), loss=loss, optimizer=whet.OptimizerChoice(), on_event=None, **options)
    assert max(left) == 0


def test_an_evaluation_that_runs_out_of_memory_simulated_takes_fewer_at_once(tmp_path: Path) -> None:
    model = convnet()
    x, y = images(64, seed=0)
    sizes: list[int] = []

    def evaluate(model: nn.Module, micro_batches: Any) -> dict[str, float]:
        right = []
        for micro in micro_batches:
            sizes.append(len(micro.sample_ids))
            if sizes[-1] > 8:
                raise RuntimeError(OUT_OF_MEMORY)
            right += (model(micro.x).argmax(1) == micro.y).tolist()
        assert len(right) == 64
        return {"accuracy": float(np.mean(right))}

    def loss(micro: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    result = whet.train(
        model, (x, y), loss=loss, optimizer=whet.OptimizerChoice(), evaluate=evaluate, val=(x, y), run=tmp_path / "run",
        global_batch_size=16, on_event=None,
    )  # fmt: skip
    assert result.state == "done"
    assert sizes[:3] == [32, 16, 8]


def test_running_statistics_are_saved_in_few_operations() -> None:
    """On a GPU, every operation is a launch, in every step. Buffers that were replaced are saved as well."""
    model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(20)))
    rollback, x = StepRollback(model, open_device("cpu").device), torch.randn(4, 3)
    rollback.save()
    model(x)
    rollback.learn()
    for change in ("none", "none", "replaced", "none", "other dtype", "none", "shrunk"):
        if change == "replaced":
            model[3].running_mean = torch.full((3,), 7.0)
        elif change == "other dtype":
            model[5].running_var.data = model[5].running_var.double() / 3
        elif change == "shrunk":
            model[7].running_mean.resize_(2)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        rollback.save()
        for buffer in model.buffers():
            buffer.add_(1)
        assert rollback.restore()
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]), (change, name)
            assert buffer.dtype == before[name].dtype
    rollback.save()
    with RunsOut(at=None) as counted:
        rollback.save()
    assert counted.count <= 3
