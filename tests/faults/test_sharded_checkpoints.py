"""One checkpoint of several processes: complete or absent, readable by any number of them, damage detected. They are
simulated by threads; tests/faults/test_rank_kills.py has real ones."""

import errno
import hashlib
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint_damage
from simulated_ranks import Board, save_with, snapshot_of, wanted_by, whole_state
from whet.base.errors import WhetError
from whet.checkpoint import encoding, manifest, shards, store
from whet.distributed.strategies import rows_of_rank
from whet.run import durable

pytestmark = pytest.mark.torch

SIZES = (1, 2, 3, 4, 8)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)


def check_whole(path: Path, *, step: int) -> None:
    loaded = store.load_checkpoint(path)
    for name, tensor in whole_state(step).items():
        assert same(loaded.tensors[name], tensor), name


@pytest.mark.parametrize("size", SIZES)
def test_a_checkpoint_of_simulated_ranks_is_read_by_any_number(tmp_path: Path, size: int) -> None:
    assert save_with(tmp_path, size, step=7) == [None] * size
    path = tmp_path / store.checkpoint_name(7)
    check_whole(path, step=7)
    for readers in SIZES:
        parts = [store.load_checkpoint(path, wanted=wanted_by(rank, readers)) for rank in range(readers)]
        for name, tensor in whole_state(7).items():
            result = [part.tensors[name] for part in parts]
            assert same(torch.cat(result) if name in parts[0].rows else result[-1], tensor), (readers, name)


def test_a_simulated_rank_reads_only_the_pieces_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with(tmp_path, 4, step=7)
    path, real = tmp_path / store.checkpoint_name(7), manifest.open_verified
    touched: set[str] = set()

    def opened(file: Path, **options: Any) -> Any:
        touched.add(file.name)
        return real(file, **options)

    monkeypatch.setattr(shards, "open_verified", opened)
    store.load_checkpoint(path, wanted=wanted_by(1, 2))
    # The last two of four ranks hold the second half of every tensor, and rows 3 and 4 of model/b.
    assert touched == {"shard-0001.safetensors", "shard-0002.safetensors", "shard-0003.safetensors"}
    touched.clear()
    store.load_checkpoint(path, wanted=wanted_by(3, 4))
    assert touched == {"shard-0003.safetensors"}


# --- a part that fails -----------------------------------------------------------------------------------------------


def test_a_full_disk_of_a_simulated_rank_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    assert save_with(tmp_path, 3, step=1, board=board) == [None] * 3
    real = durable.write_draft

    def write(path: Path, **options: Any) -> durable.WrittenFile:
        if path.name == "shard-0002.safetensors":
            with durable.disk_errors("write", path):
                raise OSError(errno.ENOSPC, "full")
        return real(path, **options)

    monkeypatch.setattr(shards.durable, "write_draft", write)
    errors = save_with(tmp_path, 3, step=2, turn=2, board=board)
    for error in errors:
        # All ranks know that it was a disk error, so the training continues.
        assert isinstance(error, WhetError)
        assert isinstance(error.__cause__, OSError)
    assert "rank 2" in str(errors[0].got)  # type: ignore[union-attr]
    assert [path.name for path in tmp_path.iterdir()] == [store.checkpoint_name(1)]
    monkeypatch.setattr(shards.durable, "write_draft", real)
    assert save_with(tmp_path, 3, step=2, turn=3, board=board) == [None] * 3
    check_whole(tmp_path / store.checkpoint_name(2), step=2)
    assert not [name for name in board.texts if name.startswith("2/")], "entries that all ranks have read are deleted"


def test_a_simulated_lost_rank_leaves_no_checkpoint(tmp_path: Path) -> None:
    def die(rank: int, taken: store.Snapshot) -> store.Snapshot:
        if rank == 1:
            raise SystemExit
        return taken

    quiet = threading.excepthook
    threading.excepthook = lambda _: None
    try:
        errors = save_with(tmp_path, 3, step=2, change=die, seconds=0.3)
    finally:
        threading.excepthook = quiet
    assert isinstance(errors[0], WhetError)
    assert isinstance(errors[2], WhetError)
    assert not list(tmp_path.iterdir())


