"""Train one trial of a search in its own process, without the test split."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.config.resolve import resolve_config
from whet.recipes.recipe import load_recipe

if TYPE_CHECKING:
    from whet.hpo.trial_process import EvaluationCallback


def train_trial(arguments: dict[str, Any], may_continue: "EvaluationCallback") -> int:
    """Start or resume the run of a trial and return its exit code. Called in the process of the trial."""
    from whet.device.environment import configure_before_torch
    from whet.hpo.trial_process import request_stop

    recipe = load_recipe(arguments["recipe"])
    resolved = resolve_config(recipe.Config, arguments["args"])
    config = resolved.config
    configure_before_torch(mps_fallback=config.mps_fallback == "on", deterministic=config.deterministic == "on")
    # These modules import torch, which must see the environment set above. A user recipe may have imported it already.
    from whet.api.autotune import recipe_bench
    from whet.data.columns import count_samples
    from whet.recipes.runner import train_recipe

    # The split and the subset use the seed of the search, so that all trials train on the same samples.
    all_data = recipe.data(config.model_copy(update={"seed": arguments["split_seed"]}))
    data = _TrialData(all_data, fraction=arguments["subset"], seed=arguments["split_seed"])
    if data.is_part:
        total_steps = config.count_steps(count_samples(data.train))
    else:
        total_steps = recipe.describe(config, all_data).num_steps
    every = config.eval_every
    if every == "auto" and total_steps is not None:
        every = max(1, math.ceil(total_steps / arguments["evaluations"]))
        config = config.model_copy(update={"eval_every": every})
    goal = arguments["goal"]

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        if kind != "eval" or not isinstance(fields.get(goal), int | float) or not isinstance(every, int):
            return
        is_last = total_steps is not None and fields["step"] >= total_steps
        # Compare trials at the same evaluation, counted from 1. The last evaluation may come earlier than its interval.
        number = math.ceil(fields["step"] / every)
        if not may_continue(number, float(fields[goal]), is_last):
            request_stop()

    resolved = replace(resolved, config=config)
    open_bench = partial(recipe_bench, arguments["recipe"], resolved, device=arguments["device"])
    result = train_recipe(
        recipe,
        resolved,
        run=Path(arguments["run"]),
        device=arguments["device"],
        command=["whet", "train", arguments["recipe"], *arguments["args"]],
        on_event=on_event,
        open_bench=open_bench if arguments["measures"] else None,
        data=data,
    )
    return 0 if result.state == "done" else result.exit_code or 143


class _TrialData:
    """The data of a recipe with a subset of the training split and no test split, which a search must never see."""

    def __init__(self, data: Any, *, fraction: float, seed: int) -> None:
        from whet.data.columns import subset

        self._data = data
        self.train = subset(data.train, fraction=fraction, seed=seed)
        self.test = None
        self.is_part = fraction < 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)
