"""Check whether a model can be trained on a device, by tracing two optimizer steps. The device is not needed."""

import contextlib
import inspect
from collections.abc import Iterable, Iterator

import torch

from whet.base.errors import UsageError, WhetError, first_line
from whet.base.model import FrozenModel
from whet.base.origin import failure_frames, frame_name
from whet.device.operators import OperatorEntry, known_release, parse_release, torch_operators
from whet.machine.apple import old_macos
from whet.machine.device_figures import DEVICE_FIGURES
from whet.machine.facts import Machine, TorchFacts
from whet.plan.plan import make_plan
from whet.plan.warnings import known_hazards
from whet.verify.memory.fits import MachineFit, fit_machines, known_machines
from whet.verify.preflight.cuda_only import CudaOnlyCode
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
from whet.verify.preflight.findings import (
    SEVERITIES,
    Detection,
    Detector,
    PreflightFinding,
    SourceLine,
    SourceLocation,
    locate_line,
)
from whet.verify.preflight.host_sync import HostSyncDetector
from whet.verify.preflight.known_faults import KnownFaultDetector
from whet.verify.preflight.trace import TraceResult, trace_environment, trace_steps
from whet.verify.start.causality import InconclusiveError, find_leak
from whet.verify.trainable import Trainable, TrainableSpec

# Maximum number of parameters for running a model with real tensors.
_MAX_REAL_PARAMETERS = 50_000_000


class PreflightResult(FrozenModel):
    """The findings of a check, worst first, and facts about the trace."""

    name: str
    device: str
    machine: str | None = None
    torch: str
    """Version of torch to which the result applies."""
    findings: tuple[PreflightFinding, ...] = ()
    num_operators: int = 0
    """Number of traced operator calls."""
    num_parameters: int = 0
    num_samples: int = 0
    """Number of samples in the micro-batch."""
    is_causal: bool | None = None
    """Whether a model that is declared causal is causal. None if it is not declared causal, or if this is unknown."""
    model_at: SourceLocation | None = None
    """Location of the model's forward method."""
    is_fake: bool = True
    """Whether the trace used only fake tensors."""
    num_known_faults: int = 0
    """Number of known faults of the machine, whether or not they affect the model."""
    fits: tuple[MachineFit, ...] = ()
    """Micro-batches that fit into the memory of the machine, or of each known machine with this type of device."""
    why_no_fits: str | None = None
    """The reason why the memory could not be estimated, or None. This is not a defect of the model."""

    def passes(self, *, is_strict: bool = False) -> bool:
        """Return whether there are no errors and, if `is_strict`, no warnings."""
        bad = ("error", "warning") if is_strict else ("error",)
        return not any(finding.severity in bad for finding in self.findings)


def check_trainable(
    spec: TrainableSpec, *, device: str = "mps", machine: Machine | None = None, torch_version: str | None = None
) -> PreflightResult:
    """Trace two optimizer steps as the device would execute them, and report all problems.

    Problems are missing operators, unsupported dtypes and shapes, known wrong results, code that requires CUDA, and
    insufficient memory. `torch_version` is the version of torch to check for, even if the machine has another one. By
    default, it is that of the machine for MPS, and the installed version otherwise.
    """
    if device not in DEVICE_FIGURES:
        raise UsageError("unknown device", got=device, try_=", ".join(DEVICE_FIGURES))
    version = torch_version or _torch_of(machine, device)
    operators = _operators_of(version, device)
    if machine is not None:
        machine = machine.model_copy(update={"torch": machine.torch.model_copy(update={"version": version})})
        too_old = old_macos(machine.os, machine.torch) if device == "mps" else None
        if too_old is not None:
            raise UsageError(f"{machine.name} has no MPS with this torch", got=too_old.reason, try_=too_old.fix)
    cuda_only = CudaOnlyCode(device) if device != "cuda" else None
    with cuda_only or contextlib.nullcontext():
        result = _check(spec, device, machine, operators, version)
    findings = [*result.findings, *(cuda_only.findings() if cuda_only else ())]
    return result.model_copy(update={"findings": _sorted(findings)})


def _torch_of(machine: Machine | None, device: str) -> str:
    # Operators of versions other than the installed one are known only for MPS.
    version = machine.torch.version if machine is not None and device == "mps" else None
    return version or str(torch.__version__)


