"""Records of games and folders of games: parsing, import, splits and damage."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from amounts import amount
from paths import Run
from whet.base.errors import UsageError, WhetError
from whet.cli.main import run
from whet.recipes.hex.game.board import BLUE, EMPTY, NO_MOVE, RED, SWAP, cell_name, parse_cell
from whet.recipes.hex.game.game import replay
from whet.recipes.hex.game.game_folder import GameFolder, encode_arrays, read_arrays
from whet.recipes.hex.game.games import play_games, unroll
from whet.recipes.hex.game.notation import read_game, write_game
from whet.recipes.hex.game.players import RandomPlayer
from whet.recipes.hex.game.record_import import ImportOptions, import_records
from whet.recipes.hex.game.records import RejectedGames, open_records
from whet.recipes.hex.game.rules import legal, winners
from whet.recipes.hex.game.symmetry import MIRRORED, transform

GAMES = Path(os.environ.get("WHET_TEST_DATA", "/nowhere")) / "hex-neurohex-13x13" / "raw_games.dat"


Whet = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Whet:
    """Run `whet ARGUMENTS` in an empty folder and in this process."""
    monkeypatch.chdir(tmp_path)

    def run_here(*words: str) -> subprocess.CompletedProcess[str]:
        code = run([*words])
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return run_here


def made(count: int, *, size: int = 4, seed: int = 0) -> list[tuple[int, ...]]:
    games = play_games(RandomPlayer(), size=size, count=count, seed=seed)
    return [games.move_list(number) for number in range(count)]


def written(moves: tuple[int, ...], *, size: int = 4, mirrored: bool = False) -> str:
    names = [cell_name(m % size * size + m // size if mirrored else m, size=size) for m in moves]
    return " ".join(names)


def test_games_are_written_and_read_back() -> None:
    for size in (3, 11, 26):
        for moves in [*made(3, size=min(size, 11)), (size * size - 1, 0), (1, SWAP, 5), (1, SWAP)]:
            result = read_game(write_game(replay(moves, size=size)))
            assert (result.moves(size), result.size) == (moves, size)


@pytest.mark.parametrize(
    ("line", "size", "words", "winner"),
    [
        ("#13,a4g7", 13, "a4 g7", EMPTY),
        ("http://www.trmph.com/hex/board#11,A4b11", 11, "a4 b11", EMPTY),
        ("#13,a4g7 1", 13, "a4 g7", BLUE),
        ("#13,a4g7 r", 13, "a4 g7", RED),
        ("https://hexworld.org/board/#15r9c1,e6:sf7i8,g10", 15, "e6 swap f7 i8 g10", EMPTY),
        ("11nc1,b4:sh4:rb", 11, "b4 swap h4", RED),
        ("#11,b4h4:fw", 11, "b4 h4", BLUE),
        ("1. a4 b5, 2. c6 swap", None, "a4 b5 c6 swap", EMPTY),
        ("1.a4 2.b5", None, "a4 b5", EMPTY),
        ("a4;b05 resign", None, "a4 b5", RED),
        ("a4 b5 c1 resign", None, "a4 b5 c1", BLUE),
        ("#5,", 5, "", EMPTY),
    ],
)
def test_lines_are_parsed(line: str, size: int | None, words: str, winner: int) -> None:
    result = read_game(line)
    assert (result.size, " ".join(result.names), result.winner) == (size, words, winner)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "hello",
        "#13,a4g",
        "#13,a4:pb5",
        "#27,a1",
        "#1,a1",
        "#13,a4:rbg7",
        "a0",
        "a27",
        "ä4",
        "#13,a4 b5",
        "#13,a4b5 #13,c6",
        "#13,a4b5\r#13,c6",
        "a4 b5.",
        "a1" * 9000,
    ],
)
def test_invalid_lines_are_errors(line: str) -> None:
    with pytest.raises(UsageError):
        read_game(line)


@pytest.mark.parametrize("mirrored", [False, True])
def test_both_orientations_are_detected(tmp_path: Path, mirrored: bool) -> None:
    games = made(200, size=5)
    path = tmp_path / "games.txt"
    lines = "\r\n".join(written(moves, size=5, mirrored=mirrored) for moves in games)
    path.write_bytes(b"\xef\xbb\xbf" + lines.encode())  # As some editors write it.
    source = open_records(path)
    assert source.orientation.is_mirrored == mirrored
    assert source.orientation.num_complete == 200 > source.orientation.num_complete_otherwise
    rejected = RejectedGames()
    (result,) = source.games(rejected)
    assert [result.move_list(number) for number in range(200)] == games
    assert rejected.total == 0


def test_edges_are_asked_for_where_the_games_do_not_show_them(tmp_path: Path, here: Whet) -> None:
    path = tmp_path / "games.txt"
    # Nobody has connected anything: only the record says who won.
    path.write_text("a1 b1 blue\na2 c1 red\nb2 c3 blue\n")
    done = here("data", "hex", str(path), "--size", "4")
    assert done.returncode == 2
    assert "do not show which edges" in done.stderr
    assert "try: --first top-bottom, or --first left-right" in done.stderr
    for edges, words in (("top-bottom", "top and bottom (as given"), ("left-right", "left and right")):
        given = here("data", "hex", str(path), "--size", "4", "--first", edges)
        assert given.returncode == 0, given.stderr
        assert f"the first player connects {words}" in given.stdout
        assert "3 by the record alone" in given.stdout
    # A game on the long diagonal ends both ways.
    path.write_text("a1 a2 b1 c1 b2 c3\n")
    both = open_records(path, first="top-bottom").orientation
    assert both.num_complete >= both.num_complete_otherwise
    assert here("data", "hex", str(path), "--first", "north").returncode == 2


def test_given_edges_win_over_what_the_games_show(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "games.txt"
    path.write_text("\n".join(written(moves, size=5) for moves in made(50, size=5)))
    assert not open_records(path).orientation.is_mirrored
    given = open_records(path, first="left-right").orientation
    assert given.is_mirrored
    assert given.num_complete < given.num_complete_otherwise == 50
    assert run(["data", "hex", str(path), "--first", "left-right"]) == 1
    assert "try: --first top-bottom: 50 games end that way" in capfd.readouterr().err


def test_a_file_without_games_is_located_by_line_and_word(tmp_path: Path, here: Whet) -> None:
    path = tmp_path / "games.txt"
    path.write_text("// a comment\n\na4 g7 zebra\n")
    done = here("data", "hex", str(path))
    assert done.returncode == 2
    assert "got: games.txt:3: not a move: 'zebra'" in done.stderr
    path.write_text("#4,a1b2a1\n")
    done = here("data", "hex", str(path))
    assert "games.txt:1 (a1 twice)" in done.stderr
    trained = here("train", "hex", f"data={path}")
    assert trained.returncode == 2
    assert f"try: whet data hex {path} --out DIR, then data=DIR" in trained.stderr


def test_bad_games_are_rejected_and_located(tmp_path: Path, whet: Run, capsys: pytest.CaptureFixture[str]) -> None:
    games = [written(moves) for moves in made(60)]
    bad = ["a1 a1 b2 blue", "what is this", "#5,a1b2", "a1 b1", f"{games[0]} d4 d3 d2", "#4,a1b2c3 z", "#4,a1z9"]
    told_wrongly = [f"{moves} {'red' if len(moves.split()) % 2 else 'blue'}" for moves in games[:1]]
    told_rightly = ["a1 b1 blue"]
    path = tmp_path / "games.txt"
    path.write_text("// a comment\n\n" + "\n".join([*games, *bad, *told_wrongly, *told_rightly]) + "\n")
    with pytest.raises(WhetError, match="more than 6 games are invalid"):
        import_records(path, into=tmp_path / "set")
    assert not (tmp_path / "set").exists()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["games.txt"], "nothing is left half-written"
    done = whet("data", "hex", str(path), "--out", str(tmp_path / "set"), "--max-bad", "8", "--size", "4", "--json")
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)
    kinds = {"unreadable": 2, "other size": 1, "illegal": 3, "unfinished": 1, "contradiction": 1}
    assert manifest["rejected"] == kinds
    first, second, third = manifest["rejected_examples"]["illegal"]
    assert first == "games.txt:69 (z9 is not on the 4x4 board)"
    assert (second, third.partition(" ")[0]) == ("games.txt:63 (a1 twice)", "games.txt:67")
    assert manifest["num_read"] == 60 + 7 + 2
    assert manifest["num_unconfirmed"] == 1, "the winner of an unfinished game is known from the record only"
    assert json.loads((tmp_path / "set" / "manifest.json").read_text()) == manifest
    assert run(["data", "hex", str(path), "--max-bad=8", "--size=4", "--strict"]) == 1
    assert "games.txt:63" in capsys.readouterr().out
    for words, reported in (
        (("hex", "nowhere"), "do not exist"),
        (("hex", str(path), "--out", str(tmp_path / "set"), "--max-bad=9"), "is not empty"),
        (("hex", str(path), "--size=40"), "size"),
        (("hex", str(path), "--val-share=2"), "val_share"),
    ):
        assert run(["data", *words]) == 2
        assert reported in capsys.readouterr().err


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[int, ...]], Path]:
    """600 games of 4x4, some of them again, and once turned by 180 degrees."""
    folder = tmp_path_factory.mktemp("kept")
    games = list(dict.fromkeys(made(600, seed=4)))
    turned = [tuple(15 - move for move in moves) for moves in games[:50]]
    (folder / "games.trmph").write_text(
        "\n".join("#4," + written(moves).replace(" ", "") for moves in [*games, *games[:30], *turned])
    )
    manifest = import_records(folder / "games.trmph", into=folder / "set", options=ImportOptions(val_share=0.2, seed=3))
    assert manifest.repeated >= 80
    return games, folder / "set"


def test_positions_are_those_of_the_games(kept) -> None:
    games, folder = kept
    read = GameFolder.read(folder)
    for name, part in read.splits.items():
        samples, place = unroll(part), 0
        for number in range(len(part)):
            moves = part.move_list(number)
            assert moves in games
            won = replay(moves, size=4).winner
            assert part.winners[number] == won
            for ply in range(len(moves) + 1):
                then = replay(moves[:ply], size=4)
                assert samples.positions.boards[place].reshape(-1).tolist() == list(then.cells)
                assert samples.positions.movers[place] == then.mover
                assert samples.results[place] == (then.mover == won)
                # A finished game has no move to learn.
                assert samples.moves[place] == (moves[ply] if ply < len(moves) else NO_MOVE)
                place += 1
        assert place == len(samples) == read.manifest.splits[name].positions
        assert ((winners(samples.positions.boards) != EMPTY) == (samples.moves == NO_MOVE)).all()


def test_no_game_is_in_two_splits(kept) -> None:
    read = GameFolder.read(kept[1])
    seen: dict[tuple[int, ...], str] = {}
    for name, part in read.splits.items():
        assert len(part) == read.manifest.splits[name].games > 0
        for number in range(len(part)):
            moves = part.move_list(number)
            either_way = min(moves, tuple(15 - move for move in moves))
            assert seen.setdefault(either_way, name) == name
    assert 0.12 < len(read.splits["val"]) / len(seen) < 0.28


def test_seed_determines_bytes_and_splits(kept, tmp_path: Path) -> None:
    _, folder = kept
    source = folder.parent / "games.trmph"
    again = import_records(source, into=tmp_path / "again", options=ImportOptions(val_share=0.2, seed=3))
    read = GameFolder.read(folder)
    assert again == read.manifest
    assert (tmp_path / "again" / "games.npz").read_bytes() == (folder / "games.npz").read_bytes()
    assert GameFolder.read(tmp_path / "again").fingerprint == read.fingerprint
    import_records(source, into=tmp_path / "other", options=ImportOptions(val_share=0.2, seed=4))
    other = GameFolder.read(tmp_path / "other")
    assert other.fingerprint != read.fingerprint
    assert sum(map(len, other.splits.values())) == sum(map(len, read.splits.values()))


def test_damaged_folders_are_errors(kept, tmp_path: Path) -> None:
    _, folder = kept
    arrays = read_arrays(folder / "games.npz")
    assert arrays is not None
    twice = {**arrays, "moves": np.where(np.arange(arrays["moves"].shape[1]) == 1, 0, arrays["moves"])}
    for name, damage, reported in (
        ("games.npz", lambda data: data[:-1], "games.npz is damaged"),
        ("games.npz", lambda data: data[:200] + b"\x01" + data[201:], "games.npz is damaged"),
        ("games.npz", lambda data: b"", "games.npz is damaged"),
        ("games.npz", lambda data: encode_arrays({"moves": arrays["moves"]}), "games.npz is damaged"),
        ("games.npz", lambda data: encode_arrays({**arrays, "winners": arrays["winners"][:-1]}), "illegal games"),
        ("games.npz", lambda data: encode_arrays({**arrays, "moves": arrays["moves"] + 100}), "illegal games"),
        ("games.npz", lambda data: encode_arrays(twice), "illegal games"),
        (
            "games.npz",
            lambda data: encode_arrays({**arrays, "split": arrays["split"] + 1}),
            "splits that differ from the manifest",
        ),
        ("manifest.json", lambda data: data[:100], "damaged"),
        ("manifest.json", lambda data: data.replace(b'"size": 4', b'"size": 99'), "invalid board size"),
        ("manifest.json", lambda data: b"[]", "damaged"),
        ("manifest.json", lambda data: data.replace(b"games 1", b"games 9"), "an unsupported format"),
        ("manifest.json", lambda data: data.replace(b'"train"', b'"trial"'), "damaged"),
        ("manifest.json", lambda data: data.replace(b'"positions": ', b'"positions": -'), "wrong value"),
    ):
        shutil.copytree(folder, tmp_path / "copy")
        path = tmp_path / "copy" / name
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(WhetError) as refused:
            GameFolder.read(tmp_path / "copy")
        assert reported in str(refused.value)
        shutil.rmtree(tmp_path / "copy")
    with pytest.raises(UsageError, match="not a folder of games"):
        GameFolder.read(tmp_path)


def independent_winner(line: str) -> int:
    """By flood fill from the first player's top edge, on a set of (column, row), without code of whet."""
    for first in (0, 1):
        stones = {(ord(word[0]) - 97, int(word[1:]) - 1) for word in line.split()[first::2]}
        begin = {stone for stone in stones if stone[1 - first] == 0}
        todo = list(begin)
        while todo:
            column, row = todo.pop()
            for near in ((column + x, row + y) for x, y in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1))):
                if near in stones and near not in begin:
                    begin.add(near)
                    todo.append(near)
        if any(stone[1 - first] == 12 for stone in begin):
            return BLUE if first == 0 else RED
    return EMPTY


