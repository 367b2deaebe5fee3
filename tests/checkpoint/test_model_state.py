"""What a resume makes of a model that has changed: by training, by the user, or in its structure."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as f
from torch.nn.utils import parametrizations, parametrize, prune

import whet
from state_programs import At, LateBuffers, X, Y, mlp
from whet.base.errors import UsageError, WhetError
from whet.checkpoint import snapshot_restore, store
from whet.checkpoint.attributes import fingerprint_attributes
from whet.checkpoint.comparison import compare_snapshots, describe_tensor, tensors_equal
from whet.checkpoint.snapshot import Snapshot

pytestmark = pytest.mark.torch


def fit(model: nn.Module, run: Path | None, *, steps: int = 8, **options: Any) -> Any:
    defaults = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), "global_batch_size": 8}
    return whet.train(
        model,
        (X, Y),
        loss=lambda batch: f.cross_entropy(model(batch[0]), batch[1]),
        run=run,
        max_steps=steps,
        overrides={"threads": 1},
        measure=False,
        on_event=None,
        **{**defaults, **options},
    )


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (run / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


def exactness(run: Path) -> str:
    return str(events(run, "resume")[-1]["exactness"])


def dropout_net(rate: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 8), nn.Dropout(rate), nn.Linear(8, 4))


CHANGES: list[tuple[str, Callable[[nn.Module], Any], str]] = [
    ("a rate", lambda model: setattr(model[1], "p", 0.4), "1.p 0.1 -> 0.4"),
    ("a frozen layer", lambda model: model[0].requires_grad_(False), "requires_grad of 0.weight is False"),
    ("a mode", lambda model: model[1].eval(), "1 is in eval mode"),
    ("a new attribute", lambda model: setattr(model, "note", "x"), "note absent -> x"),
]


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        pytest.param(change, reported, id=name, marks=[] if name in ("a rate", "a mode") else [pytest.mark.slow])
        for name, change, reported in CHANGES
    ],
)
def test_what_the_user_has_changed_stays_and_is_reported(
    change: Callable[[nn.Module], Any], reported: str, tmp_path: Path
) -> None:
    fit(dropout_net(), tmp_path / "run", steps=4)
    again = dropout_net()
    change(again)
    before = again[1].p, again[0].weight.requires_grad, again[1].training
    fit(again, tmp_path / "run", steps=8)
    assert exactness(tmp_path / "run").startswith("not bit-exact")
    assert reported in exactness(tmp_path / "run")
    assert (again[1].p, again[0].weight.requires_grad, again[1].training) == before


def test_a_second_call_with_the_same_objects_is_exact(tmp_path: Path) -> None:
    model = dropout_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    change = At(2, lambda: setattr(model[1], "p", 0.3))
    fit(model, tmp_path / "run", steps=4, optimizer=optimizer, callbacks=[change])
    fit(model, tmp_path / "run", steps=8, optimizer=optimizer, callbacks=[change])
    assert exactness(tmp_path / "run") == "bit-exact"
    assert model[1].p == 0.3


def test_an_attribute_that_cannot_be_saved_any_more_is_a_gap(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = dropout_net()
        model.rule = 1
        return model

    model = build()
    fit(model, tmp_path / "run", steps=4, callbacks=[At(2, lambda: setattr(model, "rule", object()))])
    assert "the attribute rule, now a object, is not saved" in str(events(tmp_path / "run", "warning"))
    fit(build(), tmp_path / "run", steps=8)
    assert "the attribute rule, now a object, is not saved" in exactness(tmp_path / "run")


def test_large_tensors_in_attributes_are_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.checkpoint.model_state.MIN_TENSOR_BYTES", 100)
    model = dropout_net()
    model.large, model.small = torch.zeros(1000), torch.ones(2)
    fit(model, tmp_path / "run", steps=4)
    assert "large is not saved: 4,000 bytes" in str(events(tmp_path / "run", "warning"))
    names = store.load_newest(tmp_path / "run" / "checkpoints").snapshot.tensors
    assert [name for name in names if name.startswith("attribute/")] == ["attribute/small"]


@pytest.mark.parametrize("suffix", ["_g", "_v", "_orig"])
def test_a_parameter_with_a_similar_name_does_not_hide_an_attribute(suffix: str) -> None:
    model = nn.Linear(2, 2)
    model.register_parameter(f"scale{suffix}", nn.Parameter(torch.zeros(2)))
    model.scale = 0.5  # type: ignore[assignment]
    assert fingerprint_attributes(model, {}, max_bytes=100)[""]["scale"] == 0.5
    prune.l1_unstructured(model, "weight", amount=1)
    assert "weight" not in fingerprint_attributes(model, {}, max_bytes=100)[""]


@pytest.mark.parametrize(
    ("error", "raised"), [(torch.OutOfMemoryError(), torch.OutOfMemoryError), (KeyError(), WhetError)]
)
def test_running_out_of_memory_is_not_called_a_wrong_structure(
    error: Exception, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(snapshot_restore, "restore_model", fail)
    saved: Any = Snapshot(tensors={}, facts={"optimizer": {"groups": []}})
    unused: Any = None
    with pytest.raises(raised):
        snapshot_restore.restore_snapshot(saved, mlp(), unused, unused, rng=unused, scaler=unused, ema=None)


class Half(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def build_mlp() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_parametrization_in_the_middle_is_loaded_into_a_new_model(is_replaced: bool, tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        if is_replaced:
            parametrizations.weight_norm(model[0])
        else:
            parametrize.register_parametrization(model[0], "weight", Half())

    model = build_mlp()
    fit(model, tmp_path / "run", steps=4, callbacks=[At(2, lambda: change(model))])
    changed, unchanged = build_mlp(), build_mlp()
    change(changed)
    for one in (changed, unchanged):
        whet.load(tmp_path / "run", one)
        assert torch.equal(one[0].weight, model[0].weight)
    fit(build_mlp(), tmp_path / "run", steps=8)
    assert exactness(tmp_path / "run") == "bit-exact"


def test_a_parametrization_of_a_class_that_is_not_found_is_a_gap(tmp_path: Path) -> None:
    class Third(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight / 3

    def change(model: nn.Module) -> None:
        parametrize.register_parametrization(model[0], "weight", Third())

    model = build_mlp()
    fit(model, tmp_path / "run", steps=4, callbacks=[At(2, lambda: change(model))])
    warnings = str(events(tmp_path / "run", "warning"))
    assert "parameters were added or renamed during the run" in warnings
    assert "made before the session" in warnings
    with pytest.raises(WhetError, match=r"cannot be restored\n.*weight.0 is a .*Third"):
        whet.load(tmp_path / "run", build_mlp())
    changed = build_mlp()
    change(changed)
    fit(changed, tmp_path / "run", steps=8)
    assert "added or renamed during the run" in exactness(tmp_path / "run")


def test_a_layer_that_is_added_in_the_middle_is_loaded_into_a_new_model(tmp_path: Path) -> None:
    model = build_mlp()
    fit(model, tmp_path / "run", steps=4, callbacks=[At(2, lambda: model.append(nn.Linear(4, 4)))])
    assert not events(tmp_path / "run", "warning")
    new = build_mlp()
    whet.load(tmp_path / "run", new)
    assert torch.equal(new(X), model(X))


class Choosing(nn.Module):
    """A module with an attribute that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.choose = nn.Linear(4, 4), torch.tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.choose(self.linear(x))


