"""Speed of the Hex rules on one core: winner checks (compared with a plain union-find), evaluations, games and imports.

The two-distance player evaluates boards and plays games. Seconds are CPU seconds, so other load on the machine does not
count.

python benchmarks/hex_rules.py [--sizes 5,11,13,19] [--boards 200000]
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from whet.recipes.hex.game.board import BLUE, EMPTY, NEIGHBORS, RED
from whet.recipes.hex.game.game import replay
from whet.recipes.hex.game.games import Games, play_games, unroll
from whet.recipes.hex.game.notation import write_game
from whet.recipes.hex.game.players import TwoDistancePlayer
from whet.recipes.hex.game.record_import import import_records
from whet.recipes.hex.game.rules import legal, winners


def random_boards(count: int, *, size: int, seed: int = 0) -> np.ndarray:
    """Draw boards of all densities, half of them full."""
    generator = np.random.default_rng(seed)
    boards = generator.integers(1, 3, (count, size, size), dtype=np.int8)
    density = np.where(generator.random(count) < 0.5, 1.0, generator.random(count))
    boards[generator.random(boards.shape, dtype=np.float32) > density[:, None, None]] = EMPTY
    return boards


def per_second(function, boards: np.ndarray, *, repeats: int = 5) -> list[float]:
    """Return boards per second, sorted."""
    rates = []
    for _ in range(repeats):
        begin = time.process_time()
        function(boards)
        rates.append(len(boards) / (time.process_time() - begin))
    return sorted(rates)


# Offsets of the edge nodes, which follow the cells: top, bottom, left, right.
FIRST_EDGE, LAST_EDGE = {BLUE: 0, RED: 2}, {BLUE: 1, RED: 3}


class ChainTracker:
    """Tracks chains of stones and the winner, with union-find over the cells and the four edges."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._colors = [EMPTY] * (size * size)
        self._parents = list(range(size * size + 4))
        self.winner = EMPTY

    def put(self, cell: int, color: int) -> None:
        """Add a stone on an empty cell."""
        size, edge = self._size, self._size**2
        self._colors[cell] = color
        row, column = divmod(cell, size)
        across = row if color == BLUE else column
        if across == 0:
            self._join(cell, edge + FIRST_EDGE[color])
        if across == size - 1:
            self._join(cell, edge + LAST_EDGE[color])
        for down, right in NEIGHBORS:
            if 0 <= row + down < size and 0 <= column + right < size:
                neighbor = (row + down) * size + column + right
                if self._colors[neighbor] == color:
                    self._join(cell, neighbor)
        if self._root(edge + FIRST_EDGE[color]) == self._root(edge + LAST_EDGE[color]):
            self.winner = color

    def _root(self, node: int) -> int:
        parents = self._parents
        while parents[node] != node:
            parents[node] = parents[parents[node]]  # Path halving keeps the trees flat.
            node = parents[node]
        return node

    def _join(self, one: int, two: int) -> None:
        self._parents[self._root(one)] = self._root(two)


def one_by_one(boards: np.ndarray) -> list[int]:
    """Return the winners by union-find, one board at a time."""
    result = []
    for board in boards.reshape(len(boards), -1).tolist():
        chains = ChainTracker(int(len(board) ** 0.5))
        for cell, color in enumerate(board):
            if color != EMPTY:
                chains.put(cell, color)
        result.append(chains.winner)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="5,11,13,19")
    parser.add_argument("--boards", type=int, default=200_000)
    given = parser.parse_args()
    print("size  winners/s (median, least)      legal/s   union-find/s  ratio")
    for size in map(int, given.sizes.split(",")):
        boards = random_boards(given.boards, size=size)
        some = boards[:2000]
        assert winners(some).tolist() == one_by_one(some)
        fast, moves, slow = (
            per_second(winners, boards),
            per_second(legal, boards),
            per_second(one_by_one, some, repeats=3),
        )
        ratio = fast[2] / slow[1]
        print(f"{size:4}  {fast[2]:12,.0f} {fast[0]:12,.0f} {moves[2]:15,.0f} {slow[1]:12,.0f} {ratio:8.0f}")
    print("size  two-distance boards/s  self-play games/s  moves a game  imported games/s")
    for size in map(int, given.sizes.split(",")):
        count = 4096 if size < 9 else 512
        games, made = measured(lambda size=size, count=count: played(size, count))
        positions = unroll(games.take(slice(400))).positions
        positions = positions.take(winners(positions.boards) == EMPTY)
        _, judged = measured(lambda positions=positions: TwoDistancePlayer().analyze(positions))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "games.trmph"
            lines = (write_game(replay(games.move_list(game), size=size)) for game in range(len(games)))
            path.write_text("\n".join(lines))
            _, taken = measured(lambda path=path: import_records(path, into=path.parent / "set"))
        rates = len(positions) / judged, len(games) / made, games.lengths.mean(), len(games) / taken
        print(f"{size:4}  {rates[0]:21,.0f}  {rates[1]:17,.0f}  {rates[2]:12.1f}  {rates[3]:16,.0f}")


def played(size: int, count: int) -> Games:
    return play_games(TwoDistancePlayer(), size=size, count=count, seed=0)


def measured(work):
    """Call a function, and return its result and CPU seconds."""
    begin = time.process_time()
    return work(), time.process_time() - begin


if __name__ == "__main__":
    main()
