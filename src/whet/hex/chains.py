"""Who wins the game that is being played? Union-find over the stones and the four edges, one stone at a time."""

from whet.hex.board import BLUE, EMPTY, NEIGHBOURS, RED

_FIRST_EDGE, _LAST_EDGE = {BLUE: 0, RED: 2}, {BLUE: 1, RED: 3}


class Chains:
    """The chains of one board; it only grows."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._colours = [EMPTY] * (size * size)
        self._parents = list(range(size * size + 4))
        self.winner = EMPTY

    def put(self, cell: int, colour: int) -> None:
        """One more stone, on a cell that is empty."""
        size, edge = self._size, self._size**2
        self._colours[cell] = colour
        row, column = divmod(cell, size)
        across = row if colour == BLUE else column
        if across == 0:
            self._join(cell, edge + _FIRST_EDGE[colour])
        if across == size - 1:
            self._join(cell, edge + _LAST_EDGE[colour])
        for down, right in NEIGHBOURS:
            if 0 <= row + down < size and 0 <= column + right < size:
                beside = (row + down) * size + column + right
                if self._colours[beside] == colour:
                    self._join(cell, beside)
        if self._root(edge + _FIRST_EDGE[colour]) == self._root(edge + _LAST_EDGE[colour]):
            self.winner = colour

    def _root(self, place: int) -> int:
        parents = self._parents
        while parents[place] != place:
            parents[place] = parents[parents[place]]
            place = parents[place]
        return place

    def _join(self, one: int, two: int) -> None:
        self._parents[self._root(one)] = self._root(two)
