"""The causal models: causality, document boundaries, sizes and the loss."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from small_chat import SHAPES, SIZES, THINGS, WORDS, prepared, small_model
from whet.base.errors import UsageError, WhetError
from whet.checkpoint import store
from whet.config.resolve import resolve_config
from whet.data.batch import MicroBatch
from whet.device.kernels import attention as span_kernels
from whet.device.kernels.switches import use_whet_kernels
from whet.recipes.chat import model
from whet.recipes.chat.architecture import PRESETS, ChatArch
from whet.recipes.chat.config import ChatConfig
from whet.recipes.chat.data import read_chat
from whet.recipes.chat.dataset import open_dataset
from whet.recipes.chat.evaluation import merge_metrics, partial_metrics
from whet.recipes.chat.model import build_model, document_attention, next_token_loss
from whet.recipes.chat.prepare import PrepareOptions, prepare_data
from whet.recipes.chat.recipe import ChatRecipe
from whet.recipes.layers import AttentionArgs
from whet.recipes.runner import train_recipe
from whet.verify.start.causality import find_leak

pytestmark = pytest.mark.torch


def rows_of_documents() -> MicroBatch:
    """Three rows of two documents and padding."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 59, (3, 25), generator=draw, dtype=torch.int32)
    is_start = torch.zeros(3, 25, dtype=torch.bool)
    for row, (second, padding) in enumerate(((9, 20), (4, 23), (15, 24))):
        is_start[row, [0, second, padding]] = True
        tokens[row, padding:] = 0
    is_loss = (torch.rand(3, 25, generator=draw) < 0.5) & ~is_start & (tokens != 0)
    fields = {"tokens": tokens, "is_start": is_start, "is_loss": is_loss}
    return MicroBatch(fields=fields, ids=np.arange(3))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_depend_only_on_earlier_tokens_of_the_same_document(shape: dict[str, object]) -> None:
    model, micro = small_model(**shape), rows_of_documents()
    assert find_leak(partial(ChatRecipe().outputs, model), micro) is None
    with torch.no_grad():
        together = model.logits(model(micro.tokens, micro.is_start)[-1])
        alone = model.logits(model(micro.tokens[:1, 9:20], micro.is_start[:1, 9:20])[-1])
    assert torch.allclose(together[:1, 9:20], alone, atol=1e-5)


def test_spans_equal_the_mask_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: every tensor counts as one on CUDA in half precision."""
    micro = rows_of_documents()
    like = torch.zeros(1)
    masked = document_attention(micro.is_start, head_size=32, like=like)
    monkeypatch.setattr(span_kernels, "is_supported", lambda _: True)
    with use_whet_kernels("attention"):
        look = document_attention(micro.is_start, head_size=32, like=like)
    assert look.spans is not None
    assert masked.mask is not None
    assert masked.rotation is not None
    assert look.rotation is not None
    rows, length = micro.is_start.shape
    places = torch.arange(rows * length)
    firsts = look.spans.starts.long()
    is_visible = (firsts[:, None] == firsts) & (places[:, None] >= places)
    assert torch.equal(is_visible, torch.block_diag(*(masked.mask[:, 0] == 0)).bool())
    for table, ours in zip(masked.rotation, look.rotation, strict=True):
        assert torch.equal(table.flatten(0, 2), ours[places - firsts])
    begin, end, first, last = look.spans.tiles.T.long()
    assert (int(begin[0]), int(end[-1])) == (0, rows * length)
    assert torch.equal(begin[1:], end[:-1])
    assert torch.equal(first, firsts[begin])
    for one, behind in zip(end.tolist(), last.tolist(), strict=True):
        assert firsts[one - 1] == firsts[behind - 1], "of one span"
        assert behind == len(firsts) or firsts[behind] == behind, "and that ends there"


def test_non_causal_attention_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: no mask at all."""

    def everywhere(is_start: torch.Tensor, **_: object) -> AttentionArgs:
        return AttentionArgs()

    monkeypatch.setattr(model, "document_attention", everywhere)
    actual = find_leak(partial(ChatRecipe().outputs, small_model()), rows_of_documents())
    assert actual is not None
    assert actual.change > 0.01


