"""Which known wrong results apply to this machine, and which of them concern this workload?"""

from collections.abc import Iterator

from whet.machine.facts import Machine
from whet.plan.known_hazards import KNOWN, Hazard, Release
from whet.plan.rule import Facts

PAGE = "docs/hazards.md"
ROW_LIMIT = 32_768
"""Rows over which one product may sum on M1 and M2 (pytorch/pytorch#177116)."""

_MOST_LINES = 2
_HUGE_BATCH = 65_536
_HALF = ("bf16", "fp16")


def hazards(machine: Machine, device: str) -> tuple[Hazard, ...]:
    """The known wrong results of this torch, this macOS and this chip; what is unknown counts as affected."""
    if device.partition(":")[0] != "mps":
        return ()
    return tuple(hazard for hazard in KNOWN if _applies(hazard, machine))


def concerning(found: tuple[Hazard, ...], facts: Facts) -> tuple[Hazard, ...]:
    """Those among them that the workload is known to meet under the decided settings."""
    traits = _traits(facts)
    return tuple(hazard for hazard in found if hazard.needs and hazard.needs <= traits)


def hazard_lines(facts: Facts) -> Iterator[str]:
    """What a plan says about them: what this workload meets, in short, and where the rest is told."""
    found = hazards(facts.machine, facts.device)
    if not found:
        return
    # A micro-batch with too many rows was not planned but asked for, or may not be cut.
    met = [hazard for hazard in concerning(found, facts) if not hazard.is_avoided or "rows" in hazard.needs]
    for hazard in met[:_MOST_LINES]:
        answer = _too_many_rows(facts) if "rows" in hazard.needs else hazard.answer
        yield f"{hazard.what} (pytorch{hazard.issue}); {answer}"
    avoided = sum(hazard.is_avoided for hazard in found)
    version = facts.machine.torch.version or "of unknown version"
    yield (
        f"{len(found)} known wrong results apply to torch {version} on this Mac, {avoided} of them are avoided: {PAGE}"
    )


def _too_many_rows(facts: Facts) -> str:
    micro, length = facts.value("micro_batch"), facts.workload.max_length
    assert isinstance(micro, int)
    return f"micro batch {micro} has {micro * length:,}; micro_batch={max(1, ROW_LIMIT // length)} has not"


def has_row_limit(machine: Machine, device: str) -> bool:
    """Whether a product over too many rows gives wrong gradients here."""
    return any(hazard.id == "linear-rows" for hazard in hazards(machine, device))


def _applies(hazard: Hazard, machine: Machine) -> bool:
    if hazard.fixed_in is not None and machine.torch.is_before(*hazard.fixed_in) is False:
        return False
    gpu = machine.accelerator("mps")
    family = gpu.capability if gpu else None
    if hazard.families and family is not None and family not in hazard.families:
        return False
    macos = _release(machine.os.version)
    if macos is None:
        return True
    is_old_enough = hazard.macos_until is None or macos < hazard.macos_until
    return is_old_enough and (hazard.macos_from is None or macos >= hazard.macos_from)


def _traits(facts: Facts) -> frozenset[str]:
    """What of the hazards' needs this workload has; a layer that nobody named is not known to be there."""
    workload, precision, micro = facts.workload, str(facts.value("precision")), facts.value("micro_batch")
    assert isinstance(micro, int)
    has = {
        "dropout": workload.has_dropout,
        "half": precision in _HALF,
        "fp16": precision == "fp16",
        "rows": micro * workload.max_length > ROW_LIMIT,
        "huge batch": max(micro, workload.max_length) > _HUGE_BATCH,
    }
    return frozenset({*workload.layers, *(name for name, is_there in has.items() if is_there)})


def _release(version: str | None) -> Release | None:
    parts = (version or "").split(".")
    if not parts[0].isdecimal():
        return None
    return int(parts[0]), int(parts[1]) if len(parts) > 1 and parts[1].isdecimal() else 0
