"""Training scripts that people bring from other tools: each trains as it did there, or is refused by name."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.utils.data import DataLoader, TensorDataset

import whet
from whet.base.errors import UsageError, WhetError

pytestmark = pytest.mark.torch

THREADS = {"threads": 1}
_draw = torch.Generator().manual_seed(5)
X, Y = torch.randn(640, 10, generator=_draw), torch.randint(0, 4, (640,), generator=_draw)


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (run / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


def exactness(run: Path) -> str:
    return str(events(run, "resume")[-1]["exactness"])


def train(model: nn.Module, data: Any = (X, Y), loss: Any = None, *, lr: float = 0.1, **options: Any) -> Any:
    defaults = {"optimizer": torch.optim.SGD(model.parameters(), lr=lr), "overrides": THREADS, "on_event": None}
    loss = loss or (lambda batch: f.cross_entropy(model(batch[0]), batch[1]))
    if not isinstance(data, DataLoader):
        defaults["global_batch_size"] = 32
    return whet.train(model, data, loss=loss, **{**defaults, **options})


# --- what was silently wrong ------------------------------------------------------------------------------------------


def test_the_batches_of_a_data_loader_are_the_steps() -> None:
    """640 samples in batches of 32, two epochs: 40 steps, not two steps over stacked batches."""
    shapes: list[tuple[int, ...]] = []
    model = classifier()

    def loss(batch: Any) -> Tensor:
        x, y = batch
        shapes.append(tuple(x.shape))
        return f.cross_entropy(model(x), y)

    result = train(model, DataLoader(TensorDataset(X, Y), batch_size=32), loss, epochs=2)
    assert result.step == 40
    assert shapes[-40:] == [(32, 10)] * 40


def test_a_data_loader_trains_like_the_loop_of_its_user() -> None:
    ours, theirs = classifier(), classifier()
    train(ours, DataLoader(TensorDataset(X, Y), batch_size=32), f.cross_entropy, epochs=2)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in DataLoader(TensorDataset(X, Y), batch_size=32):
            optimizer.zero_grad()
            f.cross_entropy(theirs(x), y).backward()
            optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_an_improving_loss_is_not_stopped_by_patience(tmp_path: Path) -> None:
    model = nn.Linear(10, 1)
    target = X @ torch.arange(10.0)[:, None]

    def evaluate(model: nn.Module, batches: Any) -> dict[str, float]:
        return {"val_loss": float(sum(f.mse_loss(model(batch[0]), batch[1]) for batch in batches))}

    result = train(
        model,
        (X, target),
        lambda batch: f.mse_loss(model(batch[0]), batch[1]),
        lr=0.003,
        val=(X[:64], target[:64]),
        evaluate=evaluate,
        goal="val_loss",
        patience=2,
        epochs=8,
        run=tmp_path / "run",
    )
    values = [event["val_loss"] for event in events(tmp_path / "run", "eval")]
    assert values == sorted(values, reverse=True), "otherwise nothing is shown"
    assert len(values) == 8
    assert result.best.value == min(values)
    assert result.reason == "all 8 epochs done"


def test_early_stopping_is_the_reason_that_a_run_ended() -> None:
    model = classifier()
    values = iter([1.0, 2.0, 3.0, 4.0])
    result = train(
        model,
        val=(X, Y),
        evaluate=lambda model, batches: {"val_loss": next(values)},
        goal="val_loss",
        patience=2,
        epochs=9,
    )
    assert result.reason.startswith("stopped early: no better val_loss in 2 evaluations, best 1")


def _gan(run: Path | None, *, stop: int | None = None) -> list[Tensor]:
    """The generator is whet's, and the discriminator is stepped by hand."""
    torch.manual_seed(0)
    g, d = nn.Linear(3, 10), nn.Linear(10, 1)
    by_hand = torch.optim.Adam(d.parameters(), lr=0.05)
    optimizer = torch.optim.Adam(g.parameters(), lr=0.05)

    def loss(batch: Any) -> Tensor:
        noise = torch.ones(len(batch), 3)
        by_hand.zero_grad()
        (f.softplus(-d(batch)).mean() + f.softplus(d(g(noise).detach())).mean()).backward()
        by_hand.step()
        return f.softplus(-d(g(noise))).mean()

    options = {"global_batch_size": 160, "epochs": 3, "overrides": THREADS, "split_batch": False}
    with whet.Session(g, optimizer, X, run=run, **options) as session:
        for batch in session:
            session.step(loss, batch)
            if session.state.step == stop:
                break
    return [p.detach().clone() for p in g.parameters()]


