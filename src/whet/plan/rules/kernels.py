"""Rules that choose between implementations of the same computation: kernels, compilation, CUDA graphs and layout."""

from dataclasses import replace

from whet.plan.kernel_support import (
    GROUP_NORM_ACTIVATION,
    KERNEL_CAPABILITY,
    SPAN_ATTENTION,
    attention_kernel_reason,
    has_norm_kernels,
    norm_kernel_reason,
    supports_unpadded_attention,
)
from whet.plan.rule import Decision, RuleContext, rule
from whet.plan.values import HALF_PRECISIONS

# A shorter run does not repay the capture, because each of about a dozen shapes first runs once eagerly.
_MIN_STEPS_TO_CAPTURE = 50
# Lowest major CUDA compute capability with which torch prefers cuDNN's attention.
_CUDNN_CAPABILITY = 9


@rule("K1", "optimizer_kernels")
def choose_optimizer_kernels(context: RuleContext) -> Decision:
    """How the optimizer updates parameters: in a few fused kernels, in lists (foreach), or one by one (loop).

    Why: torch's default on MPS and CPU is a Python loop over parameters with ten or more kernels each. The fused update
    computes the same. On MPS it reduced a step from 916 to 493 operations, and on a CPU AdamW took 2.1 ms instead of
    3.6 ms.
    Your own optimizer object gets fused kernels too, if it is torch's Adam, AdamW, SGD or Adagrad (Adagrad not on MPS,
    and on CUDA from torch 2.13 on), and if you did not set `foreach`, `capturable` or `fused=False`. The update rule is
    the same, but results are not bit-identical: after 100 steps of AdamW on a CPU, the loss differed by 2.4e-7. If you
    set `fused=True`, it becomes capturable, which changes no bits. The flags of the optimizer are restored when the
    session ends. torch's other optimizers have no fused kernels, nor have adafactor and adam_atan2, which use lists or
    a loop.
    When wrong: sparse gradients, complex parameters, parameters that are views with gaps, and gradients whose memory
    layout differs from that of their parameter, which torch's fused CPU kernels read wrongly without an error. These
    cases are detected, and your optimizer keeps its own kernels. On MPS, fp16 loss scaling with torch before 2.13.
    Override: optimizer_kernels=yours keeps the kernels of your optimizer object, bit for bit; or pass fused, foreach or
    capturable to it yourself.
    Sources: torch/utils/_foreach_utils.py (2.13); pytorch/pytorch#127242, #186360; scvi-tools#3998; own measurement.
    """
    device, torch = context.device_type, context.machine.torch
    evidence = {"device": device, "torch": torch.version}
    if context.workload.optimizer_obstacle is not None:
        reason = context.workload.optimizer_obstacle
        return Decision(value="yours", reason=reason, evidence={**evidence, "optimizer": context.workload.optimizer})
    # Fused Adagrad failed on an H200 with torch 2.11. The source of 2.13 allows it. An unknown version counts as old.
    has_no_adagrad = device == "mps" or (device == "cuda" and torch.is_before(2, 13) is not False)
    if context.workload.optimizer == "Adagrad" and has_no_adagrad:
        reason = "torch has no fused Adagrad for MPS" + ("" if device == "mps" else ", nor for CUDA before 2.13")
        return Decision(value="yours", reason=reason, evidence={**evidence, "optimizer": "Adagrad"})
    # `is not False`: treat an unknown version (None) as an old one.
    if device == "mps" and context.precision == "fp16" and torch.is_before(2, 13) is not False:
        reason = "fused kernels ignore the loss scale on MPS before torch 2.13"
        return Decision(value="loop", reason=reason, evidence=evidence)
    built, kernels = context.workload.built_optimizer, context.workload.built_kernels
    if kernels and "fused" not in kernels:
        # whet's own adam_atan2 uses foreach on every device. torch's default on MPS and CPU is a loop.
        value = "foreach" if built == "adam_atan2" or device == "cuda" else "loop"
        reason = f"{built} has no fused kernels"
        return Decision(value=value, reason=reason, evidence={**evidence, "optimizer": built})
    default = "a loop over parameters" if device in ("mps", "cpu") else "foreach"
    reason = f"the same update in fewer kernels; torch's default is {default}"
    return Decision(value="fused", reason=reason, evidence=evidence)


