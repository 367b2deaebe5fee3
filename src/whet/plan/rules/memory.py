"""How much memory a run may take, and how a global batch is cut to stay inside it."""

from collections.abc import Iterator

from whet.base.units import GB, format_bytes
from whet.plan.kernel_support import supports_unpadded_attention
from whet.plan.memory import predict_memory
from whet.plan.rule import POSITIVE, Decision, RuleContext, integer, one_of, rule
from whet.plan.rules.distributed import choose_bucket, choose_sharding
from whet.plan.warnings import ROW_LIMIT, has_row_limit

_CUDA_SHARE = 0.92
_CPU_SHARE = 0.75
_UNKNOWN_MEMORY_MICRO_BATCH = 8


@rule("M1", "memory_gb", POSITIVE)
def choose_memory(facts: RuleContext) -> Decision:
    """How much memory the run may plan for, in GB of 2**30 bytes.

    Why: on unified memory a step that is too large does not fail, it swaps (BERT on an M1 Max fell from 36 to 3.9
    sequences per second), and MPS's own limit lies above the physical memory. So the plan stays within Metal's
    recommended working set, and within what is free now. On CUDA 8 % are left for fragmentation, on the CPU a quarter
    for the system.
    When wrong: other programs start or end after the plan was made.
    Override: memory_gb=N.
    Sources: pytorch/pytorch#105839; lucadiliello/pytorch-apple-silicon-benchmarks; MPSAllocator.mm (torch 2.13).
    """
    total = facts.machine.memory_bytes
    free = facts.conditions.memory_available_bytes
    accelerator = facts.accelerator
    usable = accelerator.usable_bytes if accelerator else total
    evidence = {"usable_bytes": usable, "machine_bytes": total, "free_now_bytes": free}
    if usable is None:
        return Decision(value=None, reason=f"how much memory {facts.device} may use is unknown", evidence=evidence)
    if facts.device == "cuda":
        limit, reason = usable * _CUDA_SHARE, f"92 % of the card's {format_bytes(usable)}"
    elif facts.device == "mps":
        limit, reason = float(usable), f"Metal recommends at most {format_bytes(usable)}; above it the Mac swaps"
    else:
        limit, reason = usable * _CPU_SHARE, f"three quarters of {format_bytes(usable)}; the rest is the system's"
    if free is not None and facts.device != "cuda" and free < limit:
        limit, reason = float(free), f"only {format_bytes(free)} are free now"
    sharers = facts.processes_per_device
    if sharers > 1:
        limit, reason = limit / sharers, f"{reason}; one of {sharers} processes that share it"
    return Decision(value=round(limit / GB, 2), reason=reason, evidence=evidence)


@rule("M2", "activation_checkpointing", one_of("off", "on"))
def choose_activation_checkpointing(facts: RuleContext) -> Decision:
    """Whether activations are computed again in the backward pass instead of being kept.

    Why: it saves memory for about a third more arithmetic, so it is for models of which not even one sample fits; a
    smaller micro-batch costs less. With BatchNorm it comes first, since cutting the batch would change the statistics.
    When wrong: when a larger micro-batch would gain more than the repeated forward pass costs. Blocks with BatchNorm
    are not compiled then: torch's compiler cannot leave their statistics alone in the repeated pass.
    Override: activation_checkpointing=on or off.
    Sources: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
    """
    workload, limit = facts.workload, _limit_bytes(facts)
    least = workload.share if workload.has_batchnorm else 1
    needed = _needed_bytes(facts, least)
    evidence = {"smallest_step_bytes": needed, "limit_bytes": limit}
    if needed is None or limit is None:
        return Decision(value="off", reason="not known to be needed", evidence=evidence)
    if needed <= limit:
        return Decision(value="off", reason=f"the smallest step needs {format_bytes(needed)}", evidence=evidence)
    return Decision(
        value="on", reason=f"the smallest step needs {format_bytes(needed)} of {format_bytes(limit)}", evidence=evidence
    )


