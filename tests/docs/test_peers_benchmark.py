"""benchmarks/peers.py: equal and different loops are recognized, and the table can be parsed."""

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
from side_by_side import step_gate  # noqa: E402
from side_by_side.loops import bare_loop, expert_loop, whet_loop  # noqa: E402
from side_by_side.losses import BOUND, Agreement  # noqa: E402
from side_by_side.spec import Spec  # noqa: E402
from side_by_side.table import agreement, table  # noqa: E402
from side_by_side.timing import LoopComparison, LoopTimes  # noqa: E402
from side_by_side.workloads import hex as hex_workload  # noqa: E402

SPEC = Spec(
    loop="bare",
    workload="hex",
    device="cpu",
    scale="tiny",
    precision="fp32",
    total_steps=12,
    has_dropout=False,
    workers=0,
    threads=1,
    records_losses=True,
)
from side_by_side.workloads.foreign import MODELS  # noqa: E402


def losses_of(loop, spec: Spec, **changes) -> list[float]:
    answers = io.StringIO()
    gate = step_gate.StepGate("cpu", records_losses=True, orders=io.StringIO('{"steps": 1}\n'), answers=answers)
    loop.run(replace(hex_workload.make(spec), **changes), gate, spec)
    return json.loads(answers.getvalue().splitlines()[-1])["losses"]


@pytest.fixture(scope="module")
def peers() -> dict[str, list[float]]:
    return {"bare": losses_of(bare_loop, SPEC), "expert": losses_of(expert_loop, SPEC)}


def agreed(losses: dict[str, list[float]]) -> Agreement:
    return Agreement(names={loop: loop for loop in losses}, precision="fp32", steps=12, losses=losses, problems={})


def test_whet_has_the_losses_of_the_bare_loop(peers: dict[str, list[float]]) -> None:
    result = agreed({**peers, "whet": losses_of(whet_loop, replace(SPEC, loop="whet"))})
    assert len(result.losses["whet"]) == 12
    assert all(result.agrees(loop) for loop in result.losses)
    assert not any("NOT EQUAL" in line for line in agreement(result))


@pytest.mark.parametrize("fault", [{"lr": 5.5e-3}, {"clip": 0.1}, {"batch": 15}])
def test_a_loop_that_trains_differently_is_reported(peers: dict[str, list[float]], fault: dict[str, float]) -> None:
    result = agreed({**peers, "whet": losses_of(whet_loop, replace(SPEC, loop="whet"), **fault)})
    assert not result.agrees("whet")
    assert sum("NOT EQUAL" in line for line in agreement(result)) == 1


@pytest.mark.parametrize(("whet", "agrees"), [(0.985, True), (1.019, True), (1.03, False)])
def test_the_bound_in_half_precision_is_the_distance_of_peers_from_float32(whet: float, agrees: bool) -> None:
    result = Agreement(
        names={},
        precision="bf16",
        steps=2,
        losses={"bare": [1.0, 1.01], "expert": [1.0, 1.009], "whet": [1.0, whet]},
        problems={},
        exact=[1.0, 1.0],
    )
    assert result.noise == pytest.approx(0.01)
    assert result.agrees("whet") == agrees
    assert replace(result, exact=None).bound == BOUND["bf16"], "nothing to report"


@pytest.mark.parametrize("loops", [("expert", "whet"), ("whet",)])
def test_the_reference_is_named_even_if_it_fails_in_half_precision(
    loops: tuple[str, ...],
) -> None:
    result = Agreement(
        names={loop: f"{loop} loop" for loop in ("bare", "expert", "whet")},
        precision="bf16",
        steps=2,
        losses={loop: [1.0, 1.01] for loop in loops},
        problems={"bare loop": "no memory"},
        exact=[1.0, 1.0],
    )
    assert "difference from the bare loop in fp32 (" in next(agreement(result))
    assert f"difference from the {loops[0]} loop (" in next(agreement(replace(result, exact=None)))


