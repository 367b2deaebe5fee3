"""Random conversations and the recursive language model of the chat recipe, preset medium."""

from functools import partial

import torch
from torch import Tensor, nn

from side_by_side.spec import Spec
from side_by_side.workload import ForWhet, PeerWorkload, resident_columns
from whet.config.resolve import resolve_config
from whet.data.batch import DictBatch
from whet.recipes.chat import config as chat_config
from whet.recipes.chat.model import CausalModel, build_model, next_token_loss
from whet.recipes.recipe import load_recipe

SHAPES = {"full": ("medium", 512, 8_192, 32, 2_048), "cpu": ("nano", 64, 512, 8, 512), "tiny": ("nano", 16, 300, 4, 64)}
"""Preset, tokens of a row, vocabulary, global batch, rows."""
LR, LR_FOR_LOSSES = 3e-4, 2e-3
"""A higher rate for comparing losses, which must change noticeably for a wrong step to show."""
DOCUMENTS = 4
"""Mean number per row."""


class WithLoss(nn.Module):
    """The model for peers: named tensors in, a dict with the mean loss out."""

    def __init__(self, model: CausalModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, is_start: Tensor, is_loss: Tensor) -> dict[str, Tensor]:
        nats, count = next_token_loss(self.model, DictBatch(tokens=tokens, is_start=is_start, is_loss=is_loss))
        return {"loss": nats / count}


def make(spec: Spec) -> PeerWorkload:
    preset, length, vocabulary, batch, count = SHAPES[spec.scale]
    recipe = load_recipe("chat")
    args = [f"arch.preset={preset}", f"arch.seq_len={length}", f"global_batch_size={batch}", "dropout=0"]
    config = resolve_config(recipe.Config, args).config
    torch.manual_seed(0)
    model = build_model(config.arch, vocab_size=vocabulary)
    columns = draw(count, length=length + 1, vocabulary=vocabulary)
    samples = [{name: column[row] for name, column in columns.items()} for row in range(count)]
    workload = chat_config.describe_chat(config, vocab_size=vocabulary, longest=length, num_rows=count)
    return PeerWorkload(
        model=WithLoss(model),
        samples=samples,
        collate=torch.utils.data.default_collate,
        collate_fixed=None,
        resident=partial(resident_columns, columns, batch),
        for_whet=lambda: ForWhet(
            model=model,
            data=columns,
            loss=partial(recipe.loss, model),
            workload=workload,
            outputs=partial(recipe.outputs, model),  # type: ignore[attr-defined]
        ),
        batch=batch,
        lr=LR_FOR_LOSSES if spec.records_losses else LR,
        flops=batch * length * config.arch.training_flops(vocabulary),
        description=f"{config.arch.summary(vocabulary)}; {count:,} rows of {length} tokens",
    )


def draw(count: int, *, length: int, vocabulary: int) -> dict[str, Tensor]:
    """Draw tokens, document starts, and a mask of predicted tokens."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (count, length), generator=draw, dtype=torch.int32)
    # Learnable: half of the tokens follow from the previous one.
    tokens[:, 1::2] = (tokens[:, 0 : length - 1 : 2] * 7 + 3) % vocabulary
    is_start = torch.rand((count, length), generator=draw) < DOCUMENTS / length
    is_start[:, 0] = True
    is_answer = torch.rand((count, length), generator=draw) < 0.5
    return {"tokens": tokens, "is_start": is_start, "is_loss": is_answer & ~is_start}
