"""Captured steps, with graphs simulated on the CPU. tests/device/test_cuda_graphs.py tests CUDA itself."""

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from captured_steps import Norm, assert_same, mean_loss, plain_loss, rows, waits
from fake_device import FakeDevice
from small_models import TokenModel, ragged_tokens
from whet.data.columns import as_columns
from whet.data.split import BatchSplitter
from whet.recipes.chat.architecture import ChatArch
from whet.recipes.chat.model import build_model, next_token_loss
from whet.step.ema import Ema
from whet.step.graphs import MAX_CAPTURED_SHAPES, GraphedStepper
from whet.step.optimizers import OptimizerChoice, build_optimizer
from whet.step.step import Stepper, WrongReplayError
from whet.training.schedule import set_learning_rate

pytestmark = pytest.mark.torch

RATES = [1.0, 0.5, 0.25, 0.9, 0.1, 0.7, 0.3, 0.6]


def a_stepper(model, *, is_graphed, optimizer=None, ema=False, choice="adamw", **how):
    device = FakeDevice()
    made = build_optimizer(OptimizerChoice(name=choice, lr=1e-2), model, device, is_captured=is_graphed)
    how = {"clip": 1.0, "ema": Ema(model) if ema else None, **how}
    if not is_graphed:
        return Stepper(model, optimizer or made, device, **how)
    return GraphedStepper(model, optimizer or made, device, graphs=device.graphs(), **how)


def micros_of(data, ids, *, micro_batch, how="fixed"):
    return BatchSplitter(as_columns(data), send=lambda rows: rows).micro_batches(
        ids, ids, micro_batch=micro_batch, length_mode=how
    )


def train(stepper, loss, data, *, steps, batch=8, micro_batch=8, how="fixed", prepare=lambda _: None):
    """Losses and norms of steps whose learning rate changes each time."""
    torch.manual_seed(7)
    result = []
    for number in range(1, steps + 1):
        prepare(number)
        ids = np.random.default_rng(number).permutation(len(next(iter(as_columns(data).values()))))[:batch]
        set_learning_rate(stepper.optimizer, RATES[number % len(RATES)], [1e-2] * len(stepper.optimizer.param_groups))
        cut = micros_of(data, ids, micro_batch=micro_batch, how=how)
        # A checked step reads values on the host, so it runs eagerly.
        outcome = stepper(loss, cut, num_samples=batch, step=number, is_checked=number in (6, 7))
        result.append((outcome.loss, outcome.grad_norm))
    # Read late: a replay must not overwrite the result of an earlier step.
    return [(float(loss), float(norm)) for loss, norm in result]


def state_of(stepper):
    state = {name: tensor.clone() for name, tensor in stepper.model.state_dict().items()}
    if stepper.ema is not None:
        state |= {f"ema.{name}": tensor.clone() for name, tensor in stepper.ema.average.items()}
    for index, parameter in enumerate(stepper.model.parameters()):
        kept = stepper.optimizer.state.get(parameter, {})
        state |= {f"{index}.{key}": torch.as_tensor(value).clone() for key, value in kept.items()}
    return {**state, "rng": torch.get_rng_state()}


def pair_of(make, **how):
    """The same model twice: run as it is, and captured."""
    steppers = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        steppers.append(a_stepper(make(), is_graphed=is_graphed, **how))
    return steppers


# --- the same training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["adamw", "sgd"])
@pytest.mark.parametrize("micro_batch", [8, 3])
def test_replays_train_bit_identically_to_eager_steps(choice, micro_batch):
    plain, graphed = pair_of(Norm, ema=True, choice=choice)
    data = rows()
    expected = train(plain, mean_loss(plain.model), data, steps=12, micro_batch=micro_batch)
    ends = state_of(plain)
    assert train(graphed, mean_loss(graphed.model), data, steps=12, micro_batch=micro_batch) == expected
    assert_same(state_of(graphed), ends)
    assert graphed.num_captured == 1
    assert graphed.graph_obstacle is None


