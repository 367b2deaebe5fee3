"""Several real processes that train one model (CPU, gloo): any number of processes can read their checkpoints, and a
training that lost one of them ends with the same bits. With WHET_RANKS_DEVICE=cuda, they share one GPU."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rank_processes
from fork_server import TIMEOUT_SECONDS, ForkServer
from rank_fault_job import Net
from rank_processes import Ranks
from whet.checkpoint import store
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.training.weights import load_weights

pytestmark = pytest.mark.torch

KINDS = ("off", "full")
CASES = (("off", 0), ("full", 0), ("full", 1))


@pytest.fixture(scope="module")
def whole(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Uninterrupted runs of two processes, by sharding mode."""
    folder = tmp_path_factory.mktemp("whole")

    def run(kind: str) -> Path:
        if not (folder / kind).exists():
            rank_processes.train(fork_server, folder / kind, 2, sharding=kind)
        return folder / kind

    return run


def files_of(run: Path, step: int) -> set[str]:
    return {path.name for path in (open_run(run).checkpoints / store.checkpoint_name(step)).iterdir()}


def wait_for(session: Ranks, word: str, *, rank: int, seconds: float = TIMEOUT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not any(True for _ in session.reported(word, rank=rank)):
        assert time.monotonic() < deadline, f"no {word!r}"
        time.sleep(0.01)


def kill(session: Ranks, *, rank: int, where: str) -> float:
    """Send SIGKILL to one process at a place. Return how long the others continued."""
    wait_for(session, where, rank=rank)
    session.lives[rank].send(signal.SIGKILL)
    start = time.monotonic()
    codes = session.wait()
    assert codes[rank] == -signal.SIGKILL
    assert all(code != 0 for code in codes)
    return time.monotonic() - start


# --- any number of processes -----------------------------------------------------------------------------------------


def test_rows_on_disk_are_read_by_another_number(fork_server: ForkServer, tmp_path: Path) -> None:
    """4 -> 1 -> 2, each writing what it has read: weights, average and optimizer are the same bits."""
    run = tmp_path / "run"
    rank_processes.train(fork_server, run, 4, sharding="full", steps=2)
    first = rank_processes.state(run)
    # model/scale has one row and model/last.bias three: some processes hold nothing of them.
    assert files_of(run, 2) == {
        "manifest.json",
        "state.json",
        "state.safetensors",
        *(f"shard-{r:04d}.safetensors" for r in range(4)),
    }
    # A reader that only uses the model reads all of it.
    used = Net(0.0)
    assert load_weights(run, used) == 2
    assert all(torch.equal(tensor, first.tensors[f"ema/{name}"]) for name, tensor in used.named_parameters())
    for size in (1, 2):
        session = rank_processes.train(fork_server, run, size, sharding="full", steps=2, saves_again=True)
        assert "world_size" in session.reported("resume")[0]
        assert rank_processes.is_same(rank_processes.state(run), first), size
        assert sum(name.startswith("shard") for name in files_of(run, 2)) == (size if size > 1 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 8, 2), (8, 1, 4), (2, 4, 1), (3, 8, 3)])
