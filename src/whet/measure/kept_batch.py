"""Which global batch was chosen before, where "auto" goes on with a run or with a plan? It is never measured twice."""

from collections.abc import Sequence
from pathlib import Path

from whet.base.errors import UsageError
from whet.plan.chosen_batch import ChosenBatch
from whet.plan.plan import Plan, read_plan
from whet.run.folder import RUN_FILE, open_run


def kept_batch(
    run: Path | None, *, plan: Plan | None = None, base_rates: Sequence[float] | None = None
) -> ChosenBatch | None:
    """What a run that is there was started with, else what a plan was measured for; None where it must be found.

    `base_rates` are those that are given now, if they must be the same.
    """
    where = "the plan"
    if run is not None and (run / RUN_FILE).exists():
        plan, where = read_plan(open_run(run).plan, where=f"{run}/plan.json"), str(run)
    if plan is None:
        return None
    chosen, number = plan.workload.batch, plan.workload.global_batch_size
    if chosen is None:
        raise UsageError(
            f"{where} has a global batch of its own",
            got=f"global_batch_size=auto; it was made with global_batch_size={number}",
            try_=f"global_batch_size={number} to go on, or another run folder for a new run",
        )
    if base_rates is not None and tuple(base_rates) != chosen.base_rates:
        before, now = (", ".join(f"{rate:g}" for rate in said) for said in (chosen.base_rates, base_rates))
        raise UsageError(
            f"{where} was made with another lr",
            got=f"lr={now}; it was given lr={before}, and has {chosen.rates[0]:.3g} at batch {chosen.batch}",
            try_=f"lr={before} to go on, or another run folder for a new run",
        )
    return chosen