def test_a_second_optimizer_that_is_stepped_by_hand_is_named(tmp_path: Path) -> None:
    whole = _gan(None)
    _gan(tmp_path / "run", stop=5)
    resumed = _gan(tmp_path / "run")
    assert not all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True)), "otherwise nothing is shown"
    assert "not bit-exact: the session does not know an optimizer that steps" in exactness(tmp_path / "run")


def test_another_learning_rate_on_resume_is_refused(tmp_path: Path) -> None:
    train(classifier(), run=tmp_path / "run", max_steps=3)
    with pytest.raises(UsageError, match=r"the lr is not what the run was started with\n.*0\.1 -> 0\.3"):
        train(classifier(), run=tmp_path / "run", max_steps=6, lr=0.3)


def test_another_loss_on_resume_is_named(tmp_path: Path) -> None:
    train(classifier(), run=tmp_path / "run", max_steps=3)
    model = classifier()

    def smoothed(batch: Any) -> Tensor:
        return f.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    train(model, loss=smoothed, run=tmp_path / "run", max_steps=6)
    warned = [event["reason"] for event in events(tmp_path / "run", "warning")]
    assert any("loss" in reason or "smoothed" in reason for reason in warned), warned


def test_a_refused_call_writes_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(classifier(), run=run, epochs=2, max_steps=5)
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    with pytest.raises(WhetError, match="data is not what the run was started with"):
        train(classifier(), (X + 1, Y), run=run, epochs=5)
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == before
    assert train(classifier(), run=run, epochs=2, max_steps=9).step == 9


