"""Several optimizers, their cadences, and steps by hand: equal to plain loops, and exact after a resume."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.utils.data import DataLoader, TensorDataset

import whet

pytestmark = pytest.mark.torch

THREADS = {"threads": 1}


class Gan:
    """A small generator and discriminator with their optimizers, and the losses of a plain loop."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.d = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(), nn.Linear(16, 1))
        self.g = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
        self.optimizers = {
            "d": torch.optim.Adam(self.d.parameters(), lr=1e-2, foreach=False),
            "g": torch.optim.Adam(self.g.parameters(), lr=2e-2, foreach=False),
        }
        self.seen: list[tuple[Tensor, Tensor]] = []
        """The real samples and the state of the generator before each loss."""

    def loss_d(self, batch: Any) -> Tensor:
        (real,) = batch
        self.seen.append((real.clone(), torch.get_rng_state()))
        fake = self.g(torch.randn(len(real), 3))
        return f.softplus(-self.d(real)).mean() + f.softplus(self.d(fake)).mean()

    def loss_g(self, batch: Any) -> dict[str, Tensor]:
        (real,) = batch
        self.seen.append((real.clone(), torch.get_rng_state()))
        fake = self.g(torch.randn(len(real), 3))
        return {"loss": f.softplus(-self.d(fake)).mean(), "score": self.d(real).mean()}

    def weights(self) -> list[Tensor]:
        return [t.clone() for net in (self.d, self.g) for t in net.state_dict().values()]


def loader() -> DataLoader[Any]:
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size=16, shuffle=True)


def train_gan(
    gan: Gan, run: Path | None = None, *, max_steps: int | None = None, every: int = 1, **options: Any
) -> Any:
    nets = {"d": gan.d, "g": gan.g}
    options = {"epochs": 3, "overrides": THREADS, "device": "cpu", **options}
    with whet.Session(nets, gan.optimizers, loader(), run=run, max_steps=max_steps, **options) as session:
        for batch in session:
            session.step(gan.loss_d, batch, optimizer="d")
            session.step(gan.loss_g, batch, optimizer="g", every=every)
            if session.due("evaluate"):
                session.log(val_loss=0.5)
    return session


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("every", [1, 3])
def test_two_optimizers_train_like_a_plain_loop(every: int) -> None:
    ours, plain = Gan(), Gan()
    # With split_batch=False, no check calls a loss with fewer samples.
    train_gan(ours, every=every, split_batch=False)
    assert [len(real) for real, _ in ours.seen] == [16] * len(ours.seen)
    calls = iter(list(ours.seen))
    for number in range(1, 19):
        # A discriminator step of a plain loop: the fake samples are detached.
        real, rng = next(calls)
        torch.set_rng_state(rng)
        plain.optimizers["d"].zero_grad()
        fake = plain.g(torch.randn(len(real), 3)).detach()
        (f.softplus(-plain.d(real)).mean() + f.softplus(plain.d(fake)).mean()).backward()
        plain.optimizers["d"].step()
        if number % every:
            continue
        real, rng = next(calls)
        torch.set_rng_state(rng)
        plain.optimizers["g"].zero_grad()
        f.softplus(-plain.d(plain.g(torch.randn(len(real), 3)))).mean().backward()
        plain.optimizers["g"].step()
    assert next(calls, None) is None
    assert equal(ours.weights(), plain.weights())


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_run_with_two_optimizers_resumes_exactly(tmp_path: Path, every: int) -> None:
    whole, first, second = Gan(), Gan(), Gan()
    train_gan(whole, tmp_path / "whole", every=every)
    train_gan(first, tmp_path / "run", every=every, max_steps=7)
    session = train_gan(second, tmp_path / "run", every=every)
    assert equal(whole.weights(), second.weights())
    assert not equal(first.weights(), second.weights())
    assert session.progress.step == 18
    resumed = next(event for event in events(tmp_path / "run") if event["kind"] == "resume")
    assert resumed["exactness"].startswith("session state restored exactly"), resumed["exactness"]


