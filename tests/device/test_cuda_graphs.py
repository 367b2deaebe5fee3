"""On a real CUDA GPU: captured steps train like eager steps, or report why they cannot be captured."""

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whet
from whet.data.batch import MicroBatch, Ragged
from whet.device.open import open_device
from whet.run.events import History
from whet.step.ema import Ema

pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu("cuda"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning"),
]

HERE = Path(__file__).name


class Reader(nn.Module):
    """A token classifier: embedding, masked attention, dropout, and a norm with running statistics."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(50, 32), nn.Linear(32, 96)
        self.norm, self.drop, self.head = nn.BatchNorm1d(32), nn.Dropout(dropout), nn.Linear(32, 4)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        is_real = torch.arange(values.shape[1], device=values.device) < lengths[:, None]
        q, k, v = self.qkv(self.drop(self.embed(values))).chunk(3, -1)
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=is_real[:, None, :])
        mean = (seen * is_real[..., None]).sum(1) / lengths[:, None]
        return self.head(self.drop(self.norm(mean)))


def texts(num_samples: int = 160) -> dict[str, Tensor | Ragged]:
    torch.manual_seed(5)
    lengths = torch.randint(3, 33, (num_samples,)).tolist()
    samples = Ragged.of([torch.randint(0, 50, (length,)) for length in lengths])
    return {"tokens": samples, "label": torch.randint(0, 4, (num_samples,))}


def mean(model: nn.Module, micro: MicroBatch) -> Tensor:
    return functional.cross_entropy(model(micro.tokens.values, micro.tokens.lengths), micro.label)


def by_tokens(model: nn.Module, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    losses = functional.cross_entropy(model(micro.tokens.values, micro.tokens.lengths), micro.label, reduction="none")
    return (losses * micro.tokens.lengths).sum(), micro.tokens.lengths.sum()


def train(path: Path, *, graph: str, loss=mean, dropout: float = 0.0, overrides=None, **options) -> nn.Module:
    torch.manual_seed(0)
    model = Reader(dropout)
    whet.train(
        model,
        texts(),
        loss=functools.partial(loss, model),
        optimizer=whet.OptimizerChoice(lr=1e-3),
        run=path,
        device="cuda",
        on_event=None,
        measure=False,
        **{
            "global_batch_size": 16,
            "epochs": 5,
            "clip": 1.0,
            "ema": True,
            "seed": 1,
            "schedule": "linear",
            "overrides": {
                "graph": graph,
                "micro_batch": 16,
                "lengths": "bucketed",
                "precision": "fp32",
                "verify": "off",
                "checkpoint_steps": 7,
                **(overrides or {}),
            },
            **options,
        },
    )
    return model


def events(path: Path, *kinds: str):
    return list(History(whet.open_run(path)).events(kinds=kinds))


def losses(path: Path) -> list[float]:
    return [event.fields["loss"] for event in events(path, "step")]


def num_replayed(path: Path) -> int:
    return sum("graph" in event.fields["seconds"] for event in events(path, "step"))


def refusal(path: Path) -> str:
    reported = [event.fields.get("message", "") for event in events(path, "plan")]
    return next((line for line in reported if line.startswith("steps are not captured")), "")


@pytest.mark.parametrize("micro_batch", [16, 6])
@pytest.mark.parametrize("loss", [mean, by_tokens])
def test_50_losses_are_those_of_steps_that_run(loss, micro_batch: int, tmp_path: Path) -> None:
    # The model has BatchNorm, so micro-batches must be asked for.
    options = {"overrides": {"micro_batch": micro_batch}, "split_batch": True}
    models = [train(tmp_path / graph, graph=graph, loss=loss, **options) for graph in ("off", "on")]
    assert refusal(tmp_path / "on") == ""
    # With micro-batches of several lengths there are too many combinations to capture.
    assert num_replayed(tmp_path / "on") >= (25 if micro_batch == 16 else 1)
    assert len(losses(tmp_path / "on")) == 50
    assert losses(tmp_path / "on") == pytest.approx(losses(tmp_path / "off"), rel=1e-5)
    for name, tensor in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_and_a_scaler_agree_too(precision: str, tmp_path: Path) -> None:
    for graph in ("off", "on"):
        train(tmp_path / graph, graph=graph, overrides={"precision": precision})
    assert refusal(tmp_path / "on") == ""
    assert num_replayed(tmp_path / "on") >= 25
    assert losses(tmp_path / "on") == pytest.approx(losses(tmp_path / "off"), rel=2e-2)


def test_dropout_draws_the_same_masks(tmp_path: Path) -> None:
    for graph in ("off", "on"):
        train(tmp_path / graph, graph=graph, dropout=0.3)
    assert num_replayed(tmp_path / "on") >= 25
    assert losses(tmp_path / "on") == pytest.approx(losses(tmp_path / "off"), rel=1e-4)
    assert len({round(loss, 5) for loss in losses(tmp_path / "on")}) > 40


def test_a_run_with_graphs_resumes_bit_for_bit(tmp_path: Path) -> None:
    overrides = {"deterministic": "on"}
    how = {"graph": "on", "dropout": 0.3, "overrides": overrides, "schedule": "constant"}
    whole = train(tmp_path / "whole", **how)
    for max_steps in (13, 31, None):
        cut = train(tmp_path / "cut", max_steps=max_steps, **how)
    assert num_replayed(tmp_path / "cut") >= 15
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    for name, tensor in whole.state_dict().items():
        assert torch.equal(cut.state_dict()[name], tensor), name


def waits(model: nn.Module, micro: MicroBatch) -> Tensor:
    loss = mean(model, micro)
    return loss if loss.item() < 1e9 else loss * 2


def picks(model: nn.Module, micro: MicroBatch) -> Tensor:
    each = functional.cross_entropy(model(micro.tokens.values, micro.tokens.lengths), micro.label, reduction="none")
    return each[each > -1].mean()


def draws_on_the_host(model: nn.Module, micro: MicroBatch) -> Tensor:
    return mean(model, micro) * (1 + float(torch.rand(())))


def waits_unnoticed(model: nn.Module, micro: MicroBatch) -> Tensor:
    """A synchronization that torch's debug mode may miss: the capture itself fails."""
    loss = mean(model, micro)
    torch.cuda.current_stream().synchronize()
    return loss


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (waits, HERE),
        (picks, HERE),
        (draws_on_the_host, "draws from a generator on the host"),
        (waits_unnoticed, ""),
    ],
)
def test_a_step_that_cannot_be_captured_is_reported_and_trains_eagerly(loss, reason: str, tmp_path: Path) -> None:
    for graph in ("off", "on"):
        train(tmp_path / graph, graph=graph, loss=loss, dropout=0.3)
    assert refusal(tmp_path / "on")
    assert reason in refusal(tmp_path / "on")
    assert num_replayed(tmp_path / "on") == 0
    assert losses(tmp_path / "on") == pytest.approx(losses(tmp_path / "off"), rel=1e-4)
    # The device still works.
    device = open_device("cuda").device
    device.memory.empty_cache()
    assert torch.rand(8, device=device.torch_device).isfinite().all()
    train(tmp_path / "after", graph="on", dropout=0.3)
    assert num_replayed(tmp_path / "after") >= 25


