"""How does a run go on from a checkpoint? Its state is put back, and what is other than it was is refused or told."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from whet.base.errors import OtherDataError, UsageError, WhetError
from whet.checkpoint.about import About
from whet.checkpoint.snapshot import Snapshot, restore
from whet.engine.building import Parts
from whet.engine.circumstances import circumstances, differences, what_holds
from whet.engine.progress import Progress
from whet.plan.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What a run goes on with, once its tensors are in place."""

    progress: Progress
    base_rates: list[float]
    reasons: list[str]
    """Why it is not bit-exact from here on."""
    told: dict[str, Any]
    """What the log should say."""


def put_back(
    snapshot: Snapshot, parts: Parts, *, step: int, plan: Plan, data: Mapping[str, Any], allow: Collection[str]
) -> Restored:
    """Puts the state after `step` into the parts; `data` are the facts of what is trained on now."""
    reasons = _changes_of_data(snapshot.about, data, allow)
    if step > 0:
        now = circumstances(plan, parts.device, world_size=parts.group.world.size)
        reasons += differences(snapshot.about.circumstances, now)
    saved = restore(
        snapshot,
        parts.stepper.model,
        parts.stepper.optimizer,
        parts.device,
        scaler=parts.stepper.scaler,
        ema=parts.stepper.ema,
    )
    try:
        parts.schedule.load_state(saved["schedule"])
        parts.source.load_state(saved["source"])
        progress, rates = Progress.from_json(saved["progress"]), [float(rate) for rate in saved["base_rates"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        got = f"{type(error).__name__} {error}"
        raise WhetError("the checkpoint's progress has another structure", got=got, try_="an older one") from None
    length = parts.source.num_samples
    if length is not None and progress.position.samples >= length:
        # Other data, and shorter: what was left of the epoch is not there.
        progress.position = replace(progress.position, epoch=progress.position.epoch + 1, samples=0)
    if not parts.source.is_exact:
        reasons.append("a stream without a state")
    told: dict[str, Any] = {"exactness": what_holds(reasons, parts.device)}
    if snapshot.facts["device"] != parts.device.kind:
        told["moved_from"] = snapshot.facts["device"]
    if reasons:
        told |= {"exact": False, "reason": "; ".join(reasons)}
    return Restored(progress=progress, base_rates=rates, reasons=reasons, told=told)


def _changes_of_data(saved: About, now: Mapping[str, Any], allow: Collection[str]) -> list[str]:
    """Whether the data or the global batch are others; refused unless that was allowed."""
    then = {name: saved.data.get(name) for name in now}
    if then["global_batch_size"] != now["global_batch_size"] and "batch" not in allow:
        raise UsageError(
            "the global batch is not what the run was started with",
            got=f"{now['global_batch_size']}; the run has {then['global_batch_size']}",
            try_='the same global batch, or --allow batch (allow=("batch",)) to go on, not bit-exact',
        )
    prints = then["fingerprint"], now["fingerprint"]
    # Where one is unknown (a sample that differs each time, a worker that was killed) the length must do.
    is_other = then["num_samples"] != now["num_samples"] or (None not in prints and prints[0] != prints[1])
    if is_other and "data" not in allow:
        raise OtherDataError(
            "the data is not what the run was started with",
            got=f"{now['num_samples']} samples; the run has {then['num_samples']}"
            + (", of other content" if now["num_samples"] == then["num_samples"] else ""),
            try_='the same data, another run folder, or --allow data (allow=("data",)) to go on, not bit-exact',
        )
    batch = differences(*({"global_batch_size": facts["global_batch_size"]} for facts in (then, now)))
    data = [f"other data ({then['num_samples']} -> {now['num_samples']} samples)"] if is_other else []
    return [*batch, *data]
