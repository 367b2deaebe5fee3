"""Plans that need less memory, once a run has shown that it must. The global batch stays as it is."""

from whet.base.errors import NoMemoryError
from whet.plan.plan import Plan, with_learnt
from whet.plan.setting import Measured


def with_smaller_micro_batch(plan: Plan, at_most: int, *, reason: str, problem: str) -> Plan:
    """The plan with the largest even cut of the global batch that is no larger than `at_most`."""
    whole = plan.workload.global_batch_size
    cuts = -(-whole // at_most)
    micro = -(-whole // cuts)
    evidence = {"problem": problem, "before": plan.value("micro_batch")}
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
        raise NoMemoryError(
            "not even one sample can be evaluated", got=problem, try_="a smaller model or shorter samples"
        )
    reason = f"evaluating {before} at once ran out of memory at step {step:,}"
    return with_learnt(plan, {"eval_batch": Measured(value=before // 2, reason=reason, evidence={"problem": problem})})


def _whole(value: object) -> int:
    assert isinstance(value, int)
    return value
