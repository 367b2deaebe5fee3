"""Which kernels compute attention."""

from whet.plan.kernel_support import attention_kernel_reason
from whet.plan.rule import Decision, RuleContext, one_of, rule

_HALF_PRECISIONS = ("bf16", "fp16")
_CUDNN_CAPABILITY = 9
"""CUDA's compute capability from which torch prefers cuDNN's attention."""
_KERNEL_CAPABILITY = "9"
"""The compute capability for which whet's own kernels were written and measured."""


@rule("K7", "attention", one_of("torch", "cudnn", "flash", "efficient", "math", "own"))
def choose_attention(facts: RuleContext) -> Decision:
    """Which kernels compute attention: those that torch chooses, one of torch's first (where it cannot, those that
    follow it in the order cudnn, flash, efficient, math), or whet's own.

    Why: torch chooses well but for one case. On an H200 it prefers cuDNN's kernel in half precision, which takes 88 to
    130 ms for every new shape, where flash and efficient take none; so it is left out where every batch has another
    length. At 2,048 tokens it was 1.5 times as fast as flash, so with few shapes torch's choice and the others are
    measured. Two kinds of attention have kernels of whet's own, in half precision on CUDA: at most 128 places with
    rotary positions (puzzles), which are turned on the way; and spans, that is packed texts (rule M6) and rows of
    several documents (chat), with heads of 32 or 64, where no token of another span is read: 0.17 ms a layer instead of
    0.41 for BERT base at a batch of 256. Measured on an H200, they are taken with compute capability 9, and elsewhere
    if asked for.
    When wrong: long texts of all lengths in a long run, where flash is taken; lengths=few shapes is better for those.
    Attention that is dropped out is torch's: a pretrained model needs attention_dropout=0 for kernels of our own.
    Override: attention=torch (its own choice), cudnn, flash, efficient, math or own. The CPU has flash and math, MPS
    has no choice. A training refuses a kernel that its device lacks, one of torch's for a model that does not call
    scaled_dot_product_attention, and own for a model without attention of these two kinds.
    Sources: own measurement (H200, torch 2.11; docs/lab.md); torch.nn.attention.sdpa_kernel (2.13).
    """
    precision, lengths = facts.precision, facts.lengths
    accelerator = facts.accelerator
    capability = (accelerator.capability or "") if accelerator is not None else ""
    generation = capability.partition(".")[0]
    evidence = {"device": facts.device, "precision": precision, "lengths": lengths, "capability": capability or None}
    prefers_cudnn = facts.device == "cuda" and generation.isdecimal() and int(generation) >= _CUDNN_CAPABILITY
    has_many_shapes = facts.workload.lengths_vary and lengths in ("sorted", "packed")
    workload = facts.workload
    own = attention_kernel_reason(workload.layers, lengths_vary=workload.lengths_vary, lengths=lengths)
    if facts.device == "cuda" and precision in _HALF_PRECISIONS and own and generation == _KERNEL_CAPABILITY:
        return Decision(value="own", reason=own, evidence=evidence)
    if prefers_cudnn and precision in _HALF_PRECISIONS and has_many_shapes:
        return Decision(value="flash", reason="cuDNN's kernel costs 0.1 s for every new length", evidence=evidence)
    return Decision(value="torch", reason="torch chooses among its kernels", evidence=evidence)


RULES = (choose_attention,)