@rule("K2", "compile")
def choose_compile(context: RuleContext) -> Decision:
    """Whether torch.compile compiles the model (on), or each of its repeated blocks (blocks), which takes less time.

    Why: compiling takes seconds to minutes, which the run must recoup. On MPS it made a small ResNet 4.5 to 9 times
    slower unless a layout option was set. Compiled code can also be wrong without an error: with torch 2.11 on CUDA,
    bucketize read its boundaries, a view, from the start of their storage. So before the first step, the gradients of
    the compiled model are compared with those of eager mode on a micro-batch of the run. If they differ, or if nothing
    could be compiled, the run continues uncompiled and reports it. In a measurement, such a candidate fails.
    When wrong: long runs of models with many pointwise operators. Small errors that strong dropout hides are not
    detected.
    Override: compile=on, compile=blocks or compile=off; verify=off skips the comparison.
    Sources: pytorch/pytorch#192551, #150121, #161609 (fixed by #184043); docs/verify.md.
    """
    reason = "no measurement shows that it would save its time"
    return Decision(value="off", reason=reason, evidence={"device": context.device_type})


@rule("K3", "graph")
def choose_graph(context: RuleContext) -> Decision:
    """Whether a whole optimizer step is captured once for each shape and replayed as one launch (CUDA graphs).

    Why: a graph avoids launching kernels one by one, which dominates the time of small models on fast GPUs. Only CUDA
    has graphs. Forward, backward, clipping, update and EMA are captured for up to 16 shapes of the step's
    micro-batches. Other shapes run eagerly. Samples and their weights are the same, results are equal except for
    rounding, and dropout draws from the same generator. Inputs have fixed addresses, and captured steps share memory
    that eager steps cannot use. Capturing takes a step or two for each shape, so its gain is measured. Without a
    measurement, steps are captured if samples are packed to a few total lengths (rule M6): on an H200, BERT base with a
    global batch of 32 trained 4,603 samples a second this way after a second of setup, and 975 with an expert's loop.
    The Hex net has one shape and many small kernels: with 18 blocks it trained 59,153 positions a second with graphs,
    and 36,032 without. The rows of a chat model have one shape too, and its kernels sometimes wait for their launch: in
    the medium preset, kernels took 63.3 ms of a step of 67.3 ms, and smaller models wait longer.
    When wrong: a loss that reads values or draws random numbers on the host, or whose shapes depend on values, cannot
    be captured. This is detected and reported, and the step runs eagerly. A loss that depends on changing Python state
    is detected only by comparing replayed losses with eager ones: at the first replay of each shape, at replays 1, 2,
    4, ... and at every 1,024th of all. The run then rolls back to its last checkpoint. Gradients are not available
    after a step. Hooks would not be called, so a model with hooks is not captured.
    For any other model whose samples have one shape, the first steps decide (launch_bound): they are timed, and later
    steps are captured only if launching kernels takes the host three quarters of the time. The first replays are timed
    too, and graphs are given up if they take more than 1.05 times as long as those eager steps. On an H200, an MLP with
    eight layers of width 512 and a batch of 256 trained 416,217 samples a second with graphs, and 43,237 without.
    The learning rate of your optimizer may change in every step. If other hyperparameters change too, such as the betas
    with OneCycleLR, the update stays outside the graph. So does that of torch's optimizers without fused kernels (rule
    K1). Other optimizers need capturable=True, because they might keep gradients, which the next replay overwrites.
    Override: graph=on, graph=off.
    Sources: PyTorch documentation, CUDA semantics, "CUDA graphs"; pytorch/pytorch#180395; docs/choices.
    """
    device, workload = context.device_type, context.workload
    evidence: dict[str, str | int | None] = {"device": device}
    if device != "cuda":
        return Decision(value="off", reason=f"{device} cannot capture steps", evidence=evidence)
    if workload.world_size > 1:
        evidence["processes"] = workload.world_size
        return Decision(value="off", reason="a captured step cannot wait for other processes", evidence=evidence)
    # Treat a run with an unknown number of steps as a long run.
    is_long = (workload.num_steps or _MIN_STEPS_TO_CAPTURE) >= _MIN_STEPS_TO_CAPTURE
    if supports_unpadded_attention(context.machine, workload, device=device, precision=context.precision):
        evidence["num_steps"] = workload.num_steps
        if not is_long:
            reason = f"{workload.num_steps} steps are too few to capture about a dozen shapes"
            return Decision(value="off", reason=reason, evidence=evidence)
        reason = "packed samples have few totals, and launching kernels one by one dominates"
        return Decision(value="on", reason=reason, evidence=evidence)
    # Measurements showed that steps of models with these layers are launch-bound.
    if {GROUP_NORM_ACTIVATION, SPAN_ATTENTION} & set(workload.layers) and not workload.lengths_vary:
        evidence["num_steps"] = workload.num_steps
        if is_long:
            reason = "one shape: in a graph no kernel waits for its launch"
            if GROUP_NORM_ACTIVATION in workload.layers:
                reason = "one shape, many small kernels: launching them one by one dominates"
            return Decision(value="on", reason=reason, evidence=evidence)
    if workload.optimizer_obstacle is not None and not workload.may_update_outside:
        reason = f"{workload.optimizer_obstacle}; a captured step needs them, or capturable=True"
        return Decision(value="off", reason=reason, evidence=evidence)
    if workload.lengths_vary or not is_long:
        reason = "too few steps have the same shape" if workload.lengths_vary else "the run is too short"
        return Decision(value="off", reason=f"not measured yet, and {reason}", evidence=evidence)
    reason = "captured if the first steps show that the device waits for launches"
    return Decision(value="launch_bound", reason=reason, evidence=evidence)


