"""Hex positions on 13 x 13 boards, drawn at random, and the recipe's residual net: 18 blocks of 128 channels."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from side_by_side.spec import Spec
from side_by_side.work import ForWhet, Work, resident_columns
from whet.config.resolve import resolve_config
from whet.recipes.hex import config as hex_config
from whet.recipes.hex.model import HexNet, LossWeights, hex_loss
from whet.recipes.recipe import load_recipe

SIZE = 13
SHAPES = {"full": (18, 128, 1024, 32_768), "cpu": (3, 32, 64, 4_096), "tiny": (1, 8, 16, 256)}
"""Blocks, channels, global batch, positions."""
LR, LR_OF_LOSSES = 1e-3, 5e-3
"""Where losses are compared they have to move, or a wrong step would not be seen."""


class Fields:
    """What the loss asks of a micro-batch."""

    def __init__(self, move: Tensor, win: Tensor) -> None:
        self.fields, self.move, self.win = ("move", "win"), move, win


class WithLoss(nn.Module):
    """The net as peers want it: tensors by name in, a map with the loss out."""

    def __init__(self, net: HexNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, board: Tensor, move: Tensor, win: Tensor) -> dict[str, Tensor]:
        fields: Any = Fields(move, win)
        return {"loss": hex_loss(self.net(board), fields, LossWeights())}


def make(spec: Spec) -> Work:
    depth, width, batch, count = SHAPES[spec.scale]
    recipe = load_recipe("hex")
    words = [f"arch.depth={depth}", f"arch.width={width}", f"size={SIZE}", f"global_batch_size={batch}"]
    config = resolve_config(recipe.Config, words).config
    torch.manual_seed(0)
    net = HexNet(config.arch)
    columns = draw(count)
    samples = [{name: column[row] for name, column in columns.items()} for row in range(count)]
    workload = hex_config.describe_hex(config, size=SIZE, num_samples=count)
    return Work(
        model=WithLoss(net),
        samples=samples,
        collate=torch.utils.data.default_collate,
        collate_fixed=None,
        resident=partial(resident_columns, columns, batch),
        for_whet=lambda: ForWhet(model=net, data=columns, loss=partial(recipe.loss, net), workload=workload),
        batch=batch,
        lr=LR_OF_LOSSES if spec.takes_losses else LR,
        # Two convolutions of 3 x 3 in each block, and the first one.
        flops=batch * 6 * SIZE**2 * 9 * (2 * depth * width**2 + 4 * width),
        words=f"Residual net of {depth} blocks, {width} channels, on {SIZE} x {SIZE} boards; {count:,} positions",
        is_image_like=True,
    )


def draw(count: int) -> dict[str, Tensor]:
    """Boards with some stones, a move on an empty cell, and who won."""
    draw = torch.Generator().manual_seed(0)
    board = torch.randint(0, 3, (count, SIZE, SIZE), generator=draw, dtype=torch.uint8)
    move = torch.randint(0, SIZE**2, (count,), generator=draw)
    board.view(count, -1)[torch.arange(count), move] = 0
    # Something to learn: who has more stones wins.
    win = ((board == 1).flatten(1).sum(1) > (board == 2).flatten(1).sum(1)).float()
    return {"board": board, "move": move, "win": win}
