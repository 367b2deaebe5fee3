"""Load the recipe and the trained model of a run."""

from typing import Any

from whet.base.errors import UsageError, WhetError
from whet.recipes.recipe import BUILT_IN, Recipe, load_recipe
from whet.run.folder import Run


def recipe_spec(run: Run, *, given: str | None = None) -> str:
    """Return the recipe of a run, as accepted by `load_recipe`. `given` is required for a user-defined recipe.

    A run folder may come from an untrusted source and must not decide which code is executed. Only built-in recipes are
    loaded by the name that the run stores.
    """
    if given is None and run.header.recipe not in BUILT_IN:
        file = next((word for word in run.header.command if word.partition(":")[0].endswith(".py")), "FILE")
        raise UsageError("the run has a recipe of your own", got=run.header.recipe, try_=f"--recipe {file}")
    return given or run.header.recipe


def load_run_recipe(run: Run, *, given: str | None = None) -> Recipe:
    """Load the recipe of a run. `given` is required for a user-defined recipe."""
    return load_recipe(recipe_spec(run, given=given))


def load_predictor(recipe: Recipe, run: Run, *, checkpoint: str) -> tuple[Any, Any, int]:
    """Return (model, predictor, step) with the weights of a checkpoint, in evaluation mode, on the CPU."""
    from whet.training.weights import load_weights

    try:
        model, predictor = recipe.predict(recipe.Config.model_validate(run.config), run.metadata)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        got = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise WhetError("the run lacks data that its recipe needs", got=got, try_="another run") from None
    step = load_weights(run.path, model, checkpoint=checkpoint)
    model.eval()
    return model, predictor, step
