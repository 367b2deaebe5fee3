"""Random Hex positions on 13 x 13 boards and the residual net of the recipe: 18 blocks of 128 channels."""

from functools import partial

import torch
from torch import Tensor, nn

from side_by_side.spec import Spec
from side_by_side.workload import ForWhet, PeerWorkload, resident_columns
from whet.config.resolve import resolve_config
from whet.data.batch import DictBatch
from whet.recipes.hex import config as hex_config
from whet.recipes.hex.model import HexNet, LossWeights, hex_loss
from whet.recipes.recipe import load_recipe

SIZE = 13
SHAPES = {"full": (18, 128, 1024, 32_768), "cpu": (3, 32, 64, 4_096), "tiny": (1, 8, 16, 256)}
"""Blocks, channels, global batch, positions."""
LR, LR_FOR_LOSSES = 1e-3, 5e-3
"""A higher rate for comparing losses, which must change noticeably for a wrong step to show."""


class WithLoss(nn.Module):
    """The net for peers: named tensors in, a dict with the loss out."""

    def __init__(self, net: HexNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, board: Tensor, move: Tensor, win: Tensor) -> dict[str, Tensor]:
        return {"loss": hex_loss(self.net(board), DictBatch(move=move, win=win), LossWeights())}


def make(spec: Spec) -> PeerWorkload:
    depth, width, batch, count = SHAPES[spec.scale]
    recipe = load_recipe("hex")
    args = [f"arch.depth={depth}", f"arch.width={width}", f"size={SIZE}", f"global_batch_size={batch}"]
    config = resolve_config(recipe.Config, args).config
    torch.manual_seed(0)
    net = HexNet(config.arch)
    columns = draw(count)
    samples = [{name: column[row] for name, column in columns.items()} for row in range(count)]
    workload = hex_config.describe_hex(config, size=SIZE, num_samples=count)
    return PeerWorkload(
        model=WithLoss(net),
        samples=samples,
        collate=torch.utils.data.default_collate,
        collate_fixed=None,
        resident=partial(resident_columns, columns, batch),
        for_whet=lambda: ForWhet(model=net, data=columns, loss=partial(recipe.loss, net), workload=workload),
        batch=batch,
        lr=LR_FOR_LOSSES if spec.records_losses else LR,
        # Two 3 x 3 convolutions per block, and the first one.
        flops=batch * 6 * SIZE**2 * 9 * (2 * depth * width**2 + 4 * width),
        description=f"Residual net of {depth} blocks, {width} channels, on {SIZE} x {SIZE} boards; {count:,} positions",
        is_image_like=True,
    )


def draw(count: int) -> dict[str, Tensor]:
    """Draw boards, moves to empty cells, and winners."""
    draw = torch.Generator().manual_seed(0)
    board = torch.randint(0, 3, (count, SIZE, SIZE), generator=draw, dtype=torch.uint8)
    move = torch.randint(0, SIZE**2, (count,), generator=draw)
    board.view(count, -1)[torch.arange(count), move] = 0
    # Learnable: the player with more stones wins.
    win = ((board == 1).flatten(1).sum(1) > (board == 2).flatten(1).sum(1)).float()
    return {"board": board, "move": move, "win": win}
