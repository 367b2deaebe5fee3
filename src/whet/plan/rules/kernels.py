"""Rules for the implementation of the same arithmetic: kernels, compilation, graphs, layout."""

from whet.plan.kernel_support import (
    GROUP_NORM_ACTIVATION,
    SPAN_ATTENTION,
    has_norm_kernels,
    supports_unpadded_attention,
)
from whet.plan.rule import Decision, RuleContext, integer, one_of, rule

_MIN_STEPS_TO_CAPTURE = 50
"""Steps: each of a dozen shapes is run once as it is before it is captured."""


@rule("K1", "optimizer_kernels", one_of("fused", "foreach", "loop", "your optimizer"))
def choose_optimizer_kernels(facts: RuleContext) -> Decision:
    """How the optimizer updates all parameters: fused in few kernels, in lists (foreach), or one by one (loop).

    Why: torch's default on MPS and CPU is a Python loop over parameters with ten and more kernels each; the fused
    update is the same arithmetic. On MPS it cut a step from 916 to 493 operations; on a CPU AdamW took 2.1 ms
    instead of 3.6 ms.
    When wrong: parameters, gradients or state of mixed dtypes, sparse gradients, or an optimizer that has no fused
    form; then the ordinary form is used and said. On MPS with torch before 2.13, together with fp16 loss scaling.
    Override: pass your own optimizer object; whet never changes it.
    Sources: torch/utils/_foreach_utils.py (2.13); pytorch/pytorch#127242, #186360; scvi-tools#3998; own measurement.
    """
    version = facts.machine.torch.version
    evidence = {"device": facts.device, "torch": version}
    if facts.device == "mps" and facts.precision == "fp16" and facts.machine.torch.is_before(2, 13) is not False:
        return Decision(
            value="loop", reason="fused kernels ignore the loss scale on MPS before torch 2.13", evidence=evidence
        )
    default = "a loop over parameters" if facts.device in ("mps", "cpu") else "foreach"
    return Decision(
        value="fused", reason=f"the same update in fewer kernels; torch's default is {default}", evidence=evidence
    )


@rule("K2", "compile", one_of("off", "blocks", "on"))
def choose_compile(facts: RuleContext) -> Decision:
    """Whether torch.compile rewrites the model (on), or each of its repeated blocks (blocks), which takes less time.

    Why: compiling costs seconds to minutes, and must earn them back in this run. On MPS it made a small ResNet 4.5 to
    9 times slower unless a layout option was set. A compiler can also compute something else, without an error: on CUDA
    torch 2.11 read bucketize's boundaries, a view, from the beginning of their storage. So before the first step the
    compiled model's gradients are compared with those of its own code, on a micro-batch of the run; where they differ,
    or the compiler found nothing to compile, the run goes on uncompiled and says so, and in a measurement such a
    candidate has failed.
    When wrong: long runs of models with many pointwise operators. Small faults behind strong dropout are not seen.
    Override: compile=on, compile=blocks or compile=off; verify=off leaves the comparison out.
    Sources: pytorch/pytorch#192551, #150121, #161609 (fixed by #184043); docs/verify.md.
    """
    return Decision(
        value="off", reason="no measurement says that it would earn its time back", evidence={"device": facts.device}
    )


@rule("K3", "graph", one_of("off", "on"))
def choose_graph(facts: RuleContext) -> Decision:
    """Whether a whole optimizer step is captured once for each shape and replayed as one launch.

    Why: it removes the cost of launching kernels one by one, which dominates small models on fast GPUs. Only CUDA has
    it. Forward, backward, clipping, update and average are captured for up to 16 shapes of the step's micro-batches;
    other shapes run as they are. The samples and their weights are the same, the results to rounding, and draws of
    dropout come from the same generator. The inputs stay in place, and captured steps share memory that steps which run
    as they are cannot use. Set-up takes a step or two for each shape, so it is measured whether it pays; without a
    measurement steps are captured where samples are packed to few totals (rule M6): a sketch of BERT base's shape made
    4,603 samples a second so, an expert's loop 975, with a global batch of 32 on an H200, after a second of set-up. The
    net of Hex has one shape and many small kernels: with 18 blocks it made 59,153 positions a second captured and
    36,032 without. A chat model's rows have one shape too, and its kernels wait for their launch now and then: those of
    a step of the medium preset were 63.3 ms of its 67.3, and smaller ones wait longer.
    When wrong: a loss that looks at numbers on the host, draws on the host, or has shapes that depend on values cannot
    be captured: it is seen, said, and the step runs as it is. A loss that depends on something in Python which changes
    while training is found out only by comparing replayed losses with its own, at each shape's first replay and at
    replays 1, 2, 4, ... and every 1,024th of all; then the run goes back to its last checkpoint. Gradients are gone
    after a step, and hooks would not be called, so a model with hooks is not captured.
    Override: graph=on, graph=off. An optimizer of yours needs capturable=True and its learning rate in a tensor.
    Sources: PyTorch documentation, CUDA semantics, "CUDA graphs"; pytorch/pytorch#180395; docs/choices.
    """
    evidence: dict[str, str | int | None] = {"device": facts.device}
    if facts.device != "cuda":
        return Decision(value="off", reason=f"{facts.device} cannot capture a step", evidence=evidence)
    if facts.workload.world_size > 1:
        evidence["processes"] = facts.workload.world_size
        return Decision(value="off", reason="a captured step cannot wait for other processes", evidence=evidence)
    if supports_unpadded_attention(facts.machine, facts.workload, device=facts.device, precision=facts.precision):
        evidence["num_steps"] = facts.workload.num_steps
        if (facts.workload.num_steps or _MIN_STEPS_TO_CAPTURE) < _MIN_STEPS_TO_CAPTURE:
            reason = f"{facts.workload.num_steps} steps are too few to capture about a dozen shapes"
            return Decision(value="off", reason=reason, evidence=evidence)
        reason = "packed samples have few totals, and launching kernels one by one dominates"
        return Decision(value="on", reason=reason, evidence=evidence)
    if {GROUP_NORM_ACTIVATION, SPAN_ATTENTION} & set(facts.workload.layers) and not facts.workload.lengths_vary:
        evidence["num_steps"] = facts.workload.num_steps
        if (facts.workload.num_steps or _MIN_STEPS_TO_CAPTURE) >= _MIN_STEPS_TO_CAPTURE:
            reason = "one shape: in a graph no kernel waits for its launch"
            if GROUP_NORM_ACTIVATION in facts.workload.layers:
                reason = "one shape, many small kernels: launching them one by one dominates"
            return Decision(value="on", reason=reason, evidence=evidence)
    return Decision(value="off", reason="not measured yet", evidence=evidence)


