"""Rules for the implementation of the same arithmetic: kernels, compilation, graphs, layout."""

from dataclasses import replace

from whet.plan.kernel_support import (
    GROUP_NORM_ACTIVATION,
    SPAN_ATTENTION,
    attention_kernel_reason,
    has_norm_kernels,
    norm_kernel_reason,
    supports_unpadded_attention,
)
from whet.plan.rule import Decision, RuleContext, rule

# A shorter run does not repay the capture: each of about a dozen shapes first runs once eagerly.
_MIN_STEPS_TO_CAPTURE = 50
_HALF_PRECISIONS = ("bf16", "fp16")
# Lowest CUDA compute capability at which torch prefers cuDNN's attention.
_CUDNN_CAPABILITY = 9
# CUDA compute capability that whet's kernels were written for and measured on.
_KERNEL_CAPABILITY = "9"


@rule("K1", "optimizer_kernels")
def choose_optimizer_kernels(context: RuleContext) -> Decision:
    """How the optimizer updates all parameters: fused in few kernels, in lists (foreach), or one by one (loop).

    Why: torch's default on MPS and CPU is a Python loop over parameters with ten and more kernels each; the fused
    update is the same arithmetic. On MPS it cut a step from 916 to 493 operations; on a CPU AdamW took 2.1 ms
    instead of 3.6 ms.
    An optimizer object of yours gets fused kernels too, if it is torch's own Adam, AdamW, SGD or Adagrad (not on MPS,
    and on CUDA from torch 2.13 on) and you left `fused`, `foreach` and `capturable` open. The update rule is the same,
    but not every bit: after 100 steps of AdamW on a CPU the loss differed by 2.4e-7. Its flags are restored when the
    session ends.
    When wrong: sparse gradients, complex parameters, parameters that are views with gaps, and gradients in another
    memory layout than their parameters, which torch's fused kernels on the CPU read wrongly without an error; these are
    detected, and your optimizer keeps its own kernels. On MPS with torch before 2.13, together with fp16 loss scaling.
    Override: optimizer_kernels=yours keeps the kernels of your optimizer object, bit for bit; or pass fused, foreach or
    capturable to it yourself.
    Sources: torch/utils/_foreach_utils.py (2.13); pytorch/pytorch#127242, #186360; scvi-tools#3998; own measurement.
    """
    device, torch = context.device_type, context.machine.torch
    evidence = {"device": device, "torch": torch.version}
    if context.workload.optimizer_obstacle is not None:
        reason = context.workload.optimizer_obstacle
        return Decision(value="yours", reason=reason, evidence={**evidence, "optimizer": context.workload.optimizer})
    # Seen to fail on an H200 with torch 2.11; the source of 2.13 allows it. An unknown version counts as an old one.
    has_no_adagrad = device == "mps" or (device == "cuda" and torch.is_before(2, 13) is not False)
    if context.workload.optimizer == "Adagrad" and has_no_adagrad:
        reason = "torch has no fused Adagrad for MPS" + ("" if device == "mps" else ", nor for CUDA before 2.13")
        return Decision(value="yours", reason=reason, evidence={**evidence, "optimizer": "Adagrad"})
    # `is not False`: treat an unknown version (None) as an old one.
    if device == "mps" and context.precision == "fp16" and torch.is_before(2, 13) is not False:
        reason = "fused kernels ignore the loss scale on MPS before torch 2.13"
        return Decision(value="loop", reason=reason, evidence=evidence)
    default = "a loop over parameters" if device in ("mps", "cpu") else "foreach"
    reason = f"the same update in fewer kernels; torch's default is {default}"
    return Decision(value="fused", reason=reason, evidence=evidence)