def test_a_python_number_baked_into_a_graph_is_detected_and_rolled_back(tmp_path: Path) -> None:
    class Deep:
        factor = 1.0

    result = []
    for graph in ("off", "on"):
        torch.manual_seed(0)
        model, deep = Reader(), Deep()

        def loss(micro, model=model, deep=deep):
            return mean(model, micro) * deep.factor

        with whet.Session(
            model,
            whet.OptimizerChoice(lr=1e-3),
            texts(),
            run=tmp_path / graph,
            device="cuda",
            global_batch_size=16,
            epochs=3,
            seed=1,
            overrides={
                "graph": graph,
                "micro_batch": 16,
                "lengths": "bucketed",
                "verify": "off",
                "precision": "fp32",
                "checkpoint_steps": 5,
            },
        ) as session:
            for batch in session:
                deep.factor = 2.0 if session.state.step >= 8 else 1.0
                session.step(loss, batch)
        result.append({event.step: event.fields["loss"] for event in events(tmp_path / graph, "step")})
    assert "a graph does not see" in refusal(tmp_path / "on")
    assert result[1] == pytest.approx(result[0], rel=1e-5)


def test_a_share_in_a_tensor_averages_with_the_same_bits() -> None:
    device = open_device("cuda").device
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        model = nn.Linear(70, 50).to(device.torch_device, dtype)
        numbers, tensors = Ema(model), Ema(model)
        for step in (1, 2, 9, 80, 9_000):
            with torch.no_grad():
                model.weight.add_(torch.randn_like(model.weight))
            numbers.update_by(numbers.share(step))
            tensors.update_by(torch.tensor(tensors.share(step), dtype=torch.float64, device=device.torch_device))
            for name, value in numbers.average.items():
                assert torch.equal(tensors.average[name], value), (dtype, step, name)


# --- the user's optimizer --------------------------------------------------------------------------------------------


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))


def train_own(path: Path, make, *, graph: str, schedule=None) -> tuple[list[float], torch.optim.Optimizer]:
    model = small_net()
    optimizer = make(model.parameters())
    torch.manual_seed(1)
    whet.train(
        model,
        (torch.randn(256, 16), torch.randint(0, 4, (256,))),
        loss=functional.cross_entropy,
        optimizer=optimizer,
        global_batch_size=32,
        epochs=10,
        run=path,
        device="cuda",
        measure=False,
        on_event=None,
        overrides={"graph": graph, "precision": "fp32"},
        **({} if schedule is None else {"schedule": schedule(optimizer)}),
    )
    return [e.fields["loss"] for e in History(whet.open_run(path)).events(kinds=("step",))], optimizer


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=80)


@pytest.mark.parametrize("schedule", [None, lambda _: "cosine", one_cycle])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_users_optimizer_is_captured_and_trains_like_eager_steps(kind, schedule, tmp_path: Path) -> None:
    def make(parameters):
        return kind(parameters, lr=1e-2, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))

    captured, optimizer = train_own(tmp_path / "on", make, graph="on", schedule=schedule)
    eager, _ = train_own(tmp_path / "off", make, graph="off", schedule=schedule)
    assert captured == pytest.approx(eager, rel=1e-4)
    assert whet.open_run(tmp_path / "on").plan["settings"]["graph"]["value"] == "on"
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    assert not optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.RMSprop,
        torch.optim.NAdam,
        torch.optim.Adafactor,
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=True),
    ],
)
def test_a_step_is_captured_with_or_without_its_update(make, tmp_path: Path) -> None:
    captured, _ = train_own(tmp_path / "on", make, graph="on")
    eager, _ = train_own(tmp_path / "off", make, graph="off")
    assert captured == pytest.approx(eager, rel=1e-4)
    assert whet.open_run(tmp_path / "on").plan["settings"]["graph"]["value"] == "on"


def test_small_steps_are_launch_bound_and_captured_without_a_measurement(tmp_path: Path) -> None:
    train_own(tmp_path / "run", torch.optim.AdamW, graph="launch_bound")
    assert whet.open_run(tmp_path / "run").plan["settings"]["graph"]["value"] == "on"