@rule("K4", "layout")
def choose_layout(context: RuleContext) -> Decision:
    """The memory layout of convolution weights, which activations follow through the model.

    Why: channels_last speeds up convolutions on CUDA and on some CPUs. On MPS, it has a long list of crashes and wrong
    results up to torch 2.13. In later releases, gradients of BatchNorm are still reported to be wrong with it, and
    convolutions are slow up to 2.14. So it is off unless a measurement shows that it is faster, and is rejected on MPS.
    torch's group norm copies channels_last inputs to contiguous and back: a step of a Hex net in bf16 on an H200 took
    47.5 ms contiguous and 63.6 ms in channels_last. whet's own group norms (rule K8) do not copy, so channels_last is
    used with them.
    Contiguous weights also avoid wrong results of conv2d on macOS 15 and later, so on MPS parameters are made
    contiguous before the first step. The parameter objects and checkpoints stay the same, and the layout is restored
    afterward.
    Other convolutional nets use channels_last in half precision on CUDA, where tensor cores need it: a ResNet-50 in
    bf16 on an H200 trained 4,553 images a second with it (captured), and 2,404 without.
    When wrong: nets with group norms on CUDA; with norms=torch use layout=contiguous too, unless the model is compiled.
    Override: layout=channels_last; or set the layout of your model yourself, which whet leaves unchanged with
    layout=contiguous, except for parameters on MPS.
    Sources: pytorch/pytorch#188371, #192212, #180992, #175189, #193623; own measurement (H200, torch 2.11).
    """
    device, precision = context.device_type, context.precision
    has_kernels = has_norm_kernels(context.machine, device=device, precision=precision)
    if has_kernels and GROUP_NORM_ACTIVATION in context.workload.layers:
        reason = "faster for convolutions in half precision, and whet's own group norms copy nothing"
        return Decision(value="channels_last", reason=reason, evidence={"device": device, "precision": precision})
    if device == "cuda" and precision in HALF_PRECISIONS and _has_only_plain_convolutions(context.workload.layers):
        reason = "tensor cores compute convolutions in half precision in this layout"
        return Decision(value="channels_last", reason=reason, evidence={"device": device, "precision": precision})
    if device == "mps":
        is_old = context.machine.torch.is_before(2, 14) is not False
        reason = "channels_last " + ("causes crashes and wrong results on MPS" if is_old else "breaks BatchNorm on MPS")
    else:
        reason = "nothing else was measured"
    return Decision(value="contiguous", reason=reason, evidence={"device": device})


