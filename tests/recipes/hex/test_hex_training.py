"""Hex from the command line: data, training, exact resume and the arena."""

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch

from whet.checkpoint import store
from whet.cli.main import run
from whet.config.resolve import resolve_config
from whet.device.open import open_device
from whet.recipes.hex.data import split_games
from whet.recipes.hex.game.game_folder import game_keys
from whet.recipes.hex.game.games import play_games
from whet.recipes.hex.game.players import TwoDistancePlayer
from whet.recipes.hex.net_players import load_opponent
from whet.recipes.hex.play.view import view_game
from whet.recipes.hex.recipe import recipe as hex_recipe
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = pytest.mark.torch

SMALL = (
    "size=4",
    "games=120",
    "arch.depth=1",
    "arch.width=8",
    "threads=1",
    "global_batch_size=64",
    "lr=1e-2",
    "epochs=3",
)


class Place:
    """A folder in which commands run in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *words: object) -> tuple[int, str, str]:
        out, errors = io.StringIO(), io.StringIO()
        with mock.patch.dict(os.environ), contextlib.chdir(self.folder), redirect_stdout(out), redirect_stderr(errors):
            code = run([str(word) for word in words])
        return code, out.getvalue(), errors.getvalue()

    def train(self, *words: object) -> tuple[int, str, str]:
        return self.run("train", "hex", *words, "--no-measure", "--max-restarts", 0, "--device", "cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("hex")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHET_HOME", str(folder / "home"))
        yield Place(folder)


@pytest.fixture(scope="module")
def whole(place: Place) -> Path:
    """An uninterrupted run."""
    code, _, errors = place.train(*SMALL, "--run", "runs/whole")
    assert code == 0, errors
    assert "whet play runs/whole" in errors
    return place.folder / "runs" / "whole"


def losses(run: Path) -> dict[int, float]:
    return {event.step: event.number("loss") for event in read_events(open_run(run), kinds=("step",))}


def test_training_improves_metrics_and_reports_them(whole: Path) -> None:
    seen = losses(whole)
    assert sum(list(seen.values())[-5:]) < 0.93 * sum(list(seen.values())[:5])
    logged = list(read_events(open_run(whole), kinds=("eval",)))[-1].fields
    names = {"policy_top1", "policy_top5", "value_accuracy", "brier", "calibration_error"}
    assert {f"test_{name}" for name in names} <= set(logged)
    assert open_run(whole).metadata["size"] == 4


def test_training_in_three_sessions_is_bit_identical(place: Place, whole: Path) -> None:
    """Also restores a lost file for players: a kill may come between the folder and this file."""
    cut = place.folder / "runs" / "cut"
    for _ in range(3):
        (cut / "recipe.json").unlink(missing_ok=True)
        code, _, errors = place.train(*SMALL, "epochs_per_session=1", "--run", "runs/cut")
        assert code == 0, errors
    assert open_run(cut).metadata == open_run(whole).metadata
    assert losses(cut) == losses(whole)
    one, two = (store.load_newest(open_run(run).checkpoints)[1].tensors for run in (whole, cut))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_arena_command_reports_rating_and_openings(place: Place, whole: Path) -> None:
    code, out, errors = place.run("arena", "hex", "runs/whole@8", "random", "--games", 40, "--json", "--device", "cpu")
    assert code == 0, errors
    result = json.loads(out)
    assert (result["size"], result["rating"]["num_games"]) == (4, 40)
    assert result["rating"]["low"] > 0.5
    assert result["rating"]["low"] < result["rating"]["win_rate"] <= result["rating"]["high"]
    assert (result["openings"], result["num_stones"]) == ("even", 3)
    words = ("arena", "hex", "runs/whole", "random", "--games", 40, "--openings", "random", "--device", "cpu")
    code, out, errors = place.run(*words)
    assert code == 0, errors
    assert "40 games, 20 random openings of 2 stones" in out
    assert "games are over" not in errors, "it would stay"
    won, lost, shared = map(int, re.findall(r"openings +(\d+) won with both colors, (\d+) lost, (\d+) shared", out)[0])
    assert won + lost + shared == 20
    assert f"won       {2 * won + shared} of 40" in out


def test_arena_refuses_an_odd_number_of_games(place: Place) -> None:
    code, out, errors = place.run("arena", "hex", "random", "two-distance", "--games", 3, "--device", "cpu")
    assert (code, out) == (2, "")
    assert errors.splitlines() == [
        "error: the number of games must be even, because every opening is played twice",
        "  got: --games 3",
        "  try: --games 4",
    ]


def test_a_user_plays_against_a_run(place: Place, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)
    player = load_opponent("runs/whole@8", device=open_device("cpu").device).player
    view = view_game(player, [0], size=4)
    assert view.player == "runs/whole@8"
    assert view.reply is not None
    assert view.suggestions
    code, _, errors = place.run("play", "runs/whole", "--size", 5, "--device", "cpu")
    assert (code, "--size 4" in errors) == (2, True)


@pytest.mark.parametrize(
    ("name", "content"),
    [("recipe.json", "{}"), ("recipe.json", '{"size": 1000}'), ("config.json", '{"arch": {"width": -3}}')],
)
def test_damaged_run_is_an_error(place: Place, whole: Path, name: str, content: str) -> None:
    shutil.copytree(whole, place.folder / "runs" / "hurt", dirs_exist_ok=True)
    (place.folder / "runs" / "hurt" / name).write_text(content)
    code, _, errors = place.run("arena", "hex", "runs/hurt", "random", "--games", 2, "--device", "cpu")
    assert (code, len(errors.strip().splitlines())) == (1, 3), errors
    assert f"{name} is damaged" in errors


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("arena", "hex", "nobody", "random"), "no such player"),
        (("arena", "hex", "runs/whole@many", "random"), "not a number of simulations"),
        (("arena", "hex", f"runs/whole@{'9' * 5_000}", "random"), "not a number of simulations"),
        (("arena", "hex", "n" * 5_000, "random"), "no such player"),
        (("play", "two-distance@64"), "two-distance does not search"),
        (("arena", "text", "random", "random"), "text is not a game that whet plays"),
        (("train", "hex", "--run", "runs", "--max-restarts", "0"), "not a run, and not empty"),
        (("plan", "hex", "data=absent"), "the data does not exist"),
        (("plan", "hex", "policy_weight=0", "value_weight=0"), "both loss weights are zero"),
    ],
)
def test_invalid_commands_are_errors_of_three_lines(
    place: Place, whole: Path, words: tuple[str, ...], reported: str
) -> None:
    code, _, errors = place.run(*words)
    assert (code, len(errors.strip().splitlines())) == (2, 3), errors
    assert reported in errors


def test_recorded_games_are_trained_on_and_counted_in_the_plan(place: Place) -> None:
    games = play_games(TwoDistancePlayer(), size=4, count=60, seed=5)
    lines = [" ".join(f"{'abcd'[move % 4]}{move // 4 + 1}" for move in games.move_list(game)) for game in range(60)]
    (place.folder / "games.txt").write_text("\n".join(lines) + "\n")
    code, _, errors = place.run("data", "hex", "games.txt", "--size", 4, "--out", "positions")
    assert code == 0, errors
    recipe = hex_recipe()
    config = resolve_config(recipe.Config, [f"data={place.folder / 'positions'}", "global_batch_size=16"]).config
    data = recipe.data(config)
    assert data.size == 4
    logged = recipe.describe(config)
    assert logged.num_samples == recipe.describe(config, data).num_samples == len(data.train["move"])
    decided = data.train["move"] < 0
    assert 0 < decided.sum() < len(decided)


def test_generated_training_games_are_not_in_val_or_test() -> None:
    games = play_games(TwoDistancePlayer(), size=3, count=200, seed=5)
    held_out = games.take(slice(20))
    train, *parts = split_games(games)
    known = set(game_keys(train, seed=0))
    assert any(key in known for key in game_keys(held_out, seed=0)), "a test that could not fail"
    assert len(train) == 180
    for part in parts:
        assert 0 < len(part) < 10
        assert known.isdisjoint(game_keys(part, seed=0))
    few = split_games(play_games(TwoDistancePlayer(), size=2, count=200, seed=5))
    assert [len(part) for part in few] == [180, 10, 10], "where all games are known they stay"


def test_test_split_may_be_empty_but_not_val(place: Place) -> None:
    lines = ["b1 a1 b2 a2 b3 a3 b4", "c1 a1 c2 a2 c3 a3 c4", "d1 a1 d2 a2 d3 a3 d4"]
    (place.folder / "few.txt").write_text("\n".join(lines) + "\n")
    recipe = hex_recipe()
    for test, val, name in ((0, 0.5, "no-test"), (0, 0, "no-val")):
        words = ("--size", 4, "--test-share", test, "--val-share", val, "--out", name)
        assert place.run("data", "hex", "few.txt", *words)[0] == 0
    result = recipe.data(resolve_config(recipe.Config, [f"data={place.folder / 'no-test'}"]).config)
    assert len(result.train["move"])
    assert len(result.val["move"])
    assert result.test is None
    code, _, errors = place.train("data=no-val")
    assert (code, "the val split is empty" in errors) == (2, True), errors
