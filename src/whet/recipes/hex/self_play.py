"""Self-play training in generations: play games, train on them, and compare the net with the champion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from whet.base.errors import UsageError
from whet.base.units import format_percent
from whet.config.resolve import ResolvedConfig
from whet.device.abstract import AbstractDevice
from whet.device.open import open_device
from whet.recipes.hex.arena import Rating, draw_openings, play_match, random_boards, rate
from whet.recipes.hex.config import HexConfig, SelfPlayOptions
from whet.recipes.hex.data import Columns, HexData, with_half_turns
from whet.recipes.hex.game.board import NO_MOVE, Boards, Cells
from whet.recipes.hex.game.game_folder import encode_arrays, read_arrays
from whet.recipes.hex.game.players import Player
from whet.recipes.hex.game.rules import flip_perspective, mover_has_won, place_stones
from whet.recipes.hex.net_players import NetPlayer, SearchPlayer, load_net
from whet.recipes.hex.recipe import HexRecipe
from whet.recipes.hex.search import Floats, SearchOptions
from whet.recipes.hex.self_play_state import Generation, SelfPlayState, games_path, open_state, run_path, write_state
from whet.recipes.runner import train_recipe
from whet.run import durable, lock
from whet.training.callbacks.event_log import EventHandler
from whet.training.loop import TrainResult

MAX_OPENING_STONES = 3
"""Self-play games start with 0 to MAX_OPENING_STONES random stones, for variety."""


@dataclass(frozen=True, slots=True)
class SelfPlayGames:
    """The positions of self-play games, from the mover's perspective."""

    boards: Boards
    shares: Floats
    """(batch, cells): the fraction of the visits of each move. All are 0 in the final position of a game."""
    wins: NDArray[np.float32]
    """(batch,): 1 if the mover won the game, otherwise 0."""
    games: NDArray[np.int64]
    """(batch,): the index of the game."""

    def __len__(self) -> int:
        return len(self.boards)

    @property
    def moves(self) -> Cells:
        """The most visited moves, (batch,). NO_MOVE in the final position of a game."""
        return np.where(self.shares.max(1) > 0, self.shares.argmax(1), NO_MOVE)


