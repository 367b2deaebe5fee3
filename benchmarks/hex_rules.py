"""How many boards a second are checked for a winner, on one core? Beside the plain union-find, on the same boards.

python benchmarks/hex_rules.py [--sizes 5,11,13,19] [--boards 200000]
"""

import argparse
import time

import numpy as np

from whet.hex.board import EMPTY
from whet.hex.chains import Chains
from whet.hex.connecting import winners
from whet.hex.rules import legal


def random_boards(count: int, *, size: int, seed: int = 0) -> np.ndarray:
    """Boards of all densities, half of them full."""
    generator = np.random.default_rng(seed)
    boards = generator.integers(1, 3, (count, size, size), dtype=np.int8)
    density = np.where(generator.random(count) < 0.5, 1.0, generator.random(count))
    boards[generator.random(boards.shape, dtype=np.float32) > density[:, None, None]] = EMPTY
    return boards


def per_second(function, boards: np.ndarray, *, repeats: int = 5) -> list[float]:
    """Boards a second, sorted."""
    rates = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function(boards)
        rates.append(len(boards) / (time.perf_counter() - begin))
    return sorted(rates)


def one_by_one(boards: np.ndarray) -> list[int]:
    """The winners by union-find, board after board."""
    found = []
    for board in boards.reshape(len(boards), -1).tolist():
        chains = Chains(int(len(board) ** 0.5))
        for cell, colour in enumerate(board):
            if colour != EMPTY:
                chains.put(cell, colour)
        found.append(chains.winner)
    return found


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


if __name__ == "__main__":
    main()
