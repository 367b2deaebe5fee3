"""Where the data lies and how it reaches the device."""

from whet.base.units import GB, format_bytes
from whet.plan.rule import Decision, RuleContext, integer, one_of, rule

_RESIDENT_SHARE = 0.1
_MAC_WORKERS = 0
_LINUX_WORKERS = 2


@rule("L1", "data_location", one_of("device", "host", "files"))
def choose_data_location(facts: RuleContext) -> Decision:
    """Where the samples lie while training: on the device, in host memory, or read by workers.

    Why: a data set that takes less than a tenth of the memory is put on the device once; then nothing is copied,
    pinned or waited for. Samples that must be decoded are read by workers.
    When wrong: augmentation on the CPU.
    Override: none yet.
    Sources: hyrax#224 (an epoch fell from 1-2 min to 15 s without workers).
    """
    workload, limit = facts.workload, facts.memory_gb
    size = workload.data_bytes
    evidence = {"data_bytes": size, "needs_decoding": workload.needs_decoding}
    if workload.needs_decoding:
        return Decision(value="files", reason="samples must be decoded", evidence=evidence)
    if size is None or not isinstance(limit, int | float):
        return Decision(value="host", reason="its size or the device's memory is unknown", evidence=evidence)
    if size <= _RESIDENT_SHARE * limit * GB:
        return Decision(
            value="device", reason=f"{format_bytes(size)}: copied once, no workers needed", evidence=evidence
        )
    return Decision(
        value="host", reason=f"{format_bytes(size)} are over a tenth of the device's memory", evidence=evidence
    )


@rule("L2", "workers", integer(0, 1024))
def choose_workers(facts: RuleContext) -> Decision:
    """How many processes read data ahead.

    Why: workers are for data that must be decoded. macOS starts each with a fresh Python that imports torch again
    (about 5 s and several hundred MB of the shared memory each), so none there until a measurement says otherwise.
    Texts are tokenised once, before the first step, in the training's own process and without threads: they need no
    worker, no process is forked while a tokenizer has threads, and TOKENIZERS_PARALLELISM makes no difference.
    When wrong: heavy decoding on a Mac and long runs; many cores and slow decoding elsewhere.
    Override: workers=N.
    Sources: cvg/Hierarchical-Localization#502; hyrax#224; public advice says 0, 1, 2 and 4.
    """
    machine, home = facts.machine, facts.data_location
    cores = machine.cpu.logical_cores
    evidence = {"data_location": home, "os": machine.os.name, "logical_cores": cores}
    if home != "files":
        return Decision(value=0, reason="nothing has to be decoded", evidence=evidence)
    if machine.os.name == "macOS":
        return Decision(
            value=_MAC_WORKERS, reason="each would import torch again and share the memory", evidence=evidence
        )
    if cores is None or cores < 2:
        return Decision(value=0, reason="no core is known to be free for it", evidence=evidence)
    count = min(_LINUX_WORKERS, cores - 1)
    return Decision(value=count, reason="decoding runs beside the training", evidence=evidence)


@rule("L3", "pin_memory", one_of("off", "on"))
def choose_pin_memory(facts: RuleContext) -> Decision:
    """Whether host memory is pinned for faster copies.

    Why: CUDA copies from pinned memory without waiting. MPS ignores it with a warning up to torch 2.13, and a CPU has
    nothing to copy.
    When wrong: very little host memory.
    Override: none.
    Sources: torch/utils/data/dataloader.py (2.13); pytorch/pytorch#86060; guides 2 and 4 disagree.
    """
    evidence = {"device": facts.device, "data_location": facts.data_location}
    if facts.device != "cuda":
        reason = "MPS ignores it up to torch 2.13" if facts.device == "mps" else "the CPU copies nothing"
        return Decision(value="off", reason=reason, evidence=evidence)
    if facts.data_location == "device":
        return Decision(value="off", reason="the data lies on the device", evidence=evidence)
    return Decision(value="on", reason="copies overlap with computing", evidence=evidence)


@rule("L4", "copies", one_of("blocking", "overlapped"))
def choose_copies(facts: RuleContext) -> Decision:
    """Whether copies to the device are waited for.

    Why: asynchronous copies to MPS have read freed memory; a blocking one on unified memory costs little. CUDA orders
    a pinned copy before the kernels that need it.
    When wrong: never in results; a little speed on MPS.
    Override: none.
    Sources: pytorch/pytorch#139550, #189690, #181017.
    """
    if facts.pin_memory == "on":
        return Decision(
            value="overlapped", reason="pinned copies run beside the kernels", evidence={"pin_memory": "on"}
        )
    reason = "asynchronous copies to MPS have read freed memory" if facts.device == "mps" else "nothing to overlap"
    return Decision(value="blocking", reason=reason, evidence={"device": facts.device})


@rule("L5", "worker_start_method", one_of("fork", "spawn"))
def choose_worker_start_method(facts: RuleContext) -> Decision:
    """How workers are started: forked from this process, or as fresh ones.

    Why: a fork takes the data set along without copying or pickling it, and starts in milliseconds. On macOS a fork
    after Metal has started aborts or hangs, so workers start fresh there: the data set must be picklable, and a script
    needs `if __name__ == "__main__"`.
    When wrong: data sets that hold threads, locks or open connections, which do not survive a fork.
    Override: workers=0 reads in this process.
    Sources: PyTorch documentation, "Multiprocessing best practices"; minimind#852 (a fork on macOS that hung).
    """
    system = facts.machine.os.name
    if system == "Linux":
        return Decision(value="fork", reason="nothing is copied or pickled", evidence={"os": system})
    return Decision(value="spawn", reason="a fork after Metal has started aborts", evidence={"os": system})


@rule("L6", "prefetch", integer(1, 1024))
def choose_prefetch(facts: RuleContext) -> Decision:
    """How many global batches each worker reads ahead.

    Why: two hide an uneven time per batch; more only take memory.
    When wrong: samples whose time to decode differs by far.
    Override: none.
    Sources: torch/utils/data/dataloader.py uses 2 as well.
    """
    return Decision(value=2, reason="enough to hide uneven batches", evidence={"workers": facts.workers})


RULES = (
    choose_data_location,
    choose_workers,
    choose_pin_memory,
    choose_copies,
    choose_worker_start_method,
    choose_prefetch,
)
