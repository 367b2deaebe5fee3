"""Self-play: legal games, gating, and exact resume after kills."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from paths import ROOT
from whet.base.errors import UsageError, WhetError
from whet.checkpoint import store
from whet.cli.main import run
from whet.recipes.hex import net_players
from whet.recipes.hex.arena import draw_openings
from whet.recipes.hex.game.board import BLUE
from whet.recipes.hex.game.rules import flip_perspective, mover_has_won
from whet.recipes.hex.net_players import SearchPlayer
from whet.recipes.hex.play.server import PlayRoutes
from whet.recipes.hex.search import SearchOptions, Trees, TreeSearchResult, search_moves, tree_bytes
from whet.recipes.hex.self_play import SelfPlayGames, play_self_games, read_self_games, write_self_games
from whet.recipes.hex.self_play_state import champion_run, open_state, read_state, run_path
from whet.run.folder import open_run
from whet.training.supervisor import prepare_restart

pytestmark = pytest.mark.torch

WORDS = (
    "selfplay=True", "size=3", "games=20", "epochs=1", "arch.depth=1", "arch.width=8", "threads=1",
    "global_batch_size=16", "loop.games=40", "loop.simulations=4", "loop.gate_games=8",
)  # fmt: skip


class Even:
    """A uniform policy: legal play needs no net."""

    def evaluate(self, boards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        is_free = (boards == 0).reshape(len(boards), -1)
        return (is_free / is_free.sum(1, keepdims=True)).astype(np.float32), np.full(len(boards), 0.5, np.float32)


@pytest.fixture(scope="module")
def played() -> SelfPlayGames:
    player = SearchPlayer(Even(), SearchOptions(simulations=12, noise_fraction=0.25))  # type: ignore[arg-type]
    return play_self_games(player, size=4, num_games=41, free_moves=3, seed=4)


def test_self_play_games_are_complete_with_correct_results(played: SelfPlayGames) -> None:
    """Positions of a game follow each other by one stone; the loser is to move at the end, and results alternate."""
    assert set(played.games) == set(range(41))
    for game in range(41):
        rows = np.flatnonzero(played.games == game)
        boards, wins = played.boards[rows], played.wins[rows]
        for before, after in pairwise(boards):
            seen = flip_perspective(after[None])[0]
            assert (seen != before).sum() == 1
            assert seen[seen != before] == BLUE
        assert mover_has_won(flip_perspective(boards[-1:]))[0]
        assert not mover_has_won(flip_perspective(boards[:-1])).any()
        assert wins[-1] == 0
        assert (wins[:-1] != wins[1:]).all()
        assert played.shares[rows[-1]].sum() == 0
        np.testing.assert_allclose(played.shares[rows[:-1]].sum(1), 1, rtol=1e-5)


def test_searching_in_chunks_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    player = SearchPlayer(Even(), SearchOptions(simulations=12, noise_fraction=0.25))  # type: ignore[arg-type]
    boards = draw_openings(7, size=4, num_stones=2, seed=0)
    together = player.search(boards, draw=np.random.default_rng(3))
    sizes: list[int] = []

    def search(boards: np.ndarray, *given: Any, **draw: Any) -> TreeSearchResult:
        sizes.append(len(boards))
        return search_moves(boards, *given, **draw)

    monkeypatch.setattr(net_players, "search_moves", search)
    monkeypatch.setattr(net_players, "_TREE_BYTES", 2 * tree_bytes(4, num_nodes=13))
    in_turns = player.search(boards, draw=np.random.default_rng(3))
    assert sizes == [2, 2, 2, 1]
    assert (in_turns.visits == together.visits).all()
    assert (in_turns.win == together.win).all()
    arrays = vars(Trees(boards, num_nodes=13)).values()
    assert 7 * tree_bytes(4, num_nodes=13) == sum(array.nbytes for array in arrays if array.ndim > 2)


def test_closing_the_page_stops_a_running_search() -> None:
    """Python waits for all threads of a pool at exit, so a long search would delay Ctrl-C."""
    calls: list[int] = []

    class Asked(Even):
        def evaluate(self, boards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            calls.append(len(boards))
            if len(calls) == 3:
                routes.close()
            return super().evaluate(boards)

    player = SearchPlayer(Asked(), SearchOptions(simulations=10_000))  # type: ignore[arg-type]
    routes = PlayRoutes(player, sizes=(4,), size=4, color="blue")
    with pytest.raises(WhetError, match="stopped"):
        player.search(np.zeros((1, 4, 4), dtype=np.int8))
    assert len(calls) == 3


def test_moves_are_on_empty_cells_and_absent_at_the_end(played: SelfPlayGames) -> None:
    is_over = played.shares.sum(1) == 0
    assert (played.moves[is_over] == -1).all()
    taken = played.boards.reshape(len(played), -1)[np.arange(len(played)), played.moves]
    assert (taken[~is_over] == 0).all()


def test_self_play_games_round_trip_and_damage_is_detected(played: SelfPlayGames, tmp_path: Path) -> None:
    path = tmp_path / "games.npz"
    write_self_games(path, played)
    result = read_self_games(path)
    assert result is not None
    assert (result.shares == played.shares).all()
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    for damaged in (whole[:-100], bytes(changed), b""):
        path.write_bytes(damaged)
        assert read_self_games(path) is None
    arrays = {name: getattr(played, name) for name in ("boards", "shares", "wins", "games")}
    np.savez(path, **arrays, sha256=np.array("of something else"))
    assert read_self_games(path) is None
    assert read_self_games(tmp_path / "absent.npz") is None


def command(folder: Path) -> list[str]:
    return ["train", "hex", *WORDS, "--run", str(folder), "--max-restarts", "0", "--device", "cpu", "--quiet"]


def test_killed_and_resumed_self_play_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill comes while a generation trains, and damages older games; the resumed loop is shorter."""
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    longer = [*command(cut), "loop.generations=50"]
    killed = subprocess.Popen([sys.executable, "-m", "whet", *longer], env=env)
    while killed.poll() is None and not (run_path(cut, 2) / "run.json").exists():
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert len(read_state(cut).generations) == 2
    (cut / "games-001.npz").write_bytes(b"what a power cut leaves")
    with mock.patch.dict(os.environ):
        for folder in (cut, whole):
            assert run([*command(folder), "loop.generations=2"]) == 0
    one, two = (json.loads((folder / "state.json").read_bytes()) for folder in (whole, cut))
    assert one["generations"] == two["generations"]
    assert len(one["generations"]) == 3
    assert champion_run(cut) == run_path(cut, read_state(cut).champion)
    for number in range(3):
        weights = [store.load_newest(open_run(run_path(f, number)).checkpoints)[1].tensors for f in (whole, cut)]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_too_few_openings_for_the_gate_are_an_error_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command(tmp_path / "small"), "size=3", "loop.gate_games=146"]
    with mock.patch.dict(os.environ):
        assert run(words) == 2
    assert "loop.gate_games" in capsys.readouterr().err
    assert not (tmp_path / "small").exists()


