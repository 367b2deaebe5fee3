"""The state of a self-play run, written after each generation.

`state.json` holds the state. `games-NNN.npz` holds the self-play games for generation NNN, which the previous champion
played, and `generation-NNN/` is the training run. Generation 000 is trained on games of the two-distance player.
"""

from pathlib import Path
from typing import Any

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.run import durable, strict_json
from whet.run.disk import read_regular_file

STATE = "state.json"
FORMAT = "whet hex selfplay 1"


class Generation(FrozenModel):
    number: int
    num_positions: int
    win_rate: float | None = None
    """Win rate against the previous champion, or None for generation 0."""
    low: float | None = None
    high: float | None = None
    is_champion: bool


class SelfPlayState(FrozenModel):
    """The options of a self-play run, and its finished generations."""

    format: str = FORMAT
    config: dict[str, Any]
    generations: tuple[Generation, ...] = ()

    @property
    def champion(self) -> int | None:
        """Number of the current champion, or None before generation 0 is finished."""
        return self.champion_before(len(self.generations))

    def champion_before(self, number: int) -> int | None:
        """Return the number of the generation that was champion when generation `number` started, or None."""
        return next((done.number for done in reversed(self.generations[:number]) if done.is_champion), None)


def run_path(folder: Path, number: int) -> Path:
    return folder / f"generation-{number:03d}"


def games_path(folder: Path, number: int) -> Path:
    """Return the path of the self-play games for a generation."""
    return folder / f"games-{number:03d}.npz"


def is_selfplay(folder: Path) -> bool:
    return (folder / STATE).is_file()


def read_state(folder: Path) -> SelfPlayState:
    path = folder / STATE
    try:
        state = SelfPlayState.from_json(strict_json.decode(read_regular_file(path).decode()), where=path)
    except ValueError as error:
        raise WhetError(f"{path} is damaged", got=str(error)[:200], try_="a new folder with --run DIR") from None
    if state.format != FORMAT:
        raise UsageError(f"{path} has an unsupported format", got=state.format[:60], try_="a new folder with --run DIR")
    return state


def write_state(folder: Path, state: SelfPlayState) -> None:
    """Write the state file of a self-play run atomically."""
    durable.write_file(folder / STATE, data=strict_json.encode(state.as_json()).encode())


def open_state(folder: Path, *, config: dict[str, Any]) -> SelfPlayState:
    """Read or create the state of a folder. Raise UsageError if the folder was started with different options."""
    if not is_selfplay(folder):
        durable.make_directory(folder)
        if any(not durable.is_leftover(path) and path.name != "lock" for path in folder.iterdir()):
            raise UsageError("the folder contains something else", got=str(folder), try_="another --run DIR")
        state = SelfPlayState(config=config)
        write_state(folder, state)
        return state
    state = read_state(folder)
    # The options of the loop may change. For example, more generations extend a finished run.
    changed = [name for name, value in config.items() if name != "loop" and state.config.get(name, value) != value]
    if changed:
        raise UsageError(
            f"{folder} was started with a different {changed[0]}",
            got=f"{changed[0]}={config[changed[0]]}",
            try_=f"{changed[0]}={state.config[changed[0]]}, or another --run DIR",
        )
    return state


def champion_run(folder: Path) -> Path:
    number = read_state(folder).champion
    if number is None:
        raise UsageError(
            "this self-play run has no champion yet", got=str(folder), try_="run the same command again to resume it"
        )
    return run_path(folder, number)
