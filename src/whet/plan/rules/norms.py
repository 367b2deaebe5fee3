"""Whose kernels compute group norms."""

from whet.plan.own_norms import can_own_norms
from whet.plan.rule import Decision, Facts, one_of, rule


@rule("K8", "norms", one_of("torch", "own"))
def choose_norms(facts: Facts) -> Decision:
    """Whose kernels compute group norms together with the activation behind them: torch's, or whet's own.

    Why: in channels_last torch's group norm copies to contiguous and back, reads everything once more for its
    statistics, and under autocast writes float32. In a Hex net of 18 blocks of 128 channels on 13x13 boards, compiled,
    norms and their copies were 13.0 ms of a step, convolutions 8.3 ms (bf16, 1,024 boards, H200). One kernel of whet's
    own there and one back read and write every number once: 140 us a norm there and back, torch's compiled 594 us;
    means, variances and what lies between are float32. It is
    for SiLU and ReLU, and groups of a power of two of channels. It was written for compute capability 9 (H100, H200);
    elsewhere it has to be asked for.
    When wrong: nothing slower is known, but one net was looked at.
    Override: norms=torch or norms=own. Only CUDA has own ones; they need layout=channels_last and half precision, and
    where a norm does not fit them torch's are used.
    Sources: own measurement (H200, torch 2.11; docs/lab.md).
    """
    layout, precision = str(facts.value("layout")), facts.value("precision")
    evidence = {"device": facts.device, "precision": str(precision), "layout": layout}
    if not can_own_norms(facts.machine, facts.workload, device=facts.device, precision=precision):
        return Decision(value="torch", reason="kernels of our own are not for this workload here", evidence=evidence)
    if layout != "channels_last":
        return Decision(value="torch", reason=f"kernels of our own are not for {layout}", evidence=evidence)
    return Decision(value="own", reason="norm and activation in one kernel that copies nothing", evidence=evidence)


RULES = (choose_norms,)
