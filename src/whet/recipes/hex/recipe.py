"""The Hex recipe: train a policy and value net.

Methods import torch lazily, so that a training plan can be made without it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.plan.workload import Workload
from whet.recipes.hex.config import HexConfig, check_board_size, check_data_path, check_splits, describe_hex
from whet.recipes.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from whet.config.resolve import ResolvedConfig
    from whet.data.batch import DictBatch
    from whet.recipes.hex.arena import Contest
    from whet.recipes.hex.data import HexData
    from whet.recipes.hex.model import HexNet, LossWeights


class HexRecipe(Recipe):
    """Trains a Hex net on recorded games, or on generated games of the two-distance player if no data is given."""

    name = "hex"
    Config = HexConfig
    goal = "policy_top1"
    _weights: "LossWeights | None" = None

    def describe(self, config: HexConfig, data: "HexData | None" = None) -> Workload:
        check_data_path(config)
        if data is not None:
            return describe_hex(config, size=data.size, num_samples=len(data.train["move"]))
        if config.data is None:
            return describe_hex(config)
        from whet.recipes.hex.game.game_folder import SPLITS, read_manifest

        manifest = read_manifest(Path(config.data))
        check_board_size(config, manifest.size)
        check_splits(*(manifest.splits[name].positions for name in SPLITS))
        num_samples = manifest.splits["train"].positions * (2 if config.augment else 1)
        return describe_hex(config, size=manifest.size, num_samples=num_samples)

    def data(self, config: HexConfig) -> "HexData":
        from whet.recipes.hex.data import read_data

        return read_data(config)

    def model(self, config: HexConfig, data: "HexData") -> "HexNet":  # noqa: ARG002
        from whet.recipes.hex.model import HexNet, LossWeights

        self._weights = LossWeights(
            policy=config.policy_weight, value=config.value_weight, uncertainty=config.uncertainty_weight
        )
        return HexNet(config.arch, dropout=config.dropout)

    def loss(self, model: "HexNet", micro: "DictBatch") -> "Tensor":
        from whet.recipes.hex.model import LossWeights, hex_loss

        return hex_loss(model(micro.board), micro, self._weights or LossWeights())

    def partial_metrics(self, model: "HexNet", micro_batches: Iterator["DictBatch"]) -> dict[str, Any]:
        from whet.recipes.hex.evaluation import partial_metrics

        return partial_metrics(model, micro_batches)

    def merge_metrics(self, model: "HexNet", parts: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: ARG002
        from whet.recipes.hex.evaluation import merge_metrics

        return merge_metrics(parts)

    def metadata(self, config: HexConfig, data: "HexData") -> dict[str, Any]:
        return {"size": data.size, "data": data.fingerprint, "arch": config.arch.model_dump(mode="json")}

    def play_match(self, one: str, two: str, **options: Any) -> "Contest":
        from whet.recipes.hex.arena import hold_contest

        return hold_contest(one, two, **options)

    def train_by_self_play(self, resolved: "ResolvedConfig[HexConfig]", **options: Any) -> int:
        from whet.recipes.hex.self_play import SelfPlay

        return SelfPlay(resolved=resolved, **options).run()


def recipe() -> HexRecipe:
    return HexRecipe()
