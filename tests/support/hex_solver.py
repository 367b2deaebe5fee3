"""A perfect solver for boards up to 4x4."""

from dataclasses import dataclass, field
from functools import cache

from whet.base.errors import UsageError
from whet.recipes.hex.game.board import BLUE, NEIGHBORS, RED
from whet.recipes.hex.game.symmetry import MIRRORED, TURNED, cell_maps

MAX_SOLVED_SIZE = 4


@dataclass(slots=True)
class Solver:
    """Finds the winner with perfect play on boards of one size; results are memoized."""

    size: int
    known: dict[tuple[int, int], bool] = field(default_factory=dict)
    """Whether the mover wins, by the bit masks of mover and opponent; the mover connects top and bottom."""

    def __post_init__(self) -> None:
        if not 2 <= self.size <= MAX_SOLVED_SIZE:
            raise UsageError("the board is too large to solve", got=f"size {self.size}", try_=f"2 to {MAX_SOLVED_SIZE}")

    def winner(self, blue: int, red: int, *, mover: int) -> int:
        """Return the winner with perfect play; bit c of a mask is cell c."""
        if mover == BLUE:
            return BLUE if self._wins(blue, red) else RED
        return RED if self._wins(_moved(red, MIRRORED, self.size), _moved(blue, MIRRORED, self.size)) else BLUE

    def first_moves(self) -> dict[int, int]:
        """Return the winner after each first move of blue."""
        return {cell: self.winner(1 << cell, 0, mover=RED) for cell in range(self.size**2)}

    def _wins(self, own: int, other: int) -> bool:
        """Whether the mover, who connects top and bottom and has not lost yet, wins."""
        rotated = (_moved(own, TURNED, self.size), _moved(other, TURNED, self.size))
        key = min((own, other), rotated)
        result = self.known.get(key)
        if result is None:
            result = self.known[key] = self._search(own, other)
        return result

    def _search(self, own: int, other: int) -> bool:
        free = [cell for cell in _from_the_middle(self.size) if not (own | other) >> cell & 1]
        if any(_connects(own | 1 << cell, self.size) for cell in free):
            return True
        mirrored = _moved(other, MIRRORED, self.size)
        # The opponent's winning moves must be blocked now; two of them cannot both be.
        threats = [cell for cell in free if _connects(mirrored | 1 << _mirrored_cell(cell, self.size), self.size)]
        if len(threats) > 1:
            return False
        return any(not self._wins(mirrored, _moved(own | 1 << cell, MIRRORED, self.size)) for cell in threats or free)


@cache
def _from_the_middle(size: int) -> tuple[int, ...]:
    # Better moves first.
    middle = (size - 1) / 2
    return tuple(sorted(range(size**2), key=lambda cell: abs(cell // size - middle) + abs(cell % size - middle)))


def _mirrored_cell(cell: int, size: int) -> int:
    return cell % size * size + cell // size


@cache
def _moved(mask: int, symmetry: int, size: int) -> int:
    """Apply a symmetry to a mask."""
    image = cell_maps(size)[symmetry].tolist()
    return sum(1 << image[cell] for cell in range(size**2) if mask >> cell & 1)


@cache
def _connects(mask: int, size: int) -> bool:
    """Whether the cells of a mask connect top and bottom."""
    reached, rest = 0, mask & (1 << size) - 1
    last_row = ((1 << size) - 1) << size * (size - 1)
    while rest:
        cell = rest.bit_length() - 1
        reached |= 1 << cell
        rest = (rest | _neighbors(cell, size) & mask) & ~reached
    return bool(reached & last_row)


@cache
def _neighbors(cell: int, size: int) -> int:
    row, column = divmod(cell, size)
    near = ((row + down, column + right) for down, right in NEIGHBORS)
    return sum(1 << r * size + c for r, c in near if 0 <= r < size and 0 <= c < size)
