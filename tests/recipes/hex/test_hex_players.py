"""Players without nets, and the games they generate."""

import itertools

import numpy as np
import pytest

from hex_boards import random_boards
from whet.recipes.hex.game.board import BLUE, EMPTY, NEIGHBORS, NO_MOVE, RED, SWAP
from whet.recipes.hex.game.distance import edge_distances, unreachable
from whet.recipes.hex.game.game import replay
from whet.recipes.hex.game.games import Games, Noise, as_moves, judge_games, play_games, unroll
from whet.recipes.hex.game.players import RandomPlayer, TwoDistancePlayer, best_moves, draw_moves
from whet.recipes.hex.game.rules import Positions, legal, play, start, winners
from whet.recipes.hex.game.symmetry import SYMMETRIES, transform, transform_policy


def slow_distance(board: np.ndarray) -> list[list[int]]:
    """Blue's distance to the top by its definition: the second nearest neighbor, with chains as one cell."""
    size = len(board)
    inside = {(row, column) for row in range(size) for column in range(size)}

    def beside(place):
        return {(place[0] + down, place[1] + right) for down, right in NEIGHBORS} & inside

    def reachable(place):
        """Return the empty neighbors, and whether the edge is one, over chains of blue stones."""
        seen, todo, is_at_edge = set(), [place], place[0] == 0
        while todo:
            for near in beside(todo.pop()) - seen:
                seen.add(near)
                if board[near] == BLUE:
                    is_at_edge |= near[0] == 0
                    todo.append(near)
        return {near for near in seen if board[near] == EMPTY and near != place}, is_at_edge

    around = {place: reachable(place) for place in inside if board[place] == EMPTY}
    distance = {place: 1 if is_at_edge else unreachable(size) for place, (_, is_at_edge) in around.items()}
    while True:
        improved = dict(distance)
        for place, (near, _) in around.items():
            nearest = sorted(distance[other] for other in near)
            if len(nearest) > 1:
                improved[place] = min(distance[place], 1 + nearest[1])
        if improved == distance:
            return [[distance.get((row, column), unreachable(size)) for column in range(size)] for row in range(size)]
        distance = improved


def test_two_distance_equals_its_definition() -> None:
    for size in (2, 3, 5, 8):
        boards = random_boards(40, size=size, seed=size)
        boards[0] = EMPTY
        top, bottom, left, right = edge_distances(boards)
        for number, board in enumerate(boards):
            mirrored = (BLUE + RED - board.T) * (board.T != EMPTY)
            assert top[number].tolist() == slow_distance(board)
            assert bottom[number, ::-1, ::-1].tolist() == slow_distance(board[::-1, ::-1])
            assert left[number].T.tolist() == slow_distance(mirrored)
            assert right[number, ::-1, ::-1].T.tolist() == slow_distance(mirrored[::-1, ::-1])


def test_analyses_are_equivariant_under_symmetries() -> None:
    boards = random_boards(80, size=7, seed=1)
    boards = boards[(winners(boards) == EMPTY) & (boards == EMPTY).any(axis=(1, 2))]
    positions = Positions(boards, np.random.default_rng(0).integers(1, 3, len(boards)).astype(np.int8))
    for player in (RandomPlayer(), TwoDistancePlayer()):
        seen = player.analyze(positions)
        assert (seen.policy[~legal(boards)] == 0).all()
        assert np.allclose(seen.policy.sum(axis=1), 1)
        assert ((seen.value >= 0) & (seen.value <= 1)).all()
        for symmetry in SYMMETRIES:
            other = player.analyze(transform(positions, symmetry))
            assert np.allclose(other.policy, transform_policy(seen.policy, symmetry, size=7), atol=1e-6)
            assert np.allclose(other.value, seen.value, atol=1e-6)


