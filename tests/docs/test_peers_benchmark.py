"""benchmarks/peers.py: ways that train the same say so, one that does not is found, and the table can be read."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import all as together  # noqa: E402
import peers as command  # noqa: E402
from side_by_side import pace as pacing  # noqa: E402
from side_by_side.losses import BOUND, Agreement  # noqa: E402
from side_by_side.spec import Spec  # noqa: E402
from side_by_side.table import agreement, table  # noqa: E402
from side_by_side.timing import Contest, Taken  # noqa: E402
from side_by_side.ways import bare_way, expert_way, ours_way  # noqa: E402
from side_by_side.works import hex as hex_work  # noqa: E402

SPEC = Spec(
    way="bare",
    work="hex",
    device="cpu",
    scale="tiny",
    precision="fp32",
    total_steps=12,
    has_dropout=False,
    workers=0,
    threads=1,
    takes_losses=True,
)


def losses_of(way, spec: Spec, **changes) -> list[float]:
    answers = io.StringIO()
    pace = pacing.Pace("cpu", takes_losses=True, orders=io.StringIO('{"steps": 1}\n'), answers=answers)
    way.run(replace(hex_work.make(spec), **changes), pace, spec)
    return json.loads(answers.getvalue().splitlines()[-1])["losses"]


@pytest.fixture(scope="module")
def peers() -> dict[str, list[float]]:
    return {"bare": losses_of(bare_way, SPEC), "expert": losses_of(expert_way, SPEC)}


def agreed(losses: dict[str, list[float]]) -> Agreement:
    return Agreement(names={way: way for way in losses}, precision="fp32", steps=12, losses=losses, problems={})


def test_whet_has_the_losses_of_the_bare_loop(peers: dict[str, list[float]]) -> None:
    found = agreed({**peers, "whet": losses_of(ours_way, replace(SPEC, way="whet"))})
    assert len(found.losses["whet"]) == 12
    assert all(found.agrees(way) for way in found.losses)
    assert not any("NOT EQUAL" in line for line in agreement(found))


@pytest.mark.parametrize("fault", [{"lr": 5.5e-3}, {"clip": 0.1}, {"batch": 15}])
def test_a_way_that_trains_otherwise_is_found(peers: dict[str, list[float]], fault: dict[str, float]) -> None:
    found = agreed({**peers, "whet": losses_of(ours_way, replace(SPEC, way="whet"), **fault)})
    assert not found.agrees("whet")
    assert sum("NOT EQUAL" in line for line in agreement(found)) == 1


@pytest.mark.parametrize(("whet", "agrees"), [(0.985, True), (1.019, True), (1.03, False)])
def test_half_precision_is_judged_by_how_far_it_takes_peers_from_float32(whet: float, agrees: bool) -> None:
    found = Agreement(
        names={},
        precision="bf16",
        steps=2,
        losses={"bare": [1.0, 1.01], "expert": [1.0, 1.009], "whet": [1.0, whet]},
        problems={},
        exact=[1.0, 1.0],
    )
    assert found.noise == pytest.approx(0.01)
    assert found.agrees("whet") == agrees
    assert replace(found, exact=None).bound == BOUND["bf16"], "nobody to say"


@pytest.mark.parametrize("ways", [("expert", "whet"), ("whet",)])
def test_the_yardstick_is_named_also_where_it_fails_in_half_precision(
    ways: tuple[str, ...],
) -> None:
    found = Agreement(
        names={way: f"{way} loop" for way in ("bare", "expert", "whet")},
        precision="bf16",
        steps=2,
        losses={way: [1.0, 1.01] for way in ways},
        problems={"bare loop": "no memory"},
        exact=[1.0, 1.0],
    )
    assert "difference from the bare loop in fp32 (" in next(agreement(found))
    assert f"difference from the {ways[0]} loop (" in next(agreement(replace(found, exact=None)))


def test_the_table_compares_with_the_best_peer_inside_each_round() -> None:
    def taken(way: str, blocks: list[float]) -> Taken:
        facts = {"first_step": 3.0, "warmup_steps": 9, "warmup_seconds": 2.0, "rough": 0.1}
        return Taken(way=way, name=way, batch=10, blocks=blocks, **facts)

    ways = [taken("trainer", [0.4] * 6), taken("bare", [0.2, 0.1, 0.2, 0.1, 0.2, 0.1]), taken("whet", [0.1, 0.05] * 3)]
    contest = Contest(
        spec=SPEC, words="a work", flops=1e9, ceiling=1e11, taken=ways, missing={"Fabric": "not there"}, block_steps=4
    )
    lines = list(table(contest))
    row = next(line for line in lines if line.startswith("| whet"))
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[2] == "133"
    assert cells[4] == "2.00 (2.00 to 2.00)"
    assert cells[6] == "13.3%"
    assert cells[8] == f"{3.0 + 2.0 - 10 * 0.075:.1f} s"
    assert "- Fabric: not there" in lines


def test_a_contest_without_rounds_or_ways_is_none() -> None:
    with pytest.raises(SystemExit):
        command.parse(["--rounds", "0"])
    lines = list(command.one_work("hex", command.parse(["--ways", "whet-graph", "trainer-fixed"])))
    assert lines[0].endswith("none of whet-graph, trainer-fixed can train it on cpu")


@pytest.mark.parametrize(
    ("ending", "written"), [("sys.exit(0)", ["cpu"]), ("sys.exit(3)", ["cpu"]), ("raise RuntimeError", [])]
)
def test_a_result_that_broke_off_replaces_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, written: list[str]
) -> None:
    (tmp_path / "overhead.py").write_text(f"import sys\nprint('half a result')\n{ending}\n")
    pages: list[str] = []
    monkeypatch.setattr(together, "HERE", tmp_path)
    # Its steps run on the CPU whatever device the others are asked for.
    monkeypatch.setattr(together, "head", lambda title, device, told: [title, told])
    monkeypatch.setattr(together, "write", lambda name, device, text: pages.append(device))
    together.run("overhead", device="cuda", is_small=False)
    assert pages == written


@pytest.mark.slow
def test_the_whole_command_in_small(tmp_path: Path) -> None:
    words = ["--small", "--threads", "1", "--workloads", "hex", "--ways", "bare", "whet", "--losses", "3"]
    command = [sys.executable, BENCHMARKS / "peers.py", *words, "--out", tmp_path / "found.md"]
    subprocess.run(command, check=True, capture_output=True)
    text = (tmp_path / "found.md").read_text()
    assert "| whet, default plan |" in text
    assert "The first 3 losses" in text
