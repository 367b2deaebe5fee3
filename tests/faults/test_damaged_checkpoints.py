"""Damaged and forged checkpoints: none is used, the older good one is, and lost steps are reported."""

import json
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

import checkpoint_damage
from fault_runs import ALL, BOUNDED, SMALL, FaultRuns, counts, digest
from fork_server import ForkServer
from whet.base.errors import WhetError
from whet.checkpoint import encoding, store
from whet.checkpoint.manifest import FACTS, MANIFEST, TENSORS
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = pytest.mark.torch

SEED = 3
MUTATIONS = {"bounded": 500, "all": 10_000}


@pytest.fixture(scope="module")
def template(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    SMALL(fork_server, folder).finish(folder / "run")
    return folder / "run"


@pytest.fixture
def run(fault_runs: FaultRuns, template: Path) -> Path:
    """A run with checkpoints of steps 3 and 4."""
    return shutil.copytree(template, fault_runs.folder / "run")


def newest(run: Path) -> store.LoadedCheckpoint:
    result = store.load_newest(run / "checkpoints", run_id=open_run(run).header.id)
    assert result is not None
    return result


def check_damage(run: Path, *, number: int) -> int:
    """Return how many mutated checkpoints were used. Each is tried next to a good older one."""
    older, last = store.list_steps(run / "checkpoints")[-2:]
    folder = run / "checkpoints" / store.checkpoint_name(last)
    good, other = (
        checkpoint_damage.read_files(folder),
        checkpoint_damage.read_files(run / "checkpoints" / store.checkpoint_name(older)),
    )
    draw = random.Random(SEED)
    accepted = 0
    for _ in range(number):
        mutated = draw.choice(checkpoint_damage.DAMAGE)(good, other, draw)
        if mutated == good:
            continue
        checkpoint_damage.write_files(folder, mutated)
        result = newest(run)
        accepted += result.step != older or len(result.rejected) != 1
    checkpoint_damage.write_files(folder, good)
    return accepted


@pytest.mark.parametrize("size", [BOUNDED, ALL])
def test_no_damaged_checkpoint_is_used(run: Path, report_count: Callable[[str], None], size: str) -> None:
    accepted = check_damage(run, number=MUTATIONS[size])
    report_count(counts(mutations=MUTATIONS[size], accepted=accepted, seed=SEED))
    assert accepted == 0
    assert newest(run).rejected == [], "restored, it is used again"


@pytest.mark.parametrize("name", checkpoint_damage.LIES)
def test_a_forgery_with_correct_hashes_is_refused(run: Path, name: str) -> None:
    folder = run / "checkpoints" / "step-000000004"
    checkpoint_damage.write_files(folder, checkpoint_damage.LIES[name](checkpoint_damage.read_files(folder)))
    result = newest(run)
    assert result.step == 3
    assert len(result.rejected) == 1
    assert "step 4" in result.rejected[0]


@pytest.mark.parametrize(
    ("lie", "hint"),
    [(checkpoint_damage.FUTURE, "upgrade"), (checkpoint_damage.PAST, "the version of whet that made the run")],
)
def test_another_format_is_refused_with_a_hint(
    run: Path, lie: Callable[[checkpoint_damage.Files], checkpoint_damage.Files], hint: str
) -> None:
    folder = run / "checkpoints" / "step-000000004"
    checkpoint_damage.write_files(folder, lie(checkpoint_damage.read_files(folder)))
    with pytest.raises(WhetError, match="unsupported format") as caught:
        newest(run)
    assert hint in str(caught.value.try_)


@pytest.mark.parametrize("trick", ["link", "pipe", "folder", "link to a folder"])
def test_only_ordinary_files_are_read(run: Path, trick: str) -> None:
    path = run / "checkpoints" / "step-000000004" / TENSORS
    path.rename(run / "aside")
    if trick == "link":
        path.symlink_to(run / "aside")
    elif trick == "pipe":
        os.mkfifo(path)
    elif trick == "folder":
        path.mkdir()
    else:
        path.symlink_to(run)
    assert newest(run).step == 3


def test_weights_that_are_no_numbers_and_a_strange_state_are_refused(fault_runs: FaultRuns, run: Path) -> None:
    folder = run / "checkpoints" / "step-000000004"
    good = checkpoint_damage.read_files(folder)
    length = int.from_bytes(good[TENSORS][:8], "little")
    place = json.loads(good[TENSORS][8 : 8 + length])[checkpoint_damage.WEIGHT]["data_offsets"][0] + 8 + length
    nan = good[TENSORS][:place] + b"\xff\xff\xff\x7f" + good[TENSORS][place + 4 :]
    facts = json.loads(good[FACTS])
    groups = facts["optimizer"]["groups"]
    strange = {
        "weights are NaN or Inf": checkpoint_damage.rehash({**good, TENSORS: nan}),
        "unknown structure": checkpoint_damage.in_facts(optimizer=[])(good),
        "a different optimizer": checkpoint_damage.in_facts(optimizer={**facts["optimizer"], "class": "SGD"})(good),
        "parameter groups differ": checkpoint_damage.in_facts(optimizer={**facts["optimizer"], "groups": groups[:1]})(
            good
        ),
        "progress has an unknown structure": checkpoint_damage.in_facts(
            progress={**facts["progress"], "progress": {"step": 4}}
        )(good),
    }
    for words, files in strange.items():
        checkpoint_damage.write_files(folder, files)
        ended, _ = fault_runs.end(run, epochs=2)
        assert ended.code == 1
        assert words in ended.errors
        assert "whet.base.errors" in ended.errors


def test_lost_steps_are_reported_and_repeated(fault_runs: FaultRuns, run: Path) -> None:
    shutil.copytree(run, fault_runs.folder / "whole")
    checkpoint_damage.write_files(run / "checkpoints" / "step-000000004", {MANIFEST: b"{}"})
    assert fault_runs.finish(run).resumed_from == 3
    (resumed,) = read_events(run, kinds=("resume",))
    assert resumed.get("lost_steps") == 1
    assert "manifest" in resumed.get("rejected")[0]
    assert digest(run) == digest(fault_runs.folder / "whole")


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_no_signal(run: Path, monkeypatch) -> None:
    path = run / "checkpoints" / "step-000000004" / TENSORS
    real = os.fstat

    def shrink(descriptor: int) -> os.stat_result:
        result = real(descriptor)
        if result.st_ino == path.stat().st_ino:
            os.truncate(path, 100)
        return result

    monkeypatch.setattr(os, "fstat", shrink)
    assert newest(run).step == 3


def test_too_few_open_files_are_not_taken_for_damage(run: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit[1]))
    try:
        with pytest.raises(WhetError, match="EMFILE"):
            store.load_checkpoint(run / "checkpoints" / "step-000000004")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert newest(run).step == 4


def test_the_file_is_one_that_the_library_reads_and_writes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "half": torch.randn(3, 5, generator=generator).half(),
        "wide": torch.randn(7, generator=generator).double(),
        "brain": torch.randn(2, 2, 2, generator=generator).bfloat16(),
        "empty": torch.zeros(0, 4),
        "one": torch.tensor(3.5),
        "truth": torch.tensor([True, False]),
        "turned": torch.randn(4, 6, generator=generator).t(),
        "bytes": torch.arange(9, dtype=torch.uint8),
    }
    data = b"".join(bytes(piece) for piece in encoding.encode_tensors(tensors))
    (tmp_path / "a.safetensors").write_bytes(data)
    theirs = load_file(tmp_path / "a.safetensors")
    ours = encoding.decode_tensors(bytearray(save({name: t.contiguous() for name, t in tensors.items()})))
    for name, tensor in tensors.items():
        assert torch.equal(theirs[name], tensor)
        assert torch.equal(ours[name], tensor)
