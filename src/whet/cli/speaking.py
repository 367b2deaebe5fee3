"""What generate, chat and serve share: a run folder becomes somebody who answers."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whet.recipes.chat.conversation import Turn
    from whet.recipes.chat.generation.speaking import Speaker


def load_chat_model(run: Path, *, checkpoint: str, device: str) -> "Speaker":
    """The model of a run with its weights, on a device."""
    from whet.base.errors import UsageError, WhetError
    from whet.device.environment import configure_before_torch
    from whet.recipes.recipe import BUILT_IN, load_recipe
    from whet.run.folder import open_run

    opened = open_run(run)
    # Only a built-in one: a run folder may come from anywhere, and must not say which code is run.
    recipe = load_recipe(opened.header.recipe) if opened.header.recipe in BUILT_IN else None
    if recipe is None or not recipe.supports("speak"):
        raise UsageError("this run cannot be spoken with", got=f"a run of {opened.header.recipe}", try_="a chat run")
    configure_before_torch(mps_fallback=False)
    from whet.device.open import open_device
    from whet.training.weights import load_weights

    place = open_device(device).device
    try:
        speaker: Speaker = recipe.speak(opened.kept)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise WhetError("the run does not hold what its recipe needs", got=what, try_="another run") from None
    load_weights(opened.path, speaker.model, checkpoint=checkpoint)
    place.put_model(speaker.model)
    speaker.model.eval()
    return speaker


def as_turns(text: str, system: str | None) -> "list[Turn]":
    """A question alone, or after a system turn."""
    from whet.recipes.chat.conversation import Turn

    before = [Turn("system", valid_utf8(system))] if system else []
    return [*before, Turn("user", text)]


def valid_utf8(text: str) -> str:
    """The text without bytes that were no UTF-8 on the command line."""
    return text.encode("utf-8", "replace").decode("utf-8")


def read_lines() -> Iterator[str]:
    """The lines of standard input that say something, whatever their bytes are; none where it is closed (<&-)."""
    if sys.stdin is None:
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for line in sys.stdin:
        if line.strip():
            yield valid_utf8(line.rstrip("\n"))
