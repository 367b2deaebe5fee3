"""Play a game in the terminal."""

from collections.abc import Collection
from dataclasses import dataclass, field

from whet.base.errors import UsageError
from whet.recipes.hex.game.board import BLUE, COLORS, EMPTY, RED, SWAP, other, parse_cell
from whet.recipes.hex.game.game import Game, replay
from whet.recipes.hex.game.players import Player
from whet.recipes.hex.play.view import GameView, view_game

_STONES = ".BR"


def board_lines(view: GameView, *, hints: Collection[int] = ()) -> list[str]:
    """Draw the board: B and R are stones, (B) the last one, * a suggestion.

    >>> from whet.recipes.hex.play.view import view_game
    >>> from whet.recipes.hex.game.players import RandomPlayer
    >>> print("\\n".join(board_lines(view_game(RandomPlayer(), [4, 0], size=3))))
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
    "c4      place a stone: a letter for the column, a number for the row",
    "swap    as red's first move: take over blue's stone, mirrored",
    "hint    show the player's suggestions for your move",
    "undo    take back your last move and the reply",
    "new     start another game; new red or new blue selects your color",
    "resign  give up",
    "quit    leave",
)


@dataclass
class TerminalGame:
    """A game of a user against a player."""

    player: Player
    size: int
    color: int = BLUE
    """The color of the user."""
    seed: int = 0
    is_over: bool = field(default=False, init=False)
    """Whether the user has quit."""
    _moves: tuple[int, ...] = field(default=(), init=False)
    _resigned: bool = field(default=False, init=False)

    def begin(self) -> list[str]:
        """Return the lines to show at the start."""
        edges = "top and bottom" if self.color == BLUE else "left and right"
        return [
            f"you are {COLORS[self.color]} and connect {edges}; blue moves first. Type help for the commands.",
            *self._continue(),
        ]

    def enter(self, line: str) -> list[str]:
        """Execute a command line and return the output. An invalid command changes nothing."""
        words = line.strip().lower().split()
        if not words:
            return []
        try:
            return self._execute(words[0], words[1:])
        except UsageError as error:
            return str(error).splitlines()

    def _execute(self, command: str, rest: list[str]) -> list[str]:
        if command in ("quit", "exit", "q"):
            self.is_over = True
            return []
        if command in ("help", "?"):
            return list(HELP)
        if command == "new":
            return self._new(rest)
        if command == "undo":
            return self._undo()
        if self._resigned or self._game.winner != EMPTY:
            raise UsageError("the game is over", got=command, try_="new, undo or quit")
        if command in ("hint", "hints"):
            return self._hint()
        if command == "resign":
            self._resigned = True
            return [f"{COLORS[other(self.color)]} ({self.player.name}) wins: you have resigned"]
        move = SWAP if command == "swap" else parse_cell(command, size=self.size)
        self._moves = replay((*self._moves, move), size=self.size).moves
        return self._continue()

    @property
    def _game(self) -> Game:
        return replay(self._moves, size=self.size)

    def _view(self) -> GameView:
        return view_game(self.player, self._moves, size=self.size, seed=self.seed)

    def _continue(self) -> list[str]:
        """Let the player reply if it is the player's turn, and return the board."""
        view, lines = self._view(), []
        if view.winner is None and view.mover != COLORS[self.color]:
            assert view.reply is not None
            move = SWAP if view.reply == "swap" else parse_cell(view.reply, size=self.size)
            self._moves, lines = (*self._moves, move), [f"{self.player.name}: {view.reply}"]
            view = self._view()
        return [*lines, *board_lines(view), self._status(view)]

    def _status(self, view: GameView) -> str:
        if view.winner is not None:
            return "you win" if view.winner == COLORS[self.color] else f"{view.winner} ({self.player.name}) wins"
        chance = view.blue_wins if self.color == BLUE else 1 - view.blue_wins
        choice = "; you may swap" if view.may_swap else ""
        return f"your move ({COLORS[self.color]}): {self.player.name} gives you {100 * chance:.0f} %{choice}"

    def _hint(self) -> list[str]:
        view = self._view()
        named = ", ".join(f"{hint.name} {100 * hint.share:.0f} %" for hint in view.suggestions)
        named = f"a swap; else {named}" if view.reply == "swap" else named
        return [
            *board_lines(view, hints=[hint.cell for hint in view.suggestions]),
            f"{self.player.name} suggests {named}",
        ]

    def _undo(self) -> list[str]:
        if self._resigned:
            self._resigned = False
            return self._continue()
        # Return to the last position in which it was the user's turn.
        for length in range(len(self._moves) - 1, -1, -1):
            if replay(self._moves[:length], size=self.size).mover == self.color:
                self._moves = self._moves[:length]
                return self._continue()
        raise UsageError("there is no move to take back", got="undo", try_="make a move first")

    def _new(self, rest: list[str]) -> list[str]:
        colors = {"blue": BLUE, "red": RED}
        if rest and rest[0] not in colors:
            raise UsageError("no such color", got=rest[0], try_="new blue or new red")
        self.color = colors[rest[0]] if rest else self.color
        self._moves, self._resigned, self.seed = (), False, self.seed + 1
        return self.begin()