def _has_only_plain_convolutions(layers: tuple[str, ...]) -> bool:
    # torch's group norm copies channels_last inputs to contiguous and back.
    return "conv2d" in layers and "group norm" not in layers


@rule("K5", "threads")
def choose_threads(context: RuleContext) -> Decision:
    """Number of threads with which torch computes on the CPU.

    Why: slow cores delay fast ones at every barrier, and two threads on one core share its arithmetic units. So there
    is one thread for each fast core of an Apple chip, and for each physical core elsewhere, but never more than this
    process may use. Results of long sums depend on the number, so it is pinned and recorded. It is set in torch itself,
    so OMP_NUM_THREADS and MKL_NUM_THREADS are not needed (there is no MKL for Apple silicon). Training on a GPU hardly
    depends on it.
    Other programs on the same cores do not change the number, but they change how threads wait: a spinning thread takes
    CPU time from the thread that it waits for. whet sets GOMP_SPINCOUNT and KMP_BLOCKTIME before torch is loaded, on
    the command line and in every process that it starts, so that threads spin briefly and then sleep. During a run
    on Linux, threads sleep immediately while other programs use the cores. Results do not depend on this.
    When wrong: M5 Pro and Max, whose second cluster is fast as well.
    Override: threads=N; GOMP_SPINCOUNT, KMP_BLOCKTIME or OMP_WAIT_POLICY in the environment.
    Sources: ATen/ParallelCommon.cpp (2.13), pytorch/pytorch#123038; the manual of libgomp on GOMP_SPINCOUNT; own
    measurements of weights with 1 and 2 threads, and of busy machines (docs/choices/0022-threads-that-sleep.md).
    """
    decision = _choose_num_threads(context)
    chosen = context.system_state.environment.wait_variable
    if chosen is None or context.device_type != "cpu":
        return decision
    return replace(decision, reason=f"{decision.reason}; they wait as set by {chosen}")


