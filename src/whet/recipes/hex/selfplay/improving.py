"""How does a net get better by itself? Generation after generation: play, learn, and stay only if it wins.

Every part is a function of the seed and of what lies in the folder, and is written when it is whole: games, then the
run that learns from them (which resumes to the same bits), then the state. Said again, the command goes on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whet.base.errors import UsageError
from whet.base.units import format_percent
from whet.config.resolve import ResolvedConfig
from whet.device.abstract import AbstractDevice
from whet.device.open import open_device
from whet.hex.board import Boards
from whet.recipes.hex.arena.match import Player, play_match
from whet.recipes.hex.arena.openings import draw_openings
from whet.recipes.hex.arena.rating import Rating, rate
from whet.recipes.hex.config import HexConfig, Loop
from whet.recipes.hex.opponents import load_net
from whet.recipes.hex.players import NetPlayer, SearchPlayer
from whet.recipes.hex.recipe import HexRecipe
from whet.recipes.hex.search.mcts import Search
from whet.recipes.hex.selfplay.learning import GenerationRecipe
from whet.recipes.hex.selfplay.playing import Played, play_itself, read_played, write_played
from whet.recipes.hex.selfplay.state import Generation, State, games_path, open_state, run_path, write_state
from whet.recipes.runner import train_recipe
from whet.run import lock
from whet.training.callbacks.event_log import EventHandler
from whet.training.loop import TrainResult

_NOISE_SHARE = 0.25
"""Of the root's priors in self-play, as in AlphaZero."""
_OPENING_STONES = 2


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """A self-play in its folder."""

    folder: Path
    resolved: ResolvedConfig[HexConfig]
    device: str
    command: Sequence[str]
    say: Callable[[str], None]
    show: EventHandler | None

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

    def _generation(self, number: int, state: State) -> tuple[TrainResult, Generation | None]:
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

    def _played(self, number: int, state: State, device: AbstractDevice) -> Played:
        """What the champion of that time played; played now where it is missing or damaged, the same by its seed."""
        path = games_path(self.folder, number)
        found = read_played(path)
        if found is None:
            loop = self.config.loop
            champion = state.champion_before(number)
            assert champion is not None
            self.say(f"generation {number}: {loop.games} games with {loop.simulations} simulations a move")
            found = play_itself(
                SearchPlayer(
                    self._net(champion, device), Search(simulations=loop.simulations, noise_share=_NOISE_SHARE)
                ),
                size=self.config.default_size,
                num_games=loop.games,
                free_moves=loop.free_moves,
                seed=self.config.seed + 1_000_003 * number,
            )
            write_played(path, found)
        return found

    def _train(self, recipe: HexRecipe, number: int, **changes: Any) -> TrainResult:
        # What the loop does is not the training's: a longer loop goes on with a generation that has begun.
        config = self.config.model_copy(update={**changes, "selfplay": False, "loop": Loop()})
        return train_recipe(
            recipe,
            ResolvedConfig(config=config, given=self.resolved.given),
            run=run_path(self.folder, number),
            device=self.device,
            command=list(self.command),
            show=self.show,
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

    def _for_gate(self, net: NetPlayer) -> Player:
        simulations = self.config.loop.gate_simulations
        return SearchPlayer(net, Search(simulations=simulations)) if simulations else net

    def _net(self, number: int, device: AbstractDevice) -> NetPlayer:
        path = run_path(self.folder, number)
        net, _ = load_net(path, device=device)
        return NetPlayer(net, device, name=path.name)
