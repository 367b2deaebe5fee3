"""Rows of made-up conversations and the recipe's recursive language model, preset medium."""

from functools import partial

import torch
from torch import Tensor, nn

from side_by_side.spec import Spec
from side_by_side.work import ForWhet, Work, resident_columns
from whet.config.resolve import resolve_config
from whet.recipes.chat import config as chat_config
from whet.recipes.chat.model import CausalModel, build_model, next_token_loss
from whet.recipes.recipe import load_recipe

SHAPES = {"full": ("medium", 512, 8_192, 32, 2_048), "cpu": ("nano", 64, 512, 8, 512), "tiny": ("nano", 16, 300, 4, 64)}
"""Preset, tokens of a row, vocabulary, global batch, rows."""
LR, LR_OF_LOSSES = 3e-4, 2e-3
"""Where losses are compared they have to move, or a wrong step would not be seen."""
DOCUMENTS = 4
"""Of a row, on average."""


class Fields:
    """What the loss asks of a micro-batch."""

    def __init__(self, tokens: Tensor, is_start: Tensor, is_loss: Tensor) -> None:
        self.tokens, self.is_start, self.is_loss = tokens, is_start, is_loss


class WithLoss(nn.Module):
    """The model as peers want it: tensors by name in, a map with the mean loss out."""

    def __init__(self, model: CausalModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, is_start: Tensor, is_loss: Tensor) -> dict[str, Tensor]:
        nats, count = next_token_loss(self.model, Fields(tokens, is_start, is_loss))  # type: ignore[arg-type]
        return {"loss": nats / count}


def make(spec: Spec) -> Work:
    preset, length, vocabulary, batch, count = SHAPES[spec.scale]
    recipe = load_recipe("chat")
    words = [f"arch.preset={preset}", f"arch.seq_len={length}", f"global_batch_size={batch}", "dropout=0"]
    config = resolve_config(recipe.Config, words).config
    torch.manual_seed(0)
    model = build_model(config.arch, vocab_size=vocabulary)
    columns = draw(count, length=length + 1, vocabulary=vocabulary)
    samples = [{name: column[row] for name, column in columns.items()} for row in range(count)]
    workload = chat_config.describe_chat(config, vocab_size=vocabulary, longest=length, num_rows=count)
    return Work(
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
        lr=LR_OF_LOSSES if spec.takes_losses else LR,
        flops=batch * length * config.arch.training_flops(vocabulary),
        words=f"{config.arch.words(vocabulary)}; {count:,} rows of {length} tokens",
    )


def draw(count: int, *, length: int, vocabulary: int) -> dict[str, Tensor]:
    """Tokens, where documents begin, and which tokens are to be predicted: every second turn, as in a conversation."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (count, length), generator=draw, dtype=torch.int32)
    # Something to learn: half of the tokens follow from the ones before.
    tokens[:, 1::2] = (tokens[:, 0 : length - 1 : 2] * 7 + 3) % vocabulary
    is_start = torch.rand((count, length), generator=draw) < DOCUMENTS / length
    is_start[:, 0] = True
    is_answer = torch.rand((count, length), generator=draw) < 0.5
    return {"tokens": tokens, "is_start": is_start, "is_loss": is_answer & ~is_start}
