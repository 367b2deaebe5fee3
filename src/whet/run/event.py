"""One line of events.jsonl.

Each line is a JSON object with `kind`, `time` (unix seconds) and `step` (optimizer steps done), and the fields of its
kind. NaN and infinity are written as described in strict_json. The fields by kind:

    start       total_steps, goal (the metric that decides the best checkpoint), mode ("max" or "min"), optimizers
                (the names of several; a step then has loss_NAME of each, and loss is their sum)
    plan        message: why the plan changed, a note about it (is_in_plan), or what was verified before the first step,
                which adds seconds and difference (the largest relative error: against the CPU, or of a compiled model
                against its eager code)
    step        loss; epoch, samples (so far), lr, grad_norm (before clipping; without clipping only in every
                16th step, and in no replayed one), seconds: {"data", "transfer", "forward", "backward", "optimizer"}
                on the device's own clock ("graph" for a step that is replayed as a whole), and the time since
                the previous step that was spent on {"evaluate", "save", "cooldown", "verify"}
    health      about every 5 s between steps, each field only if it can be measured: samples (so far),
                samples_per_second (since the previous one, without evaluations, saves and cooldown pauses),
                memory: {"allocated", "reserved", "peak", "limit"} of the device, {"process", "used", "available",
                "swap"} of the machine, in bytes; utilization: {"cpu", "process", "gpu"} in percent (cpu: of all
                cores; process: of one core; gpu: of the one NVIDIA card, or of Apple's); heat ("cool", "slow" or
                "hot"), thermal (the sensor's level), pressure (of memory: "normal", "warn", "critical")
    eval        one field per metric; confusion: {"labels": [...], "counts": [[...]]}, a row for each true class;
                classes: {"labels": [...], NAME: [...]}, a score for each class, such as "f1" and "support";
                samples: [{"input": ..., "expected": ..., "predicted": ..., ...}]. On the test split all names begin
                with "test_". weights: the name of the evaluated checkpoint, if it is not the newest state
    epoch       epoch (how many are done), epoch_seconds, memory: {"allocated": ..., "peak": ..., "limit": ...} in
                bytes, state_bytes: {"weights": ..., "gradients": ..., "optimizer": ..., "ema": ...} between steps,
                counted from the tensors, num_shapes (different micro-batch shapes in this session)
    checkpoint  a durable checkpoint: name, bytes, seconds (total), stall_seconds (training was blocked),
                slowed_seconds (how much longer steps took meanwhile), background (written while training continued),
                failures_before (failed attempts before this one)
    resume      the run continues from `step`: step and eval events of later steps before this line no longer count;
                exactness ("bit-exact" or what changed), rejected (damaged checkpoints), lost_steps, rollback_reason
                (where a step failed in this process), moved_from (another device)
    warning     something failed, and training continues: reason, retry (when, or how); of a failed write: path,
                errno, free_bytes; of a lost data worker: samples
    end         state ("done", "stopped" or "failed"), reason (a sentence, such as "all 3 epochs done"),
                seconds (spent after the last step, as for a step); of a failed session: traceback
    fallback    operators that ran on the CPU: {name: {"calls": ..., "seconds": ...}} of one step; reason
    throttle    cause ("heat" or "power"), reason; of heat: state ("cool", "slow" or "hot"), factor, since_step,
                thermal, cooldown_seconds
    pressure    level ("normal", "warn" or "critical"), reason
    oom         reason, action
    restart     the process was killed, and another one continues: reason, action
    skip        reason, verdict ("reproducible": the step is skipped; "transient": it succeeded when repeated), samples
    spike       reason, samples: a loss far above its usual values

Any event except step and health may have `exact: false` and a `reason`: from that step on, the run is not bit-exact.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from whet.run import strict_json

# Kinds of events other than regular progress. Reports list them.
INCIDENT_KINDS = ("oom", "resume", "restart", "throttle", "pressure", "skip", "spike", "fallback", "warning")

# Kinds that may be written. Readers keep unknown kinds, because a newer version may have written them.
EVENT_KINDS = frozenset(("start", "plan", "step", "health", "eval", "epoch", "checkpoint", *INCIDENT_KINDS, "end"))

# Kinds whose events are superseded when the run resumes from an earlier step, because they are written again.
SUPERSEDED_KINDS = frozenset(("step", "eval", "epoch"))

# Kinds that begin a session, that is, a period in which one process trains without a break.
SESSION_START_KINDS = frozenset(("start", "resume"))

RESERVED_FIELDS = frozenset(("kind", "time", "step", strict_json.NONFINITE_KEY))


@dataclass(frozen=True, slots=True)
class Event:
    """An event, which is one line of events.jsonl."""

    kind: str
    time: float
    step: int
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def get(self, name: str) -> Any:
        """Return the value of a field, or None if it is missing."""
        return self.fields.get(name)

    def number(self, name: str) -> float | None:
        """Return the value of a field if it is a number, or None."""
        return as_number(self.fields.get(name))


def flatten_fields(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values. An entry of a map gets a name such as "seconds/data".

    >>> dict(flatten_fields({"loss": 0.5, "seconds": {"data": 0.25}}))
    {'loss': 0.5, 'seconds/data': 0.25}
    """
    for name, value in fields.items():
        if isinstance(value, dict):
            for key, item in value.items():
                yield f"{name}/{key}", item
        else:
            yield name, value


def as_number(value: object) -> float | None:
    """Return a value as a float, or None if it is not a number. Booleans are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def parse_event(line: bytes) -> Event | None:
    """Parse one line. Return None if it is damaged.

    >>> parse_event(b'{"kind":"step","time":1.5,"step":3,"loss":0.25}').number("loss")
    0.25
    """
    parts = parse_event_fields(line)
    return None if parts is None else Event(*parts)


def parse_event_fields(line: bytes) -> tuple[str, float, int, dict[str, Any]] | None:
    """Return kind, time, step and fields of a line, or None if it is damaged. Faster than `parse_event`."""
    try:
        record = strict_json.decode(line)
        kind, time, step = record.pop("kind"), record.pop("time"), record.pop("step")
    except (ValueError, KeyError):
        return None
    if type(time) is not float:
        time = as_number(time)
    if type(kind) is not str or type(step) is not int or time is None or not math.isfinite(time):
        return None
    return kind, time, step, record