@pytest.mark.parametrize("micro_batch", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_replays_weight_tokens_with_few_shapes(micro_batch):
    plain, graphed = pair_of(TokenModel)
    # The default packing has shapes that depend on values; this one does not.
    data = {"tokens": ragged_tokens(60, longest=24, seed=3)}
    how = {"steps": 40, "batch": 4, "micro_batch": micro_batch, "how": "bucketed"}
    expected = train(plain, token_loss(plain.model), data, **how)
    ends = state_of(plain)
    assert train(graphed, token_loss(graphed.model), data, **how) == expected
    assert_same(state_of(graphed), ends)
    assert 1 < graphed.num_captured <= MAX_CAPTURED_SHAPES


def token_loss(model):
    def loss(micro):
        values, lengths = micro.tokens.values, micro.tokens.lengths
        is_real = torch.arange(values.shape[1] - 1) < (lengths - 1)[:, None]
        logits = model.out(model.norm(model.embed(values[:, :-1])))
        losses = functional.cross_entropy(logits.flatten(0, 1), values[:, 1:].flatten(), reduction="none")
        return (losses * is_real.flatten()).sum(), is_real.sum()

    return loss


@pytest.mark.parametrize(
    ("micro_batch", "kind"),
    [
        (8, "trm"),
        pytest.param(3, "trm", marks=pytest.mark.slow),
        pytest.param(8, "gpt", marks=pytest.mark.slow),
        pytest.param(3, "gpt", marks=pytest.mark.slow),
    ],
)
def test_replays_train_a_chat_model(kind, micro_batch):
    """Rule K3 captures chat: documents at any position of a row, dropout, EMA and several passes."""
    arch = ChatArch(kind=kind, hidden_size=32, num_heads=2, seq_len=12, supervision=2 if kind == "trm" else 1)
    plain, graphed = pair_of(lambda: build_model(arch, vocab_size=20, dropout=0.2), ema=True)
    torch.manual_seed(2)
    is_start = torch.rand(40, 13) < 0.2
    is_start[:, 0] = True
    data = {"tokens": torch.randint(0, 20, (40, 13)), "is_start": is_start, "is_loss": torch.rand(40, 13) < 0.7}
    expected = train(plain, functools.partial(next_token_loss, plain.model), data, steps=12, micro_batch=micro_batch)
    ends = state_of(plain)
    loss = functools.partial(next_token_loss, graphed.model)
    assert train(graphed, loss, data, steps=12, micro_batch=micro_batch) == expected
    assert_same(state_of(graphed), ends)
    assert (graphed.num_captured, graphed.graph_obstacle) == (1, None)


def test_replays_scale_the_loss():
    plain, graphed = pair_of(lambda: Norm(0.0), loss_scaling="dynamic")
    data = rows()
    data[0][5] = 1e30  # Some steps overflow, are skipped, and halve the scale.
    results = []
    for stepper in (plain, graphed):
        stepper.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=3)
        losses = train(stepper, mean_loss(stepper.model), data, steps=16)
        results.append((repr(losses), stepper.scaler.state_dict(), state_of(stepper)))
    assert results[0][:2] == results[1][:2]
    assert_same(results[1][2], results[0][2])
    assert results[1][1]["scale"] < 2.0**120, "nothing has overflowed"
    assert graphed.num_captured == 1


def test_ema_share_in_a_tensor_gives_the_same_bits():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        model = nn.Linear(7, 5).to(dtype)
        numbers, tensors = Ema(model), Ema(model)
        for step in (1, 2, 9, 80, 9_000):
            with torch.no_grad():
                model.weight.add_(torch.randn_like(model.weight))
            numbers.update_by(numbers.share(step))
            tensors.update_by(torch.tensor(tensors.share(step), dtype=torch.float64))
            assert all(torch.equal(tensors.average[name], value) for name, value in numbers.average.items())


# --- decisions of Python code -----------------------------------------------------------------------------------------


def test_replays_follow_modes_frozen_layers_hyperparameters_and_loss_constants():
    def follow(stepper):
        model, weight = stepper.model, [1.0]

        def prepare(number):
            model.net[1].train(number not in (6, 7))
            model.net[0].requires_grad_(number < 10)
            stepper.optimizer.param_groups[0]["weight_decay"] = 0.5 if number > 12 else 0.01
            weight[0] = 3.0 if number in (14, 15) else 1.0

        def written_anew(number):
            prepare(number)
            factor = weight[0]
            return lambda m: functional.cross_entropy(model(m.x), m.y) * factor

        torch.manual_seed(7)
        result = []
        for number in range(1, 20):
            outcome = stepper(
                written_anew(number),
                micros_of(rows(), np.arange(number, number + 8), micro_batch=8),
                num_samples=8,
                step=number,
            )
            result.append(float(outcome.loss))
        return result

    plain, graphed = pair_of(Norm)
    expected, ends = follow(plain), state_of(plain)
    assert follow(graphed) == expected
    assert_same(state_of(graphed), ends)
    # The change of the weight decay has dropped the captures before it.
    assert graphed.num_captured >= 2
    assert graphed.graph_obstacle is None


def test_a_hidden_change_of_the_loss_is_detected():
    class Deep:
        factor = 1.0

    _, graphed = pair_of(lambda: Norm(0.0))
    data, deep = rows(), Deep()

    def loss(micro):
        return functional.cross_entropy(graphed.model(micro.x), micro.y) * deep.factor

    train(graphed, loss, data, steps=4)
    assert graphed.num_captured == 1
    deep.factor = 1.5
    with pytest.raises(WrongReplayError, match="the replayed loss is"):
        train(graphed, loss, data, steps=4)
    assert "a graph does not see" in graphed.graph_obstacle


