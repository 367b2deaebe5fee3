"""Check that the state of a run survives a checkpoint, at the first step of a new run and at each resume.

State that cannot be saved or restored is thus reported at the first step rather than at the first resume.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from whet.base.errors import UsageError, WhetError
from whet.base.units import format_list
from whet.checkpoint import store
from whet.checkpoint.comparison import compare_snapshots
from whet.checkpoint.snapshot import Snapshot
from whet.checkpoint.snapshot_restore import restore_snapshot
from whet.device.errors import is_out_of_memory
from whet.step.optimizers import EXECUTION_KEYS

if TYPE_CHECKING:
    from whet.training.run_context import RunContext

# The progress of the run and its initial options, which restore_state does not change.
_UNCOMPARED = ("step ", "progress.progress.", "progress.source.", "progress.initial.", "progress.code.")


def state_is_unchecked(run: "RunContext") -> bool:
    """Return whether to check the state at the first step: the run is new, has checkpoints and uses one process."""
    return run.checkpointer is not None and run.group.is_single_process and run.state.step == 0


def check_first_step(run: "RunContext") -> None:
    """Encode the state after the first update to memory, decode it and restore it, comparing after each operation.

    Raise UsageError before the step counts if any state differs. Nothing is written; the hashes of checkpoint files are
    compared when a checkpoint is read.
    """
    assert run.checkpointer is not None
    if not all(stepper.has_finite_weights() for stepper in run.steppers.values()):
        # The NaN guard will roll this step back.
        return
    start = time.perf_counter()
    snapshot = run.checkpointer.take_snapshot()
    loaded = store.encode_and_decode(snapshot)
    _raise_if_different(compare_snapshots(snapshot, loaded), "encoded and decoded")
    del snapshot
    with _same_objects(run):
        restore_state(run, loaded)
        _raise_if_different(restored_differences(loaded, run), "saved and restored")
    run.executor.reset_rollback_snapshot()
    run.log.add_seconds("verify", time.perf_counter() - start)


@contextlib.contextmanager
def _same_objects(run: "RunContext") -> Iterator[None]:
    """Give registered objects and callbacks back the attributes that they had before the `with` block.

    load_state_dict methods often assign new lists or tensors. They are equal to the old ones, but the user's code may
    hold references to those.
    """
    owners = [owner for owner in (*run.registered.objects.values(), *run.callbacks.users) if hasattr(owner, "__dict__")]
    attributes = [(owner, dict(vars(owner))) for owner in owners if not isinstance(owner, nn.Module)]
    yield
    for owner, before in attributes:
        vars(owner).clear()
        vars(owner).update(before)


def restored_differences(expected: Snapshot, run: "RunContext") -> list[str]:
    """Return the names of the parts of the run's state that differ from a snapshot."""
    assert run.checkpointer is not None
    differing = compare_snapshots(expected, run.checkpointer.take_snapshot(finds_unsaved_state=False))
    return [name for name in differing if not _is_uncompared(name)]


def _is_uncompared(difference: str) -> bool:
    """Return whether a difference is expected: progress, initial values, or kernels that the plan selects."""
    path = difference.partition(" ")[0]
    began = path.startswith("model.") and ".initial" in path
    began = began or (path.startswith("registered.") and ".structure.initial" in path)
    return difference.startswith(_UNCOMPARED) or began or path.rpartition(".")[2] in EXECUTION_KEYS


def restore_state(run: "RunContext", snapshot: Snapshot) -> None:
    """Restore a snapshot into the live objects, except for the position in the data, which is being read."""
    assert run.checkpointer is not None
    stepper = run.stepper
    gradients = [(parameter, parameter.grad) for parameter in run.model.parameters()]
    for one in run.steppers.values():
        # Free the optimizer's state first, so that the device never holds two copies. It is empty in a resume, too.
        one.optimizer.state.clear()
    try:
        saved, _ = restore_snapshot(
            snapshot,
            stepper.model,
            stepper.optimizer,
            run.device,
            rng=run.rng,
            scaler=stepper.scaler,
            ema=stepper.ema,
            others=run.other_optimizers,
            registered=run.registered.owners,
            initial=run.checkpointer.initial,
        )
        run.rates.load_state_dict(saved["schedule"], initial=saved["initial"], is_changed=False)
        run.callbacks.load_state_dict(saved["callbacks"])
    except Exception as error:
        if is_out_of_memory(error):
            raise
        got = f"{error.what}: {error.got}" if isinstance(error, WhetError) else f"{type(error).__name__}: {error}"
        raise _round_trip_error("it was saved, and cannot be restored", got[:400]) from error
    for parameter, gradient in gradients:
        parameter.grad = gradient


def _raise_if_different(names: Sequence[str], how: str) -> None:
    if names:
        raise _round_trip_error(f"{how}, it differs", format_list(names, separator="; "))


def _round_trip_error(what: str, got: str) -> UsageError:
    return UsageError(
        f"the state of this run cannot be restored from a checkpoint: {what}",
        got=got,
        try_="a load_state_dict that restores what state_dict returns; or run=None to train without checkpoints",
    )
