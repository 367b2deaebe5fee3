"""Power cuts without a disk: every state that a cut could leave has the old or the new checkpoint."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import crash_states
from fault_runs import ALL, BOUNDED, counts
from whet.checkpoint import store, writer
from whet.checkpoint.snapshot import Snapshot
from whet.run import durable

pytestmark = pytest.mark.torch

SEED = 5
DRAWS = {"bounded": 6, "all": 60}


def record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Four saves that delete old checkpoints, one of a damaged folder's step, and one that fails halfway."""
    disk = crash_states.Recorder(folder)
    monkeypatch.setattr(durable, "disk", disk)
    places = folder / "checkpoints"
    durable.make_directory(places)
    for step in (1, 2, 3, 4):
        if step == 3:
            (places / store.checkpoint_name(3)).mkdir()
            disk.trace.append(("make_folder", f"checkpoints/{store.checkpoint_name(3)}"))
        snapshot = Snapshot(tensors={"model/a": torch.full((700,), float(step))}, facts={"step": step})
        store.save_checkpoint(places, snapshot, step=step)
        disk.acknowledge(step)
        writer.apply_retention(places, acknowledged=step, keep=2, best=None, total_steps=None)
    monkeypatch.undo()
    return disk.trace


def check_states(trace: list[tuple], folder: Path, *, draws: int) -> int:
    """Replay the trace up to each call and check the possible states after a cut. Return their number."""
    draw = random.Random(SEED)
    model, acknowledged, count = crash_states.Model(), 0, 0
    for call in trace:
        if call[0] == "acknowledge":
            acknowledged = call[1]
        else:
            model.play(call)
        for number in range(draws + 2):
            place = folder / "state"
            model.crash(draw, keeps=(0.0, 1.0)[number] if number < 2 else None).materialise(place)
            count += 1
            steps = store.list_steps(place / "checkpoints")
            torn = [s for s in steps if s != 3 and not _is_whole(place / "checkpoints" / store.checkpoint_name(s))]
            assert torn == [], f"torn but published, after {call[:2]}"
            if acknowledged:
                result = store.load_newest(place / "checkpoints")
                assert result is not None
                assert result.step >= acknowledged, f"step {acknowledged} is lost, after {call[:2]}"
                assert result.snapshot.tensors["model/a"].eq(result.step).all()
            shutil.rmtree(place)
    return count


def _is_whole(path: Path) -> bool:
    try:
        store.load_checkpoint(path)
    except store.DamagedCheckpointError:
        return False
    return True


@pytest.mark.parametrize("size", [BOUNDED, ALL])
def test_every_state_after_a_power_cut_has_a_complete_checkpoint(
    memory_folder: Path, monkeypatch: pytest.MonkeyPatch, report_count: Callable[[str], None], size: str
) -> None:
    (memory_folder / "real").mkdir()
    trace = record(memory_folder / "real", monkeypatch)
    count = check_states(trace, memory_folder, draws=DRAWS[size])
    report_count(counts(calls=len(trace), states=count, lost_or_torn=0, seed=SEED))
    assert count >= 500


@pytest.mark.parametrize("missing", ["files", "drafts", "renames"])
def test_a_missing_sync_is_noticed(memory_folder: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """The recorded trace without the syncs of one kind."""

    def kind(place: str) -> str:
        return "files" if Path(place).suffix else "drafts" if ".tmp-" in place else "renames"

    (memory_folder / "real").mkdir()
    trace = record(memory_folder / "real", monkeypatch)
    without = [call for call in trace if call[0] != "sync" or kind(call[1]) != missing]
    assert len(without) < len(trace)
    with pytest.raises((AssertionError, store.DamagedCheckpointError)):
        check_states(without, memory_folder, draws=20)