@pytest.mark.slow
def test_a_planted_fault_of_the_second_optimizer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: a checkpoint that forgets the second optimizer gives other weights."""
    from whet.checkpoint import snapshot_restore

    whole, second = Gan(), Gan()
    train_gan(whole, tmp_path / "whole")
    train_gan(Gan(), tmp_path / "run", max_steps=7)
    monkeypatch.setattr(snapshot_restore, "_restore_others", lambda *_: None)
    train_gan(second, tmp_path / "run")
    assert not equal(whole.weights(), second.weights())


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def test_losses_and_other_scalars_are_logged_by_name(tmp_path: Path) -> None:
    train_gan(Gan(), tmp_path / "run", every=2)
    steps = [event for event in events(tmp_path / "run") if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 19))
    assert all("loss_d" in event and ("loss_g" in event) == (event["step"] % 2 == 0) for event in steps)
    assert steps[1]["loss"] == pytest.approx(steps[1]["loss_d"] + steps[1]["loss_g"])
    assert isinstance(steps[1]["score"], float)


def test_each_optimizer_has_its_own_scheduler(tmp_path: Path) -> None:
    def run(folder: Path, max_steps: int | None = None) -> Gan:
        gan = Gan()
        schedulers = {"g": torch.optim.lr_scheduler.ExponentialLR(gan.optimizers["g"], gamma=0.5)}
        train_gan(gan, folder, max_steps=max_steps, every=2, schedule=schedulers, schedule_interval="step")
        return gan

    whole = run(tmp_path / "whole")
    run(tmp_path / "run", max_steps=8)
    resumed = run(tmp_path / "run")
    assert equal(whole.weights(), resumed.weights())
    # Nine steps of g in 18 batches: its scheduler follows its own steps.
    assert resumed.optimizers["g"].param_groups[0]["lr"] == pytest.approx(2e-2 * 0.5**9)
    assert resumed.optimizers["d"].param_groups[0]["lr"] == 1e-2


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(whet.WhetError) as caught:
        call()
    return str(caught.value)


def test_mistakes_are_refused_before_the_first_step(tmp_path: Path) -> None:
    gan = Gan()
    nets, optimizers = {"d": gan.d, "g": gan.g}, gan.optimizers
    options: dict[str, Any] = {"run": tmp_path / "run", "device": "cpu"}
    assert "need names" in refusal(lambda: whet.Session(nets, list(optimizers.values()), loader(), **options))
    assert "a dict from a name" in refusal(lambda: whet.Session(nets, {"d": "adam"}, loader(), **options))
    assert "only one optimizer" in refusal(lambda: whet.Session(nets, optimizers, loader(), ema=True, **options))
    both = {"d": optimizers["d"], "x": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)}
    assert "not the model's" in refusal(lambda: whet.Session(nets, both, loader(), **options))
    assert "names of the optimizers" in refusal(
        lambda: whet.Session(nets, optimizers, loader(), schedule={"x": "linear"}, **options)
    )
    assert "one step for each batch" in refusal(
        lambda: whet.train(nn.ModuleDict(nets), loader(), loss=gan.loss_d, optimizer=optimizers)
    )
    assert not (tmp_path / "run").exists()


def test_steps_out_of_order_are_refused() -> None:
    gan = Gan()
    with whet.Session({"d": gan.d, "g": gan.g}, gan.optimizers, loader(), device="cpu") as session:
        batch = next(iter(session))
        assert "name of an optimizer" in refusal(lambda: session.step(gan.loss_d, batch))
        assert "name of an optimizer" in refusal(lambda: session.step(gan.loss_d, batch, optimizer="x"))
        assert "positive whole number" in refusal(lambda: session.step(gan.loss_d, batch, optimizer="d", every=0))
        session.step(gan.loss_d, batch, optimizer="d")
        assert not session.progress.step
        assert "once" in refusal(lambda: session.step(gan.loss_d, batch, optimizer="d"))
        session.log(val_loss=1.0)
        assert "complete" in refusal(lambda: session.step(gan.loss_g, batch, optimizer="g"))


def leave_gan(folder: Path, *, at: int, how: str) -> None:
    """Leave the loop in batch `at`: after both steps, or between them, by break or by an error."""
    gan = Gan()
    nets = {"d": gan.d, "g": gan.g}
    with whet.Session(nets, gan.optimizers, loader(), run=folder, epochs=3, overrides=THREADS, device="cpu") as session:
        for batch in session:
            session.step(gan.loss_d, batch, optimizer="d")
            if session.progress.step == at - 1 and how == "error between":
                raise ValueError("mine")
            if session.progress.step == at - 1 and how == "break between":
                break
            session.step(gan.loss_g, batch, optimizer="g")
            if session.progress.step == at and how == "error after":
                raise ValueError("mine")
            if session.progress.step == at and how == "break":
                break


@pytest.mark.parametrize(
    "how",
    [
        "break between",
        "error after",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("break", "error between")),
    ],
)
def test_a_loop_that_is_left_in_the_middle_resumes_exactly(tmp_path: Path, how: str) -> None:
    whole, second = Gan(), Gan()
    train_gan(whole)
    if how.startswith("break"):
        leave_gan(tmp_path / "run", at=7, how=how)
    else:
        with pytest.raises(ValueError, match="mine"):
            leave_gan(tmp_path / "run", at=7, how=how)
    train_gan(second, tmp_path / "run")
    assert equal(whole.weights(), second.weights())


@pytest.mark.parametrize("bad", [pytest.param("loss_d", marks=pytest.mark.slow), "loss_g"])
def test_a_batch_with_nan_is_skipped_by_all_optimizers(tmp_path: Path, bad: str) -> None:
    """The loss of one optimizer is NaN in batch 4: the run rolls back, and neither optimizer steps on that batch."""
    gan = Gan()
    good = getattr(gan, bad)

    def loss(batch: Any) -> Any:
        returned = good(batch)
        value = returned["loss"] if isinstance(returned, dict) else returned
        return value * float("nan") if 4 in batches and len(batch[0]) == 16 and batches[-1] == 4 else value

    batches: list[int] = []
    losses = {"d": gan.loss_d, "g": gan.loss_g, bad[-1]: loss}
    nets = {"d": gan.d, "g": gan.g}
    options: dict[str, Any] = {"epochs": 2, "device": "cpu", "split_batch": False}
    options["overrides"] = {**THREADS, "checkpoint_steps": 2}
    with whet.Session(nets, gan.optimizers, loader(), run=tmp_path / "run", **options) as session:
        for batch in session:
            batches.append(session.progress.step + 1)
            session.step(losses["d"], batch, optimizer="d")
            session.step(losses["g"], batch, optimizer="g")
    assert session.progress.step == 12
    assert all(tensor.isfinite().all() for tensor in gan.weights())
    skips = [event for event in events(tmp_path / "run") if event["kind"] == "skip"]
    assert [(event["step"], event["verdict"]) for event in skips] == [(4, "reproducible")]
    # Both optimizers have skipped the batch: eleven steps each.
    counts = {name: int(next(iter(one.state.values()))["step"]) for name, one in gan.optimizers.items()}
    assert counts == {"d": 11, "g": 11}


def test_weights_of_several_models_are_loaded(tmp_path: Path) -> None:
    trained, fresh = Gan(), Gan()
    train_gan(trained, tmp_path / "run")
    whet.load(tmp_path / "run", {"d": fresh.d, "g": fresh.g}, "last")
    assert equal(trained.weights(), fresh.weights())


def test_models_in_a_dict_are_switched_to_training_mode() -> None:
    gan = Gan()
    for net in (gan.d, gan.g):
        net.eval()
    with whet.Session({"d": gan.d, "g": gan.g}, gan.optimizers, loader(), device="cpu"):
        assert gan.d.training
        assert gan.g.training


# --- manual steps ----------------------------------------------------------------------------------------------------


def regression() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(64, 5)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)), (x, x.sum(1, keepdim=True))


@pytest.mark.parametrize("kind", ["penalty", "lbfgs"])
def test_manual_steps_equal_a_plain_loop_and_resume_exactly(tmp_path: Path, kind: str) -> None:
    def own_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        if kind == "lbfgs":

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = f.mse_loss(model(x), y)
                loss.backward()
                return loss

            return optimizer.step(closure)  # type: ignore[return-value]
        x = x.clone().requires_grad_()
        optimizer.zero_grad()
        predicted = model(x)
        (slope,) = torch.autograd.grad(predicted.sum(), x, create_graph=True)
        loss = f.mse_loss(predicted, y) + 0.1 * slope.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def make() -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
        model, data = regression()
        if kind == "lbfgs":
            return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=4), data
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False), data

    def run(folder: Path | None, max_steps: int | None = None) -> tuple[nn.Module, list[Any]]:
        model, optimizer, data = make()
        options: dict[str, Any] = {"global_batch_size": 16, "epochs": 3, "device": "cpu", "overrides": THREADS}
        with whet.Session(model, optimizer, data, run=folder, max_steps=max_steps, **options) as session:
            batches = []
            for batch in session:
                with session.manual(batch) as rows:
                    x, y = rows
                    assert len(x) == 16
                    session.log_loss(own_step(model, optimizer, x, y))
                batches.append(batch.ids)
        return model, batches

    whole, batches = run(tmp_path / "whole")
    plain, optimizer, (x, y) = make()
    for ids in batches:
        own_step(plain, optimizer, x[ids], y[ids])
    assert equal(list(whole.state_dict().values()), list(plain.state_dict().values()))
    run(tmp_path / "run", max_steps=5)
    resumed, _ = run(tmp_path / "run")
    assert equal(list(whole.state_dict().values()), list(resumed.state_dict().values()))
    losses = [event.get("loss") for event in events(tmp_path / "run") if event["kind"] == "step"]
    assert len(losses) == 12
    assert losses[-1] < losses[0]


def test_a_manual_step_without_a_loss(tmp_path: Path) -> None:
    model, data = regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with whet.Session(model, optimizer, data, global_batch_size=16, device="cpu", run=tmp_path / "run") as session:
        for batch in session:
            with session.manual(batch) as (x, y):
                f.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    steps = [event for event in events(tmp_path / "run") if event["kind"] == "step"]
    assert len(steps) == 4
    assert not any("loss" in event for event in steps)


def test_a_loss_that_is_logged_after_its_manual_step_is_refused() -> None:
    model, data = regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with whet.Session(model, optimizer, data, global_batch_size=16, device="cpu") as session:
        batch = next(iter(session))
        with session.manual(batch) as (x, y):
            loss = f.mse_loss(model(x), y)
        assert "inside the block" in refusal(lambda: session.log_loss(loss))


def test_an_error_in_a_manual_step_is_raised() -> None:
    model, data = regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with whet.Session(model, optimizer, data, global_batch_size=16, device="cpu") as session:
        batch = next(iter(session))
        with pytest.raises(ValueError, match="mine"), session.manual(batch):
            raise ValueError("mine")


def test_lbfgs_needs_a_manual_step() -> None:
    model, data = regression()
    optimizer = torch.optim.LBFGS(model.parameters())
    with whet.Session(model, optimizer, data, global_batch_size=16, device="cpu") as session:
        batch = next(iter(session))
        assert "session.manual" in refusal(lambda: session.step(f.mse_loss, batch))


@pytest.mark.parametrize("option", [{"ema": True}, {"clip": 1.0}])
def test_options_without_effect_on_manual_steps_are_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    model, data = regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def run() -> None:
        options: dict[str, Any] = {"global_batch_size": 16, "device": "cpu", "run": tmp_path / "run", **option}
        with whet.Session(model, optimizer, data, **options) as session:
            for batch in session:
                with session.manual(batch):
                    pass

    assert next(iter(option)) in refusal(run)
    assert not (tmp_path / "run").exists()


def test_a_manual_step_does_not_see_gradients_of_an_earlier_step() -> None:
    ours, data = regression()
    plain, _ = regression()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, foreach=False) for model in (ours, plain)]
    options: dict[str, Any] = {"global_batch_size": 16, "device": "cpu", "overrides": THREADS}
    with whet.Session(ours, optimizers[0], data, **options) as session:
        for number, batch in enumerate(session):
            x, y = (part[batch.ids] for part in data)
            if number % 2:
                with session.manual(batch) as rows:
                    f.mse_loss(ours(rows.x), rows.y).backward()
                    optimizers[0].step()
                    optimizers[0].zero_grad()
            else:
                session.step(f.mse_loss, batch)
            f.mse_loss(plain(x), y).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
    assert equal(list(ours.state_dict().values()), list(plain.state_dict().values()))


def test_gradients_that_are_accumulated_by_hand_survive_a_resume(tmp_path: Path) -> None:
    def run(folder: Path, max_steps: int | None = None) -> list[Tensor]:
        model, data = regression()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
        options: dict[str, Any] = {"global_batch_size": 8, "epochs": 2, "device": "cpu", "overrides": THREADS}
        with whet.Session(model, optimizer, data, run=folder, max_steps=max_steps, **options) as session:
            for batch in session:
                with session.manual(batch) as (x, y):
                    (f.mse_loss(model(x), y) / 4).backward()
                    if session.progress.step % 4 == 3:
                        optimizer.step()
                        optimizer.zero_grad()
        return list(model.state_dict().values())

    whole = run(tmp_path / "whole")
    run(tmp_path / "run", max_steps=6)
    assert equal(whole, run(tmp_path / "run"))


def test_an_optimizer_and_a_manual_step_on_one_batch() -> None:
    gan = Gan()
    with whet.Session({"d": gan.d, "g": gan.g}, gan.optimizers, loader(), device="cpu") as session:
        for batch in session:
            session.step(gan.loss_d, batch, optimizer="d")
            with session.manual(batch) as (real,):
                gan.optimizers["g"].zero_grad()
                f.softplus(-gan.d(gan.g(torch.randn(len(real), 3)))).mean().backward()
                gan.optimizers["g"].step()
    assert session.progress.step == 6
