"""The state file of a self-play run."""

from pathlib import Path
from typing import Any

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.run import durable, strict_json
from whet.run.disk import read_regular_file

STATE = "state.json"
FORMAT = "whet hex selfplay 1"


class Generation(FrozenModel):
    """What came of one generation."""

    number: int
    num_positions: int
    win_rate: float | None = None
    """Of its net against the champion before it; None where there was none."""
    low: float | None = None
    high: float | None = None
    is_champion: bool


class SelfPlayState(FrozenModel):
    """All generations that are over."""

    format: str = FORMAT
    config: dict[str, Any]
    generations: tuple[Generation, ...] = ()

    @property
    def champion(self) -> int | None:
        """The newest generation that beat the one before it."""
        return self.champion_before(len(self.generations))

    def champion_before(self, number: int) -> int | None:
        """The champion when a generation began."""
        return next((done.number for done in reversed(self.generations[:number]) if done.is_champion), None)


def run_path(folder: Path, number: int) -> Path:
    """The run of a generation."""
    return folder / f"generation-{number:03d}"


def games_path(folder: Path, number: int) -> Path:
    """What was played for a generation."""
    return folder / f"games-{number:03d}.npz"


def is_selfplay(folder: Path) -> bool:
    """Whether a folder holds a self-play."""
    return (folder / STATE).is_file()


def read_state(folder: Path) -> SelfPlayState:
    """What was written last."""
    path = folder / STATE
    try:
        found = SelfPlayState.from_json(strict_json.decode(read_regular_file(path).decode()), where=path)
    except ValueError as error:
        raise WhetError(f"{path} is damaged", got=str(error)[:200], try_="a new folder with --run DIR") from None
    if found.format != FORMAT:
        raise UsageError(f"{path} has another format", got=found.format[:60], try_="a new folder with --run DIR")
    return found


def write_state(folder: Path, state: SelfPlayState) -> None:
    """Whole or not at all."""
    durable.write_file(folder / STATE, data=strict_json.encode(state.as_json()).encode())


def open_state(folder: Path, *, config: dict[str, Any]) -> SelfPlayState:
    """The state of a folder, made where there is none; another training does not go on in it."""
    if not is_selfplay(folder):
        durable.make_directory(folder)
        if any(not durable.is_leftover(path) and path.name != "lock" for path in folder.iterdir()):
            raise UsageError("the folder holds something else", got=str(folder), try_="another --run DIR")
        state = SelfPlayState(config=config)
        write_state(folder, state)
        return state
    state = read_state(folder)
    # A key that a later whet has learned of was not said then; how long the loop goes on may change.
    known = {name: value for name, value in config.items() if name in state.config and name != "loop"}
    changed = [name for name, value in known.items() if state.config[name] != value]
    if changed:
        raise UsageError(
            f"{folder} was started with another {changed[0]}",
            got=f"{changed[0]}={config[changed[0]]}",
            try_=f"{changed[0]}={state.config[changed[0]]}, or another --run DIR",
        )
    return state


def champion_run(folder: Path) -> Path:
    """The run of the best player so far."""
    number = read_state(folder).champion
    if number is None:
        raise UsageError("this self-play has no champion yet", got=str(folder), try_="let it go on first")
    return run_path(folder, number)
