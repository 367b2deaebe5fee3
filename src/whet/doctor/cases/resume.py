"""Does a run that was interrupted here end as if nothing had happened, and can it move to the CPU and back?"""

import signal
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as f

from whet.checkpoint import store
from whet.checkpoint.snapshot import Snapshot
from whet.data.batch import Micro
from whet.doctor.case import Case, Finding, Place, differs, failed, good, not_applicable
from whet.doctor.cases.models import VOCABULARY, Transformer
from whet.doctor.cases.trying import whole
from whet.engine.session import Session
from whet.step.optimizer import OptimizerChoice
from whet.verify.agreement import error_of

STEPS = 14
_CUTS = (5, 9)
_LIMIT_SECONDS = 60.0
_MOVED = 1e-2
"""The largest relative error of weights after a move; rounding differs between devices and AdamW enlarges it."""


def _sit(run: Path, *, device: str, dropout: float, stop_after: int | None, is_move: bool = False) -> int:
    """One sitting with a new model, as a new process would make it; Ctrl-C after `stop_after` steps. Where it ended."""
    torch.manual_seed(0)
    model = Transformer(dropout=dropout)
    tokens = whole(64, 25, below=VOCABULARY, seed=3)

    def loss(micro: Micro) -> torch.Tensor:
        logits = model(micro.tokens[:, :-1])
        return f.cross_entropy(logits.flatten(0, 1), micro.tokens[:, 1:].flatten())

    limit = stop_after if is_move and stop_after else STEPS
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
        # One thread: small kernels on many threads crawl on a busy computer.
        # And fp32: a GPU's faster formats round more than a move may.
        wishes={"micro_batch": 8, "threads": 1, "precision": "fp32"},
    ) as session:
        for batch in session:
            session.step(loss, batch)
            if session.progress.step == stop_after and not is_move:
                signal.raise_signal(signal.SIGINT)
    return session.progress.step


def _last(run: Path) -> Snapshot:
    found = store.newest(run / "checkpoints")
    assert found is not None, "a run that ended has a checkpoint"
    return found[1]


def _different(one: Snapshot, other: Snapshot) -> list[str]:
    names = sorted(one.tensors.keys() | other.tensors.keys())
    return [
        name
        for name in names
        if name not in one.tensors
        or name not in other.tensors
        or not torch.equal(one.tensors[name], other.tensors[name])
    ]


def _interrupted(place: Place) -> Finding:
    with tempfile.TemporaryDirectory(prefix="whet-doctor-") as folder:
        whole_run, again, cut = Path(folder, "whole"), Path(folder, "again"), Path(folder, "cut")
        for run in (whole_run, again):
            _sit(run, device=place.name, dropout=0.2, stop_after=None)
        reached = [_sit(cut, device=place.name, dropout=0.2, stop_after=step) for step in (*_CUTS, None)]
        if reached != [*_CUTS, STEPS]:
            return failed(f"the run did not stop and go on as asked: {reached}")
        expected, repeated, found = _last(whole_run), _last(again), _last(cut)
    different, num_tensors = _different(found, expected), len(expected.tensors)
    is_repeatable = not _different(repeated, expected)
    generator = f"randomness/{place.device.kind}"
    figures = {
        "num_tensors": num_tensors,
        "num_different": len(different),
        "is_repeatable": is_repeatable,
        "has_own_generator": generator in expected.tensors,
    }
    if not different:
        return good(f"interrupted twice, resumed: all {num_tensors} tensors equal, bit for bit", **figures)
    if not is_repeatable:
        what = "not exact, and neither are two whole runs: the device computes other bits each time"
    else:
        what = f"not exact: {len(different)} of {num_tensors} tensors differ, such as {different[0]}"
    weights = [name for name in expected.tensors if name in found.tensors and not name.startswith("randomness")]
    error = error_of([found.tensors[n] for n in weights], [expected.tensors[n] for n in weights])
    return differs(what, **figures, error=error)


def _moved(place: Place) -> Finding:
    if place.device.kind == "cpu":
        return not_applicable("there is nowhere to move to")
    with tempfile.TemporaryDirectory(prefix="whet-doctor-") as folder:
        stayed, moving = Path(folder, "stayed"), Path(folder, "moving")
        _sit(stayed, device="cpu", dropout=0.0, stop_after=None)
        for device, step in ((place.name, _CUTS[0]), ("cpu", _CUTS[1]), (place.name, STEPS)):
            _sit(moving, device=device, dropout=0.0, stop_after=step, is_move=True)
        expected, found = _last(stayed), _last(moving)
    names = [name for name in expected.tensors if name.startswith("model/")]
    if not names:
        return failed("the checkpoint holds no weights")
    error = error_of([found.tensors[n] for n in names], [expected.tensors[n] for n in names])
    if error <= _MOVED:
        return good("moved to the CPU and back: the weights agree with a run on the CPU", error=error)
    return differs(f"moved to the CPU and back: largest relative error {error:.2g}", error=error, tolerance=_MOVED)


CASES: list[Case] = [
    Case(name="interrupted and resumed", run=_interrupted, limit_seconds=_LIMIT_SECONDS, is_quick=True),
    Case(name="moved to the CPU and back", run=_moved, limit_seconds=_LIMIT_SECONDS),
]