def test_a_layer_that_cannot_be_made_again_is_a_gap(tmp_path: Path) -> None:
    model = build_mlp()
    fit(model, tmp_path / "run", steps=4, callbacks=[At(2, lambda: model.append(Choosing()))])
    assert "modules or parameters were added or renamed during the run (3)" in str(events(tmp_path / "run", "warning"))
    again = build_mlp().append(Choosing())
    optimizer = torch.optim.SGD(again[:3].parameters(), lr=0.05, momentum=0.9)
    fit(again, tmp_path / "run", steps=8, optimizer=optimizer)
    assert "added or renamed during the run" in exactness(tmp_path / "run")


def test_late_buffers_and_pruning_are_loaded_into_a_new_model(tmp_path: Path) -> None:
    trained = nn.Sequential(LateBuffers(), nn.Linear(4, 4))
    fit(trained, tmp_path / "run", steps=4, callbacks=[At(2, lambda: prune.l1_unstructured(trained[1], "weight", 0.3))])
    new = nn.Sequential(LateBuffers(), nn.Linear(4, 4))
    parameter = new[1].weight
    whet.load(tmp_path / "run", new)
    assert new[1].weight_orig is parameter
    assert new[0].cache.shape == trained[0].cache.shape
    assert "cache" not in new[0].state_dict()
    assert torch.equal(new[0].shift, trained[0].shift)
    assert torch.equal(new(X), trained(X)) is False or new[0].count == trained[0].count
    with pytest.raises(WhetError, match="does not fit this model"):
        whet.load(tmp_path / "run", nn.Sequential(LateBuffers(), nn.Linear(4, 5)))


@pytest.mark.parametrize("change", [lambda m: prune.l1_unstructured(m[0], "weight", 0.3), lambda m: m.append(mlp())])
def test_a_checkpoint_right_after_a_change_of_the_model_fits_its_average(
    change: Callable[[nn.Module], Any], tmp_path: Path
) -> None:
    """The callback changes the model after the average was updated, and the step is saved and evaluated then."""

    def run(folder: Path, *, steps: int) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10))
        callbacks = [At(2, lambda: change(model))]
        fit(model, folder, steps=steps, ema=True, val=(X, Y), eval_every=2, callbacks=callbacks)
        return model

    run(tmp_path / "run", steps=2)
    run(tmp_path / "run", steps=6)
    run(tmp_path / "whole", steps=6)
    assert exactness(tmp_path / "run") == "bit-exact"
    ours, theirs = (store.load_newest(tmp_path / name / "checkpoints").snapshot for name in ("run", "whole"))
    assert [n for n in compare_snapshots(ours, theirs) if not n.startswith("progress.")] == []


