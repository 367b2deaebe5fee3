"""whet trains your PyTorch model with settings chosen for your machine, and resumes it exactly where it stopped.

The packages form layers: each package imports only from packages above it in this list (docs/architecture.md):

    base         errors, units, environment variables, the isolated worker process
    machine      facts about this computer and known machines
    plan         settings with value, reason, source and evidence; the rules that decide them
    config       options, declared once, read from keywords, command line and files
    run          the run folder: durable writes, lock, events
    web          the web server, with access checks for every request
    report       reads run folders and renders them as text, Markdown, HTML and a live page
    device       CUDA, MPS and CPU; the only package that calls a backend
    distributed  ranks, launcher, heartbeat, replicated and sharded strategies
    data         adapters, order, global batches, micro-batches, workers
    step         apply a plan to a model; one optimizer step
    checkpoint   everything that an exact resume needs, on disk
    verify       preflight, parity with the CPU, checks before the first step, memory
    autotune     candidate settings, paired timing, cache of evidence
    training     Session, train, callbacks, schedules
    doctor       the self-test of a device: operators, known bugs, parity, resume, speed
    hpo          hyperparameter search on Optuna, each trial a run folder
    prove        kills a training run, resumes it and compares every bit
    recipes      complete workloads that ship with whet
    api          public functions that need recipes: training by name, checks, comparisons, searches
    cli          the command line
"""

from typing import TYPE_CHECKING, Any

from whet.base import env as _env
from whet.base.version import VERSION

__version__ = VERSION

# Every process of whet imports this module first, and the variables must be set before torch is loaded.
_env.set_brief_spin()

_PUBLIC = {
    "Action": "whet.training.callback",
    "Callback": "whet.training.callback",
    "GlobalBatch": "whet.data.batch",
    "MicroBatch": "whet.data.batch",
    "OptimizerChoice": "whet.step.optimizers",
    "Outcome": "whet.step.step",
    "Plan": "whet.plan.plan",
    "Recipe": "whet.recipes.recipe",
    "Session": "whet.training.session",
    "State": "whet.training.progress",
    "TrainResult": "whet.training.loop",
    "WhetError": "whet.base.errors",
    "check": "whet.api.verify",
    "compare": "whet.api.verify",
    "load": "whet.api.load",
    "make_plan": "whet.plan.plan",
    "open_run": "whet.report.run_view",
    "probe": "whet.machine.probe",
    "search": "whet.api.search",
    "summarize": "whet.report.run_report",
    "train": "whet.api.train",
    "tune": "whet.training.tune",
}

if TYPE_CHECKING:
    from whet.api.load import load as load
    from whet.api.search import search as search
    from whet.api.train import train as train
    from whet.api.verify import check as check
    from whet.api.verify import compare as compare
    from whet.base.errors import WhetError as WhetError
    from whet.data.batch import GlobalBatch as GlobalBatch
    from whet.data.batch import MicroBatch as MicroBatch
    from whet.machine.probe import probe as probe
    from whet.plan.plan import Plan as Plan
    from whet.plan.plan import make_plan as make_plan
    from whet.recipes.recipe import Recipe as Recipe
    from whet.report.run_report import summarize as summarize
    from whet.report.run_view import open_run as open_run
    from whet.step.optimizers import OptimizerChoice as OptimizerChoice
    from whet.step.step import Outcome as Outcome
    from whet.training.callback import Action as Action
    from whet.training.callback import Callback as Callback
    from whet.training.loop import TrainResult as TrainResult
    from whet.training.progress import State as State
    from whet.training.session import Session as Session
    from whet.training.tune import tune as tune
else:

    def __getattr__(name: str) -> Any:
        # Names are loaded on first use: `import whet` stays fast, and nothing imports torch before it is needed. Type
        # checkers do not see this function; otherwise every name would exist for them.
        if name not in _PUBLIC:
            raise AttributeError(f"module 'whet' has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name]), name)


__all__ = [
    "Action",
    "Callback",
    "GlobalBatch",
    "MicroBatch",
    "OptimizerChoice",
    "Outcome",
    "Plan",
    "Recipe",
    "Session",
    "State",
    "TrainResult",
    "WhetError",
    "__version__",
    "check",
    "compare",
    "load",
    "make_plan",
    "open_run",
    "probe",
    "search",
    "summarize",
    "train",
    "tune",
]


def __dir__() -> list[str]:
    return sorted(__all__)
