"""Promise 1: for any split, the same samples contribute to the same step with the same weights."""

import copy
import functools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from amounts import amount
from small_models import TokenModel, convnet, images, ragged_tokens
from whet.data.adapters import open_source
from whet.data.batch import MicroBatch, Position
from whet.data.source import AbstractSource
from whet.data.split import LengthMode
from whet.device.cpu import CpuDevice
from whet.step.step import Stepper

pytestmark = pytest.mark.torch

FORMS: tuple[LengthMode, ...] = ("fixed", "sorted", "bucketed", "packed")
GRADIENT_BOUND = {torch.float32: 1e-6, torch.float64: 1e-12}
WEIGHT_BOUND = {torch.float32: 1e-5, torch.float64: 1e-10}


def gradients(
    model: nn.Module, source: AbstractSource, loss, *, micro_batch: int, how: LengthMode
) -> dict[str, Tensor]:
    """Return the gradient of one step. The weights do not change."""
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0), CpuDevice())
    batch = next(iter(source.batches(Position())))
    micro_batches = source.micro_batches(batch, micro_batch=micro_batch, length_mode=how)
    stepper(loss, micro_batches, num_samples=len(batch), step=1)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the relative L2 distance of all values."""
    difference = sum(float((ours[name] - theirs[name]).square().sum()) for name in theirs)
    return (difference / sum(float(value.square().sum()) for value in theirs.values())) ** 0.5


@settings(max_examples=amount(20, 40))
@given(
    num_samples=st.integers(2, 24),
    micro_batch=st.integers(1, 24),
    how=st.sampled_from(FORMS),
    longest=st.integers(2, 17),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_token_weighted_gradients_do_not_depend_on_the_split(
    num_samples: int, micro_batch: int, how: LengthMode, longest: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    model = TokenModel().to(dtype)
    tokens = ragged_tokens(num_samples, longest=longest, seed=seed)
    source = open_source({"tokens": tokens}, CpuDevice(), global_batch_size=num_samples, seed=seed)
    whole = gradients(model, source, model.loss, micro_batch=num_samples, how="fixed")
    cut = gradients(model, source, model.loss, micro_batch=micro_batch, how=how)
    assert relative(cut, whole) < GRADIENT_BOUND[dtype]


@settings(max_examples=amount(10, 20))
@given(
    num_samples=st.integers(2, 20),
    micro_batch=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_mean_gradients_do_not_depend_on_the_split(
    num_samples: int, micro_batch: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    model = convnet().to(dtype)
    x, y = images(num_samples, seed=seed)
    source = open_source((x.to(dtype), y), CpuDevice(), global_batch_size=num_samples, seed=seed)

    def loss(micro: MicroBatch) -> Tensor:
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    whole = gradients(model, source, loss, micro_batch=num_samples, how="fixed")
    cut = gradients(model, source, loss, micro_batch=micro_batch, how="fixed")
    assert relative(cut, whole) < GRADIENT_BOUND[dtype]


def steps(model: nn.Module, source: AbstractSource, loss, *, count: int, micro_batch: int, how: LengthMode) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stepper = Stepper(model, optimizer, CpuDevice(), clip=1.0)
    batches = (batch for epoch in range(count) for batch in source.batches(Position(epoch=epoch)))
    for step, batch in zip(range(1, count + 1), batches, strict=False):
        stepper(
            loss,
            source.micro_batches(batch, micro_batch=micro_batch, length_mode=how),
            num_samples=len(batch),
            step=step,
        )


SPLITS = [(1, "fixed"), (3, "sorted"), (5, "bucketed"), (4, "packed")]


@pytest.mark.parametrize(
    ("micro_batch", "how", "dtype"),
    [
        # In the gate each split once, and each dtype twice.
        pytest.param(
            *split,
            dtype,
            id=f"{split[0]}-{split[1]}-{str(dtype).removeprefix('torch.')}",
            marks=[pytest.mark.slow] if (place + number) % 2 else [],
        )
        for place, split in enumerate(SPLITS)
        for number, dtype in enumerate((torch.float32, torch.float64))
    ],
)
def test_fifty_adamw_steps_agree(dtype: torch.dtype, micro_batch: int, how: LengthMode) -> None:
    whole, cut = fifty_steps(dtype, 16, "fixed"), fifty_steps(dtype, micro_batch, how)
    # No parameter of this model has a true gradient of zero, so none is left out.
    assert relative(cut, whole) < WEIGHT_BOUND[dtype]


@functools.cache
def fifty_steps(dtype: torch.dtype, micro_batch: int, how: LengthMode) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = TokenModel().to(dtype)
    tokens = ragged_tokens(83, longest=15, seed=1)
    source = open_source({"tokens": tokens}, CpuDevice(), global_batch_size=16, seed=2)
    steps(model, source, model.loss, count=50, micro_batch=micro_batch, how=how)
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("fault", ["equal weights", "dropped tail", "padding counts"])
def test_the_test_can_fail(fault: str) -> None:
    """Each fault of the usual accumulation loop breaks the bound by far."""
    torch.manual_seed(0)
    model = TokenModel()
    tokens = ragged_tokens(10, longest=15, seed=1)
    source = open_source({"tokens": tokens}, CpuDevice(), global_batch_size=10, seed=2)
    whole = gradients(model, source, model.loss, micro_batch=10, how="fixed")

    def wrong(micro: MicroBatch):
        total, weight = model.loss(micro)
        if fault == "equal weights":
            return total / weight
        if fault == "dropped tail" and len(micro) < 4:
            return total * 0, weight * 0
        if fault == "padding counts":
            return total, torch.tensor(micro.tokens.values.numel())
        return total, weight

    cut = gradients(model, source, wrong, micro_batch=4, how="fixed")
    assert relative(cut, whole) > 1e-3


class HandWritten:
    """The usual accumulation loop, with the same settings."""

    def __init__(self, model: nn.Module, loss, *, lr: float, clip: float) -> None:
        self.model, self.loss, self.clip = model, loss, clip
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step(self, batch: object) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return float(loss.detach())


def test_a_convnet_is_bit_equal_to_the_hand_written_loop() -> None:
    import whet
    from whet.data.order import epoch_order

    x, y = images(200, seed=0)
    torch.manual_seed(0)
    ours = convnet(dropout=0.2)
    theirs = copy.deepcopy(ours)

    with whet.Session(
        ours,
        torch.optim.AdamW(ours.parameters(), lr=1e-3),
        (x, y),
        global_batch_size=20,
        epochs=5,
        clip=1.0,
        seed=3,
        overrides={"threads": 1, "micro_batch": 20, "optimizer_kernels": "yours"},
    ) as session:
        for batch in session:
            session.step(lambda micro: nn.functional.cross_entropy(ours(micro.x), micro.y), batch)

    loop = HandWritten(theirs, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), lr=1e-3, clip=1.0)
    torch.manual_seed(3)
    for epoch in range(5):
        order = torch.from_numpy(epoch_order(200, seed=3, epoch=epoch))
        for rows in order.split(20):
            loop.step((x[rows], y[rows]))
    assert session.state.step == 50
    for mine, other in zip(_all_tensors(ours), _all_tensors(theirs), strict=True):
        assert torch.equal(mine, other)


def _all_tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.state_dict().values()
