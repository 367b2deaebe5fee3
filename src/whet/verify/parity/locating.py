"""Where does a device go wrong first? The operator, its module and its line; or the module alone."""

from pathlib import Path

from pydantic import Field

from whet.base.record import Record
from whet.device.abstract import AbstractDevice
from whet.verify.agreement import Error
from whet.verify.parity.modules import first_wrong_module
from whet.verify.parity.placing import Bench
from whet.verify.parity.replay import Replay
from whet.verify.parity.reproducer import write_reproducer
from whet.verify.parity.whereabouts import Whereabouts


class Culprit(Record):
    """What is wrong first."""

    operator: str | None = None
    """None where only the module is known."""
    phase: str
    """forward, backward or update"""
    module: str | None = None
    line: str | None = None
    error: Error
    bound: Error
    step: int = 1


class Located(Record):
    """What a step showed whose operators were replayed one by one on the CPU."""

    culprit: Culprit | None = None
    wrong: dict[str, int] = Field(default_factory=dict)
    """Every wrong operator with the number of its wrong calls."""
    draws: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    """Operators that the CPU has no kernel for: they were not judged."""
    num_judged: int = 0
    reproducer: str | None = None


def locate(bench: Bench, device: AbstractDevice, *, steps: int = 1, out: Path | None = None) -> Located:
    """Looks at whole steps on the device until an operator is wrong; writes a program that shows it alone to `out`."""
    with bench.at(device) as placed:
        optimizer = placed.optimizer()
        whereabouts = Whereabouts(placed.model, optimizer)
        replay = Replay(device, whereabouts)
        stepper = placed.stepper(optimizer)
        for number in range(1, steps + 1):
            with whereabouts.followed(), replay:
                placed.step(stepper, number)
            if replay.findings.first is not None:
                break
    found, first = replay.findings, replay.findings.first
    culprit, reproducer = None, None
    if first is not None:
        culprit = Culprit(
            operator=first.func.name().partition(".")[0],
            phase=first.spot.phase,
            module=first.spot.module,
            line=first.spot.line,
            error=first.error,
            bound=first.bound,
            step=number,
        )
        if out is not None:
            reproducer = str(write_reproducer(first, out, device=str(device.place)))
    elif device.kind != "cpu":
        # No single operator is wrong: one that could not be judged, or code that torch's dispatcher does not see.
        wrong = first_wrong_module(bench, device)
        if wrong is not None:
            culprit = Culprit(phase=wrong.phase, module=wrong.name, error=wrong.error, bound=wrong.bound)
    return Located(
        culprit=culprit,
        wrong=found.wrong,
        draws=tuple(sorted(found.draws)),
        unknown=tuple(sorted(found.unknown)),
        num_judged=found.num_judged,
        reproducer=reproducer,
    )