def test_kill_or_ctrl_c_during_self_play_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed self-play is restarted by its parent with the folder; an interrupted one prints how to resume."""
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))
    (tmp_path / "loop.toml").write_text("[loop]\ngenerations = 3\n")
    logged: list[Path | None] = []
    monkeypatch.setattr("whet.training.supervisor.report_to_parent", lambda run, *, step=0: logged.append(run))
    monkeypatch.setattr("whet.recipes.hex.self_play.SelfPlay.run", mock.Mock(side_effect=KeyboardInterrupt))
    folder, file = tmp_path / "better", tmp_path / "loop.toml"
    with mock.patch.dict(os.environ):
        assert run([*command(folder)[:-1], "--config", str(file)]) == 130
    assert f"--config {file} --device cpu --run {folder}" in capsys.readouterr().err
    assert logged == [folder]
    open_state(folder, config={})
    assert prepare_restart(folder, killer="SIGKILL", is_first=True) == "it resumes"
    with mock.patch.dict(os.environ):
        assert run([*command(folder), "--fresh"]) == 2
    assert read_state(folder).config == {}


def test_changed_options_are_an_error_but_more_generations_continue(tmp_path: Path) -> None:
    folder = tmp_path / "better"
    open_state(folder, config={"lr": 0.1, "loop": {"generations": 2}})
    assert open_state(folder, config={"lr": 0.1, "a_new_key": 1, "loop": {"generations": 9}}).config["lr"] == 0.1
    with pytest.raises(UsageError, match="a different lr"):
        open_state(folder, config={"lr": 0.2, "loop": {}})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("")
    with pytest.raises(UsageError, match="something else"):
        open_state(tmp_path / "other", config={})
    (folder / "state.json").write_text('{"format": "whet hex selfplay 9", "config": {}}')
    with pytest.raises(UsageError, match="unsupported format"):
        open_state(folder, config={"lr": 0.1})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hex_strength", "hex_selfplay"])
def test_required_strength_is_reached(name: str) -> None:
    """Twenty-five minutes of training on this machine, then 400 games each."""
    script = ROOT / "benchmarks" / f"{name}.py"
    assert subprocess.run([sys.executable, script], check=False).returncode == 0
