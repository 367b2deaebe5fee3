"""Train one trial of a search, in its own process, without the test split."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.config.resolve import resolve_config
from whet.recipes.recipe import load_recipe

if TYPE_CHECKING:
    from whet.hpo.trial_process import TrialChannel


def train_trial(arguments: dict[str, Any], line: "TrialChannel") -> int:
    """In the trial's process: begins the run, or goes on with it; the exit code."""
    from whet.device.environment import configure_before_torch
    from whet.hpo.trial_process import request_stop

    recipe = load_recipe(arguments["recipe"])
    resolved = resolve_config(recipe.Config, arguments["words"])
    config = resolved.config
    configure_before_torch(mps_fallback=config.mps_fallback == "on", deterministic=config.deterministic == "on")
    # torch is loaded from here on, unless a recipe of yours has done so.
    from whet.api.autotune import recipe_bench
    from whet.data.columns import count_samples
    from whet.recipes.runner import train_recipe

    # Whatever its own seed: the rows of every part, and the share of them, are the same for all trials.
    data = recipe.data(config.model_copy(update={"seed": arguments["split_seed"]}))
    parts = _TrialData(data, share=arguments["subset"], seed=arguments["split_seed"])
    total = (
        _total_steps(config, count_samples(parts.train)) if parts.is_part else recipe.describe(config, data).num_steps
    )
    every = config.eval_every
    if every == "auto" and total is not None:
        every = max(1, math.ceil(total / arguments["evaluations"]))
        config = config.model_copy(update={"eval_every": every})
    goal = arguments["goal"]

    def show(kind: str, fields: dict[str, Any]) -> None:
        if kind != "eval" or not isinstance(fields.get(goal), int | float) or not isinstance(every, int):
            return
        is_last = total is not None and fields["step"] >= total
        number = math.ceil(fields["step"] / every)
        if not line.may_continue(number=number, value=float(fields[goal]), is_last=is_last):
            request_stop()

    settled = replace(resolved, config=config)
    result = train_recipe(
        recipe,
        settled,
        run=Path(arguments["run"]),
        device=arguments["device"],
        command=["whet", "train", arguments["recipe"], *arguments["words"]],
        show=show,
        open_bench=partial(recipe_bench, arguments["recipe"], settled, device=arguments["device"])
        if arguments["measures"]
        else None,
        data=parts,
    )
    return 0 if result.state == "done" else result.exit_code or 143


class _TrialData:
    """A recipe's data with less to train on, and without the test part: no search may look at it."""

    def __init__(self, data: Any, *, share: float, seed: int) -> None:
        from whet.data.columns import subset

        self._data = data
        self.train = subset(data.train, fraction=share, seed=seed)
        self.test = None
        self.is_part = share < 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


def _total_steps(config: Any, samples: int | None) -> int | None:
    most: int | None = config.max_steps
    if samples is None:
        return most
    steps: int = config.epochs * math.ceil(samples / config.global_batch_size)
    return steps if most is None else min(steps, most)
