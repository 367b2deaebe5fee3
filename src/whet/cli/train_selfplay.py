"""whet train GAME selfplay=True: a training of many trainings, each told of on lines of its own."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def train_selfplay(recipe: Any, resolved: Any, path: Path, *, device: str, command: Sequence[str]) -> int:
    """Plays, learns and judges in a folder, or goes on there; the exit code."""
    from whet.base.errors import UsageError
    from whet.base.stopping import StoppedError
    from whet.cli import screen
    from whet.device.environment import before_torch

    if getattr(recipe, "improve", None) is None:
        raise UsageError(f"{recipe.name} is not played", got="selfplay=True", try_="whet train hex selfplay=True")
    if resolved.is_batch_open:
        raise UsageError("a self-play needs a number", got="global_batch_size=auto", try_="global_batch_size=256")
    config = resolved.config
    before_torch(mps_fallback=config.mps_fallback == "on", deterministic=config.deterministic == "on")
    from whet.engine.progress_line import ProgressLine
    from whet.engine.supervise import tell_parent

    # Killed from here on, it is started again.
    tell_parent(path)
    line = ProgressLine(recipe.name)
    told = {"start", "step", "warning", "oom", "skip", "stopping"}

    def show(kind: str, fields: dict[str, Any]) -> None:
        nonlocal line
        if kind in ("start", "resume"):
            # Another training, whose speed and end are its own.
            line.close()
            line = ProgressLine(recipe.name)
        if not screen.quiet and kind in told:
            line(kind, fields)

    def say(text: str) -> None:
        if not screen.quiet:
            line.say(f"{recipe.name}: {text}")

    try:
        code: int = recipe.improve(resolved, folder=path, device=device, command=command, say=say, show=show)
    except KeyboardInterrupt:
        # While it played: what was under way is played again.
        code = 130
    except StoppedError as error:
        code = error.exit_code
    finally:
        line.close()
    if code:
        screen.note(f"stopped; to go on:\n  {shlex.join(command)}")
        return code
    screen.note(f"\nkept      {path}\nnext      whet arena hex {shlex.quote(str(path))}@64 two-distance")
    return 0
