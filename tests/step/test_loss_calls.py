"""How a loss function is called: with the micro-batch, or as loss(model(x), y)."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whet
from whet.base.errors import UsageError, WhetError
from whet.data.batch import MicroBatch, TupleBatch
from whet.step.loss import BatchLoss, loss_code, parse_loss

pytestmark = pytest.mark.torch

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def _train(loss: Any) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whet.train(model, (X, Y), loss=loss, optimizer=optimizer, global_batch_size=16, on_event=None)
    return model.weight


def test_a_partial_of_a_torch_loss_is_called_with_outputs_and_targets() -> None:
    smooth = _train(partial(functional.cross_entropy, label_smoothing=0.2))
    assert torch.equal(smooth, _train(nn.CrossEntropyLoss(label_smoothing=0.2)))
    assert not torch.equal(smooth, _train(functional.cross_entropy))


def my_loss(outputs: Tensor, targets: Tensor, power: float = 2) -> Tensor:
    return functional.cross_entropy(outputs, targets) ** power


@pytest.mark.parametrize(
    ("loss", "call"),
    [
        (my_loss, "my_loss(model(batch[0]), batch[1])"),
        (partial(my_loss, power=1), "my_loss(model(batch[0]), batch[1], power=1)"),
        (lambda out, y: my_loss(out, y), "loss_fn(model(batch[0]), batch[1])"),
        (lambda out, y, w: my_loss(out, y), "loss_fn(...)"),
    ],
)
def test_a_loss_of_two_arguments_is_refused_with_a_call_that_can_be_typed(loss: Any, call: str) -> None:
    with pytest.raises(UsageError) as refused:
        _train(loss)
    assert str(refused.value).endswith(f"loss=lambda batch: {call}")


def test_class_weights_of_a_criterion_follow_the_model_to_a_simulated_device() -> None:
    # torch's meta device refuses tensors of other devices, as a GPU does.
    model, criterion = nn.Linear(4, 3, device="meta"), nn.CrossEntropyLoss(weight=torch.ones(3))
    fields = {"x": torch.zeros(8, 4, device="meta"), "y": torch.zeros(8, dtype=torch.long, device="meta")}
    micro = MicroBatch(fields, np.arange(8), make_data=TupleBatch.of)
    assert BatchLoss(criterion, model)(micro).device.type == "meta"
    assert criterion.weight.device.type == "meta"


@pytest.mark.parametrize("name", ["any arguments", "default", "partial", "dataclass"])
def test_a_loss_that_accepts_one_argument_is_called_with_the_batch(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    losses: dict[str, Any] = {
        "any arguments": lambda *batches: functional.cross_entropy(model(batches[0][0]), batches[0][1]),
        "default": lambda b=None: functional.cross_entropy(model(b[0]), b[1]),
        "partial": partial(lambda m, b, k: k * functional.cross_entropy(m(b[0]), b[1]), model, k=1),
        "dataclass": _Unhashable(model),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whet.train(model, (X, Y), loss=losses[name], optimizer=optimizer, global_batch_size=16, on_event=None)
    assert torch.equal(model.weight, _train(functional.cross_entropy))


@dataclasses.dataclass
class _Unhashable:
    model: nn.Module

    def __call__(self, b: Any) -> Tensor:
        return functional.cross_entropy(self.model(b[0]), b[1])


VALUE = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ((VALUE, {"accuracy": 1}), "the loss's weight must be a number"),
        ((VALUE, VALUE * 2), "a weight has no gradient"),
        ((VALUE, torch.tensor(1j)), "the loss's weight must be a real number"),
        (VALUE * 1j, "the loss must be a real number"),
    ],
)
def test_a_value_that_is_no_loss_is_refused_in_three_lines(returned: Any, message: str) -> None:
    with pytest.raises(WhetError, match=message) as refused:
        parse_loss(returned)
    assert len(str(refused.value).splitlines()) == 3


def test_numbers_beside_a_loss_that_cannot_be_logged_do_not_end_the_run(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    whet.train(
        model,
        (X, Y),
        loss=lambda b: {
            "loss": functional.cross_entropy(model(b[0]), b[1]),
            "self": torch.tensor(1.0),
            "wave": torch.tensor(1j),
        },
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch_size=16,
        run=tmp_path / "run",
        on_event=None,
    )
    steps = [line for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines() if '"self_"' in line]
    assert len(steps) == 2
    assert "wave" not in steps[0]


def test_the_code_of_a_loss_tells_functions_apart_and_not_numbers() -> None:
    def make(*captured: Any) -> Any:
        return lambda b: captured

    assert loss_code(make(torch.sin, 1)) == loss_code(make(torch.sin, 2))
    assert loss_code(make(torch.sin, 1)) != loss_code(make(torch.cos, 1))
    model = nn.Linear(1, 1)
    assert loss_code(make(model)) == loss_code(make(model))
    assert loss_code(make(model)) != loss_code(make(nn.Linear(1, 1)))
    assert loss_code(nn.MSELoss()) == loss_code(nn.MSELoss())
    assert loss_code(nn.MSELoss()) != loss_code(nn.MSELoss(reduction="sum"))
    assert loss_code(partial(my_loss, power=1)) == loss_code(partial(my_loss, power=2))
    assert loss_code(partial(my_loss, reduction="sum")) != loss_code(partial(my_loss, reduction="mean"))
