"""Evaluation: no side effects on training, the best checkpoint, early stopping, metrics."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whet
from small_models import convnet, images
from small_training import cross_entropy, sgd, train
from whet.base.errors import WhetError
from whet.plan.plan import make_plan_again
from whet.plan.setting import MeasuredSetting

pytestmark = pytest.mark.torch


def test_evaluation_disturbs_nothing() -> None:
    """The same training, evaluated at every step or never, ends with the same weights."""

    def evaluate(model, micro_batches):
        assert not model.training
        torch.rand(3)
        return {"loss": float(sum(model(micro.x).sum() for micro in micro_batches))}

    finals = []
    for every in (None, 1):
        torch.manual_seed(0)
        model = convnet(dropout=0.5)
        extra = {"evaluate": evaluate, "val": images(10, seed=1), "eval_every": every} if every else {}
        train(model, images(40, seed=0), ema=True, seed=4, **extra)
        finals.append(model.state_dict())
    for name in finals[0]:
        assert torch.equal(finals[0][name], finals[1][name]), name


def test_evaluation_uses_the_average_and_covers_every_sample() -> None:
    model = nn.Linear(1, 1)
    seen: list[float] = []

    def evaluate(model, micro_batches):
        seen.extend(value for micro in micro_batches for value in micro.x.flatten().tolist())
        return {"weight": model.weight.item()}

    x = torch.arange(13.0)[:, None]
    result = whet.train(
        model,
        {"x": x / 10},
        loss=lambda micro: (model(micro.x) - 1).square().mean(),
        optimizer=sgd(model),
        evaluate=evaluate,
        val={"x": x},
        global_batch_size=4,
        epochs=1,
        ema=True,
    )
    assert seen == x.flatten().tolist()
    assert result.metrics["weight"] != model.weight.item()


def test_early_stop_and_best(tmp_path: Path) -> None:
    model = convnet()
    scores = iter([0.1, 0.5, 0.4, 0.3, 0.9])
    result = train(
        model,
        images(16, seed=0),
        evaluate=lambda model, micro_batches: {"accuracy": next(scores)},
        val=images(4, seed=1),
        epochs=9,
        goal="accuracy",
        patience=2,
        run=tmp_path / "run",
    )
    assert result.step == 8, "two worse evaluations after the best one"
    assert result.state == "done"
    report = whet.summarize(tmp_path / "run")
    assert (report.best_goal, report.best_goal_step) == (0.5, 4)
    assert {checkpoint.step for checkpoint in report.checkpoints} >= {4, 8}, "the best one is kept"


def test_a_goal_that_no_evaluation_gives_is_refused() -> None:
    with pytest.raises(WhetError, match="the goal is not among the metrics"):
        train(
            convnet(),
            images(16, seed=0),
            evaluate=lambda model, micro_batches: {"accuracy": 1.0},
            val=images(8, seed=1),
            goal="recall",
        )


def test_a_failing_evaluation_loses_no_step(tmp_path: Path) -> None:
    def evaluate(model, micro_batches):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(convnet(), images(16, seed=0), evaluate=evaluate, val=images(8, seed=1), run=tmp_path / "run")
    report = whet.summarize(tmp_path / "run")
    assert (report.state, [c.step for c in report.checkpoints]) == ("failed", [0, 2])


def test_a_goal_of_nan_is_never_the_best(tmp_path: Path) -> None:
    scores = iter([math.nan, 0.5, math.nan])
    train(
        convnet(),
        images(8, seed=0),
        epochs=3,
        evaluate=lambda model, micro_batches: {"accuracy": next(scores)},
        val=images(8, seed=1),
        goal="accuracy",
        run=tmp_path / "run",
    )
    assert whet.summarize(tmp_path / "run").best_goal == 0.5


def test_evaluation_keeps_the_order_of_ragged_data() -> None:
    from whet.data.batch import Ragged

    column = Ragged.of([torch.full((n,), i) for i, n in enumerate((5, 1, 4, 2, 3))])
    model = nn.Linear(1, 1)
    with whet.Session(model, sgd(model), torch.randn(8, 1), global_batch_size=4) as session:
        seen = [int(row[0]) for micro in session.batches({"x": column}) for row in micro.x.values]
    assert seen == [0, 1, 2, 3, 4]


def test_metrics_may_be_tensors_and_need_names_of_their_own(tmp_path: Path) -> None:
    model = convnet()
    with whet.Session(
        model, sgd(model), images(16, seed=0), global_batch_size=8, run=tmp_path / "run", goal="accuracy"
    ) as session:
        for batch in session:
            session.step(cross_entropy(model), batch)
            session.log(accuracy=torch.tensor(0.5))
        with pytest.raises(WhetError, match="a reserved name"):
            session.log(step=3)
    assert whet.summarize(tmp_path / "run").metrics == {"accuracy": 0.5}


def test_a_missed_evaluation_is_made_up(tmp_path: Path) -> None:
    calls: list[int] = []

    def evaluate(model, micro_batches):
        calls.append(len(list(micro_batches)))
        if len(calls) in (1, 3):
            raise ZeroDivisionError
        return {"accuracy": 0.5}

    options = {"evaluate": evaluate, "val": images(8, seed=1), "test": images(8, seed=2), "run": tmp_path / "run"}
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            train(convnet(), images(16, seed=0), **options)
    assert train(convnet(), images(16, seed=0), **options).metrics == {"test_accuracy": 0.5}
    again = train(convnet(), images(16, seed=0), **options)
    assert again.metrics == {"accuracy": 0.5, "test_accuracy": 0.5}, "of the earlier sessions"
    assert whet.summarize(tmp_path / "run").metrics == {"accuracy": 0.5, "test_accuracy": 0.5}
    assert len(calls) == 4, "dev failed, dev, test failed, test"


def test_an_infinite_goal_is_never_the_best(tmp_path: Path) -> None:
    scores = iter([math.inf, 3.0])
    result = train(
        convnet(),
        images(8, seed=0),
        epochs=2,
        evaluate=lambda model, micro_batches: {"perplexity": next(scores)},
        val=images(8, seed=1),
        goal="perplexity",
        mode="min",
        schedule="plateau",
        run=tmp_path / "run",
    )
    assert result.state == "done"


class DtypeDataset(torch.utils.data.Dataset):
    """Rows with a matrix product, to see in which precision a dataset computes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        product = torch.ones(4, 4) @ torch.ones(4, 4)
        assert product.dtype == torch.float32
        return product[0], torch.zeros(1)