def _operators_of(version: str, device: str) -> dict[str, OperatorEntry]:
    """Return the operators of a torch version. Raise UsageError if it is not installed and the device is not MPS."""
    if parse_release(version) == parse_release(str(torch.__version__)):
        return torch_operators()
    if device != "mps":
        raise UsageError(
            "the operators of other versions are known for MPS only",
            got=f"--torch {version} --for {device}, with torch {torch.__version__} installed",
            try_=f"--for mps, or an environment with torch {version}",
        )
    return torch_operators(known_release(version))


def _check(
    spec: TrainableSpec, device: str, machine: Machine | None, operators: dict[str, OperatorEntry], version: str
) -> PreflightResult:
    limit = buffer_limit(machine, device)
    faults = known_hazards(machine or Machine(name="any", torch=TorchFacts(version=version)), device)
    sites = AllocationSites()
    detectors: list[Detector] = [sites, FusedUpdateDetector()]
    if device != "cpu":
        detectors += [OperatorDetector(DEVICE_FIGURES[device].title, operators), HostSyncDetector(device)]
    if device == "mps":
        detectors += [DtypeDetector(), ShapeDetector(), KnownFaultDetector(faults)]
    if limit is not None:
        detectors.append(BufferDetector(limit, device))

    planned = _planned_micro_batch(spec, device, machine)
    traced = _trace(spec, detectors, device=device, batch_size=planned, operators=operators)
    assert traced.trainable is not None
    findings = list(check_model(traced.trainable.model, sites, device=device, limit=limit))
    if traced.micro is not None and device == "mps":
        findings += check_inputs(traced.micro)
    findings += traced.recorder.log.findings()
    findings += _trace_finding(traced)
    causality_findings = list(_causality_findings(spec, traced))
    findings += causality_findings
    fits, why_no_fits = _estimate_fits(spec, traced.trainable, device, machine)
    findings += _memory_findings(fits) if machine else []
    return PreflightResult(
        name=spec.name,
        device=device,
        machine=machine.name if machine else None,
        torch=version,
        findings=_sorted(findings),
        num_operators=traced.recorder.num_calls,
        num_parameters=traced.num_parameters,
        num_samples=0 if traced.micro is None else len(traced.micro),
        is_causal=_is_causal(traced.trainable, causality_findings),
        model_at=locate_line(forward) if (forward := _forward_line(traced.trainable)) else None,
        is_fake=traced.is_fake,
        num_known_faults=len(faults),
        fits=fits,
        why_no_fits=why_no_fits,
    )


def _planned_micro_batch(spec: TrainableSpec, device: str, machine: Machine | None) -> int | None:
    """Return the micro-batch that a recipe would use on the machine, or None without a recipe or a machine."""
    if spec.workload is None or machine is None:
        return None
    return make_plan(machine, spec.workload, overrides={"device": device}).micro_batch


def _trace(
    spec: TrainableSpec,
    detectors: list[Detector],
    *,
    device: str,
    batch_size: int | None,
    operators: dict[str, OperatorEntry],
) -> TraceResult:
    """Trace with fake tensors. If that fails, invert conditions on data, and then use real tensors for small models.

    Return the first trace without an error. If there is none, raise the error of the model, or return an incomplete
    trace if the model is too large for real tensors.
    """
    first = trace_steps(spec, detectors, device=device, batch_size=batch_size, operators=operators)
    if first.error is None:
        return first
    if isinstance(first.error, WhetError):
        raise first.error
    second = trace_steps(spec, detectors, device=device, batch_size=batch_size, condition=True, operators=operators)
    if second.error is None:
        return second
    if first.trainable is not None and first.num_parameters > _MAX_REAL_PARAMETERS:
        return first
    real = trace_steps(spec, detectors, device=device, is_fake=False, operators=operators)
    if real.error is not None:
        # The model itself fails, not only its trace.
        raise real.error
    return real


