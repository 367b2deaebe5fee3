"""Which kernels compute attention."""

from whet.plan.own_attention import own_attention_reason
from whet.plan.rule import Decision, Facts, one_of, rule

_HALF = ("bf16", "fp16")
_FIRST_WITH_CUDNN = 9
"""CUDA's compute capability from which torch prefers cuDNN's attention."""
_MEASURED = "9"
"""The compute capability for which whet's own kernels were written and measured."""


@rule("K7", "attention", one_of("torch", "cudnn", "flash", "efficient", "math", "own"))
def choose_attention(facts: Facts) -> Decision:
    """Which kernel torch's scaled_dot_product_attention takes first; those that follow it in the order cudnn, flash,
    efficient, math are taken where it cannot.

    Why: torch chooses well but for one case. On an H200 it prefers cuDNN's kernel in half precision, which prepares
    itself for every new shape: 88 to 130 ms each time, where flash and efficient took none. Where every batch has
    another length a run pays that hundreds of times, so cuDNN is left out there. At 2,048 tokens cuDNN's kernel was 1.5
    times as fast as flash, so with few shapes torch's choice and the others are measured. Two kinds of attention have
    kernels of whet's own. One that turns queries and keys by their places and has at most 128 of them (the puzzle
    model): they turn on the way, where torch's write and read the turned ones, and need five kernels on the way back
    instead of one. And one in spans, that is packed texts (rule M6) and rows of several documents (the chat model): no
    token of another span is read, where torch's compute all pairs of a row under a mask, or tiles of 128 for texts of
    50 tokens. A layer of BERT base at a batch of 256 took 0.17 ms there and back instead of 0.41, one of the medium
    chat model 0.41 instead of 1.1 (compiled). They were measured on compute capability 9 (H100, H200); elsewhere they
    have to be asked for.
    When wrong: long texts of all lengths in a long run; lengths=few shapes is better for those. Attention that is
    dropped out is torch's: attention_dropout=0 is what kernels of our own need.
    Override: attention=torch (its own choice), cudnn, flash, efficient, math or own. The CPU has flash and math, MPS
    has no choice; a model that does not call scaled_dot_product_attention is refused.
    Sources: own measurement (H200, torch 2.11; docs/lab.md); torch.nn.attention.sdpa_kernel (2.13).
    """
    precision, lengths = str(facts.value("precision")), facts.value("lengths")
    accelerator = facts.accelerator
    capability = (accelerator.capability or "") if accelerator is not None else ""
    generation = capability.partition(".")[0]
    evidence = {"device": facts.device, "precision": precision, "lengths": lengths, "capability": capability or None}
    prefers_cudnn = facts.device == "cuda" and generation.isdecimal() and int(generation) >= _FIRST_WITH_CUDNN
    has_many_shapes = facts.workload.lengths_vary and lengths in ("sorted", "packed")
    workload = facts.workload
    own = own_attention_reason(workload.layers, lengths_vary=workload.lengths_vary, lengths=lengths)
    if facts.device == "cuda" and precision in _HALF and own and generation == _MEASURED:
        return Decision(value="own", reason=own, evidence=evidence)
    if prefers_cudnn and precision in _HALF and has_many_shapes:
        return Decision(value="flash", reason="cuDNN's kernel costs 0.1 s for every new length", evidence=evidence)
    return Decision(value="torch", reason="torch chooses among its kernels", evidence=evidence)


RULES = (choose_attention,)