def test_moved_weights_and_state_are_captured_again():
    plain, graphed = pair_of(Norm)
    data = rows()

    def elsewhere(stepper):
        def prepare(number):
            if number == 5:
                for state in stepper.optimizer.state.values():
                    state.update({name: value.clone() for name, value in state.items()})
            if number == 8:
                layer = stepper.model.net[0].weight
                layer.data = layer.data.clone()

        return prepare

    expected = train(plain, mean_loss(plain.model), data, steps=12, prepare=elsewhere(plain))
    ends = state_of(plain)
    assert train(graphed, mean_loss(graphed.model), data, steps=12, prepare=elsewhere(graphed)) == expected
    assert_same(state_of(graphed), ends)
    assert graphed.num_captured == 1


def test_shapes_above_the_limit_run_eagerly():
    plain, graphed = pair_of(lambda: Norm(0.0))
    data = rows(64)

    def lengths(stepper):
        result = []
        for number in range(1, 60):
            size = 2 + number % (MAX_CAPTURED_SHAPES + 4)
            micro_batches = micros_of(data, np.arange(size), micro_batch=size)
            result.append(float(stepper(loss_of[stepper], micro_batches, num_samples=size, step=number).loss))
        return result

    loss_of = {stepper: mean_loss(stepper.model) for stepper in (plain, graphed)}
    assert lengths(graphed) == lengths(plain)
    assert graphed.num_captured == MAX_CAPTURED_SHAPES
    assert graphed.graph_obstacle is None


def test_a_larger_step_is_captured_before_smaller_ones(monkeypatch):
    """Smaller pools would be too fragmented for it: it gets its own pool, and smaller shapes follow there."""
    plain, graphed = pair_of(lambda: Norm(0.0))
    data, held = rows(64), []
    monkeypatch.setattr(graphed._graphs, "forget", lambda: held.append(graphed.num_captured))

    def losses(stepper):
        loss, result = mean_loss(stepper.model), []
        for number, size in enumerate((6, 6, 4, 4, 8, 8, 6, 6, 4, 4, 8), start=1):
            micro_batches = micros_of(data, np.arange(size), micro_batch=size)
            result.append(float(stepper(loss, micro_batches, num_samples=size, step=number).loss))
            sizes.append(sorted(number for number, *_ in getattr(stepper, "_captured", ())))
        return result

    sizes: list[list[int]] = []
    expected = losses(plain)
    sizes.clear()
    assert losses(graphed) == expected
    assert held == [0, 0], "nothing is captured any more when a pool is begun"
    assert sizes == [[], [6], [4, 6], [4, 6], [8], [8], [6, 8], [6, 8], [4, 6, 8], [4, 6, 8], [4, 6, 8]]


@pytest.mark.parametrize("is_compiled", [False, True])
def test_another_shape_is_captured_without_an_eager_step_unless_it_must_compile(is_compiled):
    plain, graphed = pair_of(lambda: Norm(0.0))
    graphed._runs_eagerly_first = graphed._is_compiled = is_compiled
    data, calls = rows(64), []

    def losses(stepper):
        loss, result = mean_loss(stepper.model), []

        def counted(micro):
            calls.append(len(micro))
            return loss(micro)

        for number, size in enumerate((8, 8, 6, 6), start=1):
            micro_batches = micros_of(data, np.arange(size), micro_batch=size)
            result.append(float(stepper(counted, micro_batches, num_samples=size, step=number).loss))
        return result

    expected = losses(plain)
    calls.clear()
    assert losses(graphed) == expected
    # Run, captured and checked; the second shape is captured and checked.
    assert (calls.count(8), calls.count(6)) == (3, 3 if is_compiled else 2)


def test_a_shape_that_cannot_be_captured_at_once_runs_eagerly_first():
    plain, graphed = pair_of(lambda: Norm(0.0))
    data, calls = rows(64), []

    def losses(stepper):
        loss, result = mean_loss(stepper.model), []

        def fails_once(micro):
            calls.append(len(micro))
            if stepper is graphed and len(micro) == 6 and calls.count(6) == 1:
                raise RuntimeError("not while it is captured")
            return loss(micro)

        for number, size in enumerate((8, 8, 6, 6, 8, 6), start=1):
            micro_batches = micros_of(data, np.arange(size), micro_batch=size)
            result.append(float(stepper(fails_once, micro_batches, num_samples=size, step=number).loss))
        return result

    expected = losses(plain)
    calls.clear()
    assert losses(graphed) == expected
    assert graphed.graph_obstacle is None
    assert graphed.num_captured == 2


