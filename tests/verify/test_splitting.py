"""Which losses may be computed in parts: those whose gradient stays that of the whole batch."""

import copy
import gc
import random
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as f

import whet
from whet.data.adapters import open_source
from whet.data.batch import Position
from whet.device.cpu import CpuDevice
from whet.step.loss import adapt_loss
from whet.verify.start.splitting import loss_split_obstacle

pytestmark = pytest.mark.torch

VOCABULARY, LENGTH, WIDTH = 13, 8, 6


class Tokens(nn.Module):
    """A token model with dropout, whose labels may be ignored."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.dropout(self.embed(tokens)))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), norm or nn.Identity(), nn.ReLU(), nn.Dropout(dropout))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(12, WIDTH, generator=generator), torch.arange(12) % 4


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, VOCABULARY, (12, LENGTH), generator=generator)
    return {"input_ids": drawn, "labels": drawn.clone()}


def token_mean(logits: Tensor, labels: Tensor, ignored: int = -100) -> Tensor:
    return f.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignored)


def contrastive(z: Tensor) -> Tensor:
    z = f.normalize(z, dim=1)
    return f.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


def pearson(x: Tensor, y: Tensor) -> Tensor:
    x, y = x - x.mean(), y - y.mean()
    return -(x * y).sum() / (x.norm() * y.norm() + 1e-6)


def mixup(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    share = torch.rand(1)
    return f.mse_loss(model(x * share + x.flip(0) * (1 - share)), f.one_hot(y, 4).float())


def noisy(model: nn.Module, x: Tensor) -> Tensor:
    return f.mse_loss(model(x + torch.randn_like(x)), torch.zeros(len(x), 4))


def jitter(model: nn.Module, x: Tensor) -> Tensor:
    return f.mse_loss(model(x * random.random()), torch.zeros(len(x), 4))


WEIGHTS = torch.tensor([1.0, 5.0, 1.0, 0.2])
MEANS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[Any], Callable[[Any], Any]]]] = {
    "cross entropy of classes": (Net, images, lambda m: f.cross_entropy),
    "mean squared error": (Net, images, lambda m: lambda b: f.mse_loss(m(b.x), f.one_hot(b.y, 4).float())),
    "with dropout": (lambda: Net(0.5), images, lambda m: lambda b: f.cross_entropy(m(b.x), b.y)),
    "with layer norm": (lambda: Net(norm=nn.LayerNorm(16)), images, lambda m: lambda b: f.cross_entropy(m(b.x), b.y)),
    "with noise per sample": (Net, images, lambda m: lambda b: noisy(m, b.x)),
    "dict with loss": (Net, images, lambda m: lambda b: {"loss": f.cross_entropy(m(b.x), b.y), "n": torch.ones(())}),
    "sum and weight": (
        Tokens,
        tokens,
        lambda m: (
            lambda b: (
                f.cross_entropy(m(b.input_ids).flatten(0, 1), b.labels.flatten(), reduction="sum"),
                (b.labels != -100).sum(),
            )
        ),
    ),
    "mean over tokens, then samples": (
        lambda: Tokens(0.2),
        tokens,
        lambda m: lambda b: f.cross_entropy(m(b.input_ids).transpose(1, 2), b.labels, reduction="none").mean(1).mean(),
    ),
}
WHOLE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[Any], Callable[[Any], Any]]]] = {
    "mean over labelled tokens": (Tokens, tokens, lambda m: lambda b: token_mean(m(b.input_ids), b.labels)),
    "transformers output": (
        Tokens,
        tokens,
        lambda m: lambda b: SimpleNamespace(loss=token_mean(m(b["input_ids"]), b["labels"])),
    ),
    "token mean with dropout": (lambda: Tokens(0.3), tokens, lambda m: lambda b: token_mean(m(b.input_ids), b.labels)),
    "token mean of a pair": (
        Tokens,
        lambda: tuple(tokens().values()),
        lambda m: lambda b: token_mean(m(b[0]), b[1]),
    ),
    "token mean that ignores -1": (
        Tokens,
        lambda: tuple(tokens().values()),
        lambda m: lambda b: token_mean(m(b[0]), b[1], ignored=-1),
    ),
    "weighted classes": (Net, images, lambda m: lambda b: f.cross_entropy(m(b.x), b.y, weight=WEIGHTS)),
    "sum over samples": (Net, images, lambda m: lambda b: f.cross_entropy(m(b.x), b.y, reduction="sum")),
    "contrastive": (Net, images, lambda m: lambda b: contrastive(m(b.x))),
    "correlation": (Net, images, lambda m: lambda b: pearson(m(b.x)[:, 0], b.y.float())),
    "variance regularizer": (Net, images, lambda m: lambda b: f.cross_entropy(m(b.x), b.y) + m(b.x).var(0).mean()),
    "hardest sample": (
        Net,
        images,
        lambda m: lambda b: f.cross_entropy(m(b.x), b.y, reduction="none").max(),
    ),
    "median": (Net, images, lambda m: lambda b: f.cross_entropy(m(b.x), b.y, reduction="none").median()),
    "triplet in the batch": (
        Net,
        images,
        lambda m: lambda b: f.triplet_margin_loss(m(b.x)[0::2], m(b.x)[1::2], m(b.x).flip(0)[0::2], margin=20.0),
    ),
    "BatchNorm": (lambda: Net(norm=nn.BatchNorm1d(16)), images, lambda m: lambda b: f.cross_entropy(m(b.x), b.y)),
    "mixing with one draw": (Net, images, lambda m: lambda b: mixup(m, b.x, b.y)),
    "draw of Python": (Net, images, lambda m: lambda b: jitter(m, b.x)),
    "fixed batch size": (Net, images, lambda m: lambda b: m(b.x).reshape(12, 4).square().mean()),
    "norm of the batch": (Net, images, lambda m: lambda b: m(b.x).norm()),
    "softmax over samples": (Net, images, lambda m: lambda b: (m(b.x).softmax(0) * b.y[:, None]).sum()),
    "root of the mean": (Net, images, lambda m: lambda b: f.mse_loss(m(b.x), f.one_hot(b.y, 4).float()).sqrt()),
}


def find_obstacle(make: Any, data: Any, make_loss: Any, *, size: int = 12, **options: Any) -> str | None:
    torch.manual_seed(0)
    model, device = make(), CpuDevice()
    source = open_source(data(), device, global_batch_size=size, seed=0, shuffle=False)
    batch = next(iter(source.batches(Position())))
    before = torch.get_rng_state().clone()
    obstacle = loss_split_obstacle(
        model,
        adapt_loss(make_loss(model), model),
        batch,
        lambda few, size: iter(source.micro_batches(few, micro_batch=size, length_mode="fixed")),
        device,
        **options,
    )
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    return obstacle


@pytest.mark.parametrize("name", MEANS)
def test_means_over_samples_may_be_split(name: str) -> None:
    assert find_obstacle(*MEANS[name]) is None


@pytest.mark.parametrize("name", WHOLE)
def test_losses_of_the_whole_batch_are_not_split(name: str) -> None:
    assert find_obstacle(*WHOLE[name])


@pytest.mark.parametrize("name", [name for name in WHOLE if name not in ("mixing with one draw", "draw of Python")])
def test_the_step_has_the_gradient_of_the_whole_batch(name: str) -> None:
    """The plan splits a batch where memory is short; a plan for 1 KB of memory stands for that (simulated)."""
    make, data, make_loss = WHOLE[name]
    torch.manual_seed(0)
    model = make()
    initial = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    whet.train(
        model,
        data(),
        loss=make_loss(model),
        optimizer=optimizer,
        global_batch_size=12,
        shuffle=False,
        max_steps=1,
        overrides={"memory_gb": 0.000001, "activation_checkpointing": "off"},
        measure=False,
        on_event=None,
    )
    torch.manual_seed(0)
    fresh = make()
    loss, _ = _whole_loss(make_loss(fresh), data())
    # Dropout draws differ between the two models, so those rows are left out by the parametrization above.
    expected = torch.autograd.grad(loss, list(fresh.parameters()), allow_unused=True)
    if not any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        for before, after, gradient in zip(initial, model.parameters(), expected, strict=True):
            torch.testing.assert_close(before - after, torch.zeros_like(before) if gradient is None else gradient)


def _whole_loss(loss: Any, data: Any) -> tuple[Tensor, None]:
    from whet.data.batch import DictBatch, TupleBatch
    from whet.data.columns import name_fields
    from whet.step.loss import parse_loss

    batch = DictBatch(data) if isinstance(data, dict) else TupleBatch.of(name_fields(data))
    total, _ = parse_loss(loss(batch))
    return total, None


def test_a_split_that_would_change_the_training_is_refused() -> None:
    torch.manual_seed(0)
    model, data = Tokens(), tokens()
    options: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "global_batch_size": 12}
    loss = WHOLE["mean over labelled tokens"][2](model)
    with pytest.raises(whet.WhetError, match="micro_batch=4 would change what is trained"):
        whet.train(model, data, loss=loss, overrides={"micro_batch": 4}, measure=False, on_event=None, **options)
    # Declared by the user, the same split is accepted.
    whet.train(
        model, data, loss=loss, overrides={"micro_batch": 4}, split_batch=True, measure=False, on_event=None, **options
    )


# --- losses that look like means in the first samples ----------------------------------------------------------------

SAMPLES = 64


def rows(seed: int = 3) -> Tensor:
    return torch.randn(4 * SAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed))


def rare_class() -> tuple[Tensor, Tensor]:
    x, y = rows(), torch.zeros(4 * SAMPLES, dtype=torch.long)
    for start in range(0, len(x), SAMPLES):
        y[[start + 5, start + 40]] = 1
    return x, y


def rarely_ignored() -> tuple[Tensor, Tensor]:
    x = rows()
    y = torch.arange(len(x)) % 4
    y[[start + 7 for start in range(0, len(x), SAMPLES)]] = -100
    return x, y


def full_mask(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = rows()
    mask = torch.ones(len(x), dtype=dtype)
    mask[SAMPLES::7] = 0
    return x, mask


def padded_later() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(1, VOCABULARY, (4 * SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    drawn[SAMPLES::3, LENGTH // 2 :] = 0
    return drawn, drawn.roll(-1, 1)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)


def two_heads(m: Any, x: Tensor) -> Tensor:
    z = f.normalize(m.small(x), dim=1)
    return 300 * (m.large(x) - x - 3).square().mean() + 0.3 * torch.logsumexp(z @ z.T, 1).mean()


def masked_mean(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    return (m(x).square().mean(1) * mask).sum() / mask.sum()


RARE = torch.tensor([1.0, 31.0, 1.0, 1.0])
HIDDEN: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[Any], Callable[..., Any]]]] = {
    "class weights of a rare class": (Net, rare_class, lambda m: lambda b: f.cross_entropy(m(b[0]), b[1], weight=RARE)),
    "criterion with class weights": (Net, images, lambda m: nn.CrossEntropyLoss(weight=RARE)),
    "partial with class weights": (Net, images, lambda m: partial(f.cross_entropy, weight=RARE)),
    "rarely ignored samples": (Net, rarely_ignored, lambda m: f.cross_entropy),
    "float mask": (Net, full_mask, lambda m: lambda b: masked_mean(m, *b)),
    "bool mask": (Net, lambda: full_mask(torch.bool), lambda m: lambda b: masked_mean(m, *b)),
    "padding in a pair": (Tokens, padded_later, lambda m: lambda b: token_mean(m(b[0]), b[1], ignored=0)),
    "padding in single tokens": (
        Tokens,
        lambda: padded_later()[:1],
        lambda m: lambda b: token_mean(m(b[0][:, :-1]), b[0][:, 1:].contiguous(), ignored=0),
    ),
    "small contrastive head": (TwoHeads, lambda: (rows(),), lambda m: lambda b: two_heads(m, b[0])),
    "mean and number": (Net, images, lambda m: lambda b: (f.cross_entropy(m(b.x), b.y), torch.tensor(len(b.x)))),
    "loss and metric": (
        Net,
        images,
        lambda m: lambda b: (f.cross_entropy(m(b.x), b.y), (m(b.x).argmax(1) == b.y).float().mean() + 0.1),
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_losses_that_look_like_means_are_not_split(name: str) -> None:
    assert find_obstacle(*HIDDEN[name], size=SAMPLES)


class BeforeNorm(nn.Module):
    """A bias before a norm has no gradient except rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 8, 3, padding=1), nn.GroupNorm(8, 8), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * WIDTH, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[:, None])


