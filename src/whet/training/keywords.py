"""The keywords of `whet.Session`, declared once with type, default and description.

tools/keywords.py writes them into the signatures of `Session`, `train` and `tune`, after the training options from
config/options.py. These functions pass them on as a single value.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from whet.base.errors import UsageError, closest_match
from whet.config.options import SessionOptions
from whet.machine.pressure import ReadSystemState
from whet.plan.plan import Plan
from whet.plan.setting import Scalar
from whet.plan.values import SETTING_NAMES
from whet.plan.workload import Workload
from whet.run.folder import PYTHON_RECIPE
from whet.training.callback import Callback
from whet.training.callbacks.event_log import EventHandler

_LR_HINT = "torch.optim.AdamW(model.parameters(), lr=...): the optimizer has the learning rate"
_LOADING_HINT = "no keyword: the plan decides how data is loaded; overrides={'workers': N} sets the processes"
_ACCUMULATION_HINT = "overrides={'micro_batch': N}: gradients are accumulated until global_batch_size is reached"
OTHER_NAMES = {
    "lr": _LR_HINT,
    "learning_rate": _LR_HINT,
    "weight_decay": "torch.optim.AdamW(model.parameters(), weight_decay=...): it belongs to the optimizer",
    "batch_size": "global_batch_size",
    "per_device_train_batch_size": "global_batch_size, the samples of one optimizer step on all devices",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_grad_norm": "clip",
    "gradient_clip_val": "clip",
    "accumulation_steps": _ACCUMULATION_HINT,
    "gradient_accumulation_steps": _ACCUMULATION_HINT,
    "accumulate_grad_batches": _ACCUMULATION_HINT,
    "num_workers": _LOADING_HINT,
    "pin_memory": _LOADING_HINT,
    "prefetch_factor": _LOADING_HINT,
    "persistent_workers": _LOADING_HINT,
    "output_dir": "run",
    "default_root_dir": "run",
    "eval_dataset": "val",
    "val_data": "val",
    "metrics": 'evaluate=f, where f(model, batches) returns {"accuracy": 0.9}; goal="accuracy"',
}
"""Keywords of Lightning, Accelerate and HF Trainer, with the equivalent in whet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionKeywords:
    """The keywords of a call of `Session`, `train` or `tune`, as one value."""

    training: Mapping[str, Any] = field(default_factory=dict)
    """The options declared in config/options.py, before validation: global_batch_size may be "auto"."""
    lr_batch: int = 32
    """With global_batch_size="auto": the batch size that the learning rate is meant for."""
    run: str | Path | None = None
    """Run folder; without one, nothing is written. The same call with the same folder resumes."""
    device: str = "auto"
    """auto, mps, cuda, cuda:1 or cpu."""
    overrides: Mapping[str, Scalar] | None = None
    """Settings of the plan that you fix: {"micro_batch": 8, "precision": "bf16"} (docs/rules)."""
    measure: bool = True
    """Whether a run that is long enough measures which plan is fastest, at its first step (docs/measure.md)."""
    plan: Plan | None = None
    """Plan of a new run, made by `whet.tune` or `whet.make_plan`."""
    workload: Workload | None = None
    """Description of the training run for the plan; by default it is derived from the model and the data."""
    goal: str | None = None
    """Metric that selects the best checkpoint and drives early stopping."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether a lower ("min") or a higher ("max") goal is better; "auto" follows from its name."""
    init_from: str | Path | None = None
    """Run or import whose weights a new run starts with."""
    allow: Collection[str] = ()
    """What may differ from the original run when it resumes: "data", "batch" or "lr"."""
    callbacks: Sequence[Callback] = ()
    """Instances of `whet.Callback` (docs/callbacks.md)."""
    register: Mapping[str, Any] | None = None
    """Your own objects with state, by name, which are saved and restored with the run (docs/own-loops.md)."""
    on_event: EventHandler | Literal["line"] | None = None
    """Called with the kind and the fields of every event; "line" draws a progress line on standard error."""
    read_sensors: ReadSystemState | None = None
    """Function that reads heat, power and memory pressure; by default from the sensors of this machine."""
    outputs: Callable[[Any], Any] | None = None
    """For causal models: a function from a micro-batch to outputs (batch, length, ...), to verify causality."""

    # The fields below are set by recipes, not by users.
    recipe: str = PYTHON_RECIPE
    config: Mapping[str, Any] | None = None
    """Options that are written to the run folder and compared when the run resumes; None means those of `training`."""
    command: Sequence[str] = ()
    attach: Mapping[str, bytes] = field(default_factory=dict)
    """Extra files of a new run folder, by name."""

    @classmethod
    def from_call(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the keywords from the `locals()` of a public function. Raise UsageError for `unknown` keywords.

        The function passes `locals()` rather than a list, because its signature is generated and a list would repeat
        thirty names.
        """
        given = {name: value for name, value in arguments.items() if name in PUBLIC_NAMES}
        training = {name: given.pop(name) for name in SessionOptions.model_fields if name in given}
        for name, value in arguments["unknown"].items():
            raise unknown_keyword(name, value, known=[*arguments])
        return cls(training=training, **given)


INTERNAL_NAMES = ("training", "recipe", "config", "command", "attach")
PUBLIC_NAMES = frozenset(
    {*SessionOptions.model_fields, *(item.name for item in fields(SessionKeywords))} - {*INTERNAL_NAMES}
)


def unknown_keyword(name: str, value: object, *, known: Collection[str]) -> UsageError:
    """Return the error for a keyword that does not exist, with a suggestion."""
    meant = closest_match(name, known)
    if name in SETTING_NAMES:
        hint = f"overrides={{{name!r}: {value!r}}}: it is a setting of the plan"
    elif name in OTHER_NAMES:
        hint = OTHER_NAMES[name]
    else:
        hint = f"did you mean {meant!r}?" if meant else "help(whet.train) lists the keywords"
    return UsageError("unknown keyword", got=f"{name}={value!r}"[:200], try_=hint)