def test_a_simulated_rank_at_another_step_is_refused(tmp_path: Path) -> None:
    errors = save_with(tmp_path, 2, step=4, steps={1: 3})
    assert all("same step" in str(error) for error in errors)
    assert not list(tmp_path.iterdir())


def test_simulated_ranks_that_hold_other_rows_than_their_own_are_refused(tmp_path: Path) -> None:
    def swap(rank: int, _taken: store.Snapshot) -> store.Snapshot:
        return snapshot_of((1, 0, 2)[rank], 3, step=4)

    errors = save_with(tmp_path, 3, step=4, change=swap)
    assert all("complete model" in str(error) for error in errors)
    assert not list(tmp_path.iterdir())


# --- a part that was changed -----------------------------------------------------------------------------------------


def refused(path: Path, *, step: int, readers: int = 2) -> bool:
    """Return whether every reader gets the correct state or an error, and the whole checkpoint is refused."""
    for rank in range(readers):
        try:
            part = store.load_checkpoint(path, wanted=wanted_by(rank, readers))
        except store.DamagedCheckpointError:
            continue
        for name, tensor in whole_state(step).items():
            rows = part.rows.get(name)
            assert same(part.tensors[name], tensor if rows is None else tensor[rows.start : rows.stop]), name
    try:
        store.load_checkpoint(path)
    except store.DamagedCheckpointError:
        return True
    return False


def test_damage_of_shards_is_found(tmp_path: Path) -> None:
    for step in (1, 2):
        save_with(tmp_path, 4, step=step)
    path = tmp_path / store.checkpoint_name(2)
    good, other = checkpoint_damage.read_files(path), checkpoint_damage.read_files(tmp_path / store.checkpoint_name(1))
    draw = random.Random(0)
    for _ in range(60):
        kind = draw.choice(checkpoint_damage.DAMAGE)
        checkpoint_damage.write_files(path, kind(good, other, draw))
        if checkpoint_damage.read_files(path) != good:
            assert refused(path, step=2), kind
    checkpoint_damage.write_files(path, good)
    assert not refused(path, step=2)


def in_shards(edit: Callable[[dict[str, Any]], None]) -> Callable[[checkpoint_damage.Files], checkpoint_damage.Files]:
    """A forged manifest with a correct hash."""

    def change(files: checkpoint_damage.Files) -> checkpoint_damage.Files:
        fields = encoding.load_json(files["manifest.json"])
        del fields["sha256"]
        edit(fields)
        digest = hashlib.sha256(encoding.dump_json(fields)).hexdigest()
        return {**files, "manifest.json": encoding.dump_json({**fields, "sha256": digest})}

    return change


def pieces(fields: dict[str, Any]) -> list[dict[str, Any]]:
    return fields["sharded"]["model/a"]["pieces"]


def swap_files(fields: dict[str, Any]) -> None:
    """The wrong order: two pieces of the same size name each other's file."""
    first, second = pieces(fields)[:2]
    first["file"], second["file"] = second["file"], first["file"]


def swap_hashes_too(fields: dict[str, Any]) -> None:
    swap_files(fields)
    first, second = pieces(fields)[:2]
    first["sha256"], second["sha256"] = second["sha256"], first["sha256"]


def forget(rank: int, fields: dict[str, Any]) -> None:
    name = shards.shard_name(rank)
    del fields["files"][name]
    for tensor in fields["sharded"].values():
        tensor["pieces"] = [piece for piece in tensor["pieces"] if piece["file"] != name]


LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a piece less": lambda fields: pieces(fields).pop(),
    "the first piece less": lambda fields: pieces(fields).pop(0),
    "a piece twice": lambda fields: pieces(fields).append(pieces(fields)[-1]),
    "turned around": lambda fields: pieces(fields).reverse(),
    "a gap": lambda fields: pieces(fields)[1].update(start=4),
    "an overlap": lambda fields: pieces(fields)[1].update(start=2),
    "rows beyond the end": lambda fields: pieces(fields)[-1].update(stop=11),
    "another shape": lambda fields: fields["sharded"]["model/a"].update(shape=[10, 8]),
    "a huge shape": lambda fields: fields["sharded"]["model/a"].update(shape=[10, 2**40]),
    "a turned shape": lambda fields: fields["sharded"]["model/a"].update(shape=[10, 1, 7]),
    "no shape": lambda fields: fields["sharded"]["model/a"].update(shape=[]),
    "another kind of number": lambda fields: fields["sharded"]["model/a"].update(dtype="I32"),
    "an unknown kind of number": lambda fields: fields["sharded"]["model/a"].update(dtype="PICKLE"),
    "another role": lambda fields: fields["sharded"]["model/a"].update(role="ema"),
    "files in the wrong order": swap_files,
    "a piece elsewhere": lambda fields: pieces(fields)[0].update(file="../x.safetensors"),
    "a piece in the facts": lambda fields: pieces(fields)[0].update(file="state.json"),
    "a piece among the whole": lambda fields: pieces(fields)[0].update(file="state.safetensors"),
    "another hash": lambda fields: pieces(fields)[0].update(sha256="0" * 64),
    "a tensor less": lambda fields: fields["sharded"].pop("model/a"),
    "no shared tensors": lambda fields: fields.update(sharded={}),
    "as the older format": lambda fields: fields.update(format_version=2),
    "whole and shared": lambda fields: fields["tensors"].update({"model/a": fields["tensors"]["model/count"]}),
}


def test_forged_shards_with_correct_hashes_are_refused(tmp_path: Path) -> None:
    save_with(tmp_path, 4, step=2)
    path = tmp_path / store.checkpoint_name(2)
    good = checkpoint_damage.read_files(path)
    for name, edit in LIES.items():
        checkpoint_damage.write_files(path, in_shards(edit)(good))
        assert refused(path, step=2), name
    for rank in (0, 1, 3):
        # Everything that one rank wrote is missing, and the manifest does not mention it.
        checkpoint_damage.write_files(path, in_shards(partial(forget, rank))(good))
        (path / shards.shard_name(rank)).unlink()
        assert refused(path, step=2), rank
    # Corrected hashes are forgery, not damage: not detected, as documented.
    checkpoint_damage.write_files(path, in_shards(swap_hashes_too)(good))
    assert not torch.equal(store.load_checkpoint(path).tensors["model/a"], whole_state(2)["model/a"])


def test_a_shard_of_another_step_is_found(tmp_path: Path) -> None:
    for step in (1, 2):
        save_with(tmp_path, 2, step=step)
    path, name = tmp_path / store.checkpoint_name(2), shards.shard_name(1)
    (path / name).write_bytes((tmp_path / store.checkpoint_name(1) / name).read_bytes())
    with pytest.raises(store.DamagedCheckpointError, match="sha256"):
        store.load_checkpoint(path, wanted=wanted_by(1, 2))
    # The run resumes from the previous one and reports why.
    result = store.load_newest(tmp_path)
    assert result is not None
    assert result.step == 1
    assert "step 2" in result.rejected[0]


def test_rows_are_sharded_as_in_torch() -> None:
    for total in (0, 1, 5, 7, 10, 64):
        for size in (1, 2, 3, 4, 8):
            cut = [len(part) for part in torch.arange(total).chunk(size)] if total else []
            assert [rows_of_rank(total, rank=rank, size=size).count for rank in range(size)] == [
                *cut,
                *[0] * (size - len(cut)),
            ]
