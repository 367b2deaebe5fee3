"""Which global batch does a recipe have that leaves it open? The run's own where there is one, else a measured one."""

from pathlib import Path
from typing import Any

from whet.base.errors import WhetError
from whet.config.resolve import Resolved
from whet.measure.batches import choose_batch
from whet.measure.kept_batch import kept_batch
from whet.measure.knee import scaling_of
from whet.measure.progress import Watch
from whet.measure.remote import RemoteRig
from whet.measure.rig import ProbeFailedError
from whet.plan.chosen_batch import ChosenBatch
from whet.recipes.measuring import rig_of

MOST_SECONDS = 20.0
"""What finding it may take before a training; mostly it is much less."""


def batch_of_run(path: Path, resolved: Resolved[Any]) -> Resolved[Any] | None:
    """The config with the global batch that a run was started with; None where there is no run."""
    chosen = kept_batch(path, base_rates=[resolved.config.lr])
    return None if chosen is None else resolved.with_batch(chosen)


def measured_batch(
    rig: RemoteRig, resolved: Resolved[Any], *, budget_seconds: float, watch: Watch | None = None
) -> ChosenBatch:
    """The knee for a recipe whose rig is open; the rig is left at it."""
    config = resolved.config
    scaling = scaling_of(config.optimizer)
    return choose_batch(rig, base_rates=[config.lr], scaling=scaling, budget_seconds=budget_seconds, watch=watch)


def find_batch(word: str, resolved: Resolved[Any], *, device: str, watch: Watch | None = None) -> Resolved[Any]:
    """The config with the global batch that was measured in a process of its own, and its learning rate."""
    try:
        with rig_of(word, resolved, device=device) as rig:
            return resolved.with_batch(measured_batch(rig, resolved, budget_seconds=MOST_SECONDS, watch=watch))
    except ProbeFailedError as error:
        raise WhetError("no global batch could be measured", got=error.reason, try_="global_batch_size=N") from None