def test_an_error_in_an_evaluation_does_not_save_its_mode(tmp_path: Path) -> None:
    def loop(model: nn.Module, *, fails: bool) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session = whet.Session(
            model, optimizer, (X, Y), global_batch_size=8, max_steps=6, run=tmp_path / "run", overrides={"threads": 1}
        )
        with session:
            for batch in session:
                session.step(lambda micro: f.cross_entropy(model(micro[0]), micro[1]), batch)
                if fails and session.progress.step == 3:
                    model.eval()
                    raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        loop(dropout_net(), fails=True)
    again = dropout_net()
    loop(again, fails=False)
    assert again[1].training


def test_tensors_without_values_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(UsageError, match=r"tensors without values\n.*1.weight is on the meta device"):
        fit(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_snapshots_are_compared_by_bits_and_in_words(tmp_path: Path) -> None:
    fit(dropout_net(), tmp_path / "run", steps=4)
    fit(dropout_net(), tmp_path / "other", steps=4)
    ours, theirs = (store.load_newest(tmp_path / name / "checkpoints").snapshot for name in ("run", "other"))
    assert compare_snapshots(ours, theirs) == []
    theirs.tensors["optimizer/0.weight/momentum_buffer"][0, 0] += 1
    theirs.facts["scaler"] = {"scale": 1}
    assert compare_snapshots(ours, theirs) == [
        "momentum_buffer of 0.weight in the optimizer",
        "scaler.scale None -> 1",
    ]
    assert describe_tensor("optimizer/@g/0.weight/exp_avg") == "exp_avg of 0.weight in the optimizer g"
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert tensors_equal(nan, -nan)
    assert not tensors_equal(zero, -zero)


class Counting(nn.Module):
    """Attributes that are large, inside themselves, or one object at two places."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = mlp()
        self.kind, self.table = kind, {str(n): n for n in range(200_000)}
        self.ring: list[Any] = []
        self.ring.append(self.ring)
        self.shared: dict[str, list[int]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "grows":
            self.table[f"new {len(self.table)}"] = 0
        elif self.kind == "changes in the middle":
            self.table["100000"] += 1
        elif self.kind == "shared":
            counts = [0]
            self.shared = self.shared or {"a": counts, "b": counts}
            self.shared["a"][0] += 1
        return self.net(x)


@pytest.mark.parametrize(
    ("kind", "claim"),
    [
        pytest.param("", "bit-exact", marks=pytest.mark.slow),
        pytest.param("grows", "`table` of the model", marks=pytest.mark.slow),
        ("changes in the middle", "`table` of the model"),
        ("shared", "bit-exact"),
    ],
)
def test_attributes_that_are_not_saved_are_named_if_they_change(kind: str, claim: str, tmp_path: Path) -> None:
    for steps in (4, 8):
        torch.manual_seed(0)
        fit(Counting(kind), tmp_path / "run", steps=steps)
    assert claim in exactness(tmp_path / "run")
    assert (exactness(tmp_path / "run") == "bit-exact") == (claim == "bit-exact")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_model_is_saved_and_restored(tmp_path: Path) -> None:
    for steps in (4, 8):
        torch.manual_seed(0)
        fit(torch.jit.script(mlp()), tmp_path / "run", steps=steps)
    assert exactness(tmp_path / "run") == "bit-exact"


class Capturing(nn.Module):
    """Like Transformers models: the first forward pass installs hooks, and sets a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.captured = mlp(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "_output_capturing_hooks_installed", False):
            self.net.register_forward_hook(lambda *_: vars(self).update(captured=self.captured + 1))
            self._output_capturing_hooks_installed = True
        before = self.captured
        outputs = self.net(x)
        assert self.captured == before + 1
        return torch.as_tensor(outputs)


def test_hooks_of_the_first_forward_pass_are_installed_again(tmp_path: Path) -> None:
    for steps in (4, 8):
        torch.manual_seed(0)
        fit(Capturing(), tmp_path / "run", steps=steps)
    assert exactness(tmp_path / "run") == "bit-exact"


def test_a_generator_that_modules_share_is_saved(tmp_path: Path) -> None:
    for steps in (4, 8):
        torch.manual_seed(0)
        noise = torch.Generator().manual_seed(3)

        class Noise(nn.Module):
            def __init__(self, generator: torch.Generator = noise) -> None:
                super().__init__()
                self.generator = generator

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + torch.rand(1, generator=self.generator)

        fit(nn.Sequential(Noise(), mlp(), Noise()), tmp_path / "run", steps=steps)
    assert exactness(tmp_path / "run") == "bit-exact"