class Attention(nn.Module):
    """The bias of the keys has no gradient except rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.query, self.key, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(((self.query(x) @ self.key(x).mT).softmax(-1) @ x).mean(1))


def fitted(model: nn.Module) -> Callable[[Any], Tensor]:
    """Return a loss whose gradient is rounding alone, as after a long training."""
    wanted = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in wanted.parameters():
            parameter.mul_(1 + 1e-7)
    return lambda b: f.mse_loss(model(b[0]), wanted(b[0]).detach())


TINY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[[Any], Callable[..., Any]]]] = {
    "bias before a norm": (BeforeNorm, images, lambda m: f.cross_entropy),
    "bias of keys": (Attention, lambda: (tokens()["input_ids"], images()[1]), lambda m: f.cross_entropy),
    "model without an error": (Net, images, fitted),
    "difference of means": (Net, images, lambda m: lambda b: m(b.x)[:, 0].mean() - m(b.x)[:, 0].mean() * 0.9999),
    "uneven classes": (Net, rare_class, lambda m: f.cross_entropy),
    "masked sum over samples": (Net, full_mask, lambda m: lambda b: (m(b[0]).square().mean(1) * b[1]).mean()),
    "padding that counts": (Tokens, padded_later, lambda m: lambda b: m(b[0]).square().mean()),
    "weights of binary cross entropy": (
        Net,
        images,
        lambda m: lambda b: nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS)(m(b.x), f.one_hot(b.y, 4).float()),
    ),
    "equal class weights": (Net, images, lambda m: nn.CrossEntropyLoss(weight=torch.full((4,), 2.0))),
}


@pytest.mark.parametrize("name", TINY)
def test_rounding_and_uneven_samples_do_not_prevent_a_split(name: str) -> None:
    assert find_obstacle(*TINY[name], size=SAMPLES) is None


@pytest.mark.parametrize("factor", [lambda out: out * float("nan"), lambda out: out.abs().sqrt() * 0])
def test_a_loss_that_becomes_nan_is_left_to_the_guard(factor: Callable[[Tensor], Tensor]) -> None:
    case = Net, images, lambda m: lambda b: factor(m(b.x) * 0).mean()
    assert find_obstacle(*case) is not None
    assert find_obstacle(*case, is_repeated=True) is None


# --- during a run ----------------------------------------------------------------------------------------------------


def _run(make_loss: Callable[[nn.Module, Any], Callable[[Any], Any]], steps: int = 8, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    options = {"overrides": {"micro_batch": 8}, **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with whet.Session(
        model, optimizer, (rows(),), global_batch_size=SAMPLES, epochs=9, max_steps=steps, on_event=None, **options
    ) as session:
        for batch in session:
            session.step(make_loss(model, session), batch)
    return model


def test_a_loss_that_changes_during_the_run_is_refused_before_the_update() -> None:
    def make_loss(model: nn.Module, session: Any) -> Callable[[Any], Any]:
        def loss(b: Any) -> Tensor:
            out = model(b[0])
            return out.square().mean() + (out.mean().square() * 5 if session.progress.step >= 3 else 0.0)

        return loss

    with pytest.raises(whet.WhetError, match=r"the loss has changed since the start: at step 4[^$]*split_batch="):
        _run(make_loss)
    _run(make_loss, split_batch=True)


def test_two_closures_of_one_factory_are_two_losses() -> None:
    def make(function: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        return lambda b: function(b)

    def make_loss(model: nn.Module, session: Any) -> Callable[[Any], Any]:
        mean, mixed = make(lambda b: model(b[0]).square().mean()), make(lambda b: model(b[0]).mean().square())
        return mean if session.progress.step != 2 else mixed

    with pytest.raises(whet.WhetError, match="micro_batch=8 would change what is trained"):
        _run(make_loss)


def test_a_new_partial_in_each_step_is_checked_once_and_keeps_nothing() -> None:
    calls, captured = [], []

    def base(model: nn.Module, big: Tensor, b: Any) -> Tensor:
        calls.append(len(b[0]))
        return model(b[0]).square().mean()

    def make_loss(model: nn.Module, session: Any) -> Callable[[Any], Any]:
        big = torch.zeros(10)
        captured.append(weakref.ref(big))
        return partial(base, model, big)

    _run(make_loss, steps=20)
    gc.collect()
    # One first check, and four more at steps 2, 4, 8 and 16.
    assert len(calls) - calls.count(8) <= 4 * 9
    assert sum(one() is not None for one in captured) <= 1


class Center(nn.Module):
    """A criterion with a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, out: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * out.mean())  # type: ignore[operator]
            self.factor.mul_(0.5)
        return out.square().mean()


@pytest.mark.parametrize("size", [8, None])
def test_checks_before_a_step_do_not_change_a_criterion(size: int | None) -> None:
    criterion, plain = Center(), Center()
    overrides = {} if size is None else {"micro_batch": size}
    _run(lambda model, _: lambda b: criterion(model(b[0])), steps=2, overrides=overrides, shuffle=False)
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in rows().split(SAMPLES)[:2]:
        parts = x.split(size or SAMPLES)
        optimizer.zero_grad()
        sum(plain(model(part)) / len(parts) for part in parts).backward()  # type: ignore[union-attr]
        optimizer.step()
    torch.testing.assert_close(criterion.mean, plain.mean)
    assert torch.equal(criterion.factor, plain.factor)


def test_no_model_is_kept_after_its_session() -> None:
    models = [weakref.ref(_run(lambda model, _: lambda b: model(b[0]).square().mean(), steps=2)) for _ in range(1)]
    gc.collect()
    assert models[0]() is None