@rule("M3", "micro_batch", integer(1))
def choose_micro_batch(facts: RuleContext) -> Decision:
    """How many samples of the global batch go through the model at once.

    Why: the whole global batch if it fits, else the fewest equal cuts that do: few large kernels keep a GPU busy, and
    the gradient is the same sum. Of several processes each cuts its own share. On M1 and M2 with torch up to 2.13 a
    product over more than 32,768 rows gives wrong gradients, so micro-batch times length stays below. A model with
    BatchNorm is not cut, because its statistics depend on the cut.
    When wrong: speed often saturates earlier; a smaller micro-batch may be as fast and leave memory free. A head over
    more than 32,768 words sums over them in its backward pass, which no micro-batch avoids; `whet check` finds it.
    Override: micro_batch=N; the global batch stays as it is.
    Sources: pytorch/pytorch#177116, #183535.
    """
    workload, limit = facts.workload, _limit_bytes(facts)
    whole = workload.share
    needed = _needed_bytes(facts, whole)
    evidence: dict[str, int | None] = {"limit_bytes": limit, "whole_batch_bytes": needed}
    if workload.world_size > 1:
        evidence["processes"] = workload.world_size
    what = "the whole global batch" if workload.world_size == 1 else f"one of {workload.world_size} shares"
    if workload.has_batchnorm:
        return Decision(value=whole, reason="BatchNorm's statistics depend on it, so it is not cut", evidence=evidence)
    if limit is None or needed is None:
        start = _largest_even_split(whole, at_most=_UNKNOWN_MEMORY_MICRO_BATCH)
        return Decision(value=start, reason="a careful start: the memory it needs is unknown", evidence=evidence)

    rows = _row_limit(facts)
    if rows is not None:
        evidence["row_limit"] = rows
    most = whole if rows is None else max(1, rows // workload.max_length)
    fitting = next((cut for cut in even_splits(whole) if cut <= most and (_needed_bytes(facts, cut) or 0) <= limit), 1)
    evidence["step_bytes"] = _needed_bytes(facts, fitting)
    if fitting == whole:
        return Decision(value=whole, reason=f"{what} fits: {_share_text(facts, whole, limit)}", evidence=evidence)
    if fitting == 1 and (evidence["step_bytes"] or 0) > limit:
        return Decision(value=1, reason=f"not even one sample fits: {_share_text(facts, 1, limit)}", evidence=evidence)
    if most < whole and (_needed_bytes(facts, _largest_even_split(whole, at_most=most)) or 0) <= limit:
        reason = f"more than {rows:,} rows give wrong gradients on this GPU with torch up to 2.13"
    else:
        reason = f"the largest even cut that fits: {_share_text(facts, fitting, limit)}"
    return Decision(value=fitting, reason=reason, evidence=evidence)


@rule("M4", "accumulation", integer(1))
def choose_accumulation(facts: RuleContext) -> Decision:
    """How many micro-batches make one optimizer step.

    Why: it follows from the global batch, which is yours, and the micro-batch. Losses are summed with the weight of
    their samples or tokens, so a short last micro-batch counts for what it is.
    When wrong: never by itself; change the global batch or the micro-batch.
    Override: global_batch_size=N or micro_batch=N.
    Sources: arithmetic.
    """
    whole, micro = facts.workload.share, facts.micro_batch
    assert isinstance(micro, int)
    cuts = -(-whole // micro)
    last = whole - (cuts - 1) * micro
    parts = f"{cuts} times {micro}" if last == micro else f"{cuts - 1} times {micro} and {last}"
    reason = "the global batch goes through at once" if cuts == 1 else f"{parts} make {whole}"
    evidence = {"global_batch_size": facts.workload.global_batch_size, "micro_batch": micro}
    if facts.workload.world_size > 1:
        number = facts.workload.world_size
        reason = f"{reason.replace('the global batch', 'its share')} on each of {number} processes"
        evidence["processes"] = number
    return Decision(value=cuts, reason=reason, evidence=evidence)


@rule("M5", "eval_batch", integer(1))
def choose_eval_batch(facts: RuleContext) -> Decision:
    """How many samples are evaluated at once.

    Why: without a backward pass a sample needs a fraction of the memory, so twice the micro-batch is safe; results do
    not depend on it.
    When wrong: models whose output is much larger than their activations.
    Override: eval_batch=N.
    Sources: arithmetic.
    """
    micro = facts.micro_batch
    assert isinstance(micro, int)
    return Decision(
        value=2 * micro, reason="no backward pass, so twice the micro-batch", evidence={"micro_batch": micro}
    )


@rule("M6", "lengths", one_of("fixed", "sorted", "few shapes", "packed", "packed few"))
def choose_lengths(facts: RuleContext) -> Decision:
    """How samples of different lengths are put together.

    Why: samples of one global batch may be sorted by length before they are cut: the step's samples stay the same and
    padding shrinks. On MPS each new shape adds a compiled graph that is never freed (9 MB grew to 13.7 GB in one epoch
    of 315 shapes), so lengths are rounded up to four; rows have three numbers at most, so a column has twelve shapes in
    a whole run. Each epoch's event counts them. A model that takes packed samples wastes nothing: on a CPU it took
    15.5 s instead of 26.7 s for the same texts. On CUDA attention has a kernel for them in half precision (from torch
    2.10 and compute capability 8.0 on). Where steps are captured or compiled, packed batches are filled up to one of
    about a dozen totals (packed few) with texts that mean nothing and are not looked at: 2 to 6 % more tokens.
    When wrong: where attention over packed samples is slower than the padding it saves. A dataset that is read sample
    by sample does not tell its lengths before; on MPS pad such samples to few lengths yourself.
    Override: lengths=sorted (also fixed, few shapes, packed, packed few) where the recipe has that key.
    Sources: docs/lab.md; pytorch/pytorch#181485, #164299, pyg-team/pytorch_geometric#10689.
    """
    evidence = {"mean_length": facts.workload.mean_length, "max_length": facts.workload.max_length}
    if not facts.workload.lengths_vary:
        return Decision(value="fixed", reason="all samples have one shape", evidence=evidence)
    if facts.device == "cpu" and facts.workload.can_pack:
        return Decision(value="packed", reason="no padding at all; the step's samples stay the same", evidence=evidence)
    if supports_unpadded_attention(facts.machine, facts.workload, device=facts.device, precision=facts.precision):
        if facts.graph == "on" or facts.compile != "off":
            reason = "no padding, and few totals: each is captured or compiled once"
            return Decision(value="packed few", reason=reason, evidence=evidence)
        return Decision(value="packed", reason="no padding at all; attention has a kernel for it", evidence=evidence)
    if facts.device == "mps":
        return Decision(
            value="few shapes", reason="less padding; every new shape costs memory on MPS", evidence=evidence
        )
    return Decision(value="sorted", reason="less padding; the step's samples stay the same", evidence=evidence)


@rule("M7", "watermarks", one_of("high 1.0, low 0.9", "unused"))
def choose_watermarks(facts: RuleContext) -> Decision:
    """MPS's high and low watermark, as multiples of the recommended working set.

    Why: torch's own values (1.7 and 1.4) let a run take more than the physical memory before it fails. At 1.0 an
    excess is an error that can be caught. Both must be set: with a high one below 1.4 alone, the first MPS call dies.
    0.0 does not reduce fragmentation; it removes the limit.
    When wrong: a Mac on which nothing else runs and swapping is acceptable.
    Override: memory_gb=N plans for less.
    Sources: MPSAllocator.mm (torch 2.13); kohya-ss/sd-scripts#603; public advice for Macs often says 0.0.
    """
    if facts.device != "mps":
        return Decision(value="unused", reason="only MPS has them", evidence={"device": facts.device})
    return Decision(
        value="high 1.0, low 0.9",
        reason="an excess becomes an error that can be caught, not a swapping Mac",
        evidence={"torch_high": 1.7, "torch_low": 1.4},
    )


@rule("M8", "empty_cache", one_of("never", "per epoch"))
def choose_empty_cache(facts: RuleContext) -> Decision:
    """When cached memory is given back to the system.

    Why: it waits for the GPU and throws away buffers that the next step needs; on MPS it also drops compiled graphs
    (from torch 2.13 on), which bounds their growth. Once an epoch costs nothing that can be measured.
    When wrong: data with very many shapes and long epochs.
    Override: none.
    Sources: pytorch/pytorch#165522, #181485; public advice calls it at every log line.
    """
    value, reason = (
        ("per epoch", "bounds the graph cache") if facts.device == "mps" else ("never", "it only costs time")
    )
    return Decision(value=value, reason=reason, evidence={"device": facts.device})


@rule("M9", "freed_memory", one_of("returned", "kept"))
def choose_freed_memory(facts: RuleContext) -> Decision:
    """Whether the C library keeps what a step on a CPU has freed for the next one, or returns it to the system.

    Why: a step asks for what the last one freed. glibc returns large blocks at once, so that each of their pages is
    faulted in and filled with zeros again, a thousand in a step of 70 ms. Kept, steps took 0.97 of the time for text,
    0.98 for chat and 0.78 for a small Hex net on two cores, with the same memory at its peak and the same bits. After
    the training, and when memory runs out, it is returned. GPUs have caches of their own.
    When wrong: an evaluation that needs far more memory than a step, on a machine that is shared; steps of very
    different sizes, whose free pieces do not fit the next one: with layers of up to 200 MB that varied a thousandfold
    from step to step, 1.1 GB at the peak became 1.2 to 1.5 GB. Blocks of over 256 MB are returned in any case.
    Override: freed_memory=returned, also when a run goes on; or MALLOC_TRIM_THRESHOLD_ and its sisters, or
    GLIBC_TUNABLES, in the environment, which are heeded.
    Sources: glibc manual, "Malloc Tunable Parameters"; own measurement (docs/lab.md).
    """
    evidence = {"device": facts.device, "os": facts.machine.os.name}
    if facts.device == "cpu" and facts.machine.os.name == "Linux":
        reason = "the next step asks for it again, and pages from the system are filled with zeros first"
        return Decision(value="kept", reason=reason, evidence=evidence)
    reason = "only glibc can be told" if facts.device == "cpu" else f"{facts.device} has a cache of its own"
    return Decision(value="returned", reason=reason, evidence=evidence)


def _limit_bytes(facts: RuleContext) -> int | None:
    limit = facts.memory_gb
    return int(limit * GB) if isinstance(limit, int | float) else None


def _needed_bytes(facts: RuleContext, micro_batch: int) -> int | None:
    checkpointing = facts.settings.get("activation_checkpointing")
    return predict_memory(
        facts.workload,
        micro_batch=micro_batch,
        device=facts.device,
        precision=facts.precision,
        is_checkpointed=checkpointing is not None and checkpointing.value == "on",
        num_parts=facts.num_parts,
    )


def _share_text(facts: RuleContext, micro_batch: int, limit: int) -> str:
    return f"about {format_bytes(_needed_bytes(facts, micro_batch) or 0)} of {format_bytes(limit)}"


def _row_limit(facts: RuleContext) -> int | None:
    """The rows one product may have without a wrong gradient; None where no limit is known."""
    return ROW_LIMIT if has_row_limit(facts.machine, facts.device) else None


def even_splits(whole: int) -> Iterator[int]:
    """The micro-batch sizes that cut a global batch evenly into 1, 2, 3, ... parts, largest first."""
    return (-(-whole // parts) for parts in range(1, whole + 1))


def _largest_even_split(whole: int, *, at_most: int) -> int:
    """The largest even cut that is no larger than `at_most`."""
    return next(cut for cut in even_splits(whole) if cut <= at_most)


RULES = (
    choose_memory,
    choose_sharding,
    choose_bucket,
    choose_activation_checkpointing,
    choose_micro_batch,
    choose_accumulation,
    choose_eval_batch,
    choose_lengths,
    choose_watermarks,
    choose_empty_cache,
    choose_freed_memory,
)