def test_the_table_compares_with_the_best_peer_within_each_round() -> None:
    def taken(loop: str, blocks: list[float]) -> LoopTimes:
        facts = {"first_step": 3.0, "warmup_steps": 9, "warmup_seconds": 2.0, "estimate": 0.1}
        return LoopTimes(loop=loop, name=loop, batch=10, blocks=blocks, **facts)

    loops = [taken("trainer", [0.4] * 6), taken("bare", [0.2, 0.1, 0.2, 0.1, 0.2, 0.1]), taken("whet", [0.1, 0.05] * 3)]
    comparison = LoopComparison(
        spec=SPEC,
        description="a workload",
        flops=1e9,
        ceiling=1e11,
        times=loops,
        missing={"Fabric": "not there"},
        block_steps=4,
    )
    lines = list(table(comparison))
    row = next(line for line in lines if line.startswith("| whet"))
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[2] == "133"
    assert cells[4] == "2.00 (2.00 to 2.00)"
    assert cells[6] == "13.3%"
    assert cells[8] == f"{3.0 + 2.0 - 10 * 0.075:.1f} s"
    assert "- Fabric: not there" in lines


def test_a_comparison_needs_rounds_and_loops() -> None:
    with pytest.raises(SystemExit):
        command.parse(["--rounds", "0"])
    lines = list(command.one_workload("hex", command.parse(["--loops", "whet-graph", "trainer-fixed"])))
    assert lines[0].endswith("none of whet-graph, trainer-fixed can train it on cpu")


@pytest.mark.parametrize(
    ("ending", "written"), [("sys.exit(0)", ["cpu"]), ("sys.exit(3)", ["cpu"]), ("raise RuntimeError", [])]
)
def test_a_crashed_benchmark_replaces_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, written: list[str]
) -> None:
    (tmp_path / "overhead.py").write_text(f"import sys\nprint('half a result')\n{ending}\n")
    pages: list[str] = []
    monkeypatch.setattr(together, "HERE", tmp_path)
    # Its steps run on the CPU, whatever the device of the others.
    monkeypatch.setattr(together, "head", lambda title, device, logged: [title, logged])
    monkeypatch.setattr(together, "write", lambda name, device, text: pages.append(device))
    together.run("overhead", together.PAGES["overhead"], device="cuda", is_small=False, seconds=60, log=None)
    assert pages == written


def test_a_benchmark_ends_at_its_limit_and_leaves_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless.py").write_text("import time\nprint('half a result', flush=True)\ntime.sleep(600)\n")
    monkeypatch.setattr(together, "HERE", tmp_path)
    part, log = together.Part(command=("endless.py",), minutes=1), tmp_path / "log"
    code = together.run("endless", part, device="cpu", is_small=False, seconds=3, log=log)
    assert code == together.STOPPED
    assert log.read_text().startswith("half a result\n")
    assert "exit code 124" in log.read_text()


def test_every_benchmark_of_an_issue_exists_and_fits_into_a_call() -> None:
    assert {number for part in together.ISSUES.values() for number in part.issues} == {25, 27, 28, 29}
    for part in together.ISSUES.values():
        assert part.minutes <= 9, "a call on the GPU machine has 10 minutes"
        path = BENCHMARKS / part.command[0] if part.command[0] != "-m" else BENCHMARKS.parent / part.command[-1]
        assert path.exists()
    models = [model for part in together.ISSUES.values() if part.command[0] == "foreign.py"
              for model in part.command[part.command.index("--model") + 1 :]]  # fmt: skip
    assert sorted(models) == sorted(MODELS)


@pytest.mark.slow
def test_smoke_run_of_the_command(tmp_path: Path) -> None:
    description = ["--small", "--threads", "1", "--workloads", "hex", "--loops", "bare", "whet", "--losses", "3"]
    command = [sys.executable, BENCHMARKS / "peers.py", *description, "--out", tmp_path / "found.md"]
    subprocess.run(command, check=True, capture_output=True)
    text = (tmp_path / "found.md").read_text()
    assert "| whet, default plan |" in text
    assert "The first 3 losses" in text
