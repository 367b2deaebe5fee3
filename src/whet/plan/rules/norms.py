"""Whose kernels compute norms."""

from whet.plan.kernel_support import has_norm_kernels, norm_kernel_reason
from whet.plan.rule import Decision, RuleContext, one_of, rule


@rule("K8", "norms", one_of("torch", "own"))
def choose_norms(facts: RuleContext) -> Decision:
    """Whose kernels compute norms together with what stands beside them: torch's, or whet's own.

    Why: a norm computes little and reads much, so what it costs is how often its numbers go through the memory. Three
    kinds have kernels of whet's own on CUDA in half precision, one there and one back, which read and write every
    number once; means, variances and what lies between are float32. Group norms before SiLU or ReLU in channels_last
    (Hex), where torch's copies to contiguous and back: 140 us there and back, torch's compiled 594 us (128 channels,
    1,024 boards of 13x13, H200). Layer norms of what came in and what a linear layer found, dropped out (BERT): 95 us,
    torch's 261 us, compiled 137 us without the slopes of the linear layer's bias (768 wide, 11,900 tokens). Norms of
    sums without weights (chat, puzzles): 51 us (1,024 wide, 16,384 tokens); not in compiled models, where torch's
    compiler does the same. They were written for compute capability 9 (H100, H200); elsewhere they must be asked for.
    When wrong: nothing slower is known, but few shapes were looked at.
    Override: norms=torch or norms=own. Only CUDA has own ones; group norms need layout=channels_last, all need half
    precision, and where a norm does not fit them torch's are used.
    Sources: own measurement (H200, torch 2.11; docs/lab.md).
    """
    layout, precision = facts.layout, facts.precision
    evidence = {"device": facts.device, "precision": str(precision), "layout": layout}
    own = norm_kernel_reason(facts.workload.layers, layout=layout)
    if own and has_norm_kernels(facts.machine, device=facts.device, precision=precision):
        return Decision(value="own", reason=own, evidence=evidence)
    return Decision(value="torch", reason="kernels of our own are not for this workload here", evidence=evidence)


RULES = (choose_norms,)
