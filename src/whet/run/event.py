"""What does one line of events.jsonl mean?

Each line is a JSON object with `kind`, `time` (unix seconds) and `step` (optimizer steps done), then fields of its own.
NaN and infinity are written as strict_json tells. Fields that readers know:

    start       total_steps, goal (the name of the metric that counts), goal_is ("max" or "min")
    plan        changed: why the plan is another one, or what was verified before the first step; then also seconds,
                difference (the largest relative error: beside the CPU, or of a compiled model beside its own code)
    step        loss; epoch, samples (so far), lr, grad_norm (before clipping; without clipping only in every
                16th step, and in no replayed one), seconds: {"data", "transfer", "forward", "backward", "optimizer"}
                on the device's own clock ("graph" for a step that is replayed as a whole), and what was spent since
                the step before: {"evaluate", "save", "rest"}
    health      about every 5 s between steps, each part only where it can be read: samples (so far),
                samples_per_second (since the last one; evaluations, saves and rests do not count),
                memory: {"allocated", "reserved", "peak", "limit"} of the device, {"process", "used", "available",
                "swap"} of the machine, in bytes; use: {"cpu", "process", "gpu"} in per cent (cpu: of all cores;
                process: of one core; gpu: of the one NVIDIA card, or of Apple's); heat ("cool", "slow" or "hot", as
                the governor judges), thermal (the sensor's level), pressure (of memory: "normal", "warn", "critical")
    eval        one field per metric; confusion: {"labels": [...], "counts": [[...]]}, a row for each true class;
                classes: {"labels": [...], NAME: [...]}, a number for each class, such as "f1" and "support";
                samples: [{"input": ..., "expected": ..., "predicted": ..., ...}]. Of the test part all names begin
                with "test_". weights: the name of the checkpoint that was evaluated, where that was asked for
    epoch       epoch (how many are done), epoch_seconds, memory: {"allocated": ..., "peak": ..., "limit": ...} in
                bytes, held: {"weights": ..., "gradients": ..., "optimizer": ..., "average": ...} of it between
                steps, counted from the tensors, shapes (how many different ones micro-batches have had in this sitting)
    checkpoint  it is safe now: name, bytes, seconds (in all), stall_seconds (the training stood still),
                slowed_seconds (steps beside it took longer), beside (written while the training went on)
    resume      the run went on from `step`: step and eval events of later steps before this line no longer count;
                exactness ("bit-exact" or what changed), refused (damaged checkpoints), lost_steps
    warning     something failed, and training goes on: reason, again (the next try, or what was done); of a disk that
                refused: path, errno, free_bytes; of a lost data worker: samples
    end         state ("done", "stopped" or "failed"), reason, seconds (spent after the last step, as for a step)
    fallback    operators that ran on the CPU: {name: {"calls": ..., "seconds": ...}} of one step; reason
    throttle    about ("heat" or "power"), reason; of heat: state ("cool", "slow" or "hot"), factor, since_step,
                thermal, rested_seconds
    pressure    level ("normal", "warn" or "critical"), reason
    oom         reason, cure
    restart     the process was killed, and another one goes on: reason, cure
    skip        reason, verdict ("reproducible": the step is left out; "transient": made again it was fine), samples
    spike       reason, samples: a loss far above the usual

Any event but a step or health may carry `exact: false` and a `reason`: from that step on the run is not bit-exact.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from whet.run import strict_json

INCIDENT_KINDS = ("oom", "resume", "restart", "throttle", "pressure", "skip", "spike", "fallback", "warning")
"""What is worth telling in a report."""

EVENT_KINDS = frozenset(("start", "plan", "step", "health", "eval", "epoch", "checkpoint", *INCIDENT_KINDS, "end"))
"""What may be written. Readers pass on kinds they do not know: a newer whet may have written them."""

VOIDED_KINDS = frozenset(("step", "eval", "epoch"))
"""The kinds that a later `resume` from an earlier step makes void: they will happen again."""

SESSION_START_KINDS = frozenset(("start", "resume"))
"""The kinds that begin a sitting: one process training without a break."""

RESERVED_FIELDS = frozenset(("kind", "time", "step", strict_json.NONFINITE_KEY))


@dataclass(frozen=True, slots=True)
class Event:
    """One line of events.jsonl."""

    kind: str
    time: float
    step: int
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def get(self, name: str) -> Any:
        """The value of a field, or None."""
        return self.fields.get(name)

    def number(self, name: str) -> float | None:
        """The value of a field where it is a number, else None."""
        return as_number(self.fields.get(name))


def as_number(value: object) -> float | None:
    """A field's value as something that can be put on a curve; None for what is no number, truth values included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def parse_event(line: bytes) -> Event | None:
    """The event on a line; None when the line is damaged.

    >>> read_line(b'{"kind":"step","time":1.5,"step":3,"loss":0.25}').number("loss")
    0.25
    """
    parts = parse_event_fields(line)
    return None if parts is None else Event(*parts)


def parse_event_fields(line: bytes) -> tuple[str, float, int, dict[str, Any]] | None:
    """Kind, time, step and fields of the event on a line: for those who read millions."""
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