@pytest.mark.skipif(not GAMES.exists(), reason="WHET_TEST_DATA has no Hex games")
def test_winners_of_recorded_games_agree_with_an_independent_replay(tmp_path: Path, report_count) -> None:
    lines = GAMES.read_text().splitlines()[:: amount(10, 1)]
    some = tmp_path / GAMES.name
    some.write_text("\n".join(lines) + "\n")
    source, rejected = open_records(some), RejectedGames()
    assert (source.size, source.orientation.is_mirrored) == (13, False)
    result = np.concatenate([games.winners for games in source.games(rejected)]).tolist()
    expected = [independent_winner(line) for line in lines]
    assert rejected.total == 0
    assert result == expected
    report_count(
        f"{len(result):,} recorded games: the first player won {result.count(BLUE):,}, the second {result.count(RED):,}"
    )
    # The same move by move, and the positions just before the end are not won.
    for line, winner in list(zip(lines, result, strict=True))[::50]:
        moves = [parse_cell(word, size=13) for word in line.split()]
        assert replay(moves, size=13).winner == winner
        assert replay(moves[:-1], size=13).winner == EMPTY


def test_samples_of_games_without_positions() -> None:
    samples = unroll(play_games(RandomPlayer(), size=3, count=0, seed=0))
    assert len(samples) == 0
    assert transform(samples.positions, MIRRORED).boards.shape == (0, 3, 3)
    assert legal(samples.positions.boards).shape == (0, 9)


def test_too_few_games_for_validation_are_noticed_when_they_are_prepared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "games.txt"
    for count, words in ((1, "split is empty: more games, or another --seed or --val-share"), (60, "whet train hex")):
        path.write_text("\n".join(written(moves, size=5) for moves in made(count, size=5)))
        assert run(["data", "hex", str(path), "--out", str(tmp_path / f"{count}")]) == 0
        assert words in capfd.readouterr().err
