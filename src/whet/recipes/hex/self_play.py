"""Self-play training: generations play, train and are gated against the champion."""

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
from whet.recipes.hex.arena import Contestant, Rating, draw_openings, play_match, random_boards, rate
from whet.recipes.hex.config import HexConfig, SelfPlayOptions
from whet.recipes.hex.data import Columns, HexData, read_arrays, with_half_turns, write_arrays
from whet.recipes.hex.game.board import NO_MOVE, Boards, Cells
from whet.recipes.hex.game.rules import flip_perspective, mover_has_won, place_stones
from whet.recipes.hex.net_players import NetPlayer, SearchPlayer, load_net
from whet.recipes.hex.recipe import HexRecipe
from whet.recipes.hex.search import Floats, SearchOptions
from whet.recipes.hex.self_play_state import Generation, SelfPlayState, games_path, open_state, run_path, write_state
from whet.recipes.runner import train_recipe
from whet.run import lock
from whet.training.callbacks.event_log import EventHandler
from whet.training.loop import TrainResult

MAX_OPENING_STONES = 3
"""Games begin with 0 to 3 random stones, so that it learns to go on from anything."""


@dataclass(frozen=True, slots=True)
class SelfPlayGames:
    """Positions of games, as their movers saw them."""

    boards: Boards
    shares: Floats
    """(batch, cells): of the looks at each move; all 0 where the game is over."""
    wins: NDArray[np.float32]
    """(batch,): whether the mover won."""
    games: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.boards)

    @property
    def moves(self) -> Cells:
        """(batch,): the move that was looked at most; NO_MOVE where the game is over."""
        return np.where(self.shares.max(1) > 0, self.shares.argmax(1), NO_MOVE)


