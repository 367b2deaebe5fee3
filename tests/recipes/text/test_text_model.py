"""The small encoder: logits and gradients of a text do not depend on padding, packing or other texts."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from whet.data.batch import Packed, Padded, Ragged
from whet.recipes.text.config import TextArch, count_parameters
from whet.recipes.text.model import Encoder

pytestmark = pytest.mark.torch

ARCH = TextArch(hidden_size=32, layers=2, heads=4, max_length=24, vocab_size=300)
LENGTHS = (3, 24, 1, 7, 12, 7)


@pytest.fixture
def model() -> Encoder:
    """Weights larger than the initial ones, so that attention and positions matter as much as the tokens."""
    torch.manual_seed(0)
    made = Encoder(ARCH, num_classes=6)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


@pytest.fixture
def column() -> Ragged:
    draw = torch.Generator().manual_seed(1)
    return Ragged.of([torch.randint(1, ARCH.vocab_size, (length,), generator=draw) for length in LENGTHS])


def packed(column: Ragged, rows: Tensor) -> Packed:
    lengths = column.lengths[rows]
    return column.packed(rows, max_length=int(lengths.max()), total=int(lengths.sum()))


def loss_and_gradient(model: Encoder, tokens: Padded | Packed, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    logits = model(tokens)
    functional.cross_entropy(logits, labels).backward()
    return logits.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "arch", [ARCH, TextArch(), TextArch(hidden_size=48, layers=3, heads=2, max_length=7, vocab_size=512)]
)
@pytest.mark.parametrize("num_classes", [2, 6])
def test_parameter_count_is_exact(arch: TextArch, num_classes: int) -> None:
    model = Encoder(arch, num_classes=num_classes)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(arch, num_classes=num_classes)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [4, 2, 5], [3, 5], [1], [2, 2, 0]])
def test_packed_and_padded_results_agree(model: Encoder, column: Ragged, rows: list[int]) -> None:
    chosen, labels = torch.tensor(rows), torch.arange(len(rows))
    logits, gradient = loss_and_gradient(model, column.padded(chosen, length=24), labels)
    other_logits, other_gradient = loss_and_gradient(model, packed(column, chosen), labels)
    torch.testing.assert_close(other_logits, logits, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(other_gradient, gradient, strict=True):
        assert torch.linalg.vector_norm(ours - theirs) <= 1e-5 * torch.linalg.vector_norm(theirs) + 1e-7


def test_padding_does_not_change_results(model: Encoder, column: Ragged) -> None:
    rows, labels = torch.tensor([0, 3, 4]), torch.arange(3)
    tight = column.padded(rows, length=12)
    wide = column.padded(rows, length=30)
    place = torch.arange(30)
    garbage = Padded(values=torch.where(place < wide.lengths[:, None], wide.values, 17), lengths=wide.lengths)
    logits, gradient = loss_and_gradient(model, tight, labels)
    for padded in (wide, garbage):
        other_logits, other_gradient = loss_and_gradient(model, padded, labels)
        torch.testing.assert_close(other_logits, logits, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(other_gradient, gradient, strict=True):
            assert torch.linalg.vector_norm(ours - theirs) <= 1e-5 * torch.linalg.vector_norm(theirs) + 1e-7


def test_texts_of_a_batch_are_independent(model: Encoder, column: Ragged) -> None:
    alone = model(packed(column, torch.tensor([3])))
    for rows in ([0, 3], [3, 1], [5, 2, 3, 4]):
        chosen = torch.tensor(rows)
        for batch in (packed(column, chosen), column.padded(chosen, length=24)):
            torch.testing.assert_close(model(batch)[rows.index(3)], alone[0], rtol=1e-5, atol=1e-5)


def test_gradients_stay_within_a_text(model: Encoder, column: Ragged) -> None:
    model.tokens.weight.grad = None
    model(packed(column, torch.tensor([0, 4])))[0].sum().backward()
    touched = set(model.tokens.weight.grad.abs().sum(1).nonzero().flatten().tolist())
    assert touched == set(column[0].tolist())


def test_word_order_changes_the_logits(model: Encoder, column: Ragged) -> None:
    backwards = Ragged.of([column[4].flip(0)])
    forwards = Ragged.of([column[4]])
    row = torch.tensor([0])
    assert (model(packed(forwards, row)) - model(packed(backwards, row))).abs().max() > 1e-2


def plain_attention(queries: Tensor, keys: Tensor, values: Tensor, *, attn_mask: Tensor, dropout_p: float) -> Tensor:
    """Attention by its formula: NaN for a text without visible tokens."""
    assert dropout_p == 0
    scores = queries @ keys.transpose(-2, -1) / queries.shape[-1] ** 0.5
    return scores.masked_fill(~attn_mask, -torch.inf).softmax(-1) @ values


@pytest.mark.parametrize("attention", [functional.scaled_dot_product_attention, plain_attention])
def test_an_empty_text_produces_no_nan(
    model: Encoder, column: Ragged, monkeypatch: pytest.MonkeyPatch, attention: object
) -> None:
    """Kernels differ in the softmax over nothing, so it must not occur."""
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    with_empty = Ragged.of([column[0], column[0][:0], column[3]])
    rows, labels = torch.arange(3), torch.arange(3)
    for batch in (packed(with_empty, rows), with_empty.padded(rows, length=9)):
        logits, gradient = loss_and_gradient(model, batch, labels)
        assert logits.isfinite().all()
        assert all(part.isfinite().all() for part in gradient)
        torch.testing.assert_close(logits[1], model.classifier.bias.detach())


def test_initial_weights_depend_on_the_seed() -> None:
    def first(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return list(Encoder(ARCH, num_classes=6).parameters())

    assert all(torch.equal(one, other) for one, other in zip(first(3), first(3), strict=True))
    assert not torch.equal(first(3)[0], first(4)[0])


def test_the_forward_pass_does_not_synchronize(model: Encoder, column: Ragged) -> None:
    """Tensors on `meta` have no values: a branch on one, or an .item(), raises."""
    rows = torch.tensor([0, 1, 4])
    on_meta = model.to("meta")
    for batch in (packed(column, rows), column.padded(rows, length=24)):
        values = {name: getattr(batch, name) for name in ("values", "lengths", "starts") if hasattr(batch, name)}
        moved = {name: tensor.to("meta") for name, tensor in values.items()}
        if isinstance(batch, Packed):
            moved["max_length"] = batch.max_length
        assert on_meta(type(batch)(**moved)).shape == (3, 6)


@pytest.mark.parametrize("kind", ["dropout", "word_dropout"])
def test_dropout_applies_in_training_only(kind: str, column: Ragged) -> None:
    torch.manual_seed(0)
    model = Encoder(ARCH, num_classes=6, **{kind: 0.5})
    batch = packed(column, torch.tensor([0, 1]))
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


def test_word_dropout_zeroes_embeddings_and_keeps_positions(model: Encoder, column: Ragged) -> None:
    model.word_dropout = 1.0
    texts = [packed(column, torch.tensor([row])) for row in (3, 5)]
    assert torch.equal(*(model(text) for text in texts)), "both are seven tokens long"
    model.eval()
    assert not torch.equal(*(model(text) for text in texts))
