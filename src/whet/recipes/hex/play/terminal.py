"""A game in the terminal."""

from collections.abc import Collection
from dataclasses import dataclass, field

from whet.base.errors import UsageError
from whet.recipes.hex.game.board import BLUE, COLORS, EMPTY, RED, SWAP, other, parse_cell
from whet.recipes.hex.game.game import Game, replay
from whet.recipes.hex.game.players import Player
from whet.recipes.hex.play.view import GameView, view_game

_STONES = ".BR"


def board_lines(view: GameView, *, hints: Collection[int] = ()) -> list[str]:
    """The board: B and R are stones, (B) the last one, * a suggestion.

    >>> from whet.recipes.hex.play.view import look
    >>> from whet.recipes.hex.game.players import RandomPlayer
    >>> print("\\n".join(board_lines(look(RandomPlayer(), [4, 0], size=3))))
       a b c
      BBBBBBBB
    1 R(R). . R
     2 R . B . R
      3 R . . . R
         BBBBBBBB
    """
    size, margin = view.size, 2
    edge = "B" * (2 * size + 2)
    lines = [" " * (margin + 1) + " ".join(chr(ord("a") + column) for column in range(size)), " " * margin + edge]
    for row in range(size):
        text = ""
        for column in range(size):
            cell = row * size + column
            stone = "*" if cell in hints else _STONES[view.cells[cell]]
            before = "(" if cell == view.last else ")" if column and cell - 1 == view.last else " "
            text += before + stone
        text += ")" if view.last == row * size + size - 1 else " "
        lines.append(" " * row + f"{row + 1:<{margin}}R{text}R")
    return [*lines, " " * (margin + size) + edge]


HELP = (
    "c4      put a stone: a letter for the column, a number for the row",
    "swap    as red's first move: take over blue's stone, mirrored",
    "hint    what the player would do in your place",
    "undo    take back your last move and the answer to it",
    "new     another game; new red and new blue choose your color",
    "resign  give up; quit leaves",
)


@dataclass
class TerminalGame:
    """One person against one player."""

    player: Player
    size: int
    color: int = BLUE
    """The person's."""
    seed: int = 0
    is_over: bool = field(default=False, init=False)
    """Whether the person has left."""
    _moves: tuple[int, ...] = field(default=(), init=False)
    _resigned: bool = field(default=False, init=False)

    def begin(self) -> list[str]:
        """The first lines."""
        edges = "top and bottom" if self.color == BLUE else "left and right"
        return [
            f"you are {COLORS[self.color]} and join {edges}; blue begins. `help` lists the words.",
            *self._go_on(),
        ]

    def say(self, line: str) -> list[str]:
        """Answers one line; what cannot be done is told, and changes nothing."""
        words = line.strip().lower().split()
        if not words:
            return []
        try:
            return self._obey(words[0], words[1:])
        except UsageError as error:
            return str(error).splitlines()

    def _obey(self, word: str, rest: list[str]) -> list[str]:
        if word in ("quit", "exit", "q"):
            self.is_over = True
            return []
        if word in ("help", "?"):
            return list(HELP)
        if word == "new":
            return self._new(rest)
        if word == "undo":
            return self._undo()
        if self._resigned or self._game.winner != EMPTY:
            raise UsageError("the game is over", got=word, try_="new, undo or quit")
        if word in ("hint", "hints"):
            return self._hint()
        if word == "resign":
            self._resigned = True
            return [f"{COLORS[other(self.color)]} ({self.player.name}) wins: you have resigned"]
        move = SWAP if word == "swap" else parse_cell(word, size=self.size)
        self._moves = replay((*self._moves, move), size=self.size).moves
        return self._go_on()

    @property
    def _game(self) -> Game:
        return replay(self._moves, size=self.size)

    def _look(self) -> GameView:
        return view_game(self.player, self._moves, size=self.size, seed=self.seed)

    def _go_on(self) -> list[str]:
        """The board after the player's answer, if it is the player's turn."""
        view, told = self._look(), []
        if view.winner is None and view.mover != COLORS[self.color]:
            assert view.reply is not None
            move = SWAP if view.reply == "swap" else parse_cell(view.reply, size=self.size)
            self._moves, told = (*self._moves, move), [f"{self.player.name}: {view.reply}"]
            view = self._look()
        return [*told, *board_lines(view), self._standing(view)]

    def _standing(self, view: GameView) -> str:
        if view.winner is not None:
            return "you win" if view.winner == COLORS[self.color] else f"{view.winner} ({self.player.name}) wins"
        chance = view.blue_wins if self.color == BLUE else 1 - view.blue_wins
        choice = "; you may swap" if view.may_swap else ""
        return f"your move ({COLORS[self.color]}): {self.player.name} gives you {100 * chance:.0f} %{choice}"

    def _hint(self) -> list[str]:
        view = self._look()
        named = ", ".join(f"{one.name} {100 * one.share:.0f} %" for one in view.suggestions)
        named = f"a swap; else {named}" if view.reply == "swap" else named
        return [*board_lines(view, hints=[one.cell for one in view.suggestions]), f"{self.player.name} likes {named}"]

    def _undo(self) -> list[str]:
        if self._resigned:
            self._resigned = False
            return self._go_on()
        # Back to the last position in which the person was to move.
        for length in range(len(self._moves) - 1, -1, -1):
            if replay(self._moves[:length], size=self.size).mover == self.color:
                self._moves = self._moves[:length]
                return self._go_on()
        raise UsageError("there is nothing of yours to take back", got="undo", try_="a move first")

    def _new(self, rest: list[str]) -> list[str]:
        colors = {"blue": BLUE, "red": RED}
        if rest and rest[0] not in colors:
            raise UsageError("no such color", got=rest[0], try_="new blue or new red")
        self.color = colors[rest[0]] if rest else self.color
        self._moves, self._resigned, self.seed = (), False, self.seed + 1
        return self.begin()