def test_rows_on_disk_are_read_by_any_number(fork_server: ForkServer, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    run = tmp_path / "run"
    rank_processes.train(fork_server, run, sizes[0], sharding="full", steps=4)
    first = rank_processes.state(run)
    for size in sizes[1:]:
        rank_processes.train(fork_server, run, size, sharding="full", steps=4, saves_again=True)
        assert rank_processes.is_same(rank_processes.state(run), first), size


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_another_number_of_processes_keeps_the_order(fork_server: ForkServer, tmp_path: Path, kind: str) -> None:
    """2 -> 1 -> 2 processes: every step has the samples it would have had, and the weights agree to rounding."""
    alone = rank_processes.train(fork_server, tmp_path / "alone", 1, dropout=0.0)
    run, sittings = tmp_path / "run", []
    for size, until in ((2, 4), (1, 8), (2, None)):
        stop = {} if until is None else {"stop_at": until}
        sittings.append(rank_processes.train(fork_server, run, size, sharding=kind, dropout=0.0, **stop))
    assert rank_processes.order(*sittings) == rank_processes.order(alone)
    assert all("world_size" in session.reported("resume")[0] for session in sittings[1:])
    assert rank_processes.distance(rank_processes.state(run), rank_processes.state(tmp_path / "alone")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_background_checkpoints_of_a_simulated_device_are_the_same(
    fork_server: ForkServer, tmp_path: Path, whole: Callable[[str], Path], kind: str
) -> None:
    """Threads write the copied state while all ranks continue; on a CPU nothing is copied otherwise."""
    run = tmp_path / "run"
    rank_processes.train(fork_server, run, 2, sharding=kind, beside=True, seconds=0.02)
    assert any(event.get("background") for event in read_events(run, kinds=("checkpoint",)))
    assert rank_processes.is_same(rank_processes.state(run), rank_processes.state(whole(kind)))
    step = store.list_steps(open_run(run).checkpoints)[-2]
    again = rank_processes.train(fork_server, tmp_path / "again", 2, sharding=kind, stop_at=step)
    assert again.reported("checkpoint")
    assert rank_processes.is_same(rank_processes.state(run, step), rank_processes.state(tmp_path / "again"))


# --- a process that is lost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "place", "rank"),
    [
        ("full", "save", 1),
        *(
            pytest.param(kind, place, rank, marks=pytest.mark.slow)
            for kind in KINDS
            for place in ("step", "save", "load")
            for rank in (0, 1)
            # Without sharding the second process saves nothing.
            if (place, rank) != ("save", 1)
        ),
    ],
)
def test_a_lost_process_costs_no_bit(
    fork_server: ForkServer, tmp_path: Path, whole: Callable[[str], Path], kind: str, place: str, rank: int
) -> None:
    """SIGKILL while it trains, saves or loads: the others exit soon, and the same command resumes to the same bits."""
    run = tmp_path / "run"
    if place == "load":
        rank_processes.train(fork_server, run, 2, sharding=kind, stop_at=5)
    pause = {} if place == "step" else {"pause": f"{place} {rank}"}
    where = "step 5" if place == "step" else f"inside {place}"
    session = rank_processes.start(fork_server, run, 2, sharding=kind, seconds=0.02, **pause)
    assert kill(session, rank=rank, where=where) < 10
    if place == "save":
        assert store.list_steps(open_run(run).checkpoints)[-1] == 2, "unfinished checkpoints have no final name"
    rank_processes.train(fork_server, run, 2, sharding=kind)
    assert rank_processes.is_same(rank_processes.state(run), rank_processes.state(whole(kind)))


# --- a process that computes for ever --------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "rank"), [("off", 1), *(pytest.param(*c, marks=pytest.mark.slow) for c in CASES)])
def test_a_process_that_loops_is_ended_and_costs_no_bit(
    fork_server: ForkServer, tmp_path: Path, whole: Callable[[str], Path], kind: str, rank: int
) -> None:
    """An endless loop in the loss: all exit soon, the line is named, and the same command resumes to the same bits."""
    run = tmp_path / "run"
    session = rank_processes.start(fork_server, run, 2, sharding=kind, least_seconds=2.0, loops=[rank, 9])
    wait_for(session, "step 8", rank=rank)
    start = time.monotonic()
    codes = session.wait()
    assert time.monotonic() - start < 15
    assert all(code != 0 for code in codes)
    (reported,) = session.reported("lost")
    assert f"rank {rank} of 2 makes no progress in step 9, at rank_fault_job.py:" in reported
    rank_processes.train(fork_server, run, 2, sharding=kind)
    assert rank_processes.is_same(rank_processes.state(run), rank_processes.state(whole(kind)))


def test_a_slow_process_is_not_ended(fork_server: ForkServer, tmp_path: Path) -> None:
    """A step of half the limit, and an evaluation on rank 0 that takes longer than the limit."""
    session = rank_processes.train(
        fork_server, tmp_path / "run", 2, steps=7, least_seconds=2.0, naps=[1, 5, 1.0], evaluates_seconds=3.0
    )
    assert not session.reported("lost")
