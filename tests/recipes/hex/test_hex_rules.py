"""The rules of Hex, compared with a slow reference and under all symmetries."""

import numpy as np
import pytest

from hex_boards import random_boards
from whet.base.errors import UsageError
from whet.recipes.hex.game.board import BLUE, EMPTY, RED, SWAP, cell_name, parse_cell
from whet.recipes.hex.game.game import replay
from whet.recipes.hex.game.players import RandomPlayer, draw_moves
from whet.recipes.hex.game.rules import Positions, legal, play, start, winners
from whet.recipes.hex.game.symmetry import (
    MIRRORED,
    SYMMETRIES,
    mover_view,
    transform,
    transform_moves,
    transform_policy,
)

SIZES = range(3, 20)


def slow_winner(board: list[list[int]]) -> int:
    """By walking from stone to stone."""
    size = len(board)
    for color in (BLUE, RED):
        if color == BLUE:
            seen = {(0, column) for column in range(size) if board[0][column] == BLUE}
        else:
            seen = {(row, 0) for row in range(size) if board[row][0] == RED}
        todo = list(seen)
        while todo:
            row, column = todo.pop()
            if (row if color == BLUE else column) == size - 1:
                return color
            for beside in (
                (row, column + 1),
                (row, column - 1),
                (row + 1, column),
                (row - 1, column),
                (row + 1, column - 1),
                (row - 1, column + 1),
            ):
                inside = 0 <= beside[0] < size and 0 <= beside[1] < size
                if inside and beside not in seen and board[beside[0]][beside[1]] == color:
                    seen.add(beside)
                    todo.append(beside)
    return EMPTY


def compare_with_reference(count: int) -> int:
    for size in SIZES:
        boards = random_boards(count, size=size, seed=size)
        as_lists = boards.tolist()
        assert winners(boards).tolist() == [slow_winner(board) for board in as_lists], size
        slow_legal = [[cell == EMPTY for row in board for cell in row] for board in as_lists]
        assert legal(boards).tolist() == slow_legal, size
    return count * len(SIZES)


def test_winners_and_legal_moves_are_those_of_a_slow_reference(report_count) -> None:
    report_count(f"{compare_with_reference(120):,} boards of sizes 3 to 19")


@pytest.mark.slow
def test_winners_and_legal_moves_of_100_000_boards(report_count) -> None:
    report_count(f"{compare_with_reference(5_900):,} boards of sizes 3 to 19")


