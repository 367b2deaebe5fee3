"""How does a board look as text? Rows shifted by half a cell; blue's edges are above and below, red's at the sides."""

from collections.abc import Collection

from whet.hex.play.view import GameView

_STONES = ".BR"


def board_lines(view: GameView, *, hints: Collection[int] = ()) -> list[str]:
    """The board: B and R are stones, (B) the last one, * a suggestion.

    >>> from whet.hex.play.view import look
    >>> from whet.hex.player import RandomPlayer
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
