"""The exact solver of small boards, compared with a plain search."""

import numpy as np
import pytest

from hex_solver import Solver
from whet.base.errors import UsageError
from whet.recipes.hex.game.board import BLUE, EMPTY, RED
from whet.recipes.hex.game.players import TwoDistancePlayer, best_moves
from whet.recipes.hex.game.rules import Positions, legal, play, winners
from whet.recipes.hex.game.symmetry import SYMMETRIES, transform

# Blue wins after these first moves: on 2x2 and 4x4 the short diagonal, on 3x3 the middle row as well.
WON = {2: {1, 2}, 3: {2, 3, 4, 5, 6}, 4: {3, 6, 9, 12}}


def joined_masks(size: int) -> tuple[list[bool], list[bool]]:
    """Of every mask of cells: whether it joins top and bottom, and left and right. By the winners of boards."""
    cells = size * size
    masks = np.arange(2**cells)
    stones = ((masks[:, None] >> np.arange(cells)) & 1).astype(np.int8).reshape(-1, size, size)
    return (winners(stones * BLUE) == BLUE).tolist(), (winners(stones * RED) == RED).tolist()


def plain_winner(blue: int, red: int, mover: int, cells: int, joined, known: dict) -> int:
    """Tries all moves, with memoized positions and no other optimization."""
    key = (blue, red)
    if key not in known:
        if joined[0][blue]:
            return BLUE
        if joined[1][red]:
            return RED
        result = BLUE + RED - mover
        for cell in range(cells):
            if not (blue | red) >> cell & 1:
                after = (blue | 1 << cell, red) if mover == BLUE else (blue, red | 1 << cell)
                if plain_winner(*after, BLUE + RED - mover, cells, joined, known) == mover:
                    result = mover
                    break
        known[key] = result
    return known[key]


@pytest.mark.parametrize("size", [2, 3])
def test_every_first_move_has_the_outcome_of_a_plain_search(size: int) -> None:
    result = Solver(size).first_moves()
    joined, known = joined_masks(size), {}
    plain = {cell: plain_winner(1 << cell, 0, RED, size**2, joined, known) for cell in range(size**2)}
    assert result == plain
    assert {cell for cell, winner in result.items() if winner == BLUE} == WON[size]


def test_late_4x4_positions_have_the_outcome_of_a_plain_search() -> None:
    generator, solver, joined = np.random.default_rng(0), Solver(4), joined_masks(4)
    seen = {BLUE: 0, RED: 0}
    for _ in range(60):
        cells = generator.permutation(16)[:7].tolist()
        blue, red = (sum(1 << cell for cell in some) for some in (cells[::2], cells[1::2]))
        if joined[0][blue] or joined[1][red]:
            continue
        result = solver.winner(blue, red, mover=RED)
        assert result == plain_winner(blue, red, RED, 16, joined, {})
        seen[result] += 1
        board = np.array([BLUE if blue >> c & 1 else RED if red >> c & 1 else EMPTY for c in range(16)], dtype=np.int8)
        for symmetry in SYMMETRIES:
            other = transform(Positions(board.reshape(1, 4, 4), np.array([RED], np.int8)), symmetry)
            flat, mover = other.boards.reshape(-1), int(other.movers[0])
            masks = [sum(1 << c for c in range(16) if flat[c] == color) for color in (BLUE, RED)]
            assert (solver.winner(*masks, mover=mover) == mover) == (result == RED)
    assert min(seen.values()) > 10


@pytest.mark.slow
def test_every_first_move_of_4x4(report_count) -> None:
    solver = Solver(4)
    result = solver.first_moves()
    assert {cell for cell, winner in result.items() if winner == BLUE} == WON[4]
    joined, known = joined_masks(4), {}
    assert result == {cell: plain_winner(1 << cell, 0, RED, 16, joined, known) for cell in range(16)}
    report_count(f"4x4 solved with {len(solver.known):,} positions; a plain search needs {len(known):,}")


def test_two_distance_plays_3x3_well() -> None:
    """From the won first moves it wins against nearly every defence."""
    solver, player = Solver(3), TwoDistancePlayer()
    won = lost = 0
    todo = [(1 << cell, 0) for cell in WON[3]]
    while todo:
        blue, red = todo.pop()
        for answer in (cell for cell in range(9) if not (blue | red) >> cell & 1):
            after = red | 1 << answer
            board = np.array([BLUE if blue >> c & 1 else RED if after >> c & 1 else EMPTY for c in range(9)], np.int8)
            position = Positions(board.reshape(1, 3, 3), np.array([BLUE], np.int8))
            if winners(position.boards)[0] == RED:
                lost += 1
                continue
            assert legal(position.boards).any()
            move = int(best_moves(player.analyze(position).policy)[0])
            if winners(play(position, np.array([move])).boards)[0] == BLUE:
                won += 1
            elif solver.winner(blue | 1 << move, after, mover=RED) == RED:
                lost += 1
            else:
                todo.append((blue | 1 << move, after))
    assert won > 9 * lost


def test_large_boards_are_an_error() -> None:
    with pytest.raises(UsageError, match="too large"):
        Solver(5)
