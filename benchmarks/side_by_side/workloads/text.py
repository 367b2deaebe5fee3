"""Text classification with a model of BERT's shape: random tokens, with the text lengths of SciCite."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from side_by_side.spec import Spec
from side_by_side.workload import Batch, ForWhet, PeerWorkload

LONGEST, MEAN, CLASSES = 128, 46.5, 3
QUANTILES = (
    *(15, 25, 28, 30, 32, 33, 35, 37, 38, 40, 41, 43, 44, 46, 48, 49, 51, 53, 55, 57, 59, 61, 63, 66, 69, 72, 74),
    *(78, 82, 87, 94, 108, 128),
)
"""32-quantiles of the lengths of SciCite's training texts with BERT's tokenizer (mean 55.4), scaled to MEAN below."""
SHAPES = {
    "full": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "cpu": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512},
    "tiny": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
}
NUM_TEXTS = {"full": 8192, "cpu": 4096, "tiny": 1024}
LR = 2e-5
LR_FOR_LOSSES = {"full": 1e-4, "cpu": 1e-3, "tiny": 1e-3}
"""Higher rates for comparing losses, which must change noticeably for a wrong step to show."""


def make(spec: Spec) -> PeerWorkload:
    from transformers import BertConfig, BertForSequenceClassification

    batch = int(spec.workload.removeprefix("text"))
    dropout = 0.1 if spec.has_dropout else 0.0
    config = BertConfig(
        vocab_size=30_522 if spec.scale == "full" else 2_000,
        max_position_embeddings=512 if spec.scale == "full" else LONGEST,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
        problem_type="single_label_classification",
        attn_implementation="sdpa",
        **SHAPES[spec.scale],
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    texts = [torch.from_numpy(text) for text in draw_texts(NUM_TEXTS[spec.scale], vocabulary=config.vocab_size)]
    # Learnable: the class follows from the first token after the start token.
    labels = torch.stack([text[1] % CLASSES for text in texts])
    samples = list(zip(texts, labels, strict=True))
    lengths = torch.tensor([len(text) for text in texts])
    return PeerWorkload(
        model=model,
        samples=samples,
        collate=partial(collate, length=None),
        collate_fixed=partial(collate, length=LONGEST),
        resident=partial(resident, texts, labels, batch),
        for_whet=partial(for_whet, model, texts, labels, batch, dropout),
        batch=batch,
        lr=LR_FOR_LOSSES[spec.scale] if spec.records_losses else LR,
        flops=batch * flops_of_text(lengths, SHAPES[spec.scale]),
        description=(
            f"BERT, {config.num_hidden_layers} layers of width {config.hidden_size}, hidden dropout {dropout:g}; "
            f"{len(texts):,} texts of {lengths.float().mean():.1f} tokens on average, {int(lengths.max())} at most"
        ),
    )


def draw_texts(count: int, *, vocabulary: int) -> list[np.ndarray]:
    """Draw token ids; the first one is always the same, like BERT's start token."""
    draw = np.random.default_rng(0)
    places = np.linspace(0, 1, len(QUANTILES))
    shape = np.interp(draw.random(count), places, QUANTILES)
    # The longest texts keep their length, so that batches are padded as in the real data.
    scaled = np.where(shape < 110, shape * MEAN / 55.9, shape)
    lengths = np.clip(np.rint(scaled), 8, LONGEST).astype(int)
    texts = [draw.integers(5, vocabulary, length) for length in lengths]
    for text in texts:
        text[0] = 2
    return texts


def collate(samples: list[tuple[Tensor, Tensor]], *, length: int | None) -> Batch:
    """Pad with zeros to the longest text, or to a fixed length."""
    longest = length or max(len(text) for text, _ in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, (text, _) in enumerate(samples):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.stack([label for _, label in samples])}


def resident(texts: list[Tensor], labels: Tensor, batch: int, device: str) -> Callable[[int], Batch]:
    """Put all texts on the device; the length of a batch is rounded up to a multiple of 16."""
    whole = collate(list(zip(texts, labels, strict=True)), length=LONGEST)
    there = {name: tensor.to(device) for name, tensor in whole.items()}
    lengths = np.array([len(text) for text in texts])
    num_batches = len(texts) // batch

    def batch_of(step: int) -> Batch:
        rows = slice(start := (step % num_batches) * batch, start + batch)
        length = -(-int(lengths[rows].max()) // 16) * 16
        return {
            "input_ids": there["input_ids"][rows, :length],
            "attention_mask": there["attention_mask"][rows, :length],
            "labels": there["labels"][rows],
        }

    return batch_of


def for_whet(model: Any, texts: list[Tensor], labels: Tensor, batch: int, dropout: float) -> ForWhet:
    """Load the same weights from a folder, like `whet train text model=FOLDER`."""
    from whet.config.resolve import resolve_config
    from whet.data.batch import Ragged
    from whet.recipes.recipe import load_recipe
    from whet.recipes.runner import prepare_recipe
    from whet.recipes.text.data import TextData

    folder = Path(tempfile.mkdtemp())
    model.save_pretrained(folder)
    columns = {"tokens": Ragged.of(texts), "label": labels}
    # No text is tokenized here; the recipe reads only the size of the vocabulary.
    tokenizer: Any = SimpleNamespace(vocab_size=model.config.vocab_size)
    data = TextData(
        train=columns,  # type: ignore[arg-type]
        val=columns,  # type: ignore[arg-type]
        test=columns,  # type: ignore[arg-type]
        classes=tuple(str(number) for number in range(CLASSES)),
        tokenizer=tokenizer,
        max_length=LONGEST,
        fingerprint="made up",
        mean_length=float(columns["tokens"].lengths.double().mean()),
        has_pairs=False,
        baselines={},
    )
    recipe = load_recipe("text")
    args = [f"model={folder}", f"arch.max_length={LONGEST}", f"global_batch_size={batch}"]
    args += [f"dropout={dropout:g}", "attention_dropout=0"]
    made = prepare_recipe(recipe, resolve_config(recipe.Config, args).config, data=data)
    return ForWhet(model=made.model, data=made.data.train, loss=made.loss, workload=made.workload)


def flops_of_text(lengths: Tensor, shape: dict[str, int]) -> float:
    """Mean FLOPs of training on one text: 6 per weight and token, and 12 per pair of positions."""
    width, layers, inner = shape["hidden_size"], shape["num_hidden_layers"], shape["intermediate_size"]
    weights = layers * (4 * width**2 + 2 * width * inner)
    tokens, pairs = lengths.double().mean().item(), lengths.double().square().mean().item()
    return 6 * weights * tokens + 12 * layers * width * pairs + 6 * width**2