def play_self_games(player: SearchPlayer, *, size: int, num_games: int, free_moves: int, seed: int) -> SelfPlayGames:
    """Games in step; in the first `free_moves` moves are drawn by the looks at them, later the best is taken."""
    draw = np.random.default_rng(seed)
    boards = np.concatenate(
        [random_boards(-(-num_games // 4), size=size, num_stones=n, draw=draw) for n in range(MAX_OPENING_STONES + 1)]
    )[:num_games]
    games, ply = np.arange(len(boards)), 0
    seen: list[tuple[Boards, Floats, NDArray[np.int64]]] = []
    # Whether the mover of a game's first position wins.
    is_first_winner = np.zeros(len(boards), dtype=bool)
    plies = []
    while len(games):
        shares = player.search(boards, draw=draw).shares
        luck = draw.gumbel(size=shares.shape)
        with np.errstate(divide="ignore"):
            moves = (np.log(shares) + luck).argmax(1) if ply < free_moves else shares.argmax(1)
        seen.append((boards, shares, games))
        plies.append(np.full(len(games), ply))
        after = place_stones(boards, moves)
        is_over = mover_has_won(after)
        ply += 1
        if is_over.any():
            # The position after the end teaches the value: its mover has lost.
            seen.append((flip_perspective(after[is_over]), np.zeros_like(shares[is_over]), games[is_over]))
            plies.append(np.full(int(is_over.sum()), ply))
            is_first_winner[games[is_over]] = ply % 2 == 1
        boards, games = flip_perspective(after[~is_over]), games[~is_over]
    numbers = np.concatenate([games for _, _, games in seen])
    is_first = np.concatenate(plies) % 2 == 0
    return SelfPlayGames(
        boards=np.concatenate([boards for boards, _, _ in seen]),
        shares=np.concatenate([shares for _, shares, _ in seen]).astype(np.float32),
        wins=(is_first_winner[numbers] == is_first).astype(np.float32),
        games=numbers,
    )


def write_self_games(path: Path, played: SelfPlayGames) -> None:
    """Whole or not at all."""
    write_arrays(path, {name: getattr(played, name) for name in _ARRAYS})


def read_self_games(path: Path) -> SelfPlayGames | None:
    """What was written, or None where it is missing or damaged: then it is played again, the same by its seed."""
    kept = read_arrays(path)
    return SelfPlayGames(**kept) if kept is not None and {*kept} == {*_ARRAYS} else None


_ARRAYS = ("boards", "shares", "wins", "games")


_HELD_OUT_EVERY = 20
"""Every twentieth game is for dev, and every twentieth for test."""


class GenerationRecipe(HexRecipe):
    """Learns from what was played; by shares of looks where others learn from single moves."""

    def __init__(self, played: Sequence[SelfPlayGames], *, size: int, fingerprint: str) -> None:
        self._played = played
        self._size = size
        self._fingerprint = fingerprint

    def data(self, config: HexConfig) -> HexData:
        parts = {name: [] for name in ("train", "val", "test")}  # type: dict[str, list[Columns]]
        for played in self._played:
            part = played.games % _HELD_OUT_EVERY
            for name, mask in (("train", part > 1), ("val", part == 0), ("test", part == 1)):
                parts[name].append(_columns(played, mask))
        train, val, test = (_concatenate(columns) for columns in parts.values())
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


_NOISE_SHARE = 0.25
"""Of the root's priors in self-play, as in AlphaZero."""
_OPENING_STONES = 2


@dataclass(frozen=True, kw_only=True)
class SelfPlay:
    """A self-play in its folder."""

    folder: Path
    resolved: ResolvedConfig[HexConfig]
    device: str
    command: Sequence[str]
    say: Callable[[str], None]
    on_event: EventHandler | None

    @property
    def config(self) -> HexConfig:
        """What was asked for."""
        return self.resolved.config

    def run(self) -> int:
        """Until all generations are over, or a training was asked to stop; the exit code."""
        self._refuse_few_openings()
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
            self.say(f"all {self.config.loop.generations} generations are over; the champion is of {state.champion}")
        return 0

    def _generation(self, number: int, state: SelfPlayState) -> tuple[TrainResult, Generation | None]:
        if number == 0 or state.champion is None:
            self.say("generation 0 learns from games of the two-distance player")
            result = self._train(HexRecipe(), number)
            is_over = result.state == "done"
            return result, Generation(number=0, num_positions=0, is_champion=True) if is_over else None
        device = open_device(self.device).device
        # The replay buffer, the newest first.
        oldest = max(1, number - self.config.loop.window + 1)
        played = [self._played(one, state, device) for one in range(number, oldest - 1, -1)]
        self.say(f"generation {number} learns from {sum(map(len, played)):,} positions of {len(played)} generations")
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
        verdict = "is champion" if is_better else f"does not reach {format_percent(loop.gate)}: the champion stays"
        interval = f"{format_percent(rating.low, 1)} to {format_percent(rating.high, 1)}"
        self.say(
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

    def _played(self, number: int, state: SelfPlayState, device: AbstractDevice) -> SelfPlayGames:
        """What the champion of that time played; played now where it is missing or damaged, the same by its seed."""
        path = games_path(self.folder, number)
        found = read_self_games(path)
        if found is None:
            loop = self.config.loop
            champion = state.champion_before(number)
            assert champion is not None
            self.say(f"generation {number}: {loop.games} games with {loop.simulations} simulations a move")
            found = play_self_games(
                SearchPlayer(
                    self._net(champion, device),
                    SearchOptions(simulations=loop.simulations, noise_fraction=_NOISE_SHARE),
                ),
                size=self.config.default_size,
                num_games=loop.games,
                free_moves=loop.free_moves,
                seed=self.config.seed + 1_000_003 * number,
            )
            write_self_games(path, found)
        return found

    def _train(self, recipe: HexRecipe, number: int, **changes: Any) -> TrainResult:
        # What the loop does is not the training's: a longer loop goes on with a generation that has begun.
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
        """Both without noise, from openings that are drawn for this gate."""
        players = [self._for_gate(self._net(generation, device)) for generation in (number, champion)]
        return rate(play_match(players[0], players[1], self._openings(number), seed=number).tolist())

    def _openings(self, number: int) -> Boards:
        return draw_openings(
            self.config.loop.gate_games // 2,
            size=self.config.default_size,
            num_stones=_OPENING_STONES,
            seed=self.config.seed + 7_919 * number,
        )

    def _refuse_few_openings(self) -> None:
        """Before anything is learned: a small board has too few of them for many games."""
        try:
            self._openings(1)
        except UsageError as error:
            raise UsageError(error.what, got=error.got, try_="a smaller loop.gate_games, or a larger size") from None

    def _for_gate(self, net: NetPlayer) -> Contestant:
        simulations = self.config.loop.gate_simulations
        return SearchPlayer(net, SearchOptions(simulations=simulations)) if simulations else net

    def _net(self, number: int, device: AbstractDevice) -> NetPlayer:
        path = run_path(self.folder, number)
        net, _ = load_net(path, device=device)
        return NetPlayer(net, device, name=path.name)
