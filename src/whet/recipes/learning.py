"""How do a recipe's parameters learn? As the recipe says, or all alike, as the common keys do."""

from typing import Any, cast

from whet.recipes.recipe import Recipe
from whet.step.optimizer import OptimizerChoice


def optimizer_of(recipe: Recipe, config: Any) -> OptimizerChoice:
    choose = getattr(recipe, "optimizer", None)
    if choose is not None:
        return cast(OptimizerChoice, choose(config))
    return OptimizerChoice(name=config.optimizer, lr=config.lr, weight_decay=config.weight_decay)
