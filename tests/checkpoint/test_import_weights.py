"""`whet import`: weights arrive unchanged, or the file is refused and nothing is left behind."""

import importlib.metadata
import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import whet
from paths import Run
from whet.base.errors import UsageError, WhetError
from whet.checkpoint import importer, unpickle
from whet.checkpoint.importer import import_weights
from whet.training.weights import load_weights

pytestmark = pytest.mark.torch


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpack in this process: the same code without its limits and without starting torch."""

    def run(file, words: list[str], *, seconds: int) -> tuple[int, bytes]:
        reading, writing = os.pipe()
        saved = [os.dup(0), os.dup(1)]
        os.dup2(file.fileno(), 0)
        os.dup2(writing, 1)
        try:
            code = unpickle.main(words)
        finally:
            for number, descriptor in enumerate(saved):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.close(writing)
        with os.fdopen(reading, "rb") as answer:
            return code, answer.read()

    monkeypatch.setattr(importer, "run_unpickle_process", run)
    monkeypatch.setattr(unpickle, "limit_process", lambda size, *, seconds: None)


def assert_same(model: nn.Module, other: nn.Module) -> None:
    theirs = other.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "kind", ["safetensors", "nested", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("zip", "legacy"))]
)
def test_weights_arrive_as_they_were(warm_whet: Run, tmp_path: Path, kind: str) -> None:
    """Import as a user does: two processes, the second with limits."""
    model = make_model()
    file = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pt")
    if kind == "safetensors":
        save_file(model.state_dict(), file, metadata={"format": "pt"})
    elif kind == "nested":
        wrapped = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
        torch.save({"epoch": 3, "state_dict": wrapped, "optimizer": {"m": torch.zeros(3)}}, file)
    else:
        torch.save(model.state_dict(), file, _use_new_zipfile_serialization=kind == "zip")
    done = warm_whet("import", str(file), "--out", "deep/w", "--json")
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout)
    assert reported["taken"].keys() == model.state_dict().keys()
    assert reported["wrapper"] == ("module." if kind == "nested" else "")
    assert set(reported["left_out"]) == ({"epoch", "optimizer"} if kind == "nested" else set())
    other = make_model(1)
    assert load_weights(tmp_path / "deep" / "w", other) == 0
    assert_same(model, other)


def test_the_limits_hold(warm_whet: Run, tmp_path: Path) -> None:
    """A file of 4 numbers declares a tensor of 2^40: an error, or the child dies, and nothing is left behind."""
    file = tmp_path / "w.pt"
    torch.save({"w": torch.zeros(1).expand(2**40)}, file)
    done = warm_whet("import", str(file), "--out", "w")
    assert done.returncode == 1
    assert "declares more data than it contains" in done.stderr
    assert [p.name for p in tmp_path.iterdir() if p.name not in ("w.pt", "whet-home")] == []


@pytest.mark.usefixtures("in_process")
class TestInProcess:
    def test_a_key_is_chosen(self, tmp_path: Path) -> None:
        file, model, average = tmp_path / "w.pth", make_model(), make_model(2)
        torch.save({"model": model.state_dict(), "ema": {"shadow": average.state_dict()}, "other": 1}, file)
        for key, expected in ((None, model), ("ema.shadow", average)):
            import_weights(file, tmp_path / f"out-{key}", key=key)
            assert (tmp_path / f"out-{key}" / "import.json").read_bytes().endswith(b"}\n")
            other = make_model(1)
            load_weights(tmp_path / f"out-{key}", other)
            assert_same(expected, other)
        with pytest.raises(WhetError, match="--key model"):
            import_weights(file, tmp_path / "out", key="modle")

    def test_tied_weights_and_passing_buffers(self, tmp_path: Path) -> None:
        model, file = Tied(), tmp_path / "w.pt"
        torch.save(model.state_dict(), file)
        import_weights(file, tmp_path / "out")
        other = Tied()
        load_weights(tmp_path / "out", other)
        assert_same(model, other)

    def test_a_session_starts_from_it(self, tmp_path: Path) -> None:
        model, file = make_model(3), tmp_path / "w.pt"
        torch.save(model.half().state_dict(), file)
        import_weights(file, tmp_path / "out")
        x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))
        new = make_model(4)
        choice = whet.OptimizerChoice(name="sgd", lr=0.1)
        with whet.Session(new, choice, (x, y), global_batch_size=8, device="cpu", init_from=tmp_path / "out"):
            assert_same(model.float(), new)

    def test_unknown_names_are_reported_with_the_closest_match(self, tmp_path: Path) -> None:
        file = tmp_path / "w.pt"
        torch.save({f"net.{name}": t for name, t in make_model().state_dict().items()}, file)
        import_weights(file, tmp_path / "out")
        with pytest.raises(UsageError, match=r"'net.0.bias' may be this model's '0.bias'"):
            load_weights(tmp_path / "out", make_model())

    def test_other_shapes_and_damage_are_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "w.pt"
        torch.save(make_model().state_dict(), file)
        import_weights(file, tmp_path / "out")
        with pytest.raises(UsageError, match="do not fit"):
            load_weights(tmp_path / "out", nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
        path = tmp_path / "out" / "weights.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(WhetError, match="damaged"):
            load_weights(tmp_path / "out", make_model())

    @pytest.mark.parametrize(
        ("content", "reported"),
        [
            ([torch.zeros(1)], "not a dict"),
            ({"weights_of_mine": {"w": torch.zeros(1)}}, "cannot find the weights"),
            ({"model": {"epoch": 1}}, "no tensors"),
            ({"model": nn.Linear(2, 2)}, "torch.nn.modules.linear.Linear"),
            ({"x" * 600: torch.zeros(1)}, "nested too deeply"),
        ],
    )
    def test_files_without_named_tensors_are_refused(self, tmp_path: Path, content: object, reported: str) -> None:
        file = tmp_path / "w.pt"
        torch.save(content, file)
        with pytest.raises(WhetError, match=reported):
            import_weights(file, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["w.pt"]

    def test_a_map_that_holds_itself_ends(self, tmp_path: Path) -> None:
        content: dict = {"w": torch.zeros(1)}
        content["again"] = content
        torch.save(content, tmp_path / "w.pt")
        with pytest.raises(WhetError, match="nested too deeply"):
            import_weights(tmp_path / "w.pt", tmp_path / "out")


def test_an_old_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.zeros(1)}, tmp_path / "w.pt")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.1+cpu")
    with pytest.raises(WhetError, match=r"torch 2\.9\.1"):
        import_weights(tmp_path / "w.pt", tmp_path / "out")


def test_names_and_folders_are_checked_first(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    torch.save({"w": torch.zeros(1)}, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(10**6))
    with (tmp_path / "huge.pt").open("wb") as file:
        file.truncate(2**42)
    for name, out, reported in (
        ("missing.pt", "out", "No such file"),
        ("w.txt", "out", "cannot be imported"),
        ("w.pt", "there", "already exists"),
        ("packed.pt", "out", "compressed"),
        ("huge.pt", "out", "larger than the free memory"),
    ):
        with pytest.raises(UsageError, match=reported):
            import_weights(tmp_path / name, tmp_path / out)
    assert not (tmp_path / "out").exists()


def test_loading_weights_from_a_file_suggests_whet_import(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1)}, tmp_path / "w.pt")
    with pytest.raises(UsageError, match="whet import"):
        load_weights(tmp_path / "w.pt", make_model())