def test_two_distance_wins_and_defends_when_it_can() -> None:
    board = np.zeros((5, 5), dtype=np.int8)
    board[:4, 2] = BLUE
    board[2, 3:] = board[1, :2] = RED
    as_blue, as_red = (Positions(board[None], np.array([mover], dtype=np.int8)) for mover in (BLUE, RED))
    player = TwoDistancePlayer()
    won = play(as_blue, best_moves(player.analyze(as_blue).policy))
    assert winners(won.boards).tolist() == [BLUE]
    assert player.analyze(as_blue).value[0] == 1
    # Two winning paths are left: red has lost, and blocks one of them anyway.
    assert player.analyze(as_red).value[0] == 0
    assert best_moves(player.analyze(as_red).policy)[0] in (4 * 5 + 1, 4 * 5 + 2)


def test_two_distance_beats_random() -> None:
    generator = np.random.default_rng(0)
    players = (TwoDistancePlayer(), RandomPlayer())
    for first, second in itertools.permutations(players):
        positions, num_won = start(100, size=5), {player.name: 0 for player in players}
        for mover in itertools.cycle((first, second)):
            positions = play(positions, draw_moves(mover.analyze(positions).policy, generator))
            is_won = winners(positions.boards) != EMPTY
            num_won[mover.name] += int(is_won.sum())
            positions = positions.take(~is_won)
            if not len(positions):
                break
        assert num_won["two-distance"] >= 95


def test_self_play_is_the_same_for_the_same_seed() -> None:
    made = [play_games(TwoDistancePlayer(), size=5, count=300, seed=seed) for seed in (1, 1, 2)]
    assert (made[0].moves == made[1].moves).all()
    assert (made[0].moves != made[2].moves).any()
    verdict = judge_games(made[0].moves, size=5)
    assert verdict.is_legal.all()
    assert (verdict.winners == made[0].winners).all()
    assert (made[0].winners != EMPTY).all()
    assert len({made[0].move_list(game) for game in range(300)}) > 290
    quiet = play_games(TwoDistancePlayer(), size=5, count=50, seed=0, noise=Noise(epsilon=0, temperature=0))
    assert len({quiet.move_list(game) for game in range(50)}) <= 25
    assert len(play_games(RandomPlayer(), size=3, count=0, seed=0)) == 0


@pytest.mark.parametrize("size", [3, 4])
def test_unrolled_games_are_those_played_move_by_move(size: int) -> None:
    games = play_games(RandomPlayer(), size=size, count=40, seed=0)
    lists = [list(games.move_list(game)) for game in range(40)]
    for moves in lists[:20]:  # Some with a swap; what follows is then another game, or none.
        moves[1:1] = [SWAP]
    played = []
    for moves in lists:
        while True:
            try:
                played.append(replay(moves, size=size))
                break
            except Exception:
                moves.pop()
    games = Games(
        size, as_moves([game.moves for game in played]), np.array([g.winner or BLUE for g in played], np.int8)
    )
    samples = unroll(games)
    place = 0
    for number, game in enumerate(played):
        for ply in range(len(game.moves) + 1):
            then = replay(game.moves[:ply], size=size)
            assert samples.positions.boards[place].reshape(-1).tolist() == list(then.cells)
            assert samples.positions.movers[place] == then.mover
            move = game.moves[ply] if ply < len(game.moves) else NO_MOVE
            assert samples.moves[place] == (NO_MOVE if move == SWAP else move)
            assert samples.results[place] == float(then.mover == games.winners[number])
            place += 1
    assert place == len(samples)


def test_illegal_games_are_detected() -> None:
    lists = [[0, 1, 2], [0, 1, 0], [0, 1, 2, 3], [0, 4], [SWAP, 1], [0, SWAP, 1], [1, SWAP, 2], [0, 1, SWAP], []]
    verdict = judge_games(as_moves(lists), size=2)
    assert verdict.is_legal.tolist() == [True, False, False, False, False, True, False, False, True]
    assert verdict.winners.tolist()[:1] == [BLUE]
    for moves, is_legal, winner in zip(lists, verdict.is_legal, verdict.winners, strict=True):
        if is_legal:
            assert replay(moves, size=2).winner == winner
        else:
            with pytest.raises(Exception, match="not legal"):
                replay(moves, size=2)
