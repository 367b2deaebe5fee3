"""Will this model train on that device? Answered on any computer, by a trace of the step."""

import inspect
from collections.abc import Iterable, Iterator

import torch

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.machine.facts import Machine, TorchFacts
from whet.plan.plan import make_plan
from whet.plan.warnings import known_hazards
from whet.verify.memory.fits import MachineFit, fit_machines, known_machines
from whet.verify.preflight.detectors import (
    AllocationSites,
    BufferDetector,
    DtypeDetector,
    FusedUpdateDetector,
    OperatorDetector,
    ShapeDetector,
    buffer_limit,
    check_inputs,
    check_model,
)
from whet.verify.preflight.findings import SEVERITIES, CheckFinding, Detector, SourceLocation, locate_line
from whet.verify.preflight.host_sync import HostSyncDetector
from whet.verify.preflight.known_faults import KnownFaultDetector
from whet.verify.preflight.trace import BACKENDS, TraceResult, trace_environment, trace_steps
from whet.verify.start.causality import InconclusiveError, find_leak
from whet.verify.trainable import Trainable, TrainableSpec

_MAX_REAL_PARAMETERS = 50_000_000
"""A model with more is not made for real where fake tensors cannot go on."""


class CheckResult(FrozenModel):
    """All that was found, worst first, and what it was found with."""

    subject: str
    device: str
    machine: str | None = None
    torch: str
    findings: tuple[CheckFinding, ...] = ()
    num_operators: int = 0
    """Calls that were seen."""
    num_weights: int = 0
    num_samples: int = 0
    """Of the micro-batch."""
    is_causal: bool | None = None
    """Of a model that is said to be: whether it is; None where that was not asked, or could not be seen."""
    model_at: SourceLocation | None = None
    """Where its forward pass is written."""
    is_fake: bool = True
    """Whether no real number was computed."""
    num_known_faults: int = 0
    """Known wrong results of that machine, met or not."""
    fits: tuple[MachineFit, ...] = ()
    """How many samples at once fit into the memory of that machine, or of every known one that has the device."""
    why_no_fits: str | None = None
    """Why the memory was not estimated: nothing is wrong with the model then."""

    def passes(self, *, is_strict: bool = False) -> bool:
        """Whether nothing that stops a training was found; with `is_strict`, nothing that is worth a warning."""
        bad = ("error", "warning") if is_strict else ("error",)
        return not any(finding.severity in bad for finding in self.findings)


def check_trainable(subject: TrainableSpec, *, device: str = "mps", machine: Machine | None = None) -> CheckResult:
    """Traces two optimizer steps as the device would make them, and lists what it lacks, refuses or gets wrong."""
    if device not in BACKENDS:
        raise UsageError("no such device to check for", got=device, try_=", ".join(BACKENDS))
    limit = buffer_limit(machine, device)
    faults = known_hazards(machine or Machine(name="any", torch=TorchFacts(version=str(torch.__version__))), device)
    born = AllocationSites()
    watchers: list[Detector] = [born, FusedUpdateDetector()]
    if device != "cpu":
        watchers += [OperatorDetector(BACKENDS[device]), HostSyncDetector(device)]
    if device == "mps":
        watchers += [DtypeDetector(), ShapeDetector(), KnownFaultDetector(faults)]
    if limit is not None:
        watchers.append(BufferDetector(limit, device))

    traced = _trace(subject, watchers, device=device, size=_planned_size(subject, device, machine))
    assert traced.specimen is not None
    findings = list(check_model(traced.specimen.model, born, device=device, limit=limit))
    if traced.micro is not None and device == "mps":
        findings += check_inputs(traced.micro)
    findings += traced.recorder.notebook.findings()
    findings += _trace_finding(traced)
    about_causality = list(_causality_findings(subject, traced))
    findings += about_causality
    fitting, why_not = _estimate_fits(subject, traced.specimen, device, machine)
    findings += _memory_findings(fitting) if machine else []
    return CheckResult(
        subject=subject.name,
        device=device,
        machine=machine.name if machine else None,
        torch=str(torch.__version__),
        findings=tuple(sorted(_merge_repeats(findings), key=lambda finding: SEVERITIES.index(finding.severity))),
        num_operators=traced.recorder.num_calls,
        num_weights=traced.num_weights,
        num_samples=0 if traced.micro is None else len(traced.micro),
        is_causal=_is_causal(traced.specimen, about_causality),
        model_at=_forward_location(traced.specimen),
        is_fake=traced.is_fake,
        num_known_faults=len(faults),
        fits=fitting,
        why_no_fits=why_not,
    )


