"""What a run does when memory runs out: the same samples, fewer at once."""

import traceback
from collections.abc import Iterator

from torch import nn

from whet.base.errors import WhetError
from whet.plan.plan import Plan, with_learnt
from whet.plan.setting import Measured
from whet.step.recompute import find_blocks


def let_go(error: BaseException) -> str:
    """The first line of an error, once nothing is kept alive by it: frames in its traceback hold activations."""
    for raised in _chain(error):
        traceback.clear_frames(raised.__traceback__)
        raised.__traceback__ = None
    return (str(error).splitlines() or [type(error).__name__])[0]


def need_less(plan: Plan, model: nn.Module, *, num_samples: int, step: int, problem: str) -> Plan:
    """The plan with half the micro-batch, or with activations computed again; refuses where neither is left.

    `num_samples` is how many the step had. A model with BatchNorm is not cut, since that would change what it learns.
    """
    micro = min(_whole(plan.value("micro_batch")), num_samples)
    if micro > 1 and not plan.workload.has_batchnorm:
        return with_smaller_micro_batch(plan, micro // 2, step=step, problem=problem)
    if plan.value("activation_checkpointing") == "off" and find_blocks(model):
        reason = f"micro batch {micro} ran out of memory at step {step:,}"
        return with_learnt(
            plan, {"activation_checkpointing": Measured(value="on", reason=reason, evidence={"problem": problem})}
        )
    if plan.workload.has_batchnorm and micro > 1:
        raise WhetError(
            "a step of this model needs more memory than there is",
            got=f"micro batch {micro}: {problem}",
            try_=f"micro_batch={micro // 2}, if BatchNorm may take its statistics over fewer samples; "
            "or a smaller global_batch_size",
        )
    raise WhetError(
        "not even one sample fits into memory", got=problem, try_="a smaller model, shorter samples, or precision=bf16"
    )


def with_smaller_micro_batch(plan: Plan, at_most: int, *, step: int, problem: str) -> Plan:
    """The plan with the largest even cut of the global batch that is no larger than `at_most`."""
    whole = plan.workload.global_batch_size
    cuts = -(-whole // at_most)
    micro = -(-whole // cuts)
    before = plan.value("micro_batch")
    reason = f"micro batch {before} ran out of memory at step {step:,}"
    evidence = {"problem": problem, "before": before}
    return with_learnt(
        plan,
        {
            "micro_batch": Measured(value=micro, reason=reason, evidence=evidence),
            "accumulation": Measured(value=cuts, reason=f"{cuts} times {micro} make {whole}", evidence=evidence),
            "eval_batch": Measured(
                value=min(_whole(plan.value("eval_batch")), 2 * micro),
                reason="no backward pass, so twice the micro-batch",
                evidence=evidence,
            ),
        },
    )


def with_smaller_eval_batch(plan: Plan, *, step: int, problem: str) -> Plan:
    """The plan with half of what is evaluated at once; refuses where it is one sample already."""
    before = _whole(plan.value("eval_batch"))
    if before == 1:
        raise WhetError("not even one sample can be evaluated", got=problem, try_="a smaller model or shorter samples")
    reason = f"evaluating {before} at once ran out of memory at step {step:,}"
    return with_learnt(plan, {"eval_batch": Measured(value=before // 2, reason=reason, evidence={"problem": problem})})


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        raised = waiting.pop()
        if id(raised) not in seen:
            seen.add(id(raised))
            yield raised
            waiting += [other for other in (raised.__cause__, raised.__context__) if other is not None]


def _whole(value: object) -> int:
    assert isinstance(value, int)
    return value