def _choose_num_threads(context: RuleContext) -> Decision:
    cpu = context.machine.cpu
    evidence = {
        "fast_cores": cpu.fast_cores,
        "physical_cores": cpu.physical_cores,
        "logical_cores": cpu.logical_cores,
    }
    sharers = context.workload.local_size
    if sharers > 1:
        each = max(1, min([c for c in (cpu.fast_cores, cpu.physical_cores, cpu.logical_cores) if c] or [1]) // sharers)
        reason = f"the available cores, divided by {sharers} processes"
        return Decision(value=each, reason=reason, evidence={**evidence, "processes": sharers})
    if cpu.fast_cores:
        return Decision(value=cpu.fast_cores, reason="the fast cores; slow ones delay them", evidence=evidence)
    # A CPU quota may allow fewer logical cores than there are physical ones.
    counts = [count for count in (cpu.physical_cores, cpu.logical_cores) if count]
    if counts:
        return Decision(value=min(counts), reason="one thread for each available core", evidence=evidence)
    return Decision(value=None, reason="the number of cores is unknown: torch decides", evidence=evidence)


@rule("K6", "deterministic")
def choose_deterministic(context: RuleContext) -> Decision:
    """Whether to use only kernels that give the same bits each time.

    Why: some GPU kernels add numbers in the order in which threads happen to finish. With "on", torch uses other
    kernels if it has them, and otherwise raises an error, so that a resumed run is bit-exact on a GPU too. `whet prove`
    needs this. On the CPU, all kernels seen so far give the same bits anyway, with the same number of threads.
    When wrong: it can be slower, and some operators have no deterministic implementation.
    Override: deterministic=on.
    Sources: torch.use_deterministic_algorithms (2.13); docs/checkpoints.md.
    """
    reason = "it may cost speed, and you did not ask for it"
    return Decision(value="off", reason=reason, evidence={"device": context.device_type})


@rule("K7", "attention")
def choose_attention(context: RuleContext) -> Decision:
    """Which kernels compute attention: those that torch chooses, a preferred one of torch's (with cudnn, flash,
    efficient and math as fallbacks, in this order), or whet's own.

    Why: torch chooses well except in one case. On an H200 in half precision, it prefers cuDNN's kernel, which takes 88
    to 130 ms to set up for every new shape. The kernels flash and efficient take no such time, so cuDNN is avoided if
    every batch has a different length. At 2,048 tokens, cuDNN was 1.5 times as fast as flash, so with few shapes
    torch's choice and the others are measured. whet has its own kernels for two kinds of attention in half precision
    on CUDA. One is for at most 128 positions with rotary embeddings (puzzles), which it applies in the same kernel. The
    other is for spans, that is packed texts (rule M6) and rows of several documents (chat), with a head size of 32 or
    64. It reads no token of another span: a layer of BERT base took 0.17 ms instead of 0.41 ms with a batch of 256.
    These were measured on an H200. They are used with compute capability 9, and elsewhere on request.
    When wrong: long texts of many lengths in a long run, where flash is used; lengths=bucketed is better for those.
    Attention with dropout uses torch's kernels: a pretrained model needs attention_dropout=0 for whet's own.
    Override: attention=torch (its own choice), cudnn, flash, efficient, math or whet. The CPU has flash and math, and
    MPS has no choice. Training rejects a kernel that its device lacks, a torch kernel for a model that does not call
    scaled_dot_product_attention, and whet for a model without either of these kinds of attention.
    Sources: own measurement (H200, torch 2.11; docs/lab.md); torch.nn.attention.sdpa_kernel (2.13).
    """
    device, precision, lengths, workload = context.device_type, context.precision, context.lengths, context.workload
    accelerator = context.accelerator
    capability = (accelerator.capability or "") if accelerator is not None else ""
    generation = capability.partition(".")[0]
    evidence = {"device": device, "precision": precision, "lengths": lengths, "capability": capability or None}
    prefers_cudnn = device == "cuda" and generation.isdecimal() and int(generation) >= _CUDNN_CAPABILITY
    # These two values do not bound the number of shapes; "bucketed" and "packed_bucketed" do.
    has_many_shapes = workload.lengths_vary and lengths in ("sorted", "packed")
    own = attention_kernel_reason(workload.layers, lengths_vary=workload.lengths_vary, lengths=lengths)
    if device == "cuda" and precision in HALF_PRECISIONS and own and generation == KERNEL_CAPABILITY:
        return Decision(value="whet", reason=own, evidence=evidence)
    if prefers_cudnn and precision in HALF_PRECISIONS and has_many_shapes:
        return Decision(value="flash", reason="cuDNN's kernel costs 0.1 s for every new length", evidence=evidence)
    return Decision(value="torch", reason="torch chooses among its kernels", evidence=evidence)


@rule("K8", "norms")
def choose_norms(context: RuleContext) -> Decision:
    """Which kernels compute norms together with adjacent operations: torch's, or whet's own.

    Why: norms are memory-bound, so their cost is the number of passes over their input. whet has its own kernels for
    three kinds on CUDA in half precision, one forward and one backward, which read and write every number once. Means,
    variances and intermediate values are float32. Group norms before SiLU or ReLU in channels_last (Hex), where torch
    copies to contiguous and back, took 140 us forward and backward, and 594 us with torch.compile (128 channels, 1,024
    boards of 13x13, H200). Layer norms of a residual plus a linear layer's output with dropout (BERT) took 95 us, and
    261 us with torch, or 137 us compiled without the gradient of the linear layer's bias (width 768, 11,900 tokens).
    Norms of sums without weights (chat, puzzles) took 51 us (width 1,024, 16,384 tokens). They are not used in compiled
    models, where torch's compiler does the same. All were written for compute capability 9 (H100, H200); elsewhere they
    must be requested.
    When wrong: no slower case is known, but few shapes were measured.
    Override: norms=torch or norms=whet. whet's kernels need CUDA and half precision, and its group norms need
    layout=channels_last. Norms of unsupported shapes use torch's kernels.
    Sources: own measurement (H200, torch 2.11; docs/lab.md).
    """
    device, layout, precision = context.device_type, context.layout, context.precision
    evidence = {"device": device, "precision": precision, "layout": layout}
    own = norm_kernel_reason(context.workload.layers, layout=layout)
    if own and has_norm_kernels(context.machine, device=device, precision=precision):
        return Decision(value="whet", reason=own, evidence=evidence)
    return Decision(value="torch", reason="whet has no kernels for this workload here", evidence=evidence)