def output_dtypes(*, measured: str | None = None, **options: Any) -> dict[str, torch.dtype]:
    """Return the dtype of a linear layer's output in a step, in a manual step and in an evaluation."""
    dtypes: dict[str, torch.dtype] = {}
    model = nn.Linear(4, 1)
    with whet.Session(model, sgd(model), DtypeDataset(), global_batch_size=4, max_steps=2, **options) as session:
        if measured is not None:
            chosen = {"precision": MeasuredSetting(value=measured, reason="faster", evidence={})}
            session.run.replan(make_plan_again(session.plan, measured=chosen))

        def loss(batch: Any) -> torch.Tensor:
            output = model(batch[0])
            dtypes["step"] = output.dtype
            return output.float().mean()

        def evaluate(model: nn.Module, batches: Any) -> dict[str, float]:
            outputs = [model(x) for x, _ in batches]
            dtypes["evaluation"] = outputs[0].dtype
            return {"mean": torch.cat(outputs).mean().item()}

        first, second = iter(session), iter(session)
        session.step(loss, next(first))
        session.evaluate(evaluate, DtypeDataset())
        with session.manual(next(second)) as (x, _):
            output = model(x)
            dtypes["manual"] = output.dtype
            output.float().mean().backward()
    return dtypes


HALF, FULL = torch.bfloat16, torch.float32


def test_a_precision_that_the_user_sets_applies_to_the_users_code() -> None:
    """The dataset computes in float32 all the same, which it asserts itself."""
    dtypes = output_dtypes(overrides={"precision": "bf16"})
    assert dtypes == {"step": HALF, "evaluation": HALF, "manual": HALF}


def test_a_manual_step_has_no_fp16_because_its_loss_is_not_scaled() -> None:
    dtypes = output_dtypes(overrides={"precision": "fp16"})
    assert dtypes == {"step": torch.float16, "evaluation": torch.float16, "manual": FULL}


def test_a_measured_precision_does_not_apply_to_the_users_code() -> None:
    assert output_dtypes(measured="bf16") == {"step": HALF, "evaluation": FULL, "manual": FULL}


def test_a_manual_step_in_bf16_uses_the_weights_as_they_are() -> None:
    """Autocast keeps converted weights, which may come from a pass without gradients or from before an update."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.ones(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"global_batch_size": 4, "max_steps": 1, "overrides": {"precision": "bf16"}}
    with whet.Session(model, optimizer, DtypeDataset(), **options) as session, session.manual(next(iter(session))):
        with torch.no_grad():
            before = model(x)
        model(x).sum().backward()
        assert model.weight.grad is not None
        optimizer.step()
        assert not torch.equal(model(x), before)


def test_an_evaluation_in_bf16_may_change_weights() -> None:
    """As stochastic weight averaging does."""
    torch.manual_seed(0)
    model, losses = nn.Linear(4, 1), []

    def evaluate(model: nn.Linear, batches: Any) -> dict[str, float]:
        (x,) = [x for x, _ in batches]
        for _ in range(2):
            losses.append(float(model(x).sum()))
            model.weight.mul_(3)
        return {"sum": losses[-1]}

    options = {"global_batch_size": 4, "max_steps": 1, "overrides": {"precision": "bf16"}}
    with whet.Session(model, sgd(model), DtypeDataset(), **options) as session:
        session.step(lambda batch: model(batch[0]).float().mean(), next(iter(session)))
        model.bias.data.zero_()
        session.evaluate(evaluate, torch.utils.data.Subset(DtypeDataset(), range(4)))
    assert losses[1] == pytest.approx(3 * losses[0], rel=1e-2)
