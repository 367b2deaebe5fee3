"""Transformers models compute padded batches without padding, with the same losses and gradients."""

import json

import pytest
import torch
from torch import nn

import whet
from whet.base.errors import UsageError
from whet.plan.plan import read_plan
from whet.step import unpadding
from whet.step.unpadding import Unpadding, unpadding_obstacle

pytestmark = pytest.mark.torch
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(**changes):
    config = transformers.BertConfig(**{**SIZES, **DROPOUT, "num_labels": 3, **changes})
    return transformers.BertForSequenceClassification(config)


def gpt2(**changes):
    config = {
        "vocab_size": 50,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 1,
        "eos_token_id": 1,
        **changes,
    }
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**config, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, loss_type="ForCausalLM")
    )


def llama(**changes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 1, **changes}))


def a_batch(model: nn.Module, *, lengths=(3, 9, 5, 12), is_left: bool = False) -> dict[str, torch.Tensor]:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    mask = mask.flip(1) if is_left else mask
    ids = torch.randint(1, 50, mask.shape) * mask
    labels = ids.masked_fill(mask == 0, -100) if isinstance(model, transformers.GenerationMixin) else ids[:, 0] % 3
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loss_and_gradients(model: nn.Module, batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_losses_and_gradients_are_those_of_the_padded_batch(make) -> None:
    torch.manual_seed(0)
    model = make().train()
    assert unpadding_obstacle(model) is None
    batch = a_batch(model)
    padded, padded_gradients = loss_and_gradients(model, batch)
    rows = []
    hook = unpadding._blocks(model)[-1].register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[:2]))
    unpadded = Unpadding(model)
    with unpadded.in_use():
        loss, gradients = loss_and_gradients(model, batch)
    hook.remove()
    assert unpadded.num_unpadded == 1
    assert rows == [(1, 29)], "the blocks saw the real tokens only"
    torch.testing.assert_close(loss, padded, rtol=1e-6, atol=0)
    assert gradients.keys() == padded_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, padded_gradients[name], rtol=1e-4, atol=1e-6)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    again, _ = loss_and_gradients(model, batch)
    assert torch.equal(again, padded), "afterwards everything is as before"


@pytest.mark.parametrize(
    "changes",
    [{"is_left": True}, {"lengths": (12, 12, 11, 12)}, {"lengths": (12, 0, 3)}],
    ids=["left", "full", "empty"],
)
def test_other_batches_are_computed_as_they_are(changes) -> None:
    model = gpt2().train()
    unpadded = Unpadding(model)
    with unpadded.in_use():
        loss_and_gradients(model, a_batch(model, **changes))
    assert unpadded.num_unpadded == 0


def test_models_that_cannot_are_named() -> None:
    assert unpadding_obstacle(nn.Linear(2, 2)) == unpadding.NO_TRANSFORMER
    assert unpadding_obstacle(nn.Sequential(bert(), bert())) == "it has several Transformers models"
    assert unpadding_obstacle(nn.Sequential(bert())) is None
    model = bert()
    model.set_attn_implementation("eager")
    assert "eager" in unpadding_obstacle(model)
    model = bert()
    model.gradient_checkpointing_enable()
    assert "checkpointing" in unpadding_obstacle(model)
    mistral = transformers.MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=4)
    assert "sliding" in unpadding_obstacle(transformers.MistralForCausalLM(mistral))
    t5 = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    assert "decoder" in unpadding_obstacle(transformers.T5ForConditionalGeneration(t5))


# --- in a run ---------------------------------------------------------------------------------------------------------


def some_rows() -> list[dict[str, object]]:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 24, (32,), generator=draw).tolist()
    ids = [torch.randint(1, 50, (length,), generator=draw).tolist() for length in lengths]
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row[0] % 3} for row in ids]


def train(path, loss=None, *, model: nn.Module | None = None, **options):
    """Return the messages of a run and the plan that it ended with."""
    torch.manual_seed(0)
    model = model or bert()
    events = []
    whet.train(
        model, some_rows(), loss=loss(model) if loss else lambda batch: model(**batch).loss, run=path,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), global_batch_size=8, epochs=2, device="cpu",
        measure=False, on_event=lambda _, fields: events.append(fields), **options,
    )  # fmt: skip
    messages = [str(event.get("message")) for event in events]
    return messages, read_plan(json.loads((path / "plan.json").read_text()), where=path)


def test_a_run_skips_padding_and_trains_the_same(tmp_path) -> None:
    messages, plan = train(tmp_path / "unpadded")
    assert plan.lengths == "unpadded"
    assert any(message.startswith("unpadded: loss and gradients agree") for message in messages)
    _, padded = train(tmp_path / "padded", overrides={"lengths": "fixed"})
    assert padded.lengths == "fixed"
    ours, theirs = (whet.load(tmp_path / name, bert()) for name in ("unpadded", "padded"))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_dropout_does_not_hide_a_difference(tmp_path) -> None:
    model = bert(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3).train()
    messages, plan = train(tmp_path / "run", model=model)
    assert plan.lengths == "unpadded"
    (message,) = (message for message in messages if message.startswith("unpadded: loss and gradients agree"))
    assert float(message.partition("padded batch (")[2].partition(")")[0]) < 1e-4
    assert all(module.training for module in model.modules())


def test_a_loss_that_reads_padding_keeps_it(tmp_path) -> None:
    def mean_of_all_positions(model):
        return lambda batch: model.bert(batch.input_ids, batch.attention_mask).last_hidden_state.square().mean()

    messages, plan = train(tmp_path / "run", mean_of_all_positions)
    assert plan.lengths == "fixed"
    assert any("the loss reads padding" in message for message in messages)


def test_attention_across_texts_is_noticed(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_long_text(layout, attention, module, query, key, value, **options):
        return attention(module, query, key, value, None, **options)

    monkeypatch.setattr(unpadding, "_attend", one_long_text)
    messages, plan = train(tmp_path / "run")
    assert plan.lengths == "fixed"
    assert any("differs from that of the padded batch" in message for message in messages)


def test_another_model_cannot_skip_padding(tmp_path) -> None:
    model = torch.nn.Linear(4, 2)
    with pytest.raises(UsageError, match="cannot skip padding"):
        whet.train(
            model,
            (torch.randn(8, 4), torch.zeros(8, dtype=torch.long)),
            loss=torch.nn.functional.cross_entropy,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            global_batch_size=4,
            overrides={"lengths": "unpadded"},
            run=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()
