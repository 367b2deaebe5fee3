"""Every kind of state that torch can have: a run that is stopped, killed or rolled back ends with the same bits."""

import json
from pathlib import Path

import pytest

from fork_server import ForkServer
from whet.checkpoint import store
from whet.checkpoint.comparison import compare_snapshots
from whet.checkpoint.snapshot import Snapshot

pytestmark = pytest.mark.torch

PROGRAMS_FILE = Path(__file__).parents[1] / "support" / "state_programs.py"
PROGRAMS = [
    line.split("def ")[1].split("(")[0]
    for decorator, line in zip(
        PROGRAMS_FILE.read_text().splitlines(), PROGRAMS_FILE.read_text().splitlines()[1:], strict=False
    )
    if decorator == "@program"
]


def train(fork_server: ForkServer, program: str, folder: Path, *, mode: str = "", code: int = 0) -> None:
    ended = fork_server.start(PROGRAMS_FILE, program, mode, folder).wait()
    assert ended.code == code, ended.errors


def last_state(folder: Path) -> Snapshot:
    newest = store.load_newest(folder / "checkpoints")
    assert newest is not None
    assert newest.step == 24
    return newest.snapshot


def differences(ours: Path, theirs: Path) -> list[str]:
    names = compare_snapshots(last_state(ours), last_state(theirs))
    # The code of a module that was added in the middle is recorded when a session begins.
    return [name for name in names if not name.startswith("progress.code.")]


def exactness(folder: Path) -> list[str]:
    events = (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines())
    return [event["exactness"] for event in events if event["kind"] == "resume"]


# One of each kind: data, optimizers, state beside the weights, modules that change.
IN_GATE = (
    "stream_of_own_generators", "sampler_with_state", "lookahead", "optimizer_of_every_structure", "averaged_model",
    "extra_state", "shared_containers", "late_buffers", "weight_norm_in_the_middle",
    "layers_replaced_and_added_in_the_middle", "sparse_momentum", "head_replaced_and_kept_by_the_optimizer",
    "weight_norm_added_and_removed_in_the_middle", "inference_tensors_as_buffers",
    "numpy_draws_from_another_bit_generator", "nested_tensor_as_an_attribute",
)  # fmt: skip
assert {*IN_GATE} < {*PROGRAMS}


@pytest.mark.parametrize("program", [p if p in IN_GATE else pytest.param(p, marks=pytest.mark.slow) for p in PROGRAMS])
def test_a_killed_run_ends_with_the_same_bits(program: str, fork_server: ForkServer, memory_folder: Path) -> None:
    train(fork_server, program, memory_folder / "whole")
    train(fork_server, program, memory_folder / "killed", mode="kill", code=-9)
    train(fork_server, program, memory_folder / "killed")
    assert differences(memory_folder / "whole", memory_folder / "killed") == []
    assert exactness(memory_folder / "killed") == ["bit-exact"]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_stopped_run_ends_with_the_same_bits(program: str, fork_server: ForkServer, tmp_path: Path) -> None:
    train(fork_server, program, tmp_path / "whole")
    train(fork_server, program, tmp_path / "again")
    assert differences(tmp_path / "whole", tmp_path / "again") == []
    train(fork_server, program, tmp_path / "stopped", mode="int")
    train(fork_server, program, tmp_path / "stopped")
    assert differences(tmp_path / "whole", tmp_path / "stopped") == []
    assert exactness(tmp_path / "stopped") == ["bit-exact"]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_that_is_rolled_back_ends_with_the_same_bits(
    program: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    train(fork_server, program, tmp_path / "whole")
    train(fork_server, program, tmp_path / "rolled", mode="roll back")
    assert differences(tmp_path / "whole", tmp_path / "rolled") == []
