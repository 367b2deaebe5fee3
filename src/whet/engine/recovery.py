"""What a run does when memory runs out: the same samples, fewer at once."""

import traceback
from collections.abc import Iterator

from torch import nn

from whet.base.errors import NoMemoryError
from whet.plan.lowering import with_smaller_micro_batch
from whet.plan.plan import Plan, with_learnt
from whet.plan.setting import Measured
from whet.step.blocks import find_blocks


def let_go(error: BaseException) -> str:
    """The first line of an error, once nothing is kept alive by it: frames in its traceback hold activations."""
    for raised in _chain(error):
        traceback.clear_frames(raised.__traceback__)
        raised.__traceback__ = None
    return (str(error).splitlines() or [type(error).__name__])[0]


def need_less(plan: Plan, model: nn.Module, *, num_samples: int, step: int, problem: str, may_cut: bool = True) -> Plan:
    """The plan with half the micro-batch, or with activations computed again; refuses where neither is left.

    `num_samples` is how many the step had. A model that remembers something of every forward pass, as BatchNorm does,
    may not be cut: that would change what it learns.
    """
    planned = plan.value("micro_batch")
    assert isinstance(planned, int)
    micro = min(planned, num_samples)
    if micro > 1 and may_cut:
        reason = f"micro batch {planned} ran out of memory at step {step:,}"
        return with_smaller_micro_batch(plan, micro // 2, reason=reason, problem=problem)
    if plan.value("activation_checkpointing") == "off" and find_blocks(model):
        reason = f"micro batch {micro} ran out of memory at step {step:,}"
        return with_learnt(
            plan, {"activation_checkpointing": Measured(value="on", reason=reason, evidence={"problem": problem})}
        )
    if micro > 1:
        raise NoMemoryError(
            "a step of this model needs more memory than there is",
            got=f"micro batch {micro}: {problem}",
            try_=f"micro_batch={micro // 2}, if running statistics (BatchNorm's, say) may be taken over fewer samples; "
            "or a smaller global_batch_size",
        )
    raise NoMemoryError(
        "not even one sample fits into memory", got=problem, try_="a smaller model, shorter samples, or precision=bf16"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        raised = waiting.pop()
        if id(raised) not in seen:
            seen.add(id(raised))
            yield raised
            waiting += [other for other in (raised.__cause__, raised.__context__) if other is not None]