@rule("K4", "layout", one_of("contiguous", "channels_last"))
def choose_layout(facts: RuleContext) -> Decision:
    """The memory layout of the weights of convolutions; what they compute follows it through the model.

    Why: channels_last helps convolutions on CUDA and on some CPUs, and has a long list of crashes and wrong results on
    MPS up to torch 2.13. So it is off unless a measurement says that it is faster here, and on MPS it is refused.
    torch's group norm copies to contiguous and back: a Hex net in bf16 on an H200 took 47.5 ms a step contiguous and
    63.6 ms in channels_last. Group norms of whet's own (rule K8) do not, so where they can be used, channels_last is.
    Contiguous weights also avoid a wrong conv2d on macOS 15 and later, so on MPS parameters are made contiguous before
    the first step. The objects stay yours, checkpoints are the same, and afterwards weights lie as they did.
    When wrong: other convolutional nets in half precision on CUDA that are not measured; with norms=torch say
    layout=contiguous too, unless the model is compiled.
    Override: layout=channels_last; or set the layout of your model yourself: with contiguous whet leaves it as it is,
    but for parameters on MPS.
    Sources: pytorch/pytorch#188371, #192212, #180992; own measurement (H200, torch 2.11; docs/lab.md).
    """
    precision = facts.precision
    has_kernels = has_norm_kernels(facts.machine, device=facts.device, precision=precision)
    if has_kernels and GROUP_NORM_ACTIVATION in facts.workload.layers:
        reason = "convolutions are faster so in half precision, and group norms of whet's own copy nothing"
        return Decision(
            value="channels_last", reason=reason, evidence={"device": facts.device, "precision": str(precision)}
        )
    if facts.device == "mps":
        reason = "channels_last gives crashes and wrong results on MPS up to torch 2.13"
    else:
        reason = "nothing else was measured"
    return Decision(value="contiguous", reason=reason, evidence={"device": facts.device})


@rule("K5", "threads", integer(1, 1024))
def choose_threads(facts: RuleContext) -> Decision:
    """How many threads compute on the CPU.

    Why: slow cores hold fast ones back at every barrier, and two threads on one core share its arithmetic units. So:
    the fast cores of an Apple chip, the physical cores elsewhere, never more than this process may use. Results of
    long sums depend on the number, so it is pinned and recorded. It is set in torch itself, so OMP_NUM_THREADS and
    MKL_NUM_THREADS need not be (Apple's chips have no MKL), and it concerns a GPU's training hardly at all.
    When wrong: M5 Pro and Max, whose second cluster is fast as well; machines shared with other work.
    Override: threads=N.
    Sources: ATen/ParallelCommon.cpp (2.13), pytorch/pytorch#123038; own measurement of sums with 1 and 2 threads.
    """
    cpu = facts.machine.cpu
    evidence = {
        "fast_cores": cpu.fast_cores,
        "physical_cores": cpu.physical_cores,
        "logical_cores": cpu.logical_cores,
    }
    sharers = facts.workload.local_size
    if sharers > 1:
        each = max(1, min([c for c in (cpu.fast_cores, cpu.physical_cores, cpu.logical_cores) if c] or [1]) // sharers)
        reason = f"the cores that we may use, divided by {sharers} processes"
        return Decision(value=each, reason=reason, evidence={**evidence, "processes": sharers})
    if cpu.fast_cores:
        return Decision(value=cpu.fast_cores, reason="the fast cores; slow ones hold them back", evidence=evidence)
    counts = [count for count in (cpu.physical_cores, cpu.logical_cores) if count]
    if counts:
        return Decision(value=min(counts), reason="one thread for each core we may use", evidence=evidence)
    return Decision(value=None, reason="the number of cores is unknown: torch decides", evidence=evidence)


@rule("K6", "deterministic", one_of("off", "on"))
def choose_deterministic(facts: RuleContext) -> Decision:
    """Whether only kernels are used that give the same bits each time.

    Why: on a GPU some sums are taken in the order in which they happen to finish. With "on" torch uses other kernels
    where it has them and fails where it has none, so that a resumed run is bit-exact there too; `whet prove` needs it.
    On the CPU the kernels whet has met give the same bits anyway, at the same number of threads.
    When wrong: it can be slower, and some operators have no such form.
    Override: deterministic=on.
    Sources: torch.use_deterministic_algorithms (2.13); docs/checkpoints.md.
    """
    return Decision(
        value="off", reason="it may cost speed, and you did not ask for it", evidence={"device": facts.device}
    )


RULES = (choose_optimizer_kernels, choose_compile, choose_graph, choose_layout, choose_threads, choose_deterministic)
