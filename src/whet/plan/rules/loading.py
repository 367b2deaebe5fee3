"""Rules for where the data is stored and how it reaches the device."""

from whet.base.units import GB, format_bytes
from whet.plan.rule import Decision, RuleContext, rule

# A dataset up to this share of the memory is copied to the device once.
_RESIDENT_SHARE = 0.1
# On macOS workers are spawned, and each imports torch again (about 5 s and several hundred MB).
_MAC_WORKERS = 0
_LINUX_WORKERS = 2


@rule("L1", "data_location")
def choose_data_location(context: RuleContext) -> Decision:
    """Where the samples are during training: on the device, in host memory, or in files that workers read.

    Why: a dataset that takes at most a tenth of the memory is copied to the device once, so that training never waits
    for a copy and needs no pinned memory. Samples that must be decoded are read by workers.
    When wrong: augmentation on the CPU.
    Override: none yet.
    Sources: hyrax#224 (an epoch went from 1-2 min to 15 s without workers).
    """
    workload, limit = context.workload, context.memory_gb
    size = workload.data_bytes
    evidence = {"data_bytes": size, "needs_decoding": workload.needs_decoding}
    if workload.needs_decoding:
        return Decision(value="files", reason="samples must be decoded", evidence=evidence)
    if size is None or limit is None:
        return Decision(value="host", reason="its size or the device's memory is unknown", evidence=evidence)
    if size <= _RESIDENT_SHARE * limit * GB:
        reason = f"{format_bytes(size)}: copied once, no workers needed"
        return Decision(value="device", reason=reason, evidence=evidence)
    reason = f"{format_bytes(size)} are over a tenth of the device's memory"
    return Decision(value="host", reason=reason, evidence=evidence)


@rule("L2", "workers")
def choose_workers(context: RuleContext) -> Decision:
    """Number of processes that load data ahead.

    Why: workers are for data that must be decoded. On macOS each worker is a new Python process that imports torch
    again (about 5 s and several hundred MB of the shared memory), so there are none unless a measurement shows a gain.
    Texts are tokenized once, before the first step, in the process of the training run and without threads. They need
    no workers, no process is forked while a tokenizer has threads, and TOKENIZERS_PARALLELISM makes no difference.
    When wrong: heavy decoding in long runs on a Mac; many cores and slow decoding elsewhere.
    Override: workers=N.
    Sources: cvg/Hierarchical-Localization#502; hyrax#224; public advice says 0, 1, 2 and 4.
    """
    machine, location = context.machine, context.data_location
    cores = machine.cpu.logical_cores
    evidence = {"data_location": location, "os": machine.os.name, "logical_cores": cores}
    if location != "files":
        return Decision(value=0, reason="nothing has to be decoded", evidence=evidence)
    if machine.os.name == "macOS":
        reason = "each would import torch again and share the memory"
        return Decision(value=_MAC_WORKERS, reason=reason, evidence=evidence)
    if cores is None or cores < 2:
        return Decision(value=0, reason="no core is known to be free for it", evidence=evidence)
    # Leave one core for the training process.
    count = min(_LINUX_WORKERS, cores - 1)
    return Decision(value=count, reason="decoding runs in parallel with training", evidence=evidence)


@rule("L4", "copies")
def choose_copies(context: RuleContext) -> Decision:
    """Whether copies to the device block, or overlap with computation from pinned memory.

    Why: CUDA copies from pinned memory asynchronously, and orders a copy before the kernels that need it. Asynchronous
    copies to MPS have read freed memory. MPS has pinned memory from torch 2.14 on, but 2.14 reuses it too early, and
    DataLoader does not use it in 2.15 either. A blocking copy on unified memory costs little. A CPU has nothing to
    copy.
    When wrong: a host with very little memory for pinned buffers on CUDA; a little lost speed on MPS. Results are never
    affected.
    Override: overrides={"copies": "blocking"}.
    Sources: torch/utils/data/dataloader.py (2.13, 2.15); pytorch/pytorch#86060, #139550, #189690, #181720, #193819.
    """
    device, location = context.device_type, context.data_location
    evidence = {"device": device, "data_location": location}
    if device == "cuda" and location != "device":
        reason = "pinned copies run in parallel with kernels"
        return Decision(value="overlapped", reason=reason, evidence=evidence)
    reason = "asynchronous copies to MPS have read freed memory" if device == "mps" else "nothing to overlap"
    return Decision(value="blocking", reason=reason, evidence=evidence)


@rule("L5", "worker_start_method")
def choose_worker_start_method(context: RuleContext) -> Decision:
    """Start method of data workers: fork or spawn.

    Why: a forked worker shares the dataset without copying or pickling it, and starts in milliseconds. On macOS, a fork
    after Metal has started aborts or hangs, so workers are spawned there. The dataset must then be picklable, and a
    script needs `if __name__ == "__main__"`.
    When wrong: datasets that hold threads, locks or open connections, which do not survive a fork.
    Override: none; workers=0 reads in this process.
    Sources: PyTorch documentation, "Multiprocessing best practices"; minimind#852 (a fork on macOS that hung).
    """
    system = context.machine.os.name
    if system == "Linux":
        return Decision(value="fork", reason="nothing is copied or pickled", evidence={"os": system})
    return Decision(value="spawn", reason="a fork after Metal has started aborts", evidence={"os": system})


@rule("L6", "prefetch")
def choose_prefetch(context: RuleContext) -> Decision:
    """Number of global batches that each worker reads ahead.

    Why: two batches are enough to hide uneven loading times, and more only take memory.
    When wrong: samples whose decoding times differ greatly.
    Override: none.
    Sources: torch/utils/data/dataloader.py uses 2 as well.
    """
    return Decision(value=2, reason="enough to hide uneven batches", evidence={"workers": context.workers})
