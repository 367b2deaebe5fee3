"""Sudoku: solver, random grids, puzzles with a unique solution, and symmetries."""

from dataclasses import dataclass
from functools import cache

import numpy as np

_CHUNK_SIZE = 512
"""States that are worked on together; the newest first, so that the stack stays small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Board:
    """Rows, columns and boxes of a size."""

    units: np.ndarray
    """(3 * side, side): the cells of each."""
    of_cell: np.ndarray
    """(cells, 3): the units that a cell lies in."""
    num_bits: np.ndarray
    """Of every set of digits."""


@cache
def _board(side: int) -> _Board:
    box = round(side**0.5)
    cells = np.arange(side * side).reshape(side, side)
    boxes = cells.reshape(box, box, box, box).swapaxes(1, 2).reshape(side, side)
    units = np.concatenate([cells, cells.T, boxes])
    of_cell = np.stack([np.nonzero((units == cell).any(1))[0] for cell in range(side * side)])
    return _Board(units=units, of_cell=of_cell, num_bits=np.array([n.bit_count() for n in range(1 << side)], np.uint8))


def candidates_of(puzzles: np.ndarray) -> np.ndarray:
    """Sets of digits as bits, from cells with 0 for a blank and digits from 1 on."""
    side = round(puzzles.shape[1] ** 0.5)
    return np.where(puzzles == 0, (1 << side) - 1, 1 << np.maximum(puzzles.astype(np.int64) - 1, 0)).astype(np.uint16)


def solve(
    candidates: np.ndarray, *, most: int, order: np.random.Generator | None = None, chunk: int = _CHUNK_SIZE
) -> list[np.ndarray]:
    """For each Sudoku its solutions, `most` at most, (number, cells); digits are tried in a random `order` if given.

    A small `chunk` is for one solution of Sudokus that have very many: few branches are opened.
    """
    num_cells = candidates.shape[1]
    board = _board(round(num_cells**0.5))
    found: list[list[np.ndarray]] = [[] for _ in candidates]
    missing = np.full(len(candidates), most)
    states, owners = candidates, np.arange(len(candidates))
    while len(states):
        now, now_owners = states[-chunk:], owners[-chunk:]
        states, owners = states[:-chunk], owners[:-chunk]
        is_wanted = missing[now_owners] > 0
        now, is_possible = _propagate(now[is_wanted], board)
        now, now_owners = now[is_possible], now_owners[is_wanted][is_possible]
        is_solved = (board.num_bits[now] == 1).all(1)
        for owner, solution in zip(now_owners[is_solved], now[is_solved], strict=True):
            if missing[owner] > 0:
                found[owner].append(np.log2(solution).astype(np.int8) + 1)
                missing[owner] -= 1
        grown, grown_owners = _branches(now[~is_solved], now_owners[~is_solved], board, order)
        states, owners = np.concatenate([states, grown]), np.concatenate([owners, grown_owners])
    return [np.array(grids, np.int8).reshape(-1, num_cells) for grids in found]


def _propagate(states: np.ndarray, board: _Board) -> tuple[np.ndarray, np.ndarray]:
    """What follows without a guess, and which states are not contradictory as far as that shows."""
    states = states.copy()
    is_possible = np.ones(len(states), bool)
    active = np.arange(len(states))
    full = np.uint16(len(board.num_bits) - 1)
    while len(active):
        now = states[active]
        is_decided = board.num_bits[now] == 1
        taken, taken_twice = _digits_in_units(np.where(is_decided, now, 0), board)
        allowed = now & ~np.where(is_decided, 0, np.bitwise_or.reduce(taken[:, board.of_cell], axis=2))
        seen, seen_twice = _digits_in_units(allowed, board)
        alone = allowed & np.bitwise_or.reduce((seen & ~seen_twice)[:, board.of_cell], axis=2)
        after = np.where(alone != 0, alone, allowed).astype(np.uint16)
        is_wrong = (taken_twice != 0).any(1) | (seen != full).any(1) | (board.num_bits[alone] > 1).any(1)
        is_possible[active[is_wrong]] = False
        states[active] = after
        active = active[(after != now).any(1) & ~is_wrong]
    return states, is_possible


def _digits_in_units(sets: np.ndarray, board: _Board) -> tuple[np.ndarray, np.ndarray]:
    """For each unit the digits that occur in it, and those that do in several of its cells."""
    once = np.zeros((len(sets), len(board.units)), np.uint16)
    twice = np.zeros_like(once)
    for cells in board.units.T:
        here = sets[:, cells].astype(np.uint16, copy=False)
        twice |= once & here
        once |= here
    return once, twice


def _branches(
    states: np.ndarray, owners: np.ndarray, board: _Board, order: np.random.Generator | None
) -> tuple[np.ndarray, np.ndarray]:
    """Each state with one more cell decided, in every way: the cell that leaves the fewest."""
    counts = board.num_bits[states]
    cell = np.where(counts == 1, 255, counts).argmin(1)
    digits = np.arange(round(states.shape[1] ** 0.5) if states.shape[1] else 0)
    if order is not None:
        digits = order.permutation(digits)
    rows, choices = np.nonzero((states[np.arange(len(states)), cell][:, None] >> digits) & 1)
    grown = states[rows]
    grown[np.arange(len(rows)), cell[rows]] = (1 << digits[choices]).astype(np.uint16)
    return grown, owners[rows]


def all_grids_4x4(rng: np.random.Generator) -> np.ndarray:
    """All 288, in a random order; (288, 16)."""
    (grids,) = solve(candidates_of(np.zeros((1, 16), np.int8)), most=1000)
    return rng.permutation(grids)


def random_grids_9x9(number: int, rng: np.random.Generator) -> np.ndarray:
    """Full grids, (number, 81): three boxes are drawn, the rest is a solution for them, and all is shuffled."""
    starts = np.zeros((number, 9, 9), np.int8)
    for box in (slice(0, 3), slice(3, 6), slice(6, 9)):
        drawn = rng.permuted(np.tile(np.arange(1, 10, dtype=np.int8), (number, 1)), axis=1)
        starts[:, box, box] = drawn.reshape(number, 3, 3)
    solved = solve(candidates_of(starts.reshape(number, 81)), most=1, order=rng, chunk=32)
    return shuffle_grids(np.concatenate(solved), rng)


def remove_cells(grids: np.ndarray, blanks: int, rng: np.random.Generator) -> np.ndarray:
    """Puzzles that have these grids as their only solutions, 0 for a blank.

    Cells are taken away in a random order, each only if the solution stays the only one, until `blanks` are gone or
    all were tried: then fewer are.
    """
    puzzles, number = grids.copy(), np.arange(len(grids))
    order = rng.permuted(np.tile(np.arange(grids.shape[1]), (len(grids), 1)), axis=1)
    num_blank = np.zeros(len(grids), int)
    for cells in order.T:
        is_asked = num_blank < blanks
        if not is_asked.any():
            break
        tried = puzzles.copy()
        tried[number, cells] = 0
        others = candidates_of(tried)
        # Another solution would have another digit here.
        others[number, cells] &= ~candidates_of(grids)[number, cells]
        second = solve(others[is_asked], most=1)
        is_gone = is_asked.copy()
        is_gone[is_asked] = [not len(solutions) for solutions in second]
        puzzles[number[is_gone], cells[is_gone]] = 0
        num_blank += is_gone
    return puzzles


def shuffle_grids(cells: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each grid in another form of itself: digits renamed (a blank stays one), perhaps mirrored at the diagonal, bands
    and rows in them permuted, stacks and columns in them permuted.

    (number, cells); or (kinds, number, cells), where the kinds of one grid, a puzzle and its solution, are done alike.
    """
    number, num_cells = cells.shape[-2:]
    side = round(num_cells**0.5)
    rows, columns = (_shuffled_lines(number, round(side**0.5), rng) for _ in range(2))
    at = side * rows[:, :, None] + columns[:, None, :]
    is_mirrored = np.asarray(rng.random(number) < 0.5)
    at = np.where(is_mirrored[:, None, None], at.swapaxes(1, 2), at).reshape(number, num_cells)
    names = np.zeros((number, side + 1), cells.dtype)
    names[:, 1:] = rng.permuted(np.tile(np.arange(1, side + 1), (number, 1)), axis=1)
    each = np.arange(number)[:, None]
    renamed: np.ndarray = names[each, cells[..., each, at]]
    return renamed


def _shuffled_lines(number: int, box: int, rng: np.random.Generator) -> np.ndarray:
    """Orders of rows: bands permuted, and the rows in each; (number, box * box)."""
    within = rng.permuted(np.tile(np.arange(box), (number, box, 1)), axis=2)
    bands = rng.permuted(np.tile(np.arange(box), (number, 1)), axis=1)
    return (bands[:, :, None] * box + within).reshape(number, -1)