# --- steps that cannot be captured ------------------------------------------------------------------------------------


class Restless(Norm):
    def __init__(self) -> None:
        super().__init__(0.0)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


def depends_on_values(model, micro):
    losses = functional.cross_entropy(model(micro.x), micro.y, reduction="none")
    return losses[losses > 0].mean()


def draws_in_python(model, micro):
    return functional.cross_entropy(model(micro.x), micro.y) * (1 + random.random())


def draws_in_numpy(model, micro):
    return functional.cross_entropy(model(micro.x), micro.y) * (1 + np.random.rand())


def reads_ids(model, micro):
    return functional.cross_entropy(model(micro.x), micro.y) * (1 + float(micro.ids.sum()))


@pytest.mark.parametrize(
    ("model", "loss", "reason"),
    [
        (Norm, waits, "waits for the device, at _local_scalar_dense"),
        (Norm, depends_on_values, "waits for the device, at index"),
        (Norm, draws_in_python, "draws from a generator on the host"),
        (Norm, draws_in_numpy, "draws from a generator on the host"),
        (Norm, reads_ids, "reads sample_ids"),
        (Restless, plain_loss, "replaces the buffer 'calls'"),
    ],
)
def test_uncapturable_steps_run_eagerly_with_a_reason_and_the_same_bits(model, loss, reason):
    plain, graphed = pair_of(model)
    data, results = rows(), []
    for stepper in (plain, graphed):
        random.seed(3)
        np.random.seed(3)
        results.append((train(stepper, functools.partial(loss, stepper.model), data, steps=6), state_of(stepper)))
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])
    assert graphed.num_captured == 0
    assert reason in graphed.graph_obstacle


def test_hooks_and_host_state_of_optimizers_prevent_capture():
    def refusal(model, optimizer=None, **how):
        stepper = a_stepper(model, is_graphed=True, optimizer=optimizer, **how)
        train(stepper, mean_loss(model), rows(), steps=3)
        return stepper.graph_obstacle

    hooked = Norm()
    hooked.net[0].register_forward_hook(lambda *_: None)
    assert refusal(hooked) == "hooks on net.0 would not be called"
    watched = Norm()
    watched.net[0].weight.register_post_accumulate_grad_hook(lambda _: None)
    assert refusal(watched) == "hooks on net.0.weight would not be called"
    model = Norm()
    assert "OwnAdamW may keep per-step values on the host" in refusal(model, OwnAdamW(model.parameters()))
    model = Norm()
    slow = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    assert "loss scaling waits" in refusal(model, slow, loss_scaling="dynamic")


class OwnAdamW(torch.optim.AdamW):
    """Could keep the gradients of a step, which the next replay overwrites."""


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.SGD,
        torch.optim.RMSprop,
        torch.optim.NAdam,
        torch.optim.Rprop,
        torch.optim.Adafactor,
        lambda p: torch.optim.AdamW(p, foreach=True),
    ],
)
def test_updates_that_cannot_be_captured_follow_the_graph_with_the_same_bits(make):
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model = Norm()
        stepper = a_stepper(model, is_graphed=is_graphed, optimizer=make(model.parameters()), ema=True)
        results.append((train(stepper, mean_loss(model), rows(), steps=10), state_of(stepper)))
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])
    assert stepper.graph_obstacle is None
    assert (stepper.num_captured, stepper._captures_update) == (1, False)
    assert stepper._num_replays >= 5


class Stumbles(torch.optim.AdamW):
    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("not while capturing")
        return super().step(closure)


def test_a_capture_that_fails_in_the_update_changes_nothing():
    results = []
    for kind, is_graphed in ((torch.optim.AdamW, False), (Stumbles, True)):
        torch.manual_seed(0)
        model = Norm()
        own = kind(model.parameters(), lr=torch.tensor(1e-2), fused=True, capturable=True)
        stepper = a_stepper(model, is_graphed=is_graphed, optimizer=own, loss_scaling="dynamic", ema=True)
        results.append((train(stepper, mean_loss(model), rows(), steps=5), state_of(stepper)))
    assert stepper.graph_obstacle == "capturing failed: RuntimeError: not while capturing"
    assert not stepper.is_updating
    assert results[0][0] == results[1][0]
    assert_same(results[1][1], results[0][1])


def test_shapes_that_never_repeat_disable_graphs():
    stepper = a_stepper(Norm(0.0), is_graphed=True)
    loss = mean_loss(stepper.model)
    data = rows(80)
    for number in range(1, 66):
        stepper(loss, micros_of(data, np.arange(number + 1), micro_batch=80), num_samples=number + 1, step=number)
    assert stepper.graph_obstacle == "no shape repeated in 64 steps"