class Sampled(nn.Module):
    """A model with dropout, whose user draws from torch's generator now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.5), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _sampling(run: Path | None, *, stop: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    model = Sampled()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"global_batch_size": 64, "epochs": 2, "overrides": THREADS}
    with whet.Session(model, optimizer, (X, Y), run=run, **options) as session:
        # The user's own count starts again with the process.
        for iteration, batch in enumerate(session):
            session.step(lambda batch: f.cross_entropy(model(batch[0]), batch[1]), batch)
            if iteration % 3 == 1:
                torch.multinomial(torch.ones(5), 2)
            if session.state.step == stop:
                break
    return [p.detach().clone() for p in model.parameters()]


def test_draws_between_steps_do_not_move_the_draws_of_steps(tmp_path: Path) -> None:
    whole = _sampling(None)
    _sampling(tmp_path / "run", stop=7)
    resumed = _sampling(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def _recurrent(run: Path | None, *, stop: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    cell, head = nn.LSTMCell(10, 8), nn.Linear(8, 4)
    model = nn.ModuleList([cell, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    carried: list[Any] = [None]

    def loss(batch: Any) -> Tensor:
        h, c = cell(batch[0], carried[0])
        carried[0] = h.detach(), c.detach()
        return f.cross_entropy(head(h), batch[1])

    options = {"global_batch_size": 64, "epochs": 2, "overrides": THREADS, "split_batch": False}
    with whet.Session(model, optimizer, (X, Y), run=run, **options) as session:
        for batch in session:
            session.step(loss, batch)
            if session.state.step == stop:
                break
    return [p.detach().clone() for p in model.parameters()]


def test_state_in_a_variable_of_the_user_is_not_called_exact(tmp_path: Path) -> None:
    whole = _recurrent(None)
    _recurrent(tmp_path / "run", stop=7)
    resumed = _recurrent(tmp_path / "run")
    assert not all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True)), "otherwise nothing is shown"
    assert exactness(tmp_path / "run") != "bit-exact"


def test_accumulation_is_no_override(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="accumulation"):
        train(classifier(), overrides={**THREADS, "accumulation": 4}, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_plan_shows_what_the_environment_has_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    from whet.device.open import current_machine
    from whet.machine.known import load_machine
    from whet.plan.plan import make_plan
    from whet.plan.workload import Workload

    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.7")
    monkeypatch.setenv("PYTORCH_MPS_LOW_WATERMARK_RATIO", "0.5")
    _, system_state = current_machine()
    workload = Workload(recipe="test", num_parameters=1000, global_batch_size=8)
    plan = make_plan(load_machine("m2-air-8gb"), workload, system_state=system_state)
    assert plan.mps_fallback == "on"
    assert (plan.high_watermark, plan.low_watermark) == (0.7, 0.5)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    from tiny_bert import write_tiny_bert
    from whet.recipes.text.tokenizer import PretrainedTokenizer

    folder = write_tiny_bert(tmp_path / "bert")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(WhetError, match="tokenizer"):
        PretrainedTokenizer.load(folder)


# --- what was refused or broken ---------------------------------------------------------------------------------------


def test_two_optimizers_step_on_one_batch() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(10, 4), nn.Linear(10, 4)
    made = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]
    before = [net.weight.detach().clone() for net in (first, second)]
    nets, options = nn.ModuleList([first, second]), {"global_batch_size": 64, "overrides": THREADS}
    with pytest.raises(UsageError, match=r"need names\n.*a list of 2\n.*session\.step\(loss, batch, optimizer="):
        whet.Session(nets, made, (X, Y), **options)
    with whet.Session(nets, {"first": made[0], "second": made[1]}, (X, Y), **options) as session:
        for batch in session:
            session.step(lambda b: f.cross_entropy(first(b[0]), b[1]), batch, optimizer="first")
            session.step(lambda b: f.cross_entropy(second(b[0]), b[1]), batch, optimizer="second")
    assert session.state.step == 10
    assert not any(torch.equal(net.weight, old) for net, old in zip((first, second), before, strict=True))


def test_a_backward_pass_of_the_user() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    with whet.Session(model, optimizer, (X, Y), global_batch_size=64, overrides=THREADS) as session:
        for batch in session:
            with session.manual(batch) as (x, y):
                optimizer.zero_grad()
                f.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert session.state.step == 10
    assert not torch.equal(model[0].weight, before)


def test_a_batch_of_the_session_that_is_used_as_data_is_explained() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whet.Session(model, optimizer, (X, Y), global_batch_size=64, overrides=THREADS) as session:
        batch = next(iter(session))
        for use in (lambda: batch.x, lambda: batch[0], lambda: list(batch)):
            with pytest.raises(UsageError, match=r"session\.step\(loss, batch\), or: with session\.manual\(batch\)"):
                use()


@pytest.mark.parametrize("name", ["OneCycleLR", "StepLR"])
def test_a_scheduler_of_torch_sets_the_rates(name: str, tmp_path: Path) -> None:
    def make(optimizer: Any) -> Any:
        if name == "OneCycleLR":
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)

    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"schedule": make(optimizer), "schedule_interval": "step", "global_batch_size": 64}
    train(model, optimizer=optimizer, run=tmp_path / "run", **options)
    expected, plain = [], torch.optim.SGD(classifier().parameters(), lr=0.1, momentum=0.9)
    scheduler = make(plain)
    for _ in range(10):
        expected.append(plain.param_groups[0]["lr"])
        plain.step()
        scheduler.step()
    assert [event["lr"] for event in events(tmp_path / "run", "step")] == expected


def test_a_scheduler_that_is_stepped_by_hand_is_refused_with_the_keyword() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    with whet.Session(model, optimizer, (X, Y), global_batch_size=64, overrides=THREADS) as session:
        batches = iter(session)
        session.step(lambda b: f.cross_entropy(model(b[0]), b[1]), next(batches))
        scheduler.step()
        second = next(batches)
        with pytest.raises(UsageError, match="schedule="):
            session.step(lambda b: f.cross_entropy(model(b[0]), b[1]), second)


class Detection:
    """Images with a dict of targets: boxes of any number, and a name."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        boxes = torch.ones(1 + index % 3, 4) * index
        return torch.full((3,), float(index)), {"boxes": boxes, "name": f"image {index}", "size": {"height": 3}}


def collate_detection(samples: list[Any]) -> Any:
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), list(targets)