@pytest.mark.slow
def test_a_leaking_model_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same fault in `whet train chat`."""
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(model, "document_attention", lambda is_start, **_: AttentionArgs())
    resolved = resolve_config(ChatRecipe.Config, [f"data={prepared(tmp_path)}", *WORDS, "global_batch_size=4"])
    with pytest.raises(WhetError, match="causal"):
        train_recipe(ChatRecipe(), resolved, run=tmp_path / "run", device="cpu")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parameter_counts_are_exact(shape: dict[str, object]) -> None:
    arch = ChatArch.model_validate({**SIZES, **shape})
    model = build_model(arch, vocab_size=60)
    assert sum(weights.numel() for weights in model.parameters()) == arch.num_parameters(60)


def test_a_gpt_matches_the_parameters_or_the_compute_of_a_trm() -> None:
    trm = ChatArch(**PRESETS["tiny"], H_cycles=3, L_cycles=6, seq_len=512)
    same_size = trm.model_copy(update={"kind": "gpt", "match": "parameters"})
    same_cost = trm.model_copy(update={"kind": "gpt", "match": "compute"})
    assert same_size.num_parameters(4096) == trm.num_parameters(4096)
    assert same_cost.token_flops(4096) == trm.token_flops(4096)
    assert (trm.applications, same_cost.depth, same_size.depth) == (42, 42, 2)
    # The last outer cycle of three has gradients: 42 forward, twice 14 back.
    assert trm.training_flops(0) * 3 * 42 == same_cost.training_flops(0) * (42 + 28)


@pytest.mark.parametrize(
    ("words", "what"),
    [(["arch.mlp_t=true"], "not causal"), (["arch.num_heads=3"], "num_heads"), (["arch=lstm"], "arch.kind must be")],
)
def test_invalid_architectures_are_errors(words: list[str], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        resolve_config(ChatRecipe.Config, words)


def test_arch_by_name_and_presets() -> None:
    config = resolve_config(ChatRecipe.Config, ["arch=gpt", "arch.preset=small", "arch.num_heads=8"]).config
    assert (config.arch.kind, config.arch.hidden_size, config.arch.num_heads) == ("gpt", 768, 8)


def test_loss_weighs_tokens_however_the_batch_is_split() -> None:
    model, micro = small_model(supervision=2), rows_of_documents()
    parts = [
        MicroBatch(fields={name: field[rows] for name, field in micro.fields.items()}, ids=micro.ids[rows])
        for rows in (slice(0, 1), slice(1, 3))
    ]
    total, weight = next_token_loss(model, micro)
    sums, weights = zip(*(next_token_loss(model, part) for part in parts), strict=True)
    assert weight == sum(weights) == micro.is_loss.sum()
    assert torch.allclose(total, torch.stack(sums).sum(), rtol=1e-5)


def test_rows_mark_assistant_tokens_and_evaluation_weighs_them_equally(tmp_path: Path) -> None:
    """The loss of an untrained model is the log of the vocabulary size."""
    data, dataset = prepared(tmp_path), open_dataset(tmp_path / "prepared")
    read = read_chat(resolve_config(ChatRecipe.Config, [f"data={data}", *WORDS]).config)
    facts, tokenizer = dataset.train.facts, dataset.tokenizer
    assert int(read.train["is_loss"].sum()) == facts.loss_tokens
    assert int(read.train["loss_bytes"].sum()) == facts.loss_bytes
    row = {name: column[0] for name, column in read.train.items()}
    learned = tokenizer.decode_with_marks(row["tokens"][row["is_loss"]].tolist())
    assert set(learned.replace("<|end|>", "").split(".")) <= {"Yes", "", *(f"You want {thing}" for thing in THINGS)}
    padding = row["tokens"] == tokenizer.pad_id
    assert bool(padding[-1])
    assert not bool((row["is_loss"] & padding).any())
    model = small_model(vocab_size=tokenizer.vocab_size, tied=True)
    with torch.no_grad():
        model.tokens.weight.zero_()
        micro_batches = iter([MicroBatch(fields=dict(read.train), ids=np.arange(read.num_rows))])
        actual = merge_metrics(model, [partial_metrics(model, micro_batches)], None)
    bits = facts.loss_tokens * math.log2(tokenizer.vocab_size)
    assert actual["perplexity"] == pytest.approx(tokenizer.vocab_size, rel=1e-4)
    assert actual["bits_per_byte"] == pytest.approx(bits / facts.loss_bytes, rel=1e-5)


def test_overlap_between_folders_is_reported(tmp_path: Path) -> None:
    one = prepared(tmp_path)
    others = []
    for seed in (42, 7):
        options = PrepareOptions(vocab_size=512, max_length=64, train_split=0.75, seed=seed, tokenizer=str(one))
        prepare_data(
            tmp_path / "talks.jsonl", tmp_path / f"of-{seed}", options, on_progress=lambda *_: None, in_threads=False
        )
        others.append(tmp_path / f"of-{seed}")
    notes = [read_chat(ChatConfig(data_paths=(str(one), str(other)))).notes for other in others]
    assert not any("trained on too" in note for note in notes[0])
    assert "of 16 conversations of val and test are in another" in notes[1][-1]
    with pytest.raises(UsageError, match="same folder twice"):
        read_chat(ChatConfig(data=str(one), data_paths=(f"{one}/../prepared",)))


def test_gradients_reach_every_weight_in_half_precision_too() -> None:
    """Cycles without gradients come first: their casts must not be reused in the cycle that learns."""
    model, micro = small_model(), rows_of_documents()
    actual = {}
    for dtype in (torch.float32, torch.bfloat16):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            total, weight = next_token_loss(model, micro)
        (total / weight).backward()
        actual[dtype] = {name: weights.grad for name, weights in model.named_parameters()}
    for name, exact in actual[torch.float32].items():
        half = actual[torch.bfloat16][name]
        assert half is not None, name
        assert torch.cosine_similarity(half.flatten(), exact.flatten(), dim=0) > 0.98, name


@pytest.mark.parametrize(
    "words", [("arch.supervision=2", "ema=true"), pytest.param(("arch=gpt",), marks=pytest.mark.slow)], ids=str
)
def test_a_training_in_two_sessions_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("WHET_HOME", str(tmp_path / "home"))
    common = [f"data={prepared(tmp_path)}", *WORDS, *words, "global_batch_size=4", "epochs=2", "verify=off"]
    ends = []
    for name, more in (("whole", []), ("halves", ["epochs_per_session=1"])):
        resolved = resolve_config(ChatRecipe.Config, [*common, *more])
        for _ in range(1 + len(more)):
            result = train_recipe(ChatRecipe(), resolved, run=tmp_path / name, device="cpu")
        assert result.state == "done"
        actual = store.load_newest(tmp_path / name / "checkpoints")
        assert actual is not None
        ends.append(actual[1].tensors)
    whole, halves = ends
    assert whole.keys() == halves.keys()
    assert all(torch.equal(tensor, halves[name]) for name, tensor in whole.items())
