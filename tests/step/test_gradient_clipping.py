"""Foreach clipping: the bits of torch's function, and only where they are equal."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import whet
from whet.base.errors import UsageError
from whet.step.step import can_clip_foreach, clip_foreach

pytestmark = pytest.mark.torch


def parameters_with_gradients(*, scale: float, missing: bool = False) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    made: list[Tensor] = []
    for shape in ((7, 5), (5,), (), (1,), (3, 2, 4), (64, 33)):
        parameter = nn.Parameter(torch.randn(shape, generator=draw))
        if not (missing and len(made) % 2):
            parameter.grad = scale * torch.randn(shape, generator=draw)
        made.append(parameter)
    return made


@pytest.mark.parametrize("missing", [False, True], ids=["all gradients", "some gradients"])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4, float("inf"), float("nan"), 0.0])
def test_norm_and_gradients_have_the_bits_of_torchs_function(scale: float, missing: bool) -> None:
    ours, theirs = (parameters_with_gradients(scale=scale, missing=missing) for _ in range(2))
    assert can_clip_foreach(ours)
    norm, expected = clip_foreach(ours, 0.7), nn.utils.clip_grad_norm_(theirs, 0.7)
    assert torch.equal(norm.view(torch.int32), expected.view(torch.int32))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert torch.equal(one.grad.view(torch.int32), other.grad.view(torch.int32))


def test_clipping_gradients_that_have_a_graph_records_nothing() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = 2 * torch.ones(3, requires_grad=True)
    norm = clip_foreach([parameter], 1.0)
    assert not norm.requires_grad
    assert torch.is_grad_enabled()
    with torch.no_grad():
        clip_foreach([parameter], 1.0)
        assert not torch.is_grad_enabled()


def test_the_norm_of_a_step_without_gradients_is_torchs() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    assert torch.equal(clip_foreach(parameters, 1.0), nn.utils.clip_grad_norm_(parameters, 1.0))


def test_parameters_that_a_group_gets_in_place_are_clipped() -> None:
    def steps(is_whet: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = torch.ones(8, 3), torch.full((8, 1), 9.0)
        options = {"global_batch_size": 8, "epochs": 4, "clip": 0.05, "device": "cpu", "shuffle": False}
        session = whet.Session(model, optimizer, (x, y), **options) if is_whet else None
        with session or contextlib.nullcontext():
            for number, batch in enumerate(session or range(4)):
                if number == 2:
                    model.weight = nn.Parameter(model.weight.detach() + 0.01)
                    optimizer.param_groups[0]["params"][0] = model.weight
                if session is not None:
                    session.step(lambda micro: nn.functional.mse_loss(model(micro[0]), micro[1]), batch)
                    continue
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
        return model

    ours, theirs = steps(True), steps(False)
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


def test_groups_are_clipped_in_the_order_of_the_model() -> None:
    """As in clip_grad_norm_(model.parameters()): the order of the sum rounds the norm."""
    draw = torch.Generator().manual_seed(0)
    x, y = 5 * torch.randn(16, 3, generator=draw), torch.randn(16, 1, generator=draw)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(
            *[part for _ in range(30) for part in (nn.Linear(3, 3), nn.LayerNorm(3))], nn.Linear(3, 1)
        )
        weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
        return model, torch.optim.AdamW(groups, lr=1e-2)

    model, optimizer = make()
    loss = nn.functional.mse_loss
    whet.train(
        model,
        (x, y),
        loss=loss,
        optimizer=optimizer,
        clip=0.1,
        epochs=20,
        global_batch_size=16,
        shuffle=False,
        device="cpu",
        measure=False,
        on_event=None,
        overrides={"threads": 1, "optimizer_kernels": "yours"},
    )
    plain, plain_optimizer = make()
    for _ in range(20):
        plain_optimizer.zero_grad()
        loss(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        plain_optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_parameters_of_several_kinds_or_places_are_left_to_torch() -> None:
    class Marked(nn.Parameter):
        """A parameter subclass that may behave differently."""

    plain = nn.Parameter(torch.zeros(2))
    assert can_clip_foreach([plain, nn.Parameter(torch.zeros(3))])
    assert not can_clip_foreach([plain, nn.Parameter(torch.zeros(2, dtype=torch.float64))])
    assert not can_clip_foreach([plain, nn.Parameter(torch.zeros(2, device="meta"))])
    assert not can_clip_foreach([nn.Parameter(torch.zeros(2, device="meta"))])
    assert not can_clip_foreach([plain, Marked(torch.zeros(2))])


def train(model: nn.Linear, optimizer: torch.optim.Optimizer, *, before_step: Callable[[int], object]) -> None:
    data = torch.randn(8, 3), torch.randn(8, 1)
    with whet.Session(model, optimizer, data, global_batch_size=4, device="cpu", overrides={"threads": 1}) as session:
        for number, batch in enumerate(session):
            before_step(number)
            session.step(lambda micro: nn.functional.mse_loss(model(micro.x), micro.y), batch)


@pytest.mark.parametrize("is_of", ["class", "instance"])
def test_zero_grad_of_the_optimizer_is_called(is_of: str) -> None:
    dropped = []

    class Counting(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            dropped.append(set_to_none)
            super().zero_grad(set_to_none)

    model = nn.Linear(3, 1)
    optimizer = (Counting if is_of == "class" else torch.optim.SGD)(model.parameters(), lr=0.1)
    if is_of == "instance":
        optimizer.zero_grad = Counting.zero_grad.__get__(Counting(model.parameters()))  # type: ignore[method-assign]
    train(model, optimizer, before_step=lambda _number: None)
    assert len(dropped) >= 2


def test_gradients_of_a_parameter_that_was_replaced_do_not_add_up() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []

    def replace(number: int) -> None:
        if number == 0:
            model.weight = nn.Parameter(model.weight.detach().clone())
            model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
            model.weight.register_hook(lambda gradient: torch.ones_like(gradient))
            optimizer.param_groups[0]["params"][0] = model.weight

    train(model, optimizer, before_step=replace)
    assert len(seen) >= 2
    assert all(torch.equal(gradient, torch.ones(1, 3)) for gradient in seen)


def test_a_parameter_group_added_later_is_refused() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    with pytest.raises(UsageError, match="parameter groups of the optimizer changed"):
        train(model, optimizer, before_step=lambda number: number and optimizer.add_param_group({"params": model.bias}))
