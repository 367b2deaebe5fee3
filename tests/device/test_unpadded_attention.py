"""On a real CUDA GPU: unpadded attention equals padded attention, and whole steps are captured."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whet
from whet.data.batch import Packed, Ragged
from whet.device.kernels import attention as kernels
from whet.device.kernels.switches import use_whet_kernels
from whet.plan.plan import read_plan
from whet.recipes.text import attention as text_attention
from whet.recipes.text.bert import Bert
from whet.recipes.text.config import TextArch
from whet.recipes.text.model import Encoder
from whet.run.events import History

pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu("cuda"),
]
LENGTHS = (3, 24, 1, 70, 12, 40)


def batch(total: int | None = None) -> Packed:
    torch.manual_seed(3)
    column = Ragged.of([torch.randint(1, 200, (length,)) for length in LENGTHS])
    plain = column.packed(torch.arange(len(LENGTHS)), max_length=max(LENGTHS), total=sum(LENGTHS))
    filled = plain if total is None else column.filled(plain, total=total, num_fillers=2)
    return filled.map_tensors(lambda tensor: tensor.cuda())


def bert(**changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 200,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 80,
        "num_labels": 3,
        "initializer_range": 0.08,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    config = transformers.BertConfig(**{**sizes, **changes})
    return Bert.of(transformers.BertForSequenceClassification(config).train())


def small() -> nn.Module:
    torch.manual_seed(0)
    return Encoder(TextArch(hidden_size=64, layers=2, heads=4, max_length=80, vocab_size=300), num_classes=3)


def answer(model: nn.Module, tokens: Packed, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    with torch.autocast("cuda", dtype):
        logits = model(tokens)
    functional.cross_entropy(logits.float(), torch.arange(len(LENGTHS)).cuda() % 3).backward()
    return logits.detach().float(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("make", [bert, small])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_equals_padded_attention(make: Any, dtype: torch.dtype, monkeypatch: Any) -> None:
    model = make().cuda()
    calls = []
    kernel = kernels.varlen_attention
    with monkeypatch.context() as patched:
        patched.setattr(text_attention, "varlen_attention", lambda *a, **k: calls.append(1) or kernel(*a, **k))
        result = [answer(model, batch(total), dtype) for total in (None, 192, 256)]
    assert calls
    with monkeypatch.context() as patched:
        patched.setattr(text_attention, "has_varlen_kernel", lambda *_, **__: False)
        logits, gradients = answer(model, batch(), dtype)
        exact = model(batch()).detach()
    noise = (logits - exact).abs().max()
    for ours, ours_gradients in result:
        assert (ours - exact).abs().max() <= 2 * noise + 1e-3
        for mine, theirs in zip(ours_gradients, gradients, strict=True):
            assert torch.isfinite(mine).all()
            assert (mine - theirs).norm() <= 0.05 * theirs.norm() + 1e-4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler warns about torch's own code
@pytest.mark.parametrize("is_own", [False, True])
def test_compiled_it_is_the_same(is_own: bool) -> None:
    """Regression of torch's compiler: it read a view from the start of its storage, so all positions were wrong."""
    model = bert(num_attention_heads=2).cuda()
    with use_whet_kernels("attention") if is_own else contextlib.nullcontext():
        logits, gradients = answer(model, batch(192), torch.bfloat16)
        compiled = torch.compile(model, dynamic=True)
        result, found_gradients = answer(compiled, batch(192), torch.bfloat16)
    assert (result - logits).abs().max() <= 2e-2 * logits.abs().max()
    largest = max(gradient.norm() for gradient in gradients)
    for one, other in zip(found_gradients, gradients, strict=True):
        assert (one - other).norm() <= 5e-2 * other.norm() + 1e-3 * largest


def test_attention_dropout_has_the_right_mean(monkeypatch: Any) -> None:
    torch.manual_seed(0)
    mixture = torch.randn(sum(LENGTHS), 3 * 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    starts = batch().starts
    how = {"num_heads": 4, "max_length": max(LENGTHS)}
    plain = kernels.varlen_attention(mixture, starts, **how)
    dropped = [kernels.varlen_attention(mixture, starts, **how, dropout=0.3) for _ in range(400)]
    assert not torch.equal(dropped[0], dropped[1])
    assert (torch.stack(dropped).float().mean(0) - plain.float()).abs().mean() < 0.05
    dropped[0].float().sum().backward()
    assert torch.isfinite(mixture.grad).all()


def losses(path: Path) -> list[float]:
    return [event.fields["loss"] for event in History(whet.open_run(path)).events(kinds=("step",))]


def num_replayed(path: Path) -> int:
    return sum("graph" in event.fields["seconds"] for event in History(whet.open_run(path)).events(kinds=("step",)))


@pytest.mark.parametrize("micro_batch", [16, 8])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_whole_steps_without_padding_are_captured(tmp_path: Path, micro_batch: int, dropout: float) -> None:
    torch.manual_seed(5)
    samples = Ragged.of([torch.randint(1, 200, (int(length),)) for length in torch.randint(3, 71, (320,))])
    data = {"tokens": samples, "label": torch.stack([samples[row].max() for row in range(320)]) % 3}
    for graph in ("off", "on"):
        model = bert(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
        whet.train(
            model,
            data,
            loss=lambda micro, model=model: functional.cross_entropy(model(micro.tokens), micro.label),
            optimizer=whet.OptimizerChoice(lr=1e-4),
            run=tmp_path / graph,
            device="cuda",
            on_event=None,
            measure=False,
            split_batch=True,
            global_batch_size=16,
            epochs=5,
            clip=1.0,
            seed=1,
            schedule="linear",
            overrides={
                "graph": graph,
                "lengths": "packed_bucketed",
                "precision": "bf16",
                "micro_batch": micro_batch,
                "verify": "off",
            },
        )
    plan = read_plan(whet.open_run(tmp_path / "on").plan, where="plan")
    assert plan.graph == "on", plan.settings["graph"].reason
    assert num_replayed(tmp_path / "on") >= 50
    assert losses(tmp_path / "on") == pytest.approx(losses(tmp_path / "off"), rel=2e-2)
