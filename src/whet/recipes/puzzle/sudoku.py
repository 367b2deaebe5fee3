"""Sudokus: all grids of 4x4, random ones of 9x9, puzzles with one solution, and what may be done to a grid."""

import numpy as np

from whet.recipes.puzzle.solving import candidates_of, solve


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
    return shuffled(np.concatenate(solved), rng)


def with_blanks(grids: np.ndarray, blanks: int, rng: np.random.Generator) -> np.ndarray:
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


def shuffled(cells: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each grid in another form of itself: digits renamed (a blank stays one), perhaps mirrored at the diagonal, bands
    and rows in them permuted, stacks and columns in them permuted.

    (number, cells); or (kinds, number, cells), where the kinds of one grid, a puzzle and its solution, are done alike.
    """
    number, num_cells = cells.shape[-2:]
    side = round(num_cells**0.5)
    rows, columns = (_lines(number, round(side**0.5), rng) for _ in range(2))
    at = side * rows[:, :, None] + columns[:, None, :]
    is_mirrored = np.asarray(rng.random(number) < 0.5)
    at = np.where(is_mirrored[:, None, None], at.swapaxes(1, 2), at).reshape(number, num_cells)
    names = np.zeros((number, side + 1), cells.dtype)
    names[:, 1:] = rng.permuted(np.tile(np.arange(1, side + 1), (number, 1)), axis=1)
    each = np.arange(number)[:, None]
    renamed: np.ndarray = names[each, cells[..., each, at]]
    return renamed


def _lines(number: int, box: int, rng: np.random.Generator) -> np.ndarray:
    """Orders of rows: bands permuted, and the rows in each; (number, box * box)."""
    within = rng.permuted(np.tile(np.arange(box), (number, box, 1)), axis=2)
    bands = rng.permuted(np.tile(np.arange(box), (number, 1)), axis=1)
    return (bands[:, :, None] * box + within).reshape(number, -1)