@pytest.mark.parametrize("has_collate", [True, False])
def test_targets_with_strings_and_nested_dicts(has_collate: bool) -> None:
    model = nn.Linear(3, 4)
    names: set[str] = set()

    def loss(batch: Any) -> Tensor:
        images, targets = batch
        if has_collate:
            names.update(target["name"] for target in targets)
            boxes = [target["boxes"] for target in targets]
        else:
            names.update(targets["name"])
            boxes = list(targets["boxes"])
        mean = torch.stack([of_image.mean(0) for of_image in boxes])
        return f.mse_loss(model(images), mean)

    options = {"collate_fn": collate_detection} if has_collate else {}
    assert train(model, Detection(), loss, global_batch_size=4, lr=0.001, **options).step == 3
    assert names == {f"image {index}" for index in range(12)}


class Tokens:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [2, *range(5, 6 + index % 5), 3], "label": index % 2}


@pytest.mark.parametrize("returns", ["output", "dict", "tensor"])
def test_a_model_of_transformers_gets_its_own_keywords(returns: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    lengths: set[int] = set()

    def loss(batch: Any) -> Any:
        lengths.add(batch["input_ids"].shape[1])
        assert batch["input_ids"].shape == batch["attention_mask"].shape
        output = model(**batch)
        if returns == "output":
            return output
        return {"loss": output.loss, "score": output.logits.mean()} if returns == "dict" else output.loss

    assert train(model, Tokens(), loss, global_batch_size=4).step == 4
    assert len(lengths) > 1, "batches have the length of their longest sample"


def test_a_tuple_of_three_is_unpacked() -> None:
    model = classifier()
    weights = torch.rand(640)

    def loss(batch: Any) -> Tensor:
        x, y, weight = batch
        assert batch.x is x
        assert batch.y is y
        return (f.cross_entropy(model(x), y, reduction="none") * weight).mean()

    assert train(model, (X, Y, weights), loss).step == 20


def test_validation_data_alone_reports_the_validation_loss() -> None:
    model = classifier()
    result = train(model, val=(X[:100], Y[:100]), epochs=2)
    expected = f.cross_entropy(model(X[:100]), Y[:100]).item()
    assert result.metrics["val_loss"] == pytest.approx(expected, abs=1e-6)


def test_weights_of_a_run_from_python_are_loaded_and_exported(tmp_path: Path) -> None:
    from whet.cli.main import main

    trained = classifier()
    train(trained, run=tmp_path / "run")
    loaded = whet.load(tmp_path / "run", classifier())
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), trained.parameters(), strict=True))
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path / "run"), "--to", "safetensors", "--out", str(tmp_path / "out")])
    assert ended.value.code == 0
    assert list((tmp_path / "out").rglob("*.safetensors"))


def test_a_loss_that_needs_the_whole_batch_gets_it() -> None:
    """The state of an LSTM has one row for each sample of the batch."""
    cell, head = nn.LSTMCell(10, 8), nn.Linear(8, 4)
    model = nn.ModuleList([cell, head])
    state = torch.zeros(32, 8), torch.zeros(32, 8)
    messages: list[str] = []

    def loss(batch: Any) -> Tensor:
        h, _ = cell(batch[0], state)
        return f.cross_entropy(head(h), batch[1])

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        messages.append(str(fields.get("message", "")))

    assert train(model, loss=loss, on_event=on_event).step == 20
    assert any("the batch is not split: the loss fails with 2 of 32 samples" in message for message in messages)


def test_keywords_are_in_the_signature() -> None:
    for function in (whet.train, whet.Session):
        parameters = inspect.signature(function).parameters
        assert {"epochs", "patience", "schedule", "collate_fn", "overrides", "run"} <= set(parameters)
        assert all(parameters[name].annotation is not inspect.Parameter.empty for name in ("epochs", "run"))


@pytest.mark.parametrize(("recipe", "key"), [("text", "freeze"), ("puzzle", "arch.pos_encodings")])
def test_none_is_a_choice_where_the_options_say_so(recipe: str, key: str) -> None:
    from whet.config.resolve import resolve_config
    from whet.recipes.recipe import load_recipe

    config = resolve_config(load_recipe(recipe).Config, [f"{key}=none"]).config
    group, _, name = key.rpartition(".")
    assert getattr(getattr(config, group) if group else config, name) == "none"
