"""Rules for how much memory a run may take, and how a global batch is split to stay within it."""

from collections.abc import Iterator, Mapping

from whet.base.units import GB, format_bytes
from whet.plan.environment import TORCH_WATERMARKS, WHET_WATERMARKS
from whet.plan.kernel_support import supports_unpadded_attention
from whet.plan.memory import predict_memory
from whet.plan.rule import Decision, RuleContext, rule
from whet.plan.setting import Scalar
from whet.plan.warnings import ROW_LIMIT, has_row_limit

# Leave 8 % of a card's memory for fragmentation, and a quarter of main memory for the system.
_CUDA_SHARE = 0.92
_CPU_SHARE = 0.75
# If the size of activations is unknown, memory cannot be predicted, so start with a small micro-batch.
_UNKNOWN_MEMORY_MICRO_BATCH = 8


@rule("M1", "memory_gb")
def choose_memory(context: RuleContext) -> Decision:
    """Memory that the plan may use, in GB of 2**30 bytes.

    Why: on unified memory, a step that is too large swaps instead of failing (BERT on an M1 Max fell from 36 to 3.9
    sequences per second), and the limit of MPS is above the physical memory. So the plan stays within Metal's
    recommended working set, and within the memory that is free now. On CUDA, 8 % is left for fragmentation; on the CPU,
    a quarter is left for the system.
    When wrong: other programs start or end after the plan was made.
    Override: memory_gb=N.
    Sources: pytorch/pytorch#105839; lucadiliello/pytorch-apple-silicon-benchmarks; MPSAllocator.mm (torch 2.13).
    """
    device = context.device_type
    total = context.machine.memory_bytes
    free = context.system_state.memory_available_bytes
    accelerator = context.accelerator
    usable = accelerator.usable_bytes if accelerator else total
    evidence = {"usable_bytes": usable, "machine_bytes": total, "free_now_bytes": free}
    if usable is None:
        return Decision(value=None, reason=f"how much memory {device} may use is unknown", evidence=evidence)
    if device == "cuda":
        limit, reason = usable * _CUDA_SHARE, f"92 % of the card's {format_bytes(usable)}"
    elif device == "mps":
        limit, reason = float(usable), f"Metal recommends at most {format_bytes(usable)}; above it the Mac swaps"
    else:
        limit, reason = usable * _CPU_SHARE, f"three quarters of {format_bytes(usable)}; the rest is for the system"
    # Other programs compete for main memory, but rarely for the memory of a discrete GPU.
    if free is not None and device != "cuda" and free < limit:
        limit, reason = float(free), f"only {format_bytes(free)} are free now"
    # So far this is the limit of the device. Divide it among the processes that share the device.
    sharers = context.processes_per_device
    if sharers > 1:
        limit, reason = limit / sharers, f"{reason}; shared by {sharers} processes"
    return Decision(value=round(limit / GB, 2), reason=reason, evidence=evidence)


@rule("M2", "activation_checkpointing")
def choose_activation_checkpointing(context: RuleContext) -> Decision:
    """Whether activations are recomputed in the backward pass instead of being kept.

    Why: it saves memory at the cost of about a third more arithmetic. A smaller micro-batch costs less, so this is for
    models that do not fit with even one sample. With BatchNorm it takes precedence over a smaller micro-batch, because
    splitting the batch changes the statistics.
    When wrong: when a larger micro-batch would gain more than the repeated forward pass costs. Blocks with BatchNorm
    are not compiled then, because torch's compiler would update their statistics again in the recomputation.
    Override: activation_checkpointing=on or off.
    Sources: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
    """
    workload, limit = context.workload, _limit_bytes(context)
    # The smallest allowed micro-batch. A model with BatchNorm must not be split.
    least = workload.samples_per_rank if workload.whole_batch_reason else 1
    needed = _needed_bytes(context, least)
    evidence = {"smallest_step_bytes": needed, "limit_bytes": limit}
    if needed is None or limit is None:
        return Decision(value="off", reason="not known to be needed", evidence=evidence)
    if needed <= limit:
        return Decision(value="off", reason=f"the smallest step needs {format_bytes(needed)}", evidence=evidence)
    reason = f"the smallest step needs {format_bytes(needed)} of {format_bytes(limit)}"
    return Decision(value="on", reason=reason, evidence=evidence)


