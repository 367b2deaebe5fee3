"""whet data: what is wrong with the data, before anything is trained on it."""

from pathlib import Path
from typing import Annotated

import typer


def data(
    what: Annotated[str, typer.Argument(metavar="RECIPE", help="Which recipe the data is for: text, chat or hex.")],
    path: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="The data, as data= names it.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Such as text_column=string label_separator='|'.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
    fix: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write a cleaned copy, and a list of what was done and why.")
    ] = None,
    leave: Annotated[
        str, typer.Option(metavar="KIND,KIND", help="Kinds of defects that --fix leaves as they are.")
    ] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if anything was found.")] = False,
) -> None:
    """Look at data before training on it.

    \b
    whet data text reviews.csv
    whet data text citations/ --json
    whet data text reviews.csv --fix clean.csv

    Labels, lengths, and what is wrong: repeated and contradictory rows, texts in two parts, labels that are probably
    misspelt, broken rows and encodings, and more, each with a few rows and their number. The original is never touched.
    """
    from whet.base.errors import UsageError
    from whet.cli import console
    from whet.config.resolve import resolve_config
    from whet.recipes.recipe import BUILT_IN, load_recipe

    recipe = load_recipe(what)
    if not recipe.supports("inspect_data"):
        raise UsageError(f"the recipe {recipe.name} has no data report", got=what, try_=" or ".join(BUILT_IN))
    if leave and fix is None:
        raise UsageError("--leave says what --fix leaves", got=f"--leave {leave}", try_="--fix OUT")
    if not path.exists():
        raise UsageError("the data is not there", got=path, try_="a file or folder that exists")
    config = resolve_config(recipe.Config, words or ()).config
    kinds = tuple(kind.strip() for kind in leave.split(",") if kind.strip())
    found = recipe.inspect_data(config, path, fix=fix, leave=kinds)
    if json:
        console.result_json(found.as_json)
    else:
        console.result("\n".join(found.lines))
    if strict and found.num_findings:
        raise typer.Exit(1)