def _planned_size(subject: TrainableSpec, device: str, machine: Machine | None) -> int | None:
    """The micro-batch that a run of a recipe would have on the machine; None where there is nothing to plan."""
    if subject.workload is None or machine is None:
        return None
    size = make_plan(machine, subject.workload, overrides={"device": device}).micro_batch
    return size if isinstance(size, int) else None


def _trace(subject: TrainableSpec, watchers: list[Detector], *, device: str, size: int | None) -> TraceResult:
    """Among fake tensors; if a condition stops that, with the other answer; then for real, if it is small enough."""
    first = trace_steps(subject, watchers, device=device, size=size)
    if first.error is None:
        return first
    if isinstance(first.error, WhetError):
        raise first.error
    second = trace_steps(subject, watchers, device=device, size=size, truth=True)
    if second.error is None:
        return second
    if first.specimen is not None and first.num_weights > _MAX_REAL_PARAMETERS:
        return first
    real = trace_steps(subject, watchers, device=device, is_fake=False)
    if real.error is not None:
        # It is not the fake tensors: the model itself does not run.
        raise real.error
    return real


def _trace_finding(traced: TraceResult) -> Iterator[CheckFinding]:
    if traced.error is not None:
        yield CheckFinding(
            id="trace-stopped",
            severity="warning",
            what=f"the trace ended early, so what comes later is not known: {str(traced.error).splitlines()[0][:200]}",
            try_="a smaller version of the model, which can be run for real",
            during="the step",
        )


def _causality_findings(subject: TrainableSpec, traced: TraceResult) -> Iterator[CheckFinding]:
    """Of a model that is said to be causal: real numbers, few samples."""
    assert traced.specimen is not None
    if traced.specimen.outputs is None:
        return
    if traced.num_weights > _MAX_REAL_PARAMETERS:
        yield CheckFinding(
            id="not-asked",
            severity="note",
            what="whether it is causal was not asked: it is too large to be run for real here",
            try_="a smaller version of the same model",
            during="the forward pass",
        )
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        specimen = subject.make()
        specimen.model.eval()
        assert specimen.outputs is not None
        micro = specimen.micro(min(2, specimen.size) if specimen.is_scalable else specimen.size)
        try:
            leak = find_leak(specimen.outputs, micro)
        except InconclusiveError as error:
            yield CheckFinding(
                id="not-asked",
                severity="note",
                what=f"whether it is causal could not be seen: {error}",
                try_="inputs of several different places, and weights that are not zero",
                during="the forward pass",
            )
            return
    if leak is not None:
        yield CheckFinding(
            id="not-causal",
            severity="error",
            what=f"it is called causal and is not: {leak}",
            try_="a mask, or an operation along places that sees earlier ones only",
            place=_forward_location(specimen),
        )


def _is_causal(specimen: Trainable, findings: list[CheckFinding]) -> bool | None:
    if specimen.outputs is None or any(finding.id == "not-asked" for finding in findings):
        return None
    return not findings


def _estimate_fits(
    subject: TrainableSpec, specimen: Trainable, device: str, machine: Machine | None
) -> tuple[tuple[MachineFit, ...], str | None]:
    """What fits where, or why that is not known."""
    machines = (machine,) if machine else tuple(m for m in known_machines() if _main_device(m) == device)
    try:
        with trace_environment():
            found = fit_machines(subject, machines, overrides={"device": device}, specimen=specimen)
    except Exception as error:
        return (), (str(error).splitlines() or [type(error).__name__])[0][:200]
    return found, None


def _memory_findings(found: Iterable[MachineFit]) -> list[CheckFinding]:
    """A machine that was named and is too small is an error."""
    return [
        CheckFinding(
            id="too-little-memory",
            severity="error",
            what=fit.words,
            try_="activation_checkpointing=on, a smaller model, or another machine",
            during="the step",
        )
        for fit in found
        if fit.micro_batch is None and fit.limit_bytes is not None
    ]


def _main_device(machine: Machine) -> str:
    return machine.accelerators[0].kind if machine.accelerators else "cpu"


def _forward_location(specimen: Trainable) -> SourceLocation | None:
    """The line of its forward pass; None where that is not a function of Python."""
    forward = getattr(type(specimen.model), "forward", None)
    code = getattr(inspect.unwrap(forward), "__code__", None) if forward else None
    return locate_line((code.co_filename, code.co_firstlineno, code.co_name)) if code else None


def _merge_repeats(findings: Iterable[CheckFinding]) -> list[CheckFinding]:
    """One finding for each line and matter: the same weight may be seen where it is made and where it is used."""
    kept: dict[object, CheckFinding] = {}
    for finding in findings:
        key = (finding.id, finding.place and (finding.place.file, finding.place.line), finding.what)
        known = kept.get(key)
        count = finding.count + (known.count if known else 0)
        kept[key] = (known or finding).model_copy(update={"count": count})
    return list(kept.values())
