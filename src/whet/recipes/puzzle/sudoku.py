"""Sudokus: a batched solver, random grids, puzzles with a unique solution, and symmetries."""

from dataclasses import dataclass
from functools import cache

import numpy as np

_CHUNK_SIZE = 512
"""Number of states processed at once. The newest states are processed first, which keeps the stack small."""


# --- grids and puzzles ------------------------------------------------------------------------------------------------


def all_grids_4x4(rng: np.random.Generator) -> np.ndarray:
    """Return all 288 solved 4x4 grids in random order, (288, 16)."""
    (grids,) = solve(to_candidates(np.zeros((1, 16), np.int8)), max_solutions=1000)
    return rng.permutation(grids)


def random_grids_9x9(number: int, rng: np.random.Generator) -> np.ndarray:
    """Return random solved grids, (number, 81). Draw the three diagonal boxes, solve the rest, and shuffle."""
    starts = np.zeros((number, 9, 9), np.int8)
    # The diagonal boxes share no row or column, so they can be drawn independently.
    for box in (slice(0, 3), slice(3, 6), slice(6, 9)):
        drawn = rng.permuted(np.tile(np.arange(1, 10, dtype=np.int8), (number, 1)), axis=1)
        starts[:, box, box] = drawn.reshape(number, 3, 3)
    solved = solve(to_candidates(starts.reshape(number, 81)), max_solutions=1, order=rng, chunk=32)
    return shuffle_grids(np.concatenate(solved), rng)


def remove_cells(grids: np.ndarray, blanks: int, rng: np.random.Generator) -> np.ndarray:
    """Return puzzles whose unique solutions are these grids. Blanks are 0.

    Cells are removed in random order, each only if the solution remains unique, until there are `blanks` blanks or all
    cells have been tried.
    """
    puzzles, number = grids.copy(), np.arange(len(grids))
    order = rng.permuted(np.tile(np.arange(grids.shape[1]), (len(grids), 1)), axis=1)
    num_blank = np.zeros(len(grids), int)
    for cells in order.T:
        is_open = num_blank < blanks
        if not is_open.any():
            break
        tried = puzzles.copy()
        tried[number, cells] = 0
        # Exclude the known digit, because any second solution must have a different digit in this cell.
        others = to_candidates(tried)
        others[number, cells] &= ~to_candidates(grids)[number, cells]
        second = solve(others[is_open], max_solutions=1)
        is_removed = is_open.copy()
        is_removed[is_open] = [not len(solutions) for solutions in second]
        puzzles[number[is_removed], cells[is_removed]] = 0
        num_blank += is_removed
    return puzzles


