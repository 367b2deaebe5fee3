"""Checks that train: parity with the CPU, repeatability and exact resume."""

import copy
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as f

from whet.checkpoint import store
from whet.checkpoint.snapshot import Snapshot
from whet.data.batch import DictBatch
from whet.doctor.check import Check, CheckFinding, DeviceUnderTest, Figure, differs, failed, good, not_applicable
from whet.doctor.checks.compare import draw_integers
from whet.doctor.checks.models import VOCABULARY, ModelTask, SmallTransformer, convnet_task, transformer_task
from whet.step.optimizers import OptimizerChoice
from whet.training.session import Session
from whet.verify.tolerance import relative_error, relative_errors

# --- Parity with the CPU ---------------------------------------------------------------------------------------------

PARITY_STEPS = 20
# Maximum relative errors that count as agreement. Rounding errors grow along a trajectory.
GRADIENTS, UPDATE, TRAJECTORY = 1e-3, 1e-4, 1e-2


def _one_step(task: ModelTask, where: torch.device) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return the loss, all gradients, and all weights after one step of SGD, because AdamW would amplify rounding."""
    model = copy.deepcopy(task.model).to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = task.loss(model)
    loss.backward()
    gradients = {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return loss.detach().cpu(), gradients, {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def _losses(task: ModelTask, where: torch.device) -> Tensor:
    """Return the losses of a few steps of fused AdamW."""
    model = copy.deepcopy(task.model).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(PARITY_STEPS):
        optimizer.zero_grad()
        loss = task.loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def _parity(make: Callable[[], ModelTask], target: DeviceUnderTest) -> CheckFinding:
    task, cpu, device = make(), torch.device("cpu"), target.torch_device
    (loss, gradients, weights), (our_loss, our_gradients, our_weights) = _one_step(task, cpu), _one_step(task, device)
    expected = _losses(task, cpu)
    if our_gradients.keys() != gradients.keys():
        return differs("not every parameter got a gradient", missing=len(gradients) - len(our_gradients))
    by_name = relative_errors(our_gradients, gradients)
    worst = max(by_name, key=lambda name: by_name[name])
    figures: dict[str, Figure] = {
        "loss_error": relative_error(our_loss, loss),
        "gradient_error": by_name[worst],
        "worst_gradient": worst,
        "update_error": relative_error(our_weights, weights),
        "trajectory_error": relative_error(_losses(task, device), expected),
        "num_gradients": len(gradients),
        "num_steps": PARITY_STEPS,
        "first_loss": float(expected[0]),
        "last_loss": float(expected[-1]),
    }
    limits = {
        "loss_error": UPDATE,
        "gradient_error": GRADIENTS,
        "update_error": UPDATE,
        "trajectory_error": TRAJECTORY,
    }
    # Use `not <=` instead of `>`, so that NaN exceeds every limit.
    over = [name.replace("_", " ") for name, limit in limits.items() if not float(figures[name] or 0.0) <= limit]
    if over:
        return differs(f"differs from the CPU: {', '.join(over)}", **figures)
    return good(f"loss, {len(gradients)} gradients, a step and {PARITY_STEPS} losses agree with the CPU", **figures)


def _same_twice(make: Callable[[], ModelTask], target: DeviceUnderTest) -> CheckFinding:
    task, device = make(), target.torch_device
    one, other = _one_step(task, device), _one_step(task, device)
    different = [name for name in one[2] if not torch.equal(one[2][name], other[2][name])]
    if not different and torch.equal(one[0], other[0]):
        return good("the same step twice gives the same bits")
    error = relative_error(other[2], one[2])
    what = f"the same step twice gives different bits in {len(different)} of {len(one[2])} tensors"
    if error <= UPDATE and target.device.adds_in_any_order:
        # As PyTorch documents for CUDA, the result of atomic sums depends on their order. deterministic=on avoids them.
        return good(f"{what}, by rounding", error=error, num_different=len(different))
    return differs(what, error=error, num_different=len(different))


PARITY: list[Check] = [
    Check(name="transformer against the CPU", run=partial(_parity, transformer_task), is_quick=True),
    Check(name="convnet against the CPU", run=partial(_parity, convnet_task)),
    Check(name="transformer, the same step twice", run=partial(_same_twice, transformer_task), is_quick=True),
    Check(name="convnet, the same step twice", run=partial(_same_twice, convnet_task)),
]


# --- Exact resume ----------------------------------------------------------------------------------------------------

# Interrupt twice, so that a resumed run is resumed too.
RESUME_STEPS = 14
_STOPS = (5, 9)
_LIMIT_SECONDS = 60.0
# Tolerance of weights after a move to another device. Rounding differs between devices, and AdamW amplifies it.
_MOVE_TOLERANCE = 1e-2


def _train_session(run: Path, *, device: str, dropout: float, stop_after: int | None, is_move: bool = False) -> int:
    """Start or resume a run as a new process would, and return the last step.

    After `stop_after` steps, interrupt the run with SIGINT. With `is_move`, end it with `max_steps` instead.
    """
    torch.manual_seed(0)
    model = SmallTransformer(dropout=dropout)
    tokens = draw_integers(64, 25, below=VOCABULARY, seed=3)

    def loss(micro: DictBatch) -> torch.Tensor:
        logits = model(micro.tokens[:, :-1])
        return f.cross_entropy(logits.flatten(0, 1), micro.tokens[:, 1:].flatten())

    limit = stop_after if is_move and stop_after else RESUME_STEPS
    with Session(
        model,
        OptimizerChoice(lr=1e-3),
        {"tokens": tokens},
        run=run,
        device=device,
        global_batch_size=8,
        epochs=3,
        max_steps=limit,
        ema=True,
        clip=1.0,
        seed=5,
        # Use one thread, because small kernels on many threads are very slow on a busy machine, and fp32, because the
        # faster formats of a GPU round more than the tolerance of a move allows.
        overrides={"micro_batch": 8, "threads": 1, "precision": "fp32"},
    ) as session:
        for batch in session:
            session.step(loss, batch)
            if session.progress.step == stop_after and not is_move:
                signal.raise_signal(signal.SIGINT)
    return session.progress.step


def _last(run: Path) -> Snapshot:
    newest = store.load_newest(run / "checkpoints")
    assert newest is not None, "a finished run has a checkpoint"
    return newest.snapshot


def _different(one: Snapshot, other: Snapshot) -> list[str]:
    names = sorted(one.tensors.keys() | other.tensors.keys())
    return [
        name
        for name in names
        if name not in one.tensors
        or name not in other.tensors
        or not torch.equal(one.tensors[name], other.tensors[name])
    ]


def _interrupted(target: DeviceUnderTest) -> CheckFinding:
    with tempfile.TemporaryDirectory(prefix="whet-doctor-") as folder:
        whole, again, stopped = (Path(folder, name) for name in ("whole", "again", "stopped"))
        for run in (whole, again):
            _train_session(run, device=target.name, dropout=0.2, stop_after=None)
        reached = [
            _train_session(stopped, device=target.name, dropout=0.2, stop_after=step) for step in (*_STOPS, None)
        ]
        if reached != [*_STOPS, RESUME_STEPS]:
            return failed(f"the run did not stop and resume as requested: {reached}")
        expected, repeated, result = _last(whole), _last(again), _last(stopped)
    different, num_tensors = _different(result, expected), len(expected.tensors)
    is_repeatable = not _different(repeated, expected)
    generator = f"rng/{target.device.kind}"
    figures = {
        "num_tensors": num_tensors,
        "num_different": len(different),
        "is_repeatable": is_repeatable,
        "has_own_generator": generator in expected.tensors,
    }
    if not different:
        return good(f"interrupted twice, resumed: all {num_tensors} tensors equal, bit for bit", **figures)
    if not is_repeatable:
        what = "not exact, and neither are two uninterrupted runs: the device computes different bits each time"
    else:
        what = f"not exact: {len(different)} of {num_tensors} tensors differ, such as {different[0]}"
    weights = [name for name in expected.tensors if name in result.tensors and not name.startswith("rng")]
    error = relative_error([result.tensors[n] for n in weights], [expected.tensors[n] for n in weights])
    return differs(what, **figures, error=error)


def _moved(target: DeviceUnderTest) -> CheckFinding:
    if target.device.is_cpu:
        return not_applicable("there is nowhere to move to")
    with tempfile.TemporaryDirectory(prefix="whet-doctor-") as folder:
        stayed, moving = Path(folder, "stayed"), Path(folder, "moving")
        _train_session(stayed, device="cpu", dropout=0.0, stop_after=None)
        for device, step in ((target.name, _STOPS[0]), ("cpu", _STOPS[1]), (target.name, RESUME_STEPS)):
            _train_session(moving, device=device, dropout=0.0, stop_after=step, is_move=True)
        expected, result = _last(stayed), _last(moving)
    names = [name for name in expected.tensors if name.startswith("model/")]
    if not names:
        return failed("the checkpoint holds no weights")
    error = relative_error([result.tensors[n] for n in names], [expected.tensors[n] for n in names])
    if error <= _MOVE_TOLERANCE:
        return good("moved to the CPU and back: the weights agree with a run on the CPU", error=error)
    return differs(
        f"moved to the CPU and back: largest relative error {error:.2g}", error=error, tolerance=_MOVE_TOLERANCE
    )


RESUME: list[Check] = [
    Check(name="interrupted and resumed", run=_interrupted, limit_seconds=_LIMIT_SECONDS, is_quick=True),
    Check(name="moved to the CPU and back", run=_moved, limit_seconds=_LIMIT_SECONDS),
]