def play_self_games(player: SearchPlayer, *, size: int, num_games: int, free_moves: int, seed: int) -> SelfPlayGames:
    """Let a player play games against itself, all in one batch.

    The first `free_moves` moves are sampled by visit counts. Later moves are the most visited ones.
    """
    draw = np.random.default_rng(seed)
    boards = np.concatenate(
        [random_boards(-(-num_games // 4), size=size, num_stones=n, draw=draw) for n in range(MAX_OPENING_STONES + 1)]
    )[:num_games]
    games, ply = np.arange(len(boards)), 0
    records: list[tuple[Boards, Floats, NDArray[np.int64]]] = []
    # Whether the player who moves first after the opening wins.
    is_first_winner = np.zeros(len(boards), dtype=bool)
    plies = []
    while len(games):
        shares = player.search(boards, draw=draw).shares
        # Gumbel-max trick: the argmax of log-probabilities plus Gumbel noise is a sample from the distribution.
        noise = draw.gumbel(size=shares.shape)
        with np.errstate(divide="ignore"):
            moves = (np.log(shares) + noise).argmax(1) if ply < free_moves else shares.argmax(1)
        records.append((boards, shares, games))
        plies.append(np.full(len(games), ply))
        after = place_stones(boards, moves)
        is_finished = mover_has_won(after)
        ply += 1
        if is_finished.any():
            # Include the final position, whose mover has lost, to train the value head.
            records.append(
                (flip_perspective(after[is_finished]), np.zeros_like(shares[is_finished]), games[is_finished])
            )
            plies.append(np.full(int(is_finished.sum()), ply))
            # The player who moves first makes the odd moves: 1, 3, 5, ...
            is_first_winner[games[is_finished]] = ply % 2 == 1
        boards, games = flip_perspective(after[~is_finished]), games[~is_finished]
    numbers = np.concatenate([games for _, _, games in records])
    is_first = np.concatenate(plies) % 2 == 0
    return SelfPlayGames(
        boards=np.concatenate([boards for boards, _, _ in records]),
        shares=np.concatenate([shares for _, shares, _ in records]).astype(np.float32),
        wins=(is_first_winner[numbers] == is_first).astype(np.float32),
        games=numbers,
    )


_ARRAYS = ("boards", "shares", "wins", "games")


def write_self_games(path: Path, played: SelfPlayGames) -> None:
    """Write games to a file atomically."""
    durable.write_file(path, data=encode_arrays({name: getattr(played, name) for name in _ARRAYS}))


def read_self_games(path: Path) -> SelfPlayGames | None:
    """Read self-play games.

    Return None if the file is missing or damaged, because the same games can be played again.
    """
    arrays = read_arrays(path)
    return SelfPlayGames(**arrays) if arrays is not None and {*arrays} == {*_ARRAYS} else None


_HELD_OUT_EVERY = 20
"""Of this many consecutive games, one is in the val split and one in the test split."""


class GenerationRecipe(HexRecipe):
    """The Hex recipe on self-play games. The policy target is the fraction of the visits of each move."""

    def __init__(self, played: Sequence[SelfPlayGames], *, size: int, fingerprint: str) -> None:
        self._played = played
        self._size = size
        self._fingerprint = fingerprint

    def data(self, config: HexConfig) -> HexData:
        splits: dict[str, list[Columns]] = {"train": [], "val": [], "test": []}
        for played in self._played:
            remainder = played.games % _HELD_OUT_EVERY
            for name, mask in (("train", remainder > 1), ("val", remainder == 0), ("test", remainder == 1)):
                splits[name].append(_columns(played, mask))
        train, val, test = (_concatenate(columns) for columns in splits.values())
        train = with_half_turns(train) if config.augment else train
        return HexData(size=self._size, train=train, val=val, test=test, fingerprint=self._fingerprint)


def _columns(played: SelfPlayGames, mask: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> Columns:
    return {
        "board": torch.from_numpy(played.boards[mask]),
        "move": torch.from_numpy(played.moves[mask]),
        "win": torch.from_numpy(played.wins[mask]),
        "shares": torch.from_numpy(played.shares[mask]),
    }


def _concatenate(parts: list[Columns]) -> Columns:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


_NOISE_FRACTION = 0.25
"""Weight of the Dirichlet noise in the priors of the root, as in AlphaZero."""
_OPENING_STONES = 2


@dataclass(frozen=True, kw_only=True)
class SelfPlay:
    """A self-play training run in a folder.

    Generation 0 trains on games of the two-distance player. Each later generation starts from the weights of the
    champion, and trains on the self-play games of the latest generations. It becomes the champion if it wins enough
    games against the previous one.
    """

    folder: Path
    resolved: ResolvedConfig[HexConfig]
    device: str
    command: Sequence[str]
    message: Callable[[str], None]
    on_event: EventHandler | None

    @property
    def config(self) -> HexConfig:
        """The options of the self-play run."""
        return self.resolved.config

    def run(self) -> int:
        """Train until all generations are finished or a training run does not finish. Return the exit code."""
        self._check_openings()
        self.folder.mkdir(parents=True, exist_ok=True)
        with lock.acquire(self.folder):
            state = open_state(self.folder, config=self.config.model_dump(mode="json"))
            if self.config.threads != "auto":
                torch.set_num_threads(self.config.threads)
            for number in range(len(state.generations), self.config.loop.generations + 1):
                result, done = self._generation(number, state)
                if done is None:
                    return result.exit_code
                state = state.model_copy(update={"generations": (*state.generations, done)})
                write_state(self.folder, state)
            self.message(
                f"all {self.config.loop.generations} generations are finished; "
                f"the champion is generation {state.champion}"
            )
        return 0

    def _generation(self, number: int, state: SelfPlayState) -> tuple[TrainResult, Generation | None]:
        if number == 0 or state.champion is None:
            self.message("generation 0 trains on games of the two-distance player")
            result = self._train(HexRecipe(), number)
            is_finished = result.state == "done"
            return result, Generation(number=0, num_positions=0, is_champion=True) if is_finished else None
        device = open_device(self.device).device
        # The replay buffer, newest generation first.
        oldest = max(1, number - self.config.loop.window + 1)
        played = [self._games(generation, state, device) for generation in range(number, oldest - 1, -1)]
        self.message(f"generation {number} trains on {sum(map(len, played)):,} positions of {len(played)} generations")
        loop = self.config.loop
        changes = {
            "init_from": str(run_path(self.folder, state.champion)),
            "epochs": loop.epochs,
            "lr": loop.lr,
            "seed": self.config.seed + number,
        }
        recipe = GenerationRecipe(played, size=self.config.default_size, fingerprint=f"generation {number}")
        result = self._train(recipe, number, **changes)
        if result.state != "done":
            return result, None
        rating = self._gate(number, state.champion, device)
        is_better = rating.win_rate >= loop.gate
        verdict = "becomes champion" if is_better else f"does not reach {format_percent(loop.gate)}: the champion stays"
        interval = f"{format_percent(rating.low, 1)} to {format_percent(rating.high, 1)}"
        self.message(
            f"generation {number} wins {format_percent(rating.win_rate, 1)} ({interval}) of "
            f"{rating.num_games} games against generation {state.champion}, and {verdict}"
        )
        return result, Generation(
            number=number,
            num_positions=len(played[0]),
            win_rate=rating.win_rate,
            low=rating.low,
            high=rating.high,
            is_champion=is_better,
        )

    def _games(self, number: int, state: SelfPlayState, device: AbstractDevice) -> SelfPlayGames:
        """Return the self-play games for a generation. Read them from disk, or let the champion play them."""
        path = games_path(self.folder, number)
        games = read_self_games(path)
        if games is None:
            loop = self.config.loop
            champion = state.champion_before(number)
            assert champion is not None
            self.message(f"generation {number}: {loop.games} games with {loop.simulations} simulations per move")
            games = play_self_games(
                SearchPlayer(
                    self._net(champion, device),
                    SearchOptions(simulations=loop.simulations, noise_fraction=_NOISE_FRACTION),
                ),
                size=self.config.default_size,
                num_games=loop.games,
                free_moves=loop.free_moves,
                # The large factor keeps the seeds of all generations distinct, even for runs with adjacent seeds.
                seed=self.config.seed + 1_000_003 * number,
            )
            write_self_games(path, games)
        return games

    def _train(self, recipe: HexRecipe, number: int, **changes: Any) -> TrainResult:
        # Use the default options of the loop, so that changing them does not prevent resuming a generation.
        config = self.config.model_copy(update={**changes, "selfplay": False, "loop": SelfPlayOptions()})
        return train_recipe(
            recipe,
            ResolvedConfig(config=config, given=self.resolved.given),
            run=run_path(self.folder, number),
            device=self.device,
            command=list(self.command),
            on_event=self.on_event,
        )

    def _gate(self, number: int, champion: int, device: AbstractDevice) -> Rating:
        """Return the rating of a generation from a match against the champion, without noise."""
        players = [self._for_gate(self._net(generation, device)) for generation in (number, champion)]
        return rate(play_match(players[0], players[1], self._openings(number), seed=number).tolist())

    def _openings(self, number: int) -> Boards:
        return draw_openings(
            self.config.loop.gate_games // 2,
            size=self.config.default_size,
            num_stones=_OPENING_STONES,
            seed=self.config.seed + 7_919 * number,
        )

    def _check_openings(self) -> None:
        """Raise UsageError before training starts if the board has too few openings for `gate_games`."""
        try:
            self._openings(1)
        except UsageError as error:
            raise UsageError(error.what, got=error.got, try_="a smaller loop.gate_games, or a larger size") from None

    def _for_gate(self, net: NetPlayer) -> Player:
        simulations = self.config.loop.gate_simulations
        return SearchPlayer(net, SearchOptions(simulations=simulations)) if simulations else net

    def _net(self, number: int, device: AbstractDevice) -> NetPlayer:
        path = run_path(self.folder, number)
        net, _ = load_net(path, device=device)
        return NetPlayer(net, device, name=path.name)