def _trace_finding(traced: TraceResult) -> Iterator[PreflightFinding]:
    if traced.error is None:
        return
    own, inner = failure_frames(traced.error)
    got = first_line(traced.error)
    where = f" ({frame_name(inner)})" if inner else ""
    detection = Detection(
        "trace-stopped",
        "error",
        f"the trace ended early, nothing after it was checked: {type(traced.error).__name__}: {got}{where}",
        "fix that line if it fails in training too; else a smaller version of the model, for real tensors",
    )
    yield detection.as_finding((own.filename, own.lineno or 0, own.name) if own else None, during="the step")


def _causality_findings(spec: TrainableSpec, traced: TraceResult) -> Iterator[PreflightFinding]:
    """Check the causality of a model that is declared causal, with a few samples and real tensors."""
    assert traced.trainable is not None
    if traced.trainable.outputs is None:
        return
    if traced.num_parameters > _MAX_REAL_PARAMETERS:
        what = "causality was not checked: the model is too large to be run with real tensors"
        unknown = Detection("causality-unknown", "note", what, "a smaller version of the same model")
        yield unknown.as_finding(None, during="the forward pass")
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trainable = spec.make()
        trainable.model.eval()
        assert trainable.outputs is not None
        batch_size = min(2, trainable.batch_size) if trainable.is_scalable else trainable.batch_size
        try:
            leak = find_leak(trainable.outputs, trainable.make_batch(batch_size))
        except InconclusiveError as error:
            try_ = "inputs with several different tokens, and weights that are not zero"
            unknown = Detection("causality-unknown", "note", f"causality could not be determined: {error}", try_)
            yield unknown.as_finding(None, during="the forward pass")
            return
    if leak is not None:
        what = f"the model is declared causal but is not: {leak}"
        try_ = "a causal mask, or operations along the sequence that see earlier positions only"
        yield Detection("not-causal", "error", what, try_).as_finding(_forward_line(trainable), during="")


def _is_causal(trainable: Trainable, findings: list[PreflightFinding]) -> bool | None:
    if trainable.outputs is None or any(finding.id == "causality-unknown" for finding in findings):
        return None
    return not findings


def _estimate_fits(
    spec: TrainableSpec, trainable: Trainable, device: str, machine: Machine | None
) -> tuple[tuple[MachineFit, ...], str | None]:
    """Return how training fits into the memory of each machine, and the reason if that could not be estimated."""
    machines = (machine,) if machine else tuple(m for m in known_machines() if _main_device(m) == device)
    try:
        with trace_environment():
            fits = fit_machines(spec, machines, overrides={"device": device}, trainable=trainable)
    except Exception as error:
        return (), first_line(error)
    return fits, None


def _memory_findings(fits: Iterable[MachineFit]) -> list[PreflightFinding]:
    """Return an error for each machine with insufficient memory. Call this only for a machine that the user chose."""
    try_ = "activation_checkpointing=on, a smaller model, or another machine"
    return [
        Detection("too-little-memory", "error", fit.summary, try_).as_finding(None, during="the step")
        for fit in fits
        if fit.micro_batch is None and fit.limit_bytes is not None
    ]


def _main_device(machine: Machine) -> str:
    return machine.accelerators[0].kind if machine.accelerators else "cpu"


def _forward_line(trainable: Trainable) -> SourceLine | None:
    """Return the line of the model's forward method, or None if it is not a Python function."""
    forward = getattr(type(trainable.model), "forward", None)
    code = getattr(inspect.unwrap(forward), "__code__", None) if forward else None
    return (code.co_filename, code.co_firstlineno, code.co_name) if code else None


def _sorted(findings: Iterable[PreflightFinding]) -> tuple[PreflightFinding, ...]:
    """Merge repeated findings, and sort them by severity, worst first."""
    return tuple(sorted(_merge_repeats(findings), key=lambda finding: SEVERITIES.index(finding.severity)))


def _merge_repeats(findings: Iterable[PreflightFinding]) -> list[PreflightFinding]:
    """Merge findings of the same kind and line. A weight may be reported both by itself and in an operator."""
    merged: dict[object, PreflightFinding] = {}
    for finding in findings:
        key = (finding.id, finding.place and (finding.place.file, finding.place.line), finding.what)
        known = merged.get(key)
        count = finding.count + (known.count if known else 0)
        merged[key] = (known or finding).model_copy(update={"count": count})
    return list(merged.values())