@rule("K2", "compile")
def choose_compile(context: RuleContext) -> Decision:
    """Whether torch.compile compiles the model (on), or each of its repeated blocks (blocks), which takes less time.

    Why: compiling costs seconds to minutes, which this run must save again. On MPS it made a small ResNet 4.5 to
    9 times slower unless a layout option was set. A compiler can also compute something else, without an error: on CUDA
    torch 2.11 read bucketize's boundaries, a view, from the beginning of their storage. So before the first step the
    compiled model's gradients are compared with the eager ones on a micro-batch of the run; where they differ,
    or nothing could be compiled, the run continues uncompiled and reports it, and in a measurement such a
    candidate has failed.
    When wrong: long runs of models with many pointwise operators. Small errors behind strong dropout are not detected.
    Override: compile=on, compile=blocks or compile=off; verify=off skips the comparison.
    Sources: pytorch/pytorch#192551, #150121, #161609 (fixed by #184043); docs/verify.md.
    """
    reason = "no measurement shows that it would save its time"
    return Decision(value="off", reason=reason, evidence={"device": context.device_type})


@rule("K3", "graph")
def choose_graph(context: RuleContext) -> Decision:
    """Whether a whole optimizer step is captured once for each shape and replayed as one launch (CUDA graphs).

    Why: it removes the cost of launching kernels one by one, which dominates small models on fast GPUs. Only CUDA has
    it. Forward, backward, clipping, update and EMA are captured for up to 16 shapes of the step's micro-batches;
    other shapes run eagerly. Samples and their weights are the same, results equal to rounding, and dropout draws
    come from the same generator. Inputs stay in place, and captured steps share memory that eager steps cannot use.
    Set-up takes a step or two for each shape, so it is measured whether it pays; without a measurement steps are
    captured where samples are packed to few totals (rule M6): a BERT base with a global batch of 32 on an H200 made
    4,603 samples a second this way after a second of set-up, an expert's loop 975. The net of Hex has one shape and
    many small kernels: with 18 blocks it made 59,153 positions a second captured and 36,032 without. A chat model's
    rows have one shape too, and its kernels sometimes wait for their launch: those of a step of the medium preset were
    63.3 ms of its 67.3, and smaller ones wait longer.
    When wrong: a loss that reads values on the host, draws on the host, or has shapes that depend on values cannot
    be captured: that is detected and reported, and the step runs eagerly. A loss that depends on changing Python state
    is detected only by comparing replayed losses with eager ones, at each shape's first replay and at
    replays 1, 2, 4, ... and every 1,024th of all; then the run rolls back to its last checkpoint. Gradients are gone
    after a step, and hooks would not be called, so a model with hooks is not captured.
    For any other model whose samples have one shape the first steps decide (launch_bound): they are timed, and only if
    the host needs three quarters of their time to launch kernels, later ones are captured. An MLP of eight layers of
    512 with a batch of 256 made 416,217 samples a second captured on an H200, 43,237 without.
    The learning rate of your optimizer may change in every step. If other hyperparameters do too, as the betas with
    OneCycleLR, the update stays outside of the graph.
    Override: graph=on, graph=off. Optimizers without fused kernels (rule K1) need capturable=True.
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
    # Steps of models with these layers were measured to be launch-bound.
    if {GROUP_NORM_ACTIVATION, SPAN_ATTENTION} & set(workload.layers) and not workload.lengths_vary:
        evidence["num_steps"] = workload.num_steps
        if is_long:
            reason = "one shape: in a graph no kernel waits for its launch"
            if GROUP_NORM_ACTIVATION in workload.layers:
                reason = "one shape, many small kernels: launching them one by one dominates"
            return Decision(value="on", reason=reason, evidence=evidence)
    if workload.optimizer_obstacle is not None:
        reason = f"{workload.optimizer_obstacle}; a captured step needs them, or capturable=True"
        return Decision(value="off", reason=reason, evidence=evidence)
    if workload.lengths_vary or not is_long:
        reason = "too few steps have the same shape" if workload.lengths_vary else "the run is too short"
        return Decision(value="off", reason=f"not measured yet, and {reason}", evidence=evidence)
    reason = "captured if the first steps show that the device waits for launches"
    return Decision(value="launch_bound", reason=reason, evidence=evidence)


@rule("K4", "layout")
def choose_layout(context: RuleContext) -> Decision:
    """The memory layout of the weights of convolutions; activations follow it through the model.

    Why: channels_last helps convolutions on CUDA and on some CPUs. On MPS it has a long list of crashes and wrong
    results up to torch 2.13; later, BatchNorm's gradients with it are still reported wrong, and convolutions slow up to
    2.14. So it is off unless a measurement shows that it is faster, and on MPS it is rejected.
    torch's group norm copies to contiguous and back: a Hex net in bf16 on an H200 took 47.5 ms a step contiguous and
    63.6 ms in channels_last. whet's own group norms (rule K8) do not, so channels_last is used with them.
    Contiguous weights also avoid a wrong conv2d on macOS 15 and later, so on MPS parameters are made contiguous before
    the first step. The objects stay yours, checkpoints are the same, and the layout is restored afterwards.
    Other convolutional nets use it in half precision on CUDA, where tensor cores need it: a ResNet-50 in bf16 on an
    H200 made 4,553 images a second with it (captured) and 2,404 without.
    When wrong: nets with group norms on CUDA; with norms=torch use layout=contiguous too, unless the model is compiled.
    Override: layout=channels_last; or set the layout of your model yourself: with contiguous whet leaves it unchanged,
    except for parameters on MPS.
    Sources: pytorch/pytorch#188371, #192212, #180992, #175189, #193623; own measurement (H200, torch 2.11).
    """
    device, precision = context.device_type, context.precision
    has_kernels = has_norm_kernels(context.machine, device=device, precision=precision)
    if has_kernels and GROUP_NORM_ACTIVATION in context.workload.layers:
        reason = "faster for convolutions in half precision, and whet's own group norms copy nothing"
        return Decision(value="channels_last", reason=reason, evidence={"device": device, "precision": precision})
    if device == "cuda" and precision in _HALF_PRECISIONS and _has_only_plain_convolutions(context.workload.layers):
        reason = "tensor cores compute convolutions in half precision in this layout"
        return Decision(value="channels_last", reason=reason, evidence={"device": device, "precision": precision})
    if device == "mps":
        is_old = context.machine.torch.is_before(2, 14) is not False
        reason = "channels_last " + ("causes crashes and wrong results on MPS" if is_old else "breaks BatchNorm on MPS")
    else:
        reason = "nothing else was measured"
    return Decision(value="contiguous", reason=reason, evidence={"device": device})


def _has_only_plain_convolutions(layers: tuple[str, ...]) -> bool:
    # torch's group norm copies channels_last to contiguous and back.
    return "conv2d" in layers and "group norm" not in layers


@rule("K5", "threads")
def choose_threads(context: RuleContext) -> Decision:
    """Number of threads that compute on the CPU.

    Why: slow cores delay fast ones at every barrier, and two threads on one core share its arithmetic units. So:
    the fast cores of an Apple chip, the physical cores elsewhere, never more than this process may use. Results of
    long sums depend on the number, so it is pinned and recorded. It is set in torch itself, so OMP_NUM_THREADS and
    MKL_NUM_THREADS need not be (Apple's chips have no MKL). Training on a GPU hardly depends on it.
    Other programs on the same cores do not change the number, only how threads wait for each other: a thread that spins
    takes the time of the one that it waits for. whet sets GOMP_SPINCOUNT and KMP_BLOCKTIME before torch is loaded, on
    the command line and in every process that it starts, so that threads spin briefly and then sleep. During a run
    on Linux, threads sleep at once as long as other programs use the cores. No bit depends on it.
    When wrong: M5 Pro and Max, whose second cluster is fast as well.
    Override: threads=N; GOMP_SPINCOUNT, KMP_BLOCKTIME or OMP_WAIT_POLICY in the environment.
    Sources: ATen/ParallelCommon.cpp (2.13), pytorch/pytorch#123038; the manual of libgomp on GOMP_SPINCOUNT; own
    measurements of weights with 1 and 2 threads, and of busy machines (docs/choices/0022-threads-that-sleep.md).
    """
    decision = _choose_num_threads(context)
    chosen = context.system_state.environment.wait_variable
    if chosen is None or context.device_type != "cpu":
        return decision
    return replace(decision, reason=f"{decision.reason}; they wait as your {chosen} says")


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
    """Whether only kernels are used that give the same bits each time.

    Why: on a GPU some sums are taken in the order in which they happen to finish. With "on" torch uses other kernels
    where it has them and fails where it has none, so that a resumed run is bit-exact there too; `whet prove` needs it.
    On the CPU the kernels that whet has met give the same bits anyway, with the same number of threads.
    When wrong: it can be slower, and some operators have no deterministic implementation.
    Override: deterministic=on.
    Sources: torch.use_deterministic_algorithms (2.13); docs/checkpoints.md.
    """
    reason = "it may cost speed, and you did not ask for it"
    return Decision(value="off", reason=reason, evidence={"device": context.device_type})


@rule("K7", "attention")
def choose_attention(context: RuleContext) -> Decision:
    """Which kernels compute attention: torch's choice, a preferred kernel of torch's (with cudnn, flash, efficient,
    math as fallbacks in this order), or whet's own.

    Why: torch chooses well except in one case. On an H200 it prefers cuDNN's kernel in half precision, which takes 88
    to 130 ms for every new shape, where flash and efficient take none; so it is avoided where every batch has another
    length. At 2,048 tokens it was 1.5 times as fast as flash, so with few shapes torch's choice and the others are
    measured. whet has its own kernels for two kinds of attention, in half precision on CUDA: at most 128 positions with
    rotary embeddings (puzzles), applied in the same kernel; and spans, that is packed texts (rule M6) and rows of
    several documents (chat), with heads of 32 or 64, where no token of another span is read: 0.17 ms a layer instead of
    0.41 for BERT base at a batch of 256. Measured on an H200, they are used with compute capability 9, and elsewhere
    on request.
    When wrong: long texts of all lengths in a long run, where flash is used; lengths=bucketed is better for those.
    Attention with dropout uses torch's kernels: a pretrained model needs attention_dropout=0 for whet's own.
    Override: attention=torch (its own choice), cudnn, flash, efficient, math or whet. The CPU has flash and math, MPS
    has no choice. Training rejects a kernel that its device lacks, one of torch's for a model that does not call
    scaled_dot_product_attention, and whet for a model without attention of these two kinds.
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
    if device == "cuda" and precision in _HALF_PRECISIONS and own and generation == _KERNEL_CAPABILITY:
        return Decision(value="whet", reason=own, evidence=evidence)
    if prefers_cudnn and precision in _HALF_PRECISIONS and has_many_shapes:
        return Decision(value="flash", reason="cuDNN's kernel costs 0.1 s for every new length", evidence=evidence)
    return Decision(value="torch", reason="torch chooses among its kernels", evidence=evidence)


@rule("K8", "norms")
def choose_norms(context: RuleContext) -> Decision:
    """Which kernels compute norms together with adjacent operations: torch's, or whet's own.

    Why: a norm computes little and reads much, so its cost is how often its input goes through memory. whet has its own
    kernels for three kinds on CUDA in half precision, one forward and one backward, which read and write every
    number once; means, variances and intermediates are float32. Group norms before SiLU or ReLU in channels_last
    (Hex), where torch copies to contiguous and back: 140 us forward and backward, torch's compiled 594 us (128
    channels, 1,024 boards of 13x13, H200). Layer norms of a residual and a linear layer's output with dropout (BERT):
    95 us, torch's 261 us, compiled 137 us without the gradient of the linear layer's bias (768 wide, 11,900 tokens).
    Norms of sums without weights (chat, puzzles): 51 us (1,024 wide, 16,384 tokens); not in compiled models, where
    torch's compiler does the same. They were written for compute capability 9 (H100, H200); elsewhere they must be
    requested.
    When wrong: no slower case is known, but few shapes were measured.
    Override: norms=torch or norms=whet. whet's kernels need CUDA; group norms need layout=channels_last, all need half
    precision, and norms of unsupported shapes use torch's kernels.
    Sources: own measurement (H200, torch 2.11; docs/lab.md).
    """
    device, layout, precision = context.device_type, context.layout, context.precision
    evidence = {"device": device, "precision": precision, "layout": layout}
    own = norm_kernel_reason(context.workload.layers, layout=layout)
    if own and has_norm_kernels(context.machine, device=device, precision=precision):
        return Decision(value="whet", reason=own, evidence=evidence)
    return Decision(value="torch", reason="whet has no kernels for this workload here", evidence=evidence)
