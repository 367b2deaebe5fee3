"""whet trains your PyTorch model as fast as the machine in front of you allows.

Without changing what is trained, and without losing a step. The rooms of the house, from the ground up; a room may use
the rooms above it in this list, never the later ones:

    base      errors, units, the environment, frozen records
    machine   facts about this computer and about known ones
    plan      settings with value, reason, source and evidence; the rules that make them
    config    key=value words, config files, the keys every recipe has
    run       the run folder: durable writes, lock, events, following
    web       the guard of every page and server
    report    reads run folders: text and JSON
    hex       Hex, the game: rules, records, players, positions
    device    the only room that names a backend
    world     the only room that speaks to other processes of one training
    data      order, global batches, micro-batches, loading
    step      one optimizer step: the only code that trains
    checkpoint  everything an exact resume needs, on disk
    verify    will it run there, is it right, is it causal, does it fit?
    measure   real steps, timed: what is fastest here, with evidence
    engine    Session, train, schedules, signals
    doctor    examines a device: operators, known bugs, parity, resume, speed
    trials    hyperparameter search on Optuna, each trial a run folder
    prove     kills a training, resumes it and compares every bit
    recipes   complete workloads that ship with whet
    cli       one file per verb; the only room that prints
"""

from typing import TYPE_CHECKING, Any

from whet.base.version import VERSION

__version__ = VERSION

_PUBLIC = {
    "OptimizerChoice": "whet.step.optimizers",
    "Session": "whet.training.session",
    "WhetError": "whet.base.errors",
    "check": "whet.api.verify",
    "compare": "whet.api.verify",
    "make_plan": "whet.plan.plan",
    "open_run": "whet.report.opened_run",
    "probe": "whet.machine.probe",
    "search": "whet.api.search",
    "summarize": "whet.report.run_report",
    "train": "whet.training.loop",
    "tune": "whet.training.tune",
}

if TYPE_CHECKING:
    from whet.api.search import search as search
    from whet.api.verify import check as check
    from whet.api.verify import compare as compare
    from whet.base.errors import WhetError as WhetError
    from whet.machine.probe import probe as probe
    from whet.plan.plan import make_plan as make_plan
    from whet.report.opened_run import open_run as open_run
    from whet.report.run_report import summarize as summarize
    from whet.step.optimizers import OptimizerChoice as OptimizerChoice
    from whet.training.loop import train as train
    from whet.training.session import Session as Session
    from whet.training.tune import tune as tune

__all__ = [
    "OptimizerChoice",
    "Session",
    "WhetError",
    "__version__",
    "check",
    "compare",
    "make_plan",
    "open_run",
    "probe",
    "search",
    "summarize",
    "train",
    "tune",
]


def __getattr__(name: str) -> Any:
    # Names are loaded on first use: `import whet` stays quick, and nothing imports torch before it is needed.
    if name not in _PUBLIC:
        raise AttributeError(f"module 'whet' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
