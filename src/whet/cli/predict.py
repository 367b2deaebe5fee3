"""whet predict: what a trained model says."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Texts; standard input if none.")] = None,
    file: Annotated[
        str | None, typer.Option("--recipe", metavar="FILE", help="Your recipe's file, if it is not a built-in one.")
    ] = None,
    checkpoint: Annotated[str, typer.Option(metavar="last|best|STEP", help="Which weights.")] = "last",
    json: Annotated[bool, typer.Option("--json", help="All probabilities, as JSON.")] = False,
) -> None:
    """What a trained model says about texts.

    \b
    whet predict runs/text-001 "Return the sum of the elements."
    whet predict runs/text-001 --json < texts.txt
    """
    from whet.base.errors import UsageError, WhetError
    from whet.cli import screen
    from whet.recipes.recipe import BUILT_IN, load_recipe
    from whet.run.folder import open_run

    opened = open_run(run)
    given = [_readable(text) for text in texts or [line.rstrip("\n") for line in sys.stdin if line.strip()]]
    if not given:
        raise UsageError("there is nothing to predict", got="no text", try_=f'whet predict {run} "some text"')
    # Only a built-in one by itself: a run folder may come from anywhere, and must not say which code is run.
    if file is None and opened.header.recipe not in BUILT_IN:
        raise UsageError("the run is of a recipe of yours", got=opened.header.recipe, try_="--recipe FILE")
    recipe = load_recipe(file or opened.header.recipe)
    predict_with = getattr(recipe, "predict", None)
    if predict_with is None:
        raise UsageError(f"the recipe {recipe.name} cannot predict", got=str(run), try_="a method predict()")

    from whet.engine.reading import load_weights

    try:
        model, answers = predict_with(recipe.Config.model_validate(opened.config), opened.kept)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise WhetError("the run does not hold what its recipe needs", got=what, try_="another run") from None
    load_weights(opened.path, model, checkpoint=checkpoint)
    model.eval()
    found = answers(given)
    if json:
        screen.result_json([{"text": text, **answer} for text, answer in zip(given, found, strict=True)])
        return
    rows = [
        (answer["label"], f"{answer['probability']:.3f}", _short(text))
        for text, answer in zip(given, found, strict=True)
    ]
    screen.result(screen.table(("label", "probability", "text"), rows))


def _readable(text: str) -> str:
    """The text without bytes that were no UTF-8 on the command line."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
