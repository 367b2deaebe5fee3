"""Playing against a player: the view of a game, and the API of the page."""

import json

import numpy as np
import pytest

from web_client import Served, serving
from whet.cli.main import run
from whet.recipes.hex.game.board import EMPTY, RED, SWAP, parse_cell
from whet.recipes.hex.game.game import replay
from whet.recipes.hex.game.players import NETLESS_PLAYERS, Analysis, best_moves
from whet.recipes.hex.game.rules import Positions, legal
from whet.recipes.hex.play.view import view_game

PLAYER = NETLESS_PLAYERS["two-distance"]


def cell(name: str, size: int = 5) -> int:
    return parse_cell(name, size=size)


class Sure:
    """Plays the first free cell, and predicts a certain win for the side with more stones."""

    name = "sure"

    def analyze(self, positions: Positions) -> Analysis:
        first = legal(positions.boards).argmax(axis=1)
        own = (positions.boards == positions.movers[:, None, None]).sum(axis=(1, 2))
        other = (positions.boards != EMPTY).sum(axis=(1, 2)) - own
        policy = np.eye(positions.size**2, dtype=np.float32)[first]
        return Analysis(policy, (0.5 + (own - other) / 10).astype(np.float32))


def test_a_view_shows_the_game() -> None:
    moves = [cell("c3"), SWAP, cell("b2")]
    view = view_game(PLAYER, moves, size=5)
    assert view.moves == ("c3", "swap", "b2")
    assert (view.mover, view.winner, view.may_swap, view.last) == ("red", None, False, cell("b2"))
    assert view.cells[cell("c3")] == RED
    assert view.record.endswith("#5c1,c3:sb2")
    shares = [one.share for one in view.suggestions]
    assert shares == sorted(shares, reverse=True)
    analysis = PLAYER.analyze(replay(moves, size=5).position)
    assert view.suggestions[0].cell == best_moves(analysis.policy)[0]
    assert view.blue_wins == pytest.approx(1 - float(analysis.value[0]))
    assert view_game(PLAYER, moves[:2], size=5).last == cell("c3")


def test_view_shows_the_winning_chain() -> None:
    blue = ["c1", "c2", "b3", "e1", "b4", "b5"]
    red = ["a1", "a2", "e4", "e2", "e3"]
    moves = [cell(blue[i // 2] if i % 2 == 0 else red[i // 2]) for i in range(11)]
    view = view_game(PLAYER, moves, size=5)
    assert (view.winner, view.blue_wins, view.reply, view.suggestions) == ("blue", 1.0, None, ())
    assert set(view.chain) == {cell(name) for name in blue} - {cell("e1")}
    mirrored = [m % 5 * 5 + m // 5 for m in moves]
    other = view_game(PLAYER, [cell("e5"), *mirrored], size=5)
    assert other.winner == "red"
    assert set(other.chain) == {m % 5 * 5 + m // 5 for m in view.chain}


def test_the_player_swaps_when_that_is_the_better_side() -> None:
    assert view_game(Sure(), [0], size=5).reply == "swap"  # Afterwards the stone is red.
    assert view_game(Sure(), [0, 1], size=5).reply == "c1"
    assert view_game(PLAYER, [cell("c3")], size=5).reply == "swap"
    assert view_game(PLAYER, [cell("a1")], size=5).reply != "swap"


def test_first_moves_vary_with_the_seed_alone() -> None:
    first = [view_game(PLAYER, [], size=7, seed=seed).reply for seed in range(30)]
    assert first == [view_game(PLAYER, [], size=7, seed=seed).reply for seed in range(30)]
    assert len(set(first)) > 3
    moves = [cell(name, 7) for name in ("d4", "c4", "e2", "b6")]
    assert len({view_game(PLAYER, moves, size=7, seed=seed).reply for seed in range(5)}) == 1


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--size", "2"], "3 to 19"),
        (["--size", "40"], "3 to 19"),
        (["--color", "green"], "--color blue"),
    ],
)
def test_invalid_options_are_errors(words: list[str], reported: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["play", "random", *words]) == 2
    assert reported in capsys.readouterr().err


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("served")
    words = ("-m", "whet", "play", "two-distance", "--no-browser", "--json", "--port", "0")
    with serving(*words, home=folder / "home", cwd=folder) as server:
        yield server


def test_page_requires_the_access_token(served: Served) -> None:
    for path in ("/", "/api/about", "/api/game?size=5", "/static/play.js"):
        assert served.request_bare(path).status == 401
        assert served.request(path).status == 200
    assert served.request("/", "POST").status == 405
    assert served.request("/static/../view.py").status in (400, 404)
    assert served.request("/static/view.py").status == 404
    assert "default-src 'self'" in served.request("/").headers["content-security-policy"]


def test_the_server_answers_with_views(served: Served) -> None:
    assert served.request("/api/about").json() == {
        "player": "two-distance",
        "sizes": list(range(3, 20)),
        "size": 7,
        "color": "blue",
    }
    logged = served.request("/api/game?size=5&moves=c3,swap,b2&seed=3").json()
    assert logged == json.loads(view_game(PLAYER, [cell("c3"), SWAP, cell("b2")], size=5, seed=3).model_dump_json())
    for query, reported in (
        ("", "size must be a number"),
        ("size=2", "does not play"),
        ("size=27", "does not play"),
        ("size=5&moves=z1", "no such cell"),
        ("size=5&moves=a1,a1", "the cell is occupied"),
        ("size=5&moves=%3Cb%3E", "no such cell"),
        ("size=5&moves=" + "a1," * 700, "more moves than"),
        ("size=5&seed=x", "seed must be a number"),
        ("size=" + "9" * 50, "size must be a number"),
    ):
        refused = served.request(f"/api/game?{query}")
        assert refused.status == 400, query
        assert reported in refused.text
