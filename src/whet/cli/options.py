"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings of the recipe, such as epochs=3 lr=1e-4 arch.layers=4."),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "--config-name",
        metavar="FILE|NAME",
        help="Read settings from a TOML or YAML file, or a built-in configuration such as cfg_chat.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, mps, cuda, cuda:1 or cpu.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
RecipeFile = Annotated[
    str | None, typer.Option("--recipe", metavar="FILE", help="The file of your recipe, if it is not a built-in one.")
]
ModelFunction = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="FILE.py:FUNCTION",
        help="For a run trained from Python: the function that creates its model.",
    ),
]
Checkpoint = Annotated[str, typer.Option(metavar="best|last|STEP|PATH", help="Which weights to use.")]

# Options of the commands that use chat models.
ChatRun = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="A run folder of whet train chat; or give --checkpoint PATH.")
]
SystemPrompt = Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Maximum length of an answer in tokens.")]
Temperature = Annotated[
    float, typer.Option(metavar="T", help="Sampling temperature; 0 always picks the most likely token.")
]
TopK = Annotated[int, typer.Option(metavar="K", help="Sample from the K most likely tokens; 0 for all.")]
TopP = Annotated[float, typer.Option(metavar="P", help="Sample from the most likely tokens with total probability P.")]
SamplingSeed = Annotated[int, typer.Option(metavar="N", min=0, help="The same seed and input give the same answer.")]

# Options of the commands that start a server.
Port = Annotated[int, typer.Option(metavar="N", help="First port to try; 0 picks any free port.")]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Print the link without opening a browser.")]
JsonLine = Annotated[bool, typer.Option("--json", help="Print address and link as one line of JSON.")]