def test_long_winding_chains_are_followed_on_every_size() -> None:
    for size in range(2, 27):
        snake = np.full((size, size), RED, dtype=np.int8)
        snake[::2] = BLUE
        snake[1::4, -1] = BLUE
        snake[3::4, 0] = BLUE
        cut = snake.copy()
        cut[size // 2 // 2 * 2] = RED  # One row less: red joins its edges.
        boards = np.stack([snake, cut])
        assert winners(boards).tolist() == [slow_winner(board) for board in boards.tolist()]
        assert winners(boards)[1] == RED


def test_a_full_board_has_exactly_one_winner() -> None:
    for size in (2, 7, 13, 26):
        boards = np.random.default_rng(1).integers(1, 3, (500, size, size), dtype=np.int8)
        result = winners(boards)
        assert set(result.tolist()) == {BLUE, RED}
        # Mirrored, with the colors exchanged, the other player has won.
        assert (winners((BLUE + RED - boards).transpose(0, 2, 1).copy()) == BLUE + RED - result).all()


def test_random_games_agree_with_replayed_moves() -> None:
    generator = np.random.default_rng(0)
    for size in (3, 6, 11):
        positions = start(8, size=size)
        games = [replay((), size=size)] * 8
        while len(positions):
            moves = draw_moves(RandomPlayer().analyze(positions).policy, generator)
            positions = play(positions, moves)
            games = [game.after(int(move)) for game, move in zip(games, moves, strict=True)]
            won = winners(positions.boards)
            assert won.tolist() == [game.winner for game in games]
            assert [game.cells for game in games] == [tuple(b) for b in positions.boards.reshape(len(won), -1).tolist()]
            assert positions.movers.tolist() == [game.mover for game in games]
            games = [game for game in games if not game.winner]
            positions = positions.take(won == EMPTY)


def test_illegal_moves_are_errors_that_name_them() -> None:
    with pytest.raises(UsageError, match="move 3 is not legal: the cell is occupied"):
        replay([0, 1, 0], size=5)
    with pytest.raises(UsageError, match="move 4 is not legal: blue has already won"):
        replay([0, 1, 2, 3], size=2)
    with pytest.raises(UsageError, match="move 4 is not legal: blue has already won"):
        replay([0, 1, 2, 0], size=2)
    with pytest.raises(UsageError, match="move 2 is not legal: it is not on the board"):
        replay([0, 25], size=5)


def test_a_swap_mirrors_the_first_stone_and_turns_it_red() -> None:
    game = replay([parse_cell("c1", size=5), SWAP], size=5)
    board = game.position.boards[0]
    assert (board.nonzero(), board[2, 0]) == ((2, 0), RED)
    assert game.mover == BLUE
    assert not game.may_swap
    # By the counts of stones it would be blue's turn; the game records the swap.
    assert game.after(24).mover == RED
    for moves in ([0, 1, SWAP], [SWAP]):
        with pytest.raises(UsageError, match="swap"):
            replay(moves, size=5)


def test_symmetries_keep_the_game() -> None:
    generator = np.random.default_rng(3)
    for size in (2, 5, 13):
        boards = random_boards(60, size=size, seed=size)
        positions = Positions(boards, generator.integers(1, 3, 60).astype(np.int8))
        moves = np.array([generator.choice(np.flatnonzero(row)) if row.any() else -1 for row in legal(boards)])
        for symmetry in SYMMETRIES:
            seen = transform(positions, symmetry)
            # The result for the mover does not change.
            assert ((winners(seen.boards) == seen.movers) == (winners(boards) == positions.movers)).all()
            assert ((winners(seen.boards) == EMPTY) == (winners(boards) == EMPTY)).all()
            back = transform(seen, symmetry)
            assert (back.boards == boards).all()
            assert (back.movers == positions.movers).all()
            moved = transform_moves(moves, symmetry, size=size)
            assert (legal(seen.boards) == transform_policy(legal(boards), symmetry, size=size)).all()
            one_hot = np.eye(size * size)[np.maximum(moves, 0)]
            expected = np.where(moves < 0, -1, transform_policy(one_hot, symmetry, size=size).argmax(axis=1))
            assert moved.tolist() == expected.tolist()
            # A move and a symmetry commute.
            can = moves >= 0
            first = transform(play(positions.take(can), moves[can]), symmetry)
            assert (play(seen.take(can), moved[can]).boards == first.boards).all()
            for second in SYMMETRIES:
                assert (transform(seen, second).boards == transform(positions, symmetry ^ second).boards).all()
        each = generator.integers(0, 4, 60)
        mixed = transform(positions, each)
        for place in range(60):
            alone = transform(positions.take(slice(place, place + 1)), int(each[place]))
            assert (mixed.boards[place] == alone.boards[0]).all()
            assert mixed.movers[place] == alone.movers[0]


def test_mover_view_has_blue_to_move() -> None:
    boards = random_boards(50, size=6, seed=0)
    positions = Positions(boards, np.array([BLUE, RED] * 25, dtype=np.int8))
    seen, symmetry = mover_view(positions)
    assert set(seen.movers.tolist()) == {BLUE}
    assert ((winners(seen.boards) == BLUE) == (winners(boards) == positions.movers)).all()
    assert set(symmetry[1::2].tolist()) == {MIRRORED}
    assert (transform(seen, symmetry).boards == boards).all()


def test_cells_have_names() -> None:
    for size in (2, 5, 26):
        names = [cell_name(cell, size=size) for cell in range(size * size)]
        assert [parse_cell(name, size=size) for name in names] == list(range(size * size))
    assert cell_name(parse_cell(" K11 ", size=13), size=13) == "k11"
    for wrong in ("", "a", "a0", "a6", "f1", "1a", "aa1", "a²", "a1x", "a" + "9" * 5000):
        with pytest.raises(UsageError, match="no such cell"):
            parse_cell(wrong, size=5)


def test_moves_are_sampled_from_the_policy() -> None:
    policy = np.tile(np.array([0.0, 0.1, 0.9, 0.0], dtype=np.float32), (20_000, 1))
    drawn = np.bincount(draw_moves(policy, np.random.default_rng(0)), minlength=4) / 20_000
    assert drawn[[0, 3]].tolist() == [0, 0]
    assert abs(drawn[1] - 0.1) < 0.01
    sharp = np.bincount(draw_moves(policy, np.random.default_rng(0), temperature=0.5), minlength=4) / 20_000
    assert abs(sharp[1] - 0.01 / 0.82) < 0.005
    assert set(draw_moves(policy, np.random.default_rng(0), temperature=0).tolist()) == {2}