def shuffle_grids(cells: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Apply a random symmetry to each grid.

    Rename digits (but not blanks), transpose half of the grids, and permute bands, rows within bands, stacks, and
    columns within stacks.

    Args:
        cells: (number, cells), or (kinds, number, cells) to apply the same symmetry to a puzzle and its solution.
    """
    number, num_cells = cells.shape[-2:]
    side = round(num_cells**0.5)
    rows, columns = (_shuffled_lines(number, round(side**0.5), rng) for _ in range(2))
    source = side * rows[:, :, None] + columns[:, None, :]
    is_transposed = np.asarray(rng.random(number) < 0.5)
    source = np.where(is_transposed[:, None, None], source.swapaxes(1, 2), source).reshape(number, num_cells)
    digits = np.zeros((number, side + 1), cells.dtype)
    digits[:, 1:] = rng.permuted(np.tile(np.arange(1, side + 1), (number, 1)), axis=1)
    grid = np.arange(number)[:, None]
    shuffled: np.ndarray = digits[grid, cells[..., grid, source]]
    return shuffled


def _shuffled_lines(number: int, box: int, rng: np.random.Generator) -> np.ndarray:
    """Return random orders of rows, (number, box * box). Bands, and the rows within each band, are permuted."""
    within = rng.permuted(np.tile(np.arange(box), (number, box, 1)), axis=2)
    bands = rng.permuted(np.tile(np.arange(box), (number, 1)), axis=1)
    return (bands[:, :, None] * box + within).reshape(number, -1)


# --- solver -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Board:
    """The units (rows, columns and boxes) of grids of one size."""

    units: np.ndarray
    """(3 * side, side): the cells of each unit."""
    of_cell: np.ndarray
    """(cells, 3): the units of each cell."""
    num_bits: np.ndarray
    """(2 ** side,): the number of digits in each bit set."""


@cache
def _board(side: int) -> _Board:
    box = round(side**0.5)
    cells = np.arange(side * side).reshape(side, side)
    boxes = cells.reshape(box, box, box, box).swapaxes(1, 2).reshape(side, side)
    units = np.concatenate([cells, cells.T, boxes])
    of_cell = np.stack([np.nonzero((units == cell).any(1))[0] for cell in range(side * side)])
    return _Board(units=units, of_cell=of_cell, num_bits=np.array([n.bit_count() for n in range(1 << side)], np.uint8))


def to_candidates(puzzles: np.ndarray) -> np.ndarray:
    """Convert cells (0 for a blank, digits from 1) to bit sets of possible digits, of the same shape."""
    side = round(puzzles.shape[1] ** 0.5)
    return np.where(puzzles == 0, (1 << side) - 1, 1 << np.maximum(puzzles.astype(np.int64) - 1, 0)).astype(np.uint16)


def solve(
    candidates: np.ndarray, *, max_solutions: int, order: np.random.Generator | None = None, chunk: int = _CHUNK_SIZE
) -> list[np.ndarray]:
    """Return up to `max_solutions` solutions of each Sudoku, (solutions, cells).

    Args:
        candidates: Bit sets of possible digits, (number, cells).
        max_solutions: Stop the search for a Sudoku after this many solutions.
        order: If given, try digits in random order.
        chunk: Number of states processed at once. A small number is faster when one of very many solutions is wanted.
    """
    num_cells = candidates.shape[1]
    board = _board(round(num_cells**0.5))
    solutions: list[list[np.ndarray]] = [[] for _ in candidates]
    missing = np.full(len(candidates), max_solutions)
    # Depth-first search with a stack of states. `owners` are the indices of the Sudokus that they belong to.
    states, owners = candidates, np.arange(len(candidates))
    while len(states):
        now, now_owners = states[-chunk:], owners[-chunk:]
        states, owners = states[:-chunk], owners[:-chunk]
        # Drop states of Sudokus that already have enough solutions.
        is_wanted = missing[now_owners] > 0
        now, is_possible = _propagate(now[is_wanted], board)
        now, now_owners = now[is_possible], now_owners[is_wanted][is_possible]
        is_solved = (board.num_bits[now] == 1).all(1)
        for owner, solution in zip(now_owners[is_solved], now[is_solved], strict=True):
            if missing[owner] > 0:
                solutions[owner].append(np.log2(solution).astype(np.int8) + 1)
                missing[owner] -= 1
        branches, branch_owners = _branch(now[~is_solved], now_owners[~is_solved], board, order)
        states, owners = np.concatenate([states, branches]), np.concatenate([owners, branch_owners])
    return [np.array(grids, np.int8).reshape(-1, num_cells) for grids in solutions]


def _propagate(states: np.ndarray, board: _Board) -> tuple[np.ndarray, np.ndarray]:
    """Apply naked and hidden singles until nothing changes. Return the states, and which have no contradiction."""
    states = states.copy()
    is_possible = np.ones(len(states), bool)
    active = np.arange(len(states))
    full = np.uint16(len(board.num_bits) - 1)
    while len(active):
        now = states[active]
        is_decided = board.num_bits[now] == 1
        taken, taken_twice = _digits_in_units(np.where(is_decided, now, 0), board)
        # Naked singles: remove the digits of decided cells from the other cells of their units.
        allowed = now & ~np.where(is_decided, 0, np.bitwise_or.reduce(taken[:, board.of_cell], axis=2))
        seen, seen_twice = _digits_in_units(allowed, board)
        # Hidden singles: a digit that fits in only one cell of a unit belongs there.
        hidden_single = allowed & np.bitwise_or.reduce((seen & ~seen_twice)[:, board.of_cell], axis=2)
        after = np.where(hidden_single != 0, hidden_single, allowed).astype(np.uint16)
        is_wrong = (taken_twice != 0).any(1) | (seen != full).any(1) | (board.num_bits[hidden_single] > 1).any(1)
        is_possible[active[is_wrong]] = False
        states[active] = after
        active = active[(after != now).any(1) & ~is_wrong]
    return states, is_possible


def _digits_in_units(sets: np.ndarray, board: _Board) -> tuple[np.ndarray, np.ndarray]:
    """Return the digits that occur in each unit, and those that occur in several of its cells, as bit sets."""
    once = np.zeros((len(sets), len(board.units)), np.uint16)
    twice = np.zeros_like(once)
    for cells in board.units.T:
        digits = sets[:, cells].astype(np.uint16, copy=False)
        twice |= once & digits
        once |= digits
    return once, twice


def _branch(
    states: np.ndarray, owners: np.ndarray, board: _Board, order: np.random.Generator | None
) -> tuple[np.ndarray, np.ndarray]:
    """Replace each state with one state per digit of the undecided cell that has the fewest candidates."""
    counts = board.num_bits[states]
    # Minimum-remaining-values heuristic: branching on the cell with the fewest candidates keeps the tree small.
    cell = np.where(counts == 1, 255, counts).argmin(1)
    digits = np.arange(round(states.shape[1] ** 0.5) if states.shape[1] else 0)
    if order is not None:
        digits = order.permutation(digits)
    rows, choices = np.nonzero((states[np.arange(len(states)), cell][:, None] >> digits) & 1)
    branches = states[rows]
    branches[np.arange(len(rows)), cell[rows]] = (1 << digits[choices]).astype(np.uint16)
    return branches, owners[rows]