@rule("M3", "micro_batch")
def choose_micro_batch(context: RuleContext) -> Decision:
    """Number of samples that go through the model at once. Gradients are accumulated over the global batch.

    Why: the micro-batch is the whole global batch if it fits, else the largest of equal parts that fits, because few
    large kernels keep a GPU busy, and the gradient is the same sum. Losses are summed with the weight of their samples
    or tokens, so a short last micro-batch has its proper weight. With several processes, each splits its own share. On
    M1 and M2 with torch up to 2.13, a matrix product over more than 32,768 rows gives wrong gradients, so micro-batch
    times length stays within this limit. The batch is not split if that would change what is trained, as with
    BatchNorm, or with a loss that is not a mean over samples. Parts may have any size: batch sizes that are powers of
    two gained nothing on a CPU, and only widths need to be multiples of 8 (docs/lab.md, 2026-11-18).
    When wrong: speed often saturates earlier, so a smaller micro-batch may be as fast and leave memory free. A head
    over more than 32,768 tokens sums over them in its backward pass, with any micro-batch. whet computes a head that is
    an nn.Linear in pieces, and `whet check` detects others.
    Override: micro_batch=N; the global batch stays the same.
    Sources: pytorch/pytorch#177116, #183535.
    """
    workload, limit = context.workload, _limit_bytes(context)
    whole = workload.samples_per_rank
    needed = _needed_bytes(context, whole)
    evidence: dict[str, int | None] = {"limit_bytes": limit, "whole_batch_bytes": needed}
    if workload.world_size > 1:
        evidence["processes"] = workload.world_size
    what = "the whole global batch" if workload.world_size == 1 else f"one of {workload.world_size} shares"
    if workload.whole_batch_reason is not None:
        reason = f"the batch is not split: {workload.whole_batch_reason}"
        return Decision(value=whole, reason=reason, evidence=evidence)
    if limit is None or needed is None:
        start = _largest_even_split(whole, at_most=_UNKNOWN_MEMORY_MICRO_BATCH)
        return Decision(value=start, reason="a careful start: the memory it needs is unknown", evidence=evidence)

    rows = _row_limit(context)
    if rows is not None:
        evidence["row_limit"] = rows
    # A sample of length L adds L rows to each matrix product.
    most = whole if rows is None else max(1, rows // workload.max_length)
    # Take the first size that fits, which is the largest. If none fits, take 1, which a warning reports.
    fitting = next((n for n in even_splits(whole) if n <= most and (_needed_bytes(context, n) or 0) <= limit), 1)
    evidence["step_bytes"] = _needed_bytes(context, fitting)
    if fitting == whole:
        return Decision(value=whole, reason=f"{what} fits: {_share_text(context, whole, limit)}", evidence=evidence)
    if fitting == 1 and (evidence["step_bytes"] or 0) > limit:
        reason = f"not even one sample fits: {_share_text(context, 1, limit)}"
        return Decision(value=1, reason=reason, evidence=evidence)
    # Report the limit that applied, which is the number of rows if memory allows a larger micro-batch.
    if most < whole and (_needed_bytes(context, _largest_even_split(whole, at_most=most)) or 0) <= limit:
        reason = f"more than {rows:,} rows give wrong gradients on this GPU before torch 2.14"
    else:
        reason = f"the largest even split that fits: {_share_text(context, fitting, limit)}"
    return Decision(value=fitting, reason=reason, evidence=evidence)


@rule("M5", "eval_batch")
def choose_eval_batch(context: RuleContext) -> Decision:
    """Number of samples evaluated at once.

    Why: without a backward pass, a sample needs a fraction of the memory, so twice the micro-batch is safe. Results do
    not depend on it.
    When wrong: models whose output is much larger than their activations.
    Override: eval_batch=N.
    Sources: arithmetic.
    """
    micro = context.micro_batch
    reason = "no backward pass, so twice the micro-batch"
    return Decision(value=2 * micro, reason=reason, evidence={"micro_batch": micro})


@rule("M6", "lengths")
def choose_lengths(context: RuleContext) -> Decision:
    """How samples of different lengths are batched.

    Why: the samples of a global batch may be sorted by length before they are split, which reduces padding and does not
    change the samples of the step. On MPS, each new shape adds a compiled graph that is never freed (9 MB grew to 13.7
    GB in one epoch of 315 shapes). So lengths are rounded up to one of four values. The number of rows has at most
    three values, so a column has at most twelve shapes in a whole run. The event of each epoch counts them. A model
    that accepts packed samples computes no padding: on a CPU it took 15.5 s instead of 26.7 s for the same texts. On
    CUDA, torch has an attention kernel for packed samples in half precision (from torch 2.10 and compute capability 8.0
    on). If steps are captured or compiled, packed batches are filled up to one of about a dozen total lengths
    (packed_bucketed) with dummy texts that the loss ignores, which adds 2 to 6 % tokens. Hugging Face Transformers
    models take padded batches. On a CPU, their blocks compute only the real tokens (unpadded), if loss and gradients of
    the first batch agree with those of the padded computation. Batches that are padded on the left, or have less than a
    tenth of padding, are computed with their padding.
    When wrong: if attention over packed samples costs more than the padding that it saves. The lengths of a dataset
    that is read sample by sample are not known in advance. On MPS, pad such samples to a few lengths yourself.
    Override: lengths=sorted (also fixed, bucketed, packed, packed_bucketed) where the recipe has that key;
    overrides={"lengths": "fixed"} keeps the padding of a model from Python.
    Sources: docs/lab.md; pytorch/pytorch#181485, #164299, pyg-team/pytorch_geometric#10689.
    """
    workload, device = context.workload, context.device_type
    evidence = {"mean_length": workload.mean_length, "max_length": workload.max_length}
    if not workload.lengths_vary:
        return _choose_padding(context, evidence)
    if device == "cpu" and workload.can_pack:
        return Decision(value="packed", reason="no padding at all; the step's samples stay the same", evidence=evidence)
    # The rules for precision, graph and compile run before this rule (see plan/values.py).
    if supports_unpadded_attention(context.machine, workload, device=device, precision=context.precision):
        if context.graph == "on" or context.compile != "off":
            reason = "no padding, and few totals: each is captured or compiled once"
            return Decision(value="packed_bucketed", reason=reason, evidence=evidence)
        return Decision(value="packed", reason="no padding at all; attention has a kernel for it", evidence=evidence)
    if device == "mps":
        reason = "less padding; every new shape costs memory on MPS"
        return Decision(value="bucketed", reason=reason, evidence=evidence)
    return Decision(value="sorted", reason="less padding; the step's samples stay the same", evidence=evidence)


def _choose_padding(context: RuleContext, evidence: Mapping[str, Scalar]) -> Decision:
    """Decide whether to skip padding that the user's code adds, which only an attention mask reveals."""
    workload = context.workload
    if not workload.can_unpad:
        obstacle = workload.unpad_obstacle
        reason = "all samples have one shape" if obstacle is None else f"padding is computed: {obstacle}"
        return Decision(value="fixed", reason=reason, evidence=evidence)
    if context.device_type != "cpu":
        reason = "padding is computed: reading the lengths would wait for the device"
    elif context.compile != "off" or context.activation_checkpointing == "on":
        reason = "padding is computed: compiled or recomputed blocks cannot skip it"
    else:
        reason = "blocks of the model skip padding that attention_mask shows"
        return Decision(value="unpadded", reason=reason, evidence=evidence)
    return Decision(value="fixed", reason=reason, evidence=evidence)


@rule("M7", "high_watermark")
def choose_high_watermark(context: RuleContext) -> Decision:
    """The limit of GPU memory on MPS, as a multiple of the recommended working set.

    Why: with torch's default (1.7), a run can take more than the physical memory before it fails. At 1.0, exceeding the
    working set raises an error that can be caught. Both watermarks must be set: with only a high watermark below 1.4,
    the first MPS call aborts. 0.0 does not reduce fragmentation, but removes the limit.
    When wrong: a Mac on which nothing else runs and swapping is acceptable.
    Override: PYTORCH_MPS_HIGH_WATERMARK_RATIO and PYTORCH_MPS_LOW_WATERMARK_RATIO in the environment, because torch
    reads them at the first call of MPS. memory_gb=N plans for less.
    Sources: MPSAllocator.mm (torch 2.13); kohya-ss/sd-scripts#603; public advice for Macs often says 0.0.
    """
    if context.device_type != "mps":
        return Decision(value=None, reason="only MPS has it", evidence={"device": context.device_type})
    reason = "an excess becomes an error that can be caught instead of swapping"
    return Decision(value=WHET_WATERMARKS[0], reason=reason, evidence={"torch_default": TORCH_WATERMARKS[0]})


@rule("M10", "low_watermark")
def choose_low_watermark(context: RuleContext) -> Decision:
    """The share of the recommended working set above which MPS frees cached memory before it allocates more.

    Why: it is below the high watermark (rule M7), so that memory is freed before the limit is reached. MPS aborts if
    the low watermark is above the high one, and torch's default (1.4) is above 1.0.
    When wrong: where freeing and allocating again costs more than the memory is worth.
    Override: PYTORCH_MPS_LOW_WATERMARK_RATIO in the environment, together with PYTORCH_MPS_HIGH_WATERMARK_RATIO.
    Sources: MPSAllocator.mm (torch 2.13).
    """
    if context.device_type != "mps":
        return Decision(value=None, reason="only MPS has it", evidence={"device": context.device_type})
    reason = "cached memory is freed before the limit is reached"
    return Decision(value=WHET_WATERMARKS[1], reason=reason, evidence={"torch_default": TORCH_WATERMARKS[1]})


@rule("M8", "empty_cache")
def choose_empty_cache(context: RuleContext) -> Decision:
    """When cached memory is returned to the system.

    Why: returning it waits for the GPU, and discards buffers that the next step needs. On MPS it also drops compiled
    graphs (from torch 2.13 on), which bounds their growth. Once an epoch, it has no measurable cost. With varying
    shapes, the driver of a Mac held 72 GB for 6.7 GB of tensors within five steps, and steps took 12 times as long. So
    the memory is also returned as soon as the driver holds 1 GiB more than three times the peak of the tensors, for at
    most a twentieth of the time. The log reports the cost.
    When wrong: where another library in the same process holds GPU memory that torch cannot return.
    Override: none.
    Sources: pytorch/pytorch#165522, #181485; kyutai-labs/pocket-tts#255; public advice calls it at every log line.
    """
    is_mps = context.device_type == "mps"
    reason = "each epoch, and when the driver holds far more than the tensors need" if is_mps else "it only costs time"
    value = "on" if is_mps else "off"
    return Decision(value=value, reason=reason, evidence={"device": context.device_type})


@rule("M9", "freed_memory")
def choose_freed_memory(context: RuleContext) -> Decision:
    """Whether the C library keeps memory that a step on a CPU has freed for the next step, or returns it to the system.

    Why: each step allocates again what the last one freed. glibc returns large blocks immediately, so their pages are
    faulted in and zeroed again, a thousand in a step of 70 ms. With kept memory, steps took 0.97 of the time for text,
    0.98 for chat and 0.78 for a small Hex net on two cores, with the same peak memory and bit-identical results. The
    memory is returned after the training run, and when memory runs out. GPUs have their own caches.
    When wrong: an evaluation on a shared machine that needs far more memory than a step; steps of very different sizes,
    whose free blocks do not fit the next step. With layers of up to 200 MB that varied a thousandfold from step to
    step, a peak of 1.1 GB became 1.2 to 1.5 GB. Blocks of over 256 MB are always returned.
    Override: freed_memory=returned, also when a run is resumed; or MALLOC_TRIM_THRESHOLD_ and related variables, or
    GLIBC_TUNABLES, in the environment, which are respected.
    Sources: glibc manual, "Malloc Tunable Parameters"; own measurement (docs/lab.md).
    """
    device, system = context.device_type, context.machine.os.name
    evidence = {"device": device, "os": system}
    if device == "cpu" and system == "Linux":
        reason = "the next step allocates it again, and new pages must be zeroed first"
        return Decision(value="kept", reason=reason, evidence=evidence)
    reason = "only glibc can be configured" if device == "cpu" else f"{device} has its own cache"
    return Decision(value="returned", reason=reason, evidence=evidence)


def even_splits(whole: int) -> Iterator[int]:
    """Yield the micro-batch sizes that split a global batch evenly into 1, 2, 3, ... parts, largest first."""
    return (-(-whole // parts) for parts in range(1, whole + 1))


def _largest_even_split(whole: int, *, at_most: int) -> int:
    return next(size for size in even_splits(whole) if size <= at_most)


def _limit_bytes(context: RuleContext) -> int | None:
    return None if context.memory_gb is None else int(context.memory_gb * GB)


def _needed_bytes(context: RuleContext, micro_batch: int) -> int | None:
    # Until activation_checkpointing is decided, predict the step without it.
    is_decided = "activation_checkpointing" in context.settings
    return predict_memory(
        context.workload,
        micro_batch=micro_batch,
        device=context.device_type,
        precision=context.precision,
        is_checkpointed=is_decided and context.activation_checkpointing == "on",
        num_shards=context.num_shards,
    )


def _share_text(context: RuleContext, micro_batch: int, limit: int) -> str:
    return f"about {format_bytes(_needed_bytes(context, micro_batch) or 0)} of {format_bytes(limit)}"


def _row_limit(context: RuleContext) -> int | None:
    """Return the maximum number of rows of a matrix product with correct gradients, or None if there is no limit."""
    return ROW_LIMIT if has_row_limit(context.machine, context.device_type) else None
